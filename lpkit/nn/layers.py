"""Norms, positions and MLPs: what the rows of `lpkit.techniques.blocks` name."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import ModelConfig


def layernorm(config: ModelConfig) -> nn.Module:
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


def rmsnorm(config: ModelConfig) -> nn.Module:
    return nn.RMSNorm(config.width, eps=config.norm_eps)


class GeluMLP(nn.Module):
    """down(gelu(up(x))), tanh approximation as in GPT-2."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up = nn.Linear(config.D, config.F, bias=config.bias)
        self.down = nn.Linear(config.F, config.D, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:   # (B, T, D) -> (B, T, D)
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwigluMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, https://arxiv.org/abs/2002.05202), gate and up in one product."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up = nn.Linear(config.D, 2 * config.F, bias=config.bias)
        self.down = nn.Linear(config.F, config.D, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:   # (B, T, D) -> (B, T, D)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class LearnedPositions(nn.Module):
    """Adds a learned vector to each token's embedding; leaves q and k alone."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed = nn.Embedding(config.T, config.D)

    def add(self, x: Tensor, start: int) -> Tensor:   # (B, T, D) -> (B, T, D)
        return x + self.embed.weight[start:start + x.shape[1]]

    def rotation(self, T: int, start: int, like: Tensor) -> None:
        return None


class RotaryPositions(nn.Module):
    """Turns pairs of q and k by an angle that grows with the position (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    Pairs are (i, i + E/2), as in the published Llama checkpoints for transformers.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.E, self.theta, self.T = config.E, config.rope_theta, config.T

    def add(self, x: Tensor, start: int) -> Tensor:
        return x

    def rotation(self, T: int, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each (T, E), in the dtype of `like`. Made anew: T*E numbers are cheaper to make than to keep."""
        i = torch.arange(0, self.E, 2, dtype=torch.float32, device=like.device)
        angles = torch.outer(torch.arange(start, start + T, device=like.device).float(), self.theta ** (-i / self.E))
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:   # (B, H, T, E) -> the same
    if rotation is None:
        return x
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x)   # under autocast, x may be narrower
