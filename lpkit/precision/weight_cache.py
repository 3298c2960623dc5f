"""What becomes of a weight's casts between the micro-batches of an update: made anew in each, or kept.

A weight changes in the optimizer's step alone, so the second micro-batch casts the same numbers to the same values. To keep
them costs `weight_cache_bytes` a Linear, from the first micro-batch to the end of the last (Transformer Engine's
`is_first_microbatch`). The numbers are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from lpkit.config import ConfigError
from lpkit.contracts import Choice, pick
from lpkit.precision.backends import Backend
from lpkit.precision.linear import weights_cached
from lpkit.precision.recipes import Recipe

# Around the forwards and backwards of one update.
WEIGHTS: dict[str, Callable[[nn.Module], AbstractContextManager]] = {"cast": nullcontext, "cached": weights_cached}
PLAIN = "cast"


def choose(asked: str, name: str, recipe: Recipe, backend: Backend, device: torch.device, *, compiled: bool,
           forwards: int) -> Choice:
    """Of WEIGHTS, for `recipe`, the row `name`. `forwards`: of each layer in an update, recomputed ones included.

    Raises ConfigError for an unknown name, and where no weight is cast.
    """
    pick(WEIGHTS, asked, "precision.weights")
    casts = {product: getattr(recipe, product)[1] for product in ("y", "dx") if getattr(recipe, product)}
    if asked == PLAIN:
        return Choice(asked=asked, used=PLAIN, why="asked for")
    if not casts:
        raise ConfigError(f"precision.weights={asked} does not go with precision.recipe={name}: it casts no weight; "
                          f"set precision.weights={PLAIN}, or choose a recipe of 8 or 4 bits")
    stateful = recipe.delayed is not None or recipe.stochastic
    why_not = {
        "they are cast once in an update anyway: one micro-batch, nothing recomputed": forwards == 1,
        "a stochastic cast draws anew each time": any(cast.rounding == "stochastic" for cast in casts.values()),
        "the library keeps what it keeps": not hasattr(backend, "traceable"),
        "torch.compile fuses the casts, and would not see that a weight changed":
            compiled and getattr(backend, "traceable", False) and not stateful,
        "a weight's scale may move with its history in each micro-batch, and to compare it would wait for the GPU":
            recipe.delayed is not None and device.type != "cpu",
    }
    for why, true in why_not.items():
        if true:
            return Choice(asked=asked, used=PLAIN, why=why)
    return Choice(asked=asked, used=asked, why=f"one cast for {forwards} forwards of an update")
