"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w over the last axis (Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467).

Forward reads and writes each number once; a program takes one row. It keeps 1 / rms of each row, so
that backward reads x and dy once: with n = x * r,

    dx = r * (w dy - n * mean(w dy n))          dw = sum over rows of dy n

A program of backward takes rows in strides and sums dw of its own, (programs, N) float32; a second
sum over programs is PyTorch's. Sums are in float32, in an order that does not depend on timing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpkit.kernels.jit import jit, tl, triton
from lpkit.kernels.kernel import Build, Kernel, matrix, row_length
from lpkit.kernels.operator import EVERY_DEVICE, operator

PROGRAMS = 264      # of backward: two for each multiprocessor of an H100


def definition(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x (..., N), w (N,) -> like x. In float32, or float64 where x is."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    n = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (n * w.to(wide.dtype)).to(x.dtype)


@jit
def _forward(x, w, y, r, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    v = tl.load(x + row * N + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / N + eps)
    tl.store(r + row, scale)
    n = v * scale * tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + at, n, mask=inside)


@jit
def _backward(x, w, dy, r, dx, dw, M, N, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < N
    weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, M, tl.num_programs(0)):
        where = tl.cast(row, tl.int64) * N + at
        scale = tl.load(r + row)
        n = tl.load(x + where, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(dy + where, mask=inside, other=0.0).to(tl.float32)
        total += g * n
        g *= weight
        tl.store(dx + where, (g - n * (tl.sum(g * n, 0) / N)) * scale, mask=inside)
    tl.store(dw + program.to(tl.int64) * N + at, total, mask=inside)


def _shape(N: int) -> dict[str, int]:
    block = triton.next_power_of_2(N)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def forward(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and 1 / rms of each row, float32."""
    N = row_length(x, w)
    y, r = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    _forward[(r.numel(),)](x, w, y, r, N, eps, **_shape(N))
    return y, r


def backward(dy: Tensor, x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    N, M = row_length(x, w), r.numel()
    programs = max(1, min(M, PROGRAMS))
    dx, dw = torch.empty_like(x), w.new_empty(programs, N, dtype=torch.float32)
    _backward[(programs,)](x, w, dy, r, dx, dw, M, N, **_shape(N))
    return dx, dw.sum(0).to(w.dtype)


forward_op = operator(
    "rms_norm(Tensor x, Tensor w, float eps) -> (Tensor, Tensor)", key=EVERY_DEVICE,
    fake=lambda x, w, eps: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)(forward)
backward_op = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor w, Tensor r) -> (Tensor, Tensor)",
    key=EVERY_DEVICE, fake=lambda dy, x, w, r: (torch.empty_like(x), torch.empty_like(w)),
)(backward)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y, r = forward_op(x, w, eps)
        ctx.save_for_backward(x, w, r)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return *backward_op(dy.contiguous(), *ctx.saved_tensors), None


def in_triton(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return _RMSNorm.apply(x, w, eps)


def _examples(rng: torch.Generator, device: torch.device):
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((5, 123), (3, 2, 256), (1, 1), (0, 8), (70, 64)):
            x = torch.randn(shape, generator=rng).to(device, dtype)
            w = torch.randn(shape[-1], generator=rng).to(device)
            yield x, w, 1e-5
    x = torch.randn(4, 48, generator=rng).to(device)
    w = torch.ones(48, device=device)
    yield x.T.contiguous().T, w, 1e-5       # strided
    yield x * 1e-30, w, 1e-5                # squares vanish beside eps
    yield x * 1e15, w, 1e-5
    bad = x.clone()
    bad[1, 3], bad[2, 5] = torch.nan, torch.inf
    yield bad, w, 1e-5


_TYPES = {"x": "*bf16", "w": "*fp32", "y": "*bf16", "r": "*fp32", "N": "i32"}
KERNEL = Kernel(
    definition=definition, versions={"triton": in_triton}, examples=_examples, gradients=(0, 1),
    typical=lambda: {"": (matrix(), matrix(1, 4096, torch.float32)[0], 1e-5)},
    moved_bytes=lambda x, w, eps: 2 * x.nbytes + w.nbytes,
    builds=(
        Build(kernel=_forward, signature=_TYPES | {"eps": "fp32"}, constants={"BLOCK": 4096},
              warps=8, unaligned=("eps",)),
        Build(kernel=_backward, constants={"BLOCK": 4096}, warps=8, signature={
            **_TYPES, "dy": "*bf16", "dx": "*bf16", "dw": "*fp32", "M": "i32"}, unaligned=("M",))))
