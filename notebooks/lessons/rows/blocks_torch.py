"""Modules and initialisations that the rows of `lessons.rows.blocks` name.

A skip carries the signal past a block. Without skips, attention averages over the past in every
layer, so the tokens of a deep model become alike (Dong et al. 2021,
https://arxiv.org/abs/2103.03404), unless a block starts as the identity. Shaped attention starts as
the identity (Noci et al. 2023, https://arxiv.org/abs/2306.17759): with queries of 0, softmax is the
mean over the past, which is subtracted, so only the token's own value remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lessons.rows.blocks import ShapedInit, SharedSettings
from lpkit.config import ModelConfig
from lpkit.contracts import Attend
from lpkit.nn.init import fan_in
from lpkit.nn.layers import add_norm, linear
from lpkit.nn.transformer import Attention
from lpkit.techniques.blocks import BLOCKS, MLPS, NORMS
from lpkit.techniques.inits import INITS
from lpkit.techniques.operation import fused
from lpkit.techniques.row import Settings

MUP_WIDTH = 32      # width at which muP's embeddings are N(0, 1 / width)


class Gain(nn.Module):
    """Learned factors of the last dimension, or one factor for all; they start at `start`."""

    def __init__(self, numbers: int, start: float):
        super().__init__()
        self.weight, self.start = nn.Parameter(torch.full((numbers,), start)), start

    def reset(self, init: Settings) -> None:
        nn.init.constant_(self.weight, self.start)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product in the weight's (so the stream's) dtype, also for a narrower x."""
        return x * self.weight


class Shape(nn.Module):
    """alpha v + beta softmax(q k) v - gamma mean(v), by head. `weight` (3, H): alpha, beta, gamma.

    The published code builds a (T, T) matrix. Here the mean over the past is a running sum, so
    memory stays linear in T with any backend.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight, self.decays = nn.Parameter(torch.ones(3, config.H)), False     # gains

    def reset(self, init: Settings) -> None:
        start = torch.tensor(getattr(INITS[init.name], "shape", ShapedInit.shape))
        self.weight.data.copy_(start[:, None].expand_as(self.weight))

    # (B, H, T, E) each -> (B, H, T, E)
    def forward(self, v: Tensor, attended: Tensor, mean: Tensor | None = None) -> Tensor:
        alpha, beta, gamma = self.weight.type_as(v)[:, :, None, None]
        mean = running_mean(v) if mean is None else mean
        return alpha * v + beta * attended - gamma * mean


def running_mean(v: Tensor) -> Tensor:
    """Return the mean over each token's v and all earlier v, summed in float32:
    (..., T, E) -> (..., T, E)."""
    counts = torch.arange(1, v.shape[-2] + 1, device=v.device)[:, None]
    wide = torch.promote_types(v.dtype, torch.float32)
    return (v.cumsum(-2, dtype=wide) / counts).type_as(v)


class ShapedAttention(Attention):
    """Starts as the identity if values and projection do (see the initialisations)."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__(config, attend)
        self.shape = Shape(config)

    def reset(self, init: Settings) -> None:
        if getattr(INITS[init.name], "zero_queries", ShapedInit.zero_queries):
            product = next(self.children())     # the fused product of q, k and perhaps v
            product.weight.data.unflatten(0, (self.G, -1, self.E))[:, :self.queries] = 0.0

    def read(self, cache, layer: int, q: Tensor, k: Tensor, v: Tensor,
             own: Tensor | None) -> Tensor:
        out = cache.step(layer, self, q, k, v, own)     # queries of 0: the mean over the cache
        return self.shape(v, out, cache.step(layer, self, torch.zeros_like(q), k, v, None))


class BareAttention(ShapedAttention):
    """Shaped attention whose values are its input, without an output projection."""

    def project(self, config: ModelConfig) -> None:
        self.qk, self.out = linear(config, "attention.qk"), nn.Identity()

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.qk(x).unflatten(-1, (self.G, 2, self.E)).unbind(3)
        return q, k, x.type_as(q).unflatten(-1, (self.G, self.E))

    def step_heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        qk = self.qk(x).view(len(x), self.G, 2, self.E)
        return qk, x.type_as(qk).view(len(x), self.G, 1, self.E)


class Branches(nn.Module):
    """A block of attention and MLP as described by its row: whether attention has a skip, whether
    both read one norm, the norms after them, and their gains."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        row = BLOCKS[config.block]
        norm = NORMS[config.norm if row.norms else "none"].load()

        def gain(start: float | None) -> nn.Module:
            width = config.D if row.channels else 1
            return nn.Identity() if row.gain is None else Gain(width, start)

        attention = Attention if row.skip else BareAttention if row.bare else ShapedAttention
        self.skip, self.norm1, self.attention = row.skip, norm(config), attention(config, attend)
        self.gain1 = gain(row.gain if row.skip else 1.0)
        self.norm2 = None if row.parallel else norm(config)
        self.mlp = MLPS[config.mlp].load()(config)
        self.gain2 = self.gain1 if row.one_gain else gain(row.gain)
        self.norm3, self.norm4 = (norm(config) if row.behind else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, rotation=None, cache=None, layer: int = 0,
                documents: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        delta = self.gain1(self.norm3(self.attention(h, rotation, cache, layer, documents)))
        if self.skip and self.norm2 is not None:
            x, h = add_norm(self.norm2, x, delta)
        else:
            x = x + delta if self.skip else delta
            del delta       # free it before the MLP's is allocated
            h = h if self.norm2 is None else self.norm2(x)
        return x + self.gain2(self.norm4(self.mlp(h)))


def share_layers(model: nn.Module, settings: SharedSettings) -> None:
    for i in range(settings.groups, len(model.blocks)):
        first = model.blocks[i % settings.groups]
        if settings.parts == "all":
            model.blocks[i] = first
        else:
            setattr(model.blocks[i], settings.parts, getattr(first, settings.parts))


# ---- Initialisations

def values(attention: nn.Module) -> torch.Tensor | None:
    """Return the rows of the fused matrix that compute the values, as a view (G, E, D); None if the
    attention has no matrix for values."""
    qkv = getattr(attention, "qkv", None)
    if qkv is None:
        return None
    return qkv.weight.data.unflatten(0, (attention.G, -1, attention.E))[:, -1]


@torch.no_grad()
def fixup(model: nn.Module) -> None:
    """Initialise by Fixup (Zhang et al. 2019, section 3). The last matrix of each branch is 0. The
    other matrices are scaled by n^(-1/(2m - 2)) for n branches of m matrices; m is 2, or 3 if an
    MLP multiplies gate and up."""
    fan_in(model)
    branches = 2 * len(model.blocks)
    for block in model.blocks:
        first, last = (module for module in block.mlp.children() if isinstance(module, nn.Linear))
        m = 2 + (first.out_features > last.in_features)
        first.weight.mul_(branches ** (-1 / (2 * m - 2)))
        nn.init.zeros_(last.weight)
        if (v := values(block.attention)) is not None:
            v.mul_(branches ** -0.5)
            nn.init.zeros_(block.attention.out.weight)


@torch.no_grad()
def t_fixup(model: nn.Module) -> None:
    """Initialise by T-Fixup. Each matrix within a fused matrix gets Xavier's initialisation
    separately."""
    m, L = model.config, model.config.L
    fan_in(model)
    for table in (model.embed.weight, *model.positions.parameters()):
        table.mul_((9 * L) ** -0.25)
    for block in model.blocks:
        linears = {name: module for name, module in block.named_modules()
                   if isinstance(module, nn.Linear)}
        for name, module in linears.items():
            queries = name in ("attention.qkv", "attention.qk")
            rows = m.H * m.E if queries else (*fused(m, f"{name}.weight"), module.out_features)[0]
            std = math.sqrt(2 / (rows + module.in_features))
            nn.init.normal_(module.weight, std=std if queries else 0.67 * L ** -0.25 * std)
        if (v := values(block.attention)) is not None:
            v.mul_(0.67 * L ** -0.25)


@torch.no_grad()
def mup(model: nn.Module) -> None:
    """Initialise for muP. The matching learning rates are in `lessons.l27_width_and_mup.mup`."""
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
