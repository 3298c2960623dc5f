"""Changes of a model: when the model is built (MODEL_TRANSFORMS), before and after updates
(GOVERNORS), or when a run starts from a smaller model (GROWTH).

The implementation of a transform is f(settings) -> contracts.Transform, and that of a governor is
f(settings) -> contracts.Governor. These tables are almost empty: other packages add rows to them.
The rows of the lessons are in `notebooks/lessons/rows`: depth.py has governors, growth.py has ways
to grow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lpkit.techniques.row import Settings, TechniqueRow


@dataclass(frozen=True, kw_only=True)
class GovernorRow(TechniqueRow):
    """A governor with which an update runs only a part of the model.

    `shares(settings, layers, steps, seed, step)` returns, for each layer, the share of the tokens
    that the layer computes in the update after `step` updates. Share 0: all tokens bypass the
    layer. The run and the prediction call this function. It must depend only on its arguments, so
    that all ranks get the same shares, and a resumed run the same as an uninterrupted run."""

    shares: Callable[[Any, int, int, int, int], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Growth(TechniqueRow):
    """A way to grow a small model into a large model (`start.grow`).

    The implementation is f(tensors, small, large, settings): the tensors of the small model by
    name, and the ModelConfigs of both models. It yields (name, tensor) for each tensor of the large
    model. `problem(settings, small, large)` returns why the small model cannot be grown into the
    large one, and the way out; "": it can."""

    problem: Callable[[Settings, Any, Any], str] = lambda settings, small, large: ""


MODEL_TRANSFORMS: dict[str, TechniqueRow] = {}
GOVERNORS: dict[str, TechniqueRow] = {}
GROWTH: dict[str, Growth] = {
    "none": Growth(why="no growth: copies weights of the same name, or by start.map")}
# f(training, run folder, every=precision.telemetry_every): observes updates, and changes nothing
TELEMETRY = TechniqueRow(why="records what number formats do to the tensors of a run",
                         implementation="lpkit.measure.telemetry:attach")


def running(config: Any) -> list[Settings]:
    """Return the settings of the governors in `config` that decide how much of the model an update
    runs: those whose row is a GovernorRow."""
    return [governor for governor in config.governors
            if isinstance(GOVERNORS[governor.name], GovernorRow)]


def why_not(config: Any) -> str:
    """Return why the governors of `config` do not go together, and the way out; "": they do."""
    governors = running(config)
    names = f"governors={','.join(governor.name for governor in governors)}"
    if len(governors) > 1:
        return f"{names} each say how much of the model an update runs; name one of them"
    why = "".join(governor.problem(config) for governor in governors)
    return f"{names}{why}" if why else ""
