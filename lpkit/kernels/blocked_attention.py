"""Causal attention for CPUs: blocks of queries, so that the future is skipped instead of masked.

PyTorch's CPU flash kernel computes in float32 whatever it is given, and visits masked blocks too.
Here every product is one batched matrix product in the inputs' own dtype, so bf16 hardware is used,
and a block of queries meets only the keys that it may see. Where float32 is the faster one
(`kernels.wide_product`; with AVX2 alone bf16 takes ten times as long), products and what is between
them are in float32. It keeps the probabilities for backward, (N, T, T) numbers at most, in the
inputs' dtype: right for short contexts, wrong for long ones.

Shapes: q, k and v (N, T, E), N = batch * heads; the output is like q. FLOPs are counted as PyTorch
counts them for its own attention and `lpkit.predict.flops` does: the whole square of scores.
"""

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.rows import causal_softmax_, causal_softmax_backward_
from lpkit.kernels.wide_product import SMALL_FLOPS, choice

BLOCK = 128   # queries; smaller blocks skip more and start more products


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(E)) v over the tokens so far."""
    T, E = q.shape[-2:]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT / math.sqrt(E)).masked_fill(future, -torch.inf).softmax(-1) @ v


def _products(count: int, shape: torch.Size) -> int:
    """FLOPs of `count` products over all pairs of tokens."""
    N, T, E = shape
    return count * 2 * N * T * T * E


def _computed(*tensors: Tensor) -> list[Tensor]:
    """In the dtype whose products are faster here. A trace runs nothing that could be raced."""
    (N, T, E), first = tensors[0].shape, tensors[0]
    wide = (first.dtype == torch.bfloat16 and first.device.type == "cpu"
            and not isinstance(first, FakeTensor) and _products(1, (N, T, E)) >= SMALL_FLOPS
            and choice("auto", torch.get_num_threads()).used == "float32")
    return [t.float() if wide else t for t in tensors]


@operator("blocked_attention(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor[])", key=EVERY_DEVICE,
          flops=lambda q, *_, **__: _products(2, q))
@torch.autocast("cpu", enabled=False)
def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the probabilities of each block."""
    (T, E), dtype = q.shape[-2:], q.dtype
    out, probabilities = torch.empty_like(q), []
    q, k, v = _computed(q, k, v)
    for start in range(0, T, BLOCK):
        end = min(start + BLOCK, T)
        scores = torch.bmm(q[:, start:end], k[:, :end].mT)
        p = causal_softmax_(scores, start, 1 / math.sqrt(E))
        probabilities.append(p.to(dtype))
        out[:, start:end] = torch.bmm(p, v[:, :end])
    return out, probabilities


@operator("blocked_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, "
          "Tensor[] probabilities) -> (Tensor, Tensor, Tensor)", key=EVERY_DEVICE,
          flops=lambda d_out, *_, **__: _products(4, d_out))
@torch.autocast("cpu", enabled=False)
def gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor,
              probabilities: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    (T, E), dtype = q.shape[-2:], q.dtype
    d_out, q, k, v = _computed(d_out, q, k, v)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    # The last block first: it meets every key, so it fills dk and dv, and the others add to them.
    for i, p in reversed(list(enumerate(probabilities))):
        start, end = i * BLOCK, min((i + 1) * BLOCK, T)
        p, dy, beta = p.to(q.dtype), d_out[:, start:end], 0 if end == T else 1
        dp = torch.bmm(dy, v[:, :end].mT)
        ds = causal_softmax_backward_(dp, p, start, 1 / math.sqrt(E))
        dq[:, start:end] = torch.bmm(ds, k[:, :end])
        dk[:, :end].baddbmm_(ds.mT, q[:, start:end], beta=beta)
        dv[:, :end].baddbmm_(p.mT, dy, beta=beta)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class BlockedAttention(torch.autograd.Function):
    """`BlockedAttention.apply(q, k, v)`.

    Not `torch.library.register_autograd`, for which the probabilities would be outputs that need
    gradients of their own.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, probabilities = attend(q, k, v)
        ctx.save_for_backward(q, k, v, *probabilities)
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *probabilities = ctx.saved_tensors
        return gradients(d_out, q, k, v, probabilities)
