"""Products of 8- and 4-bit operands by the device: torch._scaled_mm and F.scaled_mm on the tensor
cores of Ada, Hopper and Blackwell, and torch._int_mm for int8.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.kernels.cast import Noise
from lpkit.kernels.fused_cast import cast_operand, definition
from lpkit.kernels.fused_cast import why_not as no_kernel
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.scales import Scaled
from lpkit.precision import scaled
from lpkit.precision.linear import Arithmetic, ScaledLinear
from lpkit.techniques.hardware import HARDWARE, dotted
from lpkit.techniques.recipes import Cast, Recipe


def saturates(recipe: Recipe, device: torch.device) -> str:
    """Return the reason why torch._int_mm sums products wrongly on this device, or ""."""
    if device.type != "cpu" or recipe.dtype != "int8":
        return ""
    x = torch.full((32, 64), 127, dtype=torch.int8)
    if torch._int_mm(x, x.T.contiguous()).max().item() == 64 * 127 * 127:
        return ""
    return ("torch._int_mm saturates on this CPU: without VNNI oneDNN adds two products of int8 in "
            "16 bits")


def too_old(needs: str, capability: tuple[int, int], device: torch.device) -> str:
    """Return the reason why this GPU is too old, or "". Other devices are never too old."""
    if device.type != "cuda" or (has := torch.cuda.get_device_capability(device)) >= capability:
        return ""
    return f"{needs} compute capability {dotted(capability)}, and this GPU has {dotted(has)}"


class ScaledMM(Arithmetic):
    """Multiplies operands that are stored in 8 or 4 bits. The kernels that cast are chosen like a
    layer's kernels (`lpkit.nn.layers`), so each Linear has its own copy of this object."""

    alignment = 16
    kernels: ClassVar = {name.replace("-", "_"): name for name in (
        "cast-tensor", "cast-rows", "cast-blocks", "cast-mx", "cast-nvfp4")}
    cast_tensor = cast_rows = cast_blocks = cast_mx = cast_nvfp4 = staticmethod(definition)

    def automatic(self, recipe: Recipe, device: torch.device) -> bool:
        return device.type == "cuda"        # a CPU multiplies float8 slower than it emulates it

    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        if not recipe.products:
            return f"{name} casts nothing"
        for product, (a, b) in recipe.products.items():
            if a is None or b is None:
                return f"{product} has one operand in {recipe.compute}, and both must be cast"
            support = HARDWARE.get(a.format, {}).get((a.block, b.block))
            if support is None or (a.format, b.format) == ("e5m2", "e5m2"):
                return (f"there is no product of {a.format} {a.block} and {b.format} {b.block} "
                        f"blocks, as {product} needs")
            needed, cpu, what = support
            if a.block == (1, 128) and (a.format, b.format) != ("e4m3fn", "e4m3fn"):
                return (f"PyTorch multiplies {what} in E4M3 alone, and {product} has {a.format} "
                        f"and {b.format}")
            if device.type == "cpu" and not cpu:
                return f"{what} need compute capability {dotted(needed)}, and this is a CPU"
            if problem := too_old(f"{what} need", needed, device):
                return problem
            if device.type == "cuda" and a.block == (1, 128):
                has = torch.cuda.get_device_capability(device)
                if has >= (10, 0):
                    return (f"PyTorch has {what} on Hopper alone (9.0), and this GPU has "
                            f"{dotted(has)}; mxfp8 is its successor")
        if device.type == "cuda" and not torch.cuda.is_available():
            return ""
        return saturates(recipe, device) or self.refusal(recipe, device)

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        return ScaledLinear.wrap(linear, recipe, copy(self), name=name, seed=seed)

    def refusal(self, recipe: Recipe, device: torch.device) -> str:
        """Return the error of PyTorch or cuBLASLt for a small product of each kind, or "". Only
        trying tells: for example, row scales on Hopper need cuBLASLt of CUDA 12.9, or CUTLASS,
        which a build of PyTorch may lack; and on a CPU torch 2.11 has none."""
        # a second block shows scales of blocks of 128
        x = torch.zeros(256, 256, device=device, dtype=torch.bfloat16)
        for name, pair in recipe.products.items():
            a, b = (self.cast(x, replace(cast, rounding="nearest-even"), x.dtype, amax=None,
                              noise=None) for cast in pair)
            try:
                self.product(a, b, x.dtype, fast=name in recipe.fast_accumulation)
            except (RuntimeError, ValueError) as error:
                return (f"torch {torch.__version__} refuses {name}'s product of {pair[0].format} "
                        f"in blocks of {pair[0].block} ({str(error).splitlines()[0]}); "
                        f"fp8-tensorwise, of one scale a tensor, needs the least")
        return ""

    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, amax: Tensor | None,
             noise: Noise | None, both: bool = False) -> Scaled:
        return cast_operand(x, cast, amax=amax, noise=noise, both=both,
                            by=lambda name: getattr(self, name.replace("-", "_")))

    def taken(self, existing: Scaled, cast: Cast, dtype: torch.dtype, *,
              both: bool = False) -> Scaled:
        return replace(existing, turned=existing.transposed()) if both else existing

    def shares(self, cast: Cast) -> bool:
        # products draw different noise, unless the cast is its own transpose
        return not no_kernel(cast, both=True) and (cast.transposes or cast.rounding != "stochastic")

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        if a.data.dtype == dtype and a.tensor is None:      # the recipe does not cast this product
            return scaled.product(a, b, dtype, bias)
        right = b.data.T        # column-major: Hopper's 8-bit tensor cores accept no other order
        if bias is not None and a.data.dtype != torch.int8:
            bias = bias.to(torch.bfloat16)
        if a.data.dtype == torch.int8:
            y = torch._int_mm(_rows(a.data, least=32), right)[:len(a.data)] * a.scale * b.scale.T
        elif a.tensor is not None:
            y = _float4(*a.stored, *b.stored)
        elif a.scale.dtype == torch.float8_e8m0fnu:
            y = torch._scaled_mm(a.data, right, scale_a=a.scale, scale_b=b.scale,
                                 out_dtype=torch.bfloat16)
        elif (scales := _inferred(a, b)) is not None:
            return torch._scaled_mm(a.data, right, scale_a=scales[0], scale_b=scales[1], bias=bias,
                                    out_dtype=torch.bfloat16, use_fast_accum=fast).to(dtype)
        else:
            left, scale = _rows(a.data, multiple=4), _rows(a.scale, multiple=4)
            y = _blocks128(left, scale, b.data, b.scale)[:len(a.data)]
        return (y if bias is None else y + bias).to(dtype)


def _rows(t: Tensor, *, least: int = 0, multiple: int = 1) -> Tensor:
    """Return t with rows of zeros appended. `torch._int_mm` refuses 16 rows or fewer. Columns of
    scales must begin at multiples of 16 bytes, also for any number of tokens in sampling
    (Transformer Engine's Float8BlockQuantizer pads them, too)."""
    more = max(least - len(t), -len(t) % multiple)
    return F.pad(t, (0, 0, 0, more)) if more > 0 else t


def _inferred(a: Scaled, b: Scaled) -> tuple[Tensor, Tensor] | None:
    """Return scales in shapes from which `torch._scaled_mm` infers their meaning: (1, 1) for
    tensors (of a view without axes Inductor takes the whole), and (M, 1) and (1, N) for rows.
    Returns None for blocks of 128, which it may misread: if the sum is one block long, a 1x128
    scale looks like a row's scale, and a 128x128 scale like a tensor's."""
    if a.scale.numel() == b.scale.numel() == 1:
        return a.scale.reshape(1, 1), b.scale.reshape(1, 1)
    # 1x128 scales over a sum of 128 are row scales
    if all(s.scale.shape == (s.data.shape[0], 1) for s in (a, b)):
        # reshape fixes strides of dimensions of size 1, which contiguous() does not
        return (a.scale.reshape(-1).view(-1, 1), b.scale.reshape(-1).view(1, -1))
    return None


# F.scaled_mm in operators: Inductor (torch 2.13) lowers F.scaled_mm to torch._scaled_mm, which
# infers kinds of scales from shapes, and has no swizzles.

@operator("scaled_mm_128(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b) -> Tensor",
          key=EVERY_DEVICE, product=True, flops=lambda a, _, b, *__, **___: 2 * a[0] * a[1] * b[0])
def _blocks128(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """Multiply a (M, K) by b (N, K). Scales are for 1x128 blocks; b's also for 128x128 blocks."""
    return F.scaled_mm(a, b.T, *_outer_major(a, scale_a),
                       *_outer_major(b, scale_b), output_dtype=torch.bfloat16)


def _outer_major(t: Tensor, scale: Tensor) -> tuple[Tensor, Any]:
    """Return scales in the layout that the product reads, and their kind. 1x128 scales (R, C) are
    stored column by column. 128x128 scales (R, C) are too, and padded to (C rounded up to 4, R).
    Source: the checks of `torch._scaled_mm_v2`, and cuBLAS 12.9, "scaling factors layouts"."""
    if scale.shape[0] == t.shape[0]:
        return scale.T.contiguous().T, F.ScalingType.BlockWise1x128
    # transposing after padding keeps the strides that the product needs
    padded = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return padded.T, F.ScalingType.BlockWise128x128


@operator("scaled_mm_16(Tensor a, Tensor scale_a, Tensor tensor_a, Tensor b, Tensor scale_b, "
          "Tensor tensor_b) -> Tensor", key=EVERY_DEVICE, product=True,
          flops=lambda a, _, __, b, *___, **____: 4 * a[0] * a[1] * b[0])
def _float4(a: Tensor, scale_a: Tensor, tensor_a: Tensor, b: Tensor, scale_b: Tensor,
            tensor_b: Tensor) -> Tensor:
    left, right = (t.view(torch.float4_e2m1fn_x2) for t in (a, b))
    two = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    how = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(left, right.T, [scale_a, tensor_a], two, [scale_b, tensor_b], two, how, how,
                       output_dtype=torch.bfloat16)


SCALED_MM = ScaledMM()
