"""The dtype that parameters are stored in. Their gradients have it too, the optimizer's arithmetic stays float32."""

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
class Stored(Transform):
    """Every parameter in `dtype`, in place; what is made later, of float32 or not, stays as it is made."""

    dtype: torch.dtype
    stage = Stage.STORAGE

    def __call__(self, model: nn.Module) -> nn.Module:
        made: dict[nn.Parameter, nn.Parameter] = {}     # tied ones stay tied
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    made.setdefault(p, nn.Parameter(p.detach().to(self.dtype)))
                    module._parameters[name] = made[p]
        return model


def _bf16_problem(config: Config, recipe: Any) -> str:
    if recipe.compute == torch.bfloat16:
        return ""
    return "goes with a recipe that computes in bf16: the rest of the model is computed in what its parameters are stored " \
           "in; set precision.recipe=bf16 or one of 8 or 4 bits, or memory.parameters=fp32"


@dataclass(frozen=True, kw_only=True)
class Parameters(Row):
    transforms: Callable[[], tuple[Transform, ...]]
    itemsize: int       # bytes of a parameter, and of its gradient


PARAMETERS = {
    "fp32": Parameters(transforms=lambda: (), itemsize=4, why="every update is exact to float32"),
    "bf16": Parameters(
        transforms=lambda: (Stored(dtype=torch.bfloat16),), itemsize=2, problem=_bf16_problem,
        why="weights, gradients and residual stream in 2 bytes; each update in float32 and rounded stochastically, so that "
            "small ones survive on average (Zamirai et al. 2020, arXiv:2010.06192)"),
}
