"""Attention for CPUs by blocks of queries, which skips hidden keys instead of masking them.

PyTorch's flash kernel for CPUs also computes blocks that are masked completely. Here a block of
queries is multiplied only with the keys that its queries may see, by batched matmuls. The matmuls
run in the dtype of the inputs, to use bf16 instructions, or with `wide` in float32, which is faster
on CPUs without such instructions. CPUs that would multiply bf16 in a loop
(`wide_product.in_a_loop`) always use float32. All scores of a block of queries are in memory at
once, so their softmax takes one pass (`rows.attention_`). As in a flash kernel (Dao et al. 2022,
https://arxiv.org/abs/2205.14135), forward saves one log-sum per query, and backward recomputes the
scores. So saved memory is linear in T.

Shapes: q and the output (B, H, T, E), k and v (B, G, T, E). The queries of the H / G heads that
share a key are rows of one product. FLOPs are counted as PyTorch counts its own attention, and as
`lpkit.predict.flops` does: the full square of scores, and five products in backward.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lpkit.kernels import wide_product
from lpkit.kernels.operator import EVERY_DEVICE, operator, over_pairs
from lpkit.kernels.rows import attention_, attention_backward_
from lpkit.techniques.attention import Rule, in_words
from lpkit.techniques.attention_backends import FULL, at_once, limited, masked, query_blocks


class _Pieces:
    """How the work is divided: slices of sequences and heads, whose scores fit into a core's cache,
    and for each slice the blocks of queries.

    repeats: query heads that share a key/value head, H / G
    near:    for each block of queries: its first position, the position after its last, and spans
             (begin, end) of the keys that it may see
    slices:  (sequences, key/value heads, query heads), each a slice
    work:    dtype of the matmuls
    masks:   masks by the first query of a block, so that each is computed once
    """

    def __init__(self, q: Tensor, k: Tensor, documents: Tensor | None, rule: Rule, wide: bool):
        (B, H, self.T, self.E), G = q.shape, k.shape[1]
        self.repeats, self.rule, self.documents, self.device = H // G, rule, documents, q.device
        self.sequence, self.near = -1, query_blocks(rule, self.T)
        b, g = at_once(rule, self.T, B, G, self.repeats)
        # slices of sequences, of groups, and of the groups' query heads
        self.slices = [(slice(i, min(i + b, B)), slice(j, min(j + g, G)),
                        slice(j * self.repeats, min(j + g, G) * self.repeats))
                       for i in range(0, B, b) for j in range(0, G, g)]
        self.work = q.dtype
        if wide or (q.device.type == "cpu" and (q.dtype == torch.float16 or (
                q.dtype == torch.bfloat16 and wide_product.in_a_loop()))):
            self.work = torch.promote_types(q.dtype, torch.float32)
        self.scale, self.cap = 1 / math.sqrt(self.E), rule.soft_cap or 0.0
        self.masks: dict[int, Tensor | None] = {}

    def own(self, t: Tensor, groups: int) -> Tensor:
        """Return a copy of t (b, heads, rows, E) in the dtype `work`, as (b * groups, rows of all
        heads of a group, E): one batch entry for each key/value head."""
        copy = torch.empty(t.shape, dtype=self.work, device=t.device).copy_(t)
        return copy.view(len(t) * groups, -1, t.shape[-1])

    def by_head(self, scores: Tensor) -> Tensor:
        """Return a view (heads, rows, keys) of scores (groups, rows of all heads of a group, keys).
        """
        return scores.unflatten(1, (self.repeats, -1)).flatten(0, 1)

    def blocks(self, sequence: int) -> Iterator[tuple[slice, list[tuple[int, int]], Tensor | None]]:
        """Yield for each block of queries: its slice, the spans of keys that it may see, and a mask
        (queries, last keys), or None if all keys in the spans are seen. A mask covers only the last
        keys of the spans, from the first key that some query does not see."""
        if self.rule.documents and sequence != self.sequence:
            self.sequence, self.masks = sequence, {}
            self.near = _near(query_blocks(self.rule, self.T), self.documents[sequence])
        for first, last, spans in self.near:
            if first not in self.masks:
                self.masks[first] = self._mask(first, last, spans)
            yield slice(first, last), spans, self.masks[first]

    def _mask(self, first: int, last: int, spans: list[tuple[int, int]]) -> Tensor | None:
        ids = self.documents[self.sequence] if self.rule.documents else None
        parts = masked(self.rule, first, last, spans,
                       lambda a, b: ids is not None and not _one(ids, (first, last), (a, b)))
        if not parts:
            return None
        places = partial(torch.arange, dtype=torch.int32, device=self.device)
        i, j = places(first, last), torch.cat([places(a, b) for a, b in parts])
        mask = self.rule.sees(i[:, None], j[None])
        if ids is not None:
            mask &= ids[first:last, None] == _of(ids[None], parts)
        return mask


def _known(ids: Tensor) -> bool:
    """Return whether the ids have values. Meta and fake tensors have only shapes; then all tokens
    count as one document."""
    return not (ids.is_meta or isinstance(ids, FakeTensor))


def _near(blocks: list[tuple[int, int, list[tuple[int, int]]]],
          ids: Tensor) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return `blocks` without the keys that come before the first token of every document in the
    block of queries. The document ids (T,) may have any order."""
    if not _known(ids):
        return blocks
    distinct, which = ids.unique(return_inverse=True)
    places = torch.arange(len(ids)).to(ids.device)
    # the first place of each token's document
    firsts = places.new_full(distinct.shape, len(ids))
    firsts = firsts.scatter_reduce(0, which, places, "amin")[which]
    starts = [int(firsts[first:last].min()) for first, last, _ in blocks]
    return [(first, last, [(max(a, start), b) for a, b in spans if b > start])
            for start, (first, last, spans) in zip(starts, blocks)]


def _one(ids: Tensor, *spans: tuple[int, int]) -> bool:
    """Return whether all tokens of these spans belong to the same document."""
    return not _known(ids) or all(bool((ids[a:b] == ids[spans[0][0]]).all()) for a, b in spans)


def _of(t: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Return the rows of t (batch, T, ...) in all spans, joined along dimension 1."""
    if len(spans) == 1:
        [(a, b)] = spans
        return t[:, a:b]
    return torch.cat([t[:, a:b] for a, b in spans] or [t[:, :0]], dim=1)


def _shapes(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return empty results of `attend`. This fake also works for symbolic sizes; `attend` itself
    does not, because its loop needs the number of blocks."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide)


def _shapes_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
                     sinks: Tensor | None, sums: Tensor, *_: object) -> tuple[Tensor, ...]:
    d_sinks = sums.new_empty(0 if sinks is None else q.shape[1])
    return *map(torch.empty_like, (q, k, v)), d_sinks


@operator("blocked_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor? sinks, "
          "str rule, bool wide) -> (Tensor, Tensor)", key=EVERY_DEVICE, flops=over_pairs(2),
          fake=_shapes, inside=True)
@torch.autocast("cpu", enabled=False)
def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None,
           rule: str, wide: bool) -> tuple[Tensor, Tensor]:
    """Return the output, and log-sums (B, H, T) of the exponentials of each query's scores."""
    p = _Pieces(q, k, documents, in_words(rule), wide)
    out = torch.empty_like(q)
    sums = torch.empty(q.shape[:3], dtype=torch.promote_types(p.work, torch.float32),
                       device=q.device)
    for b, g, h in p.slices:
        groups = g.stop - g.start
        keys, values = p.own(k[b, g], groups), p.own(v[b, g], groups)
        for rows, spans, seen in p.blocks(b.start):
            queries = q[b, h, rows]
            weights = torch.bmm(p.own(queries, groups), _of(keys, spans).mT)
            total = attention_(p.by_head(weights), seen, p.scale, p.cap,
                               None if sinks is None else sinks[h].to(sums.dtype)
                               .repeat(len(queries)))
            sums[b, h, rows] = total.view(queries.shape[:3])
            out[b, h, rows] = torch.bmm(weights, _of(values, spans)).view(queries.shape)
            del weights     # the largest tensor: freed before the next block allocates its own
    return out, sums


@operator("blocked_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, "
          "Tensor? documents, Tensor? sinks, Tensor sums, str rule, bool wide) "
          "-> (Tensor, Tensor, Tensor, Tensor)", key=EVERY_DEVICE, flops=over_pairs(5),
          fake=_shapes_backward, inside=True)
@torch.autocast("cpu", enabled=False)
def gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
              sinks: Tensor | None, sums: Tensor,
              rule: str, wide: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and sinks; the last one is empty without sinks."""
    p = _Pieces(q, k, documents, in_words(rule), wide)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_sinks = sums.new_zeros(0 if sinks is None else q.shape[1])
    for b, g, h in p.slices:
        groups = g.stop - g.start
        keys, values = p.own(k[b, g], groups), p.own(v[b, g], groups)
        d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
        for rows, spans, seen in p.blocks(b.start):
            place = b, h, rows
            queries, d_rows = p.own(q[place], groups), p.own(d_out[place], groups)
            near = _of(keys, spans)
            weights, d = torch.bmm(queries, near.mT), torch.bmm(d_rows, _of(values, spans).mT)
            dots = attention_backward_(p.by_head(weights), p.by_head(d),
                                       sums[place].flatten(0, 1).contiguous(), seen, p.scale,
                                       p.cap)
            dq[place] = torch.bmm(d, near).view(q[place].shape)
            start = 0
            # Several blocks of queries see the same key, so its gradients are summed over blocks.
            for begin, end in spans:
                some = slice(start, start := start + end - begin)
                d_keys[:, begin:end].baddbmm_(d[:, :, some].mT, queries)
                d_values[:, begin:end].baddbmm_(weights[:, :, some].mT, d_rows)
            if sinks is not None:
                weight = (sinks[h].to(sums.dtype)[:, None] - sums[place]).exp()
                d_sinks[h] -= (weight * dots.view(weight.shape)).sum((0, 2))
            del weights, d
        dk[b, g], dv[b, g] = d_keys.view(dk[b, g].shape), d_values.view(dv[b, g].shape)
        del keys, near, values, d_keys, d_values
    return dq, dk, dv, d_sinks


class BlockedAttention(torch.autograd.Function):
    """`BlockedAttention.apply(q, k, v, documents, sinks, rule, wide)`.

    This is a custom Function, because `torch.library.register_autograd` would make the log-sums a
    differentiable output of the operator, with a gradient of their own.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
                sinks: Tensor | None, rule: Rule, wide: bool) -> Tensor:
        ctx.options = rule.words, wide
        out, sums = attend(q, k, v, documents, sinks, *ctx.options)
        ctx.save_for_backward(q, k, v, documents, sinks, sums)
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, documents, sinks, sums = ctx.saved_tensors
        *grads, d_sinks = gradients(d_out, q, k, v, documents, sinks, sums, *ctx.options)
        return *grads, None, None if sinks is None else d_sinks.type_as(sinks), None, None


@limited("blocked")
def blocked(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
            sinks: Tensor | None = None, *, rule: Rule = FULL, wide: bool = False) -> Tensor:
    """Return the attention output, like q: the backend `blocked`. `wide`: matmuls are computed in
    float32, and each result is rounded once."""
    return BlockedAttention.apply(q, k, v, documents if rule.documents else None, sinks, rule, wide)


blocked_wide = partial(blocked, wide=True)
