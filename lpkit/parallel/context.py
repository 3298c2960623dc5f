"""Context parallelism: attention over sequences that are divided over c ranks, the context group.

Each sequence is cut into 2c chunks of T / (2c) tokens. Rank r has chunk r and chunk 2c - 1 - r, in
this order (zig-zag, https://github.com/zhuzilin/ring-flash-attention). An early and a late chunk
together give every rank the same work under a causal mask. A rank's part of q is
(B, H, T / c, E), and its parts of k and v are (B, G, T / c, E).

Ring attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889) has c steps. In each step a rank
attends to the k and v that it has. In all steps but the last it also sends this k and v to the next
rank, at the same time. So in step i each query gets, from one rank's keys, an output o_i and the
logarithm l_i of its sum of exponentials. These partial results are combined step by step:

    L = log sum exp(l_i)        w_i = exp(l_i - L)          out = sum w_i o_i

Forward saves q, k, v, out and L. Backward recomputes o_i and l_i of each step, as FlashAttention
recomputes each tile. Since dw_i / dl_i = w_i (1 - w_i), and dw_j / dl_i = -w_i w_j, the attention
backend's backward receives the gradients

    d o_i = w_i d_out           d l_i = w_i (d_out . o_i - d_out . out)

In backward, k and v travel around the ring again. The gradients dk and dv travel behind them: each
rank adds its contribution, and the last message brings dk and dv to the rank that owns k and v. So
forward sends k and v c - 1 times, and backward sends twice as many bytes.

A pair of chunks (queries, keys) is skipped if no query of the pair sees a key of the pair. With a
sliding window, k and v still travel to every rank, because the tokens just before the late chunk of
rank r belong to rank r + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lpkit.contracts import Attend, Batch, Partial
from lpkit.parallel.ranks import Ranks, wait_for
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import FULL


def part(whole: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """Return the two chunks of `rank` out of `whole`, which has all tokens along `dim`.

    >>> part(torch.arange(8), 0, 2, dim=0).tolist(), part(torch.arange(8), 1, 2, dim=0).tolist()
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    chunks = whole.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def joined(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Return all tokens in their order along `dim`. `parts[r]` is the `part` of rank r."""
    early, late = zip(*(t.chunk(2, dim) for t in parts))
    return torch.cat((*early, *reversed(late)), dim)


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return the part of a batch that `rank` computes. Its tensor `places` (B, T / ranks) has the
    position of each token in the whole sequence, which rotary positions need."""
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    present = batch.present | {"places": places.expand_as(batch.tokens)}
    return Batch.of({name: part(t, rank, ranks) for name, t in present.items()})


class Over:
    """A `contracts.Attend`: attention over all tokens of the sequences of a context group.

    attend: the attention backend that this rank runs on its own device
    among:  all ranks of the run; `among.groups["context"]` is the context group

    A subclass has `over(q, k, v, ids, sinks, rule)`, which exchanges messages and calls `attend`.
    """

    def __init__(self, attend: Attend | Partial, among: Ranks):
        self.attend, self.among, group = attend, among, among.groups["context"]
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._gathered: tuple[Tensor | None, Tensor | None] = None, None

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
                 sinks: Tensor | None = None, *, rule: Rule = FULL) -> Tensor:
        ids = None
        # Each rank has the document ids of its tokens, and needs those of all tokens. All layers
        # get the same tensor `documents`, so the ids are gathered once for all layers.
        if rule.documents:
            if self._gathered[0] is not documents:
                parts = documents.expand(self.ranks, *documents.shape).contiguous()
                self._gathered = documents, joined(self.exchanged(parts).unbind())
            ids = self._gathered[1]
        return self.over(q, k, v, ids, sinks, rule)

    def exchanged(self, to: Tensor) -> Tensor:
        """Send row n of `to` to rank n of the context group. Return a tensor of the same shape,
        whose row n is what rank n sent to this rank."""
        received = torch.empty_like(to)
        with self.among.waits:
            dist.all_to_all_single(received, to, group=self.among.groups["context"])
        return received


class Ring(Over):
    """Ring attention. Its `attend` is a `contracts.Partial`: for the keys that it is given, it
    returns an output and the logarithm of the sum of exponentials."""

    def over(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, sinks: Tensor | None,
             rule: Rule) -> Tensor:
        """Return this rank's outputs (B, H, T / c, E). `ids`: the document of each of the T tokens,
        (B, T), if the rule needs it. `sinks`: a learned score for each head, (H,)."""
        chunks = None if ids is None else ids.chunk(2 * self.ranks, 1)
        return _Ring.apply(q, k, v, sinks, chunks, rule, self)

    def passed(self, t: Tensor) -> Callable[[], Tensor]:
        """Start to send `t` to the next rank. Return a function that waits for the tensor of the
        previous rank, which has the shape of `t`, and returns it."""
        arriving, group = torch.empty_like(t), self.among.groups["context"]
        requests = dist.batch_isend_irecv([
            dist.P2POp(way, tensor, group=group, group_peer=(self.rank + step) % self.ranks)
            for way, tensor, step in ((dist.isend, t, 1), (dist.irecv, arriving, -1))])

        def wait() -> Tensor:
            with self.among.waits:
                for request in requests:
                    wait_for(request, t)
            return arriving

        return wait

    def around(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Yield (number of a rank, (its k, its v)) for each rank of the group: first this rank,
        then the rank before it, and so on. While the caller uses k and v, the next k and v arrive.
        """
        present = torch.stack((k, v))
        for step in range(self.ranks):
            coming = self.passed(present) if step < self.ranks - 1 else None
            yield (self.rank - step) % self.ranks, present.unbind()
            present = coming and coming()

    def pairs(self, source: int, C: int, rule: Rule, ids: Sequence[Tensor] | None
              ) -> Iterator[tuple[slice, slice, tuple[Tensor, ...] | None, Rule]]:
        """Yield the pairs (a chunk of this rank's queries, a chunk of the keys of rank `source`) in
        which some query sees some key. A chunk has C tokens. Each pair is given as: the slice of
        this rank's queries, the slice of the keys of `source`, the document ids of the two chunks
        (None without documents), and the rule with the positions of both chunks."""
        for a, queries in enumerate((self.rank, 2 * self.ranks - 1 - self.rank)):
            for b, keys in enumerate((source, 2 * self.ranks - 1 - source)):
                # sinks=False: `_Ring.forward` adds the sinks once, not once for each pair
                pair_rule = replace(rule, query_start=queries * C, key_start=keys * C, sinks=False)
                if pair_rule.spans(0, C, C):
                    pair_ids = ids and (ids[queries], ids[keys])
                    yield slice(a * C, (a + 1) * C), slice(b * C, (b + 1) * C), pair_ids, pair_rule


class _Ring(torch.autograd.Function):
    """Ring attention with its own backward. Autograd would keep k and v of every rank, so that each
    rank would hold the keys of all T tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
                ids: Sequence[Tensor] | None, rule: Rule, ring: Ring) -> Tensor:
        B, H, T, E = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        # out and L are sums over the ranks so far, at least in float32. The memory order of out is
        # (B, T, H, E), so that the heads can be joined to (B, T, H * E) without a copy.
        out = q.new_zeros(B, T, H, E, dtype=wide).transpose(1, 2)
        L = q.new_full((B, H, T), -torch.inf, dtype=wide)
        # A sink acts as a key without a value, so it only adds to the sum of exponentials.
        if sinks is not None:
            L.copy_(sinks[:, None].expand_as(L))
        for source, (keys, values) in ring.around(k, v):
            for rows, columns, pair_ids, pair_rule in ring.pairs(source, T // 2, rule, ids):
                given = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                # The online softmax of FlashAttention (Dao et al. 2022,
                # https://arxiv.org/abs/2205.14135): rescale the sum so far to the new total, then
                # add o, the output over the keys of this pair.
                o, l = ring.attend(*given, pair_ids, rule=pair_rule)
                before, total = L[:, :, rows], torch.logaddexp(L[:, :, rows], l)
                out[:, :, rows] *= _weights(before, total)
                out[:, :, rows] += _weights(l, total) * o
                L[:, :, rows] = total
        out, device = out.type_as(q), q.device.type
        ctx.save_for_backward(q, k, v, sinks, out, L)
        # Backward runs outside of the autocast context of forward. It recomputes the same numbers
        # only under the same autocast, so forward records it.
        ctx.arguments = ids, rule, ring
        ctx.autocast = partial(torch.autocast, device, torch.get_autocast_dtype(device),
                               torch.is_autocast_enabled(device))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, sinks, out, L), (ids, rule, ring) = ctx.saved_tensors, ctx.arguments
        d_out = d_out.type_as(L)
        # (B, H, T / c): d_out . out is the same in every step, so it is computed once, as
        # FlashAttention-2 computes its D.
        delta = (d_out * out).sum(-1)
        dq, own_d, coming = torch.zeros_like(q, dtype=L.dtype), None, None
        for source, (keys, values) in ring.around(k, v):
            # this rank's share of dk and dv for the keys of `source`
            d = k.new_zeros(2, *k.shape, dtype=L.dtype)
            for rows, columns, pair_ids, pair_rule in ring.pairs(
                    source, q.shape[2] // 2, rule, ids):
                given = [t.detach().requires_grad_() for t in (
                    q[:, :, rows], keys[:, :, columns], values[:, :, columns])]
                with torch.enable_grad(), ctx.autocast():
                    o, l = ring.attend(*given, pair_ids, rule=pair_rule)
                w, dy = _weights(l.detach(), L[:, :, rows]), d_out[:, :, rows]
                d_l = w[..., 0] * ((dy * o.detach()).sum(-1) - delta[:, :, rows])
                parts = torch.autograd.grad((o, l), given, ((w * dy).type_as(o), d_l.type_as(l)))
                for total, some in zip((dq[:, :, rows], *d[:, :, :, columns]), parts):
                    total += some
            # The shares for this rank's own keys are kept until the end. Shares for another rank's
            # keys are added to the sum that arrives from the previous rank, and sent on.
            if source == ring.rank:
                own_d = d
            else:
                coming = ring.passed((d if coming is None else d + coming()).type_as(k))
        dk, dv = own_d if coming is None else own_d + coming()
        d_sinks = None
        if sinks is not None:
            d_sinks = -((sinks[:, None] - L).exp() * delta).sum((0, 2)).type_as(sinks)
        return dq.type_as(q), dk.type_as(k), dv.type_as(v), d_sinks, None, None, None


def _weights(l: Tensor, L: Tensor) -> Tensor:
    """Return exp(l - L), of shape (..., 1). Where l and L are both -inf, no key was seen, and the
    weight is 0, not NaN."""
    return (l - L.clamp(min=torch.finfo(L.dtype).min)).exp()[..., None]
