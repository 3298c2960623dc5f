"""Tensor parallelism over t ranks: each rank has a part of each matrix, and, between the matrices,
a part of each sequence (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; Korthikanti et al.
2022, https://arxiv.org/abs/2205.05198).

    h  (B, T / t, D)    result of a norm: this rank's tokens
    gather              (B, T, D): the tokens of all ranks, on every rank
    column layer        a Linear that has some rows of its weight: of qkv (some heads), or of gate
                        and up (a part of the MLP's width)
    row layer           a Linear that has some columns of its weight (out, down). Its result is
                        (B, T, D), and the sum of all ranks' results is the result of the layer
    scatter             (B, T / t, D): sum over ranks, of which each rank keeps its tokens

A column layer and the row layer after it need one gather and one scatter. The backward of a gather
is a scatter, and the backward of a scatter is a gather. Parameters that every rank has (the weights
of norms) saw only this rank's tokens, so their gradients are summed over ranks. The bias of a row
layer, and learned positions, must be added once to a sum over ranks: rank 0 has them, and the other
ranks have zeros.

Embedding and head are cut along the vocabulary. For each token, the loss then exchanges the largest
logit, the sum of exponentials and the target's logit: three numbers, instead of V logits. All
tensors are plain tensors, so every recipe casts a rank's part like a whole matrix. A part has its
own scale, which is at least as fine as the scale of the whole matrix.
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
# A saved cast is stored in parts, but not the scales of its blocks: a tensor with at most 1 / SMALL
# of the numbers of the input is taken for scales.
SMALL = 32


def gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """(B, T / t, D) -> (B, T, D): return the tokens of all ranks of the tensor group."""
    parts = x.new_empty(ranks.layout.tensor, *x.shape)
    with ranks.waits:
        all_gather(parts.view(-1), x.contiguous().view(-1), group=ranks.groups["tensor"])
    return parts.transpose(0, 1).flatten(1, 2)


def scattered(x: Tensor, ranks: Ranks) -> Tensor:
    """(B, T, D) -> (B, T / t, D): sum over the tensor group, and return this rank's tokens."""
    parts = x.unflatten(1, (ranks.layout.tensor, -1)).transpose(0, 1).contiguous()
    mine = x.new_empty(parts.shape[1:])
    with ranks.waits:
        reduce_scatter(mine.view(-1), parts.view(-1), group=ranks.groups["tensor"])
    return mine


class _Moved(torch.autograd.Function):
    """Forward applies `there` to activations, and backward applies `back` to their gradients. Both
    are `gathered` or `scattered`, whose messages autograd does not record."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks, there: Move, back: Move) -> Tensor:
        ctx.ranks, ctx.back = ranks, back
        return there(x, ranks)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(g, ctx.ranks), None, None, None


def gather(x: Tensor, ranks: Ranks) -> Tensor:
    """Return `gathered(x)`, with a gradient. Its backward is `scattered`: each rank used all
    tokens, so the gradient of a token is the sum of all ranks' gradients."""
    return _Moved.apply(x, ranks, gathered, scattered)


def scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """Return `scattered(x)`, with a gradient. Its backward is `gathered`: each summand of a sum has
    the gradient of the sum, here for all tokens."""
    return _Moved.apply(x, ranks, scattered, gathered)


class Part(NamedTuple):
    """What autograd keeps instead of a saved tensor: this rank's part of its numbers."""

    kept: Any                   # the part, as the enclosing saved-tensor hooks have packed it
    shape: torch.Size           # shape and stride of the whole saved tensor
    stride: tuple[int, ...]


def kept_in_parts(x: Tensor, linear: nn.Module, ranks: Ranks) -> saved_tensors_hooks:
    """Return saved-tensor hooks for the forward of a column layer `linear`. Autograd then saves
    only this rank's part of the layer's input x (B, T, D), or of a cast of x. All ranks of the
    tensor group have the same x, so backward can gather it from the parts (Korthikanti et al. 2022,
    section 4.2.2).

    Autograd calls only the innermost hooks. So these hooks call the enclosing hooks themselves, for
    example those of recomputation or offload.
    """
    outside = torch._C._autograd._top_saved_tensors_default_hooks(True) or (lambda t: t,) * 2
    group, size = ranks.groups["tensor"], ranks.layout.tensor
    index, storage, small = dist.get_rank(group), x.untyped_storage()._cdata, x.numel() // SMALL

    def pack(t: Tensor) -> Any:
        # Cut only x itself (the same storage) and its cast; other saved tensors stay whole.
        of_cast = getattr(t, "cast_for", None) is linear and t.numel() > small
        if not of_cast and t.untyped_storage()._cdata != storage:
            return outside[0](t)
        # `numbers` per rank; the last rank's part may be shorter, and its end is not initialised
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
    """An embedding of which this rank has the rows of tokens `first`, `first` + 1, ... It returns
    zeros for all other tokens, so that the sum over ranks is the embedding (B, T, D)."""

    def __init__(self, weight: nn.Parameter, first: int):
        super().__init__()
        self.weight, self.first = weight, first

    def forward(self, tokens: Tensor) -> Tensor:
        at = tokens - self.first
        mine = (at >= 0) & (at < len(self.weight))
        return F.embedding(at * mine, self.weight) * mine[..., None]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Cross-entropy of N tokens over a vocabulary that is cut: this rank has the logits (N, V / t)
    of tokens `first`, `first` + 1, ..."""

    first: int
    ranks: Ranks

    def cross_entropy_(self, logits: Tensor, targets: Tensor,
                       weights: Tensor | None = None) -> Tensor:
        """Return the loss of each token in nats, (N,), in float32, without the weights. Overwrite
        `logits` with the gradient of the weighted sum of the losses.

        targets: (N,) ids of tokens. As in `lpkit.kernels.cross_entropy`, the loss of a target that
                 is IGNORED is 0, and any other id outside the vocabulary makes it NaN
        weights: (N,), the weight of each token; None: 1
        """
        group, at = self.ranks.groups["tensor"], targets - self.first
        known = (targets >= 0) & (targets < logits.shape[1] * self.ranks.layout.tensor)
        mine = (at >= 0) & (at < logits.shape[1])
        at = (at * mine)[:, None]
        # Subtract the largest logit of each token, so that exp cannot overflow. All ranks must
        # subtract the same number, so it is the maximum over ranks.
        top = logits.amax(1).float()
        self.ranks.largest(top, group)
        e = logits.float() - top[:, None]
        # (2, N): the target's logit minus `top` (0 on ranks that do not have it), and the sum of
        # exponentials; one message sums both over ranks
        sums = torch.stack((e.gather(1, at)[:, 0] * mine, e.exp_().sum(1)))
        with self.ranks.waits:
            dist.all_reduce(sums, group=group)
        of_target, total = sums
        # the gradient of a token's loss: its probabilities, minus 1 at the target
        e /= total[:, None]
        e.scatter_add_(1, at, -mine.float()[:, None])
        counts, total = targets != IGNORED, total.masked_fill(~known, torch.nan)
        weight = counts.float() if weights is None else weights * counts
        weight = weight.masked_fill((weight != 0) & ~known, torch.nan)
        logits.copy_(e.mul_(weight[:, None]).masked_fill_((weight == 0)[:, None], 0))
        return (total.log() - of_target).masked_fill(~counts, 0)

    def nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token in nats, (N,), in float32, with a gradient."""
        return _Nats.apply(logits, targets, self)


class _Nats(torch.autograd.Function):
    """`Vocabulary.cross_entropy_` as a function that autograd knows. Autograd does not record the
    messages between ranks, so the gradient is computed here."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, vocabulary: Vocabulary) -> Tensor:
        # Forward computes the gradient for weights of 1; backward multiplies it by g (N,), the
        # gradient of each token's loss.
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
    """Add the messages of a Linear to `part`, the attention or the MLP of a block. `leaf` is the
    name of the Linear in `part`: a gather before a column layer, a scatter after a row layer."""
    if column:
        part.forward = partial(_gather_for, part, leaf, part.forward, ranks)
    else:
        part.register_forward_hook(lambda part, given, summand: scatter(summand, ranks))


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Transform):
    """Cut a whole model to this rank's part, and add the messages between ranks. `splits` receives
    the Split of each parameter that is cut, by its name."""

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
            block.attention.G //= size      # key/value heads of this rank
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
    """Yield (parameter, its Split) for each parameter that is cut.

    split(0) divides the rows, split(1) the columns. split(None) leaves the tensor whole on rank 0
    and zero on the others, because it is added once to a sum over ranks (the bias of a row layer,
    learned positions).

    cut:   the operations of a block whose Linears are cut
    split: Split with this rank's `index` and `ranks` filled in
    """
    yield model.embed.weight, split(0)
    # tied weights are one parameter: cut it once
    if model.head.weight is not model.embed.weight:
        yield model.head.weight, split(0)
    for p in model.positions.parameters():
        yield p, split(None)
    for block in model.blocks:
        for op in cut:
            _, linear = _linear(block, op)
            by_rows = op.cut == "column"
            rows = fused(model.config, f"{op.name}.weight")
            # gate_up is gate's rows, then up's rows: each is cut (parts=2), and `rows` add up to
            # the whole weight. qkv repeats (q, k, v) for each key/value head: `rows` add up to one
            # head's group, not to the weight, so parts=1, and equal parts of all rows are whole
            # groups. (With one key/value head they would add up, but then t > 1 ranks cannot divide
            # the heads.)
            parts = len(rows) if sum(rows) == linear.out_features else 1
            yield linear.weight, split(0, parts=parts) if by_rows else split(1)
            if linear.bias is not None:
                yield linear.bias, split(0, parts=parts) if by_rows else split(None)
        for p in block.attention.kind.parameters(recurse=False):
            yield p, split(0)       # parameters of a kind of attention: one number for each head


def _linear(block: nn.Module, op: Op) -> tuple[nn.Module, nn.Module]:
    """Return (the part of a block that contains an operation's Linear, the Linear)."""
    return block.get_submodule(op.name.partition(".")[0]), block.get_submodule(op.name)


def _add_scattered(add: Callable[[Tensor, Any], Tensor], ranks: Ranks, x: Tensor,
                   start: Any) -> Tensor:
    """Add positions to x (B, T, D), this rank's summand of the embeddings. Return this rank's
    tokens of the sum over ranks, (B, T / t, D)."""
    return scatter(add(x, start), ranks)


def _gather_for(part: nn.Module, leaf: str, forward: Callable[..., Tensor], ranks: Ranks,
                x: Tensor, *others: Any) -> Tensor:
    """Call `forward` of a part of a block with the tokens of all ranks, x (B, T / t, D) ->
    (B, T, D), and let autograd save x in parts."""
    linear = getattr(part, leaf)
    x = _gathered_for(linear, x, ranks)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return forward(x, *others)
    with kept_in_parts(x, linear, ranks):
        return forward(x, *others)


def _gather_result(model: nn.Module, norm: nn.Module, given: Any, h: Tensor, *,
                   ranks: Ranks) -> Tensor:
    """Forward hook of the model's last norm: gather its result for the head."""
    return _gathered_for(model.head, h, ranks)


def _gathered_for(linear: nn.Module, x: Tensor, ranks: Ranks) -> Tensor:
    """Return the tokens of all ranks of x, the input of `linear`. Under autocast, x is cast to 16
    bits before it is sent, so that fewer bytes are sent. A Linear of a recipe casts its input
    itself, and must get the numbers of the residual stream."""
    kind = x.device.type
    if not hasattr(linear, "recipe") and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return gather(x, ranks)
