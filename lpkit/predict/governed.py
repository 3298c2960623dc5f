"""The part of a model that an update computes if a governor skips tokens or layers
(`lpkit.techniques.changes.Governor`).

`governed(config)` replaces such governors by a model with fewer tokens or layers, so that the
formulas of `lpkit.predict` need not know governors. For FLOPs and seconds, the model has the
average over the steps and layers of a run. For bytes, it has the tokens of the update that skips
least.
"""

import functools
import math
from dataclasses import dataclass, fields, replace

from lpkit.config import Config, ModelConfig
from lpkit.techniques.changes import GOVERNORS, running

MOST_STEPS = 1024       # steps of a run at which governors are evaluated, evenly spaced


@dataclass(frozen=True, kw_only=True)
class GovernedModel(ModelConfig):
    """A ModelConfig whose layers see only a part of the tokens, or do not all run."""

    # shares of the tokens that layers see, in the form that `Op.seeing` takes
    shares: tuple[float, ...] = ()
    running: float = 1.0            # share of the layers that run in an update


def governed(config: Config, most: bool = False) -> Config:
    """Return `config` without the governors that skip tokens or layers, and with a smaller model
    instead. `most`: the model of the update that skips least; else the average over the run."""
    return _governed(config, most) if running(config) else config


def shares(config: Config) -> list[tuple[float, ...]]:
    """Return, for each governor and up to MOST_STEPS updates of the run, the share of the tokens
    that each layer sees (0: the layer is skipped). Empty if no governor skips."""
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
        # Two shares with the same mean and the same mean square as all shares, because the cost of
        # attention grows with the square of a share.
        apart = math.sqrt(max(0.0, squares - mean**2))
        parts = mean - apart, mean + apart
    same = {f.name: getattr(model, f.name) for f in fields(model)}
    parts = () if set(parts) == {1.0} else parts
    model = GovernedModel(**same, shares=parts, running=run) if parts or run < 1 else model
    return replace(config, model=model,
                   governors=tuple(row for row in config.governors if row not in skipping))
