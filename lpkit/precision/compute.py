"""Applies a recipe to a model: its Linears in low precision, and autocast for other operations."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from lpkit.contracts import Stage, Transform
from lpkit.errors import ConfigError
from lpkit.precision.backends import Backend, tiles
from lpkit.techniques.recipes import Recipe, kept

# choices of `weight_cache.choose`: weights are cast in each micro-batch, or once per update
CAST, CACHED = "cast", "cached"


def compute_dtype(recipe: Recipe) -> torch.dtype | None:
    """Return the dtype of autocast; None for float32 throughout, without autocast."""
    return None if recipe.compute is None else getattr(torch, recipe.compute)


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager:
    """Return the autocast context of a recipe. It can be entered many times."""
    if recipe.compute is None:
        return nullcontext()
    return torch.autocast(device.type, compute_dtype(recipe))


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the Linears of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@dataclass(frozen=True, kw_only=True)
class LowPrecision(Transform):
    """Replaces the Linears of a model by Linears of the recipe, except those that
    `recipe.high_precision_layers` names.

    tokens: tokens of a micro-batch; None: unknown. If a Linear's sizes are not multiples of the
            recipe's blocks, ConfigError is raised now, not in the first step
    names:  the names of all Linears, if the model is only a part of a model; None: this model's
    seed:   seed of stochastic rounding
    Raises ConfigError.
    """

    recipe: Recipe
    backend: Backend
    tokens: int | None = None
    names: Collection[str] | None = None
    seed: int = 0
    stage = Stage.PRECISION

    def __call__(self, model: nn.Module) -> nn.Module:
        here = linears(model)
        names = self.names or here
        stay = kept(names, self.recipe.high_precision_layers)
        if len(stay) == len(names):
            layers = ",".join(self.recipe.high_precision_layers)
            raise ConfigError(f"precision.recipe.high_precision_layers={layers} leaves no Linear "
                              f"to the recipe; name fewer, or choose precision.recipe=bf16")
        for name, linear in here.items():
            new = self.backend.plain(linear) if name in stay else self._cast(name, linear)
            model.set_submodule(name, new)
        return self.backend.around(model)

    def _cast(self, name: str, linear: nn.Linear) -> nn.Module:
        sizes = {"K": linear.in_features, "N": linear.out_features}
        if self.tokens:
            sizes["M"] = self.tokens
        tiles(name, self.recipe, sizes, self.backend.alignment)
        return self.backend.wrap(linear, self.recipe, name=name, seed=self.seed)
