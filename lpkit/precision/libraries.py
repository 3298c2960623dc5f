"""Backends that use a library's Linear, if the library is installed: te.Linear of NVIDIA's
Transformer Engine, and torchao's Float8Linear and INT8 Linear. They run recipes only with their
default settings. `lpkit.techniques.recipes.BACKENDS` has the rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpkit.errors import ConfigError
from lpkit.precision.backends import Backend, sharing
from lpkit.precision.scaled_mm import saturates, too_old
from lpkit.techniques.recipes import RECIPES, Recipe


class LibraryRow(NamedTuple):
    """A library's Linear for one recipe. `make`: builds it from an nn.Linear; `capability`: the
    lowest compute capability of a GPU that it needs."""

    make: Callable[[nn.Linear, Recipe], nn.Module]
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Library(Backend):
    """A backend that uses a library's Linear. It runs recipes only with their default settings,
    because a library has no settings for single casts.

    package: the library's package, for example torchao
    devices: types of devices on which it runs
    rows:    by the name of the recipe
    """

    exact = False
    package: str
    devices: tuple[str, ...]
    rows: Mapping[str, LibraryRow]

    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        if name not in self.rows:
            return f"it has no {name}; it has {', '.join(self.rows)}"
        if _casts_of(recipe) != _casts_of(RECIPES[name]) or recipe.pad:
            return f"it runs {name} as it is, and settings change it here"
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if device.type not in self.devices:
            return f"it needs an NVIDIA GPU, and this is a {device.type.upper()}"
        return (too_old(f"{name} needs", self.rows[name].capability, device)
                or saturates(recipe, device))

    def wrap(self, linear: nn.Linear, recipe: Recipe, *, name: str, seed: int) -> nn.Module:
        (row,) = [row for key, row in self.rows.items()
                  if _casts_of(RECIPES[key]) == _casts_of(recipe)]
        return row.make(linear, recipe)


def _casts_of(recipe: Recipe) -> tuple:
    """Return the settings of a recipe by which the library's Linears differ."""
    return *recipe.products.items(), recipe.delayed is None, recipe.fast_accumulation


def _torchao_float8(row: str, linear: nn.Linear, recipe: Recipe) -> nn.Module:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear.from_float(linear, config=Float8LinearConfig.from_recipe_name(row))


def _torchao_int8(linear: nn.Linear, recipe: Recipe) -> nn.Module:
    from torchao.prototype.quantized_training.int8_mixed_precision import (
        Int8MixedPrecisionTrainingConfig,
        Int8MixedPrecisionTrainingLinear,
    )

    return sharing(Int8MixedPrecisionTrainingLinear, linear,
                   config=Int8MixedPrecisionTrainingConfig())


class TransformerEngineLinear(nn.Module):
    """te.Linear with the parameters of an nn.Linear, for Transformer Engine 2.9 and later.

    state: whether the recipe has a state, the scales and histories of delayed scaling. They are
    registered as buffers, so that checkpoints contain them as tensors. (The library itself stores
    them in `extra_state`, as a pickle.) The buffers are the library's own tensors, which it writes
    in place.
    """

    def __init__(self, linear: nn.Linear, recipe: Any, state: bool):
        import transformer_engine.pytorch as te

        super().__init__()
        weight, bias = linear.weight, linear.bias
        self.inner = te.Linear(linear.in_features, linear.out_features, bias=bias is not None,
                               params_dtype=weight.dtype, device=weight.device)
        del self.inner.weight
        self.weight = self.inner.weight = weight
        self.bias = bias
        if bias is not None:
            del self.inner.bias
            self.inner.bias = bias
        self.recipe, self.state = recipe, state
        # Create the state now, not in the first forward, so that a checkpoint can be loaded into
        # its tensors.
        if state:
            self.inner.fp8_meta |= {"num_gemms": 1, "recipe": recipe}
            self.inner.init_fp8_meta_tensors(recipe)
            for way in ("fwd", "bwd"):
                kept = self.inner.fp8_meta[f"scaling_{way}"]
                self.register_buffer(f"scale_{way}", kept.scale)
                self.register_buffer(f"amax_history_{way}", kept.amax_history)

    def forward(self, x: Tensor) -> Tensor:
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        if FP8GlobalStateManager.is_fp8_enabled():
            return self.inner(x)
        # Outside of the model's autocast: a block is recomputed in backward, or a fused loss calls
        # the head.
        if self.state:
            raise ConfigError("Transformer Engine's delayed scaling moves its histories whenever "
                              "an autocast ends; set memory.recompute=none and "
                              "memory.cross_entropy=full, or precision.backend=scaled_mm")
        with te.autocast(enabled=True, recipe=self.recipe):
            return self.inner(x)


def _under_autocast(forward: Callable[..., Tensor], recipe: Any, *args: Any) -> Tensor:
    import transformer_engine.pytorch as te

    with te.autocast(enabled=True, recipe=recipe):
        return forward(*args)


class TransformerEngine(Library):
    """Transformer Engine's Linears, under one te.autocast for the whole model."""

    def around(self, model: nn.Module) -> nn.Module:
        """Run the model's forward under one te.autocast. When an autocast ends, the library moves
        the histories of all Linears that ran in it. So they move once per micro-batch."""
        recipe = next(module.recipe for module in model.modules()
                      if isinstance(module, TransformerEngineLinear))
        for entry in ("forward", "hidden"):
            if hasattr(model, entry):
                setattr(model, entry, partial(_under_autocast, getattr(model, entry), recipe))
        return model


def _transformer_engine(row: str, linear: nn.Linear, recipe: Recipe) -> nn.Module:
    from transformer_engine.common import recipe as rows

    settings = {}
    if delayed := recipe.delayed:
        settings = {"margin": delayed.margin, "amax_history_len": delayed.history,
                    "amax_compute_algo": delayed.history_rule.replace("-", "_")}
    return TransformerEngineLinear(linear, getattr(rows, row)(**settings), bool(delayed))


TRANSFORMER_ENGINE = TransformerEngine(package="transformer_engine", devices=("cuda",), rows={
    "fp8-tensorwise": LibraryRow(partial(_transformer_engine, "Float8CurrentScaling"), (8, 9)),
    "fp8-delayed": LibraryRow(partial(_transformer_engine, "DelayedScaling"), (8, 9)),
    "fp8-blockwise-pow2": LibraryRow(partial(_transformer_engine, "Float8BlockScaling"), (9, 0)),
    "mxfp8": LibraryRow(partial(_transformer_engine, "MXFP8BlockScaling"), (10, 0)),
    "nvfp4-published": LibraryRow(partial(_transformer_engine, "NVFP4BlockScaling"), (10, 0)),
})
# torchao also runs on a CPU, where it calls the same torch._scaled_mm
TORCHAO = Library(package="torchao", devices=("cpu", "cuda"), rows={
    "fp8-tensorwise": LibraryRow(partial(_torchao_float8, "tensorwise"), (8, 9)),
    "fp8-rowwise": LibraryRow(partial(_torchao_float8, "rowwise"), (8, 9)),
    "int8": LibraryRow(_torchao_int8, (7, 5)),
})
