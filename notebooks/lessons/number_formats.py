"""Rounding to number formats, and their bit patterns. A format is a row of data: FORMATS.

    round_to(x, FORMATS["e4m3fn"])      # nearest-even, saturating; float32 in, float32 out
    round_to(x, FORMATS["e5m2"], rounding="stochastic", overflow="nonsaturating", generator=rng)
    encode(round_to(x, fmt), fmt)       # bit patterns; decode(codes, fmt) is the inverse

Without its sign bit, a bit pattern c of a format with m mantissa bits consists of the exponent
field, c >> m, and the mantissa, c & (2^m - 1). The values with exponent field 0 are the subnormals,
which are evenly spaced from zero; an integer format has only evenly spaced values. This file is the
definition, in float64 and for every format; lpkit/kernels/cast.py computes the same numbers fast.

A NaN stays a NaN and keeps its sign; its payload is undefined. If a format has no NaN, `round_to`
returns the NaN and `encode` rejects it. Overflow follows the specifications:
- saturate: a value that is too large, infinities included, becomes the largest value of its sign;
- nonsaturating: a value that is too large becomes an infinity; in a format without infinities, a
  NaN; in a format without infinities and NaN, the largest value. With rounding toward zero, a
  finite value never becomes larger than the largest value.
E8M0 has no sign and no zero: a negative number becomes NaN; zero becomes the smallest value, or NaN
when nonsaturating.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpkit.errors import ConfigError, pick
from lpkit.techniques.formats import FORMATS, Format

# takes magnitudes in units of the spacing; returns whole numbers
Rounding = Callable[[Tensor, "torch.Generator | None"], Tensor]


def _stochastic(q: Tensor, generator: torch.Generator | None) -> Tensor:
    """Round q up with probability q - floor(q), else down. So the mean of the result is q, exact to
    2^-53 of a spacing."""
    down = q.floor()
    draw = torch.rand(q.shape, dtype=q.dtype, device=q.device, generator=generator)
    return down + (draw < q - down)


ROUNDINGS: dict[str, Rounding] = {
    "nearest-even": lambda q, generator: q.round(),
    "toward-zero": lambda q, generator: q.floor(),
    "stochastic": _stochastic,
}


OVERFLOWS = {"saturate": False, "nonsaturating": True}      # whether results may be non-finite


def round_to(x: Tensor, fmt: Format, *, rounding: str = "nearest-even", overflow: str = "saturate",
             generator: torch.Generator | None = None) -> Tensor:
    """Return `x` (any shape, a floating dtype) rounded to `fmt`, as float32.

    rounding: a key of ROUNDINGS; "stochastic" draws from `generator`
    overflow: a key of OVERFLOWS

    Raises ConfigError for an unknown rounding or overflow, or an `x` that is not floating point.
    """
    # `beyond` is the result for values that are too large; None: the largest value
    rule, beyond = pick(ROUNDINGS, rounding, "rounding"), None
    if pick(OVERFLOWS, overflow, "overflow") and fmt.has_infinities:
        beyond = torch.inf
    elif OVERFLOWS[overflow] and fmt.nan is not None:
        beyond = torch.nan
    if not x.dtype.is_floating_point:
        raise ConfigError(f"round_to takes a floating-point tensor, got {x.dtype}; call .float() "
                          f"on it")
    x = x.detach().double()
    magnitude = x.abs()
    step = spacing(magnitude, fmt)
    y = rule(magnitude / step, generator) * step
    negative = torch.signbit(x)
    largest = torch.where(negative, max(-fmt.lowest, 0.0), fmt.largest)
    if beyond is None:
        y = torch.where(magnitude.isinf(), largest, y).minimum(largest)
    else:
        # rounding toward zero takes a finite value to the largest value, not to `beyond`
        stays = magnitude.isfinite() & (rounding == "toward-zero")
        y = torch.where(y > largest, torch.where(stays, largest, beyond),
                        torch.where(magnitude.isinf(), beyond, y))
    if not fmt.signed:
        zero = fmt.smallest if beyond is None else torch.nan
        y = torch.where(magnitude == 0, zero, y.clamp(min=fmt.smallest))
        y = torch.where(x < 0, torch.nan, y)
    y = torch.where(x.isnan(), torch.nan, y)
    if fmt.has_negative_zero:
        return y.copysign(x).float()
    return torch.where(negative & fmt.signed, 0 - y, y).float()


def _exponent(magnitude: Tensor, fmt: Format) -> Tensor:
    """Return floor(log2 |x|) of each element as int64; at least `fmt.min_exponent`, where the
    spacing stops shrinking."""
    exponent = torch.frexp(magnitude.nan_to_num(0, 0)).exponent.long() - 1
    return torch.where(magnitude == 0, fmt.min_exponent, exponent).clamp(min=fmt.min_exponent)


def spacing(magnitude: Tensor, fmt: Format) -> Tensor:
    """Return the distance between neighbouring values of `fmt` at each magnitude, as float64. Above
    the largest value, it is the distance that a format with more exponents would have."""
    return _power(_exponent(magnitude, fmt) - fmt.mantissa_bits)


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, from its bit pattern: exponent + 1023 is float64's exponent
    field, at bit 52. torch.exp2 is not exact on every machine."""
    return ((exponent + 1023) << 52).view(torch.float64)


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Return the bit patterns of `x`, whose elements must be values of `fmt`. The dtype is uint8
    for formats of up to 8 bits (the low bits are used), else int64.

    Raises ConfigError for an element that is not a value of the format.
    """
    x = x.detach().double()
    magnitude, nan, inf = x.abs(), x.isnan(), x.isinf()
    off = (round_to(x.float(), fmt).double() != x) & ~nan & ~(inf & fmt.has_infinities)
    off = off | (nan & (fmt.nan is None))
    if off.any():
        raise ConfigError(f"{int(off.sum())} of {x.numel()} numbers are not values of "
                          f"{fmt.name}, for example {x[off][0].item():g}; round them first with "
                          f"round_to(x, fmt)")
    mantissa = (magnitude / spacing(magnitude, fmt)).nan_to_num(0, 0).long()
    code = ((_exponent(magnitude, fmt) + fmt.bias - 1) << fmt.mantissa_bits) + mantissa
    if fmt.has_infinities:
        code = torch.where(inf, fmt.first_nan - 1, code)
    if fmt.nan is not None:
        code = torch.where(nan, fmt.nan, code)
    if fmt.signed and fmt.exponent_bits:
        negative = torch.signbit(x) & (fmt.has_negative_zero | (magnitude > 0))
        code = code | (negative.long() << (fmt.bits - 1))
    elif fmt.signed:
        code = torch.where(x < 0, (1 << fmt.bits) - code, code)
    return code.to(torch.uint8) if fmt.bits <= 8 else code


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Return the values of bit patterns (any integer dtype) as float32. Bits above the format's
    width are ignored."""
    code = codes.long() & ((1 << fmt.bits) - 1)
    sign = (code >> (fmt.bits - 1)) & fmt.signed
    if not fmt.exponent_bits:
        return (code - (sign << fmt.bits)).float()
    code = code - (sign << (fmt.bits - 1))
    field, mantissa = code >> fmt.mantissa_bits, code & ((1 << fmt.mantissa_bits) - 1)
    leading = ((field > 0) | (fmt.mantissa_bits == 0)).long() << fmt.mantissa_bits
    exponent = (field - fmt.bias).clamp(min=fmt.min_exponent) - fmt.mantissa_bits
    value = (leading + mantissa).double() * _power(exponent)
    if fmt.has_infinities:
        value = torch.where(code == fmt.first_nan - 1, torch.inf, value)
    if fmt.first_nan is not None:
        value = torch.where(code >= fmt.first_nan, torch.nan, value)
    if fmt.zero_is_unsigned:
        value = torch.where((sign == 1) & (code == 0), torch.nan, value)
    return torch.where(sign == 1, -value, value).float()


def values(fmt: Format) -> Tensor:
    """Return all values of a format as float32 (2^bits,): element c is the value of bit pattern c.
    Raises ConfigError for a format of more than 8 bits."""
    if fmt.bits > 8:
        small = ", ".join(f.name for f in FORMATS.values() if f.bits <= 8)
        raise ConfigError(f"{fmt.name} has 2^{fmt.bits} values; only formats of up to 8 bits can "
                          f"be listed: {small}")
    return decode(torch.arange(1 << fmt.bits), fmt)
