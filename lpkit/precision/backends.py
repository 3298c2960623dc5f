"""A backend multiplies: a table of those behind the same recipes.

    emulated            any device; the numbers of the recipe, without its speed
    scaled_mm           torch._scaled_mm and F.scaled_mm: tensor cores of Ada, Hopper and Blackwell;
                        torch._int_mm for int8
    transformer-engine  NVIDIA's te.Linear under one te.autocast, when installed
    torchao             its Float8Linear and INT8 Linear, when installed
    pytorch             recipes that cast nothing: nn.Linear under autocast

`choose` says which one runs a recipe here and why the others do not. A backend is tried where it
is, so a reason is the library's or the device's, never a guess by name; and it is imported when it
is tried.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from lpkit.contracts import Choice
from lpkit.errors import ConfigError, pick
from lpkit.techniques.recipes import RECIPES, Recipe, untiled


class Backend(ABC):
    alignment = 0
    wide: bool | None = None    # whether large bf16 products on a CPU are float32's; None: not asked

    def by(self, products: Choice | None) -> Backend:
        """This backend with the products that a run has chosen."""
        if products is None:
            return self
        made = copy(self)
        made.wide = products.used == "float32"
        return made

    def plain(self, linear: nn.Linear) -> nn.Linear:
        """The module that stands for a Linear whose operands are not cast."""
        if not self.wide:
            return linear
        from lpkit.kernels.wide_product import WideLinear

        return sharing(WideLinear, linear)

    def automatic(self, recipe: Recipe, device: torch.device) -> bool:
        """True if `auto` may take it, where nothing speaks against it."""
        return False

    @abstractmethod
    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        """The reason why it cannot run `recipe`, the row `name` or a change of it, here; empty: it
        can."""

    @abstractmethod
    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        """The module that takes the place of `linear`, sharing its parameters."""

    def around(self, model: nn.Module) -> nn.Module:
        """`model`, whose Linears `wrap` has replaced."""
        return model


class PyTorch(Backend):
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
    """Few CPUs multiply float16; PyTorch then takes 15 times bf16's time."""
    return recipe.compute == "float16" and device.type == "cpu"


def sharing(kind: type[nn.Linear], linear: nn.Linear, **settings: Any) -> Any:
    """A `kind` that shares the parameters of `linear`."""
    new = kind(linear.in_features, linear.out_features, bias=False, device="meta", **settings)
    new.weight, new.bias = linear.weight, linear.bias
    return new.train(linear.training)


class _Table(dict):
    """A backend, or the dotted name of one, which is imported when it is asked for."""

    def __getitem__(self, name: str) -> Backend:
        found = super().__getitem__(name)
        if isinstance(found, str):
            self[name] = found = resolve_name(found)
        return found


# the first one that can is taken, if it may be
BACKENDS = _Table({
    "pytorch": PyTorch(),
    "scaled_mm": "lpkit.precision.scaled_mm:SCALED_MM",
    "emulated": "lpkit.precision.scaled:EMULATED",
    "transformer-engine": "lpkit.precision.libraries:TRANSFORMER_ENGINE",
    "torchao": "lpkit.precision.libraries:TORCHAO",
})


def choose(asked: str, name: str, recipe: Recipe, device: torch.device) -> Choice:
    """The backend for `recipe`, the row `name` or a change of it. Raises ConfigError: unknown, or
    it cannot, and what can."""
    if asked != "auto":
        if why_not := pick(BACKENDS, asked, "precision.backend").why_not(name, recipe, device):
            first = choose("auto", name, recipe, device).used
            raise ConfigError(f"precision.backend={asked} cannot run {name} here: {why_not}; the "
                              f"nearest that can: {first}")
        return Choice(asked=asked, used=asked, why="requested")
    passed = {}     # and why
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
    """True if a Linear of these sizes tiles as `untiled` says; False: its operands are padded.
    Raises ConfigError where they are not to be, with the recipes that would do."""
    problem = untiled(recipe, sizes, alignment)
    if problem and not recipe.pad:
        fits = [row for row, other in RECIPES.items()
                if other.products and not untiled(other, sizes, alignment)]
        others = f", or use {' or '.join(fits)}" if fits else ""
        raise ConfigError(f"{name}: {problem}; set precision.recipe.pad=true, or keep it in 16 "
                          f"bits with precision.recipe.high_precision_layers={name}{others}")
    return not problem
