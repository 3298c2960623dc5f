"""Modules of adapters (`lpkit.techniques.adapters`). Each knows what Linear it equals: `merged`.

A parameter of a fused matrix lies by group of heads, as the matrix does: `side_by_side`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.contracts import Attend
from lpkit.kernels.rows import gelu
from lpkit.techniques.adapters import AdapterSettings, BottleneckSettings, LoraSettings, adapted
from lpkit.techniques.adapters import DropoutSettings as Dropout
from lpkit.techniques.adapters import VirtualSettings as Virtual
from lpkit.techniques.operation import fused

STD = 0.02      # of a prompt and a prefix that begin, as of embeddings in GPT-2


class Adapter(nn.Module):
    """Stands around a Linear, which is frozen."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features

    def merged(self) -> tuple[Tensor, Tensor | None] | None:
        """Returns weight, in float32, and bias of the Linear that computes the same; None: none
        does."""
        return None


class Lora(Adapter):
    """y = W x + scale B A x. `rows`: of the matrices that take turns in W; each has an A and a B of
    its own."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, rows: Sequence[int] = ()):
        super().__init__(base)
        self.scale, rows = scale, tuple(rows) or (base.out_features,)
        self.groups, self.drop = base.out_features // sum(rows), nn.Identity()
        like = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.A = nn.Linear(base.in_features, len(rows) * rank, **like)
        self.B = nn.ModuleList(nn.Linear(rank, self.groups * n, **like) for n in rows)
        for one in self.B:
            nn.init.zeros_(one.weight)      # it begins as the model that it adapts

    def forward(self, x: Tensor) -> Tensor:   # (..., in) -> (..., out)
        thin = self.A(self.drop(x)) * self.scale
        parts = thin.chunk(len(self.B), dim=-1)
        delta = side_by_side([B(part) for B, part in zip(self.B, parts)], self.groups, -1)
        if len(self.B) == 1:        # a product's own result, which selective recomputation keeps
            delta = delta.clone()
        return delta.add_(self.base(x))     # in place: a third tensor of this size is not needed

    def delta(self) -> Tensor:
        parts = [B.weight.float() @ A for B, A in
                 zip(self.B, self.A.weight.float().chunk(len(self.B)))]
        return self.scale * side_by_side(parts, self.groups, 0)

    def merged(self) -> tuple[Tensor, Tensor | None]:
        return self.base.weight.float() + self.delta(), self.base.bias


class Dora(Lora):
    """y = m (W + scale B A) x / |W + scale B A|, row by row; the norm is a number, not a function of
    A and B (Liu et al. 2024, section 4.3)."""

    def __init__(self, base: nn.Linear, *sizes: Any):
        super().__init__(base, *sizes)
        self.magnitude = nn.Parameter(self.norm().type_as(base.weight))

    @torch.no_grad()
    def norm(self) -> Tensor:
        """(out,), in float32 at least. No matrix of W's size is made for it:
        |w + s A^T b|^2 = |w|^2 + b (2 s A w + s^2 A A^T b)."""
        # a base in codes gives its matrix in float32
        w, s, found = self.base.weight.type_as(self.A.weight), self.scale, []
        wide = torch.promote_types(w.dtype, torch.float32)
        rows = [B.out_features // self.groups for B in self.B]
        parts = w.unflatten(0, (self.groups, -1)).split(rows, dim=1)
        with torch.autocast(w.device.type, enabled=False):
            for part, A, B in zip(parts, self.A.weight.chunk(len(rows)), self.B):
                b = B.weight.unflatten(0, (self.groups, -1))
                cross = 2 * s * torch.bmm(part, A.mT.expand(self.groups, -1, -1))
                found.append((b * (cross + s**2 * (b @ (A @ A.mT)))).sum(-1, dtype=wide))
        square = torch.linalg.vector_norm(w, dim=1, dtype=wide).square()
        return (square + torch.cat(found, dim=1).flatten()).clamp_min(1e-24).sqrt()

    def forward(self, x: Tensor) -> Tensor:   # (..., in) -> (..., out)
        z, share, bias = super().forward(x), self.magnitude / self.norm(), self.base.bias
        y = z * share.to(z.dtype)
        return y if bias is None else y.add_((bias * (1 - share)).to(z.dtype))  # it has no length

    def merged(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().merged()
        return (self.magnitude / self.norm())[:, None] * weight, bias


class Bottleneck(Adapter):
    """y = z + up(gelu(down(z))), z = W x + b."""

    def __init__(self, base: nn.Linear, width: int):
        super().__init__(base)
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.out_features, width, **like)
        self.up = nn.Linear(width, base.out_features, **like)
        for t in (self.up.weight, self.up.bias):
            nn.init.zeros_(t)

    def forward(self, x: Tensor) -> Tensor:   # (..., in) -> (..., out)
        x = self.base(x)
        return x + self.up(gelu(self.down(x)))


class ScaledKeysValues(Adapter):
    """Keys and values, of an output that lies by group, times learned vectors."""

    def __init__(self, base: nn.Linear, rows: Sequence[int]):
        super().__init__(base)
        self.rows, self.groups = tuple(rows), base.out_features // sum(rows)
        n = self.groups * sum(rows[1:])
        self.scale = nn.Parameter(torch.ones(n, device=base.weight.device, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:   # (..., in) -> (..., out)
        y = self.base(x).unflatten(-1, (self.groups, -1))
        queries, others = y.split([self.rows[0], sum(self.rows[1:])], dim=-1)
        scaled = others * self.scale.view(self.groups, -1).to(y.dtype)
        return torch.cat((queries, scaled), dim=-1).flatten(-2)

    def merged(self) -> tuple[Tensor, Tensor | None]:
        ones = self.scale.new_ones(self.groups, self.rows[0])
        scale = torch.cat((ones, self.scale.view(self.groups, -1)), dim=1).flatten().float()
        bias = self.base.bias
        return (scale[:, None] * self.base.weight.float(),
                None if bias is None else scale * bias.float())


class ScaledInput(Adapter):
    def __init__(self, base: nn.Linear):
        super().__init__(base)
        w = base.weight
        self.scale = nn.Parameter(torch.ones(base.in_features, device=w.device, dtype=w.dtype))

    def forward(self, x: Tensor) -> Tensor:   # (..., in) -> (..., out)
        return self.base(x * self.scale.to(x.dtype))

    def merged(self) -> tuple[Tensor, Tensor | None]:
        return self.base.weight.float() * self.scale.float(), self.base.bias


class Prefix(nn.Module):
    """Keys and values of a layer, learned as they are, before those of the text. Any causal backend
    takes them: their queries are zeros, whose results are left out."""

    def __init__(self, config: ModelConfig, length: int, device: torch.device):
        super().__init__()
        self.shape = length, 2, config.G, config.E
        self.weight = nn.Parameter(torch.empty(length, 2 * config.G * config.E, device=device))
        nn.init.normal_(self.weight, std=STD)

    # (B, H, T, E), twice (B, G, T, E) -> (B, H, T, E)
    def forward(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None
                ) -> Tensor:
        P, (k, v) = self.shape[0], self.before(k, v)
        return attend(F.pad(q, (0, 0, P, 0)), k, v, *others)[:, :, P:]

    def before(self, *pair: Tensor) -> list[Tensor]:
        """Keys and values (B, G, S, E) behind what was learned, (B, G, P + S, E)."""
        own = self.weight.view(self.shape).permute(1, 2, 0, 3)
        return [torch.cat((one.type_as(t).expand(len(t), -1, -1, -1), t), dim=2)
                for one, t in zip(own, pair)]


def side_by_side(parts: Sequence[Tensor], groups: int, dim: int) -> Tensor:
    """One tensor in which the groups of `parts` along `dim` take turns."""
    if len(parts) == 1:
        return parts[0]
    dim = dim % parts[0].ndim
    each = [part.unflatten(dim, (groups, -1)) for part in parts]
    return torch.cat(each, dim=dim + 1).flatten(dim, dim + 1)


def add_lora(model: nn.Module, settings: LoraSettings, kind: type[Lora] = Lora) -> None:
    def lora(base: nn.Linear, rows: Sequence[int]) -> Lora:
        return kind(base, settings.rank, settings.scale, () if settings.shared else rows)

    _around(model, settings, lora)


def add_dora(model: nn.Module, settings: LoraSettings) -> None:
    add_lora(model, settings, Dora)


@torch.no_grad()
def add_pissa(model: nn.Module, settings: LoraSettings) -> None:
    """B A is the best approximation of its rank of each matrix, and the frozen rest is what is left.
    """
    add_lora(model, settings)
    for one in model.modules():
        if isinstance(one, Lora):
            w, As = one.base.weight, one.A.weight.chunk(len(one.B))
            rows = [B.out_features // one.groups for B in one.B]
            parts = w.float().unflatten(0, (one.groups, -1)).split(rows, dim=1)
            for part, A, B in zip(parts, As, one.B):
                U, S, Vh = torch.linalg.svd(part.flatten(0, 1), full_matrices=False)
                root = S[:settings.rank].sqrt()
                B.weight.copy_(U[:, :settings.rank] * root)
                A.copy_(root[:, None] * Vh[:settings.rank])
            w.sub_(one.delta().to(w.dtype))


def add_bottlenecks(model: nn.Module, settings: BottleneckSettings) -> None:
    _around(model, settings, lambda base, rows: Bottleneck(base, settings.width))


def add_scales(model: nn.Module, settings: AdapterSettings) -> None:
    _around(model, settings, lambda base, rows: ScaledKeysValues(base, rows) if rows else
            ScaledInput(base))


def add_prefix(model: nn.Module, settings: Virtual) -> None:
    model.requires_grad_(False)
    model.positions.first = settings.length
    for block in model.blocks:
        attention = block.attention
        where = attention.qkv.weight.device
        attention.prefix = Prefix(model.config, settings.length, where)
        attention.attend = partial(attention.prefix, attention.attend)


def add_prompt(model: nn.Module, settings: Virtual) -> None:
    model.requires_grad_(False)
    where = model.embed.weight.device
    model.prompt = nn.Embedding(settings.length, model.config.D, device=where)
    nn.init.normal_(model.prompt.weight, std=STD)


def add_dropout(model: nn.Module, settings: Dropout) -> None:
    """Adds modules without parameters, and leaves every name as it was."""
    after = [(model.positions, "add", settings.embedding)]
    for block in model.blocks if settings.residual else ():
        after += [(part, "forward", settings.residual) for part in (block.attention, block.mlp)]
    for block in model.blocks if settings.attention else ():
        own = block.attention.probabilities = nn.Dropout(settings.attention)
        block.attention.attend = partial(_within, own, block.attention.attend)
    for module, name, share in after:
        module.dropout = nn.Dropout(share)
        setattr(module, name, partial(_then, module.dropout, getattr(module, name)))
    for one in model.modules():
        if isinstance(one, Lora):
            one.drop = nn.Dropout(settings.adapters)


def _then(drop: nn.Dropout, function: Callable[..., Tensor], *given: Any) -> Tensor:
    return drop(function(*given))


def _within(drop: nn.Dropout, attend: Attend, *given: Any) -> Tensor:
    return attend(*given, dropout=drop.p * drop.training)


def _around(model: nn.Module, settings: AdapterSettings,
            new: Callable[[nn.Linear, Sequence[int]], Adapter]) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        bases = {name: one for name, one in block.named_modules() if isinstance(one, nn.Linear)}
        for name in adapted(bases, settings):
            block.set_submodule(name, new(bases[name], fused(model.config, f"{name}.weight")))
