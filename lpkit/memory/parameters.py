"""The dtype of parameters and of their gradients. The optimizer computes in float32 whatever."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lpkit.contracts import Stage, Transform


@dataclass(frozen=True, kw_only=True)
class ParameterDtype(Transform):
    """Casts every parameter to `dtype`, in place; not those that a later transform adds."""

    dtype: torch.dtype
    stage = Stage.STORAGE

    def __call__(self, model: nn.Module) -> nn.Module:
        cast: dict[nn.Parameter, nn.Parameter] = {}     # tied ones stay tied
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    cast.setdefault(p, nn.Parameter(p.detach().to(self.dtype), p.requires_grad))
                    module._parameters[name] = cast[p]
        return model


def as_built() -> tuple[Transform, ...]:
    return ()


def in_bf16() -> tuple[Transform, ...]:
    return (ParameterDtype(dtype=torch.bfloat16),)
