"""Initialisations: functions that fill the parameters of a built model in place."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lpkit.techniques.inits import INITS
from lpkit.techniques.row import Settings


@torch.no_grad()
def _normal(model: nn.Module, std: Callable[[str, Tensor], float]) -> None:
    """Set biases to 0 and gains of norms to 1, and draw matrices from a normal distribution with
    mean 0 and standard deviation std(name, matrix)."""
    for name, p in model.named_parameters():
        if p.ndim < 2:
            nn.init.constant_(p, not name.endswith("bias"))
        else:
            nn.init.normal_(p, std=std(name, p))


def gpt2(model: nn.Module) -> None:
    """Draw weights with standard deviation 0.02. For the projections that add to the residual
    stream it is 0.02 / sqrt(2 L) (GPT-2 paper, section 2.3)."""
    smaller = 0.02 / math.sqrt(2 * len(model.blocks))
    writes = ("attention.out.weight", "mlp.down.weight")
    _normal(model, lambda name, p: smaller if name.endswith(writes) else 0.02)


def llama(model: nn.Module) -> None:
    """Draw all weights with standard deviation 0.02, as Llama in the transformers library does
    (initializer_range)."""
    _normal(model, lambda name, p: 0.02)


def fan_in(model: nn.Module) -> None:
    """Draw all weights with variance 1 / inputs, so that the scores of a narrow model differ at the
    start (LeCun et al. 1998, Efficient BackProp, section 4.6)."""
    _normal(model, lambda name, p: p.shape[-1] ** -0.5)


@torch.no_grad()
def initialise(model: nn.Module, init: Settings) -> None:
    """Fill `model` by the initialisation that `init` names. Then call `reset(init)` of each module
    that has this method. An initialisation fills parameters by name and shape, and does not know
    modules that are defined outside of the kit; they set their own starting values in `reset`."""
    INITS[init.name].load()(model)
    for module in model.modules():
        if (reset := getattr(module, "reset", None)) is not None:
            reset(init)
