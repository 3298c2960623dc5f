"""Rotary positions: each pair of numbers (i, i + E/2) of a head is rotated by an angle that depends
on the position of the token (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    y = x cos + (-right, left) sin          for x = (left, right)

Shapes: x and y (B, H, T, E), cos and sin (T, E). The two halves of cos are equal, and so are the
two halves of sin, so the kernel reads only the first half. Each number of x is read once, and each
number of y is written once. Backward rotates dy by the opposite angle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.kernels.jit import jit, tl, triton
from lpkit.kernels.kernel import Kernel, floats, rounded_once, spoiled
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.pytorch import rotate_pytorch

ROWS = 16           # rows of E numbers per program


@jit
def _rotate(x, cos, sin, y, rows, T, SIGN: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
            ROWS: tl.constexpr):
    """Write y, the rotation of x, for ROWS rows of E numbers. SIGN 1 rotates by the angles, -1 by
    the opposite angles."""
    # 32-bit integers, because a 64-bit remainder is a slow function call on a GPU
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, HALF)
    inside = (row < rows)[:, None] & (at < E // 2)[None, :]
    where = row[:, None].to(tl.int64) * E + at[None, :]
    angle = (row % T)[:, None] * E + at[None, :]
    left = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + where + E // 2, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32) * SIGN
    to = y.dtype.element_ty
    tl.store(y + where, (left * c - right * s).to(to), mask=inside)
    tl.store(y + where + E // 2, (right * c + left * s).to(to), mask=inside)


@operator("rotate(Tensor x, Tensor cos, Tensor sin, int sign) -> Tensor", key=EVERY_DEVICE,
          fake=lambda x, *_: torch.empty_like(x))
def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return x (..., T, E), rotated by the angles (`sign` 1), or by the opposite angles (-1)."""
    floats(x, cos, sin)
    T, E = x.shape[-2:]
    if E % 2 or any(t.shape != (T, E) for t in (cos, sin)):
        raise ConfigError(f"x (..., T, E) with E even takes cos and sin (T, E); got "
                          f"{tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}")
    y, rows = torch.empty_like(x), x.numel() // E if E else 0
    _rotate[(triton.cdiv(rows, ROWS),)](
        x, cos, sin, y, rows, T, SIGN=sign, E=E, HALF=triton.next_power_of_2(max(E // 2, 1)),
        ROWS=ROWS)
    return y


class _Rotate(torch.autograd.Function):
    """Rotation by the kernel. A custom Function, because the operators have no derivative;
    backward needs only cos and sin, not x."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x.contiguous(), cos, sin, 1)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return turn(dy.contiguous(), *ctx.saved_tensors, -1), None, None


def angles(T: int, E: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (T, E) float32 each, of the angles of T positions, for examples."""
    angles = torch.outer(torch.arange(T).float(), 1e4 ** (-torch.arange(0, E, 2) / max(E, 1)))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _examples(rng: torch.Generator, device: torch.device):
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((2, 3, 5, 16), (1, 2, 37, 64), (1, 1, 1, 2), (0, 2, 4, 8), (2, 1, 9, 20)):
            cos, sin = (t.to(device, dtype) for t in angles(*shape[-2:]))
            yield torch.randn(shape, generator=rng).to(device, dtype), cos, sin
    x, (cos, sin) = torch.randn(2, 9, 4, 16, generator=rng), angles(9, 16)
    cos, sin = cos.to(device), sin.to(device)
    # strides of (B, T, H, E), as the projection of q and k returns them
    yield x.to(device).transpose(1, 2), cos, sin
    heads = x.transpose(1, 2).contiguous().to(device)
    yield spoiled(heads, (1, 2, 3, 4), (0, 0, 0, 0)), cos, sin


ROTARY = Kernel(
    definition=rounded_once(rotate_pytorch), examples=_examples, gradients=(0,),
    versions={"pytorch": rotate_pytorch, "triton": _Rotate.apply})
