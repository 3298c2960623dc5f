"""Initialisations: functions that fill a built model in place."""

import math

import torch
from torch import nn

from lpkit.techniques.inits import INITS
from lpkit.techniques.row import Settings


@torch.no_grad()
def _normal(model: nn.Module, *, std: float, residual_std: float) -> None:
    """Biases 0, gains 1, else N(0, std); `residual_std` where the residual stream is written."""
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif p.ndim < 2:
            nn.init.ones_(p)
        else:
            writes = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(p, std=residual_std if writes else std)


def gpt2(model: nn.Module) -> None:
    """Weights that write the residual stream are 1/sqrt(2L) smaller (GPT-2 paper, section 2.3)."""
    _normal(model, std=0.02, residual_std=0.02 / math.sqrt(2 * len(model.blocks)))


def llama(model: nn.Module) -> None:
    """N(0, 0.02) everywhere, as transformers' Llama (initializer_range)."""
    _normal(model, std=0.02, residual_std=0.02)


@torch.no_grad()
def fan_in(model: nn.Module) -> None:
    """N(0, 1 / inputs) everywhere, so that a narrow model's scores are not all alike at the start.
    (LeCun et al. 1998, Efficient BackProp, section 4.6)."""
    for name, p in model.named_parameters():
        if p.ndim < 2:
            nn.init.constant_(p, not name.endswith("bias"))
        else:
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)


@torch.no_grad()
def initialise(model: nn.Module, init: Settings) -> None:
    """Fills `model` by the row that `init` names, then lets each part that has `reset(init)` set
    what it starts from: an initialisation fills by name and shape, and knows no part from outside.
    """
    INITS[init.name].load()(model)
    for module in model.modules():
        if (reset := getattr(module, "reset", None)) is not None:
            reset(init)
