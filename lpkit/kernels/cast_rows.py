"""Rows to FP8 or INT8, each under a scale of its own.

A row that lies together is held by one program: its amax and its values from one read, 2 + 1 bytes
an element of bf16. Rows of a transposed view are columns in memory, too long to be held: one pass
finds their amaxes, a second casts and transposes, 2 + 2 + 1.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lpkit.kernels import scales
from lpkit.kernels.cast import Noise
from lpkit.kernels.jit import jit, tiles, tl, triton
from lpkit.kernels.kernel import Kernel
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.rounding import divisor, grid, magnitude, rounded, scale_of, stored, words
from lpkit.techniques.formats import format_of

HELD = 2048         # elements that a program casts at least
HOLDS = 16384       # of a row in registers
PIECE = 8192        # of a longer one, which is read again, from L2
TALL = {"BM": 256, "BN": 64, "num_warps": 8}       # of the amaxes of columns
TILE = {"BM": 128, "BN": 64, "num_warps": 8}


def definition(x: Tensor, fmt: str, rule: str, columns: bool,
               noise: Tensor | None) -> tuple[Tensor, ...]:
    """x (M, K) -> values (M, K), scales (M, 1) float32, and () int64, how many are not finite.
    columns: of x.T instead. noise: `Noise.words`."""
    scales.check(x)
    made = scales.cast(x.T.contiguous() if columns else x, format_of(fmt), (1, 0), rule,
                       noise=noise)
    return made.data, made.scale, made.nonfinite


@jit
def _write(read, data, at, inside, words, turn, m, y, TO: tl.constexpr, NOISE: tl.constexpr):
    q = rounded(read.to(tl.float32), turn[:, None], m[:, None], y[:, None], at, words, TO, NOISE)
    tl.store(data + at, stored(q, TO), mask=inside)


@jit
def _rows(x, data, scale, count, words, M, K, TO: tl.constexpr, NOISE: tl.constexpr,
          HOLD: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    at = m[:, None].to(tl.int64) * K + k[None, :]
    inside = (m < M)[:, None] & (k < K)[None, :]
    read = tl.load(x + at, mask=inside, other=0.0)      # held as it is: half the registers
    most = magnitude(read.to(tl.float32))
    if not HOLD:
        for start in range(BK, K, BK):
            more = tl.load(x + at + start, mask=inside & (start + k < K)[None, :], other=0.0)
            most = tl.maximum(most, magnitude(more.to(tl.float32)))
    top = tl.max(most, 1)
    if tl.max(top, 0) >= 0x7F800000:
        bad = tl.zeros((BM, BK), tl.int32)
        for start in range(0, BK if HOLD else K, BK):
            more = tl.load(x + at + start, mask=inside & (start + k < K)[None, :], other=0.0)
            bad += tl.where(magnitude(more.to(tl.float32)) >= 0x7F800000, 1, 0)
        tl.atomic_add(count, tl.sum(tl.sum(bad, 1), 0).to(tl.int64))
    s = scale_of(top, TO)
    tl.store(scale + m, s, mask=m < M)
    turn, m_, y = divisor(s)
    if HOLD:
        _write(read, data, at, inside, words, turn, m_, y, TO, NOISE)
    else:
        for start in range(0, K, BK):
            within = inside & (start + k < K)[None, :]
            read = tl.load(x + at + start, mask=within, other=0.0)
            _write(read, data, at + start, within, words, turn, m_, y, TO, NOISE)


@jit
def _column_amax(x, tops, count, M, N, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    bits = magnitude(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
    top = tl.max(bits, 0)
    tl.atomic_max(tops + n, top, mask=n < N)
    if tl.max(top, 0) >= 0x7F800000:
        bad = tl.where(bits >= 0x7F800000, 1, 0)
        tl.atomic_add(count, tl.sum(tl.sum(bad, 1), 0).to(tl.int64))


@jit
def _columns(x, data, scale, tops, words, M, N, TO: tl.constexpr, NOISE: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    s = scale_of(tl.load(tops + n, mask=n < N, other=0), TO)
    if tl.program_id(0) == 0:
        tl.store(scale + n, s, mask=n < N)
    turn, m_, y = divisor(s)
    v = tl.load(x + m[:, None].to(tl.int64) * N + n[None, :], mask=inside, other=0.0)
    there = n[None, :].to(tl.int64) * M + m[:, None]
    q = rounded(v.to(tl.float32), turn[None, :], m_[None, :], y[None, :], there, words, TO, NOISE)
    tl.store(data + tl.trans(there), tl.trans(stored(q, TO)), mask=tl.trans(inside))


def _shape(K: int) -> dict[str, int]:
    block = PIECE if K > HOLDS else triton.next_power_of_2(K)
    return {"BM": max(1, HELD // block), "BK": block, "HOLD": block >= K,
            "num_warps": max(4, block // 1024)}


def _results(x: Tensor, fmt: str, rule: str, columns: bool, *_):
    M, K = reversed(x.shape) if columns else x.shape
    return (x.new_empty(M, K, dtype=scales.stored_dtype(format_of(fmt))),
            x.new_empty(M, 1, dtype=torch.float32), x.new_zeros((), dtype=torch.int64))


@operator("cast_rows(Tensor x, str fmt, str rule, bool columns, Tensor? noise) -> "
          "(Tensor, Tensor, Tensor)", key=EVERY_DEVICE, fake=_results)
def operation(x: Tensor, fmt: str, rule: str, columns: bool,
              noise: Tensor | None) -> tuple[Tensor, ...]:
    M, N = scales.check(x)
    data, scale, count = made = _results(x, fmt, rule, columns)
    how = {"TO": grid(fmt, rule), "NOISE": noise is not None}
    if not columns:
        shape = _shape(N)
        _rows[(triton.cdiv(M, shape["BM"]),)](x, data, scale, count, noise, M, N, **how, **shape)
        return made
    tops = x.new_zeros(N, dtype=torch.int32)
    _column_amax[tiles(M, N, TALL)](x, tops, count, M, N, **TALL)
    _columns[tiles(M, N, TILE)](x, data, scale, tops, noise, M, N, **how, **TILE)
    return made


def _examples(rng: torch.Generator, device: torch.device):
    drawn_by = words(Noise(seed=7, counter=2**33), device)
    x = torch.randn(37, 200, generator=rng).to(device)
    x *= torch.logspace(-12, 12, 37, device=device)[:, None]
    x[3], x[4], x[5] = 0, 1e-40, 1e38
    for columns, rule in itertools.product((False, True), ("float32", "power-of-two",
                                                           "power-of-two-floor")):
        yield x.bfloat16(), "e4m3fn", rule, columns, None
        yield x, "e5m2", rule, columns, None
    bad = x.clone()
    bad[1, 3], bad[7, 9] = torch.nan, torch.inf
    for columns in (False, True):
        yield x, "int8", "float32", columns, None
        yield x[:9], "e4m3fn", "power-of-two", columns, drawn_by
        yield x[:9], "int8", "float32", columns, drawn_by
        yield bad, "e4m3fn", "float32", columns, None
        yield x[:1, :1], "e4m3fn", "float32", columns, None
    wide = torch.randn(2, HOLDS + 19, generator=rng).to(device)
    yield wide, "e4m3fn", "float32", False, drawn_by
    wide[1, HOLDS + 5] = torch.nan
    yield wide, "e4m3fn", "float32", False, None


KERNEL = Kernel(
    definition=definition, versions={"triton": operation}, examples=_examples, exact=True)
