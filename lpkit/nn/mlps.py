"""MLPs of the model. Rows of `lpkit.techniques.blocks` name these classes."""

from typing import ClassVar

from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.kernels import pytorch
from lpkit.kernels.rows import gelu
from lpkit.nn.layers import linear


class GeluMLP(nn.Module):
    """down(gelu(up(x))), with GPT-2's tanh approximation."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.up, self.down = linear(config, "mlp.up"), linear(config, "mlp.down")

    def forward(self, x: Tensor) -> Tensor:   # (B, T, D) -> (B, T, D)
        return self.down(gelu(self.up(x)))


class SwigluMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one matmul (Shazeer, arXiv:2002.05202)."""

    kernels: ClassVar = {"activate": "swiglu"}
    activate = staticmethod(pytorch.swiglu_pytorch)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_up, self.down = linear(config, "mlp.gate_up"), linear(config, "mlp.down")

    def forward(self, x: Tensor) -> Tensor:   # (B, T, D) -> (B, T, D)
        return self.down(self.activate(self.gate_up(x)))
