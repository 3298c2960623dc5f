"""Functions of the fused casts in Triton: scales, exact division, stochastic rounding, layouts.

On a GPU, a division that rounds once is a function call of twenty instructions. The casts divide
many numbers by few divisors. So they compute the reciprocal of each divisor once, multiply each
number by it, and correct each quotient twice by its own remainder. This takes five instructions per
number, and gives the same bits as a division (Markstein 1990, https://doi.org/10.1147/rd.341.0111).
If the divisor is a power of two, one multiplication is exact.

Magnitudes are compared as integers with the same bits (`magnitude`). Then an infinity is larger
than all numbers, and a NaN is larger than an infinity, so a maximum keeps both.

Names: `top` is the bits of an amax, int32. `at` is the index of an element, int64. `words` points
to the three numbers of `Noise.words`. `TO` is a `CastPlan`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lpkit.kernels.cast import SIGNS, Noise
from lpkit.kernels.jit import jit, tl
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import MX_BLOCK, named

# programs of a kernel whose programs each read many blocks: eight for each multiprocessor of an
# H100
PROGRAMS = 1056


class CastPlan(str):
    """All facts about a cast that a kernel needs at compile time, as one constant. It is a string,
    because Triton caches compiled kernels by the text of their constants.

    cast:      the `Cast`; `rule` is its scale rule, `side` the columns of its blocks
    rows, columns: whether x is cast, and whether x.T is cast
    swizzled, history, noise: see `fused_cast.definition`
    mx:        whether blocks are 1 x 32 with E8M0 scales
    square:    whether blocks have more than one row; `mix`: whether a Hadamard transform precedes
    divides:   whether scales are not powers of two, so that x / scale needs a division
    kind, largest, mantissa, min_exponent, max_exponent: the format: its Triton dtype, its largest
               value, its mantissa bits, and its smallest and largest exponents
    up:        a number that is added to the bits of an amax. The sum carries into the exponent if
               the mantissa of the amax is larger than the mantissa of the format's largest value
    negative:  16 bits: bit j is set if the Hadamard transform negates element j
    """

    def __new__(cls, words: str, rows: bool, columns: bool, swizzled: bool, history: bool,
                noise: bool) -> CastPlan:
        flags = {"rows": rows, "columns": columns, "swizzled": swizzled, "history": history,
                 "noise": noise}
        self = super().__new__(cls, " ".join((words, *(name for name in flags if flags[name]))))
        vars(self).update(flags)
        self.cast = cast = named(words)
        self.mx, self.side = cast.block == MX_BLOCK, cast.block[1]
        self.square, self.mix = cast.block[0] > 1, cast.transform != "none"
        self.negative = sum(1 << j for j, sign in enumerate(SIGNS) if sign < 0)
        to, self.rule = format_of(cast.format), cast.scale
        self.divides = not self.rule.startswith("power")
        self.kind = {"e4m3fn": tl.float8e4nv, "e5m2": tl.float8e5, "int8": tl.int8,
                     "e2m1": tl.uint8}[cast.format]
        self.largest, self.mantissa = to.largest, to.mantissa_bits
        self.min_exponent, self.max_exponent = to.min_exponent, to.max_exponent
        bits = torch.tensor(to.largest, dtype=torch.float32).view(torch.int32).item()
        self.up = 0x7FFFFF - (bits & 0x7FFFFF)
        return self


plan = functools.cache(CastPlan)


def words(noise: Noise | None, device: torch.device) -> Tensor | None:
    return None if noise is None else noise.words.to(device)


@jit
def magnitude(v):
    """Return the bits of |v|, int32."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def nonfinite(v):
    """Return how many elements of v (M, N) are NaN or Inf, int64."""
    bad = tl.where(magnitude(v.to(tl.float32)) >= 0x7F800000, 1, 0)
    return tl.sum(tl.sum(bad, 1), 0).to(tl.int64)


@jit
def quotient(v, m, y):
    """Return v / m, rounded once. y must be 1 / m, rounded once.

    The code computes the remainder with the opposite sign, m q - v. It multiplies v by -1, because
    Triton computes -v as 0 - v, which turns -0 into 0.
    """
    # twice: the inner fma computes the remainder exactly, and the outer fma corrects q by it
    q = v * y
    q = tl.fma(tl.fma(m, q, v * -1.0), -y, q)
    return tl.fma(tl.fma(m, q, v * -1.0), -y, q)


@jit
def divisor(s):
    """Return (2^-e, m, 1 / m) for s = m * 2^e > 0 with 1 <= m < 2.

    The caller computes v / s as quotient(v * 2^-e, m, 1 / m), which neither overflows nor loses
    bits. If s is NaN, the result is NaN; if s is infinity, it is 0.
    """
    bits = s.to(tl.int32, bitcast=True)
    turn = ((254 << 23) - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    turn = tl.where(bits == 0x7F800000, 0.0, tl.where(s == s, turn, s))
    m = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    y = 1.0 / m
    # Two Newton steps turn y into the correctly rounded 1 / m (Markstein).
    y = tl.fma(tl.fma(-m, y, 1.0), y, y)
    return turn, m, tl.fma(tl.fma(-m, y, 1.0), y, y)


@jit
def divided(v, s, TO: tl.constexpr):
    """Return v / s in float32, rounded once. s > 0 broadcasts to the shape of v."""
    turn, m, y = divisor(s)
    v = v * turn
    # The scale of a history may be much too small for the current v. Clamp v, so that the remainder
    # in `quotient` cannot overflow. `stored` would saturate such a v anyway.
    if TO.history:
        v = tl.clamp(v, -4 * TO.largest, 4 * TO.largest, propagate_nan=tl.PropagateNan.ALL)
    if TO.divides:
        v = quotient(v, m, y)
    return v


@jit
def rounded(v, s, at, words, TO: tl.constexpr):
    """Return v / s in float32. With noise, it is rounded stochastically to the values of the
    format; without noise it is not rounded yet, because `stored` rounds."""
    v = divided(v, s, TO)
    if TO.noise:
        v = drawn(v, at, words, TO)
    return v


@jit
def code_of(top, TO: tl.constexpr):
    """Return the E8M0 code of the scale, int32: 0 to 254 for 2^(code - 127), or 255 for NaN. It is
    computed from the bits of the amax, without a division or a logarithm."""
    if TO.rule == "power-of-two":
        code = tl.where(top == 0, 127, tl.maximum(((top + TO.up) >> 23) - TO.max_exponent, 0))
    else:
        code = tl.maximum((top >> 23) - TO.max_exponent, 0)
        code = tl.where(top == 0, 126 - TO.max_exponent, code)
    return tl.where(top < 0x7F800000, code, 255)


@jit
def scale_of(top, TO: tl.constexpr):
    """Return the scale in float32 for an amax with the bits `top`; NaN if the amax is not finite.
    """
    if TO.divides:
        amax = tl.maximum(top.to(tl.float32, bitcast=True), 2.0**-100)
        s = quotient(amax, TO.largest, 1.0 / TO.largest)
    else:
        code = code_of(top, TO)
        s = tl.where(code > 0, code << 23, 1 << 22).to(tl.float32, bitcast=True)
    return tl.where(top < 0x7F800000, s, float("nan"))


@jit
def uniform(at, words):
    """Return a random number in (0, 1), float32, for each element index in `at`: the same numbers
    as `lpkit.kernels.cast._uniform`. words: (counter, k0, k1)."""
    i = at + tl.load(words)
    k0, k1 = tl.load(words + 1).to(tl.uint32), tl.load(words + 2).to(tl.uint32)
    low, high = i.to(tl.uint32), (i >> 32).to(tl.uint32)
    h = low * 0x9E3779B1 + k0 + high * 0x85EBCA6B
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    h = (h ^ (h >> 16)) + (k1 ^ high)
    h = h * 0x7FEB352D
    return (((h ^ (h >> 15)) >> 8).to(tl.int32).to(tl.float32) + 0.5) * 2.0**-24


@jit
def drawn(q, at, words, TO: tl.constexpr):
    """Return q rounded stochastically to the values of the format, in float32: up with a
    probability equal to its distance from the value below, in units of the spacing.

    at: the index of each element, which selects its random number
    """
    exponent = tl.maximum(magnitude(q) & 0x7F800000, (TO.min_exponent + 127) << 23)
    step = (exponent - (TO.mantissa << 23)).to(tl.float32, bitcast=True)
    inverse = ((254 << 23) - exponent + (TO.mantissa << 23)).to(tl.float32, bitcast=True)
    steps = tl.abs(q) * inverse
    down = tl.floor(steps)
    size = (down + tl.where(uniform(at, words) < steps - down, 1.0, 0.0)) * step
    bits = magnitude(tl.where(q == q, size, q)) | (q.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@jit
def stored(q, TO: tl.constexpr):
    """Return q in the dtype of the format: rounded to nearest-even, and saturated. For FP8 the
    hardware's conversion instruction does this."""
    if TO.kind == tl.int8:
        # 1.5 * 2^23: adding it rounds q to an integer, because float32 numbers of this size have a
        # spacing of 1
        q = (q + 12582912.0) - 12582912.0
        return tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int8)
    return q.to(TO.kind)


@jit
def swizzle(r, c, C):
    """Return the byte offset of the scale in row r, column c, of C columns, in the layout of
    `lpkit.kernels.scales.swizzled`."""
    tile = (r // 128).to(tl.int64) * tl.cdiv(C, 4) + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4


@jit
def two_levels(amax, top, TO: tl.constexpr):
    """Return the scales of blocks in E4M3, the divisors of blocks in float32, and the scale of the
    tensor in float32 (NVFP4).

    amax: the largest magnitude of each block, float32
    top:  the bits of the largest magnitude of the tensor
    """
    most = tl.where(top < 0x7F800000, top.to(tl.float32, bitcast=True), float("nan"))
    if TO.rule == "e4m3":
        most = tl.maximum(most, 2.0**-100, propagate_nan=tl.PropagateNan.ALL)
        turn, m, y = divisor(most)
        encode = quotient(TO.largest * 448.0, m, y) * turn
        turn, m, y = divisor(encode)
        tensor = quotient(1.0, m, y) * turn
        s = amax * (encode * (1.0 / TO.largest))
    else:
        tensor = quotient(most, TO.largest * 448.0, 1.0 / (TO.largest * 448.0))
        tensor = tl.maximum(tensor, 2.0**-100, propagate_nan=tl.PropagateNan.ALL)
        turn, m, y = divisor(tensor)
        s = quotient(quotient(amax, TO.largest, 1.0 / TO.largest) * turn, m, y)
        s = tl.maximum(s, 2.0**-6, propagate_nan=tl.PropagateNan.ALL)
    s = tl.minimum(s, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    wide = s.to(tl.float32)
    return s, tl.where(wide == 0, float("inf"), wide * tensor), tensor


@jit
def e2m1(q):
    """Return the 4-bit code of q, rounded to nearest-even and saturated. The code of NaN is 0,
    because E2M1 has no NaN."""
    # The values are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Count the midpoints between them that are below
    # |q|; a midpoint itself goes to the even code, so > and >= alternate.
    size = tl.abs(q)
    code = tl.where(size > 0.25, 1, 0) + tl.where(size >= 0.75, 1, 0)
    code += tl.where(size > 1.25, 1, 0) + tl.where(size >= 1.75, 1, 0)
    code += tl.where(size > 2.5, 1, 0) + tl.where(size >= 3.5, 1, 0)
    code += tl.where(size > 5.0, 1, 0)
    return code | ((q.to(tl.int32, bitcast=True) >> 28) & 8)
