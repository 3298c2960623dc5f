"""Objectives: the losses that updates reduce. Evaluation always reports nats of the next token. The
implementation is f(settings, contracts.ObjectiveContext) -> contracts.Loss."""

from collections.abc import Callable
from dataclasses import dataclass

from lpkit.techniques.operation import MicroBatch, Op
from lpkit.techniques.row import Row, Settings


@dataclass(frozen=True, kw_only=True)
class Objective(Row):
    """`operations(s, settings)`: the forward operations of a micro-batch besides the model and the
    next-token loss. Their products and moves take time, and their `saved_bytes` wait for backward.
    Their `params` are stored in float32 on every rank and are not trained."""

    operations: Callable[[MicroBatch, Settings], tuple[Op, ...]] = lambda s, settings: ()


OBJECTIVES = {
    "next-token": Objective(why="the mean cross-entropy of the next token, which memory."
                                "cross_entropy computes"),
}
