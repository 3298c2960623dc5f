"""Casts a matrix to low precision, and emulates the matmul of two such matrices, with the same
numbers on any device.

A block is a group of elements that share a scale; its shape is (rows, columns): tensorwise
(all, all), rowwise (1, all), DeepSeek's activations (1, 128) and weights (128, 128), MX (1, 32),
NVFP4 (1, 16) and (16, 16). Operands have the contracted axis last; `product(a, b)` is a @ b.T.

Values in E4M3, E5M2, E2M1 and INT8 have at most 8 significant bits, so bf16 represents them
exactly. A bf16 matmul accumulates in float32 and rounds once. So the emulation is fast:
1. Scales that are constant along the contracted axis (of a tensor, of a row): multiply the values
   in bf16, and multiply the result by the scales.
2. Scales that are powers of two, and E4M3 scales of E2M1 values: multiply them into the operands
   first, which is exact in bf16, and then multiply in bf16.
3. Other scales, float32 that vary along the contracted axis (1x128, 128x128): multiply them into
   the operands in float32, and multiply in float32.
Compared with the definition in float64 (`reference`), two differences remain: the order of a
float32 sum, and the rounding of the result to the output dtype (twice for row scales in bf16).
tests/precision/test_scaled_linear.py checks a bound on each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.kernels import cast as kernel
from lpkit.kernels import wide_product
from lpkit.kernels.cast import Noise, hadamard
from lpkit.kernels.pytorch import product_pytorch
from lpkit.kernels.scales import Scaled, decide, spread
from lpkit.precision.backends import sharing, slow_float16
from lpkit.precision.linear import Arithmetic
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import ALL, SCALES, Cast, Recipe

# Transforms of an operand (rows, contracted axis) before its cast. If both operands are
# transformed, the transforms cancel in the matmul.

TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "hadamard": hadamard}


def quantise(x: Tensor, cast: Cast, *, dtype: torch.dtype = torch.float32,
             amax: Tensor | None = None, noise: Noise | None = None, fold: bool = False) -> Scaled:
    """Return the cast of x (M, K), whose contracted axis is last.

    dtype: of the values in the result, which must represent the format exactly
    amax:  () float32, used instead of the tensor's largest magnitude (delayed scaling); 0 or None:
           not used
    noise: for stochastic rounding; None: round to nearest-even
    fold:  multiply the scales of blocks into the values if this is exact in bf16 (case 2 above)
    Raises ConfigError if the sides of x are not multiples of the block's sides.
    """
    x = TRANSFORMS[cast.transform](x)
    to, rule = format_of(cast.format), SCALES[cast.scale]
    if fold and rule.fused and ALL not in cast.block and x.device.type == "cpu":
        blocks = kernel.mx(x, to, rule=rule.fused, block=cast.block, dtype=dtype, noise=noise)
        return Scaled(data=blocks.values, scale=torch.ones(1, 1), nonfinite=blocks.nonfinite)
    largest, nonfinite = kernel.amax(x, cast.block)
    both, scale, tensor = decide(largest, amax, cast.scale, to)
    if rule.identity:
        data = x.to(getattr(torch, to.torch_dtype)).to(dtype)
    else:
        data = kernel.qdq(x, to, both, block=cast.block, dtype=dtype, noise=noise,
                          rescale=fold and rule.folds and scale)
    if fold and rule.folds:
        scale = scale.new_ones(1, 1)
    return Scaled(data=data, scale=scale, tensor=tensor, amax=largest, nonfinite=nonfinite)


def reference(a: Scaled, b: Scaled) -> Tensor:
    """Return a @ b.T, (M, N) float64: the definition of `product`."""
    return a.dequantise(torch.float64) @ b.dequantise(torch.float64).T


def product(a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
            wide: bool = False) -> Tensor:
    """Return a @ b.T + bias, (M, N) in `dtype`; a (M, K), b (N, K), bias (N,). `wide`: compute
    large bf16 matmuls in float32 (`kernels.wide_product`)."""
    # case 3: scales that vary along the contracted axis
    if a.scale.shape[1] > 1 or b.scale.shape[1] > 1:
        return _matmul(a.dequantise(), b.dequantise(), None, bias, dtype, wide)
    single = [s.reshape(()) for s in (a.scale, b.scale, a.tensor, b.tensor)
              if s is not None and s.numel() == 1]
    alpha = torch.stack(single).prod() if single else None
    if a.scale.numel() == b.scale.numel() == 1:
        return _matmul(a.data, b.data, alpha, bias, dtype, wide)
    y = _matmul(a.data, b.data, None, None, dtype, wide).float()
    if a.scale.numel() > 1:
        y *= spread(a.scale, (y.shape[0], 1))
    if b.scale.numel() > 1:
        y *= spread(b.scale, (y.shape[1], 1)).T
    if alpha is not None:
        y *= alpha
    return (y if bias is None else y.add_(bias)).to(dtype)


def _matmul(a: Tensor, b: Tensor, alpha: Tensor | None, bias: Tensor | None,
            dtype: torch.dtype, wide: bool) -> Tensor:
    """Return alpha * a @ b.T + bias, accumulated in float32 and rounded once to `dtype`."""
    # On a CPU these functions apply alpha and bias before they round the result.
    if a.device.type == "cpu":
        if wide and a.dtype == torch.bfloat16 and wide_product.wins(a, b):
            return wide_product.multiply(a, b, bias, alpha).to(dtype)
        # `product_pytorch` reads alpha on the host, which a compiled graph cannot do; `addmm` is an
        # operator. Outside of a graph an operator costs 7 us more.
        form = wide_product.addmm if torch.compiler.is_compiling() else product_pytorch
        return form(a, b, bias if bias is None else bias.to(a.dtype), alpha).to(dtype)
    y = torch.mm(a, b.T, out_dtype=torch.float32) if a.dtype != torch.float32 else a @ b.T
    y = y if alpha is None else y.mul_(alpha)
    return (y if bias is None else y.add_(bias)).to(dtype)


class Float16Linear(nn.Linear):
    """nn.Linear under float16 autocast, for CPUs without float16 products: operands and results are
    rounded to float16, and the product is computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x, w, b = (t if t is None else t.half().float() for t in (x, self.weight, self.bias))
            return F.linear(x, w, b).half()


class Emulated(Arithmetic):
    """Emulates all recipes on any device, and float16 on CPUs."""

    wide = False

    def automatic(self, recipe: Recipe, device: torch.device) -> bool:
        return True

    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        if recipe.products or slow_float16(recipe, device):
            return ""
        return f"{name} casts nothing that could be emulated"

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        if not recipe.products:
            return sharing(Float16Linear, linear)
        return super().wrap(linear, recipe, name=name, seed=seed)

    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, amax: Tensor | None,
             noise: Noise | None, both: bool = False) -> Scaled:
        held = torch.float32 if dtype == torch.float32 else torch.bfloat16
        return quantise(x, cast, dtype=held, amax=amax, noise=noise, fold=True)

    def taken(self, existing: Scaled, cast: Cast, dtype: torch.dtype, *,
              both: bool = False) -> Scaled:
        held = torch.float32 if dtype == torch.float32 else torch.bfloat16
        values, scale = existing.data.to(held), existing.scale
        if SCALES[cast.scale].folds:
            values = Scaled(data=values, scale=scale).dequantise(held)
            scale = scale.new_ones(1, 1)
        return Scaled(data=values, scale=scale, amax=existing.amax, nonfinite=existing.nonfinite)

    def shares(self, cast: Cast) -> bool:
        return cast.transposes

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        return product(a, b, dtype, bias, wide=self.wide)


EMULATED = Emulated()
