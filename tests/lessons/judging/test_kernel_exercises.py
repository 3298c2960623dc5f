"""Puzzles: definitions held against other libraries, the judge against planted bugs, against right
kernels that are written otherwise, and against kernels that do not end well.

Only these tests catch: a definition of a puzzle that ml_dtypes or the kit contradicts, a bug of a
kernel that no change of one place is (those: test_mutants.py), one that only large tensors show, a
right kernel that is refused, and a fault of Triton's interpreter that is laid to the learner.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
import time

import ml_dtypes
import numpy as np
import plotly.graph_objects as go
import psutil
import pytest
import torch

from lessons.figures.figure import plain
from lessons.judging import defects, puzzles
from lessons.judging.judge import source_of
from lessons.judging.learner import check
from lessons.judging.puzzles import run
from lessons.l10_custom_kernels import (
    BETWEEN,
    EXTREME,
    MATRICES,
    ONE,
    Moved,
    bounds_figure,
    cast_both_layouts,
    moved_figure,
)
from lpkit.kernels import cast
from lpkit.precision.scaled import quantise
from lpkit.predict import CATALOGUE
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.recipes import Cast
from tests.attack import patience
from tests.lessons.judging.course import EXERCISES, PUZZLES

tl = pytest.importorskip("triton.language")
e2m1 = e4m3 = e4m3_value = None     # names of the process that runs a kernel


def stub(x, y, n, BLOCK: tl.constexpr):
    """Copies."""
    raise NotImplementedError


# definitions

def drawn(name):
    return PUZZLES[name].all_cases()


def by_ml_dtypes(x):
    return x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def test_codes_are_those_of_ml_dtypes():
    for x, scale in drawn("10.scaled_cast"):
        codes = PUZZLES["10.scaled_cast"].spec(x, scale)
        same = torch.from_numpy(by_ml_dtypes(x * scale)) == codes
        assert (same | (x.isnan() & ((codes & 127) == 127))).all()


def test_norms_are_written_out():
    for x, r, w in drawn("10.add_norm"):
        h, y = PUZZLES["10.add_norm"].spec(x, r, w)
        want = h.double() / (h.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
        assert torch.equal(h, x + r)
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("C", (32, 96))
def test_mx_is_the_kits(C):
    x = torch.randn(5, C, generator=torch.Generator().manual_seed(C)) * 100
    codes, scales = PUZZLES["11.e8m0"].spec(x)
    quantised = cast.mx(x, FORMATS["e4m3fn"], rule="floor", dtype=torch.uint8)
    assert torch.equal(codes, quantised.values) and torch.equal(scales, quantised.scales)


def test_nvfp4_is_the_kits():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    quantised = quantise(x, Cast(format="e2m1", block=(1, 16), scale="e4m3-normal"))
    packed, scales = PUZZLES["11.nvfp4"].spec(x, x.abs().amax()[None] / (6 * 448))
    codes = torch.stack([packed & 15, packed >> 4], -1).view(8, 64)
    values = (torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])[(codes & 7).long()]
              * torch.where(codes > 7, -1, 1))
    by = (scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1) * x.abs().amax()
          / (6 * 448))
    torch.testing.assert_close(values * by, quantised.dequantise(), rtol=1e-6, atol=0)


def test_block_scales_are_the_kits():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
    codes, scales = PUZZLES["11.block_scale"].spec(x, 128)
    quantised = quantise(x, Cast(format="e4m3fn", block=(1, 128)))
    torch.testing.assert_close(scales, quantised.scale.view(4, 2))
    values = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)
    torch.testing.assert_close(values, quantised.dequantise(), rtol=1e-6, atol=0)


def test_a_dequantised_product_is_the_product_of_its_values():
    for a, codes, scales, block in drawn("11.dequant_matmul"):
        values = np.array([[float(codes[n, k].numpy().view(ml_dtypes.float8_e4m3fn)) * scales[n,
            k // block].item()
                            for k in range(codes.shape[1])] for n in range(len(codes))])
        assert np.array_equal(PUZZLES["11.dequant_matmul"].spec(a, codes, scales, block).numpy(),
                              a.double().numpy() @ values.T)


def test_the_simple_ones():
    for (x,) in drawn("11.online_softmax"):
        e = (np.exp(x.double().numpy() - x.double().numpy().max(-1, keepdims=True)) if x.numel()
             else x.numpy())
        np.testing.assert_allclose(PUZZLES["11.online_softmax"].spec(x),
                                   e / e.sum(-1, keepdims=True), rtol=1e-4, atol=1e-7)
    assert (PUZZLES["10.amax"].spec(EXTREME).item() == torch.inf
            and PUZZLES["10.amax"].spec(EXTREME[:0]).item() == 0)
    codes, turned, top = PUZZLES["10.cast_both"].spec(MATRICES[1], ONE)
    assert torch.equal(turned, codes.T) and top.item() == 13 and len(BETWEEN) == 504


def test_there_are_twelve_with_awkward_shapes():
    assert len(PUZZLES) == 12 and all(EXERCISES[name] is puzzle for name, puzzle in PUZZLES.items())
    for name, puzzle in PUZZLES.items():
        assert (puzzle.stars in (1, 2, 3) and puzzle.minutes >= 5 and puzzle.drawn
                and len(puzzle.mistakes) >= 3)
        assert all(old in puzzle.solution for old, _ in puzzle.mistakes.values()), name
        assert "tl.float8" not in puzzle.solution and "bfloat16" not in puzzle.solution
        shapes = [tuple(value.shape) for case in puzzle.all_cases() for value in case
                  if isinstance(value, torch.Tensor)]
        assert any(1 in shape for shape in shapes), name


# the judge

BUGS = [        # that tests/lessons/judging/mutants.py does not make
    ("10.copy", "tl.program_id(0) * BLOCK", "tl.program_id(0) * (BLOCK - 1)"),
    ("10.copy", "tl.store(y + i,", "tl.store(y + n - 1 - i,"),
    ("10.amax", "tl.max(tl.abs(v), 0)", "tl.abs(tl.max(v, 0))"),
    ("10.softmax", "tl.exp(v - tl.max(v, 0))", "tl.exp(v - tl.max(tl.abs(v), 0))"),
    ("10.softmax", "y + row * columns", "y + row * x_stride"),
    ("10.add_norm", "w + i", "w + row"),
    ("10.add_norm", "v * scale * g", "v * scale * (1 + g)"),
    ("10.add_norm", "columns + i, v,", "columns + i, b,"),
    ("10.add_norm", "tl.store(y + row", "tl.store(h + row"),
    ("10.cast_both", "turned + c[None, :] * R + r[:, None]",
     "turned + r[:, None] * C + c[None, :]"),
    ("10.cast_both", "r[:, None] * x_stride", "r[:, None] * C"),
    ("10.cast_both", "e4m3(v * tl.load(scale))", "(v * tl.load(scale)).to(tl.uint8)"),
    ("11.matmul", "& (n < N)[None, :], other", "& (n < n + 1)[None, :], other"),
    ("11.matmul", "* a_stride", "* K"),
    ("11.block_scale", "scales + row * tl.num_programs(1) + block",
     "scales + block * tl.num_programs(0) + row"),
    ("11.matmul", "(k + j)[:, None] * N", "(k + j)[:, None] * K"),
    ("11.dequant_matmul", "k // B", "k // 16"),
    ("11.dequant_matmul", "* s[None, :]", "* s[:, None]"),
    ("11.online_softmax", '-float("inf"), 0.0', "0.0, 0.0"),
]


def test_planted_bugs_are_caught():
    sources = []
    for name, old, new in BUGS:
        right = PUZZLES[name].solution
        assert right.count(old) >= 1, (name, old)
        sources.append((name, right.replace(old, new, 1)))
    missed = [bug for bug, verdict in zip(BUGS, run(sources), strict=True)
              if verdict["status"] != "wrong" or not verdict["detail"]]
    assert not missed


ONLY_SMALL = [      # right for what one tries by hand; and a part of what is said
    ("10.copy", "BLOCK + tl.arange(0, BLOCK)", "16 + tl.arange(0, 16)", "x=(8389,): y["),
    ("10.amax", "mask=i < n", "mask=i < tl.minimum(n, 128)", "x=(1200,): out[0] should be"),
    ("10.softmax", "tl.arange(0, BLOCK)", "tl.arange(0, 128)", "x=(1, 200)"),
    ("10.softmax", "tl.program_id(0)", "tl.program_id(0) % 6", "y[6, 0] should be"),
    ("10.add_norm", "tl.arange(0, BLOCK)", "tl.arange(0, 128)", "x=(14, 5000)"),
    ("10.add_norm", "v * v", "v.to(tl.float16) * v.to(tl.float16)", "y[0, 0] should be"),
    ("10.add_norm", "tl.program_id(0)", "tl.program_id(0) % 64", "h[64, 0] should be"),
    ("10.scaled_cast", "other=0.0) *", "other=0.0).to(tl.float16).to(tl.float32) *", "codes["),
    ("10.scaled_cast", "BLOCK + tl.arange(0, BLOCK)", "32 + tl.arange(0, 32)", "x=(8389,)"),
    ("10.cast_both", "BR + tl.arange(0, BR)", "4 + tl.arange(0, 4)", "x=(150, 190)"),
    ("10.cast_both", "e4m3(v *", "e4m3(v.to(tl.float16).to(tl.float32) *", "x=(150, 190)"),
    ("11.matmul", "tl.dot(left, right)", "tl.dot(left.to(tl.float16), right.to(tl.float16))",
     "c[0, 0] should be"),
    ("11.matmul", "range(0, K, B)", "range(0, tl.minimum(K, 64), B)", "b=(200, 40)"),
    ("11.matmul", "m, n = tl.program_id(0) *", "m, n = tl.program_id(0) % 6 *", "a=(600, 5)"),
    ("11.matmul", "tl.program_id(1) *", "tl.program_id(1) % 8 *", "b=(5, 200)"),
    ("11.block_scale", "tl.program_id(1)\n", "tl.program_id(1) % 8\n", "x=(1, 400)"),
    ("11.e8m0", "other=0.0)", "other=0.0).to(tl.float16).to(tl.float32)", "codes["),
    ("11.nvfp4", "tl.program_id(0),", "tl.program_id(0) % 6,", "codes[6, 0]"),
    ("11.dequant_matmul", "tl.dot(left, e4m3_value(w))",
     "tl.dot(left.to(tl.float16), e4m3_value(w).to(tl.float16))", "a=(150, 5)"),
    ("11.dequant_matmul", "range(0, K, B)", "range(0, tl.minimum(K, 64), B)", "a=(2, 300)"),
    ("11.online_softmax", "range(0, columns, BLOCK)", "range(0, tl.minimum(columns, 128), BLOCK)",
     "x=(1, 200)"),
]


def test_what_is_right_for_small_cases_alone_is_wrong():
    assert {name for name, *_ in ONLY_SMALL} == set(PUZZLES)
    sources = [(name, PUZZLES[name].solution.replace(old, new)) for name, old, new, _ in ONLY_SMALL]
    assert all(source != PUZZLES[name].solution for name, source in sources)
    missed = [(*bug[:3], verdict) for bug, verdict in zip(ONLY_SMALL, run(sources), strict=True)
              if verdict["status"] != "wrong" or bug[3] not in verdict["detail"]]
    assert not missed


def test_solutions_are_right_and_mistakes_recognised():
    jobs = [(name, hint, source) for name, puzzle in PUZZLES.items()
            for hint, source in {"": puzzle.solution, **puzzle.mistaken()}.items()]
    for (name, hint, _), verdict in zip(jobs, run([(name, source) for name, _, source in jobs]),
                                        strict=True):
        assert verdict["status"] == ("wrong" if hint else "right"), (name, hint, verdict)
        assert verdict["detail"].endswith(hint), (name, hint, verdict)


def copy(x, y, n, BLOCK: tl.constexpr):
    for j in range(BLOCK):
        at = tl.program_id(0) * BLOCK + j
        if at < n:
            tl.store(y + at, tl.load(x + at))


def amax(x, out, n, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        most = 0.0
        for start in range(0, n, BLOCK):
            v = tl.load(x + start + tl.arange(0, BLOCK), mask=start + tl.arange(0, BLOCK) < n,
                        other=0.0)
            most = tl.maximum(most, tl.maximum(tl.max(v, 0), tl.max(-v, 0)))
        tl.store(out, most)


def softmax(x, y, x_stride, columns, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * x_stride + i, mask=i < columns, other=-1e38)
    e = tl.where(i < columns, tl.exp2((v - tl.max(v, 0)) * 1.4426950408889634), 0.0)
    tl.store(y + tl.program_id(0) * columns + i, e * (1.0 / tl.sum(e, 0)), mask=i < columns)


def add_norm(x, r, w, h, y, x_stride, columns, eps, BLOCK: tl.constexpr):
    at, inside = tl.arange(0, BLOCK), tl.arange(0, BLOCK) < columns
    row = tl.program_id(0)
    v = tl.load(r + row * columns + at, inside, 0.0) + tl.load(x + row * x_stride + at, inside, 0.0)
    root = tl.sqrt(tl.sum(v * v, 0) / columns + eps)
    tl.store(y + row * columns + at, v * tl.load(w + at, inside, 0.0) / root, inside)
    tl.store(h + row * columns + at, v, inside)


def scaled_cast(x, scale, codes, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0) * tl.load(scale)
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    even = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20          # to nearest-even, by hand
    low = ((size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)) & 0xFF
    code = tl.where(size < 121 << 23, low, tl.minimum(even - 960, 0x7E))
    code = tl.where(size > 0x7F800000, 0x7F, code)
    tl.store(codes + i, (code + tl.where(bits < 0, 128, 0)).to(tl.uint8), mask=i < n)


def cast_both(x, scale, codes, turned, next_amax, x_stride, R, C, BR: tl.constexpr,
              BC: tl.constexpr):
    r = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None]
    c = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    v = tl.load(x + r * x_stride + c, (r < R) & (c < C), 0.0)
    tl.atomic_max(next_amax, tl.max(tl.abs(v)))
    code = e4m3(tl.load(scale) * v)
    tl.store(turned + tl.trans(c) * R + tl.trans(r), tl.trans(code), tl.trans((r < R) & (c < C)))
    tl.store(codes + r * C + c, code, (r < R) & (c < C))


def matmul(a, b, c, a_stride, M, N, K, B: tl.constexpr):
    m, n = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for k in range(K):
        total += tl.load(a + m * a_stride + k, m < M, 0.0)[:, None] * tl.load(b + k * N + n, n < N,
            0.0)[None, :]
    tl.store(c + m[:, None] * N + n[None, :], total, (m < M)[:, None] & (n < N)[None, :])


def block_scale(x, codes, scales, x_stride, columns, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * x_stride + i, mask=i < columns, other=0.0)
    s = tl.div_rn(tl.maximum(tl.max(v, 0), -tl.min(v, 0)), 448.0)
    code = e4m3(tl.div_rn(v, s))
    zero = tl.where(v.to(tl.int32, bitcast=True) < 0, 128, 0).to(tl.uint8)
    tl.store(codes + row * columns + i, tl.where(s == 0, zero, code), mask=i < columns)
    tl.store(scales + row * ((columns + BLOCK - 1) // BLOCK) + block, s)


def e8m0(x, codes, scales, x_stride, columns):
    i = tl.arange(0, 32)
    row, start = tl.program_id(0), tl.program_id(1) * 32
    inside = i < columns - start
    v = tl.load(x + row * x_stride + start + i, mask=inside, other=0.0)
    field = tl.max(v.to(tl.int32, bitcast=True) & 0x7F800000, 0) >> 23
    s = tl.where(field > 8, field - 8, 0)
    tl.store(codes + row * columns + start + i, e4m3(v * tl.exp2((127 - s).to(tl.float32))),
             mask=inside)
    tl.store(scales + row * tl.cdiv(columns, 32) + tl.program_id(1), s.to(tl.uint8))


def nvfp4(x, top, codes, scales, x_stride, columns):
    row, block = tl.program_id(0), tl.program_id(1)
    v = tl.load(x + row * x_stride + block * 16 + tl.arange(0, 16))
    s = e4m3(tl.div_rn(tl.div_rn(tl.max(tl.abs(v), 0), 6.0), tl.load(top)))
    by = e4m3_value(s) * tl.load(top)
    code = tl.where(by > 0, e2m1(tl.div_rn(v, by)), 0)
    low, high = tl.split(tl.reshape(code, (8, 2)))
    tl.store(codes + (row * columns + block * 16) // 2 + tl.arange(0, 8),
             (low + high * 16).to(tl.uint8))
    tl.store(scales + row * (columns // 16) + block, s)


def dequant_matmul(a, codes, scales, c, M, N, K, B: tl.constexpr):
    m, n = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for part in range(tl.cdiv(K, B)):
        k = part * B + tl.arange(0, B)
        w = tl.load(codes + n[:, None] * K + k[None, :], (n < N)[:, None] & (k < K)[None, :], 0)
        s = tl.load(scales + n * tl.cdiv(K, B) + part, n < N, 0.0)
        left = tl.load(a + m[:, None] * K + k[None, :], (m < M)[:, None] & (k < K)[None, :], 0.0)
        total = tl.dot(left, tl.trans(e4m3_value(w) * s[:, None]), total)
    tl.store(c + m[:, None] * N + n[None, :], total, (m < M)[:, None] & (n < N)[None, :])


def online_softmax(x, y, x_stride, columns, BLOCK: tl.constexpr):
    x += tl.program_id(0) * x_stride
    y += tl.program_id(0) * columns
    j = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), -1e38, tl.float32)     # a lane each
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, columns, BLOCK):
        v = tl.load(x + i + j, i + j < columns, -1e38)
        new = tl.maximum(most, v)
        total = total * tl.exp(most - new) + tl.where(i + j < columns, tl.exp(v - new), 0.0)
        most = new
    top = tl.max(most, 0)
    whole = tl.sum(total * tl.exp(most - top), 0)
    for i in range(0, columns, BLOCK):
        tl.store(y + i + j, tl.exp(tl.load(x + i + j, i + j < columns, 0.0) - top) / whole,
                 i + j < columns)


@pytest.mark.parametrize("compiled", (False, True))
def test_right_kernels_that_are_written_otherwise(compiled):
    others = {name: globals()[name.partition(".")[2]] for name in PUZZLES}
    verdicts = run([(name, source_of(kernel)) for name, kernel in others.items()],
                   compiled=compiled)
    assert [verdict["status"] for verdict in verdicts] == ["right"] * len(PUZZLES), verdicts
    assert not compiled or all("compiles" in verdict["detail"] or torch.cuda.is_available()
                               for verdict in verdicts)


def clamped_twice(x, y, n, BLOCK: tl.constexpr):
    i = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), n - 1)
    tl.store(y + i, tl.load(x + i))


def in_eights(x, y, n, BLOCK: tl.constexpr):
    for part in range(0, BLOCK, 8):
        i = tl.program_id(0) * BLOCK + part + tl.arange(0, 8)
        tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def softmax_in_two_axes(x, y, x_stride, columns, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    v = tl.where(i < columns, tl.load(x + row * x_stride + tl.minimum(i, columns - 1)),
                 float("-inf"))
    e = tl.exp(v - tl.max(v, 1)[:, None])
    tl.store(y + row * columns + i, e / tl.sum(e, 1)[:, None], mask=i < columns)


def cast_both_wrapped(x, scale, codes, turned, next_amax, x_stride, R, C, BR: tl.constexpr,
                      BC: tl.constexpr):
    r, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < R)[:, None] & (c < C)[None, :]
    v = tl.load(x + (r % R)[:, None] * x_stride + (c % C)[None, :])
    code = e4m3(v * tl.load(scale))
    tl.store(codes + r[:, None] * C + c[None, :], code, mask=inside)
    tl.store(turned + c[None, :] * R + r[:, None], code, mask=inside)
    tl.atomic_max(next_amax, tl.max(tl.abs(v)))


def matmul_wrapped(a, b, c, a_stride, M, N, K, B: tl.constexpr):
    m, n, j = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0,
        B), tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for part in range(tl.cdiv(K, B)):
        k = tl.minimum(part * B + j, K - 1)
        left = tl.where((part * B + j < K)[None, :],
                        tl.load(a + (m % M)[:, None] * a_stride + k[None, :]), 0.0)
        total += tl.dot(left, tl.load(b + k[:, None] * N + (n % N)[None, :]))
    tl.store(c + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


OTHERS = [("10.copy", clamped_twice), ("10.copy", in_eights), ("10.softmax", softmax_in_two_axes),
          ("10.cast_both", cast_both_wrapped), ("11.matmul", matmul_wrapped)]


def test_an_index_may_be_clamped_and_a_block_another():
    verdicts = run([(name, source_of(kernel)) for name, kernel in OTHERS])
    assert [verdict["status"] for verdict in verdicts] == ["right"] * len(OTHERS), verdicts


@pytest.mark.parametrize("name, old, new, message", [
    ("10.copy", "tl.load(x + i, mask=i < n)", "tl.load(x + tl.minimum(i, n))", "reads x["),
    ("10.copy", "tl.load(x + i, mask=i < n)",
     "tl.load(x + tl.maximum(tl.minimum(i, n - 1), i - 1))", "reads x["),
    ("10.copy", "tl.store(y + i,", "tl.store(y + n - i,", "writes y["),
    ("10.softmax", "    v = tl.exp", "    v += 0.0 * tl.load(x + row * x_stride + i, mask=i < "
                                     "columns, other=0.0)\n    v = tl.exp", "reads x 2 times"),
    ("10.amax", "    tl.atomic", "    v = tl.maximum(v, tl.load(x + i, mask=i < n, other=0.0))\n   "
                                 " tl.atomic", "reads x 2 times"),
])
def test_what_lies_outside_and_what_is_read_twice_is_refused(name, old, new, message):
    right = PUZZLES[name].solution
    assert old in right
    verdict = run([(name, right.replace(old, new, 1))])[0]
    assert verdict["status"] == "wrong" and message in verdict["detail"], verdict


# kernels that do not end well

def hostile(*lines):
    return "def copy(x, y, n, BLOCK):\n" + textwrap.indent("\n".join(lines), "    ")


LOOPS = {
    hostile("while True:", "    pass"): "did not end within 2 s",
    hostile("import os", "os.fork()", "while True:", "    pass"): "did not end within 2 s",
}
ENDS = {
    hostile("import os", "os._exit(3)"): "it ended its process",
    hostile("import sys", "sys.exit(1)"): "it ended its process",
    hostile("import ctypes", "ctypes.string_at(8)"): "it ended its process (SIGSEGV)",
    hostile("raise ValueError('no')"): "it raised ValueError: no, in line 2: `raise "
                                       "ValueError('no')`",
    hostile("all = []", "while True:", "    all.append(bytearray(1 << 26))"): "it took more than "
        "1024 MB",
    hostile("tl.store(y + (1 << 40), 1.0)"): "far outside of every tensor",
    hostile("tl.store(x, 1.0)"): "it writes to x[0], and x is an input",
    hostile("helper(x)"): "NameError: name 'helper' is not defined",
    hostile("print('here')", "1 / 0"): "division by zero, in line 3: `1 / 0`. It printed: here",
    "def copy(x, y, n, BLOCK)\n    pass": "SyntaxError",
    "copy = 3": "it raised",
    hostile("pass"): "y[0] should be -3 and is not written",
}


def judging():
    """The processes below the warm judges of this process; one that ends while it is looked at is
    gone."""
    children = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "lessons.judging.judge_process" in " ".join(process.cmdline()):
                children += process.children()
    return children


def test_whatever_a_kernel_does_is_a_sentence_and_nothing_stays():
    verdicts = run([("10.copy", source) for source in LOOPS],
                   seconds=2) + run([("10.copy", source) for source in ENDS])
    for (source, message), verdict in zip({**LOOPS, **ENDS}.items(), verdicts, strict=True):
        assert verdict["status"] == "wrong" and message in verdict["detail"], (source, verdict)
    deadline = time.monotonic() + 10 * patience()
    while (left := judging()) and time.monotonic() < deadline:
        time.sleep(0.05)        # the last judge says its finding before it ends
    assert not left


def test_what_the_interpreter_accepts_must_compile():
    source = PUZZLES["10.copy"].solution + "\n    try:\n        pass\n    finally:\n        pass"
    accepted, compiled = run([("10.copy", source)])[0], run([("10.copy", source)], compiled=True)[0]
    assert (accepted["status"] == "right" and compiled["status"] == "wrong"
            and "unsupported AST node" in compiled["detail"])


def test_margins_alone_find_what_lies_outside():
    """As on a GPU, where nobody looks at each address."""
    program = """
        import contextlib
        import tests
        from lessons.judging import kernel_process as k
        from lessons.judging.puzzles import difference
        from lessons.judging.index import exercise
        k.watched = lambda *_: contextlib.nullcontext()
        for name, old, new in (("10.copy", ", mask=i < n)", ")"), ("10.softmax", "row * x_stride", \
"row * columns"),
                               ("10.add_norm", "v * scale * g, mask=i < columns", "v * scale * g"),
                               ("10.cast_both", "turned + c[None, :] * R", "turned + c[None, :] * \
C")):
            puzzle = exercise(name)
            cases = list(puzzle.all_cases())
            answers = k.answers(puzzle, cases, puzzle.solution.replace(old, new), False)
            print(next(why for case, answer in zip(cases, answers)
                       if (why := answer.why or difference(answer.value["left"], puzzle, case))))"""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)],
                          env={**os.environ, "TRITON_INTERPRET": "1"},
                          capture_output=True, text=True, check=True)
    copied, softmaxed, normed, both = done.stdout.splitlines()
    assert "it wrote to y[5], which is outside" in copied
    assert "y[1, 0] should be" in softmaxed
    assert "it wrote to y[" in normed and "outside" in normed and "outside" in both


# where the interpreter is at fault

def judged_within(planted, *attempts):
    """What the judge finds of (puzzle, source) in a process in which something was done to the
    interpreter."""
    program = f"""
        import json
        import numpy as np
        from triton.runtime import interpreter
        {planted}
        from tests.lessons.judging.course import PUZZLES
        for name, source in {attempts!r}:
            print(json.dumps(PUZZLES[name].outcome(dict(source=source, compiled=False, elements=0, \
seconds=30), -1)))"""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)],
                          env={**os.environ, "TRITON_INTERPRET": "1"},
                          capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


TRITON_36 = """plain = interpreter._patch_lang_tensor
        def patch(tensor, scope):       # as 3.6 has it: numpy 2.4 makes no number of an array of \
one
            plain(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data))
        interpreter._patch_lang_tensor = patch"""
BY_INDEX = ("def copy(x, y, n, BLOCK):\n    for i in range(tl.program_id(0) * BLOCK, tl.minimum(n, "
            "(tl.program_id(0) + 1) * BLOCK)):\n" \
           "        tl.store(y + i, tl.load(x + i))")


def test_loops_run_in_the_interpreter_of_triton_36():
    solutions = [(name, PUZZLES[name].solution) for name in ("11.matmul", "11.online_softmax")]
    verdicts = judged_within(TRITON_36, ("10.copy", BY_INDEX), *solutions)
    assert [verdict["status"] for verdict in verdicts] == ["right"] * 3, verdicts


@pytest.mark.parametrize("planted, message", [
    ("def exp(self, arg):\n            raise TypeError('planted')\n        "
     "interpreter.InterpreterBuilder.create_exp = exp", "it raised TypeError: planted"),
    ("interpreter.InterpreterBuilder.create_exp = lambda self, arg: self.unary_op(arg, np.exp2)",
     "y[0, 0] should be"),
])
def test_where_the_interpreter_fails_nobody_else_is_at_fault(planted, message):
    ours, theirs, copied, missed = judged_within(planted,
        ("10.softmax", PUZZLES["10.softmax"].solution), ("10.softmax", source_of(softmax)),
                                                 ("10.copy", PUZZLES["10.copy"].solution),
        ("10.copy", hostile("pass")))
    assert ours["status"] == "to do" and ours["detail"].startswith("Triton's interpreter failed, "
        "not your kernel: ") and message in ours["detail"]
    assert (theirs["status"] == copied["status"] == "right" and missed["status"] == "wrong"
            and "interpreter" not in missed["detail"])


def test_the_verdict_says_whose_fault_it_is(monkeypatch):
    says = {"status": "to do", "detail": "Triton's interpreter failed, not your kernel: planted"}
    monkeypatch.setattr(puzzles, "run", lambda attempts, **how: [says])
    verdict = check(EXERCISES["10.copy"], copy)
    assert (verdict.status, verdict.detail) == ("to do", says["detail"])
    monkeypatch.setattr(puzzles, "defects",
                        lambda: ("a loop does not run: planted words",
                                 "tl.dot does not run: others", "a cast is wrong"))
    says = {"status": "wrong",
            "detail": "for x=(5,): it raised TypeError: planted words, in line 2"}
    verdict = check(EXERCISES["10.copy"], copy)
    assert verdict.status == "wrong" and verdict.detail.endswith("Not your fault, perhaps: a loop "
        "does not run: planted words.")


# as the notebook calls it

def test_a_stub_is_to_do_and_starts_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))      # of somebody who has not tried it
    monkeypatch.setattr(puzzles, "run", None)
    verdict = check(EXERCISES["10.copy"], stub)
    assert verdict.status == "to do" and "★, about 5 minutes" in verdict.detail and verdict.held


@pytest.mark.parametrize("attempt, message",
                         [(3, "write it as a function"), (len, "write it as a function"),
                                           (eval("lambda x: x"), "write it as a function"),
                                           (lambda x: x, "write it as a function")])
def test_what_is_no_kernel(attempt, message):
    verdict = check(EXERCISES["10.copy"], attempt)
    assert verdict.status == "wrong" and message in verdict.detail


def test_a_right_kernel_and_a_wrong_one_in_a_notebook():
    verdict = check(EXERCISES["10.copy"], copy)
    assert verdict.status == "right" and verdict.detail

    def copy_by_e4m3(x, y, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, mask=i < n).to(tl.float8e4nv).to(tl.float32), mask=i < n)

    verdict = check(EXERCISES["10.copy"], copy_by_e4m3)
    assert (verdict.status == "wrong" and "y[" in verdict.detail
            and "Not your fault, perhaps: a cast to E4M3" in verdict.detail)


def test_bytes_are_those_of_the_arithmetic():
    amax, both = puzzles.moved([(name, EXERCISES[name].kernel)
                                for name in ("10.amax", "10.cast_both")])
    assert amax["x"] == (4, 0) and amax["out"] == (0, 4 / 1024)
    assert ((both["x"], both["codes"], both["turned"]) == ((4, 0), (0, 1), (0, 1))
            and both["scale"] == both["next_amax"][::-1])


def test_compiled_and_interpreted_must_agree(monkeypatch):
    answers = iter([{"status": "right", "detail": ""},
                    {"status": "wrong", "detail": "c[0, 0] should be 1 and is 2"}])
    monkeypatch.setattr(puzzles, "run", lambda attempts, **how: [next(answers)])
    verdict = check(EXERCISES["11.matmul"], matmul)
    assert (verdict.status == "wrong"
            and verdict.detail.startswith("it is right in the interpreter")
            and "c[0, 0]" in verdict.detail)


def test_without_triton_the_lesson_runs_on(monkeypatch):
    monkeypatch.setattr(puzzles, "versions", lambda names: dict.fromkeys(names))
    monkeypatch.setattr(defects, "versions", lambda names: dict.fromkeys(names))
    defects.defects.cache_clear()
    try:
        verdict = check(EXERCISES["10.copy"], copy)
        assert verdict.status == "to do" and "Triton is not installed" in verdict.detail
        assert check(EXERCISES["10.copy"], stub).status == "to do"
        assert puzzles.moved([("10.copy", copy)]) == [{}]
        monkeypatch.setitem(sys.modules, "triton.language", None)
        assert puzzles.tl.constexpr is int      # a stub's annotation
    finally:
        defects.defects.cache_clear()


def test_the_self_test_names_what_is_known_to_be_broken():
    """3.7.1; where a later one is mended, take the sentence away."""
    text = "\n".join(defects.defects())
    assert ("a cast to E4M3 is wrong" in text and "tl.dot of bf16 numbers is wrong" in text
            and "a store out of bounds is silent" in text)
    assert "float32" not in text and "a loop" not in text and "{" not in text


def test_figures_put_kernels_where_the_ceilings_end_them():
    h200 = CATALOGUE["h200"]
    spec = bounds_figure(h200, {"a": (1, 2, "fp32"), "b": (2, 4, "fp32"), "c": (100, 1, "fp32"),
                                "d": (1e4, 1, "bf16")}, title="t")
    go.Figure(plain(spec), skip_invalid=False)
    marks = spec["data"][-1]
    assert marks["text"] == ["a, b", "c", "d"] and marks["y"] == [0.5 * h200.bytes_per_second,
        67e12, h200.peak_flops("bf16")]
    spec = moved_figure({"plain": (21, 14), "fused": (4, 2)}, title="t")
    go.Figure(plain(spec), skip_invalid=False)
    assert ([bar["x"] for bar in spec["data"]] == [[21, 4], [14, 2]]
            and spec["data"][1]["text"] == ["35", "6"])


def test_operations_are_counted_and_views_are_not():
    x = torch.zeros(8, 4)
    with Moved() as moved:
        (x.T + 1).sum()
        x[:2].add_(1)
    assert moved.rows == [("add", 128, 128), ("sum", 128, 4), ("add_", 32, 32)]
    codes, turned, amax = cast_both_layouts(torch.tensor([[1.0, -4.0], [0.5, 3.0], [0, 0]]))
    assert (torch.equal(codes.float(), torch.tensor([[112.0, -448], [56, 320], [0, 0]]))
            and torch.equal(turned.float(), codes.float().T) and amax == 4)


def test_the_file_of_a_kernel_holds_nothing_else():
    assert source_of(inspect.unwrap(copy)).startswith("def copy(x, y, n, BLOCK: tl.constexpr):")
