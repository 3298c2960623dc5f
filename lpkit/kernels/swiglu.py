"""SwiGLU: silu(gate) * up (Shazeer 2020, https://arxiv.org/abs/2002.05202). The input x (..., 2 N)
has gate (..., N) and up (..., N) side by side; the result is (..., N).

Forward reads 2 N numbers per row, writes N, and saves only its input. Backward recomputes
s = sigmoid(gate), reads the input and dy, and writes the gradients of gate and up:

    d up = dy gate s        d gate = dy up s (1 + gate (1 - s))
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.kernels.jit import jit, tl, triton
from lpkit.kernels.kernel import Kernel, floats, rounded_once, spoiled
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.pytorch import swiglu_pytorch

BLOCK, WARPS = 1024, 4


@jit
def _forward(x, y, N, BLOCK: tl.constexpr):
    """Write y (rows, N) for x (rows, 2 N). A program computes BLOCK numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    gate = tl.load(x + row * 2 * N + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + at, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=inside)


@jit
def _backward(x, dy, dx, N, BLOCK: tl.constexpr):
    """Write dx (rows, 2 N), the gradients of gate and up, for dy (rows, N)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    left = row * 2 * N + at
    gate = tl.load(x + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + left + N, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + row * N + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    to = dx.dtype.element_ty
    tl.store(dx + left, (g * up * s * (1 + gate * (1 - s))).to(to), mask=inside)
    tl.store(dx + left + N, (g * gate * s).to(to), mask=inside)


def _grid(y: Tensor) -> tuple[int, int]:
    N = y.shape[-1]
    return (y.numel() // N if N else 0), triton.cdiv(N, BLOCK)


def _like(x: Tensor) -> Tensor:
    if x.shape[-1] % 2:
        raise ConfigError(f"x has gate and up side by side, so its last axis must be even; got "
                          f"{tuple(x.shape)}")
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@operator("swiglu(Tensor x) -> Tensor", key=EVERY_DEVICE, fake=_like)
def forward(x: Tensor) -> Tensor:
    floats(x)
    y = _like(x)
    _forward[_grid(y)](x, y, y.shape[-1], BLOCK=BLOCK, num_warps=WARPS)
    return y


@operator("swiglu_backward(Tensor x, Tensor dy) -> Tensor", key=EVERY_DEVICE,
          fake=lambda x, dy: torch.empty_like(x))
def backward(x: Tensor, dy: Tensor) -> Tensor:
    floats(x, dy)
    dx = torch.empty_like(x)
    _backward[_grid(dy)](x, dy, dx, dy.shape[-1], BLOCK=BLOCK, num_warps=WARPS)
    return dx


class _SwiGLU(torch.autograd.Function):
    """SwiGLU by the kernels. A custom Function, because the operators have no derivative,
    and because only x is saved for backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return forward(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return backward(*ctx.saved_tensors, dy.contiguous())


def _examples(rng: torch.Generator, device: torch.device):
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((5, 246), (2, 3, 64), (1, 2), (0, 8), (3, 2100)):
            yield (torch.randn(shape, generator=rng).to(device, dtype),)
    x = torch.randn(4, 48, generator=rng).to(device)
    yield (x.T.contiguous().T,)     # not contiguous
    yield (x * 40,)                 # the sigmoid is 0 or 1
    yield (spoiled(x, (1, 3), (2, 30)),)


SWIGLU = Kernel(
    definition=rounded_once(swiglu_pytorch), examples=_examples, gradients=(0,),
    versions={"pytorch": swiglu_pytorch, "triton": _SwiGLU.apply})
