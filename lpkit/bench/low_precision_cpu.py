"""Training under low-precision recipes on a CPU, emulated, beside the same steps in bf16.

Runs of one Config, which differ in `precision.recipe` alone, take turns step by step on the same
batches. What a recipe costs is its casts: the products are bf16's own. The loss at the end is the
check: a step that is fast and wrong does not count. An "at most" figure: the share of bf16's step
time.

And weights that are cast once an update, beside the same update with its casts in every
micro-batch: times as fast, after the losses were found equal bit for bit.
"""

import statistics

from lpkit.bench.harness import ROUNDS, Result, paired, provenance, runs_by_step, steps_in_turns
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
    # the first step compiles the casts and touches the memory: it is not timed
    seconds, losses = steps_in_turns(runs_by_step(runs), steps + 1, warm_up=1)
    last = {name: statistics.fmean(values[-5:]) for name, values in losses.items()}
    results, facts = [], provenance(["torch"]) | {
        "losses": last, "steps": steps, "backends": {
            name: runs[name].decisions.choices["backend"].used for name in names}}
    for name, target in RECIPES.items():
        if abs(last[name] / last["bf16"] - 1) > LOSS_TOLERANCE:
            raise AssertionError(f"after {steps} steps {name} is at {last[name]:.4f}, bf16 at "
                                 f"{last['bf16']:.4f}: over {LOSS_TOLERANCE:.0%}")
        results.append(paired("low-precision-cpu", ours=seconds[name], peer=seconds["bf16"],
                              peer_name="the same steps in bf16", target=target, better="lower",
                              facts=facts, case=f"cpu-3m, {name}"))
    return [*results, cached(steps)]


def cached(steps: int) -> Result:
    """`precision.cache_weight_casts=true` beside `cast`."""
    base = Config().replace({"system.device": "cpu", "steps": steps, "precision.recipe": CACHED,
                             "grad_accum_steps": MICRO_BATCHES})
    runs = {name: Training.build(base.replace({"precision.cache_weight_casts": name == "cached"}))
            for name in ("cast", "cached")}
    seconds, losses = steps_in_turns(runs_by_step(runs), steps + 1, warm_up=1)
    if losses["cast"] != losses["cached"]:
        raise AssertionError(f"losses are {losses['cached']} with cached weights, {losses['cast']} "
                             f"without")
    return paired("low-precision-cpu", ours=seconds["cached"], peer=seconds["cast"],
                  peer_name="weights cast each time", facts=provenance(["torch"]),
                  case=f"cpu-3m, {CACHED}, {MICRO_BATCHES} micro-batches, weights cached")
