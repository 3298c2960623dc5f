"""Parts of the fused casts in Triton: scales, exact division, stochastic rounding, layouts.

On a GPU, a division that rounds once is a function call of twenty instructions. These casts divide
many numbers by few divisors. So the reciprocal is computed once per divisor, and the product with
it is corrected twice by its own remainder. This takes five instructions, and gives the bits of a
division (Markstein 1990, https://doi.org/10.1147/rd.341.0111). For powers of two, one
multiplication suffices.

Magnitudes are compared as integers with the same bits. An infinity is larger than all numbers, and
a NaN is larger than an infinity, so a maximum loses neither.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lpkit.kernels.cast import SIGNS, Noise
from lpkit.kernels.jit import jit, tl
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import MX_BLOCK, named

# programs of a kernel that walks over a tensor: eight for each multiprocessor of an H100
PROGRAMS = 1056


class Plan(str):
    """A cast as one constant of a kernel. It is a string, by which Triton distinguishes constants.

    up:       added to the bits of an amax, it carries into the exponent if the amax has a larger
              mantissa than the format's largest value
    negative: a bit for each of 16 elements that the Hadamard transform negates
    """

    def __new__(cls, words: str, rows: bool, columns: bool, swizzled: bool, history: bool,
                noise: bool) -> Plan:
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


plan = functools.cache(Plan)


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
    """Return v / m, rounded once, if y is 1 / m rounded once. The remainder is negated, and v is
    multiplied by -1, because Triton computes -v as 0 - v, which would lose -0."""
    # each fma computes the remainder exactly, and corrects q by it
    q = v * y
    q = tl.fma(tl.fma(m, q, v * -1.0), -y, q)
    return tl.fma(tl.fma(m, q, v * -1.0), -y, q)


@jit
def divisor(s):
    """Split s > 0 into m * 2^e, 1 <= m < 2, and return 2^-e, m, 1 / m. v / s is then
    quotient(v * 2^-e, m, 1 / m), which neither overflows nor loses bits. NaN stays NaN, and a
    division by infinity gives 0."""
    bits = s.to(tl.int32, bitcast=True)
    turn = ((254 << 23) - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    turn = tl.where(bits == 0x7F800000, 0.0, tl.where(s == s, turn, s))
    m = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    y = 1.0 / m
    # Two Newton steps make y the correctly rounded 1 / m (Markstein).
    y = tl.fma(tl.fma(-m, y, 1.0), y, y)
    return turn, m, tl.fma(tl.fma(-m, y, 1.0), y, y)


@jit
def divided(v, s, TO: tl.constexpr):
    """Return v / s, rounded once, for s > 0 whose shape broadcasts over v's."""
    turn, m, y = divisor(s)
    v = v * turn
    if TO.history:      # a history's scale may be far too small: then a remainder would overflow
        v = tl.clamp(v, -4 * TO.largest, 4 * TO.largest, propagate_nan=tl.PropagateNan.ALL)
    if TO.divides:
        v = quotient(v, m, y)
    return v


@jit
def rounded(v, s, at, words, TO: tl.constexpr):
    """Return v / s, rounded to the grid if there is noise; otherwise `stored` rounds."""
    v = divided(v, s, TO)
    if TO.noise:
        v = drawn(v, at, words, TO)
    return v


@jit
def code_of(top, TO: tl.constexpr):
    """Return the E8M0 code for an amax with the bits `top`, without division or logarithm."""
    if TO.rule == "power-of-two":
        code = tl.where(top == 0, 127, tl.maximum(((top + TO.up) >> 23) - TO.max_exponent, 0))
    else:
        code = tl.maximum((top >> 23) - TO.max_exponent, 0)
        code = tl.where(top == 0, 126 - TO.max_exponent, code)
    return tl.where(top < 0x7F800000, code, 255)


@jit
def scale_of(top, TO: tl.constexpr):
    """Return the scale for an amax with the bits `top`, float32; NaN if the amax is not finite."""
    if TO.divides:
        amax = tl.maximum(top.to(tl.float32, bitcast=True), 2.0**-100)
        s = quotient(amax, TO.largest, 1.0 / TO.largest)
    else:
        code = code_of(top, TO)
        s = tl.where(code > 0, code << 23, 1 << 22).to(tl.float32, bitcast=True)
    return tl.where(top < 0x7F800000, s, float("nan"))


@jit
def uniform(at, words):
    """`lpkit.kernels.cast._uniform`: element `at` of the stream `words`, (counter, k0, k1)."""
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
    """Round q to the grid, up with the probability of the remainder. Steps are powers of two."""
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
    """Round q to nearest-even, and saturate. Uses the hardware's conversion if there is one."""
    if TO.kind == tl.int8:
        # 1.5 * 2^23: the addition itself rounds to an integer
        q = (q + 12582912.0) - 12582912.0
        return tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int8)
    return q.to(TO.kind)


@jit
def swizzle(r, c, C):
    """Return the offset of the scale in row r, column c of C; see
    `lpkit.kernels.scales.swizzled`."""
    tile = (r // 128).to(tl.int64) * tl.cdiv(C, 4) + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4


@jit
def two_levels(amax, top, TO: tl.constexpr):
    """Return the scale in E4M3, the divisor, and the tensor's scale, for blocks with the largest
    magnitudes `amax` in a tensor whose largest magnitude has the bits `top`."""
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
    size = tl.abs(q)
    code = tl.where(size > 0.25, 1, 0) + tl.where(size >= 0.75, 1, 0)
    code += tl.where(size > 1.25, 1, 0) + tl.where(size >= 1.75, 1, 0)
    code += tl.where(size > 2.5, 1, 0) + tl.where(size >= 3.5, 1, 0)
    code += tl.where(size > 5.0, 1, 0)
    return code | ((q.to(tl.int32, bitcast=True) >> 28) & 8)
