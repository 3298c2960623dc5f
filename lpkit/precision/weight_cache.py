"""Caches the casts of weights within an update, or chooses not to.

Only the optimizer's step changes a weight. So all micro-batches of an update cast the same numbers
to the same values, and the cast of the first micro-batch can be reused. The cached casts take
memory until the last micro-batch ends (`lpkit.predict.ledger` counts their bytes). The results are
the same bit for bit. Transformer Engine's `is_first_microbatch` does the same.
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
    """Return the choice CACHED if caching saves casts and works, otherwise CAST, with the reason.

    name:     the row of `recipe`
    compiled: whether torch.compile is used
    forwards: how often a layer runs forward in an update, with recomputed forwards
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
    """The casts of one weight. They are dropped when the weight changes: when it is another tensor
    object, has another storage, or has another version counter (`tensor._version`).

    PyTorch's fused optimizers, and writes through `tensor.data`, change a weight but not its
    version counter. So they must not happen while a cache exists: `weights_cached` creates the
    caches and removes them before the optimizer's step.
    """

    def __init__(self):
        self.weight: Callable[[], Tensor | None] = lambda: None
        # A reference keeps the storage alive, so that no new storage can get the same address.
        self.storage: Any = None
        self.version = -1
        self.casts: dict[str, tuple[Any, Scaled]] = {}      # key and cast, by matmul ("y", "dx")

    def see(self, w: Tensor) -> None:
        """Drop the casts if w has changed since the last call. The layer calls this before it
        requests casts of w."""
        storage = w.untyped_storage()
        # Compare object, storage and version: w may be a new tensor, FSDP may have moved it, or it
        # may have been updated in place.
        same = self.weight() is w and self.storage._cdata == storage._cdata
        if not same or self.version != w._version:
            self.weight, self.storage, self.version = weakref.ref(w), storage, w._version
            self.casts.clear()

    def get(self, product: str, key: Any, make: Callable[[], Scaled], *,
            with_amax: bool) -> Scaled:
        """Return `make()`, or its earlier result for the same matmul `product` and key. One cast is
        stored for each matmul. `key`: everything on which the cast depends, apart from the weight.
        """
        if product not in self.casts or self.casts[product][0] != key:
            scaled = make()
            self.casts[product] = key, scaled if with_amax else replace(scaled, amax=None)
        return self.casts[product][1]


@contextmanager
def weights_cached(model: nn.Module) -> Iterator[None]:
    """Cast each weight once per matmul in this context, instead of in every micro-batch and
    recomputation. The context must contain the forwards and backwards of one update. At its end all
    casts are freed. Results are the same bit for bit. Under torch.compile it has no effect, because
    compiled graphs contain the casts.
    """
    layers = list(scaled_linears(model))
    for layer in layers:
        layer.cache = WeightCache()
    try:
        yield
    finally:
        for layer in layers:
            layer.cache = None
