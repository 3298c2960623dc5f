"""Quantise to low-precision formats and back: a fast C kernel for CPUs, and its definition in
PyTorch.

    amax(x, block=None)            -> Amax(values, nonfinite)            largest magnitudes
    qdq(x, fmt, scale, block=None) -> Tensor                             round(x / scale) * scale
    mx(x, fmt, rule="floor")       -> Blocks(values, scales, nonfinite)  32 share a power of two
    hadamard(x)                    -> Tensor                             mixes every 16 elements

The grid of a format is the set of its values. To round to the grid, the code adds a number so large
that the last bit of the sum is the spacing of the grid, and subtracts the number again. The
addition itself rounds to nearest-even, for every format and without a branch. `_round` does this in
PyTorch, and `rounded` in cast.c does the same in C.

x is float32 or bf16, of any shape and strides. The functions treat it as a matrix (R, C): C is the
last axis, and R is all other axes. A transposed matrix is read in place, and its results are also
transposed. Any other view that is not contiguous is copied first.

fmt:   a format with a sign and at most 8 bits
block: (r, c), the rows and columns of a block, whose elements share a scale or an amax. 0 stands
       for the whole axis, so (1, 0) is a block per row. None: the whole tensor
dtype: of the returned values: None for the dtype of x, float32, bf16, or torch.uint8 for the bit
       patterns of the format, without rescaling
noise: None: round to nearest-even. A `Noise`: round stochastically. Its random numbers are a
       function of the seed and of the element's number only, so a run can be repeated and resumed
       if the counter advances by x.numel()

Rounding saturates. NaN stays NaN, with any payload. A format without a NaN cannot represent a NaN
as a bit pattern, so check `nonfinite`, () int64: the number of elements (amax) or blocks (mx) that
are not finite.

Each function checks its arguments and calls an operator (`lpkit.kernels.operator`), so fake tensors
and torch.compile see one operation. On a CPU the operator calls C, compiled on first use
(`compile_c`), or the definition if there is no C compiler. `compile_c.choice("cast")` reports which
of the two is used, and why. On other devices the definition runs instead of the operator, so that
torch.compile can fuse it. No function is differentiable.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lpkit.errors import ConfigError, pick
from lpkit.kernels import compile_c
from lpkit.kernels.operator import operator
from lpkit.techniques.formats import FORMATS, Format, format_of
from lpkit.techniques.recipes import HADAMARD, MX_BLOCK

# signs of the 16 elements before the Hadamard transform, as in Transformer Engine
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
MAX_BLOCK = 2048    # most consecutive elements in a block of `mx`: a tile of the C kernel


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The random numbers of stochastic rounding: element i of the tensor uses number `counter + i`
    of the stream `seed`.

    A number has 24 random bits, so the probability of rounding up is exact to 2^-25. `counter` and
    `seed` may be tensors on the device of x: the counter (), and the `seed_words` (2,). A compiled
    graph then reads them, and does not contain them as constants.
    """

    seed: int | Tensor
    counter: int | Tensor = 0

    @property
    def words(self) -> Tensor:
        """(3,) int64: the counter, and the two words of the seed."""
        seed = self.seed if isinstance(self.seed, Tensor) else seed_words(self.seed)
        return torch.cat((torch.as_tensor(self.counter).view(1), torch.as_tensor(seed)))


def seed_words(seed: int) -> tuple[int, int]:
    """Return two 32-bit words that depend on all bits of a seed (splitmix64)."""
    z = (seed + 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


class Amax(NamedTuple):
    values: Tensor      # float32, (), or (R / r, C / c); not finite if an element is not finite
    nonfinite: Tensor   # () int64: elements that are not finite


class Blocks(NamedTuple):
    values: Tensor      # like x, or its bit patterns
    scales: Tensor      # uint8, the E8M0 code of each block along the last axis
    nonfinite: Tensor   # () int64: blocks that have an element that is not finite


# How an amax becomes a power of two: add a number to the bits of its float32, which may carry into
# the exponent, drop the mantissa, and subtract the exponent of the format's largest value. A rule
# returns the number to add.
SCALE_RULES: dict[str, Callable[[Format], int]] = {
    "floor": lambda fmt: 0,             # OCP MX 1.0, section 6.3; the largest element may saturate
    # rounds up unless the mantissa is zero, so that no element saturates
    "ceil": lambda fmt: 0x7FFFFF,
    "even": lambda fmt: 1 << (22 - fmt.mantissa_bits),  # half of an element's last mantissa bit
    # rounds up if the mantissa is larger than the mantissa of the format's largest value: the
    # smallest scale without overflow, as in cuBLAS's 1D block scaling
    # (https://docs.nvidia.com/cuda/cublas)
    "rceil": lambda fmt: (1 << 24) - 1 - int(math.ldexp(fmt.largest, 23 - fmt.max_exponent)),
}


# ---- public operations ---------------------------------------------------------------------------

def amax(x: Tensor, block: tuple[int, int] | None = None) -> Amax:
    """Return the largest magnitude of each block, and the number of elements that are not finite.
    Raises ConfigError if the sides of x are not multiples of the block's sides."""
    _check_input(x)
    on_cpu = x.device.type == "cpu"
    matrix, *tiles, turned = in_tiles(x, block)
    values, nonfinite = (_amax if on_cpu else reference_amax)(matrix, *tiles)
    if block is None:
        return Amax(values.reshape(()), nonfinite)
    return Amax(values.T if turned else values, nonfinite)


def qdq(x: Tensor, fmt: Format, scale: Tensor | float = 1.0, *,
        block: tuple[int, int] | None = None, rescale: Tensor | bool = True,
        dtype: torch.dtype | None = None, noise: Noise | None = None) -> Tensor:
    """Return x / scale, rounded to the values of `fmt`, times scale; in the shape of x.

    scale:   a number or a 0-dim tensor, not negative; with `block`, float32 (R / r, C / c). A scale
             of 0 makes every element 0
    rescale: True: multiply by `scale`; False: do not multiply, so the result has values of `fmt`;
             a tensor like `scale`: multiply by this tensor instead
    Raises ConfigError for arguments that the top of this file does not allow.
    """
    dtype = _check(x, fmt, dtype)
    matrix, *tiles, turned = in_tiles(x, block)
    scales = _scales(scale, x, tiles, turned)
    back = scales if rescale is True else None
    if isinstance(rescale, Tensor):
        back = _scales(rescale, x, tiles, turned)
    how = (scales, back, fmt.name, noise and noise.words, turned)
    on_cpu = x.device.type == "cpu"
    values = (_qdq if on_cpu else reference)(matrix, *how, dtype)
    if turned:
        return values.T
    return values if x.ndim == 2 else values.view(x.shape)


def mx(x: Tensor, fmt: Format, *, rule: str = "floor", dtype: torch.dtype | None = None,
       noise: Noise | None = None, block: tuple[int, int] = MX_BLOCK) -> Blocks:
    """Return the cast of x in blocks whose elements share a scale that is a power of two.

    rule: how the scale follows from the amax, a key of SCALE_RULES. A block with a NaN or an
          infinity has the E8M0 code 255, and all its values are NaN

    The results are bit-equal to torchao's to_mx and to_dtype (0.18), except for three kinds of
    blocks: blocks with a scale of 2^-127, which torchao quantises and dequantises with different
    numbers; blocks under "rceil" whose amax is close to a power of two, because torchao rounds a
    quotient and a logarithm to float32, and this function is exact; and blocks with an infinity.
    """
    added, dtype = pick(SCALE_RULES, rule, "rule of the scale")(fmt), _check(x, fmt, dtype)
    matrix, *tiles, turned = in_tiles(x, block)
    if matrix.shape[1] // tiles[1] > MAX_BLOCK:
        raise ConfigError(f"a block of {matrix.shape[1] // tiles[1]} is larger than {MAX_BLOCK}; "
                          f"hardware knows 32")
    how = (*tiles, added, fmt.max_exponent, fmt.name, noise and noise.words, turned)
    on_cpu = x.device.type == "cpu"
    values, scales, nonfinite = (_mx if on_cpu else reference_mx)(matrix, *how, dtype)
    if turned:
        return Blocks(values.T, scales.T, nonfinite)
    if x.ndim != 2 and block[0] == 1:
        scales = scales.view(*x.shape[:-1], -1)
    return Blocks(values.view(x.shape), scales, nonfinite)


def hadamard(x: Tensor) -> Tensor:
    """Return every 16 elements of the last axis times SIGNS, times a 16 x 16 Hadamard matrix / 4,
    in float32. This spreads an outlier over 16 elements (Tseng et al. 2024, arXiv:2402.04396).
    Raises ConfigError if the last axis is not a multiple of 16."""
    _check_input(x)
    matrix, *_, turned = in_tiles(x, (1, HADAMARD))
    on_cpu = x.device.type == "cpu"
    mixed = (_hadamard if on_cpu else reference_hadamard)(matrix, turned)
    return mixed.T if turned else mixed.view(x.shape)


# ---- the definition, in PyTorch, on any device ---------------------------------------------------
#
# These functions take the same arguments as the operators: x is a matrix (R, C), divided into
# (rows, columns) blocks; `fmt` is the name of a format; noise is `Noise.words`. `turned`: x is the
# transpose of the caller's tensor, so its elements are numbered down its columns.

def reference_amax(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each block, (rows, columns) float32, and the number of
    elements that are not finite, () int64."""
    return _blocks(x, rows, columns).abs().amax((1, 3)).float(), (~x.isfinite()).sum()


def reference(x: Tensor, scales: Tensor, back: Tensor | None, fmt: str, noise: Tensor | None,
              turned: bool, dtype: torch.dtype) -> Tensor:
    """Return the same as `qdq`. scales: (rows, columns), the divisors; back: (rows, columns), the
    factors after rounding, or None for 1."""
    grid = format_of(fmt)
    divisors = torch.where(scales == 0, torch.inf, scales)[:, None, :, None]
    y = _round(_blocks(x, *scales.shape).float() / divisors, grid, noise, turned)
    if dtype == torch.uint8:
        values = _codes(y, grid)
    else:
        values = (y if back is None else y * back[:, None, :, None]).to(dtype)
    return values.view(x.shape)


def reference_mx(x: Tensor, rows: int, columns: int, added: int, exponent: int, fmt: str,
                 noise: Tensor | None, turned: bool,
                 dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `mx`: values, scales (rows, columns) uint8, and the number of blocks that
    are not finite. added: the number of SCALE_RULES; exponent: the exponent of the format's largest
    value."""
    grid, tiles = format_of(fmt), _blocks(x, rows, columns)
    top = tiles.abs().amax((1, 3), keepdim=True).float()
    code = ((top.view(torch.int32) + added) >> 23) - exponent
    code = torch.where(top.isfinite(), code.clamp(0, 254), 255)
    inverse, scale = (_power(biased).where(code < 255, torch.nan) for biased in (254 - code, code))
    y = _round(tiles.float() * inverse, grid, noise, turned)
    if dtype == torch.uint8:
        values = _codes(y, grid)
    else:
        values = (y * scale).to(dtype)
    scales = code.to(torch.uint8).view(rows, columns)
    return values.view(x.shape), scales, (~top.isfinite()).sum()


def reference_hadamard(x: Tensor, turned: bool) -> Tensor:
    """Return the same as `hadamard`, along the columns if `turned`, in float32. Four stages of sums
    and differences need 4 additions per element, where a matmul needs 16. Their order is fixed, so
    all machines compute the same bits."""
    v = (x.T if turned else x).float().unflatten(-1, (-1, HADAMARD))
    v = v * x.new_tensor(SIGNS, dtype=torch.float32)
    for half in (1, 2, 4, 8):
        a, b = v.unflatten(-1, (-1, 2, half)).unbind(-2)
        v = torch.stack((a + b, a - b), -2).flatten(-3)
    mixed = (v * 0.25).flatten(-2)
    return (mixed.T if turned else mixed).contiguous()


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.view(rows, x.shape[0] // rows, columns, x.shape[1] // columns)


def _power(code: Tensor) -> Tensor:
    """Return 2^(code - 127) in float32, for codes from 0 on. Code 0 gives a subnormal number."""
    return torch.where(code > 0, code << 23, 1 << 22).int().view(torch.float32)


def _round(y: Tensor, grid: Format, noise: Tensor | None, turned: bool) -> Tensor:
    """Return float32 y, saturated and rounded to the grid of the format; see the top of this file.
    """
    y = y.clamp(grid.lowest, grid.largest)
    size = y.abs()
    exponent = (size.view(torch.int32) & 0x7F800000).clamp(min=(grid.min_exponent + 127) << 23)
    if noise is None:
        # The last bit of size + magic equals the spacing of the grid, so the addition rounds.
        magic = (exponent + ((23 - grid.mantissa_bits) << 23)).view(torch.float32)
        size = torch.where(y.isnan(), y, (size + magic) - magic)
    else:
        step = (exponent - (grid.mantissa_bits << 23)).view(torch.float32)
        q = size / step
        down = q.floor()
        size = torch.where(y.isnan(), y, (down + (_uniform(y, noise, turned) < q - down)) * step)
    size = size.copysign(y)
    return size if grid.has_negative_zero else size + 0.0


def _uniform(like: Tensor, noise: Tensor, turned: bool) -> Tensor:
    """Return random numbers in (0, 1), float32, odd multiples of 2^-25: one for each element of
    `like`, a result of `_blocks`. They are a hash of the element's number and of noise (counter,
    k0, k1)."""
    word, (counter, k0, k1) = 0xFFFFFFFF, noise
    i = torch.arange(like.numel(), device=like.device)
    if turned:
        i = i.view(-1, like.shape[0] * like.shape[1]).T.contiguous()
    i = i.view(like.shape) + counter
    high = i >> 32
    h = ((i & word) * 0x9E3779B1 + k0 + high * 0x85EBCA6B) & word
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & word
    h = ((h ^ (h >> 15)) * 0x846CA68B) & word
    h = ((h ^ (h >> 16)) + (k1 ^ high)) & word
    h = (h * 0x7FEB352D) & word
    return (((h ^ (h >> 15)) >> 8).float() + 0.5) * 2.0**-24


def _codes(y: Tensor, grid: Format) -> Tensor:
    """Return the bit patterns of values on the grid, uint8."""
    size, m = y.abs(), grid.mantissa_bits
    normal = (size.view(torch.int32) >> (23 - m)) - ((127 - grid.bias) << m)
    subnormal = (size * 2.0**(m - grid.min_exponent)).int()
    code = torch.where(size < 2.0**grid.min_exponent, subnormal, normal)
    code = torch.where(y.isnan(), grid.nan or 0, code)
    if grid.mantissa_bits < grid.bits - 1:
        return (code | (torch.signbit(y).int() << (grid.bits - 1))).to(torch.uint8)
    return (torch.where(y < 0, -code, code) & ((1 << grid.bits) - 1)).to(torch.uint8)


# ---- checks --------------------------------------------------------------------------------------

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}      # numbered as in cast.c
_INPUTS = (torch.float32, torch.bfloat16)
_PLAIN = (FakeTensor, FunctionalTensor)     # PyTorch unwraps these before a kernel runs


def _check(x: Tensor, fmt: Format, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the result. Raises ConfigError for arguments that are not supported."""
    _check_input(x)
    if not fmt.signed or fmt.bits > 8:
        raise ConfigError(f"{fmt.name} is no format to cast to here; use one with a sign and at "
                          f"most 8 bits")
    if FORMATS.get(fmt.name) is not fmt:    # operators take the name of a format, not the object
        raise ConfigError(f"{fmt.name} is not what lpkit.techniques.formats.FORMATS has under that "
                          f"name; add it there")
    dtype = dtype or x.dtype
    if dtype not in _KINDS:
        raise ConfigError(f"a cast returns {', '.join(map(str, _KINDS))}, not {dtype}")
    return dtype


def _check_plain(x: Tensor) -> None:
    """Raise ConfigError for a tensor whose memory C cannot read: a wrapper such as DTensor, which
    has no memory of its own, or a tensor that is not dense."""
    # During tracing, the layout of a tensor may not be available. It was checked before.
    if torch.compiler.is_compiling():
        return
    # the most frequent case first, because it is the fastest to check
    if type(x) is Tensor and x.layout is torch.strided and not x.is_nested:
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
    if not x.numel():
        raise ConfigError(f"a tensor of shape {tuple(x.shape)} has nothing to cast")


def in_tiles(x: Tensor, block: tuple[int, int] | None) -> tuple[Tensor, int, int, bool]:
    """Return x as a contiguous matrix (R, C), the numbers of blocks along R and along C, and
    whether the matrix is x.T. (It is if x is a transposed view, because x.T is then contiguous.)"""
    x = x.detach() if x.requires_grad else x
    turned = x.ndim == 2 and not x.is_contiguous() and x.T.is_contiguous()
    x = x.T if turned else x.contiguous()
    if x.ndim != 2:
        x = x.view(-1, x.shape[-1] if x.ndim else 1)
    if block is None:
        return x, 1, 1, turned
    counts = []
    for size, whole, axis in zip(block, (x.T if turned else x).shape,
                                 ("the rows", "the last axis")):
        if size and whole % size:
            raise ConfigError(f"blocks of {size} do not tile {axis} of {whole}; "
                              f"pad to {-(-whole // size) * size}")
        counts.append(whole // size if size else 1)
    return x, *(counts[::-1] if turned else counts), turned


def _scales(scale: Tensor | float, x: Tensor, tiles: Sequence[int], turned: bool) -> Tensor:
    """Return the scales as a contiguous float32 tensor of the shape `tiles`, the numbers of blocks.
    Raises ConfigError if there is not one scale for each block."""
    if not isinstance(scale, Tensor):
        return x.new_full(tiles, scale, dtype=torch.float32)
    _check_plain(scale)
    scale = scale.detach().to(x.device, torch.float32)
    if scale.numel() != math.prod(tiles):
        raise ConfigError(f"{tiles[0]} x {tiles[1]} blocks need as many scales, "
                          f"got {tuple(scale.shape)}")
    if turned:
        return scale.reshape(tiles[::-1]).T.contiguous()
    return scale.reshape(tiles).contiguous()


# ---- the operators: C, or the definition where C did not compile ---------------------------------

class _Grid(ctypes.Structure):
    _fields_ = [("mantissa_bits", ctypes.c_int32), ("min_exponent", ctypes.c_int32),
                ("bias", ctypes.c_int32), ("bits", ctypes.c_int32), ("nan", ctypes.c_int32),
                ("has_negative_zero", ctypes.c_int32), ("lowest", ctypes.c_float),
                ("largest", ctypes.c_float)]


class _Noise(ctypes.Structure):
    _fields_ = [("counter", ctypes.c_uint64), ("k0", ctypes.c_uint32), ("k1", ctypes.c_uint32),
                ("turned", ctypes.c_int32)]


@functools.cache
def _grid(name: str) -> _Grid:
    f = format_of(name)
    return _Grid(f.mantissa_bits, f.min_exponent, f.bias, f.bits, f.nan or 0, f.has_negative_zero,
                 f.lowest, f.largest)


_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
_HOW = (ctypes.POINTER(_Grid), ctypes.POINTER(_Noise))
_ARGUMENTS = {      # as declared in cast.c
    "lp_amax": (_P, _I, _L, _L, _L, _L, _P, _P, _I),
    "lp_qdq": (_P, _I, _P, _I, _L, _L, _L, _L, _P, _P, *_HOW, _I),
    "lp_mx": (_P, _I, _P, _I, _L, _L, _L, _L, _P, _I, _I, *_HOW, _P, _I),
    "lp_hadamard": (_P, _I, _P, _L, _L, _I, _P, _I),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    return compile_c.load("cast", _ARGUMENTS)


# The functions above check their arguments. The operators check again before C reads an address,
# because anybody may call `torch.ops.lpkit`, and because a tensor may have lost its storage (FSDP
# frees storages).

def _address(x: Tensor, count: int, dtypes: Iterable[torch.dtype]) -> tuple[int, int]:
    """Return the address of x's `count` elements, and the number of its dtype in cast.c. Raises
    TypeError if x is not contiguous or has another size or dtype."""
    address = x.data_ptr()
    if not address or x.numel() != count or x.dtype not in dtypes or not x.is_contiguous():
        raise TypeError(f"a cast needs {count} elements that lie together in memory, got "
                        f"{x.dtype}, {tuple(x.shape)} with strides {x.stride()}, storage of "
                        f"{x.untyped_storage().nbytes()} bytes; call lpkit.kernels.cast")
    return address, _KINDS[x.dtype]


def _check_tiles(x: Tensor, rows: int, columns: int) -> None:
    R, C = x.shape
    if rows < 1 or columns < 1 or R % rows or C % columns:
        raise TypeError(f"{rows} x {columns} blocks do not tile {R} x {C}; "
                        f"call lpkit.kernels.cast")


def _amax_results(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return (x.new_empty(rows, columns, dtype=torch.float32), x.new_empty((), dtype=torch.int64))


@operator("amax(Tensor x, SymInt rows, SymInt columns) -> (Tensor, Tensor)", fake=_amax_results)
def _amax(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    library, (R, C) = _library(), x.shape
    if library is None:
        return reference_amax(x, rows, columns)
    _check_tiles(x, rows, columns)
    values, nonfinite = _amax_results(x, rows, columns)
    library.lp_amax(*_address(x, R * C, _INPUTS), R, C, R // rows, C // columns,
                    values.data_ptr(), nonfinite.data_ptr(), torch.get_num_threads())
    return values, nonfinite


@operator("qdq(Tensor x, Tensor scales, Tensor? back, str fmt, Tensor? noise, bool turned, "
          "ScalarType dtype) -> Tensor", fake=lambda x, *how: torch.empty_like(x, dtype=how[-1]))
def _qdq(x: Tensor, scales: Tensor, back: Tensor | None, fmt: str, noise: Tensor | None,
         turned: bool, dtype: torch.dtype) -> Tensor:
    library = _library()
    if library is None:
        return reference(x, scales, back, fmt, noise, turned, dtype)
    (R, C), (rows, columns), size = x.shape, scales.shape, x.numel()
    _check_tiles(x, rows, columns)
    shape = (R, C, R // rows, C // columns)
    if scales.numel() == 1 and not (noise is not None and turned):
        # With one scale the shape does not matter. As a single row, threads get equal parts.
        shape = (1, size, 1, size)
    scales_at, _ = _address(scales, rows * columns, (torch.float32,))
    back_at = None if back is None else _address(back, rows * columns, (torch.float32,))[0]
    drawn_by = None if noise is None else _Noise(*noise.tolist(), turned)
    out = torch.empty(x.shape, dtype=dtype)
    library.lp_qdq(*_address(x, size, _INPUTS), *_address(out, size, _KINDS), *shape, scales_at,
                   back_at, _grid(fmt), drawn_by, torch.get_num_threads())
    return out


def _mx_results(x: Tensor, rows: int, columns: int, *how) -> tuple[Tensor, Tensor, Tensor]:
    return (torch.empty_like(x, dtype=how[-1]), x.new_empty(rows, columns, dtype=torch.uint8),
            x.new_empty((), dtype=torch.int64))


@operator("mx(Tensor x, SymInt rows, SymInt columns, int added, int exponent, str fmt, "
          "Tensor? noise, bool turned, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
          fake=_mx_results)
def _mx(x: Tensor, rows: int, columns: int, added: int, exponent: int, fmt: str,
        noise: Tensor | None, turned: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    library = _library()
    if library is None:
        return reference_mx(x, rows, columns, added, exponent, fmt, noise, turned, dtype)
    _check_tiles(x, rows, columns)
    (R, C), size = x.shape, x.numel()
    if C // columns > MAX_BLOCK:
        raise TypeError(f"a block of {C // columns} is larger than {MAX_BLOCK}, a tile of the C "
                        f"kernel")
    out, scales, nonfinite = _mx_results(x, rows, columns, dtype)
    drawn_by = None if noise is None else _Noise(*noise.tolist(), turned)
    library.lp_mx(*_address(x, size, _INPUTS), *_address(out, size, _KINDS), R, C, R // rows,
                  C // columns, scales.data_ptr(), added, exponent, _grid(fmt), drawn_by,
                  nonfinite.data_ptr(), torch.get_num_threads())
    return out, scales, nonfinite


@operator("hadamard(Tensor x, bool turned) -> Tensor",
          fake=lambda x, turned: torch.empty_like(x, dtype=torch.float32))
def _hadamard(x: Tensor, turned: bool) -> Tensor:
    library, (R, C) = _library(), x.shape
    if library is None:
        return reference_hadamard(x, turned)
    _check_tiles(x, *((R // HADAMARD, C) if turned else (R, C // HADAMARD)))
    out = torch.empty(x.shape, dtype=torch.float32)
    signs = torch.tensor(SIGNS, dtype=torch.float32) / 4
    library.lp_hadamard(*_address(x, R * C, _INPUTS), out.data_ptr(), R, C, int(turned),
                        signs.data_ptr(), torch.get_num_threads())
    return out
