"""What becomes of a weight's casts between the micro-batches of an update: cast again in each, or
kept.

A weight changes in the optimizer's step alone, so the second micro-batch casts the same numbers to
the same values. To keep them costs `weight_cache_bytes` a Linear, from the first micro-batch to the
end of the last (Transformer Engine's `is_first_microbatch`). The numbers are the same bit for bit.
"""

from __future__ import annotations

import torch

from lpkit.contracts import Choice
from lpkit.errors import ConfigError
from lpkit.precision.backends import Backend
from lpkit.techniques.recipes import Recipe

CAST, CACHED = "cast", "cached"       # in each micro-batch, or once an update


def choose(name: str, recipe: Recipe, backend: Backend, device: torch.device, *, compiled: bool,
           forwards: int) -> Choice:
    """Whether casts are kept, for `recipe`, the row `name`. `forwards`: of each layer in an update,
    recomputed ones included.

    Raises ConfigError where no weight is cast.
    """
    casts = {product: getattr(recipe, product)[1] for product in ("y", "dx")
             if getattr(recipe, product)}
    if not casts:
        raise ConfigError(f"precision.cache_weight_casts=true does not go with "
                          f"precision.recipe={name}: it casts no weight; set "
                          f"precision.cache_weight_casts=false, or choose a recipe of 8 or 4 bits")
    stateful = recipe.delayed is not None or recipe.stochastic
    why_not = {
        "they are cast once in an update anyway: one micro-batch, nothing recomputed": forwards
        == 1,
        "a stochastic cast draws anew each time": any(cast.rounding == "stochastic"
                                                      for cast in casts.values()),
        "the library keeps what it keeps": not hasattr(backend, "traceable"),
        "torch.compile fuses the casts, and would not see that a weight changed":
            compiled and getattr(backend, "traceable", False) and not stateful,
        "a weight's scale may move with its history in each micro-batch, and to compare it would "
        "wait for the GPU": recipe.delayed is not None and device.type != "cpu",
    }
    for why, true in why_not.items():
        if true:
            return Choice(asked="true", used=CAST, why=why)
    return Choice(asked="true", used=CACHED, why=f"one cast for {forwards} forwards of an update")
