"""Changes of a model: when it is built (MODEL_TRANSFORMS), around updates (GOVERNORS), or when a run
starts from a smaller model (GROWTH).

A transform's implementation is f(settings) -> contracts.Transform; a governor's is f(settings) ->
contracts.Governor. Other packages add rows, which a Config can name. The lessons' rows are in
`notebooks/lessons/rows`: depth.py has governors, growth.py has growth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lpkit.techniques.row import Row, Settings


@dataclass(frozen=True, kw_only=True)
class Governor(Row):
    """A governor whose updates run less of the model.

    `shares(settings, layers, steps, seed, step)` returns for each layer the share of the tokens
    that it sees in the update after `step` others; 0: the stream bypasses the layer. The run and
    the prediction call it. It depends only on its arguments, so that ranks agree and a resumed run
    continues alike."""

    shares: Callable[[Any, int, int, int, int], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Growth(Row):
    """A way to grow a small model into a large one (`start.grow`).

    The implementation is f(tensors, small, large, settings), of the small model's tensors and both
    ModelConfigs. It yields pairs of a name and a tensor of the large model, one at a time.
    `problem(settings, small, large)` returns why the small model cannot become the large one, and
    the way out; "": it can."""

    problem: Callable[[Settings, Any, Any], str] = lambda settings, small, large: ""


MODEL_TRANSFORMS: dict[str, Row] = {}
GOVERNORS: dict[str, Row] = {}
GROWTH: dict[str, Growth] = {"none": Growth(why="by the same names and shapes, or start.map")}
# f(training, path, every=precision.telemetry_every): observes updates, changes nothing
TELEMETRY = Row(why="what number formats do to the tensors of a run",
                implementation="lpkit.measure.telemetry:attach")


def running(config: Any) -> list[Settings]:
    """Return the settings of the governors that decide how much of the model an update runs."""
    return [governor for governor in config.governors
            if isinstance(GOVERNORS[governor.name], Governor)]


def why_not(config: Any) -> str:
    """Return why the governors of `config` do not go together, and the way out; "": they do."""
    governors = running(config)
    names = f"governors={','.join(governor.name for governor in governors)}"
    if len(governors) > 1:
        return f"{names} each say how much of the model an update runs; name one of them"
    why = "".join(governor.problem(config) for governor in governors)
    return f"{names}{why}" if why else ""
