"""A model is changed once, when it is built (MODEL_TRANSFORMS), or around updates (GOVERNORS).

A transform's implementation is f(settings) -> contracts.Transform; a governor's is f(settings) ->
contracts.Governor. Rows come from outside: add one, and name it in a Config.
"""

from lpkit.techniques.row import Row

MODEL_TRANSFORMS: dict[str, Row] = {}
GOVERNORS: dict[str, Row] = {}
# f(training, path, every=precision.telemetry_every): it watches updates and changes nothing
TELEMETRY = Row(why="what number formats do to the tensors of a run",
                implementation="lpkit.measure.telemetry:attach")
