"""An operand of a recipe's product, cast by one fused operator: what a backend calls.

    cast_operand(x, cast)               -> Scaled            x (M, K), the contracted axis last
    cast_operand(x.T, cast)             the same of a transposed view, which is not copied
    cast_operand(x, cast, both=True)    and its `.T`, the operand of x.T: one read serves both

The numbers are those of `lpkit.precision.scaled.quantise`, but for a Hadamard transform, whose sums
have one order here (`lpkit.kernels.cast.hadamard`), and under a scale that is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.kernels.cast import Noise, hadamard
from lpkit.kernels.fused_cast import FUSED, WHOLE
from lpkit.kernels.kernel import Version
from lpkit.kernels.rounding import words
from lpkit.kernels.scales import Scaled
from lpkit.techniques.recipes import SCALES, Cast


def why_not(cast: Cast, *, both: bool = False) -> str:
    """The reason why no kernel does this cast; empty: one does."""
    row = FUSED.get(cast.block)
    if row is None or cast.format not in row.formats or cast.scale not in row.scales:
        return (f"no kernel casts to {cast.format} in blocks of {cast.block} with scales "
                f"{cast.scale}")
    if both and (not row.both or cast.transform != "none"):
        return f"one read does not cast both ways in blocks of {cast.block}, or with a transform"
    return ""


def cast_operand(x: Tensor, cast: Cast, *, amax: Tensor | None = None,
                 noise: Noise | None = None, both: bool = False, swizzled: bool = True,
                 by: Callable[[str], Version]) -> Scaled:
    """amax: () float32, for delayed scaling of a whole tensor. noise: for stochastic rounding. by:
    the version of the kernel of a name of `KERNELS`. swizzled: scales of one byte are the bytes of
    the tiles that Blackwell reads.

    Raises ConfigError for a cast that no kernel does, and for x that does not tile.
    """
    if problem := why_not(cast, both=both):
        raise ConfigError(f"{problem}; use lpkit.precision.scaled.quantise")
    row, whole = FUSED[cast.block], cast.block == WHOLE
    columns = x.ndim == 2 and x.stride(0) == 1 and x.stride(1) != 1
    # the noise of a whole tensor is numbered by rows, however it lies
    columns = columns and not (noise is not None and whole)
    if cast.transform != "none" and not (row.mixes and columns):    # no kernel does both
        return cast_operand(hadamard(x), replace(cast, transform="none"), amax=amax,
                            noise=noise, swizzled=swizzled, by=by)
    ways = both or not columns, both or columns
    *pairs, bad = by(row.kernel)((x.T if columns else x).contiguous(), cast, *ways, swizzled, amax,
                                 words(noise, x.device))
    # torch 2.11 compiles what a star leaves as a tuple, which has no pop
    *pairs, top = (*pairs[:-1], pairs[-1].view(1, 1)) if whole else (*pairs, None)
    *pairs, level = pairs if SCALES[cast.scale].levels == 2 else (*pairs, None)
    operands = [Scaled(data=data, scale=scale, tensor=level, amax=top, nonfinite=bad)
                for data, scale in zip(pairs[::2], pairs[1::2])]
    if not both:
        return operands[0]
    straight, turned = reversed(operands) if columns else operands
    return replace(straight, turned=turned)
