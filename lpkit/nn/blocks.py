"""Blocks that are not pre-norm: what rows of `lpkit.techniques.blocks` name.

A skip carries the signal past a block. Without it a block must begin as the identity, or the tokens
of a deep model become alike: attention is a mean over the past, again and again (Dong et al. 2021,
https://arxiv.org/abs/2103.03404). Shaped attention is that identity (Noci et al. 2023,
https://arxiv.org/abs/2306.17759): with queries 0, softmax is the mean over the past, which is
subtracted, and a token's own value stays.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.contracts import Attend
from lpkit.nn.layers import add_norm, linear
from lpkit.nn.transformer import Attention
from lpkit.techniques.adapters import SharedSettings
from lpkit.techniques.blocks import BLOCKS, MLPS, NORMS
from lpkit.techniques.inits import INITS, Init
from lpkit.techniques.row import Settings


class Gain(nn.Module):
    """Learned factors of the last dimension, or one for all, that begin as `start`."""

    def __init__(self, numbers: int, start: float):
        super().__init__()
        self.weight, self.start = nn.Parameter(torch.full((numbers,), start)), start

    def reset(self, init: Settings) -> None:
        nn.init.constant_(self.weight, self.start)

    def forward(self, x: Tensor) -> Tensor:
        """Gives the weight's dtype, which is the stream's, where x has the products'."""
        return x * self.weight


class Shape(nn.Module):
    """alpha v + beta softmax(q k) v - gamma mean(v), by head. `weight` (3, H): alpha, beta, gamma.

    The published code builds the (T, T) matrix of it; the mean over the past is a running sum, so
    that memory stays linear in T with any backend.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight, self.decays = nn.Parameter(torch.ones(3, config.H)), False     # gains

    def reset(self, init: Settings) -> None:
        start = torch.tensor(getattr(INITS[init.name], "shape", Init.shape))
        self.weight.data.copy_(start[:, None].expand_as(self.weight))

    # (B, H, T, E) each -> (B, H, T, E)
    def forward(self, v: Tensor, attended: Tensor, mean: Tensor | None = None) -> Tensor:
        alpha, beta, gamma = self.weight.type_as(v)[:, :, None, None]
        mean = running_mean(v) if mean is None else mean
        return alpha * v + beta * attended - gamma * mean


def running_mean(v: Tensor) -> Tensor:
    """(..., T, E) -> (..., T, E): the mean of each token's v and those before it, summed in
    float32."""
    counts = torch.arange(1, v.shape[-2] + 1, device=v.device)[:, None]
    wide = torch.promote_types(v.dtype, torch.float32)
    return (v.cumsum(-2, dtype=wide) / counts).type_as(v)


class ShapedAttention(Attention):
    """Begins as the identity, where values and projection do (an initialisation says which)."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__(config, attend)
        self.shape = Shape(config)

    def reset(self, init: Settings) -> None:
        if getattr(INITS[init.name], "zero_queries", Init.zero_queries):
            product = next(self.children())     # of q, k and perhaps v
            product.weight.data.unflatten(0, (self.G, -1, self.E))[:, :self.queries] = 0.0


class BareAttention(ShapedAttention):
    """Shaped attention whose values are its input, and whose result is not projected."""

    def project(self, config: ModelConfig) -> None:
        self.qk, self.out = linear(config, "attention.qk"), nn.Identity()

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.qk(x).unflatten(-1, (self.G, 2, self.E)).unbind(3)
        return q, k, x.type_as(q).unflatten(-1, (self.G, self.E))

    def step_heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        qk = self.qk(x).view(len(x), self.G, 2, self.E)
        return qk, x.type_as(qk).view(len(x), self.G, 1, self.E)


class Branches(nn.Module):
    """A block of attention and MLP, as its row says: whether attention has a skip, whether both
    read one norm, which norms are behind them, and what each is multiplied by."""

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
            del delta       # before the MLP's are there
            h = h if self.norm2 is None else self.norm2(x)
        return x + self.gain2(self.norm4(self.mlp(h)))


def share_layers(model: nn.Module, settings: SharedSettings) -> None:
    for i in range(settings.groups, len(model.blocks)):
        first = model.blocks[i % settings.groups]
        if settings.parts == "all":
            model.blocks[i] = first
        else:
            setattr(model.blocks[i], settings.parts, getattr(first, settings.parts))
