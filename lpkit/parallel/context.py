"""Attention over sequences that are divided over the ranks of a group: context parallelism.

A sequence has 2c chunks. Rank r of c has the tokens of chunks r and 2c - 1 - r, in this order
(zig-zag, https://github.com/zhuzilin/ring-flash-attention): its part of q is (B, H, T / c, E), its
parts of k and v are (B, G, T / c, E).

Ring (Liu et al. 2023, https://arxiv.org/abs/2310.01889). In each of c - 1 steps a rank sends k and
v to the next rank, and at the same time attends to the k and v that it already has. From part i of
the keys, a query gets an output o_i and the logarithm l_i of its sum of exponentials. The results
of all parts are combined one by one:

    L = log sum exp(l_i)        w_i = exp(l_i - L)          out = sum w_i o_i

Backward has q, k, v, out and L, and recomputes each part, as FlashAttention recomputes each tile.
Since dw_i / dl_i = w_i (1 - w_i), and dw_j / dl_i = -w_i w_j, the attention backend's backward
receives the gradients

    d o_i = w_i d_out           d l_i = w_i (d_out . o_i - d_out . out)

In backward, k and v go round the ring again. dk and dv follow them: each rank adds its
contribution, and a last message returns them to their owner. Forward sends k and v c - 1 times,
and backward sends twice as many bytes. A pair of chunks is skipped if none of its queries sees any
of its keys. Even with a sliding window, messages go all the way round: the tokens just before the
late chunk of rank r belong to rank r + 1.
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
    """Returns the tokens of `rank` in zig-zag order, from all tokens along `dim`."""
    chunks = whole.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def joined(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """The inverse of `part`: returns all tokens in order, from the part of each rank."""
    early, late = zip(*(t.chunk(2, dim) for t in parts))
    return torch.cat((*early, *reversed(late)), dim)


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """Returns the part of a batch that `rank` has, with the positions of its tokens."""
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    present = batch.present | {"places": places.expand_as(batch.tokens)}
    return Batch.of({name: part(t, rank, ranks) for name, t in present.items()})


class Over:
    """A `contracts.Attend` over all tokens of a context group. `attend` is one rank's attention."""

    def __init__(self, attend: Attend | Partial, among: Ranks):
        self.attend, self.among, group = attend, among, among.groups["context"]
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._gathered: tuple[Tensor | None, Tensor | None] = None, None

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
                 sinks: Tensor | None = None, *, rule: Rule = FULL) -> Tensor:
        ids = None
        if rule.documents:      # document ids of all tokens; gathered once for all layers
            if self._gathered[0] is not documents:
                parts = documents.expand(self.ranks, *documents.shape).contiguous()
                self._gathered = documents, joined(self.exchanged(parts).unbind())
            ids = self._gathered[1]
        return self.over(q, k, v, ids, sinks, rule)

    def exchanged(self, to: Tensor) -> Tensor:
        """Sends row n of `to` to rank n, and returns the rows that each rank sent, by rank."""
        received = torch.empty_like(to)
        with self.among.waits:
            dist.all_to_all_single(received, to, group=self.among.groups["context"])
        return received


class Ring(Over):
    """Ring attention. Each rank computes its parts with a `contracts.Partial`."""

    def over(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, sinks: Tensor | None,
             rule: Rule) -> Tensor:
        chunks = None if ids is None else ids.chunk(2 * self.ranks, 1)
        return _Ring.apply(q, k, v, sinks, chunks, rule, self)

    def passed(self, t: Tensor) -> Callable[[], Tensor]:
        """Sends `t` to the next rank. Call the result to wait for the previous rank's tensor."""
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
        """Yields each rank's number with its k and v. The next k and v travel meanwhile."""
        at_hand = torch.stack((k, v))
        for step in range(self.ranks):
            coming = self.passed(at_hand) if step < self.ranks - 1 else None
            yield (self.rank - step) % self.ranks, at_hand.unbind()
            at_hand = coming and coming()

    def pairs(self, source: int, C: int, rule: Rule, ids: Sequence[Tensor] | None
              ) -> Iterator[tuple[slice, slice, tuple[Tensor, ...] | None, Rule]]:
        """Yields the pairs of a chunk of this rank's queries and a chunk of the keys of `source`,
        of C tokens each, in which a query sees a key: the slices of queries and keys, the ids of
        their documents, and their rule."""
        for a, queries in enumerate((self.rank, 2 * self.ranks - 1 - self.rank)):
            for b, keys in enumerate((source, 2 * self.ranks - 1 - source)):
                pair_rule = replace(rule, query_start=queries * C, key_start=keys * C, sinks=False)
                if pair_rule.spans(0, C, C):
                    own = ids and (ids[queries], ids[keys])
                    yield slice(a * C, (a + 1) * C), slice(b * C, (b + 1) * C), own, pair_rule


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
                ids: Sequence[Tensor] | None, rule: Rule, ring: Ring) -> Tensor:
        B, H, T, E = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        # in memory (B, T, H, E), so that joining the heads later needs no copy
        out = q.new_zeros(B, T, H, E, dtype=wide).transpose(1, 2)
        L = q.new_full((B, H, T), -torch.inf, dtype=wide)
        # a sink acts as a key without a value: it only adds to the sum of exponentials
        if sinks is not None:
            L.copy_(sinks[:, None].expand_as(L))
        for source, (keys, values) in ring.around(k, v):
            for rows, columns, own, pair_rule in ring.pairs(source, T // 2, rule, ids):
                given = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                # Rescale the sum so far to the new total, then add this part: the online softmax of
                # FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135), a part a step.
                o, l = ring.attend(*given, own, rule=pair_rule)
                before, total = L[:, :, rows], torch.logaddexp(L[:, :, rows], l)
                out[:, :, rows] *= _weights(before, total)
                out[:, :, rows] += _weights(l, total) * o
                L[:, :, rows] = total
        out, device = out.type_as(q), q.device.type
        ctx.save_for_backward(q, k, v, sinks, out, L)
        # Backward runs outside of the caller's autocast, but must recompute forward's numbers.
        ctx.told = ids, rule, ring
        ctx.autocast = partial(torch.autocast, device, torch.get_autocast_dtype(device),
                               torch.is_autocast_enabled(device))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, sinks, out, L), (ids, rule, ring) = ctx.saved_tensors, ctx.told
        d_out = d_out.type_as(L)
        # d_out . out is the same for all parts, so it is computed once (FlashAttention-2's D).
        delta = (d_out * out).sum(-1)
        dq, own_d, coming = torch.zeros_like(q, dtype=L.dtype), None, None
        for source, (keys, values) in ring.around(k, v):
            d = k.new_zeros(2, *k.shape, dtype=L.dtype)
            for rows, columns, own, pair_rule in ring.pairs(source, q.shape[2] // 2, rule, ids):
                given = [t.detach().requires_grad_() for t in (
                    q[:, :, rows], keys[:, :, columns], values[:, :, columns])]
                with torch.enable_grad(), ctx.autocast():
                    o, l = ring.attend(*given, own, rule=pair_rule)
                w, dy = _weights(l.detach(), L[:, :, rows]), d_out[:, :, rows]
                d_l = w[..., 0] * ((dy * o.detach()).sum(-1) - delta[:, :, rows])
                parts = torch.autograd.grad((o, l), given, ((w * dy).type_as(o), d_l.type_as(l)))
                for total, some in zip((dq[:, :, rows], *d[:, :, :, columns]), parts):
                    total += some
            # this rank's dk and dv wait here; other dk and dv travel on to the rank of their keys
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
    """Returns exp(l - L), (..., 1): 0 where both are -inf, because no key was seen."""
    return (l - L.clamp(min=torch.finfo(L.dtype).min)).exp()[..., None]
