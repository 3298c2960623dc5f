"""The part of a model that a run's updates see if a governor skips tokens or layers
(`lpkit.techniques.changes.Governor`).

A governed config has no such governor. Its model has the sizes that all formulas of `lpkit.predict`
need: those that updates see on average over steps and layers. Bytes are those of the update that
sees most.
"""

import functools
import math
from dataclasses import dataclass, fields, replace

from lpkit.config import Config, ModelConfig
from lpkit.techniques.changes import GOVERNORS, running

MOST_STEPS = 1024       # steps of a run at which governors are evaluated, evenly spaced


@dataclass(frozen=True, kw_only=True)
class Seen(ModelConfig):
    """`shares` of the tokens in layers that run, as `Op.seeing` takes them. `running`: the share of
    the layers that run."""

    shares: tuple[float, ...] = ()
    running: float = 1.0


def governed(config: Config, most: bool = False) -> Config:
    """Return the governed config. `most`: of the update that sees most, not of the average."""
    return _governed(config, most) if running(config) else config


def shares(config: Config) -> list[tuple[float, ...]]:
    """Return the shares of each evaluated update; empty if no governor gives any."""
    m, steps = config.model, config.steps
    return [GOVERNORS[governor.name].shares(governor, m.L, steps, config.seed, step)
            for governor in running(config)
            for step in range(0, steps, math.ceil(steps / MOST_STEPS))]


@functools.lru_cache(maxsize=256)
def _governed(config: Config, most: bool) -> Config:
    model, every, skipping = config.model, shares(config), running(config)
    parts, run = max(every, key=sum), 1.0
    if not most:
        seen = [share for of_layers in every for share in of_layers if share]
        run, count = len(seen) / (len(every) * model.L), max(1, len(seen))
        mean, squares = (sum(share**power for share in seen) / count for power in (1, 2))
        # two shares that have the same mean and the same mean square as all shares
        apart = math.sqrt(max(0.0, squares - mean**2))
        parts = mean - apart, mean + apart
    same = {f.name: getattr(model, f.name) for f in fields(model)}
    parts = () if set(parts) == {1.0} else parts
    model = Seen(**same, shares=parts, running=run) if parts or run < 1 else model
    return replace(config, model=model,
                   governors=tuple(row for row in config.governors if row not in skipping))
