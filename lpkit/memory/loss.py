"""Cross-entropy from hidden states, a piece of the tokens at a time, for fewer logits at once.

Backward needs of the logits only what it does to the hidden states and to the head, so both
gradients are made in the forward pass, while a piece's logits are there: (n, D) and the head's own
shape are kept instead of (n, V). As in Liger Kernel (Hsu et al. 2024,
https://arxiv.org/abs/2410.10989); Wijmans et al. 2024, https://arxiv.org/abs/2411.09009 go further
and keep the logits out of memory altogether.

A piece of n tokens holds n V c bytes on a CPU, c those of a number in the head's product: logits
become their gradient in place (`kernels.rows.cross_entropy_`). Elsewhere its definition holds 8
more of each for a moment, their log-probabilities and, where c is less than 4, their float32.
The head's own forward runs, so whatever it is (tied, cast to low precision) stays what it is; a
plain Linear's gradients are two products, the weight's in float32 without a tensor beside the sum.
Gradients are those of the sum over tokens, divided by their number in backward:
in float16 a mean would underflow before the loss scale meets it. They equal the whole loss's up to
float32 rounding: of the exponential, and of the head's gradient, a sum over pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lpkit.contracts import Batch, Loss
from lpkit.kernels.rows import cross_entropy_
from lpkit.nn.transformer import cross_entropy
from lpkit.techniques.memory import Chunked
from lpkit.techniques.row import Settings

OfLogits = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]

# Of the rows of `lpkit.techniques.memory.CROSS_ENTROPY`.

def full(settings: Settings, autocast: AbstractContextManager) -> Loss:
    return partial(full_cross_entropy, autocast=autocast)


def chunked(settings: Chunked, autocast: AbstractContextManager, *,
            compiled: Callable[[Callable], Callable] | None = None) -> Loss:
    return partial(chunked_cross_entropy, autocast=autocast, chunk=settings.chunk_tokens,
                   of_logits=compiled(fusible) if compiled else in_place)


def full_cross_entropy(model: nn.Module, batch: Batch, *,
                       autocast: AbstractContextManager) -> Tensor:
    """Mean nats per token, weighted where the batch has weights."""
    with autocast:
        logits = model(batch.tokens)
    if batch.weights is None:
        return cross_entropy(logits, batch.targets)
    nats = functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(),
                                    reduction="none")
    weights = batch.weights.flatten().float()
    return (nats * weights).sum() / _total(weights)


def in_place(logits: Tensor, y: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Nats of each token, float32 (n,), and the gradient of their sum under w, in `logits`."""
    return cross_entropy_(logits, y, w), logits


def fusible(logits: Tensor, y: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same for torch.compile: a comparison fuses, a write to some places does not."""
    g = _log_softmax(logits)
    nats = -g.gather(1, y[:, None])[:, 0]
    g = g.exp() - (torch.arange(g.shape[1], device=g.device) == y[:, None]).float()
    if w is not None:
        g = g * w[:, None]
    return nats, g.to(logits.dtype)


def chunked_cross_entropy(model: nn.Module, batch: Batch, *, autocast: AbstractContextManager,
                          chunk: int, of_logits: OfLogits = in_place) -> Tensor:
    """The same from `model.hidden` and `model.head`, `chunk` tokens at a time."""
    weights = None if batch.weights is None else batch.weights.flatten().float()
    with autocast:
        h = model.hidden(batch.tokens).flatten(0, 1)
        return linear_cross_entropy(h, model.head, batch.targets.flatten(), chunk, weights,
                                    of_logits)


def linear_cross_entropy(h: Tensor, head: nn.Module, y: Tensor, chunk: int,
                         weights: Tensor | None = None,
                         of_logits: OfLogits = in_place) -> Tensor:
    """Mean nats per token of head(h), float32 (); h (N, D), y and weights (N,)."""
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(h, y, weights, head, chunk, of_logits, *head.parameters())
    nats = [_nats(_log_softmax(head(part)), at, w) for part, at, w in _pieces(h, y, weights, chunk)]
    return torch.stack(nats).sum() / _total(weights, len(y))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor, y: Tensor, weights: Tensor | None, head: nn.Module, chunk: int,
                of_logits: OfLogits, *parameters: Tensor) -> Tensor:
        dh, nats, start = torch.empty_like(h), [], 0
        dp = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        gradients = _of_linear if type(head) is nn.Linear and head.bias is None else _of_module
        for part, at, w in _pieces(h, y, weights, chunk):
            each, d_part = gradients(head, part, at, w, dp, of_logits)
            dh[start:start + len(at)] = d_part
            start += len(at)
            nats.append(each.sum() if w is None else (each * w).sum())
        ctx.save_for_backward(dh, *dp)
        ctx.dtypes, ctx.total = [p.dtype for p in parameters], _total(weights, len(y))
        return torch.stack(nats).sum() / ctx.total

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        dh, *dp = ctx.saved_tensors
        g = g / ctx.total
        scaled = [d.mul_(g).to(dtype) for d, dtype in zip(dp, ctx.dtypes)]
        return dh.mul_(g), None, None, None, None, None, *scaled


def _of_linear(head: nn.Linear, part: Tensor, y: Tensor, weights: Tensor | None,
               dp: list[Tensor], of_logits: OfLogits) -> tuple[Tensor, Tensor]:
    """Nats of each token and the gradient of `part`; that of the weight is added to `dp`, in place
    where the product is in float32. Autocast has the weight's copy still."""
    _, logits = _head(head, part)
    nats, g = of_logits(logits.detach(), y, weights)
    for hook in (logits._backward_hooks or {}).values():    # telemetry looks at this gradient
        hook(g)
    (dw,) = dp
    if g.dtype == dw.dtype:
        dw.addmm_(g.T, part)
    else:
        dw += g.T @ part
    return nats, g @ head.weight


def _of_module(head: nn.Module, part: Tensor, y: Tensor, weights: Tensor | None,
               dp: list[Tensor], of_logits: OfLogits) -> tuple[Tensor, Tensor]:
    """The same of any head, by its own backward."""
    part, logits = _head(head, part)
    nats, g = of_logits(logits.detach(), y, weights)
    d_part, *d = torch.autograd.grad(logits, (part, *head.parameters()), g)
    torch._foreach_add_(dp, d)
    return nats, d_part


@torch.enable_grad()
@torch.enable_grad()
def _head(head: nn.Module, part: Tensor) -> tuple[Tensor, Tensor]:
    part = part.detach().requires_grad_()
    return part, head(part)


def _pieces(h: Tensor, y: Tensor, weights: Tensor | None, chunk: int) -> zip:
    of_each = repeat(None) if weights is None else weights.split(chunk)
    return zip(h.split(chunk), y.split(chunk), of_each)


def _total(weights: Tensor | None, tokens: int = 0) -> Tensor | int:
    """Of the weights, to divide by. All zero in a micro-batch: its loss is 0, not 0 / 0."""
    return tokens if weights is None else weights.sum().clamp(min=torch.finfo(torch.float32).tiny)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1)


def _nats(log_probabilities: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    nats = -log_probabilities.gather(1, y[:, None])
    return nats.sum() if weights is None else (nats[:, 0] * weights).sum()
