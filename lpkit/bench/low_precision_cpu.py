"""Training under low-precision recipes on a CPU, emulated, beside the same steps in bf16.

Runs of one Config, which differ in `precision.recipe` alone, take turns step by step on the same batches. What a recipe
costs is its casts: the products are bf16's own. The loss at the end is the check: a step that is fast and wrong does not
count. An "at most" figure: the share of bf16's step time.

And weights that are cast once an update, beside the same update with its casts in every micro-batch: times as fast, after
the losses were found equal bit for bit.
"""

import statistics
import time

from lpkit.bench.harness import ROUNDS, Result, paired, provenance
from lpkit.config import Config
from lpkit.training.training import Training

RECIPES = {"fp8-tensorwise": 1.8, "mxfp8": 1.8}     # at most, times the step of bf16
LEAST_STEPS = 20
CACHED, MICRO_BATCHES = "mxfp8", 8
LOSS_TOLERANCE = 0.01       # relative, of the mean over the last 5 steps


def run(rounds: int = ROUNDS) -> list[Result]:
    steps = max(rounds, LEAST_STEPS)
    base = Config().replace({"system.device": "cpu", "steps": steps})
    names = ["bf16", *RECIPES]
    runs = {name: Training.build(base.replace({"precision.recipe": name})) for name in names}
    seconds, losses = {name: [] for name in names}, {name: [] for name in names}
    for step in range(steps + 1):       # the first one compiles the casts and touches the memory: it is not counted
        for name in names[step % len(names):] + names[:step % len(names)]:
            start = time.perf_counter()
            losses[name].append(runs[name].update(step).loss.item())
            seconds[name].append(time.perf_counter() - start)
    last = {name: statistics.fmean(values[-5:]) for name, values in losses.items()}
    results, facts = [], provenance(["torch"]) | {
        "losses": last, "steps": steps, "backends": {name: runs[name].decisions.choices["backend"].used for name in names}}
    for name, target in RECIPES.items():
        if abs(last[name] / last["bf16"] - 1) > LOSS_TOLERANCE:
            raise AssertionError(f"after {steps} steps {name} is at {last[name]:.4f}, bf16 at {last['bf16']:.4f}: "
                                 f"over {LOSS_TOLERANCE:.0%}")
        results.append(paired("low-precision-cpu", ours=seconds[name][1:], peer=seconds["bf16"][1:],
                              peer_name="the same steps in bf16", target=target, better="lower",
                              facts=facts, case=f"cpu-3m, {name}"))
    return [*results, cached(steps)]


def cached(steps: int) -> Result:
    """`precision.cache_weight_casts=true` beside `cast`."""
    base = Config().replace({"system.device": "cpu", "steps": steps, "precision.recipe": CACHED, "grad_accum_steps": MICRO_BATCHES})
    runs = {name: Training.build(base.replace({"precision.cache_weight_casts": name == "cached"})) for name in ("cast", "cached")}
    seconds: dict[str, list[float]] = {weights: [] for weights in runs}
    for step in range(steps + 1):
        losses = {}
        for weights in sorted(runs, reverse=step % 2 == 0):
            start = time.perf_counter()
            losses[weights] = runs[weights].update(step).loss.item()
            seconds[weights].append(time.perf_counter() - start)
        if losses["cast"] != losses["cached"]:
            raise AssertionError(f"step {step}: {losses['cached']} with cached weights, {losses['cast']} without")
    return paired("low-precision-cpu", ours=seconds["cached"][1:], peer=seconds["cast"][1:], peer_name="weights cast each time",
                  facts=provenance(["torch"]), case=f"cpu-3m, {CACHED}, {MICRO_BATCHES} micro-batches, weights cached")
