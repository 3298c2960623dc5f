"""A model is changed once, when it is built (MODEL_TRANSFORMS), or around updates (GOVERNORS).

A transform's implementation is f(settings) -> contracts.Transform; a governor's is f(settings) ->
contracts.Governor. Rows come from outside: add one, and name it in a Config.
"""

from typing import Any

from lpkit.techniques.depth import DEPTH, Governor
from lpkit.techniques.row import Row, Settings

MODEL_TRANSFORMS: dict[str, Row] = {}
GOVERNORS: dict[str, Row] = {**DEPTH}
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
