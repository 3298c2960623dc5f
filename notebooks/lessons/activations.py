"""The bytes that a model's forward pass keeps for backward, by formula, with or without
recomputation."""

from dataclasses import dataclass

from lpkit.config import ModelConfig
from lpkit.predict.activations import Kept, saved
from lpkit.techniques.blocks import operations
from lpkit.techniques.memory import RECOMPUTE
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.row import chosen


@dataclass(frozen=True, kw_only=True)
class Forward(Kept):
    """The bytes that a forward pass keeps, with the copies of the weights."""
    weight_copy_bytes: float        # copies of the weights in the compute dtype, by autocast


def kept(model: ModelConfig, *, batch: int, recompute: str = "none", **sizes: object) -> Forward:
    """Return the bytes that autograd keeps between forward and backward, by operation.

    batch: number of sequences of model.context tokens
    recompute: the name of a row of RECOMPUTE, which decides what a block keeps
    sizes: other fields of a MicroBatch, for example compute_bytes=2
    """
    settings, row = chosen(RECOMPUTE, recompute, "memory.recompute"), RECOMPUTE[recompute]
    s = MicroBatch(model=model, batch=batch, **sizes, attends_again=row.attention_alone)
    ops, whole = operations(s), model.L
    if row.repeats_blocks:
        whole -= len(range(0, model.L, row.every(settings)))
    # autograd also keeps the 16-bit copies of the weights, except those of recomputed blocks
    copied = ops.head.weights + ops.linear_weights * whole if s.mixed else 0
    return Forward(**vars(saved(s, ops, settings, plain=ops)),
                   weight_copy_bytes=copied * s.compute_bytes)
