"""E4M3 in blocks of 16 with power-of-two scales: MX's casts (OCP Microscaling Formats 1.0, 2023,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf) with blocks
of half the length.

This row is a working example. Replace it by your own: a recipe says how both operands of a Linear's
three products are cast. The kit's recipes are in lpkit/techniques/recipes.py.
"""

import math
import sys
from dataclasses import dataclass
from typing import Literal

from lpkit.files import resource
from lpkit.techniques import recipes
from lpkit.techniques.recipes import Cast, Recipe
from lpkit.techniques.row import Settings

sys.path.append(str(resource("notebooks")))     # the course's `lessons`, for my_recipe.ipynb


@dataclass(frozen=True, kw_only=True)
class OwnSettings(Settings):
    block: Literal[8, 16, 32, 64] = 16      # elements that share a scale
    high_precision_layers: tuple[str, ...] = ("head",)


def make(settings: OwnSettings) -> Recipe:
    """Return the recipe: the casts of both operands of y = x w^T, dx = g w and dw = g^T x, for
    activations x, weights w and gradients g."""
    cast = Cast(format="e4m3fn", block=(1, settings.block), scale="power-of-two")
    return Recipe(compute="bfloat16", dtype="fp8", y=(cast, cast), dx=(cast, cast), dw=(cast, cast),
                  high_precision_layers=settings.high_precision_layers)


def definition(block: list[float]) -> float:
    """Return the scale of a block: the smallest power of two by which the block can be divided so
    that no magnitude exceeds 448."""
    largest = max(map(abs, block))
    return 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0


recipes.add("my_recipe", make, OwnSettings(), "OCP Microscaling Formats 1.0, with blocks of 16")
