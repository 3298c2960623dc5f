"""What the updates of a run see of its model, where a governor says so (`lpkit.techniques.depth`).

A governed config has no such governor any more, and a model whose operations see what they see on
average over the run's steps and layers: products cost their tokens, attention their squares. So
every fold of `lpkit.predict` is of that model. Bytes are those of the update that sees the most.
"""

import functools
import math
from dataclasses import dataclass, fields, replace

from lpkit.config import Config, ModelConfig
from lpkit.techniques.changes import GOVERNORS, changing, running

MOST_STEPS = 1024       # of a run that are asked, evenly spaced


@dataclass(frozen=True, kw_only=True)
class Seen(ModelConfig):
    """`shares`: as `Op.seeing` takes them, of layers that run; `running`: the layers that do."""

    shares: tuple[float, ...] = ()
    running: float = 1.0


def governed(config: Config, most: bool = False) -> Config:
    """`most`: in the update that sees the most, instead of on average."""
    return _governed(config, most) if running(config) else config


@functools.lru_cache(maxsize=256)
def _governed(config: Config, most: bool) -> Config:
    said, model, steps = running(config), config.model, config.steps
    every = [GOVERNORS[said[0].name].shares(said[0], model.L, steps, config.seed, step)
             for step in range(0, steps, math.ceil(steps / MOST_STEPS))]
    config = replace(config, governors=changing(config.governors))
    if most:
        shares, run = max(every, key=sum), 1.0
    else:
        seen = [share for one in every for share in one if share]
        run, count = len(seen) / (len(every) * model.L), max(1, len(seen))
        mean, squares = sum(seen) / count, sum(share**2 for share in seen) / count
        # two shares of this mean and of these squares stand for all
        apart = math.sqrt(max(0.0, squares - mean**2))
        shares = mean - apart, mean + apart
    if set(shares) == {1.0}:
        shares = ()
    if not shares and run == 1:
        return config
    same = {f.name: getattr(model, f.name) for f in fields(model)}
    return replace(config, model=Seen(**same, shares=shares, running=run))
