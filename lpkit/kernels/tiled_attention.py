"""FlashAttention in PyTorch, written to be read: attention over tiles of queries and keys that
never stores the (T, T) scores.

Forward: a tile of queries is multiplied with one tile of keys after the other. For each query,
forward keeps three things: m, the largest score so far; l, the sum of exp(score - m); and acc, the
sum of exp(score - m) times the value. If the next tile has a larger score, l and acc are multiplied
by exp(m - m_new). This is the online softmax. At the end, acc / l is the output. Forward saves only
lse = m + log(l), one number per query, instead of the scores.

Backward: lse gives the probabilities of a tile again, p = exp(score - lse). The recomputation costs
one more matmul and saves T^2 numbers per head. With o the output, and do its gradient:

    dv = p^T do     dp = do v^T     ds = p (dp - sum(do o))     dq = ds k     dk = ds^T q

where q is divided by sqrt(E) at the start, and dq is divided by sqrt(E) at the end.

Sources: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867 (the softmax); Dao et al.
2022, https://arxiv.org/abs/2205.14135, and Dao 2023, https://arxiv.org/abs/2307.08691 (the rest).

Shapes: q (B, H, T, E), k and v (B, G, T, E). In a tile, the queries of a group's H / G heads are
stacked, (B, G, H / G * queries, E), since they share their keys. Tiles are converted to float32 (or
float64 for float64 inputs) and computed in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import FULL, TILE, limited


def tiles(rule: Rule, T: int, tile: int = TILE,
          keys: int | None = None) -> Iterator[tuple[slice, list[slice]]]:
    """Yield each tile of `tile` of the T queries, and the tiles of keys that contain a key that it
    sees. `keys`: the number of keys; None: T."""
    for first in range(0, T, tile):
        last = min(first + tile, T)
        yield slice(first, last), [slice(start, min(start + tile, end))
                                   for begin, end in rule.spans(first, last, keys or T)
                                   for start in range(begin, end, tile)]


class Tiles:
    """Loads, stores and scores tiles, for forward and backward. `documents` (B, ...) has ids for
    the queries at its start and for the keys at its end; both are the same ids if there are as many
    queries as keys."""

    def __init__(self, q: Tensor, k: Tensor, documents: Tensor | None, rule: Rule):
        self.G, self.scale = k.shape[1], 1 / math.sqrt(q.shape[-1])
        self.documents, self.rule = documents, rule
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.T, self.places = k.shape[2], torch.arange(max(q.shape[2], k.shape[2]), device=q.device)

    def rows(self, t: Tensor, queries: slice) -> Tensor:
        """Return the tile `queries` of t (B, H, T, X), as (B, G, H / G * queries, X) in the dtype
        of the computation."""
        return t[:, :, queries].to(self.wide).unflatten(1, (self.G, -1)).flatten(2, 3)

    def heads(self, tile: Tensor, queries: slice) -> Tensor:
        """Return a tile (B, G, H / G * queries, X) as (B, H, queries, X)."""
        return tile.unflatten(2, (-1, queries.stop - queries.start)).flatten(1, 2)

    def keys(self, t: Tensor, keys: slice) -> Tensor:
        return t[:, :, keys].to(self.wide)

    def scores(self, q_tile: Tensor, k_tile: Tensor, queries: slice, keys: slice) -> Tensor:
        """Return scores (B, G, H / G * queries, keys), capped, and -inf where a key is hidden."""
        scores = q_tile @ k_tile.mT
        cap, rule = self.rule.soft_cap, self.rule
        if cap is not None:
            scores = scores.div_(cap).tanh_().mul_(cap)
        ends = queries.start, queries.stop, keys.start, keys.stop
        if not (rule.documents or rule.hides(*ends)):
            return scores
        i, j = self.places[queries], self.places[keys]
        hidden = ~rule.sees(i[:, None], j[None])
        if rule.documents:
            ours, theirs = self.documents[:, queries], self.documents[:, -self.T:][:, keys]
            hidden = (hidden | (ours[:, :, None] != theirs[:, None]))[:, None, None]
        heads = scores.unflatten(2, (-1, len(i)))
        return heads.masked_fill_(hidden, -torch.inf).flatten(2, 3)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None,
           rule: Rule, tile: int = TILE) -> tuple[Tensor, Tensor]:
    """Return the output, like q, and the log-sum of each query, (B, H, T) in float32 (or float64).
    A query that sees no key has an output of zeros and a log-sum of +inf."""
    B, H, T, E = q.shape
    at = Tiles(q, k, documents, rule)
    # stored as (B, T, H, E), the order in which the output projection reads it
    out = q.new_empty(B, T, H, E).transpose(1, 2)
    lse = q.new_empty(B, H, T, dtype=at.wide)
    for queries, seen in tiles(rule, T, tile, k.shape[2]):
        q_tile = at.rows(q, queries) * at.scale
        acc = torch.zeros_like(q_tile)
        l = acc.new_zeros(*acc.shape[:3], 1)
        m = torch.full_like(l, torch.finfo(at.wide).min)
        # A sink counts as the first score of each query. It has no value, so acc stays 0.
        if sinks is not None:
            m = at.rows(sinks[:, None, None].expand(B, -1, T, 1), queries)
            l = torch.ones_like(m)
        for keys in seen:
            scores = at.scores(q_tile, at.keys(k, keys), queries, keys)
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
            p = scores.sub_(m_new).exp_()
            shrink = (m - m_new).exp_()
            l = l * shrink + p.sum(-1, keepdim=True)
            acc = acc * shrink + p @ at.keys(v, keys)
            m = m_new
        nothing = l == 0
        out[:, :, queries] = at.heads(acc / l.masked_fill(nothing, 1), queries)
        # +inf, so that backward computes p = exp(score - inf) = 0 for a query that sees no key
        log_sum = (m + l.log()).masked_fill(nothing, torch.inf)
        lse[:, :, queries] = at.heads(log_sum, queries)[..., 0]
    return out, lse


def gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
              documents: Tensor | None, sinks: Tensor | None, rule: Rule,
              d_lse: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and sinks. dk and dv are summed over tiles of queries, in
    float32. If lse also has a gradient, d_lse, it adds p d_lse to ds."""
    at = Tiles(q, k, documents, rule)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(t, dtype=at.wide) for t in (k, v))
    d_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=at.wide)
    for queries, seen in tiles(rule, q.shape[2], keys=k.shape[2]):
        q_tile, dy, y = (at.rows(t, queries) for t in (q, d_out, out))
        q_tile = q_tile * at.scale
        of_sum = at.rows(lse[..., None], queries)
        weight = (dy * y).sum(-1, keepdim=True)         # sum(do o) = sum(p dp)
        if d_lse is not None:
            weight = weight - at.rows(d_lse[..., None], queries)
        dq_tile = torch.zeros_like(q_tile)
        for keys in seen:
            k_tile = at.keys(k, keys)
            scores = at.scores(q_tile, k_tile, queries, keys)
            p = (scores - of_sum).exp_()
            dv[:, :, keys] += p.mT @ dy
            ds = (dy @ at.keys(v, keys).mT).sub_(weight).mul_(p)
            # tanh' = 1 - tanh^2; hidden scores are -inf, and their p is 0
            if rule.soft_cap is not None:
                ds.mul_(scores.div_(rule.soft_cap).clamp_(min=-1).square_().neg_().add_(1))
            dq_tile += ds @ k_tile
            dk[:, :, keys] += ds.mT @ q_tile
        dq[:, :, queries] = at.heads(dq_tile * at.scale, queries)
        if sinks is not None:
            p = (sinks[:, None].to(at.wide) - lse[:, :, queries]).exp()
            d_sinks -= (p * at.heads(weight, queries)[..., 0]).sum((0, 2))
    d_sinks = d_sinks if sinks is None else d_sinks.to(sinks.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), d_sinks


class TiledAttention(torch.autograd.Function):
    """`TiledAttention.apply(q, k, v, documents, sinks, rule)` returns the output and lse. It keeps
    q, k, v, the output, and one number for each query and head."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
                sinks: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
        # lse usually has no gradient. This setting makes its d_lse None instead of zeros.
        ctx.set_materialize_grads(False)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = attend(q, k, v, documents, sinks, rule)
        ctx.save_for_backward(q, k, v, out, lse, documents, sinks)
        ctx.rule = rule
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_out.device.type, enabled=False):
            dq, dk, dv, d_sinks = gradients(d_out, *ctx.saved_tensors, ctx.rule, d_lse)
        return dq, dk, dv, None, d_sinks, None


@limited("tiled")
def tiled(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
          sinks: Tensor | None = None, *, rule: Rule = FULL) -> Tensor:
    """Return the attention output, like q: the backend `tiled`, FlashAttention written to be read.
    """
    return TiledAttention.apply(q, k, v, documents, sinks, rule)[0]


def tiled_partial(q: Tensor, k: Tensor, v: Tensor, documents: tuple[Tensor, Tensor] | None = None,
                  *, rule: Rule = FULL) -> tuple[Tensor, Tensor]:
    """Return the output, like q, and the log-sums (B, H, T), for attention to a part of the keys: a
    `contracts.Partial`. `documents`: ids of the queries, and ids of the keys."""
    ids = None if documents is None else torch.cat(documents, dim=1)
    out, lse = TiledAttention.apply(q, k, v, ids, None, rule)
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)
