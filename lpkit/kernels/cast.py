"""Quantise and dequantise on low-precision grids: a fast C kernel, and its definition in PyTorch.

    amax(x, block=None)             -> Amax(values, nonfinite)            largest magnitudes, one
                                    pass
    qdq(x, fmt, scale, block=None)  -> Tensor                             round(x / scale) * scale
    mx(x, fmt, rule="floor")        -> Blocks(values, scales, nonfinite)  32 share a power of two

How a cast is fast. Add a number so large that the last bit of the sum is the grid's spacing, and
take it away again: the addition's own rounding to nearest-even is the rounding, for every format at
once and without a branch. `_round` is that in PyTorch, `rounded` in cast.c the same in C.

`fmt` is a `lpkit.precision.formats.Format`: any with a sign and at most 8 bits. x is float32 or
bf16, of any shape and strides (a view that is not contiguous is copied first; `qdq` with one scale
keeps a transposed view's order instead). x counts as a matrix (R, C): the last axis, and the
others. `block=(r, c)` says which elements share a scale or an amax; 0 stands for the whole axis, so
(1, 0) is per row and None the whole tensor. Values come in `dtype`: None for x's own, float32,
bf16, or torch.uint8 for the bit patterns before rescaling.

Rounding is to nearest-even and saturates. With `noise=Noise(seed=..., counter=...)` it is
stochastic, from a generator that is a pure function of seed and element: advance the counter by
x.numel() and a run can be repeated and resumed. NaN stays NaN, with any payload. Bit patterns
of a format without NaN have none, so look at `nonfinite`, which counts what is not finite (elements
for amax, blocks for mx; a 0-dim int64 tensor).

Each function checks its arguments and calls an operator (`lpkit.kernels.operator`), so fake tensors
and torch.compile see one operation. Its kernel is C, compiled on first use (`compile_c`); without a
compiler it is the definition. On other devices the definition runs instead of the operator, so that
torch.compile can fuse it. `choice()` says which it is here and why. Nothing here is differentiable.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lpkit.errors import ConfigError, pick
from lpkit.kernels import compile_c
from lpkit.kernels.operator import operator

if TYPE_CHECKING:
    from lpkit.contracts import Choice

MX_BLOCK = 32
MAX_BLOCK = 2048    # elements: a tile of the C kernel


class Grid(Protocol):
    """What a cast needs to know of a number format."""

    mantissa_bits: int
    min_exponent: int
    bias: int
    bits: int
    nan: int | None
    has_negative_zero: bool
    lowest: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Stochastic rounding: element i of the tensor uses number `counter + i` of the stream `seed`.

    24 random bits decide, so the chance to round up is right to 2^-25.
    """

    seed: int
    counter: int = 0

    @property
    def words(self) -> tuple[int, int, int]:
        """The counter, and the seed spread over two words of 32 bits (splitmix64)."""
        z = (self.seed + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        z ^= z >> 31
        return self.counter, z & 0xFFFFFFFF, z >> 32


class Amax(NamedTuple):
    values: Tensor      # float32: 0-dim, or (R / r, C / c); not finite where the block is not
    nonfinite: Tensor


class Blocks(NamedTuple):
    values: Tensor      # like x, or its bit patterns
    scales: Tensor      # uint8, an E8M0 code for each block along the last axis
    nonfinite: Tensor


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How an amax becomes a power of two. `divide`: by the largest value, else by its power of two.

    added_bits: to the bits of the float32 before its mantissa is cut; None: half an element's last.
    """

    divide: bool
    added_bits: int | None
    source: str


SCALE_RULES: dict[str, ScaleRule] = {
    "floor": ScaleRule(divide=False, added_bits=0,
                       source="OCP MX Specification 1.0, section 6.3; the largest may saturate"),
    "ceil": ScaleRule(divide=False, added_bits=0x7FFFFF,
                      source="up whenever the mantissa is not zero: never saturates"),
    "even": ScaleRule(divide=False, added_bits=None,
                      source="the amax is rounded to the element's mantissa first"),
    "rceil": ScaleRule(divide=True, added_bits=0x7FFFFF,
                       source="cuBLAS, 1D block scaling: up from amax / largest; "
                              "https://docs.nvidia.com/cuda/cublas"),
}


def choice() -> Choice:
    """Which implementation runs on CPU tensors here, and why. Compiles on first use."""
    return compile_c.choice("cast")


# ---- public operations ---------------------------------------------------------------------------

def amax(x: Tensor, block: tuple[int, int] | None = None) -> Amax:
    """Largest magnitudes. Raises ConfigError when the blocks do not tile."""
    x = _matrix(x)
    r, c = _block(x, block)
    run = _amax if x.device.type == "cpu" else reference_amax
    values, nonfinite = run(x, r, c)
    return Amax(values if block else values.reshape(()), nonfinite)


def qdq(x: Tensor, fmt: Grid, scale: Tensor | float | None = None, *,
        block: tuple[int, int] | None = None, rescale: bool = True,
        dtype: torch.dtype | None = None, noise: Noise | None = None,
        out: Tensor | None = None) -> Tensor:
    """round(x / scale) on the grid of `fmt`, times the scale again unless `rescale` is False.

    scale: one positive number or 0-dim tensor; with `block`, float32 (R / r, C / c). A scale of 0
    makes NaN of zeros. `out` is written to when given: it has the shape and dtype of the result and
    is contiguous. Returns a tensor like x. Raises ConfigError.
    """
    dtype = _check(x, fmt, dtype)
    if block is None and out is None and noise is None and not x.is_contiguous():
        order = sorted(range(x.ndim), key=x.stride, reverse=True)
        dense = x.permute(order)
        if dense.is_contiguous():   # a transposed view: one scale serves any order of the elements
            back = sorted(range(x.ndim), key=order.__getitem__)
            return qdq(dense, fmt, scale, rescale=rescale, dtype=dtype).permute(back)
    matrix = _matrix(x)
    block = _block(matrix, block)
    scales = _scales(1.0 if scale is None else scale, matrix, block)
    how = (*_numbers(fmt), noise and noise.words)
    on_cpu = x.device.type == "cpu"
    if out is not None:
        _check_out(x, out, dtype)
    if on_cpu and out is not None:
        _qdq_into(matrix, scales, block, rescale, *how, out)
        return out
    values = (_qdq if on_cpu else reference)(matrix, scales, block, rescale, *how, dtype)
    values = values if x.ndim == 2 else values.view(x.shape)
    return values if out is None else out.copy_(values)


def mx(x: Tensor, fmt: Grid, *, rule: str = "floor", dtype: torch.dtype | None = None,
       noise: Noise | None = None, block: int = MX_BLOCK, out: Tensor | None = None) -> Blocks:
    """Blocks of `block` elements along the last axis share a power of two (E8M0, in `scales`).

    As torchao's to_mx and to_dtype, bit for bit, but for blocks whose amax is below 2^-110 (there
    torchao quantises with one scale and dequantises with another) and for "rceil" within rounding
    of a power of two (there its logarithm, in float32, misses; this is the hardware's rule). A
    block with a NaN becomes NaN; an infinity saturates.
    """
    how, dtype = pick(SCALE_RULES, rule, "rule of the scale"), _check(x, fmt, dtype)
    matrix = _matrix(x)
    _block(matrix, (1, block))
    if block > MAX_BLOCK:
        raise ConfigError(f"a block of {block} is larger than {MAX_BLOCK}; hardware knows 32")
    added = how.added_bits
    if added is None:
        added = 1 << (22 - fmt.mantissa_bits)
    if how.divide:
        divisor, exponent = fmt.largest, 0
    else:
        divisor, exponent = 1.0, math.frexp(fmt.largest)[1] - 1     # its mantissa is in [1/2, 1)
    arguments = (matrix, block, divisor, added, exponent, *_numbers(fmt), noise and noise.words)
    on_cpu = x.device.type == "cpu"
    if out is not None:
        _check_out(x, out, dtype)
    if on_cpu and out is not None:
        values, (scales, nonfinite) = out, _mx_into(*arguments, out)
    else:
        values, scales, nonfinite = (_mx if on_cpu else reference_mx)(*arguments, dtype)
        if x.ndim != 2:
            values = values.view(x.shape)
        if out is not None:
            values = out.copy_(values)
    return Blocks(values, scales if x.ndim == 2 else scales.view(*x.shape[:-1], -1), nonfinite)


# ---- the definition, in PyTorch, on any device ---------------------------------------------------
#
# Arguments are those of the operators: x is a matrix (R, C), a format is two lists of `_Grid`'s
# fields, noise is `Noise.words`.

def reference_amax(x: Tensor, r: int, c: int) -> tuple[Tensor, Tensor]:
    tiles = x.view(x.shape[0] // r, r, x.shape[1] // c, c)
    return tiles.abs().amax((1, 3)).float(), (~x.isfinite()).sum()


def reference(x: Tensor, scales: Tensor, block: Sequence[int], rescale: bool, grid: Sequence[int],
              limits: Sequence[float], noise: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """`qdq` of a matrix (R, C) with scales (R / r, C / c)."""
    grid = GridNumbers(*grid, *limits)
    wide = _spread(scales, block)
    y = _round(x.float() / wide, grid, noise)
    if dtype == torch.uint8:
        return _codes(y, grid)
    return (y * wide if rescale else y).to(dtype)


def reference_mx(x: Tensor, block: int, divisor: float, added: int, exponent: int,
                 grid: Sequence[int], limits: Sequence[float], noise: Sequence[int] | None,
                 dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    grid = GridNumbers(*grid, *limits)
    rows = x.view(-1, block)
    top = rows.abs().amax(-1, keepdim=True).float()
    code = (((top / divisor).view(torch.int32) + added) >> 23) - exponent
    code = torch.where(top.isnan(), 255, code.clamp(0, 254))
    y = _round(rows.float() * _power(254 - code), grid, noise)
    if dtype == torch.uint8:
        values = _codes(y, grid)
    else:
        values = (y * torch.where(code == 255, torch.nan, _power(code))).to(dtype)
    return (values.view(x.shape), code.to(torch.uint8).view(len(x), -1), (~top.isfinite()).sum())


def _power(code: Tensor) -> Tensor:
    """2^(code - 127) for codes from 0; at 0 float32 is subnormal."""
    return torch.where(code > 0, code << 23, 1 << 22).int().view(torch.float32)


def _round(y: Tensor, grid: Grid, noise: Sequence[int] | None) -> Tensor:
    """float32 on the grid, saturating; see the top of this file."""
    y = y.clamp(grid.lowest, grid.largest)
    size = y.abs()
    exponent = (size.view(torch.int32) & 0x7F800000).clamp(min=(grid.min_exponent + 127) << 23)
    if noise is None:
        magic = (exponent + ((23 - grid.mantissa_bits) << 23)).view(torch.float32)
        size = torch.where(y.isnan(), y, (size + magic) - magic)
    else:
        step = (exponent - (grid.mantissa_bits << 23)).view(torch.float32)
        q = size / step
        down = q.floor()
        size = torch.where(y.isnan(), y, (down + (_uniform(y, noise) < q - down)) * step)
    size = size.copysign(y)
    return size if grid.has_negative_zero else size + 0.0


def _uniform(like: Tensor, noise: Sequence[int]) -> Tensor:
    """Numbers in (0, 1), multiples of 2^-25, one for each element; float32."""
    word, (counter, k0, k1) = 0xFFFFFFFF, noise
    i = torch.arange(counter, counter + like.numel(), device=like.device).view(like.shape)
    high = i >> 32
    h = ((i & word) * 0x9E3779B1 + k0 + high * 0x85EBCA6B) & word
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & word
    h = ((h ^ (h >> 15)) * 0x846CA68B) & word
    h = ((h ^ (h >> 16)) + (k1 ^ high)) & word
    h = (h * 0x7FEB352D) & word
    return (((h ^ (h >> 15)) >> 8).float() + 0.5) * 2.0**-24


def _codes(y: Tensor, grid: Grid) -> Tensor:
    """Bit patterns of values on the grid, uint8."""
    size, m = y.abs(), grid.mantissa_bits
    normal = (size.view(torch.int32) >> (23 - m)) - ((127 - grid.bias) << m)
    subnormal = (size * 2.0**(m - grid.min_exponent)).int()
    code = torch.where(size < 2.0**grid.min_exponent, subnormal, normal)
    code = torch.where(y.isnan(), grid.nan, code)
    if grid.has_negative_zero:
        return (code | (torch.signbit(y).int() << (grid.bits - 1))).to(torch.uint8)
    return (torch.where(y < 0, -code, code) & ((1 << grid.bits) - 1)).to(torch.uint8)


def _spread(scales: Tensor, block: Sequence[int]) -> Tensor:
    """One scale an element, or what broadcasts to it."""
    if scales.numel() == 1:
        return scales
    r, c = block
    scales = scales if scales.shape[1] == 1 else scales.repeat_interleave(c, 1)
    return scales if r == 1 else scales.repeat_interleave(r, 0)


# ---- checks --------------------------------------------------------------------------------------

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}      # as cast.c numbers them
_INPUTS = (torch.float32, torch.bfloat16)
_PLAIN = (FakeTensor, FunctionalTensor)     # wrappers that PyTorch unwraps before a kernel runs


def _check(x: Tensor, fmt: Grid, dtype: torch.dtype | None) -> torch.dtype:
    _check_input(x)
    if not fmt.signed or fmt.bits > 8:
        raise ConfigError(f"{fmt.name} is no format to cast to here; use one with a sign and at "
                          f"most 8 bits, or lpkit.precision.formats.round_to")
    dtype = dtype or x.dtype
    if dtype not in _KINDS:
        raise ConfigError(f"a cast returns {', '.join(map(str, _KINDS))}, not {dtype}")
    return dtype


def _check_plain(x: Tensor) -> None:
    """A wrapper such as DTensor has no memory of its own."""
    # what is traced has been checked, and may not be asked for its layout
    if torch.compiler.is_compiling():
        return
    if type(x) is Tensor and x.layout is torch.strided and not x.is_nested:     # nearly always
        return
    kind = type(x).__name__
    if not isinstance(x, Tensor):
        raise ConfigError(f"a cast takes a tensor, got a {kind}; make one with torch.as_tensor")
    if not isinstance(x, _PLAIN) and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ConfigError(f"a cast reads a tensor's memory, and a {kind} wraps other tensors; "
                          f"cast those, for example x.to_local() of a DTensor")
    if x.layout is not torch.strided or x.is_nested:
        raise ConfigError(f"a cast takes a dense tensor, got {x.layout}, nested: {x.is_nested}; "
                          f"call .to_dense() or .values() on it")


def _check_input(x: Tensor) -> None:
    _check_plain(x)
    if x.dtype not in _INPUTS:
        raise ConfigError(f"a cast takes float32 or bfloat16, got {x.dtype}; call .float() on it")


def _check_out(x: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    _check_plain(out)
    if (out.shape, out.dtype, out.device) != (x.shape, dtype, x.device) or not out.is_contiguous():
        raise ConfigError(f"out must be contiguous, {tuple(x.shape)}, {dtype} and on {x.device}, "
                          f"got {tuple(out.shape)}, {out.dtype} on {out.device}")


def _matrix(x: Tensor) -> Tensor:
    """(R, C), contiguous."""
    _check_input(x)
    if not x.numel():
        raise ConfigError(f"a tensor of shape {tuple(x.shape)} has nothing to cast")
    x = (x.detach() if x.requires_grad else x).contiguous()
    return x if x.ndim == 2 else x.view(-1, x.shape[-1] if x.ndim else 1)


def _block(x: Tensor, block: tuple[int, int] | None) -> tuple[int, int]:
    sizes = tuple(size or whole for size, whole in zip(block or (0, 0), x.shape))
    for size, whole, axis in zip(sizes, x.shape, ("the rows", "the last axis")):
        if whole % size:
            raise ConfigError(f"blocks of {size} do not tile {axis} of {whole}; "
                              f"pad to {-(-whole // size) * size}")
    return sizes


def _scales(scale: Tensor | float, x: Tensor, block: tuple[int, int]) -> Tensor:
    shape = (x.shape[0] // block[0], x.shape[1] // block[1])
    if not isinstance(scale, Tensor):
        return x.new_full(shape, scale, dtype=torch.float32)
    _check_plain(scale)
    scale = scale.detach().to(x.device, torch.float32).contiguous()
    if scale.numel() != shape[0] * shape[1]:
        raise ConfigError(f"{shape[0]} x {shape[1]} blocks need as many scales, "
                          f"got {tuple(scale.shape)}")
    return scale.view(shape)


# ---- the operators: C, or the definition where C did not compile ---------------------------------

class GridNumbers(NamedTuple):
    """A format as the operators and C take it: PyTorch's schemas have numbers, and no objects."""

    mantissa_bits: int
    min_exponent: int
    bias: int
    bits: int
    nan: int
    has_negative_zero: int
    lowest: float
    largest: float


class _Grid(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int32) for name in GridNumbers._fields[:6]),
                *((name, ctypes.c_float) for name in GridNumbers._fields[6:])]


class _Noise(ctypes.Structure):
    _fields_ = [("counter", ctypes.c_uint64), ("k0", ctypes.c_uint32), ("k1", ctypes.c_uint32)]


def _numbers(fmt: Grid) -> tuple[tuple[int, ...], tuple[float, float]]:
    return ((fmt.mantissa_bits, fmt.min_exponent, fmt.bias, fmt.bits, fmt.nan or 0,
             int(fmt.has_negative_zero)), (fmt.lowest, fmt.largest))


_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
_GRID, _NOISE = ctypes.POINTER(_Grid), ctypes.POINTER(_Noise)
_ARGUMENTS = {      # as cast.c declares them
    "lp_amax": (_P, _I, _L, _L, _L, _L, _P, _P, _I),
    "lp_qdq": (_P, _I, _P, _I, _L, _L, _L, _L, _P, _I, _GRID, _NOISE, _I),
    "lp_mx": (_P, _I, _P, _I, _L, _L, _P, _F, _I, _I, _GRID, _NOISE, _P, _I),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = compile_c.load("cast")
    for name, arguments in _ARGUMENTS.items() if library else ():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


# The functions above have checked their arguments. `torch.ops.lpkit` is open to everybody, and a
# tensor may have lost its storage (FSDP frees it), so here is a last look: C does not take another.

def _address(x: Tensor, count: int, dtypes: Iterable[torch.dtype]) -> int:
    """Where C finds `count` elements of x."""
    address = x.data_ptr()
    if not address or x.numel() != count or x.dtype not in dtypes or not x.is_contiguous():
        raise TypeError(f"a cast needs {count} elements that lie together in memory, got "
                        f"{x.dtype}, {tuple(x.shape)} with strides {x.stride()}, storage of "
                        f"{x.untyped_storage().nbytes()} bytes; call lpkit.kernels.cast")
    return address


def _count(x: Tensor, r: int, c: int) -> int:
    """How many blocks (r, c) x has."""
    R, C = x.shape
    if r < 1 or c < 1 or R % r or C % c:
        raise TypeError(f"blocks of {r} x {c} do not tile {R} x {C}; call lpkit.kernels.cast")
    return R // r * (C // c)


_HOW = "int[] grid, float[] limits, int[]? noise"


@operator("amax(Tensor x, SymInt r, SymInt c) -> (Tensor, Tensor)",
          fake=lambda x, r, c: (x.new_empty(x.shape[0] // r, x.shape[1] // c, dtype=torch.float32),
                                x.new_empty((), dtype=torch.int64)))
def _amax(x: Tensor, r: int, c: int) -> tuple[Tensor, Tensor]:
    library, (R, C) = _library(), x.shape
    if library is None:
        return reference_amax(x, r, c)
    _count(x, r, c)
    values = torch.empty(R // r, C // c)
    nonfinite = torch.empty((), dtype=torch.int64)
    library.lp_amax(_address(x, R * C, _INPUTS), _KINDS[x.dtype], R, C, r, c, values.data_ptr(),
                    nonfinite.data_ptr(), torch.get_num_threads())
    return values, nonfinite


def _run_qdq(x: Tensor, scales: Tensor, block: Sequence[int], rescale: bool, grid: Sequence[int],
             limits: Sequence[float], noise: Sequence[int] | None, out: Tensor) -> None:
    library = _library()
    if library is None:
        values = reference(x, scales, block, rescale, grid, limits, noise, out.dtype)
        out.copy_(values.view(out.shape))
        return
    (R, C), (r, c), size = x.shape, block, x.numel()
    scales_at = _address(scales, _count(x, r, c), (torch.float32,))
    if scales.numel() == 1:     # the shape does not matter, and threads like equal pieces
        R, C, r, c = 1, size, 1, size
    library.lp_qdq(_address(x, size, _INPUTS), _KINDS[x.dtype],
                   _address(out, size, _KINDS), _KINDS[out.dtype],
                   R, C, r, c, scales_at, int(rescale),
                   _Grid(*grid, *limits), noise and _Noise(*noise), torch.get_num_threads())


_SCALED = "Tensor scales, SymInt[] block, bool rescale"


@operator(f"qdq(Tensor x, {_SCALED}, {_HOW}, ScalarType dtype) -> Tensor",
          fake=lambda x, *how: torch.empty_like(x, dtype=how[-1]))
def _qdq(x: Tensor, *how) -> Tensor:
    *how, dtype = how
    out = torch.empty(x.shape, dtype=dtype)
    _run_qdq(x, *how, out)
    return out


_qdq_into = operator(f"qdq_into(Tensor x, {_SCALED}, {_HOW}, Tensor(a!) out) -> ()",
                     fake=lambda *_: None)(_run_qdq)


def _run_mx(x: Tensor, block: int, divisor: float, added: int, exponent: int, grid: Sequence[int],
            limits: Sequence[float], noise: Sequence[int] | None,
            out: Tensor) -> tuple[Tensor, Tensor]:
    library = _library()
    if library is None:
        values, scales, nonfinite = reference_mx(x, block, divisor, added, exponent, grid, limits,
                                                 noise, out.dtype)
        out.copy_(values.view(out.shape))
        return scales, nonfinite
    blocks, size = _count(x, 1, block), x.numel()
    if block > MAX_BLOCK:
        raise TypeError(f"a block of {block} is larger than {MAX_BLOCK}, a tile of the C kernel")
    scales = torch.empty(x.shape[0], x.shape[1] // block, dtype=torch.uint8)
    nonfinite = torch.empty((), dtype=torch.int64)
    library.lp_mx(_address(x, size, _INPUTS), _KINDS[x.dtype],
                  _address(out, size, _KINDS), _KINDS[out.dtype],
                  blocks, block, scales.data_ptr(), divisor, added, exponent,
                  _Grid(*grid, *limits), noise and _Noise(*noise), nonfinite.data_ptr(),
                  torch.get_num_threads())
    return scales, nonfinite


_RULE = "SymInt block, float divisor, int added, int exponent"


def _fake_scales(x: Tensor, block: int, *_) -> tuple[Tensor, Tensor]:
    return (x.new_empty(x.shape[0], x.shape[1] // block, dtype=torch.uint8),
            x.new_empty((), dtype=torch.int64))


@operator(f"mx(Tensor x, {_RULE}, {_HOW}, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
          fake=lambda x, *how: (torch.empty_like(x, dtype=how[-1]), *_fake_scales(x, *how)))
def _mx(x: Tensor, *how) -> tuple[Tensor, Tensor, Tensor]:
    *how, dtype = how
    out = torch.empty(x.shape, dtype=dtype)
    return out, *_run_mx(x, *how, out)


_mx_into = operator(f"mx_into(Tensor x, {_RULE}, {_HOW}, Tensor(a!) out) -> (Tensor, Tensor)",
                    fake=_fake_scales)(_run_mx)
