"""The dtype of parameters and of their gradients. The optimizer computes in float32 whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lpkit.config import Config
from lpkit.contracts import Stage, Transform
from lpkit.memory.row import Row


@dataclass(frozen=True, kw_only=True)
class ParameterDtype(Transform):
    """Casts every parameter to `dtype`, in place. Parameters that a later transform adds keep theirs."""

    dtype: torch.dtype
    stage = Stage.STORAGE

    def __call__(self, model: nn.Module) -> nn.Module:
        cast: dict[nn.Parameter, nn.Parameter] = {}     # tied ones stay tied
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    cast.setdefault(p, nn.Parameter(p.detach().to(self.dtype)))
                    module._parameters[name] = cast[p]
        return model


def _bf16_problem(config: Config, recipe: Any) -> str:
    if recipe.compute == torch.bfloat16:
        return ""
    return "needs a recipe that computes in bf16, because the rest of the model computes in the dtype of its " \
           "parameters; set precision.recipe=bf16 or one of 8 or 4 bits, or memory.parameters=fp32"


@dataclass(frozen=True, kw_only=True)
class Parameters(Row):
    transforms: Callable[[], tuple[Transform, ...]]
    itemsize: int       # bytes of a parameter, and of its gradient


PARAMETERS = {
    "fp32": Parameters(transforms=lambda: (), itemsize=4, why="every update is exact to float32"),
    "bf16": Parameters(
        transforms=lambda: (ParameterDtype(dtype=torch.bfloat16),), itemsize=2, problem=_bf16_problem,
        why="weights, gradients and residual stream in 2 bytes (Zamirai et al. 2020, arXiv:2010.06192)"),
}
