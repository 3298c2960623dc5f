"""A model is changed once, when it is built (MODEL_TRANSFORMS), around updates (GOVERNORS), or when a
run begins from a smaller one (GROWTH).

A transform's implementation is f(settings) -> contracts.Transform; a governor's is f(settings) ->
contracts.Governor. Rows come from outside: add one, and name it in a Config. The rows of the
lessons are in `notebooks/lessons/rows`: depth.py has governors, growth.py has growth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lpkit.techniques.row import Row, Settings


@dataclass(frozen=True, kw_only=True)
class Governor(Row):
    """A governor whose updates run less of the model.

    `shares(settings, layers, steps, seed, step)` returns for each layer the share of the tokens
    that it sees in the update after `step` others; 0: the layer is left out, and the stream passes
    it. The run and the prediction read it. It depends on nothing else, so that ranks agree and a
    resumed run goes on."""

    shares: Callable[[Any, int, int, int, int], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Growth(Row):
    """A way to grow a small model into a large one (`start.grow`).

    The implementation is f(tensors, small, large, settings), of the small model's tensors and both
    ModelConfigs: pairs of a name and a tensor of the large model, made one by one.
    `problem(settings, small, large)`: why one cannot become the other, and the way out; empty: it
    can."""

    problem: Callable[[Settings, Any, Any], str] = lambda settings, small, large: ""


MODEL_TRANSFORMS: dict[str, Row] = {}
GOVERNORS: dict[str, Row] = {}
GROWTH: dict[str, Growth] = {"none": Growth(why="by the same names and shapes, or start.map")}
# f(training, path, every=precision.telemetry_every): it watches updates and changes nothing
TELEMETRY = Row(why="what number formats do to the tensors of a run",
                implementation="lpkit.measure.telemetry:attach")


def running(config: Any) -> list[Settings]:
    """Returns the settings of those that say how much of the model an update runs."""
    return [one for one in config.governors if isinstance(GOVERNORS[one.name], Governor)]


def why_not(config: Any) -> str:
    """Says why these cannot be in `config`, and the way out; empty: they can."""
    said = running(config)
    names = f"governors={','.join(one.name for one in said)}"
    if len(said) > 1:
        return f"{names} each say how much of the model an update runs; name one of them"
    why = "".join(one.problem(config) for one in said)
    return f"{names}{why}" if why else ""
