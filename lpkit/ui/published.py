"""Runs that others published, beside the formula: how far off it is, and what it adds to a roofline.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lpkit.predict.compare import Row, percent
from lpkit.predict.published import Run, optimism
from lpkit.predict.time import StepTime
from lpkit.predict.units import duration, quantity
from lpkit.tables import FAINT, INK, html_table
from lpkit.ui.draw import NAMES, axis, bars, figure, note, rule, scatter
from lpkit.ui.plan import KINDS, kind_of
from lpkit.ui.style import ANSWER_COLOURS, COLOURS, WARNING

PAPER_COLOURS = (COLOURS[0], "#8a6d1f", COLOURS[2], "#1f7a6f", COLOURS[5])
GOLDEN = (math.sqrt(5) - 1) / 2     # its multiples spread points evenly


# What a roofline leaves out.

def optimism_view(run: Run) -> tuple[dict, str]:
    """For an Explorer: a step of `run` by a roofline, at what kernels reach, at what a step keeps
    of that, and as published; and the rows of the three predictions."""
    steps, published = optimism(run), run.published_seconds
    names = list(dict.fromkeys(row.name for step in steps.values() for row in step.rows))
    rows = [(name, *(_seconds_of(step, name) for step in steps.values())) for name in names]
    rows.append(("a step", *(duration(step.step_seconds) for step in steps.values())))
    rows.append(("of the published time", *(f"{step.step_seconds / published:.0%}"
                                            for step in steps.values())))
    return optimism_figure(run.name, steps, published), html_table(("", *steps), rows)


def _seconds_of(step: StepTime, name: str) -> str:
    return next((duration(row.seconds) for row in step.rows if row.name == name), "")


def optimism_figure(name: str, steps: Mapping[str, StepTime], published: float) -> dict:
    """The plotly spec: a bar for each prediction in the colours of a step's rows, and the published
    seconds."""
    data = []
    for kind, colour in KINDS.items():
        sizes = [sum(row.seconds for row in step.rows if kind_of(row.name) == kind)
                 for step in steps.values()]
        if any(sizes):
            data.append(bars(steps, sizes, kind, colour, hover="%{y}: %{x:.3g} s",
                             textposition="none"))
    data.append(bars(["published"], [published], "published", ANSWER_COLOURS["measured"],
                     hover="%{x:.3g} s", textposition="none"))
    return figure(data, name, barmode="stack", height=330, shapes=[rule(x=published, colour=INK)],
                  xaxis=axis("seconds of a step", rangemode="tozero"),
                  yaxis={**NAMES, "type": "category", "categoryarray": [*steps, "published"]})


# Runs that nothing was fitted to.

def unseen_figure(taken: Sequence[Mapping[str, Any]]) -> dict:
    """The plotly spec: said over published speed of each run of `tests.bench.published.table`, by
    generation and bits. Pale: may be fitted. Red: outside the range that is printed. A bar is the
    median of the held-out ones."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one in taken:
        groups[f"{one['generation']}, {one['precision']}"].append(one)
    # what was never seen, and often, on top
    names = sorted(groups, key=lambda name: -sum(one["held_out"] for one in groups[name]))
    looks = {"may be fitted": (FAINT, 0.35), "held out": (COLOURS[0], 0.8),
             "held out, outside the printed range": (WARNING, 0.9)}
    places: dict[str, list[tuple[float, float, str]]] = {look: [] for look in looks}
    medians: list[tuple[float | None, float | None]] = []
    for y, name in enumerate(names):
        for i, one in enumerate(groups[name]):
            ratio = 1 + one["error"]
            held = "held out" if one["inside"] else "held out, outside the printed range"
            look = held if one["held_out"] else "may be fitted"
            words = f"{one['source']}, {escape(one['at'])}<br>{one['layout']}, {one['stack']}"
            places[look].append((ratio, y + 0.64 * (i * GOLDEN % 1 - 0.5), words))
        if unseen := [1 + one["error"] for one in groups[name] if one["held_out"]]:
            medians += [(statistics.median(unseen), y + side) for side in (-0.4, 0.4)]
            medians.append((None, None))
    data = [scatter([x for x, _, _ in some], [y for _, y, _ in some], look, looks[look][0],
                    mode="markers", marker={"size": 6, "opacity": looks[look][1]},
                    text=[words for _, _, words in some],
                    hover="%{x:.2f} of the published speed<br>%{text}<extra></extra>")
            for look, some in places.items() if some]
    data.append(scatter([x for x, _ in medians], [y for _, y in medians], "median, held out", INK,
                        line={"width": 3}, hover=None))
    errors = [abs(one["error"]) for one in taken if one["held_out"]]
    return figure(
        data, f"{len(errors)} runs that nothing was fitted to: {statistics.median(errors):.0%} off "
        f"at the median", height=150 + 42 * len(names),
        xaxis=axis("said over published speed", type="log", tickvals=[0.5, 0.7, 1, 1.4, 2, 3]),
        yaxis={"tickvals": list(range(len(names))), "ticktext": names, "ticks": "",
               "showgrid": False, "zeroline": False, "range": [len(names) - 0.4, -0.6]},
        shapes=[rule(x=1, colour=INK, layer="below")])


# A paper a colour.

def published_figure(runs: Iterable[Row], calibrated: Iterable[Row] = ()) -> dict:
    """The plotly spec: predicted over published speed of each run, a colour a paper; hollow
    diamonds are `calibrated`."""
    papers: dict[str, list[Row]] = {}
    for row in runs:
        papers.setdefault(row.where.partition(",")[0], []).append(row)
    names = [row.name for rows in papers.values() for row in rows]
    calibrated, data, white = list(calibrated), [], {"bgcolor": "#ffffff"}
    notes = [note("calibrated by one step", _faster(row), row.name, "left auto", xshift=8, **white)
             for row in calibrated]
    for (paper, rows), colour in zip(papers.items(), PAPER_COLOURS):
        data.append(_ratios(paper, rows, {"color": colour, "size": 9}))
        x, at = (0.99, "right auto") if _faster(rows[0]) < 1.25 else (0.02, "left auto")
        notes.append(note(escape(paper), x, rows[0].name, at, xref="paper", **white,
                          font={"color": colour}))
    data.append(_ratios("calibrated by one measured step", calibrated,
                        {"color": INK, "size": 11, "symbol": "diamond-open", "line": {"width": 2}}))
    return figure(
        data, "Published runs: right of 1, the formula is too hopeful", showlegend=False,
        height=110 + 21 * len(names), annotations=notes,
        xaxis=axis("predicted speed / published speed", tickformat=".1f", dtick=0.1),
        yaxis={"ticks": "", "type": "category", "categoryarray": names,
               "range": [len(names) - 0.4, -0.6]},
        shapes=[rule(x=1, colour=INK, layer="below")])


def _ratios(name: str, rows: Sequence[Row], marker: dict) -> dict:
    words = [f"{quantity(row.formula, row.unit)} predicted, {quantity(row.measured, row.unit)} "
             f"published ({percent(row.error)})<br>{escape(row.where)}" for row in rows]
    return scatter(map(_faster, rows), [row.name for row in rows], name, mode="markers",
                   marker=marker, text=words, hover="%{y}<br>%{text}<extra></extra>")


def _faster(row: Row) -> float:
    """Predicted over published speed; of seconds, published over predicted."""
    return row.measured / row.formula if row.unit == "seconds" else row.formula / row.measured
