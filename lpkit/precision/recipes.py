"""Precision recipes: rows of data. The same model and the same call, `precision.recipe=NAME`.

A row names the dtype of everything that is not a Linear's product (by autocast; weights stay float32), and how the two
operands of each of a Linear's three products are cast:

    y = x w^T       contracts K, the input features
    dx = g w        contracts N, the output features
    dw = g^T x      contracts M, the tokens

Each operand is cast with the contracted axis last, so block (1, 128) means 128 elements along the sum. What a setting of
`PrecisionConfig` says wins over the row; None leaves the row as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from lpkit.config import ConfigError, PrecisionConfig, nearest
from lpkit.contracts import pick
from lpkit.precision.formats import format_of
from lpkit.precision.scaled import Cast

# M tokens, K input features, N output features: the sides of each operand, the contracted one last.
SIDES = {"y": ("MK", "NK"), "dx": ("MN", "KN"), "dw": ("NM", "KM")}
PRODUCTS = {"y": ("x", "w"), "dx": ("g", "w"), "dw": ("g", "x")}     # the operands of each product
Casts = tuple[Cast, Cast]


@dataclass(frozen=True, kw_only=True)
class Delayed:
    """Scale by the amaxes of earlier micro-batches, so that a cast needs one pass over its tensor instead of two."""

    history: int = 1024     # micro-batches; Transformer Engine's default
    rule: str = "max"       # of HISTORY_RULES
    margin: int = 0         # the scale leaves 2^margin of room


HISTORY_RULES = {
    "max": lambda history: history.amax(-1),
    "most-recent": lambda history: history[..., 0],
}


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Multiply the loss by 2^n before backward, so that small gradients survive in float16 (Micikevicius et al. 2018)."""

    initial: float = 2.0**16
    growth_steps: int = 2000    # as many updates without an overflow double the scale; an overflow halves it


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`compute` is the dtype under autocast; None: float32 throughout. A product that is None runs in `compute`."""

    compute: torch.dtype | None
    dtype: str      # what the products run in on hardware that has it, by the name that the catalogue of machines uses
    source: str
    y: Casts | None = None
    dx: Casts | None = None
    dw: Casts | None = None
    delayed: Delayed | None = None
    loss_scaling: LossScaling | None = None
    keep: tuple[str, ...] = ()      # Linears that stay in `compute`: first, last, head, or patterns of names
    pad: bool = False

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """A context that can be entered again and again."""
        return nullcontext() if self.compute is None else torch.autocast(device.type, self.compute)

    @property
    def products(self) -> dict[str, Casts]:
        """The products that are cast."""
        found = {"y": self.y, "dx": self.dx, "dw": self.dw}
        return {name: casts for name, casts in found.items() if casts is not None}

    @property
    def tile(self) -> int:
        """Padding every side to a multiple of this makes every operand tile; all sides of blocks are powers of two."""
        return max((side for casts in self.products.values() for cast in casts for side in cast.tile), default=1)

    @property
    def stochastic(self) -> bool:
        return any(cast.rounding == "stochastic" for casts in self.products.values() for cast in casts)


def untiled(recipe: Recipe, sizes: dict[str, int], alignment: int = 0) -> str:
    """Why a Linear with these sizes (of M, K and N, those that are known) cannot run; empty when it can.

    alignment: bytes that a backend wants every row of its operands, and of the result, to be a multiple of.
    """
    words = {"M": "tokens", "K": "input features", "N": "output features"}
    for name, casts in recipe.products.items():
        for i, (cast, sides) in enumerate(zip(casts, SIDES[name])):
            (rows, along, mixed), elements = cast.tile, alignment * 8 // format_of(cast.format).bits
            for side, needed in ((sides[0], max(rows, i * elements)), (sides[1], max(along, mixed, elements))):
                if side in sizes and sizes[side] % needed:
                    below = sizes[side] // needed * needed
                    near = " or ".join(str(size) for size in (below, below + needed) if size)
                    return f"{sizes[side]} {words[side]} do not tile by {needed} (nearest: {near})"
    return ""


def _same(x: Cast, w: Cast, g: Cast) -> dict[str, Casts]:
    return {"y": (x, w), "dx": (g, w), "dw": (g, x)}


def _fp8(block: tuple[int, int] = (0, 0), *, weight: tuple[int, int] | None = None, gradient: str = "e4m3fn",
         scale: str = "float32") -> dict[str, Casts]:
    x = Cast(format="e4m3fn", block=block, scale=scale)
    return _same(x, replace(x, block=weight or block), replace(x, format=gradient))


_FP4 = Cast(format="e2m1", block=(1, 16), scale="e4m3")
_FP4_WEIGHT = replace(_FP4, block=(16, 16))     # square: the same values in y and in dx
_FP4_GRADIENT = replace(_FP4, rounding="stochastic")

RECIPES: dict[str, Recipe] = {
    "fp32": Recipe(compute=None, dtype="fp32", source="IEEE 754 binary32"),
    "bf16": Recipe(compute=torch.bfloat16, dtype="bf16",
                   source="Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322"),
    "fp16": Recipe(compute=torch.float16, dtype="fp16", loss_scaling=LossScaling(),
                   source="Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740"),
    "fp8-tensorwise": Recipe(
        compute=torch.bfloat16, dtype="fp8", keep=("head",), **_fp8(gradient="e5m2"),
        source="Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; scaled by each tensor's own amax"),
    "fp8-delayed": Recipe(
        compute=torch.bfloat16, dtype="fp8", keep=("head",), delayed=Delayed(), **_fp8(gradient="e5m2"),
        source="Transformer Engine's DelayedScaling, "
               "https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html"),
    "fp8-rowwise": Recipe(
        compute=torch.bfloat16, dtype="fp8", keep=("head",), **_fp8((1, 0), scale="power-of-two"),
        source="torchao's rowwise recipe (E4M3 throughout, powers of two), https://github.com/pytorch/ao"),
    "fp8-blockwise": Recipe(
        compute=torch.bfloat16, dtype="fp8", keep=("head",), **_fp8((1, 128), weight=(128, 128)),
        source="DeepSeek-V3, section 3.3, https://arxiv.org/abs/2412.19437"),
    "mxfp8": Recipe(
        compute=torch.bfloat16, dtype="fp8", keep=("head",), **_fp8((1, 32), scale="power-of-two"),
        source="OCP Microscaling 1.0, https://arxiv.org/abs/2310.10537; scales rounded up as in "
               "Mishra et al. 2025, https://arxiv.org/abs/2506.08027"),
    "nvfp4": Recipe(
        compute=torch.bfloat16, dtype="fp4", keep=("head", "last"),
        y=(_FP4, _FP4_WEIGHT), dx=(_FP4_GRADIENT, _FP4_WEIGHT),
        dw=(replace(_FP4_GRADIENT, transform="hadamard"), replace(_FP4, transform="hadamard")),
        source="NVIDIA 2025, https://arxiv.org/abs/2509.25149"),
    "int8": Recipe(
        compute=torch.bfloat16, dtype="int8", keep=("head",),
        **_same(*[Cast(format="int8", block=(1, 0))] * 3),
        source="torchao's INT8 mixed-precision training, https://github.com/pytorch/ao; "
               "Wortsman et al. 2023, https://arxiv.org/abs/2304.13013"),
}


# What a setting may change in a row. Each takes the recipe and the value, and raises ConfigError where it has no meaning.

def _casts(recipe: Recipe, change) -> Recipe:
    """`change(cast, operand)` on every cast."""
    return replace(recipe, **{name: tuple(change(cast, operand) for cast, operand in zip(casts, PRODUCTS[name]))
                              for name, casts in recipe.products.items()})


def _format(operands: str):
    def set_format(recipe: Recipe, value: str) -> Recipe:
        if not all(cast.format in FP8 for casts in recipe.products.values() for cast in casts) or not recipe.products:
            raise ConfigError(f"its casts are not to an 8-bit floating format; {_those_with(FP8, 'format')} have them")
        return _casts(recipe, lambda cast, operand: replace(cast, format=value) if operand in operands else cast)

    return set_format


def _scale(recipe: Recipe, value: str) -> Recipe:
    if not all(cast.scale in FREE_SCALES for casts in recipe.products.values() for cast in casts) or not recipe.products:
        raise ConfigError(f"its scale is part of its format; {_those_with(FREE_SCALES, 'scale')} have a choice")
    if recipe.tile == MX_TILE and value not in E8M0_SCALES:
        raise ConfigError(f"its scales are E8M0, powers of two; choose {' or '.join(E8M0_SCALES)}")
    return _casts(recipe, lambda cast, operand: replace(cast, scale=value))


def _delayed(field: str):
    def set_delayed(recipe: Recipe, value) -> Recipe:
        if recipe.delayed is None:
            raise ConfigError("it scales by what is there, without a history; use fp8-delayed")
        return replace(recipe, delayed=replace(recipe.delayed, **{field: value}))

    return set_delayed


def _gradient_rounding(recipe: Recipe, value: str) -> Recipe:
    if not recipe.products:
        raise ConfigError("it casts no gradient; choose a recipe of 8 or 4 bits")
    return _casts(recipe, lambda cast, operand: replace(cast, rounding=value) if operand == "g" else cast)


def _transform(recipe: Recipe, value: str) -> Recipe:
    if recipe.dw is None:
        raise ConfigError("it casts nothing; choose a recipe of 8 or 4 bits")
    return replace(recipe, dw=tuple(replace(cast, transform=value) for cast in recipe.dw))


def _loss_scale(recipe: Recipe, value: float) -> Recipe:
    if recipe.loss_scaling is None:
        raise ConfigError("it has no loss scaling; use fp16")
    return replace(recipe, loss_scaling=replace(recipe.loss_scaling, initial=value))


FP8, FREE_SCALES = ("e4m3fn", "e5m2"), ("float32", "power-of-two", "power-of-two-floor")
E8M0_SCALES, MX_TILE = FREE_SCALES[1:], 32
OVERRIDES = {
    "forward_format": _format("xw"), "gradient_format": _format("g"), "scale": _scale,
    "history": _delayed("history"), "history_rule": _delayed("rule"), "margin": _delayed("margin"),
    "gradient_rounding": _gradient_rounding, "transform": _transform, "loss_scale": _loss_scale,
    "keep": lambda recipe, value: replace(recipe, keep=value),
    "pad": lambda recipe, value: replace(recipe, pad=value),
}


def _those_with(values: Iterable[str], field: str) -> str:
    return ", ".join(name for name, recipe in RECIPES.items() if recipe.products and
                     all(getattr(cast, field) in values for casts in recipe.products.values() for cast in casts))


def resolve(settings: PrecisionConfig, name: str | None = None) -> Recipe:
    """The row `name` (by default the one that `settings` names) with what the settings change in it.

    Raises ConfigError for an unknown recipe, and for a setting that has no meaning in it.
    """
    name = name or settings.recipe
    recipe = pick(RECIPES, name, "precision.recipe")
    for key, change in OVERRIDES.items():
        if (value := getattr(settings, key)) is not None:
            try:
                recipe = change(recipe, value)
            except ConfigError as error:
                raise ConfigError(f"precision.{key}={value} does not go with precision.recipe={name}: {error}") from None
    return recipe


# Which Linears stay in high precision.

def kept(names: Iterable[str], keep: Iterable[str]) -> set[str]:
    """Those of `names`, Linears in the order of the model, that `keep` says stay.

    `first` and `last` are the first and last of the numbered blocks, the rest are patterns: `head`, `blocks.0.*`.
    Raises ConfigError for a pattern that matches nothing.
    """
    names = list(names)
    numbered = {name: match[0] for name in names if (match := re.match(r".*?\.\d+\.", name + "."))}
    blocks = list(dict.fromkeys(numbered.values()))
    words = {"first": blocks[:1], "last": blocks[-1:]}
    found = set()
    for pattern in keep:
        hit = {name for name in names
               if (numbered.get(name) in words[pattern] if pattern in words else fnmatchcase(name, pattern))}
        if not hit:
            raise ConfigError(f"precision.keep={pattern} matches no Linear of this model; "
                              f"{nearest(pattern, [*words, *names])}")
        found |= hit
    return found
