"""Tensor parallelism: each rank has a part of each matrix, and between the matrices a part of each
sequence (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198).

    h  (B, T / t, D)    a norm's result
    gather              (B, T, D) on every rank
    column              rows of qkv, or of gate and up: some heads, some of the MLP's width
    row                 columns of out, or of down: (B, T, D), a summand of the result
    scatter             the sum over ranks, of which each keeps its T / t tokens

Two products in a row need one gather and one scatter, and each is the other's backward. What is
there once for all tokens (norms) has met a part of them on each rank, so that its gradients are
summed. A bias after the sum, and learned positions, are the first rank's: the others add zeros.

Embedding and head are cut by the vocabulary. The loss then needs of each token the largest logit of
all ranks, the sum of exponentials, and the target's logit: three numbers, where the logits would be
V. Tensors are plain ones, so that every recipe casts a rank's part as it casts a matrix: a scale is
that of the part, at least as fine as that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lpkit.contracts import IGNORED, Stage, Transform
from lpkit.parallel.cut import Split
from lpkit.parallel.ranks import Ranks, all_gather, reduce_scatter
from lpkit.techniques.blocks import operations
from lpkit.techniques.operation import MicroBatch, Op, fused

Move = Callable[[Tensor, Ranks], Tensor]
SMALL = 32      # scales of blocks of so many numbers, or of more, stay whole


def gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """(B, T / t, D) -> (B, T, D): the tokens of all ranks of the tensor group."""
    parts = x.new_empty(ranks.layout.tensor, *x.shape)
    with ranks.waits:
        all_gather(parts.view(-1), x.contiguous().view(-1), group=ranks.groups["tensor"])
    return parts.transpose(0, 1).flatten(1, 2)


def scattered(x: Tensor, ranks: Ranks) -> Tensor:
    """(B, T, D) -> (B, T / t, D): this rank's tokens, summed over the tensor group."""
    parts = x.unflatten(1, (ranks.layout.tensor, -1)).transpose(0, 1).contiguous()
    mine = x.new_empty(parts.shape[1:])
    with ranks.waits:
        reduce_scatter(mine.view(-1), parts.view(-1), group=ranks.groups["tensor"])
    return mine


class _Moved(torch.autograd.Function):
    """Tokens go `there`, and their gradients `back`."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks, there: Move, back: Move) -> Tensor:
        ctx.ranks, ctx.back = ranks, back
        return there(x, ranks)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(g, ctx.ranks), None, None, None


def gather(x: Tensor, ranks: Ranks) -> Tensor:
    """`gathered`, whose backward is `scattered`."""
    return _Moved.apply(x, ranks, gathered, scattered)


def scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """`scattered`, whose backward is `gathered`."""
    return _Moved.apply(x, ranks, scattered, gathered)


class Part(NamedTuple):
    """What a rank keeps of a tensor, as hooks outside keep it; and what the tensor was."""

    kept: Any
    shape: torch.Size
    stride: tuple[int, ...]


def kept_in_parts(x: Tensor, linear: nn.Module, ranks: Ranks) -> saved_tensors_hooks:
    """Within, backward of `linear` needs its input x or a cast of that. All ranks of the tensor
    group have the same, so each keeps a part, and backward gathers it once more (Korthikanti et al.
    2022, section 4.2.2). Recomputation has hooks of its own, of which only the last would count."""
    outside = torch._C._autograd._top_saved_tensors_default_hooks(True) or (lambda t: t,) * 2
    group, size = ranks.groups["tensor"], ranks.layout.tensor
    index, storage, small = dist.get_rank(group), x.untyped_storage()._cdata, x.numel() // SMALL

    def pack(t: Tensor) -> Any:
        of_cast = getattr(t, "cast_for", None) is linear and t.numel() > small
        if not of_cast and t.untyped_storage()._cdata != storage:
            return outside[0](t)
        flat, numbers = t.detach().as_strided((t.numel(),), (1,)), -(-t.numel() // size)
        part = flat.new_empty(numbers)
        mine = flat[index * numbers:][:numbers]
        part[:len(mine)] = mine
        return Part(outside[0](part), t.shape, t.stride())

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, Part):
            return outside[1](kept)
        part = outside[1](kept.kept)
        flat = part.new_empty(size * len(part))
        with ranks.waits:
            all_gather(flat.view(torch.uint8), part.view(torch.uint8), group=group)
        return flat.as_strided(kept.shape, kept.stride)

    return saved_tensors_hooks(pack, unpack)


class CutEmbedding(nn.Module):
    """Looks up this rank's rows, from token `first`, and gives zeros for others: a summand."""

    def __init__(self, weight: nn.Parameter, first: int):
        super().__init__()
        self.weight, self.first = weight, first

    def forward(self, tokens: Tensor) -> Tensor:
        at = tokens - self.first
        mine = (at >= 0) & (at < len(self.weight))
        return F.embedding(at * mine, self.weight) * mine[..., None]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Cross-entropy of logits (N, V / t) of which each rank has those from token `first`."""

    first: int
    ranks: Ranks

    def cross_entropy_(self, logits: Tensor, targets: Tensor,
                       weights: Tensor | None = None) -> Tensor:
        """Returns nats (N,) float32 without the weights; logits become the gradient of the weighted
        sum, as in `lpkit.kernels.cross_entropy`, also for targets that are IGNORED or unknown."""
        group, at = self.ranks.groups["tensor"], targets - self.first
        known = (targets >= 0) & (targets < logits.shape[1] * self.ranks.layout.tensor)
        mine = (at >= 0) & (at < logits.shape[1])
        at = (at * mine)[:, None]
        top = logits.amax(1).float()
        self.ranks.largest(top, group)
        e = logits.float() - top[:, None]
        sums = torch.stack((e.gather(1, at)[:, 0] * mine, e.exp_().sum(1)))
        with self.ranks.waits:
            dist.all_reduce(sums, group=group)
        of_target, total = sums
        e /= total[:, None]
        e.scatter_add_(1, at, -mine.float()[:, None])
        counts, total = targets != IGNORED, total.masked_fill(~known, torch.nan)
        weight = counts.float() if weights is None else weights * counts
        weight = weight.masked_fill((weight != 0) & ~known, torch.nan)
        logits.copy_(e.mul_(weight[:, None]).masked_fill_((weight == 0)[:, None], 0))
        return (total.log() - of_target).masked_fill(~counts, 0)

    def nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Nats (N,) float32, which have a gradient."""
        return _Nats.apply(logits, targets, self)


class _Nats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        gradient = logits.clone()
        nats = vocabulary.cross_entropy_(gradient, targets)
        ctx.save_for_backward(gradient)
        return nats

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        g = g[:, None].type_as(gradient)
        return (gradient * g).masked_fill_(g == 0, 0), None, None


def send_around(part: nn.Module, leaf: str, column: bool, ranks: Ranks) -> None:
    """Put messages around the Linear `leaf` of a part of a block: a gather before a column, a
    scatter after a row."""
    if column:
        part.forward = partial(_gather_for, part, leaf, part.forward, ranks)
    else:
        part.register_forward_hook(lambda part, given, summand: scatter(summand, ranks))


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Transform):
    """Keeps this rank's part of a whole model, and says in `splits`, which fills up, how each
    parameter was cut."""

    ranks: Ranks
    splits: dict[str, Split]
    stage = Stage.TENSOR

    def __call__(self, model: nn.Module) -> nn.Module:
        size = self.ranks.layout.tensor
        index = dist.get_rank(self.ranks.groups["tensor"])
        split = partial(Split, index=index, ranks=size)
        names = {p: name for name, p in model.named_parameters()}
        first = index * model.config.V // size
        cut = [op for op in operations(MicroBatch(model=model.config)).block if op.cut]
        for p, how in _cuts(model, cut, split):
            self.splits[names[p]] = how
            p.data = how.part(p.data)
        for block in model.blocks:
            block.attention.G //= size
            for op in cut:
                part, linear = _linear(block, op)
                linear.out_features, linear.in_features = linear.weight.shape
                send_around(part, op.name.rpartition(".")[2], op.cut == "column", self.ranks)
        model.positions.add = partial(_add_scattered, model.positions.add, self.ranks)
        model.norm.register_forward_hook(partial(_gather_result, model, ranks=self.ranks))
        model.embed = CutEmbedding(model.embed.weight, first)
        model.head.out_features = len(model.head.weight)
        model.vocabulary = Vocabulary(first=first, ranks=self.ranks)
        return model


def _cuts(model: nn.Module, cut: Sequence[Op], split: Callable[..., Split]
          ) -> Iterator[tuple[nn.Parameter, Split]]:
    """Yields each parameter that is cut, and how. `cut`: the operations of a block whose Linears
    are."""
    yield model.embed.weight, split(0)
    if model.head.weight is not model.embed.weight:
        yield model.head.weight, split(0)
    for p in model.positions.parameters():
        yield p, split(None)
    for block in model.blocks:
        for op in cut:
            _, linear = _linear(block, op)
            by_rows = op.cut == "column"
            rows = fused(model.config, f"{op.name}.weight")
            # heads take turns by group, and an even split is one of groups
            parts = len(rows) if sum(rows) == linear.out_features else 1
            yield linear.weight, split(0, parts=parts) if by_rows else split(1)
            if linear.bias is not None:
                yield linear.bias, split(0, parts=parts) if by_rows else split(None)
        for p in block.attention.kind.parameters(recurse=False):
            yield p, split(0)       # a number a head


def _linear(block: nn.Module, op: Op) -> tuple[nn.Module, nn.Module]:
    """Returns the part of a block that has an operation's Linear, and that."""
    return block.get_submodule(op.name.partition(".")[0]), block.get_submodule(op.name)


def _add_scattered(add: Callable[[Tensor, Any], Tensor], ranks: Ranks, x: Tensor,
                   start: Any) -> Tensor:
    """Adds positions to this rank's summand of the embeddings, and keeps its tokens of the sum."""
    return scatter(add(x, start), ranks)


def _gather_for(part: nn.Module, leaf: str, forward: Callable[..., Tensor], ranks: Ranks,
                x: Tensor, *others: Any) -> Tensor:
    linear = getattr(part, leaf)
    x = _gathered_for(linear, x, ranks)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return forward(x, *others)
    with kept_in_parts(x, linear, ranks):
        return forward(x, *others)


def _gather_result(model: nn.Module, norm: nn.Module, given: Any, h: Tensor, *,
                   ranks: Ranks) -> Tensor:
    return _gathered_for(model.head, h, ranks)


def _gathered_for(linear: nn.Module, x: Tensor, ranks: Ranks) -> Tensor:
    """Autocast would cast what a plain Linear is given after it has travelled; a recipe casts the
    residual stream's own numbers."""
    kind = x.device.type
    if not hasattr(linear, "recipe") and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return gather(x, ranks)
