"""Attention as operations: what each backend saves, moves and computes of a micro-batch.

`lpkit.techniques.attention_backends` names them. A kind without softmax names its own. No torch.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from lpkit.techniques.attention import EVERY_KEY, KINDS, Rule
from lpkit.techniques.attention_backends import (
    ATTENTION,
    FLASH_TILE,
    QUERY_BLOCK,
    TILE,
    at_once,
    keys_in,
    masked,
    most_scores,
    query_blocks,
)
from lpkit.techniques.operation import FP32, POSITIONS, Hold, MicroBatch, Op, Pairs, linear

# q, k and v come out of one product. v is a view of it, and so are q and k unless
# positions or norms make them anew; but the queries of several groups do not lie side by side and
# are copied. One view keeps the whole product alive.


def attention_op(s: MicroBatch, *, saved: float, work: float, out: float | None = None,
                 numbers: int = 0, views: int | None = None, saves_result: bool = False,
                 pairs: tuple[Pairs, ...] = (), gates: int = 0, features: int | None = None,
                 **facts: Any) -> Op:
    """Saves q, k and v of each token, by `views` of what gave them (None: all), `numbers`
    besides, and `gates`. Without `pairs` all meet, by `features` of a head or its width. Backward
    holds `work`, and makes `out` bytes of gradients of q, k and v (None: as many as they have);
    they are turned back in float32, with halves exchanged; then their parts and the whole lie side
    by side."""
    m, tokens, compute = s.model, s.tokens, s.compute_bytes
    whole, given = qkv_bytes(s), tokens * m.H * m.E * compute
    out = whole if out is None else out
    views = attended_numbers(s) if views is None else views
    turned = POSITIONS[m.position].turns
    turn = tokens * m.H * m.E * (2 * s.residual_bytes + compute) if turned else 0
    held = tokens * (views + numbers) * compute + saved
    if s.attends_again:
        work += held - tokens * views * compute
        held, saves_result = tokens * attended_numbers(s) * compute, False
    held += tokens * gates * compute
    return Op(name="attention", part="attention", saved_itemsize=compute, saved_bytes=held,
              params=m.H if getattr(m.attention, "sinks", False) else 0,
              saves_result=saves_result,
              pairs=pairs or (Pairs(name="scores", M=m.T, N=m.T, K=features or m.E,
                                    group=s.batch * m.H),
                              Pairs(name="values", M=m.T, N=m.E, K=m.T, group=s.batch * m.H)),
              moved_bytes=2 * tokens * (m.H + m.G) * m.E * compute if turned else 0,
              backward=(Hold(nbytes=work, frees=1.0, grows=out - given),
                        Hold(nbytes=turn, grows=whole - out)), **facts)


def sdpa(s: MicroBatch) -> Op:
    """A flash kernel: q, k, v, the output, and a float32 log-sum per query instead of T scores.
    What is not causal alone is a mask of the scores' dtype, and every pair is computed."""
    m, masked, sums = s.model, s.rule not in (Rule(), EVERY_KEY), s.tokens * s.model.H * FP32
    mask = s.masked_pairs * s.compute_bytes if masked else 0
    return attention_op(s, numbers=m.H * m.E, saved=sums + mask, work=qkv_bytes(s),
                        saves_result=True, pairs_share=(m.T + 1) / (2 * m.T) if s.rule == Rule() else 1.0,
                        backward_pairs=2.5,       # scores once more
                        result_bytes=s.tokens * m.H * m.E * s.compute_bytes + sums)


def tiled(s: MicroBatch) -> Op:
    """Keeps what sdpa keeps. Backward holds three tiles of scores, and one that the next tile will
    free, beside those of queries and keys, and sums gradients of k and v, all in float32."""
    m, T = s.model, int(s.model.T)
    side = min(TILE, T)
    copied = 6 if s.compute_bytes < FP32 or m.G < m.H else 4    # of queries and keys
    wide = FP32 // s.compute_bytes
    at_work = s.batch * m.H * side * FP32 * ((3 + (T >= 2 * TILE)) * side + copied * m.E)
    summed = 2 * s.tokens * m.G * m.E * FP32 if s.compute_bytes < FP32 else 0
    rule = m.attention.rule(T)
    pairs = sum((min(first + TILE, T) - first) * (end - begin) for first in range(0, T, TILE)
                for begin, end in rule.spans(first, min(first + TILE, T), T))
    return attention_op(s, numbers=m.H * m.E, saved=s.tokens * m.H * FP32, saves_result=True,
                        work=qkv_bytes(s) + summed + at_work,
                        pairs_share=pairs / T**2, backward_pairs=2.5,
                        score_passes=(8 * wide, 14 * wide))


def flash(s: MicroBatch) -> Op:
    """The kit's own flash kernel: as sdpa, over the tiles in which something is seen, documents
    apart; in backward also a float32 sum of each query."""
    op, T, rule = sdpa(s), int(s.model.T), s.model.attention.rule(s.model.T)
    (queries, keys), pairs = FLASH_TILE, 0
    for first in range(0, T, queries):
        last, until = min(first + queries, T), 0
        for begin, end in rule.spans(first, last, T):
            begin, end = max(until, begin - begin % keys), min(-(-end // keys) * keys, T)
            pairs += (last - first) * max(0, end - begin)
            until = max(until, end)
    work, *rest = op.backward
    work = replace(work, nbytes=work.nbytes + s.tokens * s.model.H * FP32)
    return replace(op, pairs_share=pairs / T**2, backward=(work, *rest))


def plain(s: MicroBatch) -> Op:
    """q, k and v copied for a batched product, every group repeated; the (T, T) mask; the
    probabilities, with one of a sink; capped scores; and the heads' output, copied for the product
    after it."""
    m, heads = s.model, s.model.H * s.model.E
    is_view = s.heads_are_views and not s.turns and not 1 < m.G < m.H
    q = qkv_numbers(m) if is_view else heads
    probability = s.compute_bytes
    if s.kind == "gpu" and s.compute_bytes < FP32:
        probability += FP32
    pairs, given = s.batch * m.H * m.T * m.T, s.tokens * heads * s.compute_bytes
    saved = s.masked_pairs + (pairs + s.tokens * m.H * s.rule.sinks) * probability
    if s.rule.soft_cap is not None:
        saved += pairs * s.compute_bytes
    return attention_op(s, numbers=2 * heads if is_view else q + 2 * heads,
                        views=q if is_view else 0, saved=saved, out=3 * given,
                        work=given + 2 * pairs * s.compute_bytes, score_passes=(6, 12))


def blocked(s: MicroBatch, *, wide: bool = False) -> Op:
    """q, k, v and a log-sum per query, as a flash kernel, but not the output: the product after it
    saves that. At work: copies of some heads' k and v, their gradients, the rows of one block, and
    two blocks of scores; and masks, a byte a pair. Of the pairs, the spans that blocks of queries
    meet: documents count as one, which has the most."""
    m, rule, T, repeats = s.model, s.rule, int(s.model.T), s.model.H // s.model.G
    B, G, itemsize = int(s.batch), int(m.G), FP32 if wide else s.compute_bytes
    pairs = masks = near = 0
    for first, last, spans in query_blocks(rule, T):
        pairs += (last - first) * keys_in(spans)
        masks += (last - first) * keys_in(masked(rule, first, last, spans))
        near = max(near, keys_in(spans) * (len(spans) > 1))      # a copy, where they lie apart
    groups = math.prod(at_once(rule, T, B, G, repeats))
    # what is between the products is one pass in place on a CPU, and its definition elsewhere
    scores, passes = (2, (4, 8)) if s.kind == "cpu" else (5, (10, 14))
    rows = repeats * min(QUERY_BLOCK, T)        # of queries, and of gradients that come and go
    copies = 4 * T + 2 * rows + max(2 * near, near + rows)
    work = masks + groups * itemsize * (
        m.E * copies + scores * repeats * most_scores(rule, T))
    return attention_op(s, saved=s.tokens * m.H * FP32, work=qkv_bytes(s) + work,
                        pairs_share=pairs / T**2, backward_pairs=2.5, score_passes=passes)


blocked_wide = functools.partial(blocked, wide=True)


def qkv_numbers(m: Any) -> int:
    return (m.H + 2 * m.G) * m.E


def qkv_bytes(s: MicroBatch) -> int:
    return s.tokens * qkv_numbers(s.model) * s.compute_bytes


def attended_numbers(s: MicroBatch) -> int:
    """Numbers of a token's q, k and v as attention has them: views, but for those made anew, of
    which norms may have saved the product before; q and k that are turned are no copies besides."""
    m, apart = s.model, s.made_anew or (s.saves_inputs and s.turns)
    turned = (m.H + m.G) * m.E if s.turns else m.H * m.E if 1 < m.G < m.H else 0
    return turned + (m.G * m.E if apart else 0 if s.norms_save_qkv else qkv_numbers(m))


def head_norms(s: MicroBatch) -> Iterator[Op]:
    """An RMSNorm of each head's q, and one of its k (Qwen3, https://arxiv.org/abs/2505.09388).
    Saves its input, a number of each head, and, on a CPU, what it makes of its input."""
    m, tokens, grouped = s.model, s.tokens, 1 < s.model.G < s.model.H
    product = qkv_bytes(s)
    for name, heads in (("attention.q_norm", m.H), ("attention.k_norm", m.G)):
        numbers = tokens * heads * m.E
        wide = given = numbers * FP32
        if s.norms_save_qkv and name.endswith("q_norm"):
            given = numbers * s.compute_bytes if grouped else product
        elif s.norms_save_qkv:
            given = product if grouped else 0
        saved = given + tokens * heads * FP32 + (wide if s.kind == "cpu" else 0)
        yield Op(name=name, part="attention", params=m.E, saved_bytes=saved,
                 saved_itemsize=s.compute_bytes, moved_bytes=2 * numbers * s.compute_bytes,
                 backward=(Hold(nbytes=4 * wide, frees=1.0), Hold()))


def attention(s: MicroBatch) -> Iterator[Op]:
    """Yields all its operations, from the residual stream back to what is added to it."""
    m, kind = s.model, KINDS[s.model.attention.name]
    attend = ATTENTION[s.attention].formula
    if kind.operations:     # the last, where the backend does not matter
        attend = resolve_name(kind.operations.get(s.attention, [*kind.operations.values()][-1]))
    attend = attend(s)
    if kind.products:
        yield from resolve_name(kind.products)(s)
    yield linear("attention.qkv", s, m.D, qkv_numbers(m), cut="column", bias=m.biased_qkv)
    parts = Hold(nbytes=qkv_bytes(s))       # beside the whole, in backward
    yield Op(name="attention.split", part="", backward=(parts,))
    if m.qk_norm:
        yield from head_norms(s)
    yield attend
    yield linear("attention.out", s, m.H * m.E, m.D, cut="row", bias=m.bias,
                 input_is_saved=attend.saves_result)


def of_sizes(B: int, T: int, S: int, E: int, V: int, causal: bool) -> Op:
    """The attention of (B, T, E) queries, (B, S, E) keys and (B, S, V) values by a fused kernel; V
    of 0: a product (B, T, E) x (B, E, S) alone, of which a softmax is moved by itself."""
    pairs = (Pairs(name="scores", M=T, N=S, K=E, group=B),
             *[Pairs(name="values", M=T, N=V, K=S, group=B)] * bool(V))
    return Op(name="attention", part="attention", pairs=pairs, pairs_share=0.5 if causal else 1.0,
              score_passes=(0, 0) if V else (1, 2), backward_pairs=2.5 if V else 2.0)
