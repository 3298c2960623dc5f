"""A learner's progress: exercises by notebook, and guesses compared with their results."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lessons.figures.drawing import NAMES, axis, bars, figure, note, rule, scatter
from lessons.figures.figure import Figure
from lessons.figures.style import COLOURS
from lessons.judging.learner import Learner, read
from lpkit.errors import ConfigError
from lpkit.tables import FAINT, GRID

MOST = 100.0        # a guess that is off by a larger factor is drawn at this factor
TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
RIGHT, WRONG, LEFT = COLOURS[4], COLOURS[2], GRID


def progress(exercises: Iterable[str]) -> Figure:
    """Return a figure of the learner's progress: exercises and guesses by notebook. `exercises`:
    names such as "03.cast"; the part before the dot is the notebook."""
    try:
        learner = read()
    except ConfigError as error:
        print(error)
        learner = Learner()
    names, tried = list(exercises), learner.exercises

    def by_notebook(names: Iterable[str]) -> Counter[str]:
        return Counter(name.partition(".")[0] for name in names)

    return Figure(progress_figure(
        right=by_notebook(name for name in names if name in tried and tried[name].right),
        wrong=by_notebook(name for name in names if name in tried and not tried[name].right),
        total=dict(sorted(by_notebook(names).items())),
        guesses=by_notebook(guess.name for guess in learner.guesses),
        scored=[guess for guess in sorted(learner.guesses, key=lambda guess: guess.name)
                if guess.factor and guess.measured is not None]))


def _ratio(guess: Any) -> float:
    """Return measured over guessed, limited to what is drawn."""
    return min(max(guess.measured / guess.value, 1 / MOST), MOST)


def progress_figure(right: Mapping[str, int], wrong: Mapping[str, int], total: Mapping[str, int],
                    guesses: Mapping[str, int], scored: Sequence[Any]) -> dict:
    """The plotly spec. Upper panel: the exercises of each notebook of `total`, and the number of
    locked guesses. Lower panel: every scored guess (`name`, `value`, `factor` of its 90% interval,
    `measured`, `held`), and how many intervals held."""
    names, parts = list(total), []
    for words, counts, colour in (("right", right, RIGHT), ("wrong so far", wrong, WRONG)):
        parts.append(bars(names, [counts.get(name, 0) for name in names], words, colour,
                          hover="%{y}: %{x}"))
    left = [total[name] - right.get(name, 0) - wrong.get(name, 0) for name in names]
    texts = [f"{right.get(name, 0)} of {total[name]}, guesses: {guesses.get(name, 0)}"
            for name in names]
    # the text of the last part is at the end of the whole bar
    parts.append(bars(names, left, "to do", LEFT, hover="%{y}: %{x}", text=texts))
    # the lower x axis is logarithmic and symmetric around 1: from 10^-width to 10^width
    width = 0.1 + max([math.log10(max(guess.factor, _ratio(guess), 1 / _ratio(guess)))
                       for guess in scored], default=1.0)
    held = sum(guess.held for guess in scored)
    below = "guesses that you lock in appear here"
    if scored:
        below = f"your 90% intervals hold {held / len(scored):.0%} of {len(scored)}"
    for words, kept, colour in (("held", True, RIGHT), ("did not hold", False, WRONG)):
        ours = [guess for guess in scored if guess.held is kept]
        for guess in ours:
            parts.append(scatter([1 / guess.factor, guess.factor], [escape(guess.name)] * 2, "",
                                 FAINT, hover=None, line={"width": 5}, opacity=0.45,
                                 showlegend=False, xaxis="x2", yaxis="y2"))
        parts.append(scatter([_ratio(guess) for guess in ours],
                             [escape(guess.name) for guess in ours], words, colour, mode="markers",
                             marker={"size": 10}, hover="%{y}: %{x:,.3~r} times the guess",
                             showlegend=bool(ours), xaxis="x2", yaxis="y2"))
    lower = 26 * max(len(scored), 2)
    upper, between = 24 * len(names), 96
    height = upper + between + lower
    cut = lower / height
    most = max(total.values(), default=1)
    order = {"categoryorder": "array", "type": "category"}
    return figure(
        parts, "Your progress", height=height + 150, barmode="stack",
        xaxis=axis("exercises", range=[0, 1.5 * most], tickvals=list(range(most + 1))),
        yaxis={**NAMES, **order, "categoryarray": names, "domain": [cut + between / height, 1]},
        xaxis2=axis("measured value, over your guess", type="log", anchor="y2", tickvals=TICKS,
                    ticktext=[f"{tick:g}" for tick in TICKS], range=[-width, width]),
        yaxis2={**NAMES, **order, "categoryarray": [escape(guess.name) for guess in scored],
                "domain": [0, cut], "anchor": "x2", "showticklabels": bool(scored)},
        shapes=[{**rule(x=1, layer="below"), "xref": "x2", "yref": "y2 domain"}],
        annotations=[note(below, 0, cut, xref="paper", yref="paper", yshift=4)])
