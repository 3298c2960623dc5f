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
        for p in model.parameters():        # not the object: tied ones stay tied
            p.data = p.data.to(self.dtype)
        return model


def as_built() -> tuple[Transform, ...]:
    return ()


def in_bf16() -> tuple[Transform, ...]:
    return (ParameterDtype(dtype=torch.bfloat16),)
