"""The exercises of the course that are Triton kernels: elementwise, reductions and casts for
notebook 10, what stands around a product in 8 or 4 bits for notebook 11.

Each definition takes a case and says what is right; the kernel under it is a solution. Kernels get
float32 and whole numbers alone, and write FP8, FP4 and bf16 as the integers that these are:
Triton's interpreter is right for those. Names that a kernel uses are those of its own process
(`lpkit.course.kernel_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpkit.course.puzzles import Launch, Puzzle, blank
from lpkit.course.tensor_exercises import FP8, LARGEST, normal

if TYPE_CHECKING:
    import triton.language as tl

    from lpkit.course.kernel_parts import e2m1, e4m3, e4m3_value

PUZZLES: dict[str, Puzzle] = {}
EPS = 1e-6


def puzzle(name: str, *cases: tuple, **more: Any) -> Callable[[Callable], Callable]:
    def add(kernel: Callable) -> Callable:
        PUZZLES[name] = Puzzle(name=name, cases=cases, kernel=kernel, **more)
        return kernel

    return add


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def block(n: int, small: int = 16) -> int:
    """Several for a small n, which the interpreter runs; a GPU's for a large one."""
    return 1024 if n >= 1 << 16 else 4 * small if n >= 1 << 12 else small


def by_blocks(x: Tensor, out: Mapping[str, Tensor], small: int = 16, **given: Tensor) -> Launch:
    """A program for each block of a vector."""
    B = block(len(x), small)
    return Launch(cdiv(len(x), B), out=out, x=x, **given, n=len(x), BLOCK=B)


def by_rows(x: Tensor, out: str = "y", **more: Any) -> Launch:
    """A program for each row, which fits into one block; results, a letter each, are like x."""
    R, C = x.shape
    return Launch(R, out={name: blank(R, C) for name in out}, x=x, x_stride=x.stride(0), columns=C,
                  **{"BLOCK": max(2, 1 << (C - 1).bit_length()), **more})


def by_scales(x: Tensor, block: int, scales: torch.dtype = torch.uint8, in_byte: int = 1,
              **more: Any) -> Launch:
    """A program for each block of a row, which shares a scale."""
    R, C = x.shape
    return Launch(R, cdiv(C, block), out={"codes": blank(R, C // in_byte, dtype=torch.uint8),
                                          "scales": blank(R, -(-C // block), dtype=scales)},
                  x=x, x_stride=x.stride(0), columns=C, **more)


def rows(r: Random, *, most: int = 40, size: float = 1.0) -> Tensor:
    """A matrix, some with rows further apart than they are long."""
    return normal(r, r.randint(1, 5), r.randint(1, most), size=size)


def vector(n: int) -> tuple[Tensor]:
    return (torch.randn(n),)


def matrix(n: int) -> tuple[Tensor]:
    return (torch.randn(-(-n // 4096), 4096),)


def codes_of(x: Tensor) -> Tensor:
    """E4M3, saturating, as uint8."""
    return x.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)


def value_of(codes: Tensor) -> Tensor:
    return codes.view(FP8).float()


AWKWARD = tuple(torch.arange(n) / 4 - 3 for n in (5, 123, 1))
EXTREME = torch.tensor([0.0, -0.0, 3.4e38, -3.4e38, 1e-38, 448.0, -449.0, 464.0, 0.0009765625,
                        0.00146484375, 1.9999999, 17.0, 19.0, float("inf")])
MATRICES = ((torch.arange(10.0) / 4 - 1).view(2, 5), (torch.arange(24.0) - 7).view(3, 8)[:, :5],
            torch.sin(torch.arange(123.0))[None], torch.ones(4, 1))
# beyond float16 and below; more rows, longer rows and more blocks than are usually tried by hand
HUGE, TINY = 2.0**17, 2.0**-20
MANY, LONG = normal(Random(1), 70, 3), normal(Random(2), 14, 5000)
BLOCKS = HUGE * normal(Random(3), 1200), TINY * normal(Random(4), 8389)


# 10, custom kernels: elementwise, reductions, casts.

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
                  "programs run at the same time: what they share takes an atomic":
                      ("tl.atomic_max(out, tl.max(tl.abs(v), 0))",
                       "tl.store(out, tl.maximum(tl.load(out), tl.max(tl.abs(v), 0)))"),
                  "mask the last block": (", mask=i < n, other=0.0", "")})
def amax(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_max(out, tl.max(tl.abs(v), 0))


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


ROWS = [(x,) for x in (*MATRICES, torch.tensor([[1e4, 1e4 - 1, -1e4]]), -200 - MATRICES[0],
                      torch.linspace(-90, 90, 40)[None], torch.linspace(90, -90, 40)[None],
                      HUGE * MATRICES[2], TINY * MATRICES[2], MANY, LONG[:1, :200], LONG)]


@puzzle("10.softmax", *ROWS, spec=_softmax, tolerance=1e-6, minutes=12, stars=2,
        draw=lambda r: (rows(r, size=r.choice((1, 100))),), large=matrix, launch=by_rows,
        mistakes={"exp overflows: take the row's largest away first": (" - tl.max(v, 0)", ""),
                  "what lies outside is -inf, so that its exp is nothing":
                      ('other=float("-inf")', "other=0.0"),
                  "the rows of x lie x_stride apart": ("row * x_stride", "row * columns")})
def softmax(x, y, x_stride, columns, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * x_stride + i, mask=i < columns, other=float("-inf"))
    v = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * columns + i, v / tl.sum(v, 0), mask=i < columns)


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS)


def _with_weights(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.arange(x.shape[-1]) / 8 + 0.5


@puzzle("10.rms_norm", *map(_with_weights, (*MATRICES, 1e-4 * MATRICES[0], torch.zeros(1, 5),
                                            1e15 * MATRICES[0], HUGE * MANY, TINY * MANY, LONG)),
        spec=_rms_norm, tolerance=1e-5, minutes=10, stars=2,
        draw=lambda r: _with_weights(rows(r, size=r.choice((0.01, 1, 100)))),
        large=lambda n: _with_weights(*matrix(n)),
        launch=lambda x, w: by_rows(x, w=w, eps=EPS),
        mistakes={"the mean is over the columns, and BLOCK may be more": ("/ columns", "/ BLOCK"),
                  "eps stands inside of the root":
                      ("tl.rsqrt(tl.sum(v * v, 0) / columns + eps)",
                       "1 / (tl.sqrt(tl.sum(v * v, 0) / columns) + eps)"),
                  "RMSNorm takes no mean away":
                      ("    scale", "    v = tl.where(i < columns, v - tl.sum(v, 0) / columns, "
                                    "0.0)\n    scale")})
def rms_norm(x, w, y, x_stride, columns, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * x_stride + i, mask=i < columns, other=0.0)
    scale = tl.rsqrt(tl.sum(v * v, 0) / columns + eps)
    g = tl.load(w + i, mask=i < columns, other=0.0)
    tl.store(y + row * columns + i, v * scale * g, mask=i < columns)


def _add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return h, _rms_norm(h, w)


def _residual(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, torch.cos(x).mul(x.abs().amax()).contiguous(), _with_weights(x)[1]


@puzzle("10.add_norm", *map(_residual, (*MATRICES, 1e-4 * MATRICES[0], HUGE * MANY, LONG)),
        spec=_add_norm, tolerance=1e-5, minutes=10, stars=2, once=("x", "r"),
        draw=lambda r: _residual(rows(r, size=r.choice((0.01, 1, 100)))),
        large=lambda n: _residual(*matrix(n)),
        launch=lambda x, r, w: by_rows(x, "hy", r=r, w=w, eps=EPS),
        mistakes={"the norm is of the sum": ("tl.sum(v * v, 0)", "tl.sum((v - b) * (v - b), 0)"),
                  "the next block adds to h, which has no norm yet":
                      ("tl.store(h + row * columns + i, v,",
                       "tl.store(h + row * columns + i, v * tl.rsqrt(tl.sum(v * v, 0) / columns "
                       "+ eps),"),
                  "r lies without gaps, x does not":
                      ("r + row * columns", "r + row * x_stride")})
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
# every value of E4M3, what lies half way between two, and a little beside that
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
        mistakes={"to the nearest, half way to the even one: the bits that go decide":
                      ("magic = (field + (20 << 23)).to(tl.float32, bitcast=True)\n"
                       "    size = (size + magic) - magic",
                       "size = (size.to(tl.int32, bitcast=True) & -(1 << 20))"
                       ".to(tl.float32, bitcast=True)"),
                  "what is too large saturates at 448: 0x7F is NaN":
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
    # a number so large that the sum's last bit is the spacing: the addition rounds
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
        mistakes={"the turned one has R columns":
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


# 11, FP8 products: what stands before, in and behind them.

def _few_bits(r: Random, *shape: int, most: int = 16) -> Tensor:
    """Multiples of 4 / most in [-4, 4]: TF32 holds them (with 512 bf16 does not), and sums of their
    products are exact in any order."""
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
                  "what lies outside of K is 0 in both factors":
                      ("mask=(m < M)[:, None] & (k + j < K)[None, :]",
                       "mask=(m < M)[:, None] & (k + j < k + j + 1)[None, :]"),
                  "add to what is there": ("total += ", "total = ")})
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


def _parts(x: Tensor, block: int) -> Tensor:
    """(rows, blocks, block), the last filled up with zeros."""
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
                  "the scale is what the codes are multiplied by afterwards":
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
        mistakes={"the exponent of E4M3's largest value, 8, is taken off": ("- 8, 0)", "- 0, 0)"),
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
    """The nearest, half way to the even code."""
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
        mistakes={"elements are divided by the scale as it is stored, in E4M3":
                      ("e4m3_value(s) * tl.load(top)", "tl.div_rn(most, 6.0)"),
                  "the even one of two elements stands in the lower four bits":
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


def _thrown(r: Random, x: Tensor) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(r.getrandbits(32))
    return x, torch.randint(1 << 16, (len(x),), generator=chance, dtype=torch.int32)


@puzzle("11.stochastic", *(_thrown(Random(n), x) for n, x in enumerate((*AWKWARD, EXTREME[4:]))),
        (torch.tensor([1.001953125] * 4), torch.tensor([0, 49_151, 49_152, 65_535]).int()),
        (torch.tensor([float("inf"), float("-inf"), 2.0]), torch.tensor([65_535] * 3).int()),
        *(_thrown(Random(9), x) for x in BLOCKS),
        spec=lambda x, dice: ((x.view(torch.int32) + dice) >> 16).to(torch.int16),
        minutes=10, stars=2, once=("x", "dice"),
        draw=lambda r: _thrown(r, normal(r, r.randint(1, 99), size=10 ** r.uniform(-9, 9))),
        launch=lambda x, dice: by_blocks(x, {"y": blank(len(x), dtype=torch.int16)}, 32,
                                         dice=dice),
        mistakes={"that is the nearest: the dice decide": ("bits + throw", "bits + 0x8000"),
                  "that cuts: add the dice to the bits that go": ("bits + throw", "bits"),
                  "the sign is a bit of its own: adding to the others always leads away from zero":
                      ("bits + throw", "bits + tl.where(bits < 0, -throw, throw)")})
def stochastic(x, dice, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    throw = tl.load(dice + i, mask=i < n, other=0)
    bits = v.to(tl.int32, bitcast=True)
    tl.store(y + i, ((bits + throw) >> 16).to(tl.int16), mask=i < n)


def _dequant_matmul(a: Tensor, codes: Tensor, scales: Tensor, block: int) -> Tensor:
    wide = scales.repeat_interleave(block, 1)[:, :codes.shape[1]]
    return a @ (value_of(codes) * wide).T


def _few_codes(r: Random, N: int, K: int) -> Tensor:
    """Of numbers with few bits, so that sums are exact in any order."""
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
        mistakes={"each block along K has a scale of its own":
                      ("s = tl.load(scales + n * tl.cdiv(K, B) + k // B",
                       "s = tl.load(scales + n * tl.cdiv(K, B)"),
                  "a code is no number yet": ("e4m3_value(w)", "w.to(tl.float32)"),
                  "codes are (N, K), so the product takes them turned":
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
        mistakes={"when the largest grows, what was added so far shrinks":
                      ("total * tl.exp(most - new)", "total"),
                  "the largest of all blocks, not of the last":
                      ("tl.maximum(most, tl.max(v, 0))", "tl.max(v, 0)"),
                  "what lies outside is -inf":
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
