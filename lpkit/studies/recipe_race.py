"""Recipes side by side, on one model, one seed and the same batches: what each costs in noise, in
loss and in time.

A cast adds an error that hardly depends on what it is multiplied with, so the noise of a product is
the sum of its operands' (Widrow and Kollar 2008), in shares of the signal. Each of x, w and dy is
an operand of two of a Linear's three products, so a recipe's noise is 2/3 of their sum; as signal
over noise in dB. Stochastic rounding errs by spacing^2 / 6 instead of / 12. Losses are validation
losses in nats per token, over the same text for every run; gaps are in percent of the base's.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure import telemetry
from lpkit.measure.telemetry import Sample
from lpkit.precision import backends
from lpkit.predict.evidence import MEASURED, whole
from lpkit.studies.advice import Advice
from lpkit.studies.outliers import expected_db
from lpkit.techniques.recipes import RECIPES, Recipe
from lpkit.training.runs import Run

BASE, AGAIN = "bf16", "bf16 with another seed"
TENSORS = ("x", "w", "dy")
LARGEST = 3.0       # of a Gaussian row, in standard deviations: no outlier
STOCHASTIC = 2.0    # times the noise of rounding to nearest


def contenders(device: torch.device) -> list[str]:
    """The recipes below BASE that run on `device`, the first of those that differ by the rule of
    their scales alone; fp16 only where the device multiplies it."""
    fp16 = backends.choose("auto", "fp16", RECIPES["fp16"], device).used == "pytorch"
    found: dict[Any, str] = {}
    for name, row in RECIPES.items():
        if row.products or (name == "fp16" and fp16):
            casts = tuple(replace(cast, scale="") for cast in row.all_casts)
            found.setdefault((casts, row.history), name)
    return list(found.values())


def entries(config: Config, recipes: Iterable[str]) -> dict[str, Config]:
    """What to train, in order: BASE, each of `recipes`, and BASE with another seed, so that noise
    has a measure."""
    runs = {name: config.replace({"precision.recipe": name}) for name in (BASE, *recipes)}
    return runs | {AGAIN: runs[BASE].replace({"seed": config.seed + 1})}


def predicted_db(recipe: Recipe, config: Config) -> float:
    """Of a product, by formula: operands are Gaussian, of the size of the MLP's. No outliers, no
    heavy tails. Raises ConfigError for a recipe that casts nothing."""
    if recipe.y is None or recipe.dx is None:
        raise ConfigError(f"the recipe in {recipe.dtype} casts no operand of y or dx, so its casts "
                          f"add no noise")
    m, tokens = config.model, config.global_batch // config.grad_accum_steps * config.model.T
    (x, w), (dy, _) = recipe.y, recipe.dx
    noise = []
    for cast, shape in ((x, (tokens, m.D)), (w, (m.F, m.D)), (dy, (tokens, m.F))):
        share = _share(expected_db(cast, shape, outlier=LARGEST))
        noise.append(share * STOCHASTIC if cast.rounding == "stochastic" else share)
    return product_db(noise)


def measured_db(samples: Iterable[Sample]) -> float | None:
    """Of a product, from telemetry: the mean noise of each tensor over the layers that are cast and
    over the steps. None where nothing was cast."""
    noise: dict[str, list[float]] = {}
    for sample in samples:
        if sample.role in TENSORS and sample.cast["scale"] != "none" and sample.own is not None:
            noise.setdefault(sample.role, []).append(_share(sample.own.sqnr_db))
    return product_db(map(statistics.fmean, noise.values())) if noise else None


def product_db(shares: Iterable[float]) -> float:
    """Signal over noise of a product, when x, w and dy have these shares of noise."""
    return -10 * math.log10(2 / 3 * sum(shares))


def _share(db: float | None) -> float:
    """None: exact."""
    return 0.0 if db is None else 10 ** (-db / 10)


# What runs did. They come by the names of `entries`, those that began.

@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one run, beside BASE."""

    gaps: dict[int, float]  # step: by how many percent its validation loss lies above the base's
    step_times: float | None        # seconds of a step over the base's
    noise_db: float | None          # of a product; None: nothing was cast
    backend: str

    @property
    def last(self) -> float | None:
        return list(self.gaps.values())[-1] if self.gaps else None


def samples(runs: Mapping[str, Run]) -> dict[str, list[Sample]]:
    """The telemetry of those that were sampled."""
    return {name: telemetry.read(run.path) for name, run in runs.items()
            if (run.path / telemetry.FILE).is_file()}


def outcomes(runs: Mapping[str, Run]) -> dict[str, Outcome]:
    """Of every run that took a step. The base's seconds are the better of its two runs', begun
    first and last."""
    seen, evaluated, seconds = samples(runs), {}, {}
    for name, run in runs.items():
        metrics = run.metrics
        evaluated[name] = {line["step"]: line["val_loss"] for line in metrics if "val_loss" in line}
        if metrics:     # the least: others on the machine slow some steps, none makes one faster
            times = [line["step_seconds"] for line in metrics]
            seconds[name] = min(times[2:] or times)
    base = evaluated.get(BASE, {})
    least = min((seconds[name] for name in (BASE, AGAIN) if name in seconds), default=None)
    found = {}
    for name, spent in seconds.items():
        found[name] = Outcome(
            gaps={step: 100 * (loss / base[step] - 1) for step, loss in evaluated[name].items()
                  if step in base},
            step_times=spent / least if least else None,
            noise_db=measured_db(seen.get(name, ())),
            backend=runs[name].summary["chosen"]["backend"]["used"])
    return found


def band(found: Mapping[str, Outcome]) -> float | None:
    """By how many percent two seeds of BASE differ: root mean square over the later half of the
    evaluations."""
    gaps = list(found[AGAIN].gaps.values()) if AGAIN in found else []
    return math.sqrt(statistics.fmean(gap * gap for gap in gaps[len(gaps) // 2:])) if gaps else None


def table(found: Mapping[str, Outcome], predicted: Mapping[str, float],
          advice: Advice) -> tuple[tuple[str, ...], list[tuple]]:
    """Formula and measurement of every recipe, for `html_table`."""
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    rows = []
    for name, one in found.items():
        formula = None
        if name in predicted:
            cost = advice[name].cost
            formula = cost.step_seconds / cost.base_step_seconds
        rows.append((name, one.backend, shown(predicted.get(name), "{:.1f} dB"),
                     shown(one.noise_db, "{:.1f} dB"), shown(formula, "{:.2f}"),
                     shown(one.step_times, "{:.2f}"), shown(one.last, "{:+.2f}%")))
    return (("", "runs", "noise, formula", "measured", f"step over {advice.base}'s, formula",
             "measured", "last loss"), rows)


# What a bench has recorded.

def recorded(folder: Path = MEASURED) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """Every `lpkit bench recipe-losses` in `folder`: where it comes from or how to make it, heads
    and rows of a table."""
    heads, rows, sources = ("recipe", f"loss over {BASE}'s", "by seed", "target"), [], []
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
