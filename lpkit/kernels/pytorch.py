"""PyTorch's version of each kernel that a layer calls, and of a product. A layer uses it until
another version is chosen (`lpkit.execution.kernels`), whose module is imported only then.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def after_addition(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function: x, delta -> x + delta, and its norm."""
    def add_norm(x: Tensor, delta: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        s = x + delta
        return s, norm(s, *others)
    return add_norm


def rms_norm_pytorch(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, eps)


def layer_norm_pytorch(x: Tensor, w: Tensor, b: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


add_rms_norm_pytorch = after_addition(rms_norm_pytorch)
add_layer_norm_pytorch = after_addition(layer_norm_pytorch)


def product_pytorch(a: Tensor, b: Tensor, bias: Tensor | None, alpha: Tensor | None) -> Tensor:
    """Return alpha * a @ b.T + bias, (M, N), for a (M, K) and b (N, K), rounded once."""
    start = a.new_zeros(()) if bias is None else bias
    return torch.addmm(start, a, b.T, beta=float(bias is not None),
                       alpha=1.0 if alpha is None else alpha.item())


def swiglu_pytorch(x: Tensor) -> Tensor:
    """x (..., 2 N) -> (..., N), in two operations, each rounded to x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate_pytorch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, E), cos and sin (T, E) -> like x. Computes in the dtype of the angles, which is
    wider than x's under autocast."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x)
