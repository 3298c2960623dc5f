"""Norms, positions and MLPs: what the rows of `lpkit.techniques.blocks` name."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.kernels.rows import gelu
from lpkit.techniques.blocks import MicroBatch, operations


def linear(config: ModelConfig, name: str) -> nn.Linear:
    """The Linear of an operation of the block: its sizes and its bias are those of the row."""
    op = next(op for op in operations(MicroBatch(model=config)).block if op.name == name)
    return nn.Linear(*op.matmul, bias=op.params > op.weights)


def layernorm(config: ModelConfig) -> nn.Module:
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


def rmsnorm(config: ModelConfig) -> nn.Module:
    return nn.RMSNorm(config.width, eps=config.norm_eps)


class GeluMLP(nn.Module):
    """down(gelu(up(x))), tanh approximation as in GPT-2."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up, self.down = linear(config, "mlp.up"), linear(config, "mlp.down")

    def forward(self, x: Tensor) -> Tensor:   # (B, T, D) -> (B, T, D)
        return self.down(gelu(self.up(x)))


class SwigluMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up, self.down = linear(config, "mlp.gate_up"), linear(config, "mlp.down")

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
    """Turns pairs of q and k by an angle that grows with the position (Su et al. 2021,
    https://arxiv.org/abs/2104.09864).

    Pairs are (i, i + E/2), as in the published Llama checkpoints for transformers.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.E, self.theta, self.T = config.E, config.rope_theta, config.T

    def add(self, x: Tensor, start: int) -> Tensor:
        return x

    def rotation(self, T: int, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (T, E) each, as `like`: cheaper to compute again than to keep."""
        i = torch.arange(0, self.E, 2, dtype=torch.float32, device=like.device)
        places = torch.arange(start, start + T, device=like.device).float()
        angles = torch.outer(places, self.theta ** (-i / self.E))
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:   # (B, H, T, E)
    if rotation is None:
        return x
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    # under autocast, x may be narrower
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x)
