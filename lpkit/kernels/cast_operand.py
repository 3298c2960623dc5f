"""An operand of a recipe's product, cast by one fused operator: what a backend calls.

    cast_operand(x, cast)               -> Operand           x (M, K), the contracted axis last
    cast_operand(x.T, cast)             the same of a transposed view, which is not copied
    cast_operand(x, cast, both=True)    and its `.T`, the operand of x.T: one read serves both

The numbers are those of `lpkit.precision.scaled.quantise`, but for a Hadamard transform, whose sums
have one order here (`lpkit.kernels.cast.hadamard`), and under a scale that is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.kernels.cast import Noise, hadamard
from lpkit.kernels.kernel import Version
from lpkit.kernels.rounding import words
from lpkit.techniques.recipes import ALL, MX_BLOCK, Cast


@dataclass(frozen=True, kw_only=True)
class Operand:
    """As tensor cores read it. Where `scale` is E8M0 or E4M3 it is the bytes of the tiles that
    Blackwell reads, if `swizzled`; 4-bit data is uint8, two to a byte, the first in the low half.
    """

    data: Tensor                # (M, K), contiguous
    scale: Tensor               # (R, C): float32 for blocks of 1 x 128 column by column
    tensor: Tensor | None       # () float32, the second level
    amax: Tensor | None         # (1, 1) float32, under one scale for the tensor
    nonfinite: Tensor           # () int64
    T: Operand | None = None    # of x.T, if both were asked for

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What its value is made of."""
        return self.data, self.scale, self.tensor


class _Asked(NamedTuple):
    x: Tensor               # (M, N), contiguous
    cast: Cast
    ways: tuple[bool, bool]     # as it lies, transposed
    amax: Tensor | None
    noise: Tensor | None
    swizzled: bool
    mix: bool


Found = tuple[list[Tensor], Tensor | None, Tensor | None, Tensor]   # data and scale of each way


def _tensor(call: Version, a: _Asked) -> Found:
    *data, scale, top, bad = call(a.x, a.cast.format, a.cast.scale, *a.ways, a.amax, a.noise)
    pairs = [part for one in data for part in (one, scale.view(1, 1))]
    return pairs, None, top.view(1, 1), bad


def _rows(call: Version, a: _Asked) -> Found:
    *pair, bad = call(a.x, a.cast.format, a.cast.scale, a.ways[1], a.noise)
    return pair, None, None, bad


def _blocks(call: Version, a: _Asked) -> Found:
    rows, side = a.cast.block
    *pairs, bad = call(a.x, a.cast.format, a.cast.scale, side, rows > 1, *a.ways, a.swizzled,
                       a.noise)
    return pairs, None, None, bad


def _nvfp4(call: Version, a: _Asked) -> Found:
    *pairs, tensor, bad = call(a.x, a.cast.scale, a.cast.block[0] > 1, *a.ways, a.mix, a.swizzled,
                               a.noise)
    return pairs, tensor, None, bad


class _Row(NamedTuple):
    """A kernel, and the formats and scales that it knows for a block."""

    kernel: str
    call: Callable[[Version, _Asked], Found]
    formats: tuple[str, ...]
    scales: tuple[str, ...]
    both: bool = True       # ways by one read


FP8, POWERS = ("e4m3fn", "e5m2"), ("power-of-two", "power-of-two-floor")
_NVFP4 = _Row("cast-nvfp4", _nvfp4, ("e2m1",), ("e4m3", "e4m3-normal"))
FUSED: dict[tuple[int, int], _Row] = {
    (ALL, ALL): _Row("cast-tensor", _tensor, FP8, ("float32", *POWERS)),
    (1, ALL): _Row("cast-rows", _rows, (*FP8, "int8"), ("float32", *POWERS), both=False),
    (1, 128): _Row("cast-blocks", _blocks, FP8, ("float32", *POWERS)),
    (128, 128): _Row("cast-blocks", _blocks, FP8, ("float32", *POWERS)),
    MX_BLOCK: _Row("cast-mx", _blocks, FP8, POWERS),
    (1, 16): _NVFP4,
    (16, 16): _NVFP4,
}


def why_not(cast: Cast, *, both: bool = False) -> str:
    """Why no kernel does this cast; empty: one does."""
    row = FUSED.get(cast.block)
    if row is None or cast.format not in row.formats or cast.scale not in row.scales:
        return (f"no kernel casts to {cast.format} in blocks of {cast.block} with scales "
                f"{cast.scale}")
    if both and (not row.both or cast.transform != "none"):
        return f"one read does not cast both ways in blocks of {cast.block}, or with a transform"
    return ""


def cast_operand(x: Tensor, cast: Cast, *, amax: Tensor | None = None,
                 noise: Noise | Tensor | None = None, both: bool = False, swizzled: bool = True,
                 by: Callable[[str], Version]) -> Operand:
    """amax: () float32, for delayed scaling of a whole tensor. noise: for stochastic rounding; a
    tensor (3,) int64 is `Noise.words`, and stays on the device. by: the version of the kernel of a
    name of `KERNELS`.

    Raises ConfigError for a cast that no kernel does, and for x that does not tile.
    """
    if problem := why_not(cast, both=both):
        raise ConfigError(f"{problem}; use lpkit.precision.scaled.quantise")
    row, mix = FUSED[cast.block], cast.transform != "none"
    noise = words(noise, x.device) if isinstance(noise, Noise) else noise
    columns = x.ndim == 2 and x.stride(0) == 1 and x.stride(1) != 1
    # the noise of a whole tensor is numbered by rows, however it lies
    columns = columns and not (noise is not None and cast.block == (ALL, ALL))
    if mix and not (row is _NVFP4 and columns):     # no kernel does both
        return cast_operand(hadamard(x), replace(cast, transform="none"), amax=amax,
                            noise=noise, swizzled=swizzled, by=by)
    pairs, tensor, top, bad = row.call(by(row.kernel), _Asked(
        x=(x.T if columns else x).contiguous(), cast=cast, mix=mix, amax=amax, noise=noise,
        ways=(both or not columns, both or columns), swizzled=swizzled))
    made = [Operand(data=data, scale=scale, tensor=tensor, amax=top, nonfinite=bad)
            for data, scale in zip(pairs[::2], pairs[1::2])]
    if not both:
        return made[0]
    straight, turned = reversed(made) if columns else made
    return replace(straight, T=turned)
