"""Norms and positions of the model. Rows of `lpkit.techniques` name these classes."""

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.kernels import pytorch
from lpkit.techniques.blocks import operations
from lpkit.techniques.operation import FAST, SLOW, TRAINED, MicroBatch


def linear(config: ModelConfig, name: str) -> nn.Linear:
    """Return the Linear for the operation `name` of a block, for example "mlp.up", with the sizes
    and the bias that `lpkit.techniques.blocks` lists."""
    unchanged = MicroBatch(model=replace(config, changes=()))       # changes are applied afterwards
    op = next(op for op in operations(unchanged).block if op.name == name)
    return nn.Linear(*op.matmul, bias=op.params > op.weights)


# A layer calls a kernel through an attribute. `kernels` maps these attributes to names of kernels
# (`lpkit.techniques.kernels`). The attributes begin as PyTorch's versions;
# `lpkit.execution.kernels` may replace them.

class LayerNorm(nn.LayerNorm):
    kernels: ClassVar = {"normalise": "layer-norm", "add_normalise": "add-layer-norm"}
    normalise = staticmethod(pytorch.layer_norm_pytorch)
    add_normalise = staticmethod(pytorch.add_layer_norm_pytorch)

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of x (..., D). With delta, return x + delta and the norm of this sum."""
        if delta is None:
            return self.normalise(x, self.weight, self.bias, self.eps)
        return self.add_normalise(x, delta, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    kernels: ClassVar = {"normalise": "rms-norm", "add_normalise": "add-rms-norm"}
    normalise = staticmethod(pytorch.rms_norm_pytorch)
    add_normalise = staticmethod(pytorch.add_rms_norm_pytorch)

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of x (..., D). With delta, return x + delta and the norm of this sum."""
        if delta is None:
            return self.normalise(x, self.weight, self.eps)
        return self.add_normalise(x, delta, self.weight, self.eps)


def add_norm(norm: nn.Module, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return x + delta and its norm; by one kernel if `norm` is a class of this module."""
    if isinstance(norm, (LayerNorm, RMSNorm)):
        return norm(x, delta)
    x = x + delta
    return x, norm(x)


def layernorm(config: ModelConfig) -> nn.Module:
    return LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


def rmsnorm(config: ModelConfig) -> nn.Module:
    return RMSNorm(config.width, eps=config.norm_eps)


class LearnedPositions(nn.Module):
    """Adds a learned vector for each position to the embeddings, and does not change q and k.

    `start`: the position of the first token, an int; or the position of each token, (T,) int64, or
    (B, T) if sequences differ.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed = nn.Embedding(config.T, config.D)

    def add(self, x: Tensor, start: int | Tensor) -> Tensor:   # (B, T, D) -> (B, T, D)
        if isinstance(start, Tensor):
            return x + self.embed(start)
        return x + self.embed.weight[start:start + x.shape[1]]

    def rotation(self, T: int, start: int | Tensor, like: Tensor) -> None:
        return None


class RotaryPositions(nn.Module):
    """Rotates pairs of numbers of q and k by an angle that grows with the position (Su et al. 2021,
    https://arxiv.org/abs/2104.09864).

    Pairs are (i, i + E/2), as in the published Llama checkpoints for the transformers library. A
    `rope_factor` above 1 slows down the slow rotations, for contexts longer than in training:
    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.E, self.theta, self.T = config.E, config.rope_theta, config.T
        # `first`: the position of the first token
        self.factor, self.first = config.rope_factor, 0

    def add(self, x: Tensor, start: int | Tensor) -> Tensor:
        return x

    def rotation(self, T: int, start: int | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles, (T, E) each, in the dtype of `like`. If positions
        differ between sequences, they are (B, 1, T, E), which kernels do not support. They are
        computed in every forward, which is cheaper than storing them. start: as in
        LearnedPositions."""
        i = torch.arange(0, self.E, 2, dtype=torch.float32, device=like.device)
        if isinstance(start, Tensor):
            places = (start if start.ndim == 1 else start[:, None]).float() + self.first
        else:
            start += self.first
            places = torch.arange(start, start + T, device=like.device).float()
        speeds = self.theta ** (-i / self.E)        # radians per token
        if self.factor != 1:
            # share of the original speed: 1 for fast rotations, 0 for slow rotations
            kept = ((TRAINED * speeds / (2 * math.pi) - SLOW) / (FAST - SLOW)).clamp(0, 1)
            speeds = speeds * (kept + (1 - kept) / self.factor)
        angles = places[..., None] * speeds
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
