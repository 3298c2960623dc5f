"""Lesson 06, FP8 training: its study, its figures and its exercises.

Compares recipes by the noise, the loss and the time that they cost, on one model with one seed and
the same batches.

The error of a cast hardly depends on the other operand of the matmul, so the noise of a matmul is
the sum of its operands' noise, as shares of the signal's energy (Widrow and Kollar 2008). Each of
x, w and dy is an operand of two of a Linear's three matmuls, so the mean noise of a matmul is 2/3
of the sum over x, w and dy. It is given as signal over noise in dB, the SQNR of the result.
The mean square of the errors is spacing^2 / 12 for rounding to nearest and spacing^2 / 6 for
stochastic rounding. Losses are validation losses in nats per token, over the same text for every
run; a gap is the percentage by which a loss is above the loss of BASE.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lessons.draws import FP8, UNCLAMPED, normal
from lessons.figures.colours import ROLE_COLOURS, lines_of
from lessons.figures.drawing import NAMES, axis, bars, box, figure, note, scatter
from lessons.figures.explorer import Explorer
from lessons.figures.heat import Samples, beside_race, cell_and_table, explorer
from lessons.figures.live import LiveRun
from lessons.figures.style import COLOURS
from lessons.judging.judge import Exercise, adding_to
from lessons.judging.questions import Pick
from lessons.l04_scaling_recipes import expected_db
from lessons.race import race_figure
from lessons.rivals import rivals
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.measure import telemetry
from lpkit.measure.advice import Advice
from lpkit.measure.telemetry import Sample
from lpkit.precision import backends
from lpkit.precision.linear import ScaledMatmul
from lpkit.predict.casts import on_hardware
from lpkit.predict.compare import TIED, disturbance
from lpkit.predict.evidence import MEASURED, whole
from lpkit.predict.recipes import scale_bytes
from lpkit.tables import FAINT, INK, html_table
from lpkit.techniques.recipes import (
    PRODUCTS,
    RECIPES,
    SIDE_WORDS,
    SIDES,
    Cast,
    Recipe,
)
from lpkit.training.build import decide
from lpkit.training.runs import Run

# notebook 06 imports these from here
__all__ = ["TIED", "ScaledMatmul", "decide", "disturbance"]

# ---- The study

BASE, AGAIN = "bf16", "bf16 with another seed"      # names of runs
TENSORS = ("x", "w", "dy")
LARGEST = 3.0       # standard deviations: the largest element of a Gaussian row, not an outlier
STOCHASTIC = 2.0    # noise of stochastic rounding, divided by the noise of rounding to nearest


def contenders(device: torch.device) -> list[str]:
    """Return the names of the recipes to compare with BASE on `device`. Of recipes that differ only
    in the rule of their scales, only the first is returned; fp16 is returned only if the device
    multiplies it in hardware."""
    fp16 = backends.choose("auto", "fp16", RECIPES["fp16"], device).used == "pytorch"
    first_names: dict[Any, str] = {}
    for name, row in RECIPES.items():
        if row.products or (name == "fp16" and fp16):
            casts = tuple(replace(cast, scale="") for cast in row.all_casts)
            first_names.setdefault((casts, row.history), name)
    return list(first_names.values())


def entries(config: Config, recipes: Iterable[str]) -> dict[str, Config]:
    """Return the configs to train, in order: BASE, each of `recipes`, and BASE with another seed,
    which measures the noise."""
    runs = {name: config.replace({"precision.recipe": name}) for name in (BASE, *recipes)}
    return runs | {AGAIN: runs[BASE].replace({"seed": config.seed + 1})}


def predicted_db(recipe: Recipe, config: Config) -> float:
    """Return the expected signal over noise of a matmul in dB, for Gaussian operands without
    outliers that have the shapes of the MLP's first Linear. Raises ConfigError if the recipe casts
    nothing."""
    if recipe.y is None or recipe.dx is None:
        raise ConfigError(f"the recipe in {recipe.dtype} casts no operand of y or dx, so its casts "
                          f"add no noise")
    m, tokens = config.model, config.global_batch // config.grad_accum_steps * config.model.T
    (x, w), (dy, _) = recipe.y, recipe.dx
    noise = []
    for cast, shape in ((x, (tokens, m.D)), (w, (m.F, m.D)), (dy, (tokens, m.F))):
        share = _share(expected_db(cast, shape, outlier=LARGEST))
        noise.append(share * STOCHASTIC if cast.rounding == "stochastic" else share)
    return total_db(noise)


def measured_db(samples: Iterable[Sample]) -> float | None:
    """Return the measured signal over noise of a matmul in dB, from samples of telemetry. The noise
    of each of x, w and dy is its mean over the cast layers and the steps. None if nothing was
    cast."""
    noise: dict[str, list[float]] = {}
    for sample in samples:
        if sample.role in TENSORS and sample.cast["scale"] != "none" and sample.own is not None:
            noise.setdefault(sample.role, []).append(_share(sample.own.sqnr_db))
    return total_db(map(statistics.fmean, noise.values())) if noise else None


def total_db(shares: Iterable[float]) -> float:
    """Return the signal over noise of a matmul in dB, given the noise of x, w and dy as shares of
    the signal's energy."""
    return -10 * math.log10(2 / 3 * sum(shares))


def _share(db: float | None) -> float:
    """Return noise over signal; 0 for None, which stands for an exact tensor."""
    return 0.0 if db is None else 10 ** (-db / 10)


# Results of runs, by the names that `entries` returns. Runs that have not begun are left out.

@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one run compared with BASE."""

    gaps: dict[int, float]          # by step: validation loss above BASE's, in percent
    step_times: float | None        # seconds of a step, divided by BASE's
    noise_db: float | None          # signal over noise of a matmul; None: nothing was cast
    backend: str                    # the backend that computed the matmuls, for example "emulated"

    @property
    def last(self) -> float | None:
        """The gap at the last evaluation; None if there was none."""
        return list(self.gaps.values())[-1] if self.gaps else None


def samples(runs: Mapping[str, Run]) -> dict[str, list[Sample]]:
    """Return the telemetry samples of each run that has any."""
    return {name: telemetry.read(run.path) for name, run in runs.items()
            if (run.path / telemetry.FILE).is_file()}


def outcomes(runs: Mapping[str, Run]) -> dict[str, Outcome]:
    """Return the outcome of every run that took a step. Step times are divided by the step time of
    BASE: the shorter of its two runs, which are the first and the last run."""
    seen, evaluated, seconds = samples(runs), {}, {}
    for name, run in runs.items():
        metrics = run.metrics
        evaluated[name] = {line["step"]: line["val_loss"] for line in metrics if "val_loss" in line}
        if metrics:     # the minimum: other processes can slow a step but never speed it up
            times = [line["step_seconds"] for line in metrics]
            seconds[name] = min(times[2:] or times)
    base = evaluated.get(BASE, {})
    least = min((seconds[name] for name in (BASE, AGAIN) if name in seconds), default=None)
    results = {}
    for name, spent in seconds.items():
        results[name] = Outcome(
            gaps={step: 100 * (loss / base[step] - 1) for step, loss in evaluated[name].items()
                  if step in base},
            step_times=spent / least if least else None,
            noise_db=measured_db(seen.get(name, ())),
            backend=runs[name].summary["chosen"]["backend"]["used"])
    return results


def unfinished(runs: Mapping[str, Run], configs: Iterable[str]) -> dict[str, str]:
    """Return the status of each run that is not complete, by name."""
    statuses = {name: runs[name].summary["status"] if name in runs else "never begun"
                for name in configs}
    return {name: status for name, status in statuses.items() if status != "complete"}


def emulated(outcomes: Mapping[str, Outcome]) -> tuple[float | None, float]:
    """Return two step times, both divided by the step time of the quicker run of BASE: the median
    of the emulated recipes (None if no recipe is emulated), and the slower run of BASE. The second
    is the noise of a step time; it is infinite if one of the two runs is missing."""
    times = sorted(outcome.step_times for name, outcome in outcomes.items()
                   if name not in (BASE, AGAIN) and outcome.backend == "emulated"
                   and outcome.step_times is not None)
    base = [outcomes[name].step_times if name in outcomes else None for name in (BASE, AGAIN)]
    spread = max(base) if None not in base else math.inf
    return (times[len(times) // 2] if times else None), spread


def in_noise(step: float, spread: float) -> str:
    """Return a clause that compares two numbers: an emulated step takes `step` times as long as a
    step of BASE, and the steps of two runs of BASE differ by the factor `spread`."""
    return (f"an emulated step takes {step:.2f} times {BASE}'s, and two runs of {BASE} differ by "
            f"{spread - 1:.0%}")


def band(outcomes: Mapping[str, Outcome]) -> float | None:
    """Return by how many percent the losses of two seeds of BASE differ: the root mean square of
    the gaps in the later half of the evaluations. None if the second seed was not run."""
    gaps = list(outcomes[AGAIN].gaps.values()) if AGAIN in outcomes else []
    return math.sqrt(statistics.fmean(gap * gap for gap in gaps[len(gaps) // 2:])) if gaps else None


def farthest(last: Mapping[str, float], band: float | None, steps: int) -> str:
    """Return a sentence that names the recipe whose loss ended farthest above BASE's, if the noise
    allows it. `last` is percent above BASE by recipe; `band` is by how many percent two seeds of
    BASE differ, None if the second seed was not run."""
    first, *rest = rivals(last, within=band or 0)
    if band is None:
        return (f"After {steps} steps {first} ended farthest above {BASE} "
                f"({last[first]:+.2f}%). There is one run of each recipe: without a second seed, "
                f"this may be noise.")
    noise = f"two seeds of {BASE} differ by {band:.2f}%"
    if len(rest) + 1 == len(last) > 1:
        return (f"After {steps} steps no recipe can be told from the others: they are within "
                f"{max(last.values()) - min(last.values()):.2f} points, and {noise}.")
    also = f"; within that noise: {', '.join(rest)}" if rest else ""
    return (f"After {steps} steps {first} ended farthest above {BASE} ({last[first]:+.2f}%); "
            f"{noise}{also}.")


def farthest_of_seeds(by_seed: Mapping[str, Sequence[float]], question: Pick) -> str:
    """Score `question` (which recipe ended farthest above BASE) by recorded losses: percent above
    BASE, by recipe and seed. Return a sentence that names the recipes, if the seeds allow it."""
    spread = max(max(seeds) - min(seeds) for seeds in by_seed.values())
    first = rivals({name: fmean(seeds) for name, seeds in by_seed.items()}, within=spread)
    question.scored(first)
    guess = f" (your guess: {question.answer})" if question.answer else ""
    named = "no recipe can be told from the others"
    if len(first) < len(by_seed):
        named = f"{' or '.join(first)} ended farthest above {BASE}"
    return (f"After 300 steps {named}{guess}: seeds of one recipe differ by up to {spread:.2f} "
            f"points, and only a larger difference of means counts.")


def table(outcomes: Mapping[str, Outcome], predicted: Mapping[str, float],
          advice: Advice) -> tuple[tuple[str, ...], list[tuple]]:
    """Return the headings and the rows of a table for `html_table`: for each run, the backend, and
    the noise, the step time and the loss by formula and as measured.

    predicted: expected signal over noise in dB, by recipe
    advice: its predicted costs give the expected step time
    """
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    rows = []
    for name, outcome in outcomes.items():
        formula = None
        if name in predicted:
            cost = advice[name].cost
            formula = cost.step_seconds / cost.base_step_seconds
        rows.append((name, outcome.backend, shown(predicted.get(name), "{:.1f} dB"),
                     shown(outcome.noise_db, "{:.1f} dB"), shown(formula, "{:.2f}"),
                     shown(outcome.step_times, "{:.2f}"), shown(outcome.last, "{:+.2f}%")))
    return (("recipe", "backend", "signal over noise, formula", "measured",
             f"step time / {advice.base}'s, formula", "measured",
             f"last loss above {BASE}'s"), rows)


# Recorded benchmarks.

def recorded(folder: Path = MEASURED) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """Read every result of `lpkit bench recipe-losses` in `folder`. Return a sentence with the
    sources (or how to record a result), and the headings and the rows of a table."""
    heads = ("recipe", f"loss / {BASE}'s loss", "difference by seed", "target")
    rows, sources = [], []
    for path in sorted(folder.glob("recipe-losses-*.json")):
        with whole(path):
            bench = json.loads(path.read_text(encoding="utf-8"))
            losses, base = bench["losses"], bench["losses"][bench["peer"]]
            for case in bench["cases"]:
                by_seed = [f"{100 * (ours / theirs - 1):+.2f}%"
                           for ours, theirs in zip(losses[case["case"]], base, strict=True)]
                rows.append((case["case"], f"{case['ratio']:.4f}", " ".join(by_seed),
                             f"{case['target']:g}: {'met' if case['met'] else 'not met'}"))
            sources.append(f"Recorded: cpu-3m, {bench['steps']} steps, {len(base)} seeds, on "
                           f"{bench['device']}, {bench['date'][:10]}, by {bench['command']!r} "
                           f"({path.name})")
    return ("; ".join(sources) or "Nothing is recorded yet. 'lpkit bench recipe-losses --out "
            "data/measured' trains cpu-3m for 300 steps with three seeds of every recipe; it takes "
            "over an hour of two cores.", heads, rows)


# ---- Figures

HIDDEN = {"visible": False, "constrain": "domain"}      # an axis that is not drawn


# Products.

EQUATIONS = {"y": "y = x wᵀ", "dx": "dx = dy w", "dw": "dw = dyᵀ x"}
WORDS = {"x": "x", "w": "w", "g": "dy"}         # names of the operands in figures
NUMBERS = {"M": 256, "K": 384, "N": 512}        # tokens, features in, features out
MOST_LINES = 24     # no grid is drawn for more lines, which would merge into a grey area
# in elements of the matrices: space between panels and between matrices, and the left margin
SPACE, GAP, LEFT = 200, 130, 60


def products_figure(recipe: Recipe, *, title: str = "") -> dict:
    """Return the plotly spec of the three matmuls of a Linear of the size NUMBERS. Operands are
    drawn as they are multiplied, so the contracted axis (the thick side) runs across the first
    operand and down the second. Lines separate blocks that share a scale, and one block is filled.
    Raises ConfigError for a recipe without casts."""
    if not recipe.products:
        raise ConfigError("this recipe casts no operand, so there are no blocks to draw")
    shapes, notes, top, wide = [], [], 0.0, 0.0
    for product, sides in SIDES.items():
        casts = recipe.products.get(product, (None, None))
        (rows, summed), (columns, _) = sides
        high, inner, out = NUMBERS[rows], NUMBERS[summed], NUMBERS[columns]
        tall = max(high, inner)
        middle, left = top - tall / 2, LEFT
        notes.append(note(f"<b>{EQUATIONS[product]}</b>   sums over {SIDE_WORDS[summed]}", 0,
                          top + 65, font={"size": 14}))
        names = [WORDS[tensor] for tensor in PRODUCTS[product]]
        turned = ("ᵀ" if product == "dw" else "", "ᵀ" if product == "y" else "")
        for i, (tensor, cast, (down, across), labels) in enumerate(zip(
                PRODUCTS[product], casts, ((high, inner), (inner, out)),
                ((rows, summed), (summed, columns)))):
            shapes += _operand(left, middle, down, across, ROLE_COLOURS[WORDS[tensor]],
                               cast, second=bool(i))
            notes += _sizes(left, middle, down, across, *labels)
            notes.append(note(names[i] + turned[i], left + across / 2, middle, "center middle",
                              font={"size": 17, "color": INK}, bgcolor="rgba(255,255,255,0.75)"))
            shapes.append(_along(left, middle, down, across, second=bool(i)))
            left += across + GAP
            notes.append(note("=" if i else "·", left - 0.6 * GAP, middle, "center middle",
                              font={"size": 20}))
        shapes.append(box(left, left + out, middle - high / 2, middle + high / 2, fill="#f3f4f6",
                          edge=FAINT, width=1))
        notes += [note(product, left + out / 2, middle, "center middle", font={"size": 17}),
                  *_sizes(left, middle, high, out, rows, columns)]
        wide, top = max(wide, left + out), top - tall - SPACE
    share = ", ".join(dict.fromkeys(
        f"{WORDS[tensor]} {_sides(cast)}" for product, casts in recipe.products.items()
        for tensor, cast in zip(PRODUCTS[product], casts) if cast))
    return figure(
        [], title, height=900, shapes=shapes, annotations=[*notes, note(
            f"elements that share a scale: {share}<br>the matmul sums over the thick side", 0, 170,
            align="left", font={"color": FAINT})],
        margin={"l": 12, "r": 12, "t": 48, "b": 12},
        xaxis={**HIDDEN, "constraintoward": "left", "range": [-10, wide + 20]},
        yaxis={**HIDDEN, "range": [top + SPACE - 20, 230], "scaleanchor": "x"})


def products_view(recipes: Mapping[str, Recipe]) -> Any:
    """Return a function of `recipe` (one of the names) for an Explorer."""
    return lambda recipe: products_figure(recipes[recipe], title=f"The three products of {recipe}")


def _sides(cast: Cast) -> str:
    """Return the size of a block as text: "1 x 128", "all x all"."""
    return " x ".join(str(side or "all") for side in cast.block)


def _operand(left: float, middle: float, down: float, across: float, colour: str,
             cast: Cast | None, *, second: bool) -> list[dict]:
    """Return the shapes of an operand: its outline, the lines between its blocks, and one filled
    block. The block of a cast has the contracted axis last, so it is turned for the `second`
    operand."""
    top = middle + down / 2
    shapes = [box(left, left + across, top - down, top, edge=colour, width=1.5)]
    if cast is None:
        return shapes
    high, wide = reversed(cast.block) if second else cast.block
    high, wide = high or down, wide or across
    row, column = down // high // 3, across // wide // 3
    shapes.append(box(left + column * wide, left + (column + 1) * wide, top - (row + 1) * high,
                      top - row * high, fill=colour, edge=colour, width=2, opacity=0.55))
    for rows, size, length in ((True, high, down), (False, wide, across)):
        if length / size > MOST_LINES:
            continue
        for at in range(size, length, size):
            ends = {"x0": left, "x1": left + across, "y0": top - at, "y1": top - at}
            if not rows:
                ends = {"x0": left + at, "x1": left + at, "y0": top, "y1": top - down}
            shapes.append({"type": "line", **ends, "line": {"color": colour, "width": 0.6}})
    return shapes


def _along(left: float, middle: float, down: float, across: float, *, second: bool) -> dict:
    """Return a thick line along the contracted axis: the top edge of the first operand, or the left
    edge of the second."""
    top = middle + down / 2
    ends = {"x0": left, "x1": left, "y0": top, "y1": top - down} if second else \
        {"x0": left, "x1": left + across, "y0": top, "y1": top}
    return {"type": "line", **ends, "line": {"color": INK, "width": 5}}


def _sizes(left: float, middle: float, down: float, across: float, row: str,
           column: str) -> list[dict]:
    """Return the notes that name the rows and the columns of a matrix."""
    small = {"font": {"size": 12, "color": FAINT}}
    return [note(row, left - 12, middle, "right middle", **small),
            note(column, left + across / 2, middle + down / 2 + 8, "center bottom", **small)]


class LiveRuns(LiveRun):
    """A live figure of a series of runs that `lpkit.start_each` returned, with Stop and Pause. Stop
    ends the current run, and no further run starts.

    `read(path)` returns the telemetry samples of a run folder; it raises ConfigError while there
    are none. With `read`, a map of the noise is drawn next to the losses.
    """

    def __init__(self, series: Any, *, read: Callable[[Any], Sequence[Any]] | None = None):
        self._read, self._ended = read, {}
        super().__init__(series)

    def _spec(self) -> dict:
        """Return the plotly spec of the race of all runs so far, with the map if there is a
        `read`."""
        begun, configs = dict(self.handle.handles), self.handle.configs
        losses = {name: {record.step: record.loss for record in list(handle.records)}
                  for name, handle in begun.items()}
        first = next(iter(configs.values())).seed
        race = race_figure(losses, planned_steps=self.handle.planned_steps,
                           title=f"{len(begun)} of {len(configs)}: {self.handle.title}",
                           paired=[name for name in configs if configs[name].seed == first])
        return beside_race(race, self._samples(begun)) if self._read else race

    def _samples(self, begun: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """Return the samples of each run; read the samples of a run that has ended only once."""
        samples = {}
        for name, handle in begun.items():
            ended = handle.done
            with contextlib.suppress(ConfigError), warnings.catch_warnings():
                # the last line may be incomplete while the run is still writing
                warnings.simplefilter("default" if ended else "ignore")
                samples[name] = self._ended.get(name) or self._read(handle.path)
                if ended:
                    self._ended[name] = samples[name]
        return samples

    @property
    def _reached_all(self) -> bool:
        """Whether all runs have begun and the last has done all planned steps."""
        return len(self.handle.handles) == len(self.handle.configs) and super()._reached_all

    def _words(self) -> str:
        return f"{self.handle.title} · {super()._words()}"


def gap_figure(gaps: Mapping[str, Mapping[int, float]], *, band: float | None,
               predicted: Mapping[str, float], measured: Mapping[str, float | None], base: str,
               title: str = "") -> dict:
    """Return the plotly spec of the cost of recipes. Left: by how many percent the validation loss
    is above that of `base`, over the steps. Right: signal over noise of a matmul, by formula (bars)
    and as measured (marks).

    gaps: for each run, percent above `base` by step
    band: by how many percent two seeds of `base` differ; drawn as a grey band. None: not measured
    predicted, measured: signal over noise in dB, by run
    """
    lines = lines_of(gaps)
    order = sorted(predicted, key=lambda name: -predicted[name])
    colours = [lines[name]["color"] if name in lines else FAINT for name in order]
    right = {"xaxis": "x2", "yaxis": "y2", "showlegend": False}
    data = [scatter(gap, gap.values(), escape(name), mode="lines+markers", line=lines[name],
                    marker={"size": 6}, legendgroup=name, hover="step %{x}: %{y:+.2f}%")
            for name, gap in gaps.items()]
    data += [
        bars(order, [predicted[name] for name in order], "formula", width=0.62,
             hover="%{y}: %{x:.1f} dB by formula<extra></extra>",
             marker={"color": colours, "opacity": 0.45}, **right),
        scatter([measured.get(name) for name in order], order, "measured", mode="markers",
                marker={"symbol": "line-ns", "size": 18, "line": {"color": INK, "width": 3}},
                hover="%{y}: %{x:.1f} dB measured<extra></extra>", **right)]
    notes, shapes = [note("bar: formula; mark: measured", 0, 1.01, xref="x2 domain", yref="paper",
                          font={"size": 12})], []
    if band is not None:
        shapes.append(box(0, 1, -band, band, fill=COLOURS[6], xref="x domain", yref="y",
                          layer="below", opacity=0.22))
        notes.append(note(f"two seeds of {escape(base)} differ by {band:.2g}%", 0.01, -band,
                          xref="x domain", font={"color": FAINT, "size": 12}))
    largest = max([band or 0, *(abs(value) for gap in gaps.values() for value in gap.values())])
    reach = 1.15 * largest or 1.0
    return figure(
        data, title, height=440, margin={"t": 92}, legend={"y": 1.08}, shapes=shapes,
        annotations=notes, xaxis=axis("step", domain=[0, 0.56], rangemode="tozero"),
        yaxis=axis(f"validation loss above {escape(base)}'s, %", zeroline=True,
                   zerolinecolor=FAINT, range=[-reach, reach]),
        xaxis2=axis("signal over noise of a matmul, dB", domain=[0.72, 1], anchor="y2",
                    rangemode="tozero"),
        yaxis2={**NAMES, "anchor": "x2"})


def telemetry_of_runs(runs: Mapping[str, Samples], *,
                      start: Mapping[str, Any] | None = None) -> Explorer:
    """Return an Explorer of the telemetry of several runs of one model. Besides the controls of
    `lessons.figures.heat.explorer`, a menu chooses the run; the menu of recipes chooses the cast
    that is applied to the tensors of that run. Raises ConfigError if no run has samples."""
    held = {name: list(samples) for name, samples in runs.items() if samples}

    def show(run: str, **choices: Any) -> tuple[dict, str]:
        return cell_and_table(held[run], title=f"Trained with {run}", **choices)

    return explorer(show, [sample for samples in held.values() for sample in samples], start,
                    run=list(held),
                    labels={"run": "trained with", "role": "tensor", "recipe": "cast by"})


def casts_table(model: ModelConfig) -> str:
    """Return an HTML table of how each recipe casts the operands of a Linear on hardware: formats,
    elements that share a scale, bytes of a scale, the tensors that are cast once for both of their
    layouts, and the share of the dtype's speed that matmuls reach."""
    rows = []
    for name, recipe in RECIPES.items():
        if len(recipe.products) < len(PRODUCTS) or recipe.one_sided:
            continue    # the table has only recipes that cast both operands of all three matmuls
        counts, dy = on_hardware(name, recipe, model), recipe.dx[0]
        x, w = counts.casts["y"]
        both = [tensor for tensor, operand in (("x", x), ("w", w))
                if operand.transposes or counts.one_read(operand)]
        rows.append((name, recipe.y[0].format, dy.format, _block(x.block), _block(w.block),
                     f"{scale_bytes(x):g}", " and ".join(both).replace("x", "x, dy") or "none",
                     f"{counts.product_share:g}"))
    return html_table(("recipe", "x and w", "dy", "elements per scale: x, dy",
                       "elements per scale: w", "bytes of a scale", "one cast for both layouts",
                       "share of the dtype's speed"), rows)


def _block(sides: tuple[int, int]) -> str:
    """Return the size of a block as text: "1 x 128"; "all" for the whole tensor."""
    return "all" if sides == (0, 0) else " x ".join(str(side or "all") for side in sides)


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: the noise of a product, the layers to keep, the time to an equal loss; in decibels and
# seconds.

@exercise("06.product_db", (31.5, 31.5), (31.5, 25.5), (40.0, 20.0),
          draw=lambda r: (r.uniform(5, 60), r.uniform(5, 60)),
          mistakes={"shares of noise add up, decibels do not": lambda x, w: (x + w) / 2,
                    "the noise of the other operand counts, too": min})
def product_db(x: float, w: float) -> float:
    return -10 * math.log10(10 ** (-x / 10) + 10 ** (-w / 10))


def _by_mean_decibel(samples: Sequence[tuple[str, float]], budget: int) -> list[str]:
    decibels: dict[str, list[float]] = {}
    for layer, db in samples:
        decibels.setdefault(layer, []).append(db)
    return sorted(decibels, key=lambda layer: fmean(decibels[layer]))[:budget]


def _samples(r: Random) -> tuple[list[tuple[str, float]], int]:
    layers = ["q", "k", "v", "o", "up", "down", "head"][:r.randint(2, 7)]
    samples = [(layer, r.uniform(10, 40)) for layer in layers for _ in range(r.randint(1, 4))]
    return samples, r.randint(0, 3)


@exercise("06.keep", ([("head", 30.0), ("up", 20.0)], 1), draw=_samples, minutes=8, stars=2,
          mistakes={"average the noise, not its decibels": _by_mean_decibel})
def keep(samples: Sequence[tuple[str, float]], budget: int) -> list[str]:
    noise: dict[str, list[float]] = {}
    for layer, db in samples:
        noise.setdefault(layer, []).append(10 ** (-db / 10))
    return sorted(noise, key=lambda layer: -fmean(noise[layer]))[:budget]


def _losses(r: Random) -> tuple[list[float], float, list[float], float]:
    ours, theirs = (list(accumulate([r.uniform(8, 9)] + [-r.uniform(0.1, 0.9)
                                                         for _ in range(r.randint(0, 9))]))
                    for _ in range(2))
    return ours, r.uniform(0.2, 2), theirs, r.uniform(0.2, 2)


def _at_equal_steps(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
                    base_seconds: float) -> float:
    return base_seconds / seconds * base_losses[-1] / losses[-1]


def _whole_steps(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
                 base_seconds: float) -> float:
    steps = next((step for step, loss in enumerate(losses, 1) if loss <= base_losses[-1]), math.inf)
    return len(base_losses) * base_seconds / (steps * seconds)


@exercise("06.speedup", ([4.0, 3.0], 0.5, [4.0, 3.0], 1.0), draw=_losses, minutes=10, stars=2,
          mistakes={"compare times at an equal loss": _at_equal_steps,
                    "it reaches the loss between two steps: interpolate": _whole_steps})
def speedup(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
            base_seconds: float) -> float:
    target = base_losses[-1]
    for step, loss in enumerate(losses, 1):
        if loss <= target:
            above = losses[step - 2] if step > 1 else loss
            part = (loss - target) / (loss - above) if above > loss else 0.0
            return len(base_losses) * base_seconds / ((step - part) * seconds)
    return 0.0


# Exercises: a Linear's three products. Scales are powers of two, so that dividing by a scale and
# multiplying by its reciprocal give the same bits.

def to_fp8(x: Tensor, scale: float, dtype: torch.dtype = FP8) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x / scale).clamp(-largest, largest).to(dtype).float()


def _operands(r: Random, backward: bool = False) -> tuple:
    tokens, into, out = r.randint(1, 5), r.randint(1, 6), r.randint(1, 7)
    tensors = [normal(r, tokens, into), normal(r, out, into), normal(r, tokens, out)]
    count = 3 if backward else 2
    sizes = [2.0 ** r.randint(-6, 6) for _ in range(count)]
    # some operands saturate, others have subnormals
    scales = [size * 2.0 ** -r.randint(-6, most)
              for size, most in zip(sizes, (10, 10, 17), strict=False)]
    return (*(x * size for x, size in zip(tensors, sizes, strict=False)), *scales)


@exercise("06.fp8_forward", (torch.ones(1, 1), torch.ones(1, 1), 0.5, 0.25),
          (torch.tensor([[1.06, 500.0]]), torch.tensor([[2.0, 1.0]]), 1.0, 1.0), draw=_operands,
          tolerance=1e-5, stars=2, minutes=10,
          mistakes={UNCLAMPED: lambda x, w, sx, sw: fp8_forward(
                        *(t.masked_fill(t.abs() > 464 * s, math.nan)
                          for t, s in ((x, sx), (w, sw))), sx, sw),
                    "scale the product back": lambda x, w, sx, sw:
                        to_fp8(x, sx) @ to_fp8(w, sw).T,
                    "cast the operands": lambda x, w, sx, sw: x @ w.T})
def fp8_forward(x: Tensor, w: Tensor, x_scale: float, w_scale: float) -> Tensor:
    x8 = (x / x_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    w8 = (w / w_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return x8.float() @ w8.float().T * (x_scale * w_scale)


def _uncast_backward(x: Tensor, w: Tensor, dy: Tensor, sx: float, sw: float,
                     sdy: float) -> tuple[Tensor, Tensor]:
    dy = sdy * to_fp8(dy, sdy, torch.float8_e5m2)
    return dy @ w, dy.T @ x


def _e4m3_backward(x: Tensor, w: Tensor, dy: Tensor, sx: float, sw: float,
                   sdy: float) -> tuple[Tensor, Tensor]:
    dy = sdy * to_fp8(dy, sdy)
    return dy @ to_fp8(w, sw) * sw, dy.T @ to_fp8(x, sx) * sx


@exercise("06.fp8_backward", (*[torch.full((1, 1), 1.06)] * 3, 1.0, 1.0, 1.0),
          draw=lambda r: _operands(r, backward=True), tolerance=1e-5, stars=3, minutes=15,
          mistakes={UNCLAMPED: lambda x, w, dy, sx, sw, sdy: fp8_backward(
                        x.masked_fill(x.abs() > 464 * sx, math.nan),
                        w.masked_fill(w.abs() > 464 * sw, math.nan),
                        dy.masked_fill(dy.abs() >= 61440 * sdy, math.inf), sx, sw, sdy),
                    "x, w and dy are all cast": _uncast_backward,
                    "gradients are cast to E5M2": _e4m3_backward})
def fp8_backward(x: Tensor, w: Tensor, dy: Tensor, x_scale: float, w_scale: float,
                 dy_scale: float) -> tuple[Tensor, Tensor]:
    x8 = (x / x_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    w8 = (w / w_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    dy8 = (dy / dy_scale).clamp(-57344, 57344).to(torch.float8_e5m2).float()
    return dy8 @ w8 * (dy_scale * w_scale), dy8.T @ x8 * (dy_scale * x_scale)
