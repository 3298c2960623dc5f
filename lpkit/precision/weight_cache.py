"""Chooses whether a weight's casts are kept between the micro-batches of an update, or are made
again in each micro-batch.

Only the optimizer's step changes a weight, so later micro-batches cast the same numbers to the same
values. Kept casts take memory from the first micro-batch to the end of the last one (Transformer
Engine's `is_first_microbatch`; `lpkit.predict.ledger` counts their bytes). Results are the same bit
for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lpkit.contracts import Choice
from lpkit.errors import ConfigError
from lpkit.kernels.scales import Scaled
from lpkit.precision.backends import Backend
from lpkit.precision.compute import CACHED, CAST
from lpkit.precision.linear import scaled_linears
from lpkit.techniques.recipes import Recipe


def choose(name: str, recipe: Recipe, backend: Backend, device: torch.device, *, compiled: bool,
           forwards: int) -> Choice:
    """Choose whether casts are kept, for `recipe`, which is the row `name`. `forwards`: how often
    a layer runs forward in an update, with recomputation.

    Raises ConfigError if the recipe casts no weight.
    """
    casts = [cast for product in ("y", "dx") if (cast := recipe.cast_of[product, "w"]) is not None]
    if not casts:
        raise ConfigError(f"precision.cache_weight_casts=true does not go with "
                          f"precision.recipe={name}: it casts no weight; set "
                          f"precision.cache_weight_casts=false, or choose a recipe of 8 or 4 bits")
    history = recipe.delayed is not None
    why = ""
    if forwards == 1:
        why = "they are cast once in an update anyway: one micro-batch, nothing recomputed"
    elif any(cast.rounding == "stochastic" for cast in casts):
        why = "a stochastic cast gives different numbers each time"
    elif not hasattr(backend, "product"):
        why = "the library has its own cache"
    elif compiled:
        why = "casts are in the graph of torch.compile, which would not see that a weight changed"
    elif history and device.type != "cpu":
        why = ("the scale of a weight may change in each micro-batch, and comparing it would wait "
               "for the GPU")
    if why:
        return Choice(asked="true", used=CAST, why=why)
    return Choice(asked="true", used=CACHED, why=f"one cast for {forwards} forwards of an update")


class WeightCache:
    """The casts of one weight, until the weight changes: until it is another tensor, has other
    memory, or has another version counter.

    PyTorch's fused optimizers, and writes through `tensor.data`, do not change the version counter.
    They must not happen while a cache exists. So caches exist within one update
    (`weights_cached`), and the optimizer's step comes after it.
    """

    def __init__(self):
        self.weight: Callable[[], Tensor | None] = lambda: None
        self.storage: Any = None        # a reference, so that no other storage can get its address
        self.version = -1
        self.casts: dict[str, tuple[Any, Scaled]] = {}      # by product

    def see(self, w: Tensor) -> None:
        """Called before casts of w are requested: drops casts of other numbers."""
        storage = w.untyped_storage()
        # identity, address and version: w may be freed, moved by FSDP, or updated in place
        same = self.weight() is w and self.storage._cdata == storage._cdata
        if not same or self.version != w._version:
            self.weight, self.storage, self.version = weakref.ref(w), storage, w._version
            self.casts.clear()

    def get(self, product: str, key: Any, make: Callable[[], Scaled], *,
            with_amax: bool) -> Scaled:
        """Return `make()`, or its earlier result for the same key. One cast per product is kept.
        """
        if product not in self.casts or self.casts[product][0] != key:
            scaled = make()
            self.casts[product] = key, scaled if with_amax else replace(scaled, amax=None)
        return self.casts[product][1]


@contextmanager
def weights_cached(model: nn.Module) -> Iterator[None]:
    """In this context, around the forwards and backwards of one update, each weight is cast once
    per product instead of once per micro-batch or recomputation. Results are the same bit for bit.
    It has no effect under torch.compile, whose graphs contain the casts. Nothing is kept
    afterwards.
    """
    layers = list(scaled_linears(model))
    for layer in layers:
        layer.cache = WeightCache()
    try:
        yield
    finally:
        for layer in layers:
            layer.cache = None
