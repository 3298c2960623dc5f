"""Modules of the rows in `lessons.rows.adapters`, and peft's files of a prompt and a prefix.

Each adapter's `merged` returns the weight and the bias of the equivalent Linear. The parameters of
an adapter of a fused matrix are stored by group of heads, like the matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lessons.rows.adapters import BottleneckSettings, DropoutSettings, VirtualSettings
from lpkit.config import ModelConfig
from lpkit.contracts import Attend
from lpkit.exchange import adapted
from lpkit.kernels.rows import gelu
from lpkit.nn.adapters import Adapter, Lora, add_lora, around
from lpkit.techniques.adapters import AdapterSettings, LoraSettings
from lpkit.techniques.blocks import MODEL_CHANGES
from lpkit.training.runs import Run

STD = 0.02      # standard deviation of a new prompt or prefix, as of GPT-2's embeddings
LEARNED = "prompt_embeddings"       # peft's only tensor of a prompt or a prefix


class Dora(Lora):
    """y = m (W + scale B A) x / |W + scale B A|, row by row; for autograd, the norm is a constant
    and not a function of A and B (Liu et al. 2024, section 4.3)."""

    def __init__(self, base: nn.Linear, *sizes: Any):
        super().__init__(base, *sizes)
        self.magnitude = nn.Parameter(self.norm().type_as(base.weight))

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the norms (out,), in float32 or wider, without a matrix of W's size:
        |w + s A^T b|^2 = |w|^2 + b (2 s A w + s^2 A A^T b)."""
        # a quantized base returns its matrix in float32
        w, s, squares = self.base.weight.type_as(self.A.weight), self.scale, []
        wide = torch.promote_types(w.dtype, torch.float32)
        rows = [B.out_features // self.groups for B in self.B]
        parts = w.unflatten(0, (self.groups, -1)).split(rows, dim=1)
        with torch.autocast(w.device.type, enabled=False):
            for part, A, B in zip(parts, self.A.weight.chunk(len(rows)), self.B):
                b = B.weight.unflatten(0, (self.groups, -1))
                cross = 2 * s * torch.bmm(part, A.mT.expand(self.groups, -1, -1))
                squares.append((b * (cross + s**2 * (b @ (A @ A.mT)))).sum(-1, dtype=wide))
        square = torch.linalg.vector_norm(w, dim=1, dtype=wide).square()
        return (square + torch.cat(squares, dim=1).flatten()).clamp_min(1e-24).sqrt()

    def forward(self, x: Tensor) -> Tensor:   # (..., in) -> (..., out)
        z, share, bias = super().forward(x), self.magnitude / self.norm(), self.base.bias
        y = z * share.to(z.dtype)
        return y if bias is None else y.add_((bias * (1 - share)).to(z.dtype))  # bias is not scaled

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
    """Multiplies keys and values in the output of a fused Linear by learned vectors. `rows`: the
    rows of queries, keys and values in each group of heads."""

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
    """Multiplies the input of a Linear by a learned vector."""

    def __init__(self, base: nn.Linear):
        super().__init__(base)
        w = base.weight
        self.scale = nn.Parameter(torch.ones(base.in_features, device=w.device, dtype=w.dtype))

    def forward(self, x: Tensor) -> Tensor:   # (..., in) -> (..., out)
        return self.base(x * self.scale.to(x.dtype))

    def merged(self) -> tuple[Tensor, Tensor | None]:
        return self.base.weight.float() * self.scale.float(), self.base.bias


class Prefix(nn.Module):
    """Learned keys and values of a layer, placed before those of the text. To fit any causal
    backend, the prefix gets queries of zeros, whose results are dropped."""

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
        """Return keys and values (B, G, S, E) with the learned ones before: (B, G, P + S, E)."""
        own = self.weight.view(self.shape).permute(1, 2, 0, 3)
        return [torch.cat((part.type_as(t).expand(len(t), -1, -1, -1), t), dim=2)
                for part, t in zip(own, pair)]


def add_dora(model: nn.Module, settings: LoraSettings) -> None:
    add_lora(model, settings, Dora)


@torch.no_grad()
def add_pissa(model: nn.Module, settings: LoraSettings) -> None:
    """Split each matrix into B A, its best approximation of this rank, and a frozen rest."""
    add_lora(model, settings)
    for module in model.modules():
        if isinstance(module, Lora):
            w, As = module.base.weight, module.A.weight.chunk(len(module.B))
            rows = [B.out_features // module.groups for B in module.B]
            parts = w.float().unflatten(0, (module.groups, -1)).split(rows, dim=1)
            for part, A, B in zip(parts, As, module.B):
                U, S, Vh = torch.linalg.svd(part.flatten(0, 1), full_matrices=False)
                root = S[:settings.rank].sqrt()
                B.weight.copy_(U[:, :settings.rank] * root)
                A.copy_(root[:, None] * Vh[:settings.rank])
            w.sub_(module.delta().to(w.dtype))


def add_bottlenecks(model: nn.Module, settings: BottleneckSettings) -> None:
    around(model, settings, lambda base, rows: Bottleneck(base, settings.width))


def add_scales(model: nn.Module, settings: AdapterSettings) -> None:
    around(model, settings, lambda base, rows: ScaledKeysValues(base, rows) if rows else
            ScaledInput(base))


def add_prefix(model: nn.Module, settings: VirtualSettings) -> None:
    model.requires_grad_(False)
    model.positions.first = settings.length
    for block in model.blocks:
        attention = block.attention
        where = attention.qkv.weight.device
        attention.prefix = Prefix(model.config, settings.length, where)
        attention.attend = partial(attention.prefix, attention.attend)


def add_prompt(model: nn.Module, settings: VirtualSettings) -> None:
    model.requires_grad_(False)
    where = model.embed.weight.device
    model.prompt = nn.Embedding(settings.length, model.config.D, device=where)
    nn.init.normal_(model.prompt.weight, std=STD)


def add_dropout(model: nn.Module, settings: DropoutSettings) -> None:
    """Add modules without parameters; all names stay the same."""
    after = [(model.positions, "add", settings.embedding)]
    for block in model.blocks if settings.residual else ():
        after += [(part, "forward", settings.residual) for part in (block.attention, block.mlp)]
    for block in model.blocks if settings.attention else ():
        own = block.attention.probabilities = nn.Dropout(settings.attention)
        block.attention.attend = partial(_within, own, block.attention.attend)
    for module, name, share in after:
        module.dropout = nn.Dropout(share)
        setattr(module, name, partial(_then, module.dropout, getattr(module, name)))
    for layer in model.modules():
        if isinstance(layer, Lora):
            layer.drop = nn.Dropout(settings.adapters)


def _then(drop: nn.Dropout, function: Callable[..., Tensor], *given: Any) -> Tensor:
    return drop(function(*given))


def _within(drop: nn.Dropout, attend: Attend, *given: Any) -> Tensor:
    return attend(*given, dropout=drop.p * drop.training)


# ---- peft's files: a prompt (tokens, width) is one tensor; so is a prefix, with each layer's keys
# followed by its values

def save_places(run: Run, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the prompt or the prefix of a run into a folder, as peft does."""
    [settings], m = run.config.model.changes, run.config.model
    width = _width(settings, m)
    own = [p.detach() for p in adapted.rebuilt(run, tensors).parameters() if p.requires_grad]
    adapted.write(folder, {
        **MODEL_CHANGES[settings.name].theirs, "num_virtual_tokens": settings.length,
        "token_dim": width, "num_layers": m.L, "num_attention_heads": width // m.E,
        "num_transformer_submodules": 1}, {LEARNED: torch.cat(own, dim=1)})


def bring_places(folder: Path, config: Mapping[str, Any], base: Run, out: Path, name: str) -> Run:
    """Return a new run in `out` from `base` and peft's files of a prompt or prefix in `folder`.
    `config`: the contents of adapter_config.json; `name`: "prompt" or "prefix". Raises ConfigError
    if the files do not fit the base model."""
    m, settings = base.config.model, MODEL_CHANGES[name].settings
    width = _width(settings, m)
    adapted.check_keys(folder, config, {
        "token_dim": (None, width), "num_layers": (None, m.L),
        "task_type": ("CAUSAL_LM",)})       # otherwise peft leaves the prompt out
    length = config.get("num_virtual_tokens")
    due = {LEARNED: (length, 2 * m.L * width if not settings.in_stream else width)}
    learned = adapted.tensors(folder, due, "num_virtual_tokens")[LEARNED]

    def fill(model: nn.Module) -> None:
        own = [p for p in model.parameters() if p.requires_grad]
        for p, t in zip(own, learned.chunk(len(own), 1)):
            p.copy_(t)

    return adapted.begun(base, {"name": name, "length": length}, out, fill)


def _width(settings: VirtualSettings, m: ModelConfig) -> int:
    """Return the number of elements of one position: of a prompt, or of one layer's keys."""
    return m.D if settings.in_stream else m.G * m.E
