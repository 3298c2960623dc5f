"""Initialisations for models that plain ones do not begin well: without norms, without skips, of any
width. Rows of `lpkit.techniques.inits`."""

import math
from collections.abc import Callable

import torch
from torch import nn

from lpkit.nn.init import fan_in
from lpkit.techniques.operation import fused

MUP_WIDTH = 32      # at which muP's embeddings are N(0, 1 / width)


def values(attention: nn.Module) -> torch.Tensor | None:
    """(G, E, D): the rows of values, a view; None where there are none."""
    qkv = getattr(attention, "qkv", None)
    if qkv is None:
        return None
    return qkv.weight.data.unflatten(0, (attention.G, -1, attention.E))[:, -1]


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
    fan_in(model)
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
    """The rates that belong to it go with 1 / width (`lessons.l27_width_and_mup.mup`)."""
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
