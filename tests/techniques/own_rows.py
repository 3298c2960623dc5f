"""Rows from outside, as somebody has them in a module beside a notebook: a Config names it under
`imports`."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

import experiments.prune  # noqa: F401  a row of governors
from lpkit.nn.transformer import Attention
from lpkit.techniques import blocks, changes
from lpkit.techniques.operation import Kind
from lpkit.techniques.row import Settings, TechniqueRow


class Bare(nn.Module):
    """Attention and MLP without norm and skip: gain * mlp(attention(x)), queries start at 0, the
    gain at 0.5."""

    def __init__(self, config, attend):
        super().__init__()
        self.attention, self.mlp = Attention(config, attend), blocks.MLPS[config.mlp].load()(config)
        self.gain = nn.Parameter(torch.empty(1))

    def reset(self, init: Settings) -> None:
        self.gain.fill_(0.5)
        nn.init.orthogonal_(self.attention.out.weight)

    def forward(self, x, rotation=None, cache=None, layer=0, documents=None):
        return self.gain * self.mlp(self.attention(x, rotation, cache, layer, documents))


def bare(s):
    yield from (op for op in blocks.pre_norm(s) if op.name not in ("norm1", "add1", "norm2",
        "add2"))
    stream, narrow = s.stream_bytes, s.tokens * s.model.D * s.compute_bytes
    yield blocks.Op(name="gain", part="norms", params=1, saved_bytes=narrow,
                    saved_itemsize=s.compute_bytes,
                    moved_bytes=stream + narrow,
                    backward=(blocks.Hold(nbytes=2 * stream, frees=1.0),))


class LayerDrop:
    """One block, another in each step, is left out of the update; evaluated, saved and sampled are
    all (arXiv:1909.11556)."""

    def __init__(self, settings: Settings):
        pass

    def begin(self, training, step: int) -> None:
        block = training.model.blocks[step % len(training.model.blocks)]
        block.forward = lambda x, *rest, **named: x

    def end(self, training, step: int) -> None:
        del training.model.blocks[step % len(training.model.blocks)].forward

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state) -> None:
        pass


# ---- changes that are in the description

@dataclass(frozen=True, kw_only=True)
class Drop(Settings):
    share: float = 0.5      # of the tokens, what a middle block sees


def dropped_operations(ops, s, settings):
    """The first and the last block see all tokens."""
    shares = (1.0, 1.0, *[settings.share] * (s.model.L - 2))
    whole = s.stream_bytes
    around = blocks.Op(name="drop", part="", moved_bytes=4 * whole * (1 - 2 / s.model.L),
                       in_stream=True,
                       backward=(blocks.Hold(nbytes=2 * whole),))
    return replace(ops, block=(around, *(op.seeing(*shares) for op in ops.block)))


class Dropping(nn.Module):
    """A block that sees some of the tokens, other ones in each step; the others pass it by."""

    def __init__(self, block, share):
        super().__init__()
        self.block, self.share, self.kept = block, share, None

    def forward(self, x, rotation=None, cache=None, layer=0, documents=None):
        if not self.training:
            return self.block(x, rotation, cache, layer, documents)
        T = x.shape[1]
        if torch._C._current_graph_task_id() < 0:       # else it is run again, inside backward
            self.kept = torch.randperm(T, device=x.device)[:round(self.share * T)].sort().values
        some = None if documents is None else documents[:, self.kept]
        turned = None if rotation is None else tuple(t[self.kept] for t in rotation)
        return x.index_copy(1, self.kept, self.block(x[:, self.kept], turned, None, layer, some))


def drop_tokens(model, settings):
    """Random-LTD (Yao et al. 2022, https://arxiv.org/abs/2211.11586): at all middle layers a random
    part of the tokens is left out."""
    for i in range(1, len(model.blocks) - 1):
        model.blocks[i] = Dropping(model.blocks[i], settings.share)


@dataclass(frozen=True, kw_only=True)
class Sparse(Settings):
    density: float = 0.5


def sparse_operations(ops, s, settings):
    """Zeros are stored and multiplied as other numbers are; a mask takes a byte for each, and its
    product with the weight is kept."""
    block = []
    for op in ops.block:
        if op.matmul:
            kept = op.weights * (1 + (0 if s.mixed else s.compute_bytes))
            block.append(blocks.Op(name=f"{op.name}.mask", part="", saved_bytes=kept,
                                   backward=(blocks.Hold(nbytes=4 * op.weights, frees=1.0),)))
        block.append(replace(op, density=settings.density))
    return replace(ops, block=tuple(block))


class Masked(nn.Module):
    """A Linear of which some weights, drawn at first, are zero for ever: also in its gradient."""

    def __init__(self, base, density):
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.register_buffer("mask", torch.rand(base.weight.shape) < density)

    def forward(self, x):
        return functional_call(self.base, {"weight": self.base.weight * self.mask}, (x,))


def mask_weights(model, settings):
    for name, base in list(model.blocks.named_modules()):
        if hasattr(base, "in_features"):
            model.blocks.set_submodule(name, Masked(base, settings.density))


blocks.MODEL_CHANGES["drop-tokens"] = Kind(operations=dropped_operations,
    implementation=f"{__name__}:drop_tokens", settings=Drop())
blocks.MODEL_CHANGES["sparse"] = Kind(operations=sparse_operations,
    implementation=f"{__name__}:mask_weights", settings=Sparse())
blocks.BLOCKS["bare"] = Kind(operations=bare, implementation=f"{__name__}:Bare")
changes.GOVERNORS["drop-a-layer"] = TechniqueRow(implementation=f"{__name__}:LayerDrop")
