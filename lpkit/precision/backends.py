"""A backend multiplies: a table of those behind the same recipes.

    emulated            any device; the numbers of the recipe, without its speed
    scaled_mm           torch._scaled_mm and F.scaled_mm: tensor cores of Ada, Hopper and Blackwell;
                        torch._int_mm for int8
    transformer-engine  NVIDIA's te.Linear under one te.autocast, when installed
    torchao             its Float8Linear and INT8 Linear, when installed
    pytorch             recipes that cast nothing: nn.Linear under autocast

`choose` says which one runs a recipe here and why the others do not. A backend is tried where it
is, so a reason is the library's or the device's, never a guess by name.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.contracts import Choice
from lpkit.errors import ConfigError, pick
from lpkit.kernels.cast import Noise
from lpkit.kernels.cast_operand import cast_operand
from lpkit.kernels.cast_operand import why_not as no_kernel
from lpkit.kernels.fused_cast import definition
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.kernels.wide_product import WideLinear
from lpkit.precision import scaled
from lpkit.precision.linear import Float16Linear, ScaledLinear, sharing
from lpkit.precision.scaled import Scaled, quantise
from lpkit.techniques.hardware import HARDWARE, dotted
from lpkit.techniques.recipes import RECIPES, Cast, Recipe


class Backend(ABC):
    alignment = 0
    wide: bool | None = None    # whether large bf16 products on a CPU are float32's; None: not asked

    def by(self, products: Choice | None) -> Backend:
        """This backend with the products that a run has chosen."""
        if products is None:
            return self
        made = copy(self)
        made.wide = products.used == "float32"
        return made

    def plain(self, linear: nn.Linear) -> nn.Linear:
        """The module that stands for a Linear whose operands are not cast."""
        return sharing(WideLinear, linear) if self.wide else linear

    def automatic(self, recipe: Recipe, device: torch.device) -> bool:
        """True if `auto` may take it, where nothing speaks against it."""
        return False

    @abstractmethod
    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        """The reason why it cannot run `recipe`, the row `name` or a change of it, here; empty: it
        can."""

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        """The module that takes the place of `linear`, sharing its parameters."""
        return ScaledLinear.wrap(linear, recipe, self, name=name, seed=seed)

    def around(self, model: nn.Module) -> nn.Module:
        """`model`, whose Linears `wrap` has replaced."""
        return model


class PyTorch(Backend):
    wide = False

    def automatic(self, recipe: Recipe, device: torch.device) -> bool:
        return not _slow_float16(recipe, device)

    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        if recipe.products:
            return f"{name} casts the operands of its products, nn.Linear does not"
        return ""

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        return self.plain(linear)


class Emulated(Backend):
    wide = False

    def automatic(self, recipe: Recipe, device: torch.device) -> bool:
        return True

    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        if recipe.products or _slow_float16(recipe, device):
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

    def taken(self, made: Scaled, cast: Cast, dtype: torch.dtype, *, both: bool = False) -> Scaled:
        held = torch.float32 if dtype == torch.float32 else torch.bfloat16
        values, scale = made.data.to(held), made.scale
        if scaled.SCALES[cast.scale].folds:
            values = Scaled(data=values, scale=scale).dequantise(held)
            scale = scale.new_ones(1, 1)
        return Scaled(data=values, scale=scale, amax=made.amax, nonfinite=made.nonfinite)

    def shares(self, cast: Cast) -> bool:
        return cast.transposes

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        return scaled.product(a, b, dtype, bias, wide=self.wide)


def _slow_float16(recipe: Recipe, device: torch.device) -> bool:
    """Few CPUs multiply float16; PyTorch then takes 15 times bf16's time."""
    return recipe.compute == "float16" and device.type == "cpu"


def _saturates(recipe: Recipe, device: torch.device) -> str:
    """The reason why sums of products in int8 are wrong here, whoever calls torch._int_mm; empty:
    they are not."""
    if device.type != "cpu" or recipe.dtype != "int8":
        return ""
    x = torch.full((32, 64), 127, dtype=torch.int8)
    if torch._int_mm(x, x.T.contiguous()).max().item() == 64 * 127 * 127:
        return ""
    return ("torch._int_mm saturates on this CPU: without VNNI oneDNN adds two products of int8 in "
            "16 bits")


def _too_old(needs: str, capability: tuple[int, int], device: torch.device) -> str:
    """The reason why this GPU cannot; empty: it can, or it is none."""
    if device.type != "cuda" or (has := torch.cuda.get_device_capability(device)) >= capability:
        return ""
    return f"{needs} compute capability {dotted(capability)}, and this GPU has {dotted(has)}"


class ScaledMM(Backend):
    """Operands stored in their 8 or 4 bits, multiplied by the device. Who casts them is chosen as
    a layer's kernels are (`lpkit.nn.layers`), for each model: a Linear has a copy of this."""

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
            found = HARDWARE.get(a.format, {}).get((a.block, b.block))
            if found is None or (a.format, b.format) == ("e5m2", "e5m2"):
                return (f"there is no product of {a.format} {a.block} and {b.format} {b.block} "
                        f"blocks, as {product} needs")
            needed, cpu, what = found
            if a.block == (1, 128) and (a.format, b.format) != ("e4m3fn", "e4m3fn"):
                return (f"PyTorch multiplies {what} in E4M3 alone, and {product} has {a.format} "
                        f"and {b.format}")
            if device.type == "cpu" and not cpu:
                return f"{what} need compute capability {dotted(needed)}, and this is a CPU"
            if problem := _too_old(f"{what} need", needed, device):
                return problem
            if device.type == "cuda" and a.block == (1, 128):
                has = torch.cuda.get_device_capability(device)
                if has >= (10, 0):
                    return (f"PyTorch has {what} on Hopper alone (9.0), and this GPU has "
                            f"{dotted(has)}; mxfp8 is its successor")
        if device.type == "cuda" and not torch.cuda.is_available():
            return ""
        return _saturates(recipe, device) or self.refusal(recipe, device)

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        return ScaledLinear.wrap(linear, recipe, copy(self), name=name, seed=seed)

    def refusal(self, recipe: Recipe, device: torch.device) -> str:
        """PyTorch's or cuBLASLt's words to a small product of each kind; empty: they take it. A
        scale a row, for one, comes from cuBLASLt on Hopper since CUDA 12.9, else from CUTLASS,
        which a build of PyTorch may lack, and on a CPU from no torch 2.11."""
        x = torch.zeros(256, 256, device=device, dtype=torch.bfloat16)      # blocks of 128 need two
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

    def taken(self, made: Scaled, cast: Cast, dtype: torch.dtype, *, both: bool = False) -> Scaled:
        return replace(made, turned=made.transposed()) if both else made

    def shares(self, cast: Cast) -> bool:
        # each product draws its own noise, but for one cast that is its own transpose
        return not no_kernel(cast, both=True) and (cast.transposes or cast.rounding != "stochastic")

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        if a.data.dtype == dtype and a.tensor is None:      # the recipe leaves it in 16 bits
            return scaled.product(a, b, dtype, bias)
        right = b.data.T        # Hopper has no other order
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
    """t with rows of zeros below, where it has too few. `torch._int_mm` refuses 16 or fewer;
    columns of scales begin at multiples of 16 bytes, for any number of tokens in sampling
    (Transformer Engine's Float8BlockQuantizer pads them too)."""
    more = max(least - len(t), -len(t) % multiple)
    return F.pad(t, (0, 0, 0, more)) if more > 0 else t


def _inferred(a: Scaled, b: Scaled) -> tuple[Tensor, Tensor] | None:
    """Scales whose meaning `torch._scaled_mm` infers from their shapes: (1, 1) for tensors, since of
    a view without axes Inductor takes the whole, (M, 1) and (1, N) for rows. None for blocks of
    128, which it may take for something else: where the sum is one block long, a scale of 1x128
    looks like a row's, and one of 128x128 like a tensor's."""
    if a.scale.numel() == b.scale.numel() == 1:
        return a.scale.reshape(1, 1), b.scale.reshape(1, 1)
    # 1x128 over a sum of 128 is no more than this
    if all(s.scale.shape == (s.data.shape[0], 1) for s in (a, b)):
        # strides that contiguous() does not promise
        return (a.scale.reshape(-1).view(-1, 1), b.scale.reshape(-1).view(1, -1))
    return None


# F.scaled_mm, as operators: Inductor (torch 2.13) gives it to torch._scaled_mm, which infers kinds
# from shapes, and has no swizzles.

@operator("scaled_mm_128(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b) -> Tensor",
          key=EVERY_DEVICE, product=True, flops=lambda a, _, b, *__, **___: 2 * a[0] * a[1] * b[0])
def _blocks128(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """a (M, K) by b (N, K), in blocks of 1x128, or of 128x128 those of b."""
    return F.scaled_mm(a, b.T, *_outer_major(a, scale_a),
                       *_outer_major(b, scale_b), output_dtype=torch.bfloat16)


def _outer_major(t: Tensor, scale: Tensor) -> tuple[Tensor, Any]:
    """Scales of 1x128 (R, C) lie column by column; those of 128x128, (R, C), too, once transposed:
    (C rounded up to 4, R).
    Source: the checks of `torch._scaled_mm_v2`, and cuBLAS 12.9, "scaling factors layouts"."""
    if scale.shape[0] == t.shape[0]:
        return scale.T.contiguous().T, F.ScalingType.BlockWise1x128
    # a transposed scale keeps its strides, padded or not
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


class Row(NamedTuple):
    """A library's Linear for one recipe, and the least compute capability for it."""

    make: Callable[[nn.Linear, Recipe], nn.Module]
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Library(Backend):
    """Somebody else's Linear, for rows as they are: it knows no setting that changes a cast."""

    package: str
    devices: tuple[str, ...]
    rows: Mapping[str, Row]

    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        if name not in self.rows:
            return f"it has no {name}; it has {', '.join(self.rows)}"
        if _casts_of(recipe) != _casts_of(RECIPES[name]) or recipe.pad:
            return f"it runs {name} as it is, and settings change it here"
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if device.type not in self.devices:
            return f"it needs an NVIDIA GPU, and this is a {device.type.upper()}"
        return (_too_old(f"{name} needs", self.rows[name].capability, device)
                or _saturates(recipe, device))

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        (row,) = [row for key, row in self.rows.items()
                  if _casts_of(RECIPES[key]) == _casts_of(recipe)]
        return row.make(linear, recipe)


def _casts_of(recipe: Recipe) -> tuple:
    """The facts that tell two rows apart."""
    return *recipe.products.items(), recipe.delayed is None, recipe.fast_accumulation


def _torchao_float8(row: str, linear: nn.Linear, recipe: Recipe) -> nn.Module:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear.from_float(linear, config=Float8LinearConfig.from_recipe_name(row))


def _torchao_int8(linear: nn.Linear, recipe: Recipe) -> nn.Module:
    from torchao.prototype.quantized_training.int8_mixed_precision import (
        Int8MixedPrecisionTrainingConfig,
        Int8MixedPrecisionTrainingLinear,
    )

    return sharing(Int8MixedPrecisionTrainingLinear, linear,
                   config=Int8MixedPrecisionTrainingConfig())


class TransformerEngineLinear(nn.Module):
    """te.Linear with the parameters of an nn.Linear, for Transformer Engine 2.9 and later.

    The state of delayed scaling is in buffers, so that a checkpoint carries it: the library's own
    tensors, which it writes in place. It has them in `extra_state` too, as a pickle."""

    def __init__(self, linear: nn.Linear, recipe: Any, state: bool):
        import transformer_engine.pytorch as te

        super().__init__()
        weight, bias = linear.weight, linear.bias
        self.inner = te.Linear(linear.in_features, linear.out_features, bias=bias is not None,
                               params_dtype=weight.dtype, device=weight.device)
        del self.inner.weight
        self.weight = self.inner.weight = weight
        self.bias = bias
        if bias is not None:
            del self.inner.bias
            self.inner.bias = bias
        self.recipe, self.state = recipe, state
        if state:       # now, and not in the first forward: there must be something to load into
            self.inner.fp8_meta |= {"num_gemms": 1, "recipe": recipe}
            self.inner.init_fp8_meta_tensors(recipe)
            for way in ("fwd", "bwd"):
                kept = self.inner.fp8_meta[f"scaling_{way}"]
                self.register_buffer(f"scale_{way}", kept.scale)
                self.register_buffer(f"amax_history_{way}", kept.amax_history)

    def forward(self, x: Tensor) -> Tensor:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        if FP8GlobalStateManager.is_fp8_enabled():
            return self.inner(x)
        # outside the model's autocast: a block that backward computes again, or a fused loss
        if self.state:
            raise ConfigError("Transformer Engine's delayed scaling moves its histories whenever "
                              "an autocast ends; set memory.recompute=none and "
                              "memory.cross_entropy=full, or precision.backend=scaled_mm")
        with te.autocast(enabled=True, recipe=self.recipe):
            return self.inner(x)


def _under_autocast(forward: Callable[..., Tensor], recipe: Any, *args: Any) -> Tensor:
    import transformer_engine.pytorch as te

    with te.autocast(enabled=True, recipe=recipe):
        return forward(*args)


class TransformerEngine(Library):
    def around(self, model: nn.Module) -> nn.Module:
        """One autocast around a whole forward: its end moves the histories of all the Linears that
        it has met, once a micro-batch."""
        recipe = next(module.recipe for module in model.modules()
                      if isinstance(module, TransformerEngineLinear))
        for entry in ("forward", "hidden"):
            if hasattr(model, entry):
                setattr(model, entry, partial(_under_autocast, getattr(model, entry), recipe))
        return model


def _transformer_engine(row: str, linear: nn.Linear, recipe: Recipe) -> nn.Module:
    from transformer_engine.common import recipe as rows

    settings = {}
    if delayed := recipe.delayed:
        settings = {"margin": delayed.margin, "amax_history_len": delayed.history,
                    "amax_compute_algo": delayed.history_rule.replace("-", "_")}
    return TransformerEngineLinear(linear, getattr(rows, row)(**settings), bool(delayed))


BACKENDS: dict[str, Backend] = {
    "pytorch": PyTorch(),
    "scaled_mm": ScaledMM(),
    "emulated": Emulated(),
    "transformer-engine": TransformerEngine(package="transformer_engine", devices=("cuda",), rows={
        "fp8-tensorwise": Row(partial(_transformer_engine, "Float8CurrentScaling"), (8, 9)),
        "fp8-delayed": Row(partial(_transformer_engine, "DelayedScaling"), (8, 9)),
        "fp8-blockwise-pow2": Row(partial(_transformer_engine, "Float8BlockScaling"), (9, 0)),
        "mxfp8": Row(partial(_transformer_engine, "MXFP8BlockScaling"), (10, 0)),
        "nvfp4-published": Row(partial(_transformer_engine, "NVFP4BlockScaling"), (10, 0)),
    }),
    # on a CPU it calls the same torch._scaled_mm
    "torchao": Library(package="torchao", devices=("cpu", "cuda"), rows={
        "fp8-tensorwise": Row(partial(_torchao_float8, "tensorwise"), (8, 9)),
        "fp8-rowwise": Row(partial(_torchao_float8, "rowwise"), (8, 9)),
        "int8": Row(_torchao_int8, (7, 5)),
    }),
}


def choose(asked: str, name: str, recipe: Recipe, device: torch.device) -> Choice:
    """The backend for `recipe`, the row `name` or a change of it. Raises ConfigError: unknown, or
    it cannot, and what can."""
    why_not = {key: backend.why_not(name, recipe, device) for key, backend in BACKENDS.items()}
    first = next(key for key, backend in BACKENDS.items()
                 if not why_not[key] and backend.automatic(recipe, device))
    if asked != "auto":
        pick(BACKENDS, asked, "precision.backend")
        if why_not[asked]:
            raise ConfigError(f"precision.backend={asked} cannot run {name} here: "
                              f"{why_not[asked]}; the nearest that can: {first}")
        return Choice(asked=asked, used=asked, why="asked for")
    passed = why_not["scaled_mm"] or f"a {device.type.upper()} is slower with it"
    why = "this device multiplies these formats itself"
    if first == "pytorch":
        why = "nothing is cast but by autocast"
    elif first == "emulated" and recipe.products:
        why = f"the same numbers in bf16 products; not scaled_mm: {passed}"
    elif first == "emulated":
        why = ("float16 values in float32 products, which a CPU has: the same numbers, several "
               "times faster than PyTorch's float16 products there")
    return Choice(asked=asked, used=first, why=why)
