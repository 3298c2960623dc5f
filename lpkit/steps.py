"""What one update does before the optimizer: forward and backward, in one piece or in micro-batches."""

from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from lpkit.contracts import Step
from lpkit.nn.transformer import cross_entropy


def loss(model: nn.Module, x: Tensor, y: Tensor, *, autocast: AbstractContextManager) -> Tensor:
    """Mean nats per token; x and y (B, T)."""
    with autocast:
        logits = model(x)
    return cross_entropy(logits, y)


def accumulate(parts: int, autocast: AbstractContextManager) -> Step:
    """`parts` micro-batches, one update: the same gradient as the whole batch, 1/parts of the activations."""
    return partial(_accumulate, parts=parts, autocast=autocast)


def _accumulate(model: nn.Module, x: Tensor, y: Tensor, *, parts: int, autocast: AbstractContextManager) -> Tensor:
    losses = []
    for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
        part = loss(model, x_part, y_part, autocast=autocast) / parts
        part.backward()
        losses.append(part.detach())
    return torch.stack(losses).sum()
