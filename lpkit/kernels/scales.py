"""Scales and casts by blocks: a rule computes the scale of a block from its largest magnitude
(amax), and a cast divides the block by its scale and rounds.

A rule is a function of amax (R, C) float32, one number for each of R x C blocks, and of a format. A
block that has a NaN or an Inf has an amax of NaN. Its scale is then NaN, too, so that the error
shows in all results. A rule returns a scale for each block, (R, C) float32, and the scale of the
whole tensor, () float32, or None if there is only one level of scales.

`cast` is the definition of every fused cast. It computes the amax, applies the rule, and rounds
x / scale to the values of the format. `swizzled` and `packed` convert scales and 4-bit values to
the layouts that Blackwell's tensor cores read.
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

TINY = 2.0**-100      # smallest amax that a rule uses, so that a block of zeros has a scale above 0

Scales = tuple[Tensor, Tensor | None]


def _over(amax: Tensor, number: float) -> Tensor:
    """Return amax / number, rounded once. For a plain number CUDA would multiply by its reciprocal
    (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu), which can differ in the last bit."""
    return amax / torch.full_like(amax, number)


def _float32(amax: Tensor, to: Format) -> Scales:
    """Return scales that map a block's largest magnitude to the largest value of the format."""
    return _over(amax.clamp(min=TINY), to.largest), None


def _power_of_two(exponent: Tensor, amax: Tensor) -> Scales:
    """Return 2^exponent, clamped to the range of E8M0, 2^-127 to 2^127; NaN where amax is NaN."""
    return torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127)) + amax * 0, None


def _up(amax: Tensor, to: Format) -> Scales:
    """Return the smallest power of two for which no element overflows (Mishra et al. 2025,
    https://arxiv.org/abs/2506.08027)."""
    mantissa, exponent = torch.frexp(amax)
    above = (mantissa > to.largest / 2.0**(to.max_exponent + 1)).int()
    return _power_of_two((exponent - 1 - to.max_exponent + above).masked_fill(amax == 0, 0), amax)


def _floor(amax: Tensor, to: Format) -> Scales:
    """Return 2^(exponent of amax - exponent of the format's largest value) (OCP Microscaling 1.0,
    section 6.3). The largest element of a block may saturate."""
    return _power_of_two(torch.frexp(amax).exponent - 1 - to.max_exponent, amax)


def _e4m3(amax: Tensor, to: Format) -> Scales:
    """Return scales of blocks in E4M3, which may be subnormal or 0, and the scale of the tensor in
    float32 (NVIDIA 2025, https://arxiv.org/abs/2509.25149, appendix B). The operations have the
    same order as in Transformer Engine's kernels, so the bits are the same."""
    largest, top = format_of("e4m3fn").largest, amax.amax().clamp(min=TINY)
    encode = torch.full_like(top, to.largest * largest) / top
    scale = amax * (encode * (1 / to.largest))
    return qdq(scale, format_of("e4m3fn")), encode.reciprocal()


def _e4m3_normal(amax: Tensor, to: Format) -> Scales:
    """Return scales as `_e4m3` does, but at least the smallest normal number of E4M3, as torchao's
    `nvfp4_quantize` does."""
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
    """Return `scale` (R, C) repeated over its blocks, so that it has the shape (M, K) of the data.
    """
    (M, K), (R, C) = shape, scale.shape
    return scale[:, None, :, None].expand(R, M // R, C, K // C).reshape(M, K)


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """An operand after its cast: value = data * scale * tensor, where each entry of `scale` applies
    to a block of `data`.

    In the layouts that tensor cores read, 4-bit data is uint8: a byte has two numbers, the first in
    its low half. One-byte scales may be one-dimensional (`swizzled`). float32 scales of 1 x 128
    blocks are stored column by column.
    """

    # (M, K), values of the format, in a dtype that holds them exactly
    data: Tensor
    scale: Tensor                   # (M / block rows, K / block columns), float32 or of one byte
    tensor: Tensor | None = None    # () float32, the second level of a two-level scale
    # float32, per block: the largest magnitude before the cast; not finite if any element is not
    amax: Tensor | None = None
    nonfinite: Tensor | None = None     # () int64: how many elements were NaN or Inf
    turned: Scaled | None = None        # the cast of x.T, if one kernel has cast both x and x.T

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors that determine the values, for `ctx.save_for_backward`."""
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
        """Return the values (M, K) in `dtype`. In float64 they are exact."""
        values, (R, C) = self.data.to(dtype, copy=True), self.scale.shape
        blocks = values.unflatten(0, (R, -1)).unflatten(2, (C, -1))
        blocks.mul_(self.scale.to(dtype)[:, None, :, None])
        return values if self.tensor is None else values.mul_(self.tensor.to(dtype))


def decide(amaxes: Tensor, amax: Tensor | None, rule: str,
           to: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the divisor of each block, (R, C) float32, the scale of each block, and the scale of
    the tensor or None. The divisor is the product of the two scales.

    amaxes: (R, C) float32, the largest magnitude of each block
    amax:   () float32, the amax of a history (delayed scaling), which is used instead of `amaxes`
            unless it is 0, as it is while the history is empty. A block with a NaN or an Inf still
            has a scale of NaN
    rule:   a key of MAKE_SCALES
    """
    used = amaxes if amax is None else torch.where(amaxes.isfinite() & (amax > 0), amax, amaxes)
    # used + (used - used) is NaN for an infinity, and `used` for a finite number
    scale, tensor = MAKE_SCALES[rule](used + (used - used), to)
    if tensor is None:
        return scale, scale, None
    # If a block's scale has rounded to 0, its divisor is infinity, so that its values become 0.
    return torch.where(scale == 0, torch.inf, scale * tensor), scale, tensor


def stored_dtype(to: Format) -> torch.dtype:
    """Return the dtype in which values of a format are stored: uint8 for 4-bit formats, whose two
    values share a byte."""
    return getattr(torch, to.torch_dtype) if to.torch_dtype else torch.uint8


def cast(x: Tensor, to: Format, block: tuple[int, int], rule: str, *,
         history: Tensor | None = None, noise: Tensor | None = None) -> Scaled:
    """Return the cast of x (M, K), whose contracted axis is last: the definition of every fused
    cast.

    block:   (rows, columns) that share a scale; 0 stands for the whole axis
    rule:    a key of MAKE_SCALES
    history: () float32, the amax of a history (delayed scaling), which determines the scale unless
             it is 0. If x then has a NaN or an Inf, only the returned scale is NaN, because kernels
             know of it only after they have written the values
    noise:   `Noise.words`, for stochastic rounding; None: round to nearest-even
    """
    amaxes, nonfinite = kernel.amax(x, block)
    used = amaxes if history is None else torch.where(history > 0, history, amaxes)
    both, scale, tensor = decide(used, None, rule, to)
    dtype = stored_dtype(to)
    # Round by PyTorch's own dtype conversion where possible, because torch.compile can fuse it.
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
    """Return the bytes of `swizzled` for (R, C) scales: each tile of 128 x 4 has 512 bytes.

    >>> swizzled_bytes(130, 8)
    2048
    """
    return -(-R // 128) * -(-C // 4) * 512


def swizzled(scale: Tensor) -> Tensor:
    """Return one-byte scales (R, C) as the sequence of tiles of 128 x 4 that Blackwell's tensor
    cores read, one-dimensional, padded with zeros. The scale in row r, column c of a tile is at
    byte (r % 32) * 16 + (r // 32) * 4 + c. Source: cuBLAS, "1D block scaling factors layout"."""
    R, C = scale.shape
    padded = torch.zeros(-(-R // 128) * 128, -(-C // 4) * 4, dtype=torch.uint8, device=scale.device)
    padded[:R, :C] = scale.view(torch.uint8)
    # axes: tile row, r // 32, r % 32, tile column, c
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(scale.dtype)


def packed(codes: Tensor) -> Tensor:
    """Return 4-bit codes (M, K) uint8 as (M, K / 2) uint8: two codes per byte, the first in the low
    half.

    >>> packed(torch.tensor([[1, 2]], dtype=torch.uint8)).item()
    33
    """
    return codes[:, ::2] | codes[:, 1::2] << 4
