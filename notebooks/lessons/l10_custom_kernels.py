"""Lesson 10, custom kernels: its study, its figures and its exercises.

Counts the bytes that a chain of PyTorch operations moves if each operation is a separate kernel.
The example is a cast of a tensor to FP8 in both layouts, which the matmuls of a Linear need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lessons import cuda_norm
from lessons.cuda_on_cpu import for_cpu
from lessons.draws import FP8, LARGEST, normal
from lessons.figures.drawing import NAMES, POWERS, axis, bars, figure, scatter
from lessons.figures.style import COLOURS
from lessons.judging.defects import defects
from lessons.judging.judge import Exercise, adding_to
from lessons.judging.launches import Launch, blank
from lessons.judging.puzzles import Puzzle
from lessons.judging.puzzles import tl as tl
from lessons.number_formats import encode, round_to
from lessons.roofs import attainable_flops, ridge
from lpkit import hardware
from lpkit.kernels import cast, norm
from lpkit.kernels.kernel import difference
from lpkit.predict.units import quantity
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.machines import CATALOGUE, Machine
from lpkit.timing import interleaved_seconds

if TYPE_CHECKING:
    import triton.language as tl

    from lessons.judging.kernel_parts import e4m3

# the notebook imports these names of other modules from here
__all__ = ["CATALOGUE", "FORMATS", "cast", "cuda_norm", "defects", "difference", "encode",
           "for_cpu", "hardware", "norm", "quantity", "round_to"]


# ---- The study

class Moved(TorchDispatchMode):
    """Records the bytes that each PyTorch operation reads and writes:

    with Moved() as moved:
        y = x.abs().amax()

    Then `moved.rows` has (operation, bytes read, bytes written) in the order of execution. Views,
    which move no bytes, are not recorded."""

    def __init__(self):
        super().__init__()
        self.rows: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # a view's result is an alias of an argument, without being written
        aliases = (returned.alias_info for returned in func._schema.returns)
        if not any(alias and not alias.is_write for alias in aliases):
            self.rows.append((func.overloadpacket.__name__, _bytes(args), _bytes((result,))))
        return result


def _bytes(values: tuple) -> int:
    """Return the bytes of the tensors among the values."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def cast_both_layouts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (R, C) cast to E4M3 with one scale, the transpose (C, R) of the cast as a contiguous
    tensor, and the amax of x; each step is a separate PyTorch operation."""
    amax = x.abs().amax()
    codes = (x * (LARGEST / amax)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, codes.T.contiguous(), amax


def copy_and_cast_seconds(x: Tensor, rounds: int) -> tuple[float, float]:
    """Return the median seconds of copying x, and of `cast_both_layouts(x)`. They take turns, for
    `rounds` rounds."""
    wait = torch.cuda.synchronize if x.is_cuda else int
    target = torch.empty_like(x)
    turns = (lambda: (target.copy_(x), wait()), lambda: (cast_both_layouts(x), wait()))
    copied, took = map(median, interleaved_seconds(turns, rounds=rounds))
    return copied, took


# ---- Figures

# which unit of a GPU computes in a dtype
UNITS = {"fp32": "CUDA cores, fp32", "bf16": "tensor cores, bf16"}


def moved_figure(moved: Mapping[str, tuple[float, float]], *, title: str = "") -> dict:
    """Return the plotly spec of (bytes read, bytes written) per element: a bar for each version of
    a computation, the first on top."""
    sums = [read + written for read, written in moved.values()]
    read, written = ([sides[side] for sides in moved.values()] for side in (0, 1))
    return figure(
        [bars(moved, read, "read", COLOURS[0], hover="%{x:.3g} bytes"),
         bars(moved, written, "written", COLOURS[1], hover="%{x:.3g} bytes",
              text=[f"{total:.3g}" for total in sums])],
        title, height=130 + 46 * len(moved), barmode="stack",
        xaxis=axis("bytes per element", range=[0, 1.15 * max(sums)]), yaxis=NAMES)


def reads_figure(reads: Sequence[Sequence[tuple[int, bool]]]) -> dict:
    """Return the plotly spec of the elements that each program of a kernel reads. `reads` has, for
    each program, (index of the element, whether the mask is true); a masked read is drawn as a
    hollow marker."""
    programs = [scatter([element for element, _ in accesses], [at] * len(accesses), f"program {at}",
                        COLOURS[at], mode="markers",
                        marker={"size": 20, "symbol": ["square" if read else "square-open"
                                                       for _, read in accesses]})
                for at, accesses in enumerate(reads)]
    return figure(programs, "Elements of x that each program reads; hollow: beyond the end, where "
                  "the mask is false", height=260, xaxis=axis("element", dtick=1),
                  yaxis=axis("program", dtick=1, autorange="reversed", zeroline=False))


def bounds_figure(machine: Machine, kernels: Mapping[str, tuple[float, float, str]], *,
                  title: str = "") -> dict:
    """Return the plotly spec of a roofline, both axes logarithmic. Each kernel is a point on the
    roof that limits it, at its FLOPs per byte; kernels at the same place share a point.

    kernels: for each kernel, its FLOPs, the bytes that it moves, and the dtype of its arithmetic
    """
    places: dict[tuple[float, str], list[str]] = {}
    for name, (flops, moved, dtype) in kernels.items():
        places.setdefault((flops / moved, dtype), []).append(name)
    dtypes = list(dict.fromkeys(dtype for *_, dtype in kernels.values()))
    xs, roofs = [x for x, _ in places], [attainable_flops(machine, dtype, x) for x, dtype in places]
    ends = [min(xs) / 3, *sorted(ridge(machine, dtype) for dtype in dtypes), 3 * max(xs)]
    lines = [scatter(ends, [attainable_flops(machine, dtype, x) for x in ends],
                     UNITS.get(dtype, dtype), COLOURS[i], hover=None)
             for i, dtype in enumerate(dtypes)]
    marks = scatter(xs, roofs, "kernel", COLOURS[2], mode="markers+text",
                    text=[", ".join(names) for names in places.values()],
                    textposition=["bottom right" if x < ridge(machine, dtype) else "bottom center"
                                  for x, dtype in places],
                    marker={"size": 9}, textfont={"size": 12}, cliponaxis=False,
                    hover="%{customdata}<extra></extra>",
                    customdata=[f"{x:.3g} FLOPs per byte, at most {quantity(y, 'FLOP/s')}"
                                for x, y in zip(xs, roofs)])
    range_ = [math.log10(min(roofs) / 4), math.log10(3 * max(map(machine.peak_flops, dtypes)))]
    return figure([*lines, marks], title, height=440, xaxis=axis("FLOPs per byte moved", **POWERS),
                  yaxis=axis("FLOP/s", range=range_, **POWERS))


# ---- Exercises

# Each decorated function is the reference answer of an exercise, a Triton kernel. The decorator has
# test cases, and for each hint the edit (old, new) of the kernel that is a typical mistake:
# `lessons.judging.puzzles.Puzzle`.

EXERCISES: dict[str, Exercise] = {}
puzzle = adding_to(EXERCISES, Puzzle, "kernel")

EPS = 1e-6


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def block(n: int, small: int = 16) -> int:
    """Return a block size for n elements. For a large n, it is a size for a GPU; for a small n, it
    is so small that even a test in the interpreter has several blocks."""
    return 1024 if n >= 1 << 16 else 4 * small if n >= 1 << 12 else small


def by_blocks(x: Tensor, out: Mapping[str, Tensor], small: int = 16, **given: Tensor) -> Launch:
    """Return a launch with one program per block of the vector x. `out` has the empty results by
    name; `given` are further tensor arguments of the kernel."""
    B = block(len(x), small)
    return Launch(cdiv(len(x), B), out=out, x=x, **given, n=len(x), BLOCK=B)


def by_rows(x: Tensor, out: str = "y", **more: Any) -> Launch:
    """Return a launch with one program per row of x (R, C); a block holds a whole row. `out` has
    one letter per result, which is the result's name; results have the shape of x."""
    R, C = x.shape
    return Launch(R, out={name: blank(R, C) for name in out}, x=x, x_stride=x.stride(0), columns=C,
                  **{"BLOCK": max(2, 1 << (C - 1).bit_length()), **more})


def rows(r: Random, *, most: int = 40, size: float = 1.0) -> Tensor:
    """Draw a random matrix of at most 5 rows and `most` columns; in some matrices, the stride of a
    row is larger than its length."""
    return normal(r, r.randint(1, 5), r.randint(1, most), size=size)


def vector(n: int) -> tuple[Tensor]:
    """Return the arguments of a large test: a vector of n elements."""
    return (torch.randn(n),)


def matrix(n: int) -> tuple[Tensor]:
    """Return the arguments of a large test: a matrix of about n elements, 4,096 per row."""
    return (torch.randn(-(-n // 4096), 4096),)


def codes_of(x: Tensor) -> Tensor:
    """Return x cast to E4M3 with saturation, as uint8."""
    return x.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)


def value_of(codes: Tensor) -> Tensor:
    """Return the values of E4M3 codes (uint8) as float32."""
    return codes.view(FP8).float()


AWKWARD = tuple(torch.arange(n) / 4 - 3 for n in (5, 123, 1))
EXTREME = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 1e-38, 448.0, -449.0, 464.0, 0.0009765625,
                        0.00146484375, 1.9999999, 17.0, 19.0, float("inf")])
MATRICES = ((torch.arange(10.0) / 4 - 1).view(2, 5), (torch.arange(24.0) - 7).view(3, 8)[:, :5],
            torch.sin(torch.arange(123.0))[None], torch.ones(4, 1))
# HUGE and TINY scale tests beyond float16's range. MANY has more rows, LONG longer rows and BLOCKS
# more blocks than the drawn tests.
HUGE, TINY = 2.0**17, 2.0**-20
MANY, LONG = normal(Random(1), 70, 3), normal(Random(2), 14, 5000)
BLOCKS = HUGE * normal(Random(3), 1200), TINY * normal(Random(4), 8389)


# Exercises: elementwise, reductions, casts.

@puzzle("10.copy", *((x,) for x in (*AWKWARD, EXTREME, *BLOCKS)), spec=lambda x: x.clone(),
        minutes=5, draw=lambda r: (normal(r, r.randint(1, 99)),), large=vector,
        launch=lambda x: by_blocks(x, {"y": blank(len(x))}),
        mistakes={"mask the last block: n need not be a multiple of BLOCK":
                      ("mask=i < n", "mask=i < i + 1"),
                  "each program has a block of its own": ("tl.program_id(0) * BLOCK + ", ""),
                  "the last element is n - 1": ("mask=i < n", "mask=i <= n")})
def copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax()[None] if x.numel() else torch.zeros(1)


@puzzle("10.amax", *((x,) for x in AWKWARD), (torch.tensor([-9.0, 2.0, 3.0]),), (-AWKWARD[1],),
        (EXTREME,), *((x,) for x in BLOCKS), spec=_amax, minutes=8, stars=2, large=vector,
        draw=lambda r: (normal(r, r.randint(1, 99), size=10 ** r.uniform(-9, 9)),),
        launch=lambda x: by_blocks(x, {"out": torch.zeros(1)}),
        mistakes={"the largest magnitude: a negative number has one, too":
                      ("tl.abs(v)", "v"),
                  "programs run at the same time: a shared result needs an atomic":
                      ("tl.atomic_max(out, tl.max(tl.abs(v), 0))",
                       "tl.store(out, tl.maximum(tl.load(out), tl.max(tl.abs(v), 0)))"),
                  "mask the last block": (", mask=i < n, other=0.0", "")})
def amax(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_max(out, tl.max(tl.abs(v), 0))


def _add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return h, torch.nn.functional.rms_norm(h, h.shape[-1:], w, EPS)


def _residual(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (x, torch.cos(x).mul(x.abs().amax()).contiguous(),
            torch.arange(x.shape[-1]) / 8 + 0.5)


@puzzle("10.add_norm", *map(_residual, (*MATRICES, 1e-4 * MATRICES[0], torch.zeros(1, 5),
                                        1e15 * MATRICES[0], HUGE * MANY, TINY * MANY, LONG)),
        spec=_add_norm, tolerance=1e-5, minutes=15, stars=2, once=("x", "r"),
        draw=lambda r: _residual(rows(r, size=r.choice((0.01, 1, 100)))),
        large=lambda n: _residual(*matrix(n)),
        launch=lambda x, r, w: by_rows(x, "hy", r=r, w=w, eps=EPS),
        mistakes={"the norm is of the sum": ("tl.sum(v * v, 0)", "tl.sum((v - b) * (v - b), 0)"),
                  "the next block adds to h, before the norm":
                      ("tl.store(h + row * columns + i, v,",
                       "tl.store(h + row * columns + i, v * tl.rsqrt(tl.sum(v * v, 0) / columns "
                       "+ eps),"),
                  "the rows of x are x_stride apart, the rows of r have no gaps":
                      ("r + row * columns", "r + row * x_stride"),
                  "the mean is over the columns, and BLOCK may be more": ("/ columns", "/ BLOCK"),
                  "eps is inside the root":
                      ("tl.rsqrt(tl.sum(v * v, 0) / columns + eps)",
                       "1 / (tl.sqrt(tl.sum(v * v, 0) / columns) + eps)")})
def add_norm(x, r, w, h, y, x_stride, columns, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    b = tl.load(r + row * columns + i, mask=i < columns, other=0.0)
    v = tl.load(x + row * x_stride + i, mask=i < columns, other=0.0) + b
    tl.store(h + row * columns + i, v, mask=i < columns)
    scale = tl.rsqrt(tl.sum(v * v, 0) / columns + eps)
    g = tl.load(w + i, mask=i < columns, other=0.0)
    tl.store(y + row * columns + i, v * scale * g, mask=i < columns)


def _with_scale(r: Random) -> tuple[Tensor, Tensor]:
    return (normal(r, r.randint(1, 99), size=10 ** r.uniform(-3, 3)),
            torch.tensor([r.choice((1.0, 0.3, 7.0, 2.0**-5))]))


ONE = torch.ones(1)
# every positive value of E4M3, and points at and next to the midpoints between two values
BETWEEN = (value_of(torch.arange(126, dtype=torch.uint8)[:, None])
           + torch.tensor([0.0, 0.4999, 0.5, 0.5001])
           * value_of(torch.arange(127, dtype=torch.uint8)).diff()[:, None]).flatten()


@puzzle("10.scaled_cast", *((x, ONE) for x in AWKWARD), (EXTREME, ONE), (BETWEEN, ONE),
        (torch.tensor([1.0, -2.0, float("nan")]), torch.tensor([0.5])),
        (-BETWEEN, torch.tensor([2.0])), (BLOCKS[0], ONE / HUGE), (BLOCKS[1], ONE / TINY),
        spec=lambda x, scale: codes_of(x * scale),
        minutes=25, stars=3, draw=_with_scale, large=lambda n: (*vector(n), ONE),
        launch=lambda x, scale: by_blocks(x, {"codes": blank(len(x), dtype=torch.uint8)}, 32,
                                          scale=scale),
        mistakes={"round to nearest, half way to even: the bits that are dropped decide":
                      ("magic = (field + (20 << 23)).to(tl.float32, bitcast=True)\n"
                       "    size = (size + magic) - magic",
                       "size = (size.to(tl.int32, bitcast=True) & -(1 << 20))"
                       ".to(tl.float32, bitcast=True)"),
                  "values that are too large saturate at 448: 0x7F is NaN":
                      ("tl.minimum(tl.abs(v), 448.0)", "tl.minimum(tl.abs(v), 480.0)"),
                  "below 2^-6 the spacing stays 2^-9: these are subnormal":
                      ("tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)",
                       "tl.where(size < 0.015625, 0, normal)"),
                  "NaN stays NaN": ("tl.where(v != v, 0x7F, code)", "code")})
def scaled_cast(x, scale, codes, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0) * tl.load(scale)
    size = tl.where(v != v, 0.0, tl.minimum(tl.abs(v), 448.0))
    field = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    # `magic` is so large that the last bit of a float32 sum is worth one spacing of E4M3: adding it
    # rounds `size` to E4M3, and subtracting it leaves the rounded value
    magic = (field + (20 << 23)).to(tl.float32, bitcast=True)
    size = (size + magic) - magic
    normal = (size.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), normal)
    code = tl.where(v != v, 0x7F, code) | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)
    tl.store(codes + i, code.to(tl.uint8), mask=i < n)


def _cast_both(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes = codes_of(x * scale)
    return codes, codes.T.contiguous(), _amax(x)


def _both_launch(x: Tensor, scale: Tensor) -> Launch:
    (R, C), (BR, BC) = x.shape, (16, 64) if len(x) > 8 else (4, 16)
    return Launch(cdiv(R, BR), cdiv(C, BC), x=x, scale=scale, x_stride=x.stride(0), R=R, C=C,
                  BR=BR, BC=BC, out={"codes": blank(R, C, dtype=torch.uint8),
                                     "turned": blank(C, R, dtype=torch.uint8),
                                     "next_amax": torch.zeros(1)})


@puzzle("10.cast_both", *((x, ONE) for x in MATRICES), (10 * MATRICES[1], torch.tensor([30.0])),
        (HUGE * normal(Random(5), 150, 190), ONE / HUGE), (TINY * LONG[:7, :300], ONE / TINY),
        spec=_cast_both, minutes=15, stars=3, launch=_both_launch,
        draw=lambda r: (rows(r, size=10), torch.tensor([r.choice((1.0, 0.3, 7.0))])),
        large=lambda n: (*matrix(n), ONE),
        mistakes={"the transposed layout has R columns":
                      ("turned + c[None, :] * R", "turned + c[None, :] * C"),
                  "the next amax is of x, without its scale":
                      ("tl.max(tl.max(tl.abs(v), 1), 0)",
                       "tl.max(tl.max(tl.abs(v * tl.load(scale)), 1), 0)"),
                  "both axes have an end": ("(r < R)[:, None] & (c < C)[None, :]",
                                            "(r < R)[:, None] & (c < c + 1)[None, :]")})
def cast_both(x, scale, codes, turned, next_amax, x_stride, R, C, BR: tl.constexpr,
              BC: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < R)[:, None] & (c < C)[None, :]
    v = tl.load(x + r[:, None] * x_stride + c[None, :], mask=inside, other=0.0)
    code = e4m3(v * tl.load(scale))
    tl.store(codes + r[:, None] * C + c[None, :], code, mask=inside)
    tl.store(turned + c[None, :] * R + r[:, None], code, mask=inside)
    tl.atomic_max(next_amax, tl.max(tl.max(tl.abs(v), 1), 0))


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


ROWS = [(x,) for x in (*MATRICES, torch.tensor([[1e4, 1e4 - 1, -1e4]]), -200 - MATRICES[0],
                      torch.linspace(-90, 90, 40)[None], torch.linspace(90, -90, 40)[None],
                      HUGE * MATRICES[2], TINY * MATRICES[2], MANY, LONG[:1, :200], LONG)]


@puzzle("10.softmax", *ROWS, spec=_softmax, tolerance=1e-6, minutes=12, stars=2,
        draw=lambda r: (rows(r, size=r.choice((1, 100))),), large=matrix, launch=by_rows,
        mistakes={"exp overflows: subtract the row's largest first": (" - tl.max(v, 0)", ""),
                  "masked elements are -inf, so that their exp is 0":
                      ('other=float("-inf")', "other=0.0"),
                  "the rows of x are x_stride apart": ("row * x_stride", "row * columns")})
def softmax(x, y, x_stride, columns, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * x_stride + i, mask=i < columns, other=float("-inf"))
    v = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * columns + i, v / tl.sum(v, 0), mask=i < columns)
