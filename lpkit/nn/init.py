"""Initialisations: functions that fill a built model in place."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lpkit.techniques.inits import INITS
from lpkit.techniques.row import Settings


@torch.no_grad()
def _normal(model: nn.Module, std: Callable[[str, Tensor], float]) -> None:
    """Set biases to 0 and gains to 1, and draw matrices from N(0, std(name, matrix))."""
    for name, p in model.named_parameters():
        if p.ndim < 2:
            nn.init.constant_(p, not name.endswith("bias"))
        else:
            nn.init.normal_(p, std=std(name, p))


def gpt2(model: nn.Module) -> None:
    """Weights that write the residual stream are 1/sqrt(2L) smaller (GPT-2 paper, section 2.3)."""
    smaller = 0.02 / math.sqrt(2 * len(model.blocks))
    writes = ("attention.out.weight", "mlp.down.weight")
    _normal(model, lambda name, p: smaller if name.endswith(writes) else 0.02)


def llama(model: nn.Module) -> None:
    """N(0, 0.02) everywhere, as transformers' Llama (initializer_range)."""
    _normal(model, lambda name, p: 0.02)


def fan_in(model: nn.Module) -> None:
    """N(0, 1 / inputs) everywhere, so that the scores of a narrow model differ at the start.
    (LeCun et al. 1998, Efficient BackProp, section 4.6)."""
    _normal(model, lambda name, p: p.shape[-1] ** -0.5)


@torch.no_grad()
def initialise(model: nn.Module, init: Settings) -> None:
    """Fill `model` by the row that `init` names. Then each part that has `reset(init)` sets its
    own starting values: an initialisation fills by name and shape, and does not know parts from
    outside."""
    INITS[init.name].load()(model)
    for module in model.modules():
        if (reset := getattr(module, "reset", None)) is not None:
            reset(init)
