"""Asynchronous tensor parallelism: a product in pieces, each beside the message of another (Wang et
al. 2022, https://doi.org/10.1145/3567955.3567959).

    gather, then x @ w.T       the tokens of one rank multiply while those of the next arrive
    x @ w.T, then scatter      what is another's is multiplied first, and travels meanwhile

PyTorch's operators over symmetric memory do both. Each is the other's backward, as in
`lpkit.parallel.tensor`. For the gradient of its weight a column gathers once more: tokens are what
that product adds up, so that it has no piece that could begin.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpkit.errors import ConfigError
from lpkit.parallel.ranks import Ranks
from lpkit.parallel.tensor import gathered

TOKENS = 1      # the dimension that ranks have parts of
NEEDS = "cuda"  # what the operators are made for


def gather_matmul(x: Tensor, w: Tensor, ranks: Ranks, *, keep: bool = False
                  ) -> tuple[Tensor | None, Tensor]:
    """(B, T / t, K) @ (K, N) -> the gathered x, if it is to be kept, and (B, T, N)."""
    whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), [w], TOKENS, ranks.groups["tensor"].group_name, return_A=keep)
    return whole, y


def matmul_scatter(x: Tensor, w: Tensor, ranks: Ranks) -> Tensor:
    """(B, T, K) @ (K, N), summed over the ranks -> (B, T / t, N)."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x.contiguous(), w, "sum", TOKENS, ranks.groups["tensor"].group_name)


class _Product(torch.autograd.Function):
    """x @ w.T of a `column`, which gathers x; or of a row, which scatters the result."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, ranks: Ranks, column: bool) -> Tensor:
        ctx.ranks, ctx.column = ranks, column
        ctx.save_for_backward(x, w)
        if column:
            return gather_matmul(x, w.T, ranks)[1].contiguous()
        return matmul_scatter(x, w.T, ranks)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, w = ctx.saved_tensors
        if ctx.column:
            dx, x = matmul_scatter(g, w, ctx.ranks), gathered(x, ctx.ranks)
        else:
            g, dx = gather_matmul(g, w, ctx.ranks, keep=True)
        return dx, g.flatten(0, 1).T @ x.flatten(0, 1), None, None


def instead(ranks: Ranks, part: nn.Module, leaf: str, column: bool) -> None:
    """Puts the product of the Linear `leaf`, a column or a row, and its message (else of
    `lpkit.parallel.tensor.apart`) into one. Raises ConfigError where the operators are not."""
    if ranks.device != NEEDS:
        raise ConfigError(f"parallel.tensor_messages=async is for {NEEDS}, and this is "
                          f"{ranks.device}; set parallel.tensor_messages=apart")
    linear = getattr(part, leaf)
    linear.forward = partial(_product, linear, column, ranks)
    part.register_forward_pre_hook(partial(_still_there, leaf))


def _still_there(leaf: str, part: nn.Module, given: Any) -> None:
    """A recipe puts other Linears where these were, which would multiply what is not gathered."""
    if not isinstance(getattr(part, leaf).forward, partial):
        raise ConfigError(f"parallel.tensor_messages=async multiplies as plain Linears do, and "
                          f"{leaf} became a {type(getattr(part, leaf)).__name__}; set "
                          f"parallel.tensor_messages=apart")


def _product(linear: nn.Linear, column: bool, ranks: Ranks, x: Tensor) -> Tensor:
    """As autocast would have it: operands in its dtype."""
    kind, w, bias = x.device.type, linear.weight, linear.bias
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, w = x.to(dtype), w.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        y = _Product.apply(x, w, ranks, column)
        return y if bias is None else y + bias
