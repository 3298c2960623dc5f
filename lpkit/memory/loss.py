"""Cross-entropy from hidden states, one chunk of tokens after the other, so that only the logits of
one chunk are in memory.

Backward needs the logits only to compute the gradients of the hidden states and of the head. So
forward computes both gradients while it has the logits of a chunk. For N tokens it saves the
gradient of the hidden states (N, D) and the gradient of the head's weight (V, D), instead of the
logits (N, V). Liger Kernel does the same (Hsu et al. 2024, https://arxiv.org/abs/2410.10989).
Wijmans et al. 2024 (https://arxiv.org/abs/2411.09009) never write logits to memory.

The logits of a chunk of n tokens take n V c bytes, where c is the bytes of one logit. A kernel
overwrites them by their gradient (`kernels.cross_entropy`), so no second tensor of this size
exists. For example, 1,024 tokens of a vocabulary of 50,304 in bf16 take 103 MB.

The code calls the head's own forward, so any head works (tied, or cast to low precision). For a
plain Linear the two gradients are two matmuls. The gradient of the weight is added to a float32 sum
over chunks. On a GPU in 16 bits the matmul itself adds to the sum, which moves 8 bytes per weight
and chunk instead of 12.

Forward computes the gradients of the sum over tokens, and backward divides them by the number of
tokens. The gradients of a mean would underflow in float16 before they are multiplied by the loss
scale. The results equal the gradients of the unchunked loss, up to the float32 rounding of the
exponential and of the sum over chunks.
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

from lpkit.contracts import IGNORED, Batch, Loss
from lpkit.kernels.cross_entropy import cross_entropy_
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.wide_product import WideLinear
from lpkit.nn.transformer import cross_entropy
from lpkit.precision.deferred import deferring
from lpkit.techniques.memory import Chunked
from lpkit.techniques.row import Settings

# A function of logits, targets and weights. It returns the nats, and overwrites the logits by their
# gradient, like `kernels.cross_entropy`.
NatsOf = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# `full` and `chunked`: the rows of `lpkit.techniques.memory.CROSS_ENTROPY` name these functions.

def full(settings: Settings, autocast: AbstractContextManager) -> Loss:
    return partial(full_cross_entropy, autocast=autocast)


def chunked(settings: Chunked, autocast: AbstractContextManager) -> Loss:
    return partial(chunked_cross_entropy, autocast=autocast, chunk=settings.chunk_tokens)


def full_cross_entropy(model: nn.Module, batch: Batch, *,
                       autocast: AbstractContextManager) -> Tensor:
    """Return the mean nats, () float32, over the tokens whose target is not IGNORED, weighted if
    the batch has weights. If an ignored token has NaN logits, the gradient is NaN, because the
    activations of the model are NaN, too."""
    with autocast:
        logits = model(batch.tokens, **batch.beside)
    targets = batch.targets
    if targets.is_floating_point():
        targets = labels(logits, targets)
    weights, vocabulary = batch.weights, getattr(model, "vocabulary", None)
    if weights is None and vocabulary is None:
        return cross_entropy(logits, targets)
    nats_of = vocabulary.nats if vocabulary else _nats_of
    nats = nats_of(logits.flatten(0, 1), targets.flatten())
    return _mean(nats, *counted(targets.flatten(), weights))


def _nats_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="none")


def labels(logits: Tensor, at: Tensor) -> Tensor:
    """Return token ids (...), drawn from softmax(logits), for logits (..., V). at: a uniform random
    number in [0, 1) for each token, (...): the quantile of the cumulative distribution."""
    sums = logits.detach().softmax(-1, dtype=torch.float32).cumsum_(-1)
    tokens = torch.searchsorted(sums, at[..., None], right=True).squeeze(-1)
    return tokens.clamp_(max=logits.shape[-1] - 1)


def chunked_cross_entropy(model: nn.Module, batch: Batch, *, autocast: AbstractContextManager,
                          chunk: int, by: str = "") -> Tensor:
    """Return the same loss as `full_cross_entropy`, from `model.hidden` and `model.head`. chunk:
    tokens whose logits exist at a time; by: the version of the kernel, empty for the device's
    default."""
    vocabulary = getattr(model, "vocabulary", None)
    nats_ = vocabulary.cross_entropy_ if vocabulary else partial(cross_entropy_, by=by)
    with autocast:
        h = model.hidden(batch.tokens, **batch.beside).flatten(0, 1)
        return linear_cross_entropy(h, model.head, batch.targets.flatten(), chunk, batch.weights,
                                    nats_)


def linear_cross_entropy(h: Tensor, head: nn.Module, y: Tensor, chunk: int,
                         weights: Tensor | None = None, nats_: NatsOf = cross_entropy_) -> Tensor:
    """Return sum(weights * nats) / sum(weights) over the tokens whose target is not IGNORED, ()
    float32 or float64; 0 if there are none.

    h: hidden states (N, D); y: targets (N,); weights: (N,), or None for weights of 1; chunk: tokens
    of a chunk; nats_: the kernel
    """
    weights, total = counted(y, weights)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(h, y, weights, total, head, chunk, nats_, *_trained(head))
    nats = _nats(h)
    for each, part, at, w in _pieces(nats, h, y, weights, chunk):
        each.copy_(nats_(head(part), at, w))
    return _mean(nats, weights, total)


def _trained(head: nn.Module) -> list[nn.Parameter]:
    return [p for p in head.parameters() if p.requires_grad]


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of `linear_cross_entropy`. A custom Function, because forward already computes the
    gradients, so that autograd saves no logits. h (N, D) hidden states, y (N,) targets, total ():
    the sum of weights."""

    @staticmethod
    def forward(ctx, h: Tensor, y: Tensor, weights: Tensor | None, total: Tensor, head: nn.Module,
                chunk: int, nats_: NatsOf, *parameters: Tensor) -> Tensor:
        # Allocate all tensors that outlive a chunk before the first chunk. Otherwise they would be
        # allocated in the freed memory of a chunk's logits, and the next logits would need new
        # memory.
        nats, dh = _nats(h), torch.empty_like(h)
        dp = [torch.zeros_like(p, dtype=nats.dtype) for p in parameters]
        # Backward only multiplies these gradients by a number, which is why they can be computed
        # here, before the gradient of the loss is known.
        for each, part, d_part, at, w in _pieces(nats, h, dh, y, weights, chunk):
            d_part.copy_(_gradients(head, part, each, at, w, dp, nats_))
        ctx.save_for_backward(dh, *dp)
        ctx.dtypes, ctx.total = [p.dtype for p in parameters], total
        return _mean(nats, weights, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        dh, *dp = ctx.saved_tensors
        g = g / ctx.total
        scaled = [d.mul_(g).to(dtype) for d, dtype in zip(dp, ctx.dtypes)]
        return dh.mul_(g), None, None, None, None, None, None, *scaled


def _gradients(head: nn.Module, part: Tensor, nats: Tensor, y: Tensor, weights: Tensor | None,
               dp: list[Tensor], nats_: NatsOf) -> Tensor:
    """Return the gradient of `part` (n, D), the hidden states of a chunk. Add the gradients of the
    head's parameters to `dp`, and write the nats of each token to `nats` (n,)."""
    with torch.enable_grad(), deferring(None):
        part = part.detach().requires_grad_()
        logits = head(part)
    g = logits.detach()
    y = labels(g, y) if y.is_floating_point() else y
    nats.copy_(nats_(g, y, weights))
    if type(head) not in (nn.Linear, WideLinear) or head.bias is not None:
        # Backward runs without autocast, which would cast the operands once more.
        with torch.autocast(g.device.type, enabled=False):
            d_part, *d = torch.autograd.grad(logits, (part, *_trained(head)), g)
        if d:
            torch._foreach_add_(dp, d)
        return d_part
    for hook in (logits._backward_hooks or {}).values():    # telemetry reads this gradient
        hook(g)
    if not dp:
        return g @ head.weight
    (dw,) = dp
    if g.dtype == dw.dtype:
        dw.addmm_(g.T, part)
    elif _adds_wide(g):
        _add_product(dw, g.T, part.to(g.dtype))
    else:
        dw += g.T @ part
    return g @ head.weight      # autocast casts the weight, and has cached this cast in forward


def _adds_wide(g: Tensor) -> bool:
    """Return whether a matmul of 16-bit operands can add to a float32 tensor on this device,
    without rounding the result to 16 bits first. cuBLAS can."""
    sixteen = g.dtype in (torch.bfloat16, torch.float16)
    return g.device.type == "cuda" and sixteen and torch.version.hip is None


@operator("add_product_(Tensor(a!) total, Tensor a, Tensor b) -> ()", key=EVERY_DEVICE,
          fake=lambda *_: None, flops=lambda _, a, b, **__: 2 * a[0] * a[1] * b[1])
def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to the float32 tensor `total`, in place. This is an operator, because fake tensors
    before torch 2.13 do not support this form of addmm."""
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _nats(h: Tensor) -> Tensor:
    return h.new_empty(len(h), dtype=torch.promote_types(h.dtype, torch.float32))


def _pieces(*tensors: Tensor | int | None) -> zip:
    """Yield the chunks of all tensors together, along dimension 0; None for a tensor that is None.
    The last argument is the number of tokens in a chunk."""
    *tensors, chunk = tensors
    return zip(*(repeat(None) if tensor is None else tensor.split(chunk) for tensor in tensors))


def _mean(nats: Tensor, weights: Tensor | None, total: Tensor) -> Tensor:
    """Return sum(weights * nats) / total. If a weight is 0, its term is 0, even if its nats are
    NaN."""
    return (nats if weights is None else (nats * weights).where(weights != 0, 0)).sum() / total


def counted(targets: Tensor, weights: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Return the weights (N,), which are 0 for IGNORED targets, and their sum. Without weights
    return None and the number of targets that are not IGNORED. The second result is always above 0,
    so that a loss without targets is 0, not 0 / 0."""
    counts = targets != IGNORED
    if weights is None:
        return None, counts.sum().clamp(min=1)
    weights = weights.flatten().float() * counts
    return weights, weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
