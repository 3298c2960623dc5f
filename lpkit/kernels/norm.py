"""RMSNorm and LayerNorm over the last axis, alone or after a residual addition.

    rms_norm(x, w, eps)         x / sqrt(mean(x^2) + eps) * w           (arXiv:1910.07467)
    layer_norm(x, w, b, eps)    c / sqrt(mean(c^2) + eps) * w + b       (arXiv:1607.06450)
                                with c = x - mean(x)
    add_rms_norm(x, delta, w, eps), add_layer_norm(x, delta, w, b, eps)
                                return s = x + delta and the norm of s

Shapes: x and delta (..., N), w and b (N,). A program holds a row of N numbers in registers, so each
number is read once and written once. Backward needs s, and for each row its mean and the factor
r = 1 / sqrt(mean(c^2) + eps). With n = (s - mean) * r and g = w dy,

    gradient of s = r * (g - mean(g) - n * mean(g n)) + the gradient of the residual stream
    dw, db        = the sums over rows of dy n and dy

RMSNorm has no mean, and so no term mean(g). Backward has P programs. Program p processes the rows
p, p + P, p + 2 P, ... and sums dw and db of these rows, so the sums are (P, N) float32. PyTorch
then adds the P rows. The order of all additions is fixed, so the same input gives the same bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lpkit.kernels.jit import jit, tl, triton
from lpkit.kernels.kernel import Kernel, Version, rounded_once, row_length, spoiled
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.pytorch import (
    add_layer_norm_pytorch,
    add_rms_norm_pytorch,
    after_addition,
    layer_norm_pytorch,
    rms_norm_pytorch,
)

SLACK = 2.0, 3.0    # a GPU's 1 / sqrt has an error of up to 2^-22.9 (PTX ISA 9.0, rsqrt.approx.f32)
PROGRAMS = 264      # programs of backward: two for each multiprocessor of an H100


# ---- the definitions

@rounded_once
def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x (..., N), w (N,) -> like x."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


layer_norm = rounded_once(layer_norm_pytorch)
add_rms_norm, add_layer_norm = after_addition(rms_norm), after_addition(layer_norm)


# ---- the kernels

@jit
def _forward(x, delta, w, b, s, y, mean, r, N, eps, CENTRED: tl.constexpr, BIAS: tl.constexpr,
             ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Write y, the norm of one row; r, and for LayerNorm (CENTRED) the mean of the row; and with
    ADD the sum s = x + delta."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside, where = at < N, row * N + at
    v = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(delta + where, mask=inside, other=0.0).to(tl.float32)
        rounded = v.to(s.dtype.element_ty)
        tl.store(s + where, rounded, mask=inside)
        v = rounded.to(tl.float32)      # PyTorch also computes the norm of the rounded sum
    if CENTRED:
        middle = tl.sum(v, 0) / N
        tl.store(mean + row, middle)
        v = tl.where(inside, v - middle, 0.0)
    scale = tl.rsqrt(tl.sum(v * v, 0) / N + eps)
    tl.store(r + row, scale)
    n = v * scale * tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        n += tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + where, n.to(y.dtype.element_ty), mask=inside)


@jit
def _backward(s, w, dy, ds, mean, r, dx, dw, db, M, N, CENTRED: tl.constexpr, BIAS: tl.constexpr,
              ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Write dx, and this program's sums of dw and db. With ADD, `ds` is the gradient of the
    residual stream, which is added to dx."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < N
    weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    # The sums for dw and db stay in registers over all rows of this program. Atomic additions to a
    # shared sum would have an order that depends on timing.
    for row in range(program, M, tl.num_programs(0)):
        where = tl.cast(row, tl.int64) * N + at
        n = tl.load(s + where, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            n = tl.where(inside, n - tl.load(mean + row), 0.0)
        scale = tl.load(r + row)
        n *= scale
        g = tl.load(dy + where, mask=inside, other=0.0).to(tl.float32)
        of_weight += g * n
        if BIAS:
            of_bias += g
        g *= weight
        d = g - n * (tl.sum(g * n, 0) / N)
        if CENTRED:
            d -= tl.sum(g, 0) / N
        d *= scale
        if ADD:
            d += tl.load(ds + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + where, d.to(dx.dtype.element_ty), mask=inside)
    sums = tl.cast(program, tl.int64) * N + at
    tl.store(dw + sums, of_weight, mask=inside)
    if BIAS:
        tl.store(db + sums, of_bias, mask=inside)


def _shape(N: int, *, backward: bool = False) -> dict[str, int]:
    """Return the block size and the warps of a program, for rows of N numbers: the fastest of the
    shapes in docs/log.md on an H200."""
    block = triton.next_power_of_2(max(N, 1))
    shape = {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
    if backward or block < 8192:
        return shape
    # fewer registers for each thread, so that two programs fit on a multiprocessor
    return shape | ({"num_warps": 8} if block == 8192 else {"maxnreg": 64})


# ---- the operators

def _like(x: Tensor, delta: Tensor | None, w: Tensor, b: Tensor | None, eps: float,
          centred: bool) -> tuple[Tensor, ...]:
    """Return empty tensors for the results of `forward`."""
    rows = x.new_empty(x.shape[:-1], dtype=torch.float32)
    s = x.new_empty(0) if delta is None else torch.empty_like(x)
    return s, torch.empty_like(x), torch.empty_like(rows) if centred else rows.new_empty(0), rows


@operator("norm(Tensor x, Tensor? delta, Tensor w, Tensor? b, float eps, bool centred) "
          "-> (Tensor, Tensor, Tensor, Tensor)", key=EVERY_DEVICE, fake=_like)
def forward(x: Tensor, delta: Tensor | None, w: Tensor, b: Tensor | None, eps: float,
            centred: bool) -> tuple[Tensor, ...]:
    """Return (s, y, mean, r): x + delta, its norm, and for each row the mean and r. s is empty if
    delta is None, and mean is empty unless `centred` (LayerNorm)."""
    N = row_length(*(t for t in (x, delta, w, b) if t is not None))
    s, y, mean, r = _like(x, delta, w, b, eps, centred)
    _forward[(r.numel(),)](x, delta, w, b, s, y, mean, r, N, eps, CENTRED=centred,
                           BIAS=b is not None, ADD=delta is not None, **_shape(N))
    return s, y, mean, r


@operator("norm_backward(Tensor s, Tensor w, Tensor dy, Tensor? ds, Tensor mean, Tensor r, "
          "bool centred, bool bias) -> (Tensor, Tensor, Tensor)", key=EVERY_DEVICE,
          fake=lambda s, w, dy, ds, mean, r, centred, bias: (
              torch.empty_like(s), torch.empty_like(w), w.new_empty(w.shape[0] if bias else 0)))
def backward(s: Tensor, w: Tensor, dy: Tensor, ds: Tensor | None, mean: Tensor, r: Tensor,
             centred: bool, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dw, db); db is empty without a bias. s: the input of the norm; ds: the gradient
    of the residual stream, or None."""
    N, M = row_length(*(t for t in (s, w, dy, ds) if t is not None)), r.numel()
    programs = max(1, min(M, PROGRAMS if N > 2048 else 4 * PROGRAMS))
    dx = torch.empty_like(s)
    dw, db = w.new_empty(2, programs, N, dtype=torch.float32)
    _backward[(programs,)](s, w, dy, ds, mean, r, dx, dw, db, M, N, CENTRED=centred, BIAS=bias,
                           ADD=ds is not None, **_shape(N, backward=True))
    return dx, dw.sum(0).to(w.dtype), db.sum(0).to(w.dtype) if bias else w.new_empty(0)


class _Norm(torch.autograd.Function):
    """A norm by the kernels, alone or after a residual addition. A custom Function, because
    the operators have no derivative."""

    @staticmethod
    def forward(ctx, x: Tensor, delta: Tensor | None, w: Tensor, b: Tensor | None, eps: float,
                centred: bool):
        x, delta = x.contiguous(), delta if delta is None else delta.contiguous()
        s, y, mean, r = forward(x, delta, w, b, eps, centred)
        ctx.save_for_backward(x if delta is None else s, w, mean, r)
        ctx.centred, ctx.bias = centred, b is not None
        return y if delta is None else (s, y)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        s, w, mean, r = ctx.saved_tensors
        ds, dy = (None, *gradients) if len(gradients) == 1 else gradients
        dx, dw, db = backward(s, w, dy.contiguous(), ds if ds is None else ds.contiguous(),
                                 mean, r, ctx.centred, ctx.bias)
        # s = x + delta, so x and delta have the same gradient
        return dx, dx if ds is not None else None, dw, db if ctx.bias else None, None, None


# ---- the versions in Triton

def _in_triton(bias: bool, add: bool) -> Version:
    """Return the Triton version of a norm: LayerNorm if `bias`, with a residual addition if
    `add`."""
    def norm(x: Tensor, *others: Tensor | float | None) -> Tensor | tuple[Tensor, Tensor]:
        delta, w, *more = others if add else (None, *others)
        b, eps = more if bias else (None, *more)
        return _Norm.apply(x, delta, w, b, eps, bias)
    return norm


# ---- examples, with which versions are verified

def _examples(rng: torch.Generator, device: torch.device, *, add: bool, bias: bool):
    def like(x: Tensor, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, x.dtype)

    def arguments(x: Tensor, *biases: Tensor | None) -> tuple:
        N = x.shape[-1]
        w = like(x, N).float()
        biases = (biases or (like(x, N).float(),)) if bias else ()
        return (x, *([like(x, *x.shape)] if add else []), w, *biases, 1e-5)

    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((5, 123), (3, 2, 256), (1, 1), (0, 8), (70, 64)):
            yield arguments(torch.randn(shape, generator=rng).to(device, dtype))
    x = torch.randn(4, 48, generator=rng).to(device)
    yield arguments(x, None)
    yield arguments(x.T.contiguous().T)         # strided
    yield arguments(x * 1e-30)                  # squares are negligible compared with eps
    yield arguments(x * 1e15)
    yield arguments(spoiled(x, (1, 3), (2, 5)))


def _kernel(definition, pytorch, *, bias: bool, add: bool) -> Kernel:
    return Kernel(
        definition=definition,
        versions={"pytorch": pytorch, "triton": _in_triton(bias, add)},
        examples=partial(_examples, add=add, bias=bias), slack=SLACK,
        gradients=(0, *((1, 2) if add else (1,)), *((2 + add,) if bias else ())))


RMS_NORM = _kernel(rms_norm, rms_norm_pytorch, bias=False, add=False)
LAYER_NORM = _kernel(layer_norm, layer_norm_pytorch, bias=True, add=False)
ADD_RMS_NORM = _kernel(add_rms_norm, add_rms_norm_pytorch, bias=False, add=True)
ADD_LAYER_NORM = _kernel(add_layer_norm, add_layer_norm_pytorch, bias=True, add=True)
