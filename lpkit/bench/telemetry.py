"""What looking costs: steps with telemetry every 20, beside the same steps without.

Three runs of one Config take turns step by step on the same batches: never attached, attached but
with no sample in reach, and sampling. A round is 20 steps, of which the third run samples one: all
Linears, x, w and dy, every recipe. The losses of all three must be the same bit for bit.
"""

import statistics

from lpkit.bench.harness import ROUNDS, Result, paired, provenance, runs_by_step, steps_in_turns
from lpkit.config import Config
from lpkit.measure import telemetry
from lpkit.training.training import Training

EVERY = 20
TARGETS = {"attached, off": 1.01, "every 20 steps": 1.05}  # times the seconds of the steps without
RECIPES = ("fp8-tensorwise", "mxfp8")
CONFIG = Config().replace({"system.device": "cpu"})             # cpu-3m
FAR = 1_000_003                                                 # steps, never reached


def run(rounds: int = ROUNDS) -> list[Result]:
    return [result for recipe in RECIPES for result in _race(recipe, rounds)]


def _race(recipe: str, rounds: int) -> list[Result]:
    config = CONFIG.replace({"precision.recipe": recipe, "steps": rounds * EVERY + 2})
    runs = {name: Training.build(config) for name in ("never", *TARGETS)}
    _, sampling = (telemetry.attach(runs[name], None, every=every)
                   for name, every in zip(TARGETS, (FAR, EVERY)))
    # the first step warms up, and so does the first sample
    seconds, losses = steps_in_turns(runs_by_step(runs), rounds * EVERY + 1, warm_up=1)
    for step, each in enumerate(zip(*losses.values()), 1):
        if len(set(each)) > 1:
            raise AssertionError(f"telemetry changed the loss of step {step}: "
                                 f"{dict(zip(runs, each))}")
    means = {name: [statistics.fmean(each[i:i + EVERY]) for i in range(0, len(each), EVERY)]
             for name, each in seconds.items()}
    facts = provenance(["torch"]) | {"rows": telemetry.ROWS,
                                     "recipes_compared": len(sampling.samples[0].others)}
    return [paired("telemetry", ours=means[name], peer=means["never"], better="lower",
                   peer_name="never attached", target=target, case=f"{name}, cpu-3m, {recipe}",
                   facts=facts)
            for name, target in reversed(TARGETS.items())]
