"""Backends compute the matmuls of a recipe. `lpkit.techniques.recipes.BACKENDS` has their rows.

`choose` returns the backend that runs a recipe on this machine, and the reasons against other
backends. It asks each backend (`why_not`), which tries the operation on the device. So a reason is
an observed failure, not a guess from a version number. A backend is imported only when it is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from copy import copy
from typing import Any

import torch
from torch import nn

from lpkit.contracts import Choice
from lpkit.errors import ConfigError
from lpkit.techniques import recipes
from lpkit.techniques.recipes import RECIPES, Recipe, untiled
from lpkit.techniques.row import pick_row


class Backend(ABC):
    """Computes the matmuls of Linears under a recipe: `wrap` replaces a Linear."""

    alignment = 0   # the bytes of an operand's row must be a multiple of this; 0: no condition
    # whether the results are the recipe's, up to the order of sums; False: it may round, draw
    # random numbers or scale in its own way
    exact = True
    # whether large bf16 matmuls on a CPU are computed in float32; None: not applicable
    wide: bool | None = None

    def by(self, products: Choice | None) -> Backend:
        """Return this backend with the choice of `system.products`: bf16 or float32 matmuls."""
        if products is None:
            return self
        backend = copy(self)
        backend.wide = products.used == "float32"
        return backend

    def plain(self, linear: nn.Linear) -> nn.Linear:
        """Return the module that replaces a Linear whose operands the recipe does not cast."""
        if not self.wide:
            return linear
        from lpkit.kernels.wide_product import WideLinear

        return sharing(WideLinear, linear)

    def automatic(self, recipe: Recipe, device: torch.device) -> bool:
        """Return whether precision.backend=auto may choose this backend, if it can run."""
        return False

    @abstractmethod
    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        """Return the reason why this backend cannot run `recipe` on `device`, or "". `name`: the
        row of the recipe, whose settings the recipe may have changed."""

    @abstractmethod
    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        """Return the module that replaces `linear` and shares its parameters."""

    def around(self, model: nn.Module) -> nn.Module:
        """Return `model`, after `wrap` has replaced its Linears."""
        return model


class PyTorch(Backend):
    """nn.Linear under autocast, for recipes that cast no operands."""

    wide = False

    def automatic(self, recipe: Recipe, device: torch.device) -> bool:
        return not slow_float16(recipe, device)

    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        if recipe.products:
            return f"{name} casts the operands of its products, nn.Linear does not"
        return ""

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        return self.plain(linear)


def slow_float16(recipe: Recipe, device: torch.device) -> bool:
    """Return whether a recipe uses float16 on a CPU. Few CPUs have instructions for float16.
    Without them a float16 matmul of PyTorch takes 15 times as long as a bf16 matmul."""
    return recipe.compute == "float16" and device.type == "cpu"


def sharing(kind: type[nn.Linear], linear: nn.Linear, **settings: Any) -> Any:
    """Return a module of the class `kind` that shares the parameters of `linear`."""
    new = kind(linear.in_features, linear.out_features, bias=False, device="meta", **settings)
    new.weight, new.bias = linear.weight, linear.bias
    return new.train(linear.training)


class _Table(ChainMap):
    """Backends by the names of their rows. A backend is imported when it is looked up."""

    def __getitem__(self, name: str) -> Backend:
        backend = super().__getitem__(name)
        return backend if isinstance(backend, Backend) else backend.load()


PYTORCH = PyTorch()
BACKENDS = _Table({}, recipes.BACKENDS)


def choose(asked: str, name: str, recipe: Recipe, device: torch.device) -> Choice:
    """Choose the backend for `recipe`. asked: "auto", or the name of a backend; name: the row of
    the recipe, whose settings the recipe may have changed. Raises ConfigError if the requested
    backend is unknown or cannot run the recipe; the message names a backend that can."""
    if asked != "auto":
        backend = pick_row(BACKENDS, asked, "precision.backend")
        if why_not := backend.why_not(name, recipe, device):
            first = choose("auto", name, recipe, device).used
            raise ConfigError(f"precision.backend={asked} cannot run {name} here: {why_not}; the "
                              f"nearest that can: {first}")
        return Choice(asked=asked, used=asked, why="requested")
    passed = {}     # reasons why a backend cannot run the recipe ("" if it can), by backend
    for first in BACKENDS:
        passed[first] = BACKENDS[first].why_not(name, recipe, device)
        if not passed[first] and BACKENDS[first].automatic(recipe, device):
            break
    why = "this device has matmuls for these formats"
    if first == "pytorch":
        why = "only autocast casts operands"
    elif first == "emulated" and recipe.products:
        native = passed["scaled_mm"] or f"a {device.type.upper()} is slower with it"
        why = f"bf16 matmuls give the same numbers; not scaled_mm: {native}"
    elif first == "emulated":
        why = ("float32 matmuls of float16 values give the same numbers on a CPU, several times "
               "faster than PyTorch's float16 matmuls")
    return Choice(asked=asked, used=first, why=why)


def tiles(name: str, recipe: Recipe, sizes: dict[str, int], alignment: int = 0) -> bool:
    """Return whether the sizes of a Linear are multiples of the recipe's blocks (`untiled`). If
    they are not, and the recipe pads, return False, and the caller pads the operands. If the recipe
    does not pad, raise ConfigError; the message names recipes that fit.

    name: the Linear's name; sizes: "M", "K" and "N", or some of them
    """
    problem = untiled(recipe, sizes, alignment)
    if problem and not recipe.pad:
        fits = [row for row, other in RECIPES.items()
                if other.products and not untiled(other, sizes, alignment)]
        others = f", or use {' or '.join(fits)}" if fits else ""
        raise ConfigError(f"{name}: {problem}; set precision.recipe.pad=true, or keep it in 16 "
                          f"bits with precision.recipe.high_precision_layers={name}{others}")
    return not problem
