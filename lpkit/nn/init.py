"""Initialisations: functions that fill a built model in place."""

import math
from collections.abc import Callable

import torch
from torch import nn

from lpkit.techniques.inits import INITS
from lpkit.techniques.operation import fused
from lpkit.techniques.row import Settings

MUP_WIDTH = 32      # at which muP's embeddings are N(0, 1 / width)


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


def values(attention: nn.Module) -> torch.Tensor | None:
    """(G, E, D): the rows of values, a view; None where there are none."""
    qkv = getattr(attention, "qkv", None)
    return None if qkv is None else qkv.weight.data.unflatten(0, (attention.G, -1, attention.E))[:, -1]


@torch.no_grad()
def fixup(model: nn.Module) -> None:
    """A branch of m matrices ends with 0, and the others are smaller by n^(-1/(2m - 2)), of n
    branches (Zhang et al. 2019, section 3): m is 2, or 3 where gate and up multiply each other."""
    fan_in(model)
    branches = 2 * len(model.blocks)
    for block in model.blocks:
        first, last = (one for one in block.mlp.children() if isinstance(one, nn.Linear))
        m = 2 + (first.out_features > last.in_features)
        first.weight.mul_(branches ** (-1 / (2 * m - 2)))
        nn.init.zeros_(last.weight)
        if (v := values(block.attention)) is not None:
            v.mul_(branches ** -0.5)
            nn.init.zeros_(block.attention.out.weight)


@torch.no_grad()
def t_fixup(model: nn.Module) -> None:
    """Matrices that are one product here are Xavier's each for itself."""
    m, L = model.config, model.config.L
    _normal(model, std=m.D ** -0.5, residual_std=m.D ** -0.5)
    for table in (model.embed.weight, *model.positions.parameters()):
        table.mul_((9 * L) ** -0.25)
    for block in model.blocks:
        linears = {name: one for name, one in block.named_modules() if isinstance(one, nn.Linear)}
        for name, one in linears.items():
            queries = name in ("attention.qkv", "attention.qk")
            rows = m.H * m.E if queries else (*fused(m, f"{name}.weight"), one.out_features)[0]
            std = math.sqrt(2 / (rows + one.in_features))
            nn.init.normal_(one.weight, std=std if queries else 0.67 * L ** -0.25 * std)
        if (v := values(block.attention)) is not None:
            v.mul_(0.67 * L ** -0.25)


@torch.no_grad()
def mup(model: nn.Module) -> None:
    """The rates that belong to it go with 1 / width (`lessons.l21_batch_schedule_search.mup`)."""
    fan_in(model)
    for table in (model.embed.weight, *model.positions.parameters()):
        nn.init.normal_(table, std=MUP_WIDTH ** -0.5)
    if model.head.weight is not model.embed.weight:
        nn.init.zeros_(model.head.weight)


@torch.no_grad()
def orthogonal_values(model: nn.Module) -> None:
    _with_values(model, nn.init.orthogonal_)


@torch.no_grad()
def identity_values(model: nn.Module) -> None:
    _with_values(model, nn.init.eye_)


def _with_values(model: nn.Module, fill: Callable[[torch.Tensor], object]) -> None:
    fan_in(model)
    for block in model.blocks:
        if (v := values(block.attention)) is not None:
            v.copy_(fill(torch.empty_like(v.flatten(0, 1))).view_as(v))
            fill(block.attention.out.weight)


@torch.no_grad()
def initialise(model: nn.Module, init: Settings) -> None:
    """Fills `model` by the row that `init` names, then lets each part that has `reset(init)` set
    what it starts from: an initialisation fills by name and shape, and knows no part from outside.
    """
    INITS[init.name].load()(model)
    for module in model.modules():
        if (reset := getattr(module, "reset", None)) is not None:
            reset(init)
