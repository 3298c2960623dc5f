"""What looking costs: steps with telemetry every 20, beside the same steps without.

Three runs of one Config take turns step by step on the same batches: never attached, attached but with no sample in
reach, and sampling. A round is 20 steps, of which the third run samples one: all Linears, x, w and dy, every recipe. The
losses of all three must be the same bit for bit.
"""

import random
import time

from lpkit.bench.harness import ROUNDS, Result, paired, provenance
from lpkit.config import Config
from lpkit.measure import telemetry
from lpkit.training.training import Training

EVERY = 20
TARGETS = {"every 20 steps": 1.05, "attached, off": 1.01}      # times the seconds of the steps without
RECIPES = ("fp8-tensorwise", "mxfp8")
CONFIG = Config().replace({"system.device": "cpu"})             # cpu-3m
FAR = 1_000_003                                                 # steps, never reached


def run(rounds: int = ROUNDS) -> list[Result]:
    return [result for recipe in RECIPES for result in _race(recipe, rounds)]


def _race(recipe: str, rounds: int) -> list[Result]:
    config = CONFIG.replace({"precision.recipe": recipe, "steps": rounds * EVERY + 2})
    runs = [Training.build(config) for _ in range(3)]
    _, sampling = (telemetry.attach(run, None, every=every) for run, every in zip(runs[1:], (FAR, EVERY)))
    for run in runs:          # the first sample warms up with the rest
        run.update(0)
    seconds, order = [[0.0] * rounds for _ in runs], [0, 1, 2]
    for step in range(1, rounds * EVERY + 1):
        random.Random(step).shuffle(order)
        losses = {}
        for i in order:
            start = time.perf_counter()
            losses[i] = runs[i].update(step).loss.item()
            seconds[i][(step - 1) // EVERY] += time.perf_counter() - start
        if len(set(losses.values())) > 1:
            raise AssertionError(f"telemetry changed the loss of step {step + 1}: {losses}")
    facts = provenance(["torch"]) | {"rows": telemetry.ROWS, "recipes_compared": len(sampling.samples[0].others)}
    return [paired("telemetry", ours=[s / EVERY for s in seconds[i]], peer=[s / EVERY for s in seconds[0]], better="lower",
                   peer_name="never attached", target=TARGETS[name], case=f"{name}, cpu-3m, {recipe}", facts=facts)
            for i, name in ((2, "every 20 steps"), (1, "attached, off"))]

