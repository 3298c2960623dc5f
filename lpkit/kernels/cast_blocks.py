"""Blocks of an operand to FP8, each under a scale of its own: 1 x 128 and 128 x 128 under float32
scales (DeepSeek-V3, section 3.3), MX's 1 x 32 under E8M0 ones.

One read serves both of a tensor's products: a program holds 128 x 128 elements, casts the rows in
blocks, and its columns, which are the rows of x.T, in blocks of their own. 2 + 1 + 1 bytes an
element of bf16, and the scales.

Scales lie where the product wants them: those of 1 x 128 column by column (cuBLAS 12.9, "scaling
factors layouts"), E8M0 in tiles of 128 x 4 where `swizzled`.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lpkit.kernels import scales
from lpkit.kernels.cast import Noise
from lpkit.kernels.jit import jit, tl, triton
from lpkit.kernels.kernel import Kernel
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.rounding import (
    code_of,
    divisor,
    drawn,
    grid,
    magnitude,
    rounded,
    scale_of,
    stored,
    swizzle,
    words,
)
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import MX_BLOCK

MX_SIDE = MX_BLOCK[1]
# of one operand, (64, 128) or its transpose; of both, in blocks of 128 and of 32
ONE, BOTH = {"BR": 64, "BC": 128, "num_warps": 8}, {"BR": 128, "BC": 128, "num_warps": 16}
BOTH_MX, WHOLE = {"BR": 64, "BC": 64, "num_warps": 8}, {"TILE": 128, "num_warps": 16}


def definition(x: Tensor, fmt: str, rule: str, side: int, square: bool, rows: bool, columns: bool,
               swizzled: bool, noise: Tensor | None) -> tuple[Tensor, ...]:
    """x (M, N) -> (values (M, N), scales), and the same of x.T, as asked for; and () int64, how
    many are not finite.

    side:     elements that share a scale; `square`: side x side of them.
    swizzled: scales of MX are (R, C / 32) E8M0, or the bytes of their tiles. Others are float32.
    """
    scales.check(x, (side, side) if square else (1, 1))
    to = format_of(fmt)
    if square:      # the values of x.T are those of x
        made = scales.cast(x, to, (side, side), rule, noise=noise)
        data, scale = made.data, made.scale
        return (*([data, scale] if rows else []),
                *([data.T.contiguous(), scale.T.contiguous()] if columns else []), made.nonfinite)
    results = []
    for one in ([x] if rows else []) + ([x.T.contiguous()] if columns else []):
        scales.check(one, (1, side))
        made = scales.cast(one, to, (1, side), rule, noise=noise)
        scale = made.scale
        if side == MX_SIDE:
            scale = scale.to(torch.float8_e8m0fnu)
            scale = scales.swizzled(scale) if swizzled else scale
        results += [made.data, scale]
    return *results, made.nonfinite


@jit
def _operand(v, data, scale, words, r, c, R, C, TO: tl.constexpr, SIDE: tl.constexpr,
             MX: tl.constexpr, SWIZZLED: tl.constexpr, NOISE: tl.constexpr, BR: tl.constexpr,
             BC: tl.constexpr):
    """v (BR, BC) are rows r and columns c of an operand (R, C). Gives the largest magnitude's bits
    in each block."""
    w = tl.reshape(v, (BR, BC // SIDE, SIDE))
    top = tl.max(magnitude(w), 2)
    blocks = C // SIDE
    b = tl.min(c, 0) // SIDE + tl.arange(0, BC // SIDE)
    within = (r < R)[:, None] & (b < blocks)[None, :]
    s = scale_of(top, TO)
    if MX:
        there = r[:, None].to(tl.int64) * blocks + b[None, :]
        if SWIZZLED:
            there = swizzle(r[:, None], b[None, :], blocks)
        tl.store(scale + there, code_of(top, TO).to(tl.uint8), mask=within)
    else:
        tl.store(scale + b[None, :].to(tl.int64) * R + r[:, None], s, mask=within)
    turn, m, y = divisor(s)
    q = rounded(w, turn[:, :, None], m[:, :, None], y[:, :, None], 0, words, TO, False)
    q = tl.reshape(q, (BR, BC))
    at = r[:, None].to(tl.int64) * C + c[None, :]
    if NOISE:
        q = drawn(q, at, words, TO)
    tl.store(data + at, stored(q, TO), mask=(r < R)[:, None] & (c < C)[None, :])
    return top


@jit
def _count(x, at, inside, count):
    bad = tl.where(magnitude(tl.load(x + at, mask=inside, other=0.0).to(tl.float32)) >= 0x7F800000,
                   1, 0)
    tl.atomic_add(count, tl.sum(tl.sum(bad, 1), 0).to(tl.int64))


@jit
def _blocks(x, rows, row_scale, columns, column_scale, count, words, M, N, TO: tl.constexpr,
            SIDE: tl.constexpr, MX: tl.constexpr, SWIZZLED: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, NOISE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    BM: tl.constexpr = BR if ROWS else BC
    BN: tl.constexpr = BC if ROWS else BR
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if COLUMNS:
        top = _operand(tl.trans(v), columns, column_scale, words, n, m, N, M, TO, SIDE, MX,
                       SWIZZLED, NOISE, BR, BC)
    if ROWS:
        if COLUMNS:     # from L1: what is held until here would cost half the programs
            v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        top = _operand(v, rows, row_scale, words, m, n, M, N, TO, SIDE, MX, SWIZZLED, NOISE, BR,
                       BC)
    if tl.max(tl.max(top, 1), 0) >= 0x7F800000:
        _count(x, at, inside, count)


@jit
def _square(x, rows, row_scale, columns, column_scale, count, words, M, N, TO: tl.constexpr,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr, NOISE: tl.constexpr, TILE: tl.constexpr):
    """A program is a block, and sides are multiples of it."""
    i, j = tl.program_id(0), tl.program_id(1)
    m, n = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    v = tl.load(x + at).to(tl.float32)
    top = tl.max(tl.max(magnitude(v), 1), 0)
    if top >= 0x7F800000:
        _count(x, at, at >= 0, count)
    s = scale_of(top, TO)
    turn, m_, y = divisor(s)
    q = stored(rounded(v, turn, m_, y, at, words, TO, NOISE), TO)
    if ROWS:
        tl.store(rows + at, q)
        tl.store(row_scale + i.to(tl.int64) * (N // TILE) + j, s)
    if COLUMNS:
        tl.store(columns + n[:, None].to(tl.int64) * M + m[None, :], tl.trans(q))
        tl.store(column_scale + j.to(tl.int64) * (M // TILE) + i, s)


def _results(x: Tensor, fmt: str, rule: str, side: int, square: bool, rows: bool, columns: bool,
             swizzled: bool, *_) -> list[Tensor]:
    dtype, made = scales.stored_dtype(format_of(fmt)), []
    for R, C in [x.shape] * rows + [x.shape[::-1]] * columns:
        if square:
            scale = x.new_empty(R // side, C // side, dtype=torch.float32)
        elif side != MX_SIDE:    # column by column
            scale = x.new_empty(C // side, R, dtype=torch.float32).T
        elif swizzled:          # what the tiles have beyond the tensor is read too
            scale = x.new_zeros(scales.swizzled_bytes(R, C // side), dtype=torch.uint8)
        else:
            scale = x.new_empty(R, C // side, dtype=torch.uint8)
        if side == MX_SIDE:
            scale = scale.view(torch.float8_e8m0fnu)
        made += [x.new_empty(R, C, dtype=dtype), scale]
    return [*made, x.new_zeros((), dtype=torch.int64)]


@operator("cast_blocks(Tensor x, str fmt, str rule, int side, bool square, bool rows, "
          "bool columns, bool swizzled, Tensor? noise) -> Tensor[]", key=EVERY_DEVICE,
          fake=_results)
def operation(x: Tensor, fmt: str, rule: str, side: int, square: bool, rows: bool, columns: bool,
              swizzled: bool, noise: Tensor | None) -> list[Tensor]:
    M, N = scales.check(x, (side if square or columns else 1, side if square or rows else 1))
    made = _results(x, fmt, rule, side, square, rows, columns, swizzled)
    how = {"TO": grid(fmt, rule), "ROWS": rows, "COLUMNS": columns, "NOISE": noise is not None}
    data = [one.view(torch.uint8) if one.dtype == torch.float8_e8m0fnu else one for one in made]
    data = [None] * (not rows) * 2 + data[:-1] + [None] * (not columns) * 2 + data[-1:]
    if square:
        _square[M // side, N // side](x, *data, noise, M, N, **how, **WHOLE)
    else:
        both = BOTH_MX if side == MX_SIDE else BOTH
        shape = both if rows and columns else ONE
        sides = [shape["BR"], shape["BC"]][::1 if rows else -1]
        _blocks[triton.cdiv(M, sides[0]), triton.cdiv(N, sides[1])](
            x, *data, noise, M, N, **how, SIDE=side, MX=side == MX_SIDE, SWIZZLED=swizzled,
            **shape)
    return made


def _x(rng: torch.Generator, device: torch.device, M: int, N: int) -> Tensor:
    """Magnitudes from 2^-40 to 2^40, and what is hard in some blocks."""
    x = torch.randn(M, N, generator=rng) * torch.exp2(torch.randint(-40, 40, (M, 1), generator=rng))
    x[:, :16] *= 1e-4
    x[1] = 0
    x[2, :128] *= 1e-42
    x[3], x[4] = 448 * 2.0**-20, -57344 * 2.0**9
    return x.to(device)


def _blocks_examples(rng: torch.Generator, device: torch.device):
    drawn_by = words(Noise(seed=3, counter=2**32), device)
    x = _x(rng, device, 256, 256)
    bad = x.clone()
    bad[1, 3], bad[130, 200] = torch.nan, -torch.inf
    for square, rule in itertools.product((False, True), ("float32", "power-of-two")):
        yield x.bfloat16(), "e4m3fn", rule, 128, square, True, True, False, None
    yield x[:128], "e5m2", "power-of-two-floor", 128, False, True, True, False, drawn_by
    yield x[:128], "e5m2", "float32", 128, True, False, True, False, drawn_by
    yield x[:5], "e4m3fn", "float32", 128, False, True, False, False, None
    yield x[:, :72].contiguous(), "e4m3fn", "float32", 128, False, False, True, False, None
    for square in (False, True):
        yield bad, "e4m3fn", "float32", 128, square, True, True, False, None


KERNEL = Kernel(
    definition=definition, versions={"triton": operation}, examples=_blocks_examples, exact=True)


# MX: the same with smaller blocks, whose scales are bytes.

def _mx_examples(rng: torch.Generator, device: torch.device):
    drawn_by = words(Noise(seed=4, counter=2**35), device)
    x = _x(rng, device, 160, 192)
    bad = x.clone()
    bad[1, 3], bad[130, 100] = torch.nan, torch.inf
    for rule, swizzled in itertools.product(("power-of-two", "power-of-two-floor"), (False, True)):
        yield x.bfloat16(), "e4m3fn", rule, MX_SIDE, False, True, True, swizzled, None
        yield x, "e5m2", rule, MX_SIDE, False, True, False, swizzled, drawn_by
    yield x[:7], "e4m3fn", "power-of-two", MX_SIDE, False, True, False, True, None
    yield bad, "e4m3fn", "power-of-two", MX_SIDE, False, True, True, False, None


MX_KERNEL = Kernel(
    definition=definition, versions={"triton": operation}, examples=_mx_examples, exact=True)
