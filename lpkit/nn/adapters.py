"""Modules of adapters (`lpkit.techniques.adapters`).

q, k and v are fused in one matrix, whose rows are grouped by key/value head. `side_by_side` brings
the rows of separate adapters for q, k and v into this order.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lpkit.techniques.adapters import AdapterSettings, LoraSettings, adapted
from lpkit.techniques.operation import fused


class Adapter(nn.Module):
    """Wraps a frozen Linear, `base`."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features

    def merged(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the weight, in float32, and the bias of the Linear that computes the same; None
        if there is no such Linear."""
        return None


class Lora(Adapter):
    """y = W x + scale B A x, with A (rank, in) and B (out, rank). If several matrices are fused in
    W, each has its own A and B. rows: for each fused matrix, its rows in one group (of a key/value
    head); empty: W is one matrix."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, rows: Sequence[int] = ()):
        super().__init__(base)
        self.scale, rows = scale, tuple(rows) or (base.out_features,)
        self.groups, self.drop = base.out_features // sum(rows), nn.Identity()
        like = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.A = nn.Linear(base.in_features, len(rows) * rank, **like)
        self.B = nn.ModuleList(nn.Linear(rank, self.groups * n, **like) for n in rows)
        for linear in self.B:
            nn.init.zeros_(linear.weight)      # so B A x = 0, and the model is unchanged at first

    def forward(self, x: Tensor) -> Tensor:   # (..., in) -> (..., out)
        thin = self.A(self.drop(x)) * self.scale
        parts = thin.chunk(len(self.B), dim=-1)
        delta = side_by_side([B(part) for B, part in zip(self.B, parts)], self.groups, -1)
        # With one B, `delta` is the result of a matmul. Selective recomputation saves this result,
        # so it must not be overwritten.
        if len(self.B) == 1:
            delta = delta.clone()
        return delta.add_(self.base(x))     # in place, so that no third tensor is allocated

    def delta(self) -> Tensor:
        """Return scale B A, (out, in) float32."""
        parts = [B.weight.float() @ A for B, A in
                 zip(self.B, self.A.weight.float().chunk(len(self.B)))]
        return self.scale * side_by_side(parts, self.groups, 0)

    def merged(self) -> tuple[Tensor, Tensor | None]:
        return self.base.weight.float() + self.delta(), self.base.bias


def side_by_side(parts: Sequence[Tensor], groups: int, dim: int) -> Tensor:
    """Return `parts`, joined along `dim` group by group: the first group of each part, then the
    second group of each part, and so on. Each part has `groups` groups of equal size.

    >>> side_by_side([torch.tensor([1, 2, 3, 4]), torch.tensor([8, 9])], 2, 0).tolist()
    [1, 2, 8, 3, 4, 9]
    """
    if len(parts) == 1:
        return parts[0]
    dim = dim % parts[0].ndim
    each = [part.unflatten(dim, (groups, -1)) for part in parts]
    return torch.cat(each, dim=dim + 1).flatten(dim, dim + 1)


def add_lora(model: nn.Module, settings: LoraSettings, kind: type[Lora] = Lora) -> None:
    def lora(base: nn.Linear, rows: Sequence[int]) -> Lora:
        return kind(base, settings.rank, settings.scale, () if settings.shared else rows)

    around(model, settings, lora)


def around(model: nn.Module, settings: AdapterSettings,
            new: Callable[[nn.Linear, Sequence[int]], Adapter]) -> None:
    """Freeze the model, and replace each Linear that `settings` names by new(linear, rows). rows:
    as in Lora."""
    model.requires_grad_(False)
    for block in model.blocks:
        bases = {name: module for name, module in block.named_modules()
                 if isinstance(module, nn.Linear)}
        for name in adapted(bases, settings):
            block.set_submodule(name, new(bases[name], fused(model.config, f"{name}.weight")))
