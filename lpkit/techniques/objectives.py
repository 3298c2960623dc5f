"""Objectives: what updates make smaller. Evaluation reports nats of the next token, whatever is
trained. The implementation is f(settings, contracts.ObjectiveContext) -> contracts.Loss."""

from collections.abc import Callable
from dataclasses import dataclass

from lpkit.techniques.operation import MicroBatch, Op
from lpkit.techniques.row import Row, Settings


@dataclass(frozen=True, kw_only=True)
class Objective(Row):
    """`operations(s, settings)`: what a micro-batch runs forward beside the model and the loss of
    next-token. Their products and moves take time; `saved_bytes` wait for backward; `params` rest
    in float32 on every rank, and are not trained."""

    operations: Callable[[MicroBatch, Settings], tuple[Op, ...]] = lambda s, settings: ()


OBJECTIVES = {
    "next-token": Objective(why="the mean cross-entropy of the next token, which memory."
                                "cross_entropy computes"),
}
