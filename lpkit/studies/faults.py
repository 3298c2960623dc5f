"""The failure lab: what goes wrong in low-precision training, put in on purpose.

    inject(model, Injection(fault="stale-amax", layers=("blocks.1.mlp.up",)))    # then train, and
                                                                    # look at the telemetry

A fault is a row: what it does to one `ScaledLinear`, by composition with its recipe, its backend or
its operands, and the recipe under which that layer is well again. None of them changes what the
layer computes in exact arithmetic, so the same model in bf16 does not have it.
`lpkit.studies.bisect` searches for where it is, `lpkit.studies.case` makes a riddle of it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lpkit.errors import ConfigError, nearest, pick
from lpkit.kernels import cast as kernel
from lpkit.precision.linear import ROLES, ScaledLinear, scaled_linears
from lpkit.precision.scaled import TRANSFORMS, Scaled, spread
from lpkit.techniques.recipes import PRODUCTS, RECIPES, Cast

# times as large as it was; from half its least subnormal to its largest value E4M3 spans 2^18.8, so
# that of features within 2^5 of each other nothing is left
OUTLIER = 2.0**24
STALE = 64.0            # times smaller was the tensor whose amax is still used
Put = Callable[[ScaledLinear], None]        # changes the layer in place


@dataclass(frozen=True, kw_only=True)
class Fault:
    what: str
    recipe: str                             # the row of `recipes` in which it happens
    put: Put
    # the role and the number of the telemetry that move, and whither: +1 or -1
    shows: tuple[str, str, int]
    symptom: str
    cure: str                               # the row of `recipes` that this layer then runs under
    remedy: str                             # why that helps
    # why a tiny model's loss does not show it in a few steps; empty: it does
    unseen: str = ""
    source: str


def _recast(setting: str, **values: str) -> Put:
    """Another format, rounding or transform in every cast of x, w and g."""
    def put(layer: ScaledLinear) -> None:
        casts = {}
        for product, pair in layer.recipe.products.items():
            casts[product] = tuple(replace(cast, **{setting: values[operand]})
                                   for operand, cast in zip(PRODUCTS[product], pair))
        layer.recipe = replace(layer.recipe, **casts)

    return put


def _stale(layer: ScaledLinear) -> None:
    """The history holds what the first micro-batch would have put there, had its tensors been STALE
    times smaller, and stops."""
    def cast(self: ScaledLinear, product: str, role: str, x: Tensor, dtype: torch.dtype,
             **how: Any) -> Scaled:
        seen = self.amax_history[ROLES.index(role)]
        if not seen.any():
            seen[1:] = x.abs().amax() / STALE
        return ScaledLinear.cast(self, product, role, x, dtype, **how)

    layer.cast = MethodType(cast, layer)
    layer.advance = MethodType(lambda self: None, layer)


def _forgetful(layer: ScaledLinear) -> None:
    delayed = replace(layer.recipe.delayed, history=1, history_rule="most-recent")
    # the micro-batch at hand, and the one before
    layer.amax_history = layer.amax_history[:, :2].clone()
    layer.recipe = replace(layer.recipe, delayed=delayed)


class _Divided(nn.Module):
    def __init__(self, by: Tensor):
        super().__init__()
        self.register_buffer("by", by, persistent=False)

    def forward(self, w: Tensor) -> Tensor:
        return w / self.by


def _outlier(layer: ScaledLinear) -> None:
    """One input feature times a power of two, its weights divided by it: the same function,
    exactly, and in bf16 too."""
    by = torch.ones(layer.in_features, device=layer.weight.device)
    by[layer.in_features // 2] = OUTLIER
    parametrize.register_parametrization(layer, "weight", _Divided(by))
    layer.register_forward_pre_hook(lambda module, args: (args[0] * by.to(args[0].dtype),))


def _zero_block(layer: ScaledLinear) -> None:
    """And a backend that divides by the scale of a block of zeros: 0 / 0."""
    rows, columns = (side or whole for side, whole in zip(layer.recipe.y[1].block,
                                                          layer.weight.shape))
    with torch.no_grad():
        layer.weight[:rows, :columns] = 0
    guarded = layer.arithmetic

    def divide(x: Tensor, cast: Cast, dtype: torch.dtype, **how: Any) -> Scaled:
        made = guarded.cast(x, cast, dtype, **how)
        zero = kernel.amax(TRANSFORMS[cast.transform](x), cast.block).values == 0
        return replace(made, data=torch.where(spread(zero, x.shape), torch.nan, made.data))

    layer.arithmetic = copy.copy(guarded)
    layer.arithmetic.cast = divide


_TE = ("Transformer Engine, FP8 primer, https://docs.nvidia.com/deeplearning/"
       "transformer-engine/user-guide/examples/fp8_primer.html")
_NVFP4 = "NVIDIA 2025, section 4, https://arxiv.org/abs/2509.25149"
FAULTS: dict[str, Fault] = {
    "stale-amax": Fault(
        what=f"delayed scaling whose history no longer moves, from a time when the tensors were "
             f"{STALE:g} times smaller",
        recipe="fp8-delayed", put=_stale, shows=("x", "saturated", +1), source=_TE,
        symptom="much saturates, at once and in every role; the amax itself is as ever",
        cure="fp8-tensorwise", remedy="the scale of the tensor at hand needs no history"),
    "short-history": Fault(
        what="delayed scaling that remembers one micro-batch",
        recipe="fp8-delayed", put=_forgetful, shows=("dy", "saturated", +1), source=_TE,
        symptom="a little saturates whenever a tensor has grown since the last step",
        cure="fp8-tensorwise", remedy="the scale of the tensor at hand needs no history",
        unseen="from step to step a tensor hardly grows"),
    "swapped-roles": Fault(
        what="E5M2 for activations and weights, E4M3 for gradients",
        recipe="fp8-delayed", put=_recast("format", x="e5m2", w="e5m2", g="e4m3fn"),
        shows=("x", "sqnr_db", -1),
        symptom="6 dB less for x and w, one mantissa bit; more of dy underflows, for want of range",
        cure="fp8-delayed", remedy="E4M3 for x and w, E5M2 for dy",
        unseen="25 dB of signal over noise in one layer are enough",
        source="Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433"),
    "outlier-channel": Fault(
        what=f"one input feature 2^{math.log2(OUTLIER):.0f} times as large as it was, its weights "
             f"so much smaller",
        recipe="fp8-delayed", put=_outlier, shows=("x", "underflow", +1),
        symptom="one scale for the tensor: what is not the outlier underflows; blocks keep the "
                "damage to one of them",
        cure="bf16", remedy="an exponent of 8 bits has room for both",
        source="Dettmers et al. 2022, https://arxiv.org/abs/2208.07339"),
    "no-stochastic-rounding": Fault(
        what="gradients in FP4 rounded to nearest", recipe="nvfp4",
        put=_recast("rounding", x="nearest-even", w="nearest-even", g="nearest-even"),
        shows=("dy", "sqnr_db", +1), source=_NVFP4,
        symptom="the SQNR of dy rises, and that is the trap: the error is smaller, but no longer "
                "zero on average, so over many steps it adds up",
        cure="nvfp4", remedy="rounding at random is right on average",
        unseen="a bias takes thousands of steps to add up"),
    "no-hadamard": Fault(
        what="the operands of the weight gradient in FP4 cast unmixed", recipe="nvfp4",
        put=_recast("transform", x="none", w="none", g="none"),
        shows=("dy.T", "worst_block_db", -1), source=_NVFP4,
        symptom="blocks of the weight gradient's operands that hold an outlier lose everything "
                "else",
        cure="nvfp4", remedy="mixed, an outlier is shared by the sixteen of a block",
        unseen="a tiny model has no outliers yet"),
    "zero-amax-block": Fault(
        what="a block of weights that is all zero, and a cast that divides by its amax",
        recipe="mxfp8", put=_zero_block, shows=("w", "zero_blocks", +1),
        symptom="0 / 0: NaN in everything that comes after, from the first step",
        cure="fp8-tensorwise", remedy="a whole tensor is not zero",
        source="OCP Microscaling 1.0, section 6.3, leaves the scale of a zero block to the "
               "implementation"),
}


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A fault in the Linears that match one of `layers`, by default in all that are
    low-precision."""

    fault: str
    layers: tuple[str, ...] = ("*",)


def inject(model: nn.Module, what: Injection) -> nn.Module:
    """Put it in, in place. Raises ConfigError for an unknown fault, or a pattern that no
    low-precision Linear matches."""
    fault = pick(FAULTS, what.fault, "fault")
    layers = {layer.name: layer for layer in scaled_linears(model)}
    for pattern in what.layers:
        matching = [layer for name, layer in layers.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(f"{pattern!r} matches no low-precision Linear to put {what.fault} "
                              f"into; {nearest(pattern, layers)}")
        for layer in matching:
            if RECIPES[fault.recipe].delayed and not layer.recipe.delayed:
                raise ConfigError(f"{layer.name} scales by what is there and has no history to "
                                  f"spoil; set precision.recipe=fp8-delayed")
            fault.put(layer)
    return model


def cure(model: nn.Module, what: Injection) -> nn.Module:
    """Put its layers under the recipe that the fault's row knows against it, in place."""
    for layer in scaled_linears(model):
        if any(fnmatchcase(layer.name, pattern) for pattern in what.layers):
            layer.recipe = RECIPES[FAULTS[what.fault].cure]
    return model


Unit = tuple[str, str]      # layer, product


def low_precision_products(model: nn.Module) -> list[Unit]:
    """Every product that is low-precision, layer by layer."""
    return [(layer.name, product) for layer in scaled_linears(model)
            for product in layer.recipe.products]


def run_in_high_precision(model: nn.Module, which: Iterable[Unit]) -> None:
    """Run these products in 16 bits, in place."""
    layers = {layer.name: layer for layer in scaled_linears(model)}
    for name, product in which:
        layers[name].recipe = replace(layers[name].recipe, **{product: None})


def layers_of(which: Iterable[Unit]) -> list[str]:
    """Each once, in their order."""
    return list(dict.fromkeys(layer for layer, _ in which))


def named(which: Iterable[Unit]) -> str:
    """'blocks.1.mlp.up (y, dx)'."""
    which = list(which)
    return ", ".join(f"{name} ({', '.join(product for layer, product in which if layer == name)})"
                     for name in layers_of(which))
