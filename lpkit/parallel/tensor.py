"""Tensor parallelism: each rank has a part of each matrix, and, between the matrices, a part of
each sequence (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198).

    h  (B, T / t, D)    result of a norm
    gather              (B, T, D) on every rank
    column              rows of qkv, or of gate and up: some heads, or some of the MLP's width
    row                 columns of out, or of down: (B, T, D), a summand of the result
    scatter             the sum over ranks, of which each rank keeps its T / t tokens

A column layer and the row layer after it need only one gather and one scatter, and each is the
backward of the other. A parameter that every rank has (a norm's weights) sees only this rank's
tokens, so its gradients are summed over ranks. A bias after the sum, and learned positions, belong
to the first rank: the other ranks add zeros.

Embedding and head are cut along the vocabulary. For each token, the loss then needs the largest
logit of all ranks, the sum of exponentials, and the target's logit: three numbers, instead of V
logits. All tensors are plain tensors, so that every recipe casts a rank's part like a whole matrix.
The scale of a part is at least as fine as the scale of the whole.
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
SMALL = 32      # divisor: the scales of blocks of at least this many numbers are not cut


def gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """(B, T / t, D) -> (B, T, D): returns the tokens of all ranks of the tensor group."""
    parts = x.new_empty(ranks.layout.tensor, *x.shape)
    with ranks.waits:
        all_gather(parts.view(-1), x.contiguous().view(-1), group=ranks.groups["tensor"])
    return parts.transpose(0, 1).flatten(1, 2)


def scattered(x: Tensor, ranks: Ranks) -> Tensor:
    """(B, T, D) -> (B, T / t, D): returns this rank's tokens, summed over the tensor group."""
    parts = x.unflatten(1, (ranks.layout.tensor, -1)).transpose(0, 1).contiguous()
    mine = x.new_empty(parts.shape[1:])
    with ranks.waits:
        reduce_scatter(mine.view(-1), parts.view(-1), group=ranks.groups["tensor"])
    return mine


class _Moved(torch.autograd.Function):
    """Forward applies `there` to the tokens, and backward applies `back` to their gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks, there: Move, back: Move) -> Tensor:
        ctx.ranks, ctx.back = ranks, back
        return there(x, ranks)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(g, ctx.ranks), None, None, None


def gather(x: Tensor, ranks: Ranks) -> Tensor:
    """Returns `gathered` tokens. Its backward is `scattered`: each rank used all tokens, so their
    gradients are sums over ranks."""
    return _Moved.apply(x, ranks, gathered, scattered)


def scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """Returns `scattered` tokens. Its backward is `gathered`: each summand has the sum's
    gradient."""
    return _Moved.apply(x, ranks, scattered, gathered)


class Part(NamedTuple):
    """This rank's part of a saved tensor, packed by the hooks outside, and the tensor's layout."""

    kept: Any
    shape: torch.Size
    stride: tuple[int, ...]


def kept_in_parts(x: Tensor, linear: nn.Module, ranks: Ranks) -> saved_tensors_hooks:
    """Returns hooks under which backward of `linear` keeps only this rank's part of its input x, or
    of a cast of x. All ranks of the tensor group have the same x, so each rank saves a part, and
    backward gathers the parts again (Korthikanti et al. 2022, section 4.2.2). Only the innermost
    hooks of autograd apply, so these call the hooks outside, for example recomputation's."""
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
    """Looks up this rank's rows, from token `first` on. Other tokens give zeros, so that the sum
    over ranks is the embedding."""

    def __init__(self, weight: nn.Parameter, first: int):
        super().__init__()
        self.weight, self.first = weight, first

    def forward(self, tokens: Tensor) -> Tensor:
        at = tokens - self.first
        mine = (at >= 0) & (at < len(self.weight))
        return F.embedding(at * mine, self.weight) * mine[..., None]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Cross-entropy of logits (N, V / t), of which each rank has the columns from `first` on."""

    first: int
    ranks: Ranks

    def cross_entropy_(self, logits: Tensor, targets: Tensor,
                       weights: Tensor | None = None) -> Tensor:
        """Returns nats (N,) in float32, without the weights. Logits become the gradient of the
        weighted sum, as in `lpkit.kernels.cross_entropy`, also for targets that are IGNORED or
        unknown."""
        group, at = self.ranks.groups["tensor"], targets - self.first
        known = (targets >= 0) & (targets < logits.shape[1] * self.ranks.layout.tensor)
        mine = (at >= 0) & (at < logits.shape[1])
        at = (at * mine)[:, None]
        # exp(logit - top) cannot overflow; all ranks must subtract the same number.
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
        """Returns nats (N,) in float32, with a gradient."""
        return _Nats.apply(logits, targets, self)


class _Nats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        # Forward computes the gradient for a weight of 1, so that backward only multiplies.
        gradient = logits.clone()       # `cross_entropy_` overwrites its argument
        nats = vocabulary.cross_entropy_(gradient, targets)
        ctx.save_for_backward(gradient)
        return nats

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        g = g[:, None].type_as(gradient)
        return (gradient * g).masked_fill_(g == 0, 0), None, None


def send_around(part: nn.Module, leaf: str, column: bool, ranks: Ranks) -> None:
    """Adds messages around the Linear `leaf` of a part of a block: a gather before a column layer,
    a scatter after a row layer."""
    if column:
        part.forward = partial(_gather_for, part, leaf, part.forward, ranks)
    else:
        part.register_forward_hook(lambda part, given, summand: scatter(summand, ranks))


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Transform):
    """Keeps this rank's part of a whole model, and records in `splits` how each parameter was
    cut."""

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
    """Yields each parameter that is cut, with its split. `cut`: the operations of a block whose
    Linears are cut."""
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
            # heads are interleaved by group: equal parts of the rows are whole groups
            parts = len(rows) if sum(rows) == linear.out_features else 1
            yield linear.weight, split(0, parts=parts) if by_rows else split(1)
            if linear.bias is not None:
                yield linear.bias, split(0, parts=parts) if by_rows else split(None)
        for p in block.attention.kind.parameters(recurse=False):
            yield p, split(0)       # one number for each head


def _linear(block: nn.Module, op: Op) -> tuple[nn.Module, nn.Module]:
    """Returns the part of a block that contains an operation's Linear, and this Linear."""
    return block.get_submodule(op.name.partition(".")[0]), block.get_submodule(op.name)


def _add_scattered(add: Callable[[Tensor, Any], Tensor], ranks: Ranks, x: Tensor,
                   start: Any) -> Tensor:
    """Adds positions to this rank's summand of the embeddings, and returns its tokens of the sum.
    """
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
    """Gathers the input of a Linear. Under autocast, x is cast before it travels, not after, so
    that fewer bytes travel. A recipe's Linear casts by itself, from the residual stream's numbers.
    """
    kind = x.device.type
    if not hasattr(linear, "recipe") and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return gather(x, ranks)
