"""Quantisation-aware training: forward multiplies the rounded weight, and the gradient passes the
rounding unchanged (Jacob et al. 2018, arXiv:1712.05877; the straight-through estimator of Bengio et
al. 2013, arXiv:1308.3432). In this folder, run:

    PYTHONPATH=. lpkit train cpu-3m --import qat precision.recipe=qat precision.recipe.group=32
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from lpkit.techniques import recipes
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.recipes import ALL, Cast, Recipe
from lpkit.techniques.row import Settings
from lpkit.values import between

# integers of two and three bits, like the kit's int4: the lowest one, -2^(bits - 1), is not used
for bits in (2, 3):
    FORMATS[f"int{bits}"] = replace(FORMATS["int4"], name=f"int{bits}", mantissa_bits=bits - 1,
                                    bias=2 - bits, largest=2.0 ** (bits - 1) - 1)


@dataclass(frozen=True, kw_only=True)
class Qat(Settings):
    weights: Literal["int2", "int3", "int4", "int8"] = "int4"
    group: Annotated[int, between(0, 2**16)] = 32   # weights along a row that share a scale; 0: all
    activations: Literal["none", "int8"] = "none"   # int8: one scale per token
    high_precision_layers: tuple[str, ...] = ("head",)
    pad: bool = False


def make(settings: Qat) -> Recipe:
    """Return the recipe y = q(x) q(w)^T, dx = g q(w), dw = g^T q(x), where q rounds. For backward,
    q counts as the identity."""
    w, x = Cast(format=settings.weights, block=(1, settings.group)), None
    if settings.activations != "none":
        x = Cast(format=settings.activations, block=(1, ALL))
    w_T, x_T = (cast and replace(cast, block=cast.block[::-1]) for cast in (w, x))
    return Recipe(compute="bfloat16", dtype="bf16", y=(x, w), dx=(None, w_T), dw=(None, x_T),
                  high_precision_layers=settings.high_precision_layers, pad=settings.pad)


recipes.add("qat", make, Qat(), "Jacob et al. 2018, https://arxiv.org/abs/1712.05877")
