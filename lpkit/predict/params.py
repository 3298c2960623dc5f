"""Parameters of a model, by part. Counts, not bytes. tests/test_predict.py holds them equal to PyTorch's."""

import functools

from lpkit.config import ModelConfig
from lpkit.techniques.blocks import MicroBatch, Operations, operations


@functools.lru_cache(maxsize=256)
def of(model: ModelConfig) -> Operations:
    """The operations of `model`, where neither tokens nor precision matter."""
    return operations(MicroBatch(model=model))


def parameters(model: ModelConfig) -> dict[str, int]:
    """Numbers by part; their sum is the model's size. A tied head adds none."""
    ops = of(model)
    counts = dict.fromkeys(("embedding", "positions", "attention", "mlp", "norms", "head"), 0)
    for times, group in ((1, (ops.embed, ops.positions)), (model.L, ops.block), (1, (ops.norm, ops.head))):
        for op in group:
            if op.params:
                counts[op.part] = counts.get(op.part, 0) + times * op.params
    return counts


def parameter_count(model: ModelConfig) -> int:
    return sum(parameters(model).values())


def block_parameters(model: ModelConfig) -> int:
    """Of one block."""
    return sum(op.params for op in of(model).block)


def product_weights(model: ModelConfig) -> int:
    """Parameters that sit in a matrix product (the Linear weights, a tied head included): what 2 FLOPs a token
    pay for, and what autocast copies to 16 bits."""
    ops = of(model)
    return model.L * sum(op.weights for op in ops.linears) + ops.head.weights
