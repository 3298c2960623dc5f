"""The operations of attention: what each backend saves, moves and computes for a micro-batch.

Each backend has a function that returns one `Op`; the rows of `lpkit.techniques.attention_backends`
name these functions. A kind of attention without softmax names functions of its own. This module
does not import torch.

Sizes: B sequences of T tokens, H query heads, G key/value heads, E dimensions of one head.

    stream -> qkv (Linear) -> split -> q_norm, k_norm -> attend -> out (Linear) -> stream
                                       (if qk_norm)

    product     the output of qkv: B T x (H + 2 G) E numbers. q, k and v are views of the product,
                and one view keeps all of the product alive. q and k are new tensors instead of
                views if a norm or rotary positions compute them, or if 1 < G < H (the queries of a
                group are not adjacent).
    scores      q k^T, B H T T numbers. Fused kernels never hold all scores at once.
    sums        the log-sum-exp of each query, B H T float32 numbers. Fused kernels save the sums
                instead of the scores.
    turning     rotary positions, which multiply pairs of numbers of q and k by a rotation
    pairs       matmuls over pairs of tokens: q k^T, and probabilities times v; `pairs_share` is the
                share of the T x T pairs that the kernel computes

Example: `sdpa` with B=1, T=4, H=G=2, E=8 in bf16 saves the product (4 x 48 x 2 = 384 bytes), the
output (4 x 16 x 2 = 128 bytes), which the out Linear reads too, and sums (4 x 2 x 4 = 32 bytes).
`plain` saves scores instead: 1 x 2 x 4 x 4 probabilities, and copies of q, k and v.
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


def attention_op(s: MicroBatch, *, saved: float, work: float, out: float | None = None,
                 numbers: int = 0, views: int | None = None, saves_result: bool = False,
                 pairs: tuple[Pairs, ...] = (), gates: int = 0, features: int | None = None,
                 **facts: Any) -> Op:
    """Return attention as one operation.

    Forward saves, per token, `views` numbers of q, k and v (None: as many as `attended_numbers`),
    `numbers` more numbers, and `gates` numbers, all in the compute dtype; and `saved` bytes in all.
    If `pairs` is empty, the two matmuls cover all T x T pairs of tokens: scores with an inner size
    of `features` (None: E), and values of size E. `facts` are other fields of Op.

    Backward holds `work` bytes while it computes `out` bytes of gradients of q, k and v (None: the
    size of the product). If rotary positions turned q and k, backward turns the gradients of q and
    k back, in float32 and with a copy whose halves are exchanged. At the end, the gradients of q, k
    and v and the gradient of the product are alive together."""
    m, tokens, compute = s.model, s.tokens, s.compute_bytes
    whole, given = qkv_bytes(s), tokens * m.H * m.E * compute
    out = whole if out is None else out
    views = attended_numbers(s) if views is None else views
    turned = POSITIONS[m.position].turns
    turn = tokens * m.H * m.E * (2 * s.residual_bytes + compute) if turned else 0
    held = tokens * (views + numbers) * compute + saved
    # If attention alone is recomputed, it saves only q, k and v. The other saved tensors exist only
    # while backward works on attention.
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
    """Return the operation of PyTorch's fused kernel, which saves q, k, v, the output and `sums`,
    but no scores. For the plain causal rule, the kernel skips the pairs above the diagonal.
    For every other rule it computes all T x T pairs. It saves a mask in the compute dtype, unless
    the rule is plain causal or lets every query see every key."""
    m, masked, sums = s.model, s.rule not in (Rule(), EVERY_KEY), s.tokens * s.model.H * FP32
    mask = s.masked_pairs * s.compute_bytes if masked else 0
    return attention_op(s, numbers=m.H * m.E, saved=sums + mask, work=qkv_bytes(s),
                        saves_result=True,
                        pairs_share=(m.T + 1) / (2 * m.T) if s.rule == Rule() else 1.0,
                        # five products in backward, two in forward: scores are computed again
                        backward_pairs=2.5,
                        result_bytes=s.tokens * m.H * m.E * s.compute_bytes + sums)


def tiled(s: MicroBatch) -> Op:
    """Return the operation of the backend `tiled`, which saves the same tensors as `sdpa`.

    Backward holds float32 tensors: three tiles of scores, a fourth tile until the next one
    replaces it, tiles of queries and keys and of their gradients, and the sums of the gradients of
    k and v over the tiles."""
    m, T = s.model, int(s.model.T)
    side = min(TILE, T)
    # copies of a tile's queries, keys and their gradients
    copied = 6 if s.compute_bytes < FP32 or m.G < m.H else 4
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
    """Return the operation of the kit's flash kernel. Unlike `sdpa`, this kernel computes only
    tiles with at least one visible pair, and it keeps documents separate. Backward also holds a
    float32 number for each query and head."""
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
    """Return the operation of attention as two matmuls and a softmax.

    The batched matmuls need copies of q, k and v, in which k and v are repeated for each query
    head. Forward saves these copies, the (T, T) mask, the probabilities (also of the sinks, if the
    rule has sinks), the scores if they are capped, and a copy of the heads' output for the Linear
    `out`."""
    m, heads = s.model, s.model.H * s.model.E
    is_view = s.heads_are_views and not s.turns and not 1 < m.G < m.H
    q = qkv_numbers(m) if is_view else heads
    # if heads are views, q stays a view of the product and keeps all of it alive
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
    """Return the operation of attention by blocks of queries. Forward saves q, k, v and `sums`. The
    Linear `out` saves the output.

    Backward goes through groups of heads. It holds copies of one group's k and v, their gradients,
    the rows of one block of queries, two blocks of scores (five on a GPU), and masks of one byte
    per pair. For each block of queries it computes only the spans of keys that the block sees.
    Documents count as one long document, which has the most pairs. `wide`: backward works in
    float32."""
    m, rule, T, repeats = s.model, s.rule, int(s.model.T), s.model.H // s.model.G
    B, G, itemsize = int(s.batch), int(m.G), FP32 if wide else s.compute_bytes
    pairs = masks = near = 0
    for first, last, spans in query_blocks(rule, T):
        pairs += (last - first) * keys_in(spans)
        masks += (last - first) * keys_in(masked(rule, first, last, spans))
        # spans that are not adjacent are copied
        near = max(near, keys_in(spans) * (len(spans) > 1))
    groups = math.prod(at_once(rule, T, B, G, repeats))
    # between the products, a CPU works in place in one pass; elsewhere PyTorch's operations run
    scores, passes = (2, (4, 8)) if s.kind == "cpu" else (5, (10, 14))
    rows = repeats * min(QUERY_BLOCK, T)        # queries, and gradients that are alive for a while
    copies = 4 * T + 2 * rows + max(2 * near, near + rows)
    work = masks + groups * itemsize * (
        m.E * copies + scores * repeats * most_scores(rule, T))
    return attention_op(s, saved=s.tokens * m.H * FP32, work=qkv_bytes(s) + work,
                        pairs_share=pairs / T**2, backward_pairs=2.5, score_passes=passes)


blocked_wide = functools.partial(blocked, wide=True)


def qkv_numbers(m: Any) -> int:
    """Return the numbers of q, k and v of one token."""
    return (m.H + 2 * m.G) * m.E


def qkv_bytes(s: MicroBatch) -> int:
    """Return the bytes of q, k and v of all tokens, in the compute dtype."""
    return s.tokens * qkv_numbers(s.model) * s.compute_bytes


def attended_numbers(s: MicroBatch) -> int:
    """Return the numbers of q, k and v that attention saves per token.

    q, k and v are views of the product, or new tensors if a norm or rotary positions compute them.
    If the norms of q and k already saved the product, v is a view of it and costs nothing."""
    # apart: v is a tensor of its own
    m, apart = s.model, s.made_anew or (s.saves_inputs and s.turns)
    turned = (m.H + m.G) * m.E if s.turns else m.H * m.E if 1 < m.G < m.H else 0
    return turned + (m.G * m.E if apart else 0 if s.norms_save_qkv else qkv_numbers(m))


def head_norms(s: MicroBatch) -> Iterator[Op]:
    """Yield two operations: the RMSNorm of each head's q, and the RMSNorm of each head's k (Qwen3,
    https://arxiv.org/abs/2505.09388). Each norm saves its input, a float32 number for each token
    and head, and on a CPU also its normalised input."""
    m, tokens, grouped = s.model, s.tokens, 1 < s.model.G < s.model.H
    product = qkv_bytes(s)
    for name, heads in (("attention.q_norm", m.H), ("attention.k_norm", m.G)):
        numbers = tokens * heads * m.E
        # given: bytes of the saved input. If the input is a view of the product, the first norm
        # counts the whole product, and the second norm counts nothing.
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
    """Yield all operations of attention. The first operation reads the residual stream. The result
    of the last operation, the Linear `out`, is added to the residual stream."""
    m, kind = s.model, KINDS[s.model.attention.name]
    attend = ATTENTION[s.attention].formula
    # a kind without softmax has formulas of its own; its last one holds for all other backends
    if kind.operations:
        attend = resolve_name(kind.operations.get(s.attention, [*kind.operations.values()][-1]))
    attend = attend(s)
    if kind.products:
        yield from resolve_name(kind.products)(s)
    yield linear("attention.qkv", s, m.D, qkv_numbers(m), cut="column", bias=m.biased_qkv)
    # in backward, the gradients of q, k and v are alive while they are copied into the gradient of
    # the product
    parts = Hold(nbytes=qkv_bytes(s))
    yield Op(name="attention.split", part="", backward=(parts,))
    if m.qk_norm:
        yield from head_norms(s)
    yield attend
    yield linear("attention.out", s, m.H * m.E, m.D, cut="row", bias=m.bias,
                 input_is_saved=attend.saves_result)


def of_sizes(B: int, T: int, S: int, E: int, V: int, causal: bool) -> Op:
    """Return attention by a fused kernel, for (B, T, E) queries, (B, S, E) keys and (B, S, V)
    values. If V is 0, return only the matmul (B, T, E) x (B, E, S) and the separate softmax that
    follows it."""
    pairs = (Pairs(name="scores", M=T, N=S, K=E, group=B),
             *[Pairs(name="values", M=T, N=V, K=S, group=B)] * bool(V))
    return Op(name="attention", part="attention", pairs=pairs, pairs_share=0.5 if causal else 1.0,
              score_passes=(0, 0) if V else (1, 2), backward_pairs=2.5 if V else 2.0)
