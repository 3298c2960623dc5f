"""The loss of deep, narrow models without norms in Fixup's initialisation, compared with norms.

    lpkit bench fixup-depth --out data/measured      two minutes

Zhang et al. 2019 (https://arxiv.org/abs/1901.09321) say that it is as stable, "even for networks
with 10,000 layers", of which each update takes half a minute here. Each depth makes the same few updates with and without norms; `losses` holds
all of them. Without norms and without Fixup a model of 100 layers gives NaN in its first update.
"""

import math

from lpkit.config import Config
from lpkit.training.training import Training
from tests.bench.harness import Result, paired

UPDATES, DEPTHS = 8, (10, 100, 1_000)
ARMS = {"fixup": {"model.norm": "none", "model.init": "fixup"},
        "layernorm": {"model.norm": "layernorm"},
        "neither": {"model.norm": "none", "model.init": "fan-in"}}
BASE = Config().replace({
    "imports": "lessons.rows.blocks", "model.width": 16, "model.heads": 1, "model.context": 32,
    "model.vocab": 257, "global_batch": 4, "steps": UPDATES, "schedule.warmup_steps": 2,
    "optimizer.lr": 3e-3, "precision.recipe": "fp32", "system.device": "cpu", "eval_every": 0})


def run(rounds: int, depths: tuple[int, ...] = DEPTHS) -> list[Result]:
    losses = {f"{depth:,} layers, {arm}": trained(depth, arm) for depth in depths for arm in ARMS
              if arm != "neither" or depth <= 100}
    return [paired("fixup-depth", case=f"{depth:,} layers", better="lower", target=1.0, unit="nats",
                   ours=losses[f"{depth:,} layers, fixup"][-1:], peer_name="layernorm",
                   peer=losses[f"{depth:,} layers, layernorm"][-1:], facts={"losses": losses})
            for depth in depths]


def trained(depth: int, arm: str) -> list[float | None]:
    """Returns the loss of each update; None: not finite."""
    training = Training.build(BASE.replace({"model.layers": depth, **ARMS[arm]}))
    losses = [float(training.update(step).loss) for step in range(UPDATES)]
    return [loss if math.isfinite(loss) else None for loss in losses]
