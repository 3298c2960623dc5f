"""Scales and casts by blocks: a rule computes a block's scale from its largest magnitude, and a
cast divides by the scale and rounds.

A rule takes amax (R, C) float32, which is NaN if a block has a NaN or an Inf. The scale is then NaN
as well, so that the error cannot go unnoticed. A rule returns a scale per block, (R, C) float32,
and the scale of the second level, () float32 or None.

`cast` is the definition of every fused cast: an amax, a rule, and x / scale rounded to the grid.
`swizzled` and `packed` convert scales and 4-bit values to the layouts that Blackwell's tensor cores
read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.kernels import cast as kernel
from lpkit.kernels.cast import qdq, reference
from lpkit.kernels.kernel import floats
from lpkit.techniques.formats import Format, format_of

TINY = 2.0**-100      # smallest amax, so that a block of zeros has a finite scale

Scales = tuple[Tensor, Tensor | None]


def _over(amax: Tensor, number: float) -> Tensor:
    """Return amax / number, rounded once. For a plain number CUDA would multiply by its reciprocal
    (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu), which can differ in the last bit."""
    return amax / torch.full_like(amax, number)


def _float32(amax: Tensor, to: Format) -> Scales:
    """Map the block's largest magnitude to the format's."""
    return _over(amax.clamp(min=TINY), to.largest), None


def _power_of_two(exponent: Tensor, amax: Tensor) -> Scales:
    """Return 2^exponent, clamped to E8M0's range, 2^-127 to 2^127. `amax * 0` passes NaN on."""
    return torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127)) + amax * 0, None


def _up(amax: Tensor, to: Format) -> Scales:
    """Return the smallest power of two without overflow (Mishra et al. 2025,
    https://arxiv.org/abs/2506.08027)."""
    mantissa, exponent = torch.frexp(amax)
    above = (mantissa > to.largest / 2.0**(to.max_exponent + 1)).int()
    return _power_of_two((exponent - 1 - to.max_exponent + above).masked_fill(amax == 0, 0), amax)


def _floor(amax: Tensor, to: Format) -> Scales:
    """Subtract exponents (OCP Microscaling 1.0, section 6.3): the largest element may saturate."""
    return _power_of_two(torch.frexp(amax).exponent - 1 - to.max_exponent, amax)


def _e4m3(amax: Tensor, to: Format) -> Scales:
    """Return E4M3 scales, which may be subnormal or 0, and a float32 scale of the tensor (NVIDIA
    2025, https://arxiv.org/abs/2509.25149, appendix B). Operations have the order of Transformer
    Engine's kernels, so the bits are the same."""
    largest, top = format_of("e4m3fn").largest, amax.amax().clamp(min=TINY)
    encode = torch.full_like(top, to.largest * largest) / top
    scale = amax * (encode * (1 / to.largest))
    return qdq(scale, format_of("e4m3fn")), encode.reciprocal()


def _e4m3_normal(amax: Tensor, to: Format) -> Scales:
    """As `_e4m3`, but at least E4M3's smallest normal number: torchao's `nvfp4_quantize`."""
    e4m3 = format_of("e4m3fn")
    tensor = _over(amax.amax(), to.largest * e4m3.largest).clamp(min=TINY)
    scale = (_over(amax, to.largest) / tensor).clamp(min=e4m3.smallest_normal)
    return qdq(scale, e4m3), tensor


def _none(amax: Tensor, to: Format) -> Scales:
    return torch.ones_like(amax), None


# rules by their names in `lpkit.techniques.recipes.SCALES`
MAKE_SCALES: dict[str, Callable[[Tensor, Format], Scales]] = {
    "float32": _float32, "power-of-two": _up, "power-of-two-floor": _floor, "e4m3": _e4m3,
    "e4m3-normal": _e4m3_normal, "none": _none}


def spread(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """Repeat each scale over its block, so that it has the shape of the data."""
    (M, K), (R, C) = shape, scale.shape
    return scale[:, None, :, None].expand(R, M // R, C, K // C).reshape(M, K)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """An operand after its cast: value = data * scale * tensor, where each entry of `scale` applies
    to a block of `data`.

    In the layouts of tensor cores, 4-bit data is uint8, with two numbers per byte, the first one in
    the low half. One-byte scales may be the bytes of their tiles, and float32 scales of 1 x 128 are
    stored column by column.
    """

    # (M, K), values of the format, in a dtype that holds them exactly
    data: Tensor
    scale: Tensor                   # (M / block rows, K / block columns), float32 or of one byte
    tensor: Tensor | None = None    # () float32, the second level of a two-level scale
    # float32, per block: the largest magnitude before the cast; not finite if any element is not
    amax: Tensor | None = None
    nonfinite: Tensor | None = None     # () int64: how many elements were NaN or Inf
    turned: Scaled | None = None        # the cast of x.T, if one read has cast both

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors that its values are made of."""
        return self.data, self.scale, self.tensor

    @property
    def T(self) -> Scaled:
        if self.turned is not None:
            return self.turned
        return replace(self, data=self.data.T, scale=self.scale.T,
                       amax=None if self.amax is None else self.amax.T)

    def transposed(self) -> Scaled:
        """Return `T` as a copy, in the layout that products on hardware read."""
        return replace(self, data=self.data.T.contiguous(), scale=self.scale.T.contiguous())

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values (M, K); exact in float64."""
        values, (R, C) = self.data.to(dtype, copy=True), self.scale.shape
        blocks = values.unflatten(0, (R, -1)).unflatten(2, (C, -1))
        blocks.mul_(self.scale.to(dtype)[:, None, :, None])
        return values if self.tensor is None else values.mul_(self.tensor.to(dtype))


def decide(amaxes: Tensor, amax: Tensor | None, rule: str,
           to: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the divisor of blocks with the largest magnitudes `found`, and its two levels. amax:
    () of a history. While the history is empty (0), `found` is used. A NaN in the current blocks
    makes the scale NaN, whatever the history."""
    used = amaxes if amax is None else torch.where(amaxes.isfinite() & (amax > 0), amax, amaxes)
    scale, tensor = MAKE_SCALES[rule](used + (used - used), to)     # this makes an infinity NaN
    if tensor is None:
        return scale, scale, None
    # a scale that rounded to 0 makes every value 0
    return torch.where(scale == 0, torch.inf, scale * tensor), scale, tensor


def stored_dtype(to: Format) -> torch.dtype:
    """Return the dtype of a format's values; uint8 for two 4-bit values."""
    return getattr(torch, to.torch_dtype) if to.torch_dtype else torch.uint8


def cast(x: Tensor, to: Format, block: tuple[int, int], rule: str, *,
         history: Tensor | None = None, noise: Tensor | None = None) -> Scaled:
    """The definition of a cast of x (M, K), whose contracted axis is last. 0 in `block` stands for
    the whole axis. noise: `Noise.words`. history: () float32, the amax that decides the scale
    unless it is 0. With a history, a non-finite x is noticed too late for the values, so only the
    scale becomes NaN."""
    amaxes, nonfinite = kernel.amax(x, block)
    used = amaxes if history is None else torch.where(history > 0, history, amaxes)
    both, scale, tensor = decide(used, None, rule, to)
    dtype = stored_dtype(to)
    # PyTorch's own casts, which torch.compile can fuse
    if noise is None and dtype != torch.uint8:
        data = x.float() / spread(both, x.shape)
        if not dtype.is_floating_point:
            data = data.round().nan_to_num(0.0)     # NaN has no integer value; the scale is NaN
        data = data.clamp(-to.largest, to.largest).to(dtype)
    else:
        data = reference(x.contiguous(), both, None, to.name, noise, False, torch.uint8)
        if to.nan is None:
            data = data.masked_fill(spread(both, x.shape).isnan(), 0)
        data = data.view(dtype)
    return Scaled(data=data, scale=scale if history is None else scale + amaxes * 0, tensor=tensor,
                  amax=amaxes, nonfinite=nonfinite)


def check(x: Tensor, block: tuple[int, int] = (1, 1)) -> None:
    """Raise ConfigError for a matrix that a fused cast does not accept."""
    if x.ndim != 2 or not x.numel() or x.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"a fused cast takes a matrix of float32 or bfloat16 that is not empty, "
                          f"not {x.dtype} {tuple(x.shape)}")
    floats(x)
    kernel.in_tiles(x, block)


# Layouts of scales and values that Blackwell's tensor cores read.

def swizzled_bytes(R: int, C: int) -> int:
    return -(-R // 128) * -(-C // 4) * 512


def swizzled(scale: Tensor) -> Tensor:
    """(R, C) one-byte scales -> the tiles of 128 x 4 that Blackwell's tensor cores read, as cuBLAS
    documents them ("1D block scaling factors layout"): within a tile, row r and column c are at
    byte (r % 32) * 16 + (r // 32) * 4 + c."""
    R, C = scale.shape
    padded = torch.zeros(-(-R // 128) * 128, -(-C // 4) * 4, dtype=torch.uint8, device=scale.device)
    padded[:R, :C] = scale.view(torch.uint8)
    # axes: tile row, r // 32, r % 32, tile column, c
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(scale.dtype)


def packed(codes: Tensor) -> Tensor:
    """4-bit codes (M, K) -> two per byte, the first in the low half, (M, K / 2) uint8."""
    return codes[:, ::2] | codes[:, 1::2] << 4
