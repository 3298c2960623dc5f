"""Cross-entropy from hidden states, a piece of the tokens at a time: the logits of all tokens are never there at once.

Backward needs of the logits only what it does to the hidden states and to the head, so both gradients are made in the
forward pass, while a piece's logits are there: (n, D) and the head's own shape are kept instead of (n, V). As in
Liger Kernel (Hsu et al. 2024, https://arxiv.org/abs/2410.10989); Wijmans et al. 2024, https://arxiv.org/abs/2411.09009
go further and keep the logits out of memory altogether.

A piece of n tokens holds n V (c + 8) bytes at its worst, c those of a number in the head's product: the logits, in float32
once more where c is less, and their log-probabilities, which become the gradient in place. The head's own forward runs, so
whatever it is (tied, cast to few bits) stays what it is. Gradients are those of the sum over tokens, divided by their number
in backward: in float16 a mean would underflow before the loss scale meets it. They equal the whole loss's up to float32
rounding: of the exponential, and of the head's gradient, a sum over pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lpkit.config import MemoryConfig
from lpkit.contracts import Loss
from lpkit.memory.row import Row
from lpkit.nn.transformer import cross_entropy


def whole(model: nn.Module, x: Tensor, y: Tensor, *, autocast: AbstractContextManager) -> Tensor:
    """Mean nats per token; x and y (B, T)."""
    with autocast:
        logits = model(x)
    return cross_entropy(logits, y)


def chunked(model: nn.Module, x: Tensor, y: Tensor, *, autocast: AbstractContextManager, chunk: int) -> Tensor:
    """The same from `model.hidden` and `model.head`, `chunk` tokens at a time."""
    with autocast:
        return linear_cross_entropy(model.hidden(x).flatten(0, 1), model.head, y.flatten(), chunk)


def linear_cross_entropy(h: Tensor, head: nn.Module, y: Tensor, chunk: int) -> Tensor:
    """Mean nats per token of head(h), float32 (); h (N, D), y (N,)."""
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(h, y, head, chunk, *head.parameters())
    return torch.stack([_nats(_log_softmax(head(part)), at) for part, at in _pieces(h, y, chunk)]).sum() / len(y)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor, y: Tensor, head: nn.Module, chunk: int, *parameters: Tensor) -> Tensor:
        dh, dp, nats = torch.empty_like(h), None, []
        start = 0
        for part, at in _pieces(h, y, chunk):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                logits = head(part)
            g = _log_softmax(logits.detach())
            nats.append(_nats(g, at))
            g.exp_()
            g[torch.arange(len(at), device=at.device), at] -= 1
            d_part, *d = torch.autograd.grad(logits, (part, *parameters), g.to(logits.dtype))
            dh[start:start + len(at)] = d_part
            dp = [one.float() for one in d] if dp is None else [total.add_(one) for total, one in zip(dp, d)]
            start += len(at)
            del logits, g, d    # before the next piece's are made
        ctx.save_for_backward(dh, *dp)
        ctx.dtypes = [p.dtype for p in parameters]
        return torch.stack(nats).sum() / len(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        dh, *dp = ctx.saved_tensors
        g = g / len(dh)
        return dh.mul_(g), None, None, None, *(d.mul_(g).to(dtype) for d, dtype in zip(dp, ctx.dtypes))


def _pieces(h: Tensor, y: Tensor, chunk: int) -> zip:
    return zip(h.split(chunk), y.split(chunk))


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1)


def _nats(log_probabilities: Tensor, y: Tensor) -> Tensor:
    return -log_probabilities.gather(1, y[:, None]).sum()


@dataclass(frozen=True, kw_only=True)
class LossRow(Row):
    """How the loss is computed, and which method of the model it calls: that is the one to compile; None: the model."""

    make: Callable[[MemoryConfig, AbstractContextManager], Loss]
    entry: str | None


LOSSES = {
    "whole": LossRow(make=lambda m, autocast: partial(whole, autocast=autocast), entry=None,
                     why="all logits at once"),
    "chunked": LossRow(make=lambda m, autocast: partial(chunked, autocast=autocast, chunk=m.loss_chunk), entry="hidden",
                       why="gradients of hidden states and head are made in the forward pass, a piece of the tokens at a "
                           "time (Hsu et al. 2024, arXiv:2410.10989; Wijmans et al. 2024, arXiv:2411.09009)"),
}
