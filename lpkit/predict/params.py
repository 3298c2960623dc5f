"""Parameters of a model, by part: counts, which tests/test_predict.py holds equal to PyTorch's."""

import functools

from lpkit.config import ModelConfig
from lpkit.techniques.blocks import Operations, operations
from lpkit.techniques.operation import MicroBatch


@functools.lru_cache(maxsize=256)
def of(model: ModelConfig) -> Operations:
    """The operations of `model`, where neither tokens nor precision matter."""
    return operations(MicroBatch(model=model))


def parameters(model: ModelConfig) -> dict[str, int]:
    """Numbers by part; their sum is the model's size. A tied head adds none."""
    return dict(_parts(model))


@functools.lru_cache(maxsize=256)
def _parts(model: ModelConfig) -> dict[str, int]:
    ops = of(model)
    counts = dict.fromkeys(("embedding", "positions", "attention", "mlp", "norms", "head"), 0)
    outside = (ops.embed, ops.positions, ops.norm, ops.head)
    for times, group in ((1, outside), (model.L, ops.block)):
        for op in group:
            if op.params:
                counts[op.part] = counts.get(op.part, 0) + times * op.params
    return counts


@functools.lru_cache(maxsize=256)
def trained_count(model: ModelConfig) -> int:
    """Numbers that have gradients and optimizer states."""
    ops = of(model)
    outside = (ops.embed, ops.positions, ops.norm, ops.head)
    return sum(times * op.params for times, group in ((1, outside), (model.L, ops.block))
               for op in group if op.trained)


def parameter_count(model: ModelConfig) -> int:
    return sum(parameters(model).values())
