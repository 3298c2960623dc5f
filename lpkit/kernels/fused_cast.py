"""Fused casts in Triton: from a matrix x to 8 or 4 bits, of x and of x.T, with their scales.

    kernel       blocks that share a scale    bytes moved per element of a bf16 matrix
    cast-tensor  the whole matrix             amax: 2; cast: 2 read + 1 + 1 written
                                              with a history, no amax: 2 + 1 + 1
    cast-rows    a row                        2 + 1 if a program holds the row; x.T: 2 + 2 + 1
    cast-blocks  1 x 128, or 128 x 128        2 + 1 + 1, and the scales
    cast-mx      1 x 32                       2 + 1 + 1, and the scales, one byte each
    cast-nvfp4   1 x 16, or 16 x 16,          amax: 2; cast: 2 + 1/2 + 1/2, and 1/16 for the
                 two levels of scales         scales of each of x and x.T

All kernels have one definition, `definition`, and one operator, `operation`, which looks up in
FUSED the kernel for the shape of the blocks. Tensor cores read operands with the contracted axis
last. So a tensor that is an operand of two matmuls is cast twice: as stored (`rows`) and transposed
(`columns`). If possible, one kernel reads the tensor once and writes both casts.

Scales are stored in the layout that the matmul reads: float32 scales of 1 x 128 blocks column by
column (cuBLAS 12.9, "scaling factors layouts"), and one-byte scales, if `swizzled`, in tiles of
128 x 4 (`scales.swizzled`).

All kernels that `Launch.run` launches take the same arguments:
    x                      the matrix (M, N)
    rows, row_scale        the cast of x and its scales; None if it is not requested
    columns, column_scale  the cast of x.T and its scales; None if it is not requested
    stats                  `amax.empty_stats`: amax, number of non-finite elements, tensor scale
    history or tops        amax of a history, or amaxes of columns; None if the kernel reads neither
    words                  `Noise.words`, or None
    M, N                   the sizes of x (G, N: x has G groups of 16 rows)
    TO                     the cast, a `rounding.Plan`
    BM, BN (BG, BN)        rows (groups of rows) and columns of the tile of one program
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.kernels import amax as kernel
from lpkit.kernels import scales
from lpkit.kernels.cast import Noise, hadamard, reference_hadamard
from lpkit.kernels.jit import jit, tiles, tl, triton
from lpkit.kernels.kernel import Kernel, Version, spoiled
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.rounding import (
    CastPlan,
    code_of,
    divided,
    drawn,
    e2m1,
    magnitude,
    nonfinite,
    plan,
    rounded,
    scale_of,
    stored,
    swizzle,
    two_levels,
    words,
)
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import ALL, MX_BLOCK, SCALES, Cast, named

WHOLE, ROW, BLOCK, SQUARE, NVFP4, NVFP4_SQUARE = (
    (ALL, ALL), (1, ALL), (1, 128), (128, 128), (1, 16), (16, 16))
FP8_SCALES = ("float32", "power-of-two", "power-of-two-floor")

# Rows and columns of the tile of x that a program processes, and the warps of the program.
TILE = {"BM": 128, "BN": 64, "num_warps": 8}
TALL = {"BM": 256, "BN": 64, "num_warps": 8}        # for the amaxes of columns
HELD = 2048         # a program casts several short rows, with at least so many elements together
HOLDS = 16384       # the longest row that a program holds in registers
# A longer row is read in steps of so many elements, twice: for its amax, and for the cast. The
# second read hits the L2 cache.
PIECE = 8192
WIDE, NARROW = {"BM": 64, "BN": 128, "num_warps": 8}, {"BM": 128, "BN": 64, "num_warps": 8}
BOTH = {"BM": 128, "BN": 128, "num_warps": 16}
SMALL = {"BM": 64, "BN": 64, "num_warps": 8}        # casts x and x.T, in blocks of 32 or 16
SIXTEENS = {"BG": 8, "BN": 128, "num_warps": 4}         # BG groups of 16 rows each
# 64 columns, because with 128 columns too few programs fit on a multiprocessor
SIXTEENS_CAST = {"BG": 8, "BN": 64, "num_warps": 4}


# ---- the definition

def definition(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
               history: Tensor | None, noise: Tensor | None) -> tuple[Tensor, ...]:
    """Return the casts of x (M, N), by PyTorch's operations. The tuple contains

        values and scales of x         if `rows`
        values and scales of x.T       if `columns`
        () float32                     the amax, if the whole tensor has one scale; the scale of the
                                       tensor, if there are two levels of scales; else nothing
        () int64                       the number of elements of x that are not finite

    swizzled: one-byte scales are returned in the layout of `scales.swizzled`
    history:  () float32, the amax that determines the scale of a whole tensor; None: x does
    noise:    `Noise.words`, (3,) int64, for stochastic rounding; None: round to nearest-even
    """
    _check(x, cast, rows, columns)

    def scaled(operand: Tensor) -> scales.Scaled:
        mixed = operand if cast.transform == "none" else reference_hadamard(operand, False)
        return scales.cast(mixed, format_of(cast.format), cast.block, cast.scale, history=history,
                           noise=noise)

    ways = [scaled(x)] if rows or cast.transposes else []
    if columns:
        ways.append(ways[0].transposed() if cast.transposes else scaled(x.T.contiguous()))
    results = [part for way in ways[-(rows + columns):]
               for part in (scales.packed(way.data) if cast.bits == 4 else way.data,
                            _scales(way.scale, cast, swizzled))]
    if cast.block == WHOLE:
        results.append(ways[0].amax.view(()))
    elif ways[0].tensor is not None:
        results.append(ways[0].tensor)
    return *results, ways[0].nonfinite


def _scales(scale: Tensor, cast: Cast, swizzled: bool) -> Tensor:
    """Return the scales in the dtype and layout that the matmul reads. The scale of a 16 x 16 block
    is repeated for each of the 16 rows."""
    dtype = _scale_dtype(cast)
    if dtype == torch.float8_e4m3fn:
        scale = scale.repeat_interleave(cast.block[0], 0)
    scale = scale.to(dtype)
    return scales.swizzled(scale) if swizzled and dtype.itemsize == 1 else scale


def _scale_dtype(cast: Cast) -> torch.dtype:
    if SCALES[cast.scale].levels == 2:
        return torch.float8_e4m3fn
    return torch.float8_e8m0fnu if cast.block == MX_BLOCK else torch.float32


def _check(x: Tensor, cast: Cast, rows: bool, columns: bool) -> None:
    """Raise ConfigError if the sides of x (`rows`) or of x.T (`columns`) are not multiples of the
    block's sides."""
    (down, across) = cast.block
    scales.check(x, (max(rows * down, columns * across), max(rows * across, columns * down)))


# ---- one scale for the tensor

@jit
def _load(x, m, n, M, N):
    """Return the elements of x (M, N) at rows m and columns n, their offsets, and a mask of the
    elements that are inside of x. Elements outside are 0."""
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    return tl.load(x + at, mask=inside, other=0.0), at, inside


@jit
def _cast(x, rows, row_scale, columns, column_scale, stats, history, words, M, N,
          TO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Cast a tile of x under the one scale of the tensor.

    Without a history, the kernel `amax` has written the amax of x to `stats`. With a history, the
    history determines the scale, and this kernel computes the new amax. (While the history is still
    empty, `amax` also runs, and its amax determines the scale.) If x has a NaN or an Inf, the scale
    becomes NaN, so that every result of the matmul is NaN.
    """
    tile, bits = tl.program_id(0), stats.to(tl.pointer_type(tl.int32))
    top = tl.load(bits)
    # With a history, other programs may already have changed the amax in `stats`, so it is used
    # only if the history is empty. Then `amax` has already written the final amax.
    if TO.history:
        past = tl.load(history)
        top = tl.where(past > 0, magnitude(past), top)
    s = scale_of(top, TO)
    if tile == 0:
        tl.atomic_max(bits + 64, magnitude(s))
    across = tl.cdiv(N, BN)
    m = tile // across * BM + tl.arange(0, BM)
    n = tile % across * BN + tl.arange(0, BN)
    v, at, inside = _load(x, m, n, M, N)
    v = v.to(tl.float32)
    if TO.history:
        tile_top = tl.max(tl.max(magnitude(v), 1), 0)
        tl.atomic_max(bits, tile_top)
        if tile_top >= 0x7F800000:
            tl.atomic_max(bits + 64, 0x7FC00000)
            bad = nonfinite(tl.load(x + at, mask=inside, other=0.0))
            # If the history is empty, `amax` has already counted them.
            tl.atomic_add(stats + 1, tl.where(past > 0, bad, 0))
    q = rounded(v, s, at, words, TO)
    # the tile was read once, and is stored both ways
    if TO.rows:
        tl.store(rows + at, stored(q, TO), mask=inside)
    if TO.columns:
        there = n[:, None].to(tl.int64) * M + m[None, :]
        # Multiply by 1.0, in a form that the compiler cannot simplify: ptxas 12.8 loses bytes of a
        # value that is stored both as rows and as columns (docs/log.md).
        again = tl.trans(q * (1.0 - (N >> 31)))
        tl.store(columns + there, stored(again, TO), mask=tl.trans(inside))


# ---- a scale for each row: a program holds the row, or reads it a second time

@jit
def _write(read, s, data, at, inside, words, TO: tl.constexpr):
    """Cast the loaded rows `read` by their scales s, and store them in `data`."""
    q = stored(rounded(read.to(tl.float32), s[:, None], at, words, TO), TO)
    tl.store(data + at, q, mask=inside)


@jit
def _rows(x, rows, row_scale, columns, column_scale, stats, history, words, M, N,
          TO: tl.constexpr, HOLD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Cast BM rows of x, with a scale for each row. HOLD: a row has at most BN elements, so that
    the program holds it in registers and reads it once."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    # The elements stay in the dtype of x: bf16 takes half the registers of float32.
    read, at, inside = _load(x, m, n, M, N)
    most = magnitude(read.to(tl.float32))
    if not HOLD:
        for start in range(BN, N, BN):
            more = tl.load(x + at + start, mask=inside & (start + n < N)[None, :], other=0.0)
            most = tl.maximum(most, magnitude(more.to(tl.float32)))
    top = tl.max(most, 1)
    if tl.max(top, 0) >= 0x7F800000:
        for start in range(0, BN if HOLD else N, BN):
            more = tl.load(x + at + start, mask=inside & (start + n < N)[None, :], other=0.0)
            tl.atomic_add(stats + 1, nonfinite(more))
    s = scale_of(top, TO)
    tl.store(row_scale + m, s, mask=m < M)
    if HOLD:
        _write(read, s, rows, at, inside, words, TO)
    else:
        for start in range(0, N, BN):
            within = inside & (start + n < N)[None, :]
            read = tl.load(x + at + start, mask=within, other=0.0)
            _write(read, s, rows, at + start, within, words, TO)


# A row of x.T is a column of x, and is too long to be held in registers. So `_column_amax` computes
# the amaxes of all columns, and then `_columns` casts and transposes.

@jit
def _column_amax(x, rows, row_scale, columns, column_scale, stats, tops, words, M, N,
                 TO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Write the bits of the largest magnitude of each column to `tops` (N,), which begins as zeros,
    and count non-finite elements in `stats`."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    v, at, inside = _load(x, m, n, M, N)
    top = tl.max(magnitude(v.to(tl.float32)), 0)
    tl.atomic_max(tops + n, top, mask=n < N)
    if tl.max(top, 0) >= 0x7F800000:
        tl.atomic_add(stats + 1, nonfinite(tl.load(x + at, mask=inside, other=0.0)))


@jit
def _columns(x, rows, row_scale, columns, column_scale, stats, tops, words, M, N,
             TO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Cast a tile of x, with a scale for each column, and store it transposed in `columns`."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    s = scale_of(tl.load(tops + n, mask=n < N, other=0), TO)
    if tl.program_id(0) == 0:
        tl.store(column_scale + n, s, mask=n < N)
    v, _, inside = _load(x, m, n, M, N)
    there = n[None, :].to(tl.int64) * M + m[:, None]
    q = stored(rounded(v.to(tl.float32), s[None, :], there, words, TO), TO)
    tl.store(columns + tl.trans(there), tl.trans(q), mask=tl.trans(inside))


# ---- a scale for each block: a program casts the rows of its tile, and separately its columns

@jit
def _operand(v, data, scale, words, r, c, R, C, TO: tl.constexpr, BR: tl.constexpr,
             BC: tl.constexpr):
    """Cast v (BR, BC), the rows r and columns c of an operand (R, C), in blocks of 1 x SIDE. Store
    values in `data` and scales in `scale`. Returns the bits of the largest magnitude of each block,
    (BR, BC / SIDE)."""
    SIDE: tl.constexpr = TO.side
    w = tl.reshape(v, (BR, BC // SIDE, SIDE))
    top = tl.max(magnitude(w), 2)
    blocks = C // SIDE
    b = tl.min(c, 0) // SIDE + tl.arange(0, BC // SIDE)
    within = (r < R)[:, None] & (b < blocks)[None, :]
    s = scale_of(top, TO)
    if TO.mx:
        there = r[:, None].to(tl.int64) * blocks + b[None, :]
        if TO.swizzled:
            there = swizzle(r[:, None], b[None, :], blocks)
        tl.store(scale + there, code_of(top, TO).to(tl.uint8), mask=within)
    else:
        tl.store(scale + b[None, :].to(tl.int64) * R + r[:, None], s, mask=within)
    q = tl.reshape(divided(w, s[:, :, None], TO), (BR, BC))
    at = r[:, None].to(tl.int64) * C + c[None, :]
    if TO.noise:
        q = drawn(q, at, words, TO)
    tl.store(data + at, stored(q, TO), mask=(r < R)[:, None] & (c < C)[None, :])
    return top


@jit
def _blocks(x, rows, row_scale, columns, column_scale, stats, history, words, M, N,
            TO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Cast a tile in blocks of 1 x 128 or 1 x 32: of x along its rows, and of x.T along the columns
    of x."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    v, at, inside = _load(x, m, n, M, N)
    v = v.to(tl.float32)
    if TO.columns:
        top = _operand(tl.trans(v), columns, column_scale, words, n, m, N, M, TO, BN, BM)
    if TO.rows:
        # Read v again, from the L1 cache. Keeping v in registers would halve the number of programs
        # that run at the same time.
        if TO.columns:
            v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        top = _operand(v, rows, row_scale, words, m, n, M, N, TO, BM, BN)
    if tl.max(tl.max(top, 1), 0) >= 0x7F800000:
        tl.atomic_add(stats + 1, nonfinite(tl.load(x + at, mask=inside, other=0.0)))


@jit
def _square(x, rows, row_scale, columns, column_scale, stats, history, words, M, N,
            TO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Cast one block of 128 x 128 per program, and store it in `rows` and transposed in `columns`.
    The sides of x are multiples of 128."""
    i, j = tl.program_id(0), tl.program_id(1)
    m, n = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    at = m[:, None].to(tl.int64) * N + n[None, :]
    v = tl.load(x + at).to(tl.float32)
    top = tl.max(tl.max(magnitude(v), 1), 0)
    if top >= 0x7F800000:
        tl.atomic_add(stats + 1, nonfinite(tl.load(x + at)))
    s = scale_of(top, TO)
    q = rounded(v, s, at, words, TO)
    if TO.rows:
        tl.store(rows + at, stored(q, TO))
        tl.store(row_scale + i.to(tl.int64) * (N // BN) + j, s)
    if TO.columns:
        again = tl.trans(q * (1.0 - (N >> 31)))     # as in _cast
        tl.store(columns + n[:, None].to(tl.int64) * M + m[None, :], stored(again, TO))
        tl.store(column_scale + j.to(tl.int64) * (M // BM) + i, s)


# ---- blocks of 16 under two levels of scales, in 4-bit codes

@jit
def _pack(code, R: tl.constexpr, C: tl.constexpr):
    """Return 4-bit codes (R, C) as (R, C / 2) bytes, the first of two codes in the low half."""
    low, high = tl.split(tl.reshape(code.to(tl.uint8), (R, C // 2, 2)))
    return low | (high << 4)


@jit
def _operand4(code, s, data, scale, r0, c0, R, C, TO: tl.constexpr, BR: tl.constexpr,
              BC: tl.constexpr):
    """Store 4-bit codes (BR, BC) and scales s (BR, BC / 16) of an operand (R, C), from row r0 and
    column c0 on."""
    r = r0 + tl.arange(0, BR)
    half = c0 // 2 + tl.arange(0, BC // 2)
    tl.store(data + r[:, None].to(tl.int64) * (C // 2) + half[None, :], _pack(code, BR, BC),
             mask=(r < R)[:, None] & (half < C // 2)[None, :])
    b = c0 // 16 + tl.arange(0, BC // 16)
    there = r[:, None].to(tl.int64) * (C // 16) + b[None, :]
    if TO.swizzled:
        there = swizzle(r[:, None], b[None, :], C // 16)
    tl.store(scale + there, s, mask=(r < R)[:, None] & (b < C // 16)[None, :])


@jit
def _tiles(x, rows, row_scale, columns, column_scale, stats, history, words, M, N,
           TO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Cast a tile to 4 bits in blocks of 1 x 16 or 16 x 16 (TO.square). Square blocks of x are also
    the blocks of x.T, so one read serves `rows` and `columns`."""
    m0, n0 = tl.program_id(0) * BM, tl.program_id(1) * BN
    bits = stats.to(tl.pointer_type(tl.int32))
    v, at, _ = _load(x, m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), M, N)
    w = tl.reshape(v.to(tl.float32), (BM, BN // 16, 16))
    top = tl.max(magnitude(w), 2)
    if TO.square:
        top = tl.max(tl.reshape(top, (BM // 16, 16, BN // 16)), 1)
    s, both, whole = two_levels(top.to(tl.float32, bitcast=True), tl.load(bits), TO)
    if (m0 == 0) & (n0 == 0):
        tl.store(bits + 64, whole.to(tl.int32, bitcast=True))
    if TO.square:
        down = tl.broadcast_to(tl.expand_dims(both, 1), (BM // 16, 16, BN // 16))
        both = tl.reshape(down, (BM, BN // 16))
    q = tl.reshape(divided(w, both[:, :, None], TO), (BM, BN))
    if TO.noise:
        q = drawn(q, at, words, TO)
    code = e2m1(q)
    if TO.square and TO.columns:
        side = tl.broadcast_to(tl.expand_dims(tl.trans(s), 1), (BN // 16, 16, BM // 16))
        _operand4(tl.trans(code), tl.reshape(side, (BN, BM // 16)), columns, column_scale, n0, m0,
                  N, M, TO, BN, BM)
    if TO.rows:
        if TO.square:
            down = tl.broadcast_to(tl.expand_dims(s, 1), (BM // 16, 16, BN // 16))
            s = tl.reshape(down, (BM, BN // 16))
        _operand4(code, s, rows, row_scale, m0, n0, M, N, TO, BM, BN)


# The operands of the weight gradient are transposed, and a recipe may apply a random Hadamard
# transform to every 16 elements of x.T first. A thread holds 16 rows of x in 16 registers, so the
# transform consists of sums and differences of registers. It is computed twice: by `_mixed_amax`,
# which needs the amax of the transformed tensor, and by the cast.

@jit
def _sixteen(x, g, n, G, N, TO: tl.constexpr):
    """Return the rows 16 g to 16 g + 15 of x as a tuple of 16 tensors (BG, BN), after the Hadamard
    transform (TO.mix); the bits of the largest magnitude of each 16 elements, (BG, BN); and a mask
    of what is inside of x."""
    inside = (g < G)[:, None] & (n < N)[None, :]
    at = g[:, None].to(tl.int64) * (16 * N) + n[None, :]
    v = ()
    for j in tl.static_range(16):
        row = tl.load(x + at + j * N, mask=inside, other=0.0).to(tl.float32)
        if TO.mix and (TO.negative >> j) & 1:
            row = row * -1.0
        v += (row,)
    if TO.mix:
        for stage in tl.static_range(4):
            mixed = ()
            for j in tl.static_range(16):
                if (j >> stage) & 1:
                    mixed += (v[j - (1 << stage)] - v[j],)
                else:
                    mixed += (v[j] + v[j + (1 << stage)],)
            v = mixed
        mixed = ()
        for j in tl.static_range(16):
            mixed += (v[j] * 0.25,)
        v = mixed
    most = magnitude(v[0])
    for j in tl.static_range(1, 16):
        most = tl.maximum(most, magnitude(v[j]))
    return v, most, inside


@jit
def _mixed_amax(x, rows, row_scale, columns, column_scale, stats, history, words, G, N,
                TO: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr):
    """Write the amax of the transformed tensor and the count of its non-finite elements to `stats`.
    """
    g = tl.program_id(0) * BG + tl.arange(0, BG)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    v, most, _ = _sixteen(x, g, n, G, N, TO)
    top = tl.max(tl.max(most, 1), 0)
    tl.atomic_max(stats.to(tl.pointer_type(tl.int32)), top)
    if top >= 0x7F800000:
        bad = tl.zeros((BG, BN), tl.int32)
        for j in tl.static_range(16):
            bad += tl.where(magnitude(v[j]) >= 0x7F800000, 1, 0)
        tl.atomic_add(stats + 1, tl.sum(tl.sum(bad, 1), 0).to(tl.int64))


@jit
def _sixteen_columns(x, rows, row_scale, columns, column_scale, stats, history, words, G, N,
                     TO: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr):
    """Cast x.T (N, 16 G) to 4 bits in blocks of 1 x 16. The 16 codes of a block are stored as one
    int64."""
    g = tl.program_id(0) * BG + tl.arange(0, BG)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    bits = stats.to(tl.pointer_type(tl.int32))
    v, most, inside = _sixteen(x, g, n, G, N, TO)
    s, both, whole = two_levels(most.to(tl.float32, bitcast=True), tl.load(bits), TO)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(bits + 64, whole.to(tl.int32, bitcast=True))
    at = n[None, :].to(tl.int64) * (16 * G) + g[:, None] * 16
    low, high = tl.zeros((BG, BN), tl.int32), tl.zeros((BG, BN), tl.int32)
    for j in tl.static_range(16):
        q = rounded(v[j], both, at + j, words, TO)
        if j < 8:
            low |= e2m1(q) << (4 * j)
        else:
            high |= e2m1(q) << (4 * (j - 8))
    block = low.to(tl.uint32).to(tl.int64) | (high.to(tl.int64) << 32)
    there = n[None, :].to(tl.int64) * G + g[:, None]
    tl.store(columns + tl.trans(there), tl.trans(block), mask=tl.trans(inside))
    if TO.swizzled:
        there = swizzle(n[None, :], g[:, None], G)
    tl.store(column_scale + tl.trans(there), tl.trans(s), mask=tl.trans(inside))


# ---- launching

class Launch(NamedTuple):
    """The arguments of a cast of x (M, N).

    ways:  four output tensors: values and scales of x, values and scales of x.T; None for outputs
           that are not requested
    stats: `amax.empty_stats(x)`, to be filled
    """

    x: Tensor
    # (M, N), or (M / 16, N) for a kernel that processes groups of 16 rows
    sides: tuple[int, int]
    ways: Sequence[Tensor | None]
    stats: Tensor
    history: Tensor | None
    noise: Tensor | None
    to: CastPlan

    def run(self, function: Any, shape: Mapping[str, int], tops: Tensor | None = None,
            programs: tuple[int, ...] = ()) -> None:
        """Launch the kernel `function` with the tile `shape`. `tops`: the argument that is a
        history, or amaxes of columns. `programs`: the grid; empty: as many tiles as cover x."""
        function[programs or tiles(*self.sides, shape)](
            self.x, *self.ways, self.stats, tops, self.noise, *self.sides, TO=self.to, **shape)


def _cast_whole(launch: Launch) -> None:
    """Cast under one scale: compute the amax, unless a history has it, then cast."""
    kernel.launch(launch.x, launch.stats, launch.history)
    launch.run(_cast, TILE, launch.history, (math.prod(tiles(*launch.sides, TILE)),))


def _cast_rows(launch: Launch) -> None:
    """Cast with a scale for each row: x in one pass, and x.T in two passes over x."""
    M, N = launch.sides
    if launch.to.rows:
        shape = row_shape(N)
        launch.run(_rows, shape, programs=(triton.cdiv(M, shape["BM"]),))
    if launch.to.columns:
        tops = launch.x.new_zeros(N, dtype=torch.int32)
        launch.run(_column_amax, TALL, tops)
        launch.run(_columns, TILE, tops)


@functools.cache
def row_shape(N: int) -> dict[str, int]:
    """Return the tile of a program, for rows of N elements."""
    block = PIECE if N > HOLDS else triton.next_power_of_2(N)
    return {"BM": max(1, HELD // block), "BN": block, "HOLD": block >= N,
            "num_warps": max(4, block // 1024)}


def _cast_blocks(launch: Launch) -> None:
    shape = WIDE if launch.to.rows else NARROW
    if launch.to.rows and launch.to.columns:
        shape = SMALL if launch.to.mx else BOTH
    launch.run(_blocks, shape)


def _cast_squares(launch: Launch) -> None:
    launch.run(_square, BOTH)


def _cast_nvfp4(launch: Launch) -> None:
    """Cast to 4 bits under two levels of scales: first the amax of the whole tensor (after the
    Hadamard transform, if there is one), then the cast."""
    (M, N), (rows, row_scale, columns, column_scale) = launch.sides, launch.ways
    sixteens = launch._replace(sides=(M // 16, N))
    if launch.to.mix:
        sixteens.run(_mixed_amax, SIXTEENS)
    else:
        kernel.launch(launch.x, launch.stats, launch.history)
    if launch.to.rows or launch.to.square:
        launch.run(_tiles, SMALL if launch.to.square else WIDE)
    if launch.to.columns and not launch.to.square:
        ways = rows, row_scale, columns.view(torch.int64), column_scale
        sixteens._replace(ways=ways).run(_sixteen_columns, SIXTEENS_CAST)


class OfBlock(NamedTuple):
    """What is known about casts with one shape of blocks: the kernel's name in `KERNELS`, the
    function that launches it, and the formats and scale rules that it supports."""

    kernel: str
    launch: Callable[[Launch], None]
    formats: tuple[str, ...] = ("e4m3fn", "e5m2")
    scales: tuple[str, ...] = FP8_SCALES
    both: bool = True       # whether one kernel can cast x and x.T
    mixes: bool = False     # whether the kernel computes the Hadamard transform of x.T itself


_OF_NVFP4 = OfBlock("cast-nvfp4", _cast_nvfp4, formats=("e2m1",), scales=("e4m3", "e4m3-normal"),
                    mixes=True)
FUSED: dict[tuple[int, int], OfBlock] = {
    WHOLE: OfBlock("cast-tensor", _cast_whole),
    ROW: OfBlock("cast-rows", _cast_rows, formats=("e4m3fn", "e5m2", "int8"), both=False),
    BLOCK: OfBlock("cast-blocks", _cast_blocks),
    SQUARE: OfBlock("cast-blocks", _cast_squares),
    MX_BLOCK: OfBlock("cast-mx", _cast_blocks, scales=FP8_SCALES[1:]),
    NVFP4: _OF_NVFP4,
    NVFP4_SQUARE: _OF_NVFP4,
}


# ---- the operator

@functools.cache
def _dtypes(words: str) -> tuple[Cast, torch.dtype, torch.dtype]:
    """Return the `Cast` that `words` names, and the dtypes of its values and of its scales."""
    cast = named(words)
    return cast, scales.stored_dtype(format_of(cast.format)), _scale_dtype(cast)


def _results(x: Tensor, words: str, rows: bool, columns: bool, swizzled: bool,
             *_: object) -> list[Tensor]:
    """Return empty results: values and scales of x (`rows`) and of x.T (`columns`), and
    `amax.empty_stats`. If the whole tensor has one scale, the scale tensors are empty and the scale
    is in the stats."""
    (cast, values, kind), results = _dtypes(words), []
    for R, C in [x.shape] * rows + [x.shape[::-1]] * columns:
        down, across = R // (cast.block[0] or R), C // (cast.block[1] or C)
        if kind == torch.float8_e4m3fn:
            down = R
        if cast.block == WHOLE:
            scale = x.new_empty(0)
        # zeros, because the matmul also reads the padding of the tiles
        elif swizzled and kind.itemsize == 1:
            scale = x.new_zeros(scales.swizzled_bytes(down, across), dtype=torch.uint8).view(kind)
        elif cast.block == BLOCK:
            scale = x.new_empty(across, down, dtype=kind).T     # column by column
        else:
            scale = x.new_empty(down, across, dtype=kind)
        results += [x.new_empty(R, C * cast.bits // 8, dtype=values), scale]
    return [*results, kernel.empty_stats(x)]


@operator("cast_matrix(Tensor x, str cast, bool rows, bool columns, bool swizzled, "
          "Tensor? history, Tensor? noise) -> Tensor[]", key=EVERY_DEVICE, fake=_results)
def operation(x: Tensor, words: str, rows: bool, columns: bool, swizzled: bool,
              history: Tensor | None, noise: Tensor | None) -> list[Tensor]:
    """Launch the kernel for the cast `words`, and return the results of `_results`, filled."""
    to = plan(words, rows, columns, swizzled, history is not None, noise is not None)
    _check(x, to.cast, rows, columns)
    *parts, stats = results = _results(x, words, rows, columns, swizzled)
    if to.mx:       # Triton has no E8M0
        parts[1::2] = [scale.view(torch.uint8) for scale in parts[1::2]]
    ways = [*(parts[:2] if rows else [None] * 2), *(parts[-2:] if columns else [None] * 2)]
    FUSED[to.cast.block].launch(Launch(x, x.shape, ways, stats, history, noise, to))
    return results


def in_triton(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
              history: Tensor | None, noise: Tensor | None) -> tuple[Tensor, ...]:
    """Return the same as `definition`, by the kernels."""
    *parts, stats = operation(x, cast.words, rows, columns, swizzled, history, noise)
    if cast.block == WHOLE:
        top, scale = kernel.numbers(stats)
        pairs = [part for values in parts[::2] for part in (values, scale.view(1, 1))]
        return *pairs, top, stats[1]
    if SCALES[cast.scale].levels == 2:
        return *parts, kernel.numbers(stats)[1], stats[1]
    return *parts, stats[1]


# ---- operands of a recipe's product

def why_not(cast: Cast, *, both: bool = False) -> str:
    """Return the reason why no kernel computes this cast, or "". both: of x and x.T at once."""
    row = FUSED.get(cast.block)
    if row is None or cast.format not in row.formats or cast.scale not in row.scales:
        return (f"no kernel casts to {cast.format} in blocks of {cast.block} with scales "
                f"{cast.scale}")
    if both and (not row.both or cast.transform != "none"):
        return f"one read does not cast both ways in blocks of {cast.block}, or with a transform"
    return ""


def cast_operand(x: Tensor, cast: Cast, *, amax: Tensor | None = None,
                 noise: Noise | None = None, both: bool = False, swizzled: bool = True,
                 by: Callable[[str], Version]) -> scales.Scaled:
    """Cast x (M, K), whose contracted axis is last. A transposed view x.T is not copied.

    both:     also cast x.T by the same kernel; it is `.T` of the result
    amax:     () float32, the amax of a history, for delayed scaling of a whole tensor
    noise:    for stochastic rounding; None: round to nearest-even
    by:       returns the version of a kernel, by its name in `KERNELS`
    swizzled: one-byte scales are returned in the layout of `scales.swizzled`, for Blackwell

    The numbers are the same as those of `lpkit.precision.scaled.quantise`, with two exceptions: a
    Hadamard transform adds in a fixed order here (`lpkit.kernels.cast.hadamard`), and values whose
    scale is NaN may differ.

    Raises ConfigError for a cast that no kernel computes, and if the sides of x are not multiples
    of the block's sides.
    """
    if problem := why_not(cast, both=both):
        raise ConfigError(f"{problem}; use lpkit.precision.scaled.quantise")
    row, whole = FUSED[cast.block], cast.block == WHOLE
    columns = x.ndim == 2 and x.stride(0) == 1 and x.stride(1) != 1
    # The random numbers of a whole tensor are numbered along the rows of x, whatever its strides.
    # So x.T is copied instead of cast by columns.
    columns = columns and not (noise is not None and whole)
    # No kernel transforms x as stored, so the transform is a separate pass.
    if cast.transform != "none" and not (row.mixes and columns):
        return cast_operand(hadamard(x), replace(cast, transform="none"), amax=amax,
                            noise=noise, swizzled=swizzled, by=by)
    ways = both or not columns, both or columns
    *pairs, bad = by(row.kernel)((x.T if columns else x).contiguous(), cast, *ways, swizzled, amax,
                                 words(noise, x.device))
    # `top` is the amax, `level` the scale of the tensor. No pop(): torch 2.11 compiles a starred
    # name to a tuple.
    *pairs, top = (*pairs[:-1], pairs[-1].view(1, 1)) if whole else (*pairs, None)
    *pairs, level = pairs if SCALES[cast.scale].levels == 2 else (*pairs, None)
    operands = [scales.Scaled(data=data, scale=scale, tensor=level, amax=top, nonfinite=bad)
                for data, scale in zip(pairs[::2], pairs[1::2])]
    if not both:
        return operands[0]
    straight, turned = reversed(operands) if columns else operands
    return replace(straight, turned=turned)


# ---- examples, with which versions are verified

def _x(rng: torch.Generator, device: torch.device, M: int, N: int) -> Tensor:
    """Return x (M, N) float32 with magnitudes from 2^-40 to 2^40, and with blocks that are hard to
    cast: zeros, subnormals, and numbers at the edge of a format."""
    x = torch.randn(M, N, generator=rng) * torch.exp2(torch.randint(-40, 40, (M, 1), generator=rng))
    x[:, :16] *= 1e-4
    x[1] = 0
    x[2, :128] *= 1e-42
    x[3], x[4] = 448 * 2.0**-20, -57344 * 2.0**9
    return x.to(device)


Examples = Iterator[tuple]


def _given(x: Tensor, cast: Cast, ways: str = "both", *, swizzled: bool = False,
           history: Tensor | None = None, noise: Tensor | None = None) -> tuple:
    """Return arguments of `definition`. ways: "rows" for x, "columns" for x.T, or "both"."""
    return x, cast, ways != "columns", ways != "rows", swizzled, history, noise


def _whole_examples(rng: torch.Generator, device: torch.device) -> Examples:
    past = torch.tensor(3.0, device=device)
    noise = words(Noise(seed=5, counter=2**40 + 9), device)
    x = torch.randn(130, 72, generator=rng).to(device)
    for fmt, rule in itertools.product(("e4m3fn", "e5m2"), FP8_SCALES):
        cast = Cast(format=fmt, scale=rule)
        yield _given(x.bfloat16(), cast)
        yield _given(x, cast, "columns", history=past)
    e4m3, e5m2 = Cast(format="e4m3fn"), Cast(format="e5m2")
    for history in (None, past, past * 0):
        yield _given(x[:5], e4m3, "rows", history=history, noise=noise)
        for bad in (torch.nan, torch.inf):
            wrong = x[:9].clone()
            wrong[2, 3], wrong[4, 5] = bad, 1e30
            yield _given(wrong, e4m3, "rows", history=history)
    for scale in (0.0, 1e-40, 1e-30, 1e38):
        yield _given(x[:7] * scale, e5m2)
    yield _given(x[:1, :1], e4m3)
    whole = torch.randn(256, 192, generator=rng).to(device)         # tiles without a mask
    for matrix, drawn_by in itertools.product((whole, whole.bfloat16()), (None, noise)):
        yield _given(matrix, e4m3, noise=drawn_by)


def _rows_examples(rng: torch.Generator, device: torch.device) -> Examples:
    noise = words(Noise(seed=7, counter=2**33), device)
    x = torch.randn(37, 200, generator=rng).to(device)
    x *= torch.logspace(-12, 12, 37, device=device)[:, None]
    x[3], x[4], x[5] = 0, 1e-40, 1e38
    e4m3, e5m2, int8 = (Cast(format=name, block=ROW) for name in ("e4m3fn", "e5m2", "int8"))
    for way, rule in itertools.product(("rows", "columns"), FP8_SCALES):
        yield _given(x.bfloat16(), replace(e4m3, scale=rule), way)
        yield _given(x, replace(e5m2, scale=rule), way)
    bad = spoiled(x, (1, 3), (7, 9))
    for way in ("rows", "columns"):
        yield _given(x, int8, way)
        yield _given(x[:9], replace(e4m3, scale="power-of-two"), way, noise=noise)
        yield _given(x[:9], int8, way, noise=noise)
        yield _given(bad, e4m3, way)
        yield _given(x[:1, :1], e4m3, way)
    wide = torch.randn(2, HOLDS + 19, generator=rng).to(device)
    yield _given(wide, e4m3, "rows", noise=noise)
    wide[1, HOLDS + 5] = torch.nan
    yield _given(wide, e4m3, "rows")


def _blocks_examples(rng: torch.Generator, device: torch.device) -> Examples:
    noise = words(Noise(seed=3, counter=2**32), device)
    x = _x(rng, device, 256, 256)
    bad = x.clone()
    bad[1, 3], bad[130, 200] = torch.nan, -torch.inf
    line, square = (Cast(format="e4m3fn", block=block) for block in (BLOCK, SQUARE))
    for cast, rule in itertools.product((line, square), FP8_SCALES[:2]):
        yield _given(x.bfloat16(), replace(cast, scale=rule))
    floor = Cast(format="e5m2", block=BLOCK, scale="power-of-two-floor")
    yield _given(x[:128], floor, noise=noise)
    yield _given(x[:128], replace(square, format="e5m2"), "columns", noise=noise)
    yield _given(x[:5], line, "rows")
    yield _given(x[:, :72].contiguous(), line, "columns")
    for cast in (line, square):
        yield _given(bad, cast)


def _mx_examples(rng: torch.Generator, device: torch.device) -> Examples:
    noise = words(Noise(seed=4, counter=2**35), device)
    x = _x(rng, device, 160, 192)
    up = Cast(format="e4m3fn", block=MX_BLOCK, scale="power-of-two")
    for rule, swizzled in itertools.product(FP8_SCALES[1:], (False, True)):
        cast = replace(up, scale=rule)
        yield _given(x.bfloat16(), cast, swizzled=swizzled)
        yield _given(x, replace(cast, format="e5m2"), "rows", swizzled=swizzled, noise=noise)
    yield _given(x[:7], up, "rows", swizzled=True)
    yield _given(spoiled(x, (1, 3), (130, 100)), up)


def _nvfp4_examples(rng: torch.Generator, device: torch.device) -> Examples:
    noise = words(Noise(seed=6, counter=2**34), device)
    x = torch.randn(144, 96, generator=rng)
    x *= torch.exp2(torch.randint(-9, 9, (9, 6), generator=rng)).repeat_interleave(
        16, 0).repeat_interleave(16, 1)
    x[:, 16:32], x[32:48] = 0, x[32:48] * 1e-6
    x = x.to(device)
    few = x[:48, :80].contiguous()
    bad = spoiled(few, (1, 3), (40, 70))
    for rule in ("e4m3-normal", "e4m3"):
        line = Cast(format="e2m1", block=NVFP4, scale=rule)
        mixed, square = replace(line, transform="hadamard"), replace(line, block=NVFP4_SQUARE)
        yield _given(x, line, "rows", swizzled=True)
        yield _given(few.bfloat16(), line, "rows")
        yield _given(x.bfloat16(), square, swizzled=True)
        yield _given(few.bfloat16(), mixed, "columns", swizzled=True, noise=noise)
        for scale in (0.0, 1e-35, 1e33):
            yield _given(few * scale, line, "rows")
            yield _given(few * scale, mixed, "columns")
        yield _given(bad, square)
        yield _given(bad, mixed, "columns")
    yield _given(x[:5], line, "rows", noise=noise)
    yield _given(few, line, "columns")


def _kernel(examples: Callable[[torch.Generator, torch.device], Examples]) -> Kernel:
    return Kernel(definition=definition, versions={"triton": in_triton}, examples=examples,
                  exact=True)


TENSOR, ROWS, BLOCKS, MX, NVFP4_KERNEL = map(_kernel, (
    _whole_examples, _rows_examples, _blocks_examples, _mx_examples, _nvfp4_examples))
