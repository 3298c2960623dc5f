"""Objectives: the losses that updates minimise. The loss of evaluation is always the cross-entropy
of the next token. The implementation is f(settings, contracts.ObjectiveContext) ->
contracts.Loss."""

from collections.abc import Callable
from dataclasses import dataclass

from lpkit.techniques.operation import MicroBatch, Op
from lpkit.techniques.row import Settings, TechniqueRow


@dataclass(frozen=True, kw_only=True)
class Objective(TechniqueRow):
    """A row of OBJECTIVES.

    `operations(s, settings)` returns the forward operations of an objective for micro-batch `s`, in
    addition to those of the model and of the next-token loss: for example a teacher model. Their
    matmuls and moved bytes take time, and their `saved_bytes` are held until backward. Their
    `params` are stored in float32 on every rank, and are not trained.
    """

    operations: Callable[[MicroBatch, Settings], tuple[Op, ...]] = lambda s, settings: ()


OBJECTIVES = {
    "next-token": Objective(why="the mean cross-entropy of the next token, as computed by memory."
                                "cross_entropy"),
}
