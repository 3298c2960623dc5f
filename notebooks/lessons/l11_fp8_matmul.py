"""Lesson 11, FP8 matmul: its study, its figures and its exercises.

Emulates how Hopper's tensor cores add products of FP8 numbers, and measures the error of the sum.

The product of two FP8 numbers is exact. In each step, a tensor core adds STEP products to the sum
so far: it shifts all these terms to the largest exponent among them, keeps the highest BITS bits of
each term, cuts off the lower bits, and adds (DeepSeek-V3, https://arxiv.org/abs/2412.19437,
sections 3.3.2 and 3.5.2: 32 products and 14 bits, observed on an H800). DeepSeek's remedy is
promotion: after a fixed number of products, the sum is added to a float32 sum outside the tensor
core, and starts again from zero.

    accumulate(a, b, bits=14)                       # as with `use_fast_accum=True`
    accumulate(a, b, bits=14, promote_every=128)    # block-wise scaling always promotes
    relative_error(got, a, b)

The emulation follows this description; the details of the circuit are not published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from math import isqrt
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lessons.draws import LARGEST, normal
from lessons.figures.drawing import NAMES, axis, bars, figure, note, scatter
from lessons.figures.style import COLOURS
from lessons.judging import puzzles as puzzles
from lessons.judging.defects import defects
from lessons.judging.judge import Exercise, adding_to
from lessons.judging.launches import Launch, blank
from lessons.judging.puzzles import Puzzle
from lessons.judging.puzzles import tl as tl
from lessons.l10_custom_kernels import (
    HUGE,
    LONG,
    MANY,
    MATRICES,
    ONE,
    ROWS,
    TINY,
    _softmax,
    block,
    by_rows,
    cdiv,
    codes_of,
    matrix,
    rows,
    value_of,
)
from lpkit.errors import ConfigError
from lpkit.hardware import synchronised
from lpkit.precision import scaled
from lpkit.precision.backends import BACKENDS
from lpkit.predict.compare import Row
from lpkit.tables import FAINT
from lpkit.techniques.recipes import PRODUCTS, RECIPES, SIDE_WORDS, SIDES, Recipe
from lpkit.timing import interleaved_seconds

if TYPE_CHECKING:
    import triton.language as tl

    from lessons.judging.kernel_parts import e2m1, e4m3, e4m3_value

# the notebook imports these names of other modules from here
__all__ = ["BACKENDS", "PRODUCTS", "RECIPES", "SIDES", "SIDE_WORDS", "defects",
           "interleaved_seconds", "median", "scaled", "synchronised"]


# ---- The study

STEP, BITS = 32, 14             # products per step; bits that are kept of each term
# for `expected_error`: number of sampled products, and of quantiles of the sum
DRAWN, QUANTILES = 2**15, 16


def accumulate(a: Tensor, b: Tensor, *, bits: int = BITS, promote_every: int | None = None,
               step: int = STEP) -> Tensor:
    """Return a @ b.T as the emulated tensor core computes it, (M, N) float64. The elements of
    a (M, K) and b (N, K) are values of an 8-bit format.

    bits: bits that are kept of each term
    promote_every: number of products after which the sum moves to the float32 sum; None: never
    step: products per step

    Raises ConfigError if `promote_every` is not a multiple of `step`, and for fewer than 2 bits or
    1 product.
    """
    if bits < 2 or step < 1:
        raise ConfigError(f"bits must be 2 or more and step 1 or more; got bits={bits}, "
                          f"step={step}")
    if promote_every is not None and promote_every % step:
        raise ConfigError(f"promote_every={promote_every} must be a multiple of step={step}, the "
                          f"number of products that are added at a time")
    a, b = a.double(), b.double()
    K = a.shape[1]
    outside = torch.zeros(len(a), len(b), dtype=torch.float32)
    inside = torch.zeros(len(a), len(b), dtype=torch.float64)
    for start in range(0, K, step):
        terms = a[:, None, start:start + step] * b[None, :, start:start + step]
        inside = _aligned_sum(torch.cat((inside[..., None], terms), -1), bits)
        if promote_every and (start + step) % promote_every == 0:
            outside += inside.float()
            inside = torch.zeros_like(inside)
    return outside.double() + inside


def _aligned_sum(terms: Tensor, bits: int) -> Tensor:
    """Return the sum over the last axis. Of each term, only the bits down to 2^-(bits - 1) times
    the largest term's power of two are kept; the lower bits are cut off (toward 0)."""
    exponent = torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent - bits
    shifted = torch.ldexp(terms, -exponent).trunc()
    return torch.ldexp(shifted.sum(-1), exponent[..., 0])


def gaussian(K: int, change: Callable[[Tensor], Tensor], rows: int = 16) -> tuple[list, list]:
    """Return two operands (rows, K) of Gaussian numbers, and the same operands cast to E4M3 (as
    float32). `change` is applied to the numbers, for example to make them positive; then the
    largest is scaled to 448. The random numbers depend only on K and `rows`."""
    rng = torch.Generator().manual_seed(K)
    drawn = [change(torch.randn(rows, K, generator=rng)) for _ in range(2)]
    wide = [x / x.abs().max() * 448 for x in drawn]
    return wide, [x.to(torch.float8_e4m3fn).float() for x in wide]


def relative_error(got: Tensor, a: Tensor, b: Tensor) -> float:
    """Return |got - a @ b.T| / |a @ b.T| (Frobenius norms), with the exact product in float64."""
    exact = a.double() @ b.double().T
    return ((got.double() - exact).norm() / exact.norm()).item()


def expected_error(a: Tensor, b: Tensor, *, bits: int = BITS, step: int = STEP,
                   promote_every: int | None = None) -> float:
    """Return the expected `relative_error` of `accumulate`, by a formula that treats the products
    of an element's sum as independent draws.

    After k products, the sum is about normal, with k times the mean and k times the variance of a
    product. The power of two of the sum (or of a step's largest product, if that is larger) sets
    the unit below which terms are cut off. For each unit, the mean and the variance of what a
    product loses are computed from DRAWN products; a product loses nothing if the unit is below its
    last bit. Mean losses add up over the products (as a bias, if the products have one sign);
    deviations add like noise. The sum itself loses nothing while its exponent stays the same.
    """
    K = a.shape[1]
    drawn = torch.randint(K, (DRAWN,), generator=torch.Generator().manual_seed(0))
    products = a.double()[torch.arange(DRAWN) % len(a), drawn] \
        * b.double()[torch.arange(DRAWN) // len(a) % len(b), drawn]
    mean, deviation = products.mean(), products.std()
    largest = products.abs().view(-1, step).amax(1).median()
    quantiles = torch.special.ndtri((torch.arange(QUANTILES) + 0.5) / QUANTILES).double()
    lost: dict[int, Tensor] = {}    # mean and variance of a product's loss, by the unit's exponent
    run = min(promote_every or K, K)
    bias = noise = 0.0
    for k in range(0, run, step):
        sums = (k * mean + k**0.5 * deviation * quantiles).abs().clamp(min=largest)
        for exponent in (torch.frexp(sums).exponent - bits).tolist():
            if exponent not in lost:
                cut = products - (products / 2.0**exponent).trunc() * 2.0**exponent
                lost[exponent] = torch.stack((cut.mean(), cut.var()))
            of_mean, of_variance = lost[exponent].tolist()
            bias += step * of_mean / QUANTILES
            noise += step * of_variance / QUANTILES
    runs = K / run
    of_result = K**0.5 * math.hypot(K**0.5 * mean, deviation)
    return math.hypot(bias * runs, (noise * runs) ** 0.5) / of_result


# ---- Figures

# where the scales of the operands are multiplied in
AFTER, CUDA_CORES, INSIDE = ("after the sum", "in the sum, by the CUDA cores",
                             "in the sum, by the tensor core")
SCALED_IN = {AFTER: COLOURS[0], CUDA_CORES: COLOURS[1], INSIDE: COLOURS[4]}


def sums_figure(recipes: Mapping[str, Recipe], *, products: int = 512, title: str = "") -> dict:
    """Return the plotly spec of how each recipe sums the `products` terms of one element of y = x
    w^T:
    pieces whose terms share their scales, and in colour where these scales are multiplied in."""
    pieces = {name: max(cast.block[1] for cast in recipe.products["y"]) or products
              for name, recipe in recipes.items()}
    data = []
    for place, colour in SCALED_IN.items():
        shown = [(name, piece, start) for name, piece in pieces.items()
                 if place == (AFTER if piece == products else CUDA_CORES if piece > 32 else INSIDE)
                 for start in range(0, products, piece)]
        data.append(bars([name for name, *_ in shown], [piece for _, piece, _ in shown], place,
                         colour, base=[start for *_, start in shown],
                         text=["" if start + piece < products else f"{products // piece}"
                               for _, piece, start in shown],
                         hover="%{y}: the %{x} products of a piece share their scales"))
    return figure(data, title, height=170 + 46 * len(recipes), barmode="overlay",
                  xaxis=axis("products of one sum; number: how many times scales are multiplied in",
                             range=[0, 1.2 * products], tickvals=range(0, products + 1, 128)),
                  yaxis={**NAMES, "categoryarray": list(recipes)}, margin={"t": 92})


def sum_rows(formula: Mapping[tuple, float], measured: Mapping[tuple, float],
             lengths: Iterable[int], names: Mapping[int | None, str]) -> dict[tuple, Row]:
    """Return comparisons of the expected with the emulated relative error of sums, in percent.

    formula, measured: relative errors by (sign, length of the sum, products per promotion)
    lengths: the lengths to compare
    names: for each number of products per promotion (None: no promotion), its name

    A sum that ends before its first promotion is left out."""
    signs = dict.fromkeys(sign for sign, *_ in formula)
    keys = [(sign, length, every) for sign in signs for length in lengths for every in names
            if every is None or length > every]
    return {key: Row(name=f"{key[1]:,} {key[0]}: {names[key[2]]}", unit="percent",
                     where="emulated", formula=100 * formula[key], measured=100 * measured[key])
            for key in keys}


def lost_sums(formula: Mapping[tuple, float], measured: Mapping[tuple, float],
              casts: Mapping[tuple, float], names: Mapping[int | None, str]) -> dict[str, dict]:
    """Return the panels of `lost_sums_figure`: one per sign of the products, with a curve (by
    formula, as emulated) over the length for each of `names`, and a curve of the errors of the
    casts alone. The arguments are as in `sum_rows`; `casts` has errors by (sign, length)."""
    panels: dict[str, dict] = {}
    for (sign, length), cast in casts.items():
        curves = panels.setdefault(
            sign, {name: ({}, {}) for name in (*names.values(), "the casts alone")})
        for every, name in names.items():
            for curve, errors in zip(curves[name], (formula, measured)):
                curve[length] = errors[sign, length, every]
        curves["the casts alone"][1][length] = cast
    return panels


def lost_sums_figure(panels: Mapping[str, Mapping[str, tuple[Mapping, Mapping]]], *,
                     title: str = "") -> dict:
    """Return the plotly spec of relative errors over the length of a sum, a panel for each key of
    `panels` (see `lost_sums`). A curve is a line by formula and markers as emulated; a curve
    without a formula is dotted."""
    data, axes, notes = [], {}, []
    for i, (panel, curves) in enumerate(panels.items(), 1):
        left, right = (i - 1) / len(panels), i / len(panels) - 0.06 * (i < len(panels))
        for (name, (formula, measured)), colour in zip(curves.items(),
                                                       (COLOURS[2], COLOURS[0], FAINT)):
            more = {"xaxis": f"x{i}", "yaxis": f"y{i}", "legendgroup": name}
            if formula:
                data.append(scatter(formula, formula.values(), "", colour, hover=None,
                                    showlegend=False, **more))
            data.append(scatter(measured, measured.values(), name, colour, showlegend=i == 1,
                                mode="markers" if formula else "lines+markers",
                                line={"dash": "dot"}, **more,
                                hover="%{x:,} products: error %{y:.2~%}"))
        lengths = list(measured)
        ends = math.log10(lengths[0] / 1.3), math.log10(1.3 * lengths[-1])
        axes[f"xaxis{i}"] = axis("products in a sum", type="log", range=ends, anchor=f"y{i}",
                                 domain=[left, right], tickvals=lengths[::2],
                                 ticktext=[f"{length:,}" for length in lengths[::2]])
        axes[f"yaxis{i}"] = axis("relative error of the sum" if i == 1 else "", type="log", dtick=1,
                                 tickformat=".2~%", range=[-4.3, 0], anchor=f"x{i}")
        notes.append(note(panel, left, 1.01, xref="paper", yref="paper", font={"size": 14}))
    return figure(data, title, height=460, annotations=notes, legend={"y": 1.08},
                  margin={"t": 112}, **axes)


# ---- Exercises

# Each decorated function is the reference answer of an exercise, a Triton kernel. The decorator has
# test cases, and for each hint the edit (old, new) of the kernel that is a typical mistake:
# `lessons.judging.puzzles.Puzzle`.

EXERCISES: dict[str, Exercise] = {}
puzzle = adding_to(EXERCISES, Puzzle, "kernel")


def by_scales(x: Tensor, block: int, scales: torch.dtype = torch.uint8, in_byte: int = 1,
              **more: Any) -> Launch:
    """Return a launch with one program for each block of `block` elements of a row of x (R, C),
    which share a scale. The results are the codes, `in_byte` per byte, and the scales."""
    R, C = x.shape
    return Launch(R, cdiv(C, block), out={"codes": blank(R, C // in_byte, dtype=torch.uint8),
                                          "scales": blank(R, -(-C // block), dtype=scales)},
                  x=x, x_stride=x.stride(0), columns=C, **more)


# Exercises: scales and codes, then products.

def _parts(x: Tensor, block: int) -> Tensor:
    """Return x (rows, C) as (rows, blocks, block); the last block is padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % block)).view(len(x), -1, block)


def _block_scale(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    parts = _parts(x, block)
    scales = parts.abs().amax(-1) / LARGEST
    codes = codes_of(parts / torch.where(scales > 0, scales, 1)[..., None])
    return codes.flatten(1)[:, :x.shape[1]].contiguous(), scales


@puzzle("11.block_scale", *((x, 16) for x in MATRICES), (torch.zeros(1, 20), 16),
        (torch.tensor([[1e30, 1.0] + 30 * [1e-30]]), 16), (HUGE * MANY, 16),
        (TINY * LONG[:1, :400], 16), (LONG[:2, :1000], 128), spec=_block_scale, minutes=12,
        stars=2, launch=lambda x, block: by_scales(x, block, torch.float32, BLOCK=block),
        draw=lambda r: (rows(r, size=10 ** r.uniform(-9, 9)), r.choice((8, 16))),
        mistakes={"a block of zeros has the scale 0, and 0 / 0 is NaN":
                      ("tl.where(s > 0, s, 1.0)", "s"),
                  "store the scale, not its inverse: value = code * scale":
                      ("scales + row * tl.num_programs(1) + block, s)",
                       "scales + row * tl.num_programs(1) + block, tl.where(s > 0, tl.div_rn(1.0, "
                       "s), 0.0))"),
                  "448 is the largest of E4M3": ("448.0)", "240.0)")})
def block_scale(x, codes, scales, x_stride, columns, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * x_stride + i, mask=i < columns, other=0.0)
    s = tl.div_rn(tl.max(tl.abs(v), 0), 448.0)
    tl.store(scales + row * tl.num_programs(1) + block, s)
    tl.store(codes + row * columns + i, e4m3(tl.div_rn(v, tl.where(s > 0, s, 1.0))),
             mask=i < columns)


def _e8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    parts = _parts(x, 32)
    top = parts.abs().amax(-1)
    scales = torch.where(top > 0, (torch.frexp(top)[1] - 1 - 8 + 127).clamp(0, 254), 0)
    codes = codes_of(torch.ldexp(parts, 127 - scales[..., None]))
    return codes.flatten(1)[:, :x.shape[1]].contiguous(), scales.to(torch.uint8)


@puzzle("11.e8m0", *((x,) for x in MATRICES), (torch.zeros(1, 40),),
        (torch.tensor([[2.0**127, 1.0, -480.0]]),), (torch.tensor([[1e-36, -3e-36]]),),
        (torch.tensor([[1.999, 0.5], [-2.0, 1.0]]),), (HUGE * MANY,), (TINY * LONG[:1, :800],),
        spec=_e8m0, minutes=12, stars=2, launch=lambda x: by_scales(x, 32),
        draw=lambda r: (rows(r, most=80, size=10 ** r.uniform(-9, 9)),),
        mistakes={"subtract 8, the exponent of E4M3's largest value": ("- 8, 0)", "- 0, 0)"),
                  "the exponent is cut, not rounded: some of the largest saturate":
                      ("tl.max(tl.abs(v), 0).to(tl.int32, bitcast=True) >> 23",
                       "(tl.max(tl.abs(v), 0).to(tl.int32, bitcast=True) + (1 << 22)) >> 23"),
                  "values are divided by the scale": ("254 - s", "s")})
def e8m0(x, codes, scales, x_stride, columns):
    row, block = tl.program_id(0), tl.program_id(1)
    i = block * 32 + tl.arange(0, 32)
    v = tl.load(x + row * x_stride + i, mask=i < columns, other=0.0)
    field = tl.max(tl.abs(v), 0).to(tl.int32, bitcast=True) >> 23
    s = tl.maximum(field - 8, 0)
    tl.store(scales + row * tl.num_programs(1) + block, s.to(tl.uint8))
    inverse = ((254 - s) << 23).to(tl.float32, bitcast=True)
    tl.store(codes + row * columns + i, e4m3(v * inverse), mask=i < columns)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDDLES = (E2M1[1:] + E2M1[:-1]) / 2


def _e2m1_codes(x: Tensor) -> Tensor:
    """Return the E2M1 code of the nearest value for each element; ties go to the even code."""
    size = x.abs()[..., None]
    return (size > MIDDLES).sum(-1) + (size == MIDDLES[1::2]).sum(-1) + 8 * torch.signbit(x)


def _nvfp4(x: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    R = len(x)
    parts = x.reshape(R, -1, 16)
    scales = codes_of(parts.abs().amax(-1) / 6 / top)
    by = value_of(scales)[..., None] * top
    codes = torch.where(by > 0, _e2m1_codes(parts / torch.where(by > 0, by, 1)), 0).view(R, -1)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8), scales


def _with_top(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.abs().amax()[None] / (6 * LARGEST) + (1.0 if not x.any() else 0.0)


def _sixteens(r: Random) -> tuple[Tensor, Tensor]:
    R, C = r.randint(1, 2), 16 * r.randint(1, 2)
    return _with_top(normal(r, R, C, size=10 ** r.uniform(-6, 6)))


@puzzle("11.nvfp4", _with_top(torch.arange(16.0)[None] - 8), _with_top(torch.zeros(1, 16)),
        _with_top(torch.cat([torch.full((1, 16), 2688.0), E2M1[None], -E2M1[None]], 1)),
        _with_top(torch.cat([torch.full((1, 16), 2688.0), torch.full((1, 16), -1e-3)], 1)),
        (torch.cat([E2M1[None], torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0]])], 1),
         ONE), _with_top(HUGE * LONG[:1, :400]), _with_top(TINY * normal(Random(5), 40, 16)),
        spec=_nvfp4, minutes=20, stars=3, draw=_sixteens,
        launch=lambda x, top: by_scales(x, 16, in_byte=2, top=top),
        mistakes={"divide the elements by the stored scale, rounded to E4M3":
                      ("e4m3_value(s) * tl.load(top)", "tl.div_rn(most, 6.0)"),
                  "the even element is in the lower four bits":
                      ("low | (high << 4)", "high | (low << 4)"),
                  "a block's scale is in units of the tensor's":
                      ("tl.div_rn(tl.div_rn(most, 6.0), tl.load(top))", "tl.div_rn(most, 6.0)")})
def nvfp4(x, top, codes, scales, x_stride, columns):
    row, block = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, 8)
    at = x + row * x_stride + block * 16 + 2 * pair
    even, odd = tl.load(at), tl.load(at + 1)
    most = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 0)
    s = e4m3(tl.div_rn(tl.div_rn(most, 6.0), tl.load(top)))
    tl.store(scales + row * tl.num_programs(1) + block, s)
    by = e4m3_value(s) * tl.load(top)
    some = tl.where(by > 0, by, 1.0)
    low, high = e2m1(tl.div_rn(even, some)), e2m1(tl.div_rn(odd, some))
    code = tl.where(by > 0, low | (high << 4), 0)
    tl.store(codes + row * (columns // 2) + block * 8 + pair, code.to(tl.uint8))


def _few_bits(r: Random, *shape: int, most: int = 16) -> Tensor:
    """Return random multiples of 4 / most in [-4, 4]. TF32 represents them exactly (bf16 does not,
    for most=512), and sums of their products are exact, so the order of the additions does not
    matter."""
    chance = torch.Generator().manual_seed(r.getrandbits(32))
    return torch.randint(-most, most + 1, shape, generator=chance) * 4 / most


def _factors(r: Random, M: int = 0, N: int = 0, K: int = 0) -> tuple[Tensor, Tensor]:
    M, N, K = M or r.randint(1, 40), N or r.randint(1, 40), K or r.randint(1, 40)
    gap, size = r.choice((0, 3)), r.choice((1, HUGE, TINY))
    return (size * _few_bits(r, M, K + gap, most=512))[:, :K], _few_bits(r, K, N)


def _matmul_launch(a: Tensor, b: Tensor) -> Launch:
    (M, K), N, B = a.shape, b.shape[1], 64 if len(a) > 64 else 16
    return Launch(cdiv(M, B), cdiv(N, B), out={"c": blank(M, N)}, a=a, b=b, a_stride=a.stride(0),
                  M=M, N=N, K=K, B=B)


_SOME = Random(0)


@puzzle("11.matmul", (_few_bits(_SOME, 5, 3), _few_bits(_SOME, 3, 2)),
        (_few_bits(_SOME, 17, 20)[:, :18], _few_bits(_SOME, 18, 35)),
        (_few_bits(_SOME, 1, 33), _few_bits(_SOME, 33, 1)),
        (256 * _few_bits(_SOME, 3, 20), 256 * _few_bits(_SOME, 20, 4)),
        (torch.ones(2, 0), torch.ones(0, 3)), (HUGE * _few_bits(_SOME, 3, 20, most=512),
                                               TINY * _few_bits(_SOME, 20, 4)),
        _factors(_SOME, 600, 3, 5), _factors(_SOME, 3, 200, 5), _factors(_SOME, 3, 40, 200),
        spec=lambda a, b: a @ b, minutes=20, stars=3, draw=_factors, launch=_matmul_launch,
        large=lambda n: (torch.randn(isqrt(n), isqrt(n)), torch.randn(isqrt(n), isqrt(n))),
        flops=lambda a, b: 2 * a.shape[0] * a.shape[1] * b.shape[1],
        mistakes={"the sum goes over all of K, block by block":
                      ("range(0, K, B)", "range(0, B, B)"),
                  "load 0 beyond K in both factors":
                      ("mask=(m < M)[:, None] & (k + j < K)[None, :]",
                       "mask=(m < M)[:, None] & (k + j < k + j + 1)[None, :]"),
                  "add to the total of the blocks before": ("total += ", "total = ")})
def matmul(a, b, c, a_stride, M, N, K, B: tl.constexpr):
    m, n = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    j = tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        left = tl.load(a + m[:, None] * a_stride + (k + j)[None, :],
                       mask=(m < M)[:, None] & (k + j < K)[None, :], other=0.0)
        right = tl.load(b + (k + j)[:, None] * N + n[None, :],
                        mask=(k + j < K)[:, None] & (n < N)[None, :], other=0.0)
        total += tl.dot(left, right)
    tl.store(c + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


def _dequant_matmul(a: Tensor, codes: Tensor, scales: Tensor, block: int) -> Tensor:
    wide = scales.repeat_interleave(block, 1)[:, :codes.shape[1]]
    return a @ (value_of(codes) * wide).T


def _few_codes(r: Random, N: int, K: int) -> Tensor:
    """Return E4M3 codes (N, K) of numbers with few bits, whose sums of products are exact."""
    return codes_of(torch.tensor([r.randint(-8, 8) / 4 for _ in range(N * K)]).view(N, K))


def _quantised(r: Random, M: int = 0, N: int = 0, K: int = 0, size: float = 1.0,
               block: int = 0) -> tuple[Tensor, Tensor, Tensor, int]:
    M, N, K = M or r.randint(1, 20), N or r.randint(1, 20), K or r.randint(1, 50)
    block = block or r.choice((16, 32))
    scales = torch.tensor([2.0 ** r.randint(-2, 2) for _ in range(N * cdiv(K, block))]).view(N, -1)
    return size * _few_bits(r, M, K, most=512), _few_codes(r, N, K), scales, block


def _dequant_launch(a: Tensor, codes: Tensor, scales: Tensor, block: int) -> Launch:
    (M, K), N = a.shape, len(codes)
    return Launch(cdiv(M, block), cdiv(N, block), out={"c": blank(M, N)}, a=a, codes=codes,
                  scales=scales, M=M, N=N, K=K, B=block)


@puzzle("11.dequant_matmul", _quantised(_SOME, 2, 3, 5), _quantised(_SOME, 17, 18, 33),
        _quantised(_SOME, 1, 1, 1), _quantised(_SOME, 150, 3, 5, HUGE),
        _quantised(_SOME, 3, 150, 5, TINY), _quantised(_SOME, 2, 3, 300),
        _quantised(_SOME, 33, 34, 100, block=32), spec=_dequant_matmul,
        minutes=15, stars=3, draw=_quantised, launch=_dequant_launch,
        mistakes={"each block along K has its own scale":
                      ("s = tl.load(scales + n * tl.cdiv(K, B) + k // B",
                       "s = tl.load(scales + n * tl.cdiv(K, B)"),
                  "decode the codes before you multiply": ("e4m3_value(w)", "w.to(tl.float32)"),
                  "codes are (N, K): load them transposed":
                      ("codes + n[None, :] * K + (k + j)[:, None]",
                       "codes + n[None, :] + (k + j)[:, None] * N")})
def dequant_matmul(a, codes, scales, c, M, N, K, B: tl.constexpr):
    m, n = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    j = tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        left = tl.load(a + m[:, None] * K + (k + j)[None, :],
                       mask=(m < M)[:, None] & (k + j < K)[None, :], other=0.0)
        w = tl.load(codes + n[None, :] * K + (k + j)[:, None],
                    mask=(n < N)[None, :] & (k + j < K)[:, None], other=0)
        s = tl.load(scales + n * tl.cdiv(K, B) + k // B, mask=n < N, other=0.0)
        total += tl.dot(left, e4m3_value(w)) * s[None, :]
    tl.store(c + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


@puzzle("11.online_softmax", *ROWS, spec=_softmax, tolerance=1e-6, minutes=20, stars=3,
        large=matrix, once=(), draw=lambda r: (rows(r, size=r.choice((1, 100))),),
        launch=lambda x: by_rows(x, BLOCK=block(x.numel(), 8)),
        mistakes={"when the largest grows, rescale the sum so far":
                      ("total * tl.exp(most - new)", "total"),
                  "keep the largest of all blocks, not of the last block":
                      ("tl.maximum(most, tl.max(v, 0))", "tl.max(v, 0)"),
                  "load -inf outside the row":
                      ('float("-inf"))\n        new', "0.0)\n        new")})
def online_softmax(x, y, x_stride, columns, BLOCK: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, BLOCK)
    most, total = -float("inf"), 0.0
    for i in range(0, columns, BLOCK):
        v = tl.load(x + row * x_stride + i + j, mask=i + j < columns, other=float("-inf"))
        new = tl.maximum(most, tl.max(v, 0))
        total = total * tl.exp(most - new) + tl.sum(tl.exp(v - new), 0)
        most = new
    for i in range(0, columns, BLOCK):
        v = tl.load(x + row * x_stride + i + j, mask=i + j < columns, other=0.0)
        tl.store(y + row * columns + i + j, tl.exp(v - most) / total, mask=i + j < columns)
