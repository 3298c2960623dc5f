"""Quantise and dequantise on low-precision grids, fast on a CPU: a small C kernel, and the same numbers in PyTorch.

    amax(x, block=None)             -> Amax(values, nonfinite)              largest magnitudes, one pass
    qdq(x, fmt, scale, block=None)  -> Tensor                               round(x / scale) * scale
    mx(x, fmt, rule="floor")        -> Blocks(values, scales, nonfinite)    32 elements share a power of two (MX)
    nvfp4(x, fmt, scale_fmt)        -> Blocks(...)                          16 share an E4M3 scale over a tensor scale

`fmt` is a `lpkit.precision.formats.Format` (any with a sign and up to 8 bits; E2M1 and E4M3FN for nvfp4). x is float32
or bf16, of any shape and any strides (a view that is not contiguous is copied first; `qdq` with one scale keeps a
transposed view's order instead). x counts as a matrix (R, C): the last axis, and all others. `block=(r, c)` says which elements
share a scale or an amax; 0 stands for the whole axis, so (1, 0) is per row and None the whole tensor. Values come in
`dtype`: None for x's own, float32, bf16, or torch.uint8 for the bit patterns before rescaling.

Rounding is to nearest-even and saturates; with `noise=Noise(seed=..., counter=...)` it is stochastic, from a generator that
is a pure function of seed and element: advance the counter by x.numel() and a run can be repeated and resumed.
NaN stays NaN, its payload unspecified; bit patterns of a format without NaN have none, so look at `nonfinite`, which
counts what was not finite (elements for amax, blocks elsewhere; a 0-dim int64 tensor).

The C source beside this file is compiled on first use (lpkit/kernels/native.py). Without a compiler, on a GPU and inside
torch.compile, `reference` runs; `choice()` says which it is here and why. No function here is differentiable.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lpkit.errors import ConfigError, pick
from lpkit.kernels import native

if TYPE_CHECKING:
    from lpkit.contracts import Choice

MX_BLOCK, NVFP4_BLOCK = 32, 16
MAX_BLOCK = 2048    # elements: a tile of the C kernel


class Grid(Protocol):
    """What a cast needs to know of a number format."""

    name: str
    signed: bool
    bits: int
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    bias: int
    largest: float
    lowest: float
    nan: int | None
    has_negative_zero: bool


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Stochastic rounding: element i of the tensor uses number `counter + i` of the stream `seed`.

    24 random bits decide, so the chance to round up is right to 2^-25.
    """

    seed: int
    counter: int = 0

    @property
    def keys(self) -> tuple[int, int]:
        """The seed, spread over two words of 32 bits (splitmix64)."""
        z = (self.seed + 0x9E3779B97F4A7C15) & (2**64 - 1)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        z ^= z >> 31
        return z & 0xFFFFFFFF, z >> 32


class Amax(NamedTuple):
    values: Tensor      # float32: 0-dim, or (R / r, C / c); not finite where the block is not
    nonfinite: Tensor


class Blocks(NamedTuple):
    values: Tensor      # like x, or its bit patterns
    scales: Tensor      # uint8, one for each block along the last axis: E8M0 for mx, E4M3 for nvfp4
    tensor_scale: Tensor | None     # float32, 0-dim; nvfp4 alone
    nonfinite: Tensor


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How an amax becomes a power of two. `divide`: by the largest value, else by 2^max_exponent."""

    divide: bool
    added_bits: int | None      # to the bits of the float32 before its mantissa is cut; None: half an element's last bit
    source: str


SCALE_RULES: dict[str, ScaleRule] = {
    "floor": ScaleRule(divide=False, added_bits=0,
                       source="OCP MX Specification 1.0, section 6.3; the largest of a block may saturate"),
    "ceil": ScaleRule(divide=False, added_bits=0x7FFFFF, source="up whenever the mantissa is not zero: never saturates"),
    "even": ScaleRule(divide=False, added_bits=None, source="the amax is rounded to the element's mantissa first"),
    "rceil": ScaleRule(divide=True, added_bits=0x7FFFFF,
                       source="cuBLAS, 1D block scaling: up from amax / largest; https://docs.nvidia.com/cuda/cublas"),
}


def choice() -> Choice:
    """Which implementation runs on CPU tensors here, and why. Compiles on first use."""
    return native.choice("cast")


# ---- public operations -------------------------------------------------------------------------------------------------

def amax(x: Tensor, block: tuple[int, int] | None = None) -> Amax:
    """Largest magnitudes. Raises ConfigError when the blocks do not tile."""
    x = _matrix(x)
    r, c = _block(x, block)
    library = _native(x)
    if library is None:
        values, nonfinite = reference_amax(x, r, c)
    else:
        values = x.new_empty(x.shape[0] // r, x.shape[1] // c, dtype=torch.float32)
        nonfinite = torch.zeros((), dtype=torch.int64)
        library.lp_amax(_ptr(x), _KINDS[x.dtype], x.shape[0], x.shape[1], r, c, _ptr(values), _ptr(nonfinite),
                        torch.get_num_threads())
    return Amax(values if block else values.reshape(()), nonfinite)


def qdq(x: Tensor, fmt: Grid, scale: Tensor | float | None = None, *, block: tuple[int, int] | None = None,
        rescale: bool = True, dtype: torch.dtype | None = None, noise: Noise | None = None,
        out: Tensor | None = None) -> Tensor:
    """round(x / scale) on the grid of `fmt`, multiplied by the scale again unless `rescale` is False. Like x.

    scale: one positive number or 0-dim tensor; with `block`, float32 (R / r, C / c). (A scale of 0 makes NaN of zeros.) `out` is written to when given: it has the
    shape and dtype of the result and is contiguous. Raises ConfigError.
    """
    dtype = _check(x, fmt, dtype)
    if block is None and out is None and noise is None and not x.is_contiguous():
        order = sorted(range(x.ndim), key=x.stride, reverse=True)
        dense = x.permute(order)
        if dense.is_contiguous():   # a transposed view: one scale does not care, and the result keeps the order
            back = sorted(range(x.ndim), key=order.__getitem__)
            return qdq(dense, fmt, scale, rescale=rescale, dtype=dtype).permute(back)
    matrix = _matrix(x)
    r, c = _block(matrix, block)
    scales = _scales(1.0 if scale is None else scale, matrix, r, c)
    library = _native(matrix)
    out = _output(x, out, dtype)
    if library is None:
        values = reference(matrix, fmt, scales, (r, c), rescale=rescale, dtype=dtype, noise=noise)
        return out.copy_(values.view(x.shape))
    if block is None:   # one scale: the shape does not matter, and threads like equal pieces
        rows, columns, r, c = 1, matrix.numel(), 1, matrix.numel()
    else:
        rows, columns = matrix.shape
    library.lp_qdq(_ptr(matrix), _KINDS[x.dtype], _ptr(out), _KINDS[dtype], rows, columns, r, c, _ptr(scales),
                   int(rescale), _grid(fmt), _noise(noise), torch.get_num_threads())
    return out


def mx(x: Tensor, fmt: Grid, *, rule: str = "floor", dtype: torch.dtype | None = None, noise: Noise | None = None,
       block: int = MX_BLOCK, out: Tensor | None = None) -> Blocks:
    """Blocks of `block` elements along the last axis share a power of two (an E8M0 code in `scales`).

    As torchao's to_mx and to_dtype, bit for bit, but for blocks whose amax is below 2^-110 (there torchao quantises
    with one scale and dequantises with another) and for "rceil" within rounding of a power of two (there its
    logarithm, in float32, misses; this is the hardware's rule). A block with a NaN becomes NaN; an infinity saturates.
    """
    how, dtype = pick(SCALE_RULES, rule, "rule of the scale"), _check(x, fmt, dtype)
    matrix = _matrix(x)
    _block(matrix, (1, block))
    if block > MAX_BLOCK:
        raise ConfigError(f"a block of {block} is larger than {MAX_BLOCK}; 32 is what hardware knows")
    added = 1 << (22 - fmt.mantissa_bits) if how.added_bits is None else how.added_bits
    library = _native(matrix)
    if library is None:
        return _mx_reference(matrix, x.shape, fmt, how.divide, added, dtype, noise, block, out)
    out, scales, nonfinite = _outputs(x, out, dtype, block)
    library.lp_mx(_ptr(matrix), _KINDS[x.dtype], _ptr(out), _KINDS[dtype], scales.numel(), block, _ptr(scales),
                  fmt.largest if how.divide else 1.0, added, 0 if how.divide else fmt.max_exponent, _grid(fmt),
                  _noise(noise), _ptr(nonfinite), torch.get_num_threads())
    return Blocks(out, scales, None, nonfinite)


def nvfp4(x: Tensor, fmt: Grid, scale_fmt: Grid, *, tensor_scale: Tensor | None = None, rows: int = 1,
          dtype: torch.dtype | None = None, noise: Noise | None = None, out: Tensor | None = None) -> Blocks:
    """Blocks of `rows` x 16 elements share a scale in `scale_fmt`, all of them `tensor_scale`.

    tensor_scale: float32, 0-dim; None: amax(x) / (the largest scale times the largest element), and 1 where that is 0.
    `rows=16` are the square blocks of weights. As torchao's NVFP4Tensor, bit for bit (its rows are 1).
    """
    dtype = _check(x, fmt, dtype)
    matrix = _matrix(x)
    _block(matrix, (rows, NVFP4_BLOCK))
    if tensor_scale is None:
        top = amax(matrix).values
        tensor_scale = torch.where(top == 0, 1.0, top / (scale_fmt.largest * fmt.largest))
    tensor_scale = tensor_scale.detach().float().reshape(())
    library = _native(matrix)
    if library is None or rows > 1:
        return _nvfp4_reference(matrix, x.shape, fmt, scale_fmt, tensor_scale, rows, dtype, noise, out)
    out, scales, nonfinite = _outputs(x, out, dtype, NVFP4_BLOCK)
    library.lp_nvfp4(_ptr(matrix), _KINDS[x.dtype], _ptr(out), _KINDS[dtype], scales.numel(), NVFP4_BLOCK, _ptr(scales),
                     tensor_scale.item(), _grid(scale_fmt), _grid(fmt), _noise(noise), _ptr(nonfinite),
                     torch.get_num_threads())
    return Blocks(out, scales, tensor_scale, nonfinite)


def mx_qdq(x: Tensor, fmt: Grid, **options) -> Tensor:
    """The values of `mx`."""
    return mx(x, fmt, **options).values


def nvfp4_qdq(x: Tensor, fmt: Grid, scale_fmt: Grid, **options) -> Tensor:
    """The values of `nvfp4`."""
    return nvfp4(x, fmt, scale_fmt, **options).values


# ---- the definition, in PyTorch ------------------------------------------------------------------------------------------

def reference(x: Tensor, fmt: Grid, scales: Tensor, block: tuple[int, int], *, rescale: bool, dtype: torch.dtype,
              noise: Noise | None) -> Tensor:
    """`qdq` of a matrix (R, C) with scales (R / r, C / c), on any device."""
    wide = _spread(scales, block)
    y = _round(x.float() / wide, fmt, noise)
    return _codes(y, fmt) if dtype == torch.uint8 else (y * wide if rescale else y).to(dtype)


def reference_amax(x: Tensor, r: int, c: int) -> tuple[Tensor, Tensor]:
    tiles = x.view(x.shape[0] // r, r, x.shape[1] // c, c)
    return tiles.abs().amax((1, 3)).float(), (~x.isfinite()).sum()


def _apply(matrix: Tensor, fmt: Grid, multiplier: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype,
           noise: Noise | None) -> Tensor:
    y = _round(matrix.float() * _spread(multiplier, block), fmt, noise)
    return _codes(y, fmt) if dtype == torch.uint8 else (y * _spread(scales, block)).to(dtype)


def _mx_reference(matrix, shape, fmt, divide, added, dtype, noise, block, out) -> Blocks:
    top = matrix.view(-1, block).abs().amax(-1).float()
    bits = (top / fmt.largest if divide else top).view(torch.int32)
    code = ((bits + added) >> 23) - (0 if divide else fmt.max_exponent)
    code = torch.where(top.isnan(), 255, code.clamp(0, 254))
    scale = torch.where(code == 255, torch.nan, _power(code))
    values = _apply(matrix.view(-1, block), fmt, _power(254 - code)[:, None], scale[:, None], (1, block), dtype, noise)
    values = values.view(shape) if out is None else out.copy_(values.view(shape))
    return Blocks(values, code.to(torch.uint8).view(*shape[:-1], -1), None, (~top.isfinite()).sum())


def _nvfp4_reference(matrix, shape, fmt, scale_fmt, tensor_scale, rows, dtype, noise, out) -> Blocks:
    top, _ = reference_amax(matrix, rows, NVFP4_BLOCK)
    stored = (top / fmt.largest / tensor_scale).clamp(2.0**scale_fmt.min_exponent, scale_fmt.largest)
    stored = _round(stored, scale_fmt, None)
    values = _apply(matrix, fmt, (1 / tensor_scale) / stored, tensor_scale * stored, (rows, NVFP4_BLOCK), dtype, noise)
    values = values.view(shape) if out is None else out.copy_(values.view(shape))
    scales = _codes(stored, scale_fmt)
    return Blocks(values, scales.view(*shape[:-1], -1) if rows == 1 else scales, tensor_scale, (~top.isfinite()).sum())


def _power(code: Tensor) -> Tensor:
    """2^(code - 127) for codes from 0; at 0 float32 is subnormal."""
    return torch.where(code > 0, code << 23, 1 << 22).int().view(torch.float32)


def _round(y: Tensor, fmt: Grid, noise: Noise | None) -> Tensor:
    """float32 on the grid, saturating. A number so large that the last bit of the sum is the grid's spacing is added and
    taken away again: the addition's own rounding is the rounding."""
    y = y.clamp(fmt.lowest, fmt.largest)
    size = y.abs()
    exponent = (size.view(torch.int32) & 0x7F800000).clamp(min=(fmt.min_exponent + 127) << 23)
    if noise is None:
        magic = (exponent + ((23 - fmt.mantissa_bits) << 23)).view(torch.float32)
        size = torch.where(y.isnan(), y, (size + magic) - magic)
    else:
        step = (exponent - (fmt.mantissa_bits << 23)).view(torch.float32)
        q = size / step
        down = q.floor()
        size = torch.where(y.isnan(), y, (down + (_uniform(y, noise) < q - down)) * step)
    size = size.copysign(y)
    return size if fmt.has_negative_zero else size + 0.0


def _uniform(like: Tensor, noise: Noise) -> Tensor:
    """Numbers in (0, 1), multiples of 2^-25, one for each element; float32."""
    word, (k0, k1) = 0xFFFFFFFF, noise.keys
    i = torch.arange(noise.counter, noise.counter + like.numel(), device=like.device).view(like.shape)
    high = i >> 32
    h = ((i & word) * 0x9E3779B1 + k0 + high * 0x85EBCA6B) & word
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & word
    h = ((h ^ (h >> 15)) * 0x846CA68B) & word
    h = ((h ^ (h >> 16)) + (k1 ^ high)) & word
    h = (h * 0x7FEB352D) & word
    return (((h ^ (h >> 15)) >> 8).float() + 0.5) * 2.0**-24


def _codes(y: Tensor, fmt: Grid) -> Tensor:
    """Bit patterns of values on the grid, uint8."""
    size, m = y.abs(), fmt.mantissa_bits
    normal = (size.view(torch.int32) >> (23 - m)) - ((127 - fmt.bias) << m)
    code = torch.where(size < 2.0**fmt.min_exponent, (size * 2.0**(m - fmt.min_exponent)).int(), normal)
    code = torch.where(y.isnan(), fmt.nan or 0, code)
    if fmt.has_negative_zero:
        return (code | (torch.signbit(y).int() << (fmt.bits - 1))).to(torch.uint8)
    return (torch.where(y < 0, -code, code) & ((1 << fmt.bits) - 1)).to(torch.uint8)


# ---- checks, and the way to C ----------------------------------------------------------------------------------------------

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


def _check(x: Tensor, fmt: Grid, dtype: torch.dtype | None) -> torch.dtype:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"a cast takes float32 or bfloat16, got {x.dtype}; call .float() on it")
    if not fmt.signed or fmt.bits > 8:
        raise ConfigError(f"{fmt.name} is no format to cast to here; use one with a sign and at most 8 bits, "
                          f"or lpkit.precision.formats.round_to")
    dtype = dtype or x.dtype
    if dtype not in _KINDS:
        raise ConfigError(f"a cast returns {', '.join(map(str, _KINDS))}, not {dtype}")
    return dtype


def _output(x: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.shape != x.shape or out.dtype != dtype or not out.is_contiguous():
        raise ConfigError(f"out must be contiguous, {tuple(x.shape)} and {dtype}, got {tuple(out.shape)}, {out.dtype}")
    return out


def _outputs(x: Tensor, out: Tensor | None, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and the count of a block format."""
    return (_output(x, out, dtype), torch.empty(*x.shape[:-1], x.shape[-1] // block, dtype=torch.uint8),
            torch.zeros((), dtype=torch.int64))


def _matrix(x: Tensor) -> Tensor:
    """(R, C), contiguous."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"a cast takes float32 or bfloat16, got {x.dtype}; call .float() on it")
    if not x.numel():
        raise ConfigError(f"a tensor of shape {tuple(x.shape)} has nothing to cast")
    return x.detach().contiguous().view(-1, x.shape[-1] if x.ndim else 1)


def _block(x: Tensor, block: tuple[int, int] | None) -> tuple[int, int]:
    sizes = tuple(size or whole for size, whole in zip(block or (0, 0), x.shape))
    for size, whole, axis in zip(sizes, x.shape, ("the rows", "the last axis")):
        if whole % size:
            raise ConfigError(f"blocks of {size} do not tile {axis} of {whole}; pad to {-(-whole // size) * size}")
    return sizes


def _scales(scale: Tensor | float, x: Tensor, r: int, c: int) -> Tensor:
    shape = (x.shape[0] // r, x.shape[1] // c)
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device).detach().contiguous()
    if scale.numel() != shape[0] * shape[1]:
        raise ConfigError(f"{shape[0]} x {shape[1]} blocks need as many scales, got {tuple(scale.shape)}")
    return scale.view(shape)


def _spread(scales: Tensor, block: tuple[int, int]) -> Tensor:
    """One scale an element, or what broadcasts to it."""
    if scales.numel() == 1:
        return scales
    r, c = block
    scales = scales if scales.shape[1] == 1 else scales.repeat_interleave(c, 1)
    return scales if r == 1 else scales.repeat_interleave(r, 0)


class _Grid(ctypes.Structure):
    _fields_ = [("mantissa_bits", ctypes.c_int32), ("min_exponent", ctypes.c_int32), ("bias", ctypes.c_int32),
                ("bits", ctypes.c_int32), ("nan", ctypes.c_int32), ("has_negative_zero", ctypes.c_int32),
                ("lowest", ctypes.c_float), ("largest", ctypes.c_float)]


class _Noise(ctypes.Structure):
    _fields_ = [("counter", ctypes.c_uint64), ("k0", ctypes.c_uint32), ("k1", ctypes.c_uint32)]


@functools.cache
def _grid(fmt: Grid) -> _Grid:
    return _Grid(fmt.mantissa_bits, fmt.min_exponent, fmt.bias, fmt.bits, fmt.nan or 0, fmt.has_negative_zero,
                 fmt.lowest, fmt.largest)


def _noise(noise: Noise | None) -> _Noise | None:
    return noise and _Noise(noise.counter, *noise.keys)


def _ptr(x: Tensor) -> int:
    return 0 if isinstance(x, FakeTensor) else x.data_ptr()


def _native(x: Tensor) -> ctypes.CDLL | _NoKernel | None:
    """The compiled kernel, where it can serve this tensor. What it writes to is made before it is called, so a trace by
    fake tensors, which have shapes and no memory, sees the same allocations."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    library = _library()
    return _NoKernel() if library and isinstance(x, FakeTensor) else library


class _NoKernel:
    """Every kernel, done."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
_GRID, _NOISE = ctypes.POINTER(_Grid), ctypes.POINTER(_Noise)
_ARGUMENTS = {      # as cast.c declares them
    "lp_amax": (_P, _I, _L, _L, _L, _L, _P, _P, _I),
    "lp_qdq": (_P, _I, _P, _I, _L, _L, _L, _L, _P, _I, _GRID, _NOISE, _I),
    "lp_mx": (_P, _I, _P, _I, _L, _L, _P, _F, _I, _I, _GRID, _NOISE, _P, _I),
    "lp_nvfp4": (_P, _I, _P, _I, _L, _L, _P, _F, _GRID, _GRID, _NOISE, _P, _I),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native.load("cast")
    for name, arguments in _ARGUMENTS.items() if library else ():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library
