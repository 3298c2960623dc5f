"""Matmuls of 8- and 4-bit operands by hardware instructions: torch._scaled_mm and F.scaled_mm on
the tensor cores of Ada, Hopper and Blackwell GPUs, and torch._int_mm for int8.
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
    """Return the reason why torch._int_mm gives wrong sums on this device, or ""."""
    if device.type != "cpu" or recipe.dtype != "int8":
        return ""
    x = torch.full((32, 64), 127, dtype=torch.int8)
    if torch._int_mm(x, x.T.contiguous()).max().item() == 64 * 127 * 127:
        return ""
    return ("torch._int_mm saturates on this CPU: without VNNI oneDNN adds two products of int8 in "
            "16 bits")


def too_old(needs: str, capability: tuple[int, int], device: torch.device) -> str:
    """Return the reason why a GPU has a lower compute capability than `capability`, or ""; "" for
    other devices. `needs`: the beginning of the sentence."""
    if device.type != "cuda" or (has := torch.cuda.get_device_capability(device)) >= capability:
        return ""
    return f"{needs} compute capability {dotted(capability)}, and this GPU has {dotted(has)}"


class ScaledMM(Arithmetic):
    """Multiplies operands that are stored in 8 or 4 bits.

    The kernels that cast are attributes, and `lpkit.execution.kernels` replaces them as it replaces
    the kernels of a layer. So each Linear has its own copy of this object.
    """

    alignment = 16
    kernels: ClassVar = {name.replace("-", "_"): name for name in (
        "cast-tensor", "cast-rows", "cast-blocks", "cast-mx", "cast-nvfp4")}
    cast_tensor = cast_rows = cast_blocks = cast_mx = cast_nvfp4 = staticmethod(definition)

    def automatic(self, recipe: Recipe, device: torch.device) -> bool:
        return device.type == "cuda"        # on a CPU the emulation is faster than float8 matmuls

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
        """Return the error of PyTorch or cuBLASLt for a small matmul of each kind in the recipe, or
        "". It tries them, because versions do not tell what works: for example, row scales on
        Hopper need cuBLASLt of CUDA 12.9, or CUTLASS, which a build of PyTorch may lack; and on a
        CPU torch 2.11 has no matmul with row scales."""
        # 256 wide, so that there are two blocks of 128 along the contracted axis
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
        # With stochastic rounding, the casts of x and x.T use different random numbers, unless the
        # recipe defines the cast of x.T as the transpose of the cast of x.
        return not no_kernel(cast, both=True) and (cast.transposes or cast.rounding != "stochastic")

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        if a.data.dtype == dtype and a.tensor is None:      # the recipe does not cast the operands
            return scaled.product(a, b, dtype, bias)
        right = b.data.T        # column-major, the only order that Hopper's FP8 tensor cores accept
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
    """Return t with rows of zeros appended: at least `least` rows, and a multiple of `multiple`.
    `torch._int_mm` refuses 16 rows or fewer. Columns of float32 scales must begin at multiples of
    16 bytes, so 4 rows, also when sampling has only one token (Transformer Engine's
    Float8BlockQuantizer also pads them)."""
    more = max(least - len(t), -len(t) % multiple)
    return F.pad(t, (0, 0, 0, more)) if more > 0 else t


def _inferred(a: Scaled, b: Scaled) -> tuple[Tensor, Tensor] | None:
    """Return the scales in shapes from which `torch._scaled_mm` infers their kind: (1, 1) for one
    scale per tensor, and (M, 1) and (1, N) for one scale per row. (A scale without axes would not
    do: for a view, Inductor passes the whole storage.)

    Return None for blocks of 128. `torch._scaled_mm` could confuse them: if K is 128, a 1x128 scale
    has the shape of a row's scale, and a 128x128 scale the shape of a tensor's scale.
    """
    if a.scale.numel() == b.scale.numel() == 1:
        return a.scale.reshape(1, 1), b.scale.reshape(1, 1)
    # If K is 128, 1x128 scales are row scales, and are treated as row scales here.
    if all(s.scale.shape == (s.data.shape[0], 1) for s in (a, b)):
        # reshape and view set the strides of dimensions of size 1; contiguous() leaves them
        return (a.scale.reshape(-1).view(-1, 1), b.scale.reshape(-1).view(1, -1))
    return None


# F.scaled_mm is called inside of operators, which Inductor does not change. Otherwise Inductor
# (torch 2.13) would replace it by torch._scaled_mm, which infers the kind of scales from their
# shapes and does not know swizzled layouts.

@operator("scaled_mm_128(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b) -> Tensor",
          key=EVERY_DEVICE, product=True, flops=lambda a, _, b, *__, **___: 2 * a[0] * a[1] * b[0])
def _blocks128(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """Return a @ b.T, (M, N) bf16; a (M, K), b (N, K). The scales of a are of 1x128 blocks, and the
    scales of b of 1x128 or 128x128 blocks."""
    return F.scaled_mm(a, b.T, *_outer_major(a, scale_a),
                       *_outer_major(b, scale_b), output_dtype=torch.bfloat16)


def _outer_major(t: Tensor, scale: Tensor) -> tuple[Tensor, Any]:
    """Return the scales (R, C) of t in the layout that the matmul reads, and their kind. 1x128
    scales are stored column by column. 128x128 scales are padded to a multiple of 4 columns, and
    passed as the transpose. Source: the checks of `torch._scaled_mm_v2`, and cuBLAS 12.9, "scaling
    factors layouts"."""
    if scale.shape[0] == t.shape[0]:
        return scale.T.contiguous().T, F.ScalingType.BlockWise1x128
    # Pad first and transpose afterwards, so that the strides are those that the matmul needs.
    padded = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return padded.T, F.ScalingType.BlockWise128x128


@operator("scaled_mm_16(Tensor a, Tensor scale_a, Tensor tensor_a, Tensor b, Tensor scale_b, "
          "Tensor tensor_b) -> Tensor", key=EVERY_DEVICE, product=True,
          flops=lambda a, _, __, b, *___, **____: 4 * a[0] * a[1] * b[0])
def _float4(a: Tensor, scale_a: Tensor, tensor_a: Tensor, b: Tensor, scale_b: Tensor,
            tensor_b: Tensor) -> Tensor:
    """Return a @ b.T, (M, N) bf16, for NVFP4: a (M, K / 2) and b (N, K / 2) uint8, with swizzled
    E4M3 scales of 1x16 blocks, and a float32 scale of each tensor."""
    left, right = (t.view(torch.float4_e2m1fn_x2) for t in (a, b))
    two = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    how = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(left, right.T, [scale_a, tensor_a], two, [scale_b, tensor_b], two, how, how,
                       output_dtype=torch.bfloat16)


SCALED_MM = ScaledMM()
