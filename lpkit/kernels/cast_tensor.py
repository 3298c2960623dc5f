"""A tensor to FP8 under one scale, as it lies and transposed, by one read.

    current scaling     amax 2, cast 2 + 1 + 1      6 bytes an element of bf16, both layouts
    delayed scaling     2 + 1 + 1, which finds the next amax on its way: 4

Hopper multiplies operands whose contracted axis is last alone, so a tensor that serves two products
is needed both ways. A history that is still empty decides nothing: then, and only then, the pass
for the amax reads the tensor. A NaN or an Inf turns the scale to NaN: whatever is made of the
tensor is.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from lpkit.kernels import amax as kernel
from lpkit.kernels import scales
from lpkit.kernels.cast import Noise
from lpkit.kernels.jit import jit, tiles, tl
from lpkit.kernels.kernel import Kernel
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.rounding import divisor, grid, magnitude, rounded, scale_of, stored, words
from lpkit.techniques.formats import format_of

TILE = {"BM": 128, "BN": 64, "num_warps": 8}


def definition(x: Tensor, fmt: str, rule: str, rows: bool, columns: bool, history: Tensor | None,
               noise: Tensor | None) -> tuple[Tensor, ...]:
    """x (M, N) -> its values (M, N), and transposed (N, M), as asked for; the scale () and the
    amax () in float32; how many are not finite, () int64. history: the amax that the scale follows
    from, () float32. noise: `Noise.words`, (3,) int64."""
    scales.check(x)
    made = scales.cast(x, format_of(fmt), (0, 0), rule, history=history, noise=noise)
    return (*([made.data] if rows else []), *([made.data.T.contiguous()] if columns else []),
            made.scale.view(()), made.amax.view(()), made.nonfinite)


@jit
def _cast(x, history, state, count, words, rows, columns, M, N, TO: tl.constexpr,
          HISTORY: tl.constexpr, NOISE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr):
    tile = tl.program_id(0)
    top = tl.load(state)
    if HISTORY:     # state is being written to, unless history is empty
        past = tl.load(history)
        top = tl.where(past > 0, magnitude(past), top)
    s = scale_of(top, TO)
    if tile == 0:
        tl.atomic_max(state + 1, magnitude(s))
    turn, m_, y = divisor(s)
    across = tl.cdiv(N, BN)
    m = tile // across * BM + tl.arange(0, BM)
    n = tile % across * BN + tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HISTORY:
        found = tl.max(tl.max(magnitude(v), 1), 0)
        tl.atomic_max(state, found)
        if found >= 0x7F800000:
            tl.atomic_max(state + 1, 0x7FC00000)
            again = magnitude(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
            bad = tl.sum(tl.sum(tl.where(again >= 0x7F800000, 1, 0), 1), 0)
            tl.atomic_add(count, tl.where(past > 0, bad, 0).to(tl.int64))   # else they are counted
        # far beyond the largest a remainder would overflow
        v = tl.clamp(v * turn, -4 * TO.largest, 4 * TO.largest,
                     propagate_nan=tl.PropagateNan.ALL)
        turn = 1.0
    q = stored(rounded(v, turn, m_, y, at, words, TO, NOISE), TO)
    if ROWS:
        tl.store(rows + at, q, mask=inside)
    if COLUMNS:
        there = n[:, None].to(tl.int64) * M + m[None, :]
        tl.store(columns + there, tl.trans(q), mask=tl.trans(inside))


def _cast_state(x: Tensor, fmt: str, rule: str, rows: bool, columns: bool, history: Tensor | None,
                noise: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    M, N = scales.check(x)
    left, right, state = _results(x, fmt, rule, rows, columns)
    kernel.launch(x, state, history)
    _cast[(math.prod(tiles(M, N, TILE)),)](
        x, history, state, state[2:].view(torch.int64), noise, left, right, M, N,
        TO=grid(fmt, rule), HISTORY=history is not None, NOISE=noise is not None, ROWS=rows,
        COLUMNS=columns, **TILE)
    return left, right, state


def _results(x: Tensor, fmt: str, rule: str, rows: bool, columns: bool, *_):
    (M, N), dtype = x.shape, scales.stored_dtype(format_of(fmt))
    return (x.new_empty((M, N) if rows else 0, dtype=dtype),
            x.new_empty((N, M) if columns else 0, dtype=dtype), kernel.empty_state(x))


operation = operator(
    "cast_tensor(Tensor x, str fmt, str rule, bool rows, bool columns, Tensor? history, "
    "Tensor? noise) -> (Tensor, Tensor, Tensor)", key=EVERY_DEVICE, fake=_results)(_cast_state)


def in_triton(x: Tensor, fmt: str, rule: str, rows: bool, columns: bool, history: Tensor | None,
              noise: Tensor | None) -> tuple[Tensor, ...]:
    left, right, state = operation(x, fmt, rule, rows, columns, history, noise)
    top, scale = state[:2].view(torch.float32)
    return (*([left] if rows else []), *([right] if columns else []), scale, top,
            state[2:].view(torch.int64).view(()))


def _examples(rng: torch.Generator, device: torch.device):
    past = torch.tensor(3.0, device=device)
    drawn_by = words(Noise(seed=5, counter=2**40 + 9), device)
    x = torch.randn(130, 72, generator=rng).to(device)
    for fmt, rule in itertools.product(("e4m3fn", "e5m2"), ("float32", "power-of-two",
                                                            "power-of-two-floor")):
        yield x.bfloat16(), fmt, rule, True, True, None, None
        yield x, fmt, rule, False, True, past, None
    for history in (None, past, past * 0):
        yield x[:5], "e4m3fn", "float32", True, False, history, drawn_by
        for bad in (torch.nan, torch.inf):
            wrong = x[:9].clone()
            wrong[2, 3], wrong[4, 5] = bad, 1e30
            yield wrong, "e4m3fn", "float32", True, False, history, None
    for scale in (0.0, 1e-40, 1e-30, 1e38):
        yield x[:7] * scale, "e5m2", "float32", True, True, None, None
    yield x[:1, :1], "e4m3fn", "float32", True, True, None, None


KERNEL = Kernel(
    definition=definition, versions={"triton": in_triton}, examples=_examples, exact=True)
