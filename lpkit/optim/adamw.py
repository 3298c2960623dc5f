"""AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), PyTorch's fused implementation."""

from dataclasses import dataclass

import torch
from torch import nn

from lpkit.contracts import OptimizerSpec


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay for matrices and embeddings, none for gains and biases."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [dict(params=[p for p in params if p.ndim >= 2], weight_decay=weight_decay),
            dict(params=[p for p in params if p.ndim < 2], weight_decay=0.0)]


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerSpec):
    """Two float32 moments a parameter."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    state_bytes_per_param = 8

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(decay_groups(model, self.weight_decay), lr=self.lr, betas=(self.beta1, self.beta2),
                                 eps=self.eps, fused=True)
