"""The dtype in which a recipe runs whatever it does not cast."""

from contextlib import AbstractContextManager, nullcontext

import torch

from lpkit.techniques.recipes import Recipe


def compute_dtype(recipe: Recipe) -> torch.dtype | None:
    """None: float32 throughout, without autocast."""
    if recipe.compute is None:
        return None
    return getattr(torch, recipe.compute)


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager:
    """A context that can be entered again and again."""
    if recipe.compute is None:
        return nullcontext()
    return torch.autocast(device.type, compute_dtype(recipe))
