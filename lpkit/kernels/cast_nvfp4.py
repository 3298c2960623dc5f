"""NVFP4: 4-bit values, two to a byte, under E4M3 scales of 1 x 16 or 16 x 16, and one scale for the
tensor.

The amax of the tensor is a pass of its own: 2 + 2 + 1/2 bytes an element of bf16, and 1/16 for the
scales. Weights (16 x 16) come both ways by one read.

The operands of the weight gradient are transposed, and may pass a random Hadamard transform on the
way: 16 rows of x are 16 registers of a thread, so sums and differences of registers are all it
takes, in the amax's pass and in the cast's, and the 16 codes of a block leave as one word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpkit.kernels import amax as kernel
from lpkit.kernels import scales
from lpkit.kernels.cast import SIGNS, Noise, reference_hadamard
from lpkit.kernels.jit import jit, tiles, tl
from lpkit.kernels.kernel import Kernel
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.rounding import (
    divisor,
    drawn,
    e2m1,
    grid,
    magnitude,
    rounded,
    swizzle,
    two_levels,
    words,
)
from lpkit.techniques.formats import format_of

SIDE = 16
NEGATIVE = sum(1 << j for j, sign in enumerate(SIGNS) if sign < 0)
WIDE = {"BM": 64, "BN": 128, "num_warps": 8}
TWO_WAYS = {"BM": 64, "BN": 64, "num_warps": 8}
TALL = {"BG": 8, "BN": 128, "num_warps": 4}        # 16 rows each, of the amax
TALL_CAST = {"BG": 8, "BN": 64, "num_warps": 4}    # with 128 columns too few programs fit


def definition(x: Tensor, rule: str, square: bool, rows: bool, columns: bool, mix: bool,
               swizzled: bool, noise: Tensor | None) -> tuple[Tensor, ...]:
    """x (M, N) -> (codes (M, N / 2) uint8, scales (M, N / 16) E4M3), and the same of x.T, as asked
    for; the tensor's scale () float32; () int64, how many are not finite.

    square:   blocks of 16 x 16, whose scales are those of 16 rows alike.
    mix:      the transform of the contracted axis first.
    swizzled: scales as the bytes of their tiles.
    """
    scales.check(x)
    to, results = format_of("e2m1"), []
    for one in ([x] if rows else []) + ([x.T.contiguous()] if columns else []):
        one = reference_hadamard(one, False) if mix else one
        scales.check(one, (SIDE if square else 1, SIDE))
        made = scales.cast(one, to, (SIDE if square else 1, SIDE), rule, noise=noise)
        scale = made.scale.repeat_interleave(SIDE if square else 1, 0).to(torch.float8_e4m3fn)
        results += [scales.packed(made.data), scales.swizzled(scale) if swizzled else scale]
    return *results, made.tensor, made.nonfinite


@jit
def _pack(code, R: tl.constexpr, C: tl.constexpr):
    """(R, C) codes -> (R, C / 2) bytes."""
    low, high = tl.split(tl.reshape(code.to(tl.uint8), (R, C // 2, 2)))
    return low | (high << 4)


@jit
def _operand(code, s, data, scale, r0, c0, R, C, SWIZZLED: tl.constexpr, BR: tl.constexpr,
             BC: tl.constexpr):
    """Store codes (BR, BC) and scales (BR, BC / 16) of an operand (R, C) at r0, c0."""
    r = r0 + tl.arange(0, BR)
    half = c0 // 2 + tl.arange(0, BC // 2)
    tl.store(data + r[:, None].to(tl.int64) * (C // 2) + half[None, :], _pack(code, BR, BC),
             mask=(r < R)[:, None] & (half < C // 2)[None, :])
    b = c0 // 16 + tl.arange(0, BC // 16)
    there = r[:, None].to(tl.int64) * (C // 16) + b[None, :]
    if SWIZZLED:
        there = swizzle(r[:, None], b[None, :], C // 16)
    tl.store(scale + there, s, mask=(r < R)[:, None] & (b < C // 16)[None, :])


@jit
def _tiles(x, state, words, rows, row_scale, columns, column_scale, tensor, M, N,
           TO: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
           SWIZZLED: tl.constexpr, NOISE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m0, n0 = tl.program_id(0) * BM, tl.program_id(1) * BN
    m, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    w = tl.reshape(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), (BM, BN // 16, 16))
    top = tl.max(magnitude(w), 2)
    if SQUARE:
        top = tl.max(tl.reshape(top, (BM // 16, 16, BN // 16)), 1)
    s, both, whole = two_levels(top.to(tl.float32, bitcast=True), tl.load(state), TO)
    if (m0 == 0) & (n0 == 0):
        tl.store(tensor, whole)
    if SQUARE:
        down = tl.broadcast_to(tl.expand_dims(both, 1), (BM // 16, 16, BN // 16))
        both = tl.reshape(down, (BM, BN // 16))
    turn, m_, y = divisor(both)
    q = rounded(w, turn[:, :, None], m_[:, :, None], y[:, :, None], 0, words, TO, False)
    q = tl.reshape(q, (BM, BN))
    if NOISE:
        q = drawn(q, at, words, TO)
    code = e2m1(q)
    if SQUARE and COLUMNS:
        side = tl.broadcast_to(tl.expand_dims(tl.trans(s), 1), (BN // 16, 16, BM // 16))
        _operand(tl.trans(code), tl.reshape(side, (BN, BM // 16)), columns, column_scale, n0, m0,
                 N, M, SWIZZLED, BN, BM)
    if ROWS:
        if SQUARE:
            down = tl.broadcast_to(tl.expand_dims(s, 1), (BM // 16, 16, BN // 16))
            s = tl.reshape(down, (BM, BN // 16))
        _operand(code, s, rows, row_scale, m0, n0, M, N, SWIZZLED, BM, BN)


@jit
def _sixteen(x, g, n, G, N, MIX: tl.constexpr, NEGATIVE: tl.constexpr):
    """Rows 16 g to 16 g + 15 of x, as 16 tensors (BG, BN); transformed."""
    inside = (g < G)[:, None] & (n < N)[None, :]
    at = g[:, None].to(tl.int64) * (16 * N) + n[None, :]
    v = ()
    for j in tl.static_range(16):
        one = tl.load(x + at + j * N, mask=inside, other=0.0).to(tl.float32)
        if MIX and (NEGATIVE >> j) & 1:
            one = one * -1.0
        v += (one,)
    if MIX:
        for stage in tl.static_range(4):
            made = ()
            for j in tl.static_range(16):
                if (j >> stage) & 1:
                    made += (v[j - (1 << stage)] - v[j],)
                else:
                    made += (v[j] + v[j + (1 << stage)],)
            v = made
        made = ()
        for j in tl.static_range(16):
            made += (v[j] * 0.25,)
        v = made
    return v


@jit
def _mixed_amax(x, state, count, G, N, NEGATIVE: tl.constexpr, BG: tl.constexpr,
                BN: tl.constexpr):
    g = tl.program_id(0) * BG + tl.arange(0, BG)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    v = _sixteen(x, g, n, G, N, True, NEGATIVE)
    most = magnitude(v[0])
    for j in tl.static_range(1, 16):
        most = tl.maximum(most, magnitude(v[j]))
    top = tl.max(tl.max(most, 1), 0)
    tl.atomic_max(state, top)
    if top >= 0x7F800000:
        bad = tl.where(magnitude(v[0]) >= 0x7F800000, 1, 0)
        for j in tl.static_range(1, 16):
            bad += tl.where(magnitude(v[j]) >= 0x7F800000, 1, 0)
        tl.atomic_add(count, tl.sum(tl.sum(bad, 1), 0).to(tl.int64))


@jit
def _columns(x, state, words, data, scale, tensor, G, N, TO: tl.constexpr, MIX: tl.constexpr,
             NEGATIVE: tl.constexpr, SWIZZLED: tl.constexpr, NOISE: tl.constexpr, BG: tl.constexpr,
             BN: tl.constexpr):
    """Blocks of 1 x 16 of x.T (N, 16 G)."""
    g = tl.program_id(0) * BG + tl.arange(0, BG)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    v = _sixteen(x, g, n, G, N, MIX, NEGATIVE)
    most = magnitude(v[0])
    for j in tl.static_range(1, 16):
        most = tl.maximum(most, magnitude(v[j]))
    s, both, whole = two_levels(most.to(tl.float32, bitcast=True), tl.load(state), TO)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(tensor, whole)
    turn, m, y = divisor(both)
    at = n[None, :].to(tl.int64) * (16 * G) + g[:, None] * 16
    low, high = tl.zeros((BG, BN), tl.int32), tl.zeros((BG, BN), tl.int32)
    for j in tl.static_range(16):
        q = rounded(v[j], turn, m, y, at + j, words, TO, NOISE)
        if j < 8:
            low |= e2m1(q) << (4 * j)
        else:
            high |= e2m1(q) << (4 * (j - 8))
    block = low.to(tl.uint32).to(tl.int64) | (high.to(tl.int64) << 32)
    inside = (g < G)[:, None] & (n < N)[None, :]
    there = n[None, :].to(tl.int64) * G + g[:, None]
    tl.store(data + tl.trans(there), tl.trans(block), mask=tl.trans(inside))
    if SWIZZLED:
        there = swizzle(n[None, :], g[:, None], G)
    tl.store(scale + tl.trans(there), tl.trans(s), mask=tl.trans(inside))


def _results(x: Tensor, rule: str, square: bool, rows: bool, columns: bool, mix: bool,
             swizzled: bool, *_) -> tuple[Tensor, ...]:
    def of(R: int, C: int, wanted: bool) -> tuple[Tensor, Tensor]:
        e4m3 = torch.float8_e4m3fn
        if not wanted:
            return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=e4m3)
        if swizzled:
            scale = x.new_zeros(scales.swizzled_bytes(R, C // SIDE), dtype=torch.uint8).view(e4m3)
        else:
            scale = x.new_empty(R, C // SIDE, dtype=e4m3)
        return x.new_empty(R, C // 2, dtype=torch.uint8), scale

    M, N = x.shape
    return (*of(M, N, rows), *of(N, M, columns), x.new_empty((), dtype=torch.float32),
            kernel.empty_state(x))


@operator("cast_nvfp4(Tensor x, str rule, bool square, bool rows, bool columns, bool mix, "
          "bool swizzled, Tensor? noise) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
          key=EVERY_DEVICE, fake=_results)
def operation(x: Tensor, rule: str, square: bool, rows: bool, columns: bool, mix: bool,
              swizzled: bool, noise: Tensor | None) -> tuple[Tensor, ...]:
    M, N = scales.check(x, (SIDE if square or columns else 1, SIDE if square or rows else 1))
    made = _results(x, rule, square, rows, columns, mix, swizzled)
    left, left_scale, right, right_scale, tensor, state = made
    how = {"TO": grid("e2m1", rule), "SWIZZLED": swizzled, "NOISE": noise is not None}
    G = M // SIDE
    if mix:
        _mixed_amax[tiles(G, N, TALL)](x, state, state[2:].view(torch.int64), G, N,
                                       NEGATIVE=NEGATIVE, **TALL)
    else:
        kernel.launch(x, state)
    if rows or square:
        shape = TWO_WAYS if square else WIDE
        _tiles[tiles(M, N, shape)](
            x, state, noise, left, left_scale, right, right_scale, tensor, M, N, SQUARE=square,
            ROWS=rows, COLUMNS=columns, **how, **shape)
    if columns and not square:
        _columns[tiles(G, N, TALL_CAST)](
            x, state, noise, right.view(torch.int64), right_scale, tensor, G, N, MIX=mix,
            NEGATIVE=NEGATIVE, **how, **TALL_CAST)
    return made


def in_triton(x: Tensor, rule: str, square: bool, rows: bool, columns: bool, mix: bool,
              swizzled: bool, noise: Tensor | None) -> tuple[Tensor, ...]:
    made = operation(x, rule, square, rows, columns, mix, swizzled, noise)
    return (*(made[:2] if rows else ()), *(made[2:4] if columns else ()), made[4],
            made[5][2:].view(torch.int64).view(()))


def _examples(rng: torch.Generator, device: torch.device):
    drawn_by = words(Noise(seed=6, counter=2**34), device)
    x = torch.randn(144, 96, generator=rng)
    x *= torch.exp2(torch.randint(-9, 9, (9, 6), generator=rng)).repeat_interleave(
        16, 0).repeat_interleave(16, 1)
    x[:, 16:32], x[32:48] = 0, x[32:48] * 1e-6
    x = x.to(device)
    few = x[:48, :80].contiguous()
    bad = few.clone()
    bad[1, 3], bad[40, 70] = torch.nan, torch.inf
    for rule in ("e4m3", "e4m3-normal"):
        yield x, rule, False, True, False, False, True, None
        yield few.bfloat16(), rule, False, True, False, False, False, None
        yield x.bfloat16(), rule, True, True, True, False, True, None
        yield few.bfloat16(), rule, False, False, True, True, True, drawn_by
        for scale in (0.0, 1e-35, 1e33):
            yield few * scale, rule, False, True, False, False, False, None
            yield few * scale, rule, False, False, True, True, False, None
    yield x[:5], "e4m3", False, True, False, False, False, drawn_by
    yield few, "e4m3", False, False, True, False, False, None
    yield bad, "e4m3", True, True, True, False, False, None
    yield bad, "e4m3-normal", False, False, True, True, False, None


KERNEL = Kernel(
    definition=definition, versions={"triton": in_triton}, examples=_examples, exact=True)
