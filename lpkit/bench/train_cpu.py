"""Training on a CPU with the default settings, beside the same steps in float32.

Two runs of one Config, which differ in `precision.recipe` alone (and in what follows from it: the
attention that is fastest for the dtype), take turns step by step on the same batches. The 200 pairs
of steps are the rounds, and the loss at the end of both is the check: a step that is fast and wrong
does not count.
"""

import statistics

from lpkit.bench.harness import ROUNDS, Result, paired, provenance, runs_by_step, steps_in_turns
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.training.training import Training

CONFIG = Config().replace({"model.layers": 6, "model.width": 384, "model.heads": 6,
                           "model.context": 256, "global_batch": 16, "steps": 200,
                           "system.device": "cpu"})
TARGET = 1.9            # times the tokens/s of float32, on a CPU with bf16 instructions
LOSS_TOLERANCE = 0.01   # relative, of the mean over the last 20 steps


def run(rounds: int = ROUNDS) -> list[Result]:
    steps = max(rounds, CONFIG.steps)
    sides = [Training.build(CONFIG.replace({"precision.recipe": recipe}))
             for recipe in ("auto", "fp32")]
    chosen = sides[0].decisions.choices
    if chosen["precision"].used == "fp32":
        raise ConfigError(f"there is nothing to compare: {chosen['precision'].why}")
    seconds, losses = steps_in_turns(runs_by_step(dict(zip(("ours", "fp32"), sides))), steps)
    ours, fp32 = (statistics.fmean(values[-20:]) for values in losses.values())
    if abs(ours / fp32 - 1) > LOSS_TOLERANCE:
        raise AssertionError(f"after {steps} steps the loss is {ours:.4f}, in float32 {fp32:.4f}: "
                             f"over {LOSS_TOLERANCE:.0%}")
    used = ", ".join(f"{name} {choice.used}" for name, choice in chosen.items())
    return [paired("train-cpu", ours=seconds["ours"], peer=seconds["fp32"],
                   peer_name="the same steps in float32", target=TARGET,
                   facts=provenance(["torch"]) | {"chosen": used, "loss": ours,
                                                  "loss_float32": fp32, "steps": steps},
                   case="6 layers x 384, 256-byte vocabulary, batch 16 x 256 tokens")]
