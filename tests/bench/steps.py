"""Whole training steps on a CPU. Runs of one Config take turns step by step on the same batches,
and their losses are the check: a step that is fast and wrong does not count.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from lpkit.config import Config
from lpkit.measure.telemetry import ROWS, attach
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import Training
from tests.bench.harness import ROUNDS, Result, last_losses, paired, steps_in_turns

CPU_3M = Config().replace({"system.device": "cpu"})
LOSS_TOLERANCE = 0.01   # relative

EMULATED = {"cpu-3m": CPU_3M, "6 layers x 384, 256 tokens": CPU_3M.replace({
    "model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256,
    "global_batch": 1})}
RECIPE_TARGETS = {"fp8-tensorwise": 1.8, "mxfp8": 1.8}     # at most, times the step of bf16
RECIPE_TARGET = 2.0     # of every other
LEAST_STEPS, MOST_SECONDS = 20, 60      # of a size; a slow machine takes fewer steps
CACHED, MICRO_BATCHES = "mxfp8", 8

EVERY = 20              # steps, of which telemetry samples one: all Linears, x, w and dy
TELEMETRY_TARGETS = {"every 20 steps": 1.05, "attached, off": 1.01}     # at most, times without
TELEMETRY_RECIPES = ("fp8-tensorwise", "mxfp8")
FAR = 1_000_003         # steps, never reached


def low_precision_cpu(rounds: int = ROUNDS) -> list[Result]:
    """Every recipe that casts, emulated, beside bf16: most products are bf16's own, so what a
    recipe costs is its casts. An "at most" figure: the share of bf16's step time.

    And weights that are cast once an update, beside the same update with its casts in every
    micro-batch: times as fast, after the losses were found equal bit for bit.
    """
    steps = max(rounds, LEAST_STEPS)
    names = ["bf16", *(name for name, recipe in RECIPES.items() if recipe.products)]
    results = []
    for size, config in EMULATED.items():
        runs = _build(config.replace({"steps": steps}), "precision.recipe",
                      {name: name for name in names})
        seconds, losses = steps_in_turns(runs, steps, within_seconds=MOST_SECONDS)
        last = last_losses(losses, "bf16", last=5, tolerance=LOSS_TOLERANCE)
        backends = {name: run.decisions.choices["backend"].used for name, run in runs.items()}
        facts = {"losses": last, "steps": len(losses["bf16"]), "backends": backends}
        results += [paired("low-precision-cpu", ours=seconds[name], peer=seconds["bf16"],
                           target=RECIPE_TARGETS.get(name, RECIPE_TARGET), better="lower",
                           peer_name="the same steps in bf16", case=f"{size}, {name}", facts=facts)
                    for name in names if name != "bf16"]

    base = CPU_3M.replace({"steps": steps, "precision.recipe": CACHED,
                           "grad_accum_steps": MICRO_BATCHES})
    runs = _build(base, "precision.cache_weight_casts", {"cast": False, "cached": True})
    seconds, losses = steps_in_turns(runs, steps, within_seconds=MOST_SECONDS)
    _check_equal(losses)
    return [*results, paired("low-precision-cpu", ours=seconds["cached"], peer=seconds["cast"],
                             peer_name="weights cast each time", case=f"cpu-3m, {CACHED}, "
                             f"{MICRO_BATCHES} micro-batches, weights cached")]


def telemetry(rounds: int = ROUNDS) -> list[Result]:
    """What looking costs: never attached, attached but with no sample in reach, and sampling, with
    losses that are equal bit for bit. A round is EVERY steps."""
    results = []
    for recipe in TELEMETRY_RECIPES:
        base = CPU_3M.replace({"precision.recipe": recipe})
        runs = _build(base, "steps", dict.fromkeys(("never", *TELEMETRY_TARGETS),
                                                   rounds * EVERY + 2))
        sampling = attach(runs["every 20 steps"], None, every=EVERY)
        attach(runs["attached, off"], None, every=FAR)
        seconds, losses = steps_in_turns(runs, rounds * EVERY)  # the first sample is not timed
        _check_equal(losses)
        means = {name: [statistics.fmean(each[i:i + EVERY]) for i in range(0, len(each), EVERY)]
                 for name, each in seconds.items()}
        facts = {"rows": ROWS, "recipes_compared": len(sampling.samples[0].others)}
        results += [paired("telemetry", ours=means[name], peer=means["never"], better="lower",
                           peer_name="never attached", target=target, facts=facts,
                           case=f"{name}, cpu-3m, {recipe}")
                    for name, target in TELEMETRY_TARGETS.items()]
    return results


def _build(base: Config, key: str, values: Mapping[str, Any]) -> dict[str, Training]:
    """Runs of `base` that differ in one setting, by name."""
    return {name: Training.build(base.replace({key: value})) for name, value in values.items()}


def _check_equal(losses: Mapping[str, Iterable[float]]) -> None:
    for step, each in enumerate(zip(*losses.values()), 1):
        if len(set(each)) > 1:
            raise AssertionError(f"the losses of step {step} differ: {dict(zip(losses, each))}")
