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


def changing(governors: tuple[Settings, ...]) -> tuple[Settings, ...]:
    """Returns those that do not say how much of the model an update runs."""
    return tuple(one for one in governors if not isinstance(GOVERNORS[one.name], Governor))


def running(config: Any) -> list[Settings]:
    """Returns the settings of those that do."""
    others = changing(config.governors)
    return [one for one in config.governors if one not in others]


def why_not(config: Any) -> str:
    """Says why these governors cannot be in `config`, and the way out; empty: they can."""
    said = running(config)
    names = [one.name for one in said]
    if len(names) > 1:
        return (f"governors={','.join(names)} each say how much of the model an update runs; name "
                f"one of them")
    found = [GOVERNORS[one.name].problem(one, config) for one in said]
    return f"governors={names[0]}{found[0]}" if any(found) else ""
