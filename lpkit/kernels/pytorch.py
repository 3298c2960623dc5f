"""PyTorch's version of each kernel that a layer calls, and of a matmul. A layer uses this version
unless `lpkit.execution.kernels` sets another one. The modules of other versions are imported only
when they are needed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def after_addition(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of x, delta and the other arguments of `norm`, which returns x + delta and
    the norm of this sum."""
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
    """Return silu(gate) * up, (..., N), for x (..., 2 N), whose last axis is gate, then up. The
    results of silu and of the multiplication are each rounded to the dtype of x."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate_pytorch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, H, T, E) with rotary positions; cos and sin (T, E). Computes in the dtype of cos
    and sin, which is wider than the dtype of x under autocast, and returns the dtype of x."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).type_as(x)
