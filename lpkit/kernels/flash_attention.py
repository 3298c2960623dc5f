"""Attention that never stores the scores: FlashAttention-2 (Dao 2023,
https://arxiv.org/abs/2307.08691) for every `techniques.attention.Rule`, forward and backward.

    s = cap(q k^T / sqrt(E))    p = exp(s - lse)    lse = log sum exp(s) over the keys that are seen
    out = p v                   D = sum(d_out out)  ds = p (d_out v^T - D) cap'
    dq = ds k / sqrt(E)         dk = ds^T q / sqrt(E)           dv = p^T d_out

Here s are the scores, cap is the soft cap of the rule (tanh), and lse is the log-sum of the
exponentials of a query's scores, which backward uses instead of the stored scores.

Forward: a program has a tile of queries and iterates over tiles of keys, with the online softmax of
Milakov and Gimelshein (2018, https://arxiv.org/abs/1805.02867). Exponentials are to base 2, and the
scale contains the factor log2(e). Backward recomputes the scores twice, in two kernels. A program
of `_backward_queries` has a tile of queries and computes its dq. A program of `_backward_keys` has
a tile of keys and computes its dk and dv, summed over the query heads that share the keys. No two
programs add to the same numbers, so the same input gives the same bits.

A tile of keys is skipped, not masked, if no query of the tile of queries sees any of its keys. For
causality, windows and documents, the bounds of the loop skip such tiles (`_tile_bounds`; for
documents, from the smallest and the largest id of each tile). For tables of blocks, lists of tiles
do (`_lists`). If every query sees every key, the two tiles are computed without a mask.

Shapes: q (B, H, T, E), k and v (B, G, T, E), each with its own strides. Results are stored as
(B, T, H, E), so that heads merge without a copy.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.kernels.jit import INTERPRETED, jit, tl, triton, why_no_triton
from lpkit.kernels.kernel import Kernel
from lpkit.kernels.operator import EVERY_DEVICE, operator, over_pairs
from lpkit.techniques.attention import Rule, in_words
from lpkit.techniques.attention_backends import FLASH_WIDTH, limited

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAUSAL = Rule()


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
              sinks: Tensor | None = None, rule: Rule = CAUSAL) -> Tensor:
    """Return the attention output (B, H, T, E), in the dtype of q: the definition.

    Computes in float32 (float64 if q is float64) and rounds once. Stores the scores (B, H, T, T).
    A query that sees no key gets zeros. documents: (B, T) ids, or None. sinks: (H,) scores, or
    None.
    """
    H, T, E = q.shape[-3:]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (t.to(wide).repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))
    scores = q.to(wide) @ k.mT / math.sqrt(E)
    if rule.soft_cap is not None:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    places = torch.arange(T, device=q.device)
    seen = rule.sees(places[:, None], places[None])
    if rule.documents:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    if sinks is not None:
        sink = sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)
        scores, seen = torch.cat((scores, sink), -1), F.pad(seen, (0, 1), value=True)
    # Hidden scores become the lowest finite number, because a row of -inf has a NaN softmax and a
    # NaN gradient.
    weights = torch.where(seen, scores, torch.finfo(wide).min).softmax(-1) * seen
    return (weights[..., :T] @ v).to(q.dtype)


# ---- the kernels

# Which (query, key) pairs of sequence b are visible, and how they are scored. A field is None if
# the rule does not use it; Triton then removes the code for it.
#   b, T                   number of the sequence; tokens in a sequence
#   documents              pointer to document ids (B, T)
#   window, global_tokens  a query sees the last `window` keys, and the first `global_tokens` keys
#   table, block, across   pointer to a table (across, across) of visible blocks of `block` tokens
#   scale, cap             factor of q k^T; soft cap (both contain log2(e))
# In the kernels, the suffixes _b, _h and _t name the strides of an axis: sequence, head, token.
TileRule = namedtuple("TileRule", "b T documents window global_tokens table block across scale cap")


@jit
def _tile(start, place, stride, T, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
          INSIDE: tl.constexpr):
    """Load a tile (ROWS, BLOCK_E) of a matrix (T, E), from row `place` on; zeros outside of the
    matrix.

    start: pointer to the matrix; stride: elements from row to row. INSIDE: the caller guarantees
    that all rows are in the matrix, so no mask of rows is needed.
    """
    row, e = tl.arange(0, ROWS), tl.arange(0, BLOCK_E)
    where = start + tl.cast(place, tl.int64) * stride + (row[:, None] * stride + e[None, :])
    if INSIDE and E == BLOCK_E:
        tile = tl.load(where)
    elif INSIDE:
        tile = tl.load(where, mask=(e < E)[None, :], other=0.0)
    elif E == BLOCK_E:
        tile = tl.load(where, mask=(place + row < T)[:, None], other=0.0)
    else:
        tile = tl.load(where, mask=(place + row < T)[:, None] & (e < E)[None, :], other=0.0)
    return tile


@jit
def _put(tile, start, place, stride, T, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr):
    """Store a tile at row `place` of a matrix (T, E), rounded to the dtype of the matrix."""
    row, e = tl.arange(0, ROWS), tl.arange(0, BLOCK_E)
    where = start + tl.cast(place, tl.int64) * stride + (row[:, None] * stride + e[None, :])
    inside = (place + row < T)[:, None] & (e < E)[None, :]
    tl.store(where, tile.to(start.dtype.element_ty), mask=inside)


@jit
def _places(place, rule, ROWS: tl.constexpr):
    """Return the positions (ROWS,) of a tile's tokens, and their document ids (ROWS,)."""
    places = place + tl.arange(0, ROWS)
    ids = places
    if rule.documents is not None:
        ids = tl.load(rule.documents + rule.b * rule.T + places, mask=places < rule.T, other=-1)
    return places, ids


@jit
def _sums(lse, rows, T):
    """Load the log-sums of these rows, converted to base 2. Rows from T on get inf, so that their
    probability exp2(s - inf) is 0."""
    return tl.load(lse + rows, mask=rows < T, other=float("inf")) * 1.4426950408889634


@jit
def _seen(rows, columns, row_ids, column_ids, rule, MASKED: tl.constexpr):
    """Return which queries see which keys (bool), as `Rule.sees` does. `rows` (positions of
    queries) and `columns` (positions of keys) broadcast to the shape of the tile of scores."""
    seen = columns <= rows
    if MASKED and rule.window is not None:
        seen = seen & ((rows - columns < rule.window) | (columns < rule.global_tokens))
    if MASKED and rule.table is not None:
        at = (rows // rule.block) * rule.across + columns // rule.block
        seen = seen & (tl.load(rule.table + at, mask=seen & (rows < rule.T), other=0) != 0)
    if MASKED and rule.documents is not None:
        seen = seen & (row_ids == column_ids)
    return seen


@jit
def _score(products, rule):
    """Return the scores times log2(e), from `products` q k^T; and tanh(s / cap), whose derivative
    backward needs, or again the scores if the rule has no soft cap."""
    scores = products * rule.scale
    reached = scores
    if rule.cap is not None:
        reached = 1.0 - 2.0 / (tl.exp2(scores) + 1.0)       # tanh
        scores = rule.cap * reached
    return scores, reached


@jit
def _slope(products, sums, values, deltas, seen, rule, MASKED: tl.constexpr):
    """Return the probabilities p, and ds, the gradient of the scores.

    All tensors are tiles (queries, keys), or all are transposed: products q k^T, values d_out v^T.
    sums: log-sums to base 2; deltas: D = sum(d_out out). Both broadcast over the keys.
    """
    scores, reached = _score(products, rule)
    p = tl.exp2(scores - sums)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    ds = p * (values - deltas)
    if rule.cap is not None:
        ds *= 1.0 - reached * reached
    return p, ds


@jit
def _tile_bounds(tile, rule, bound, counts, BY_KEYS: tl.constexpr, BLOCK_Q: tl.constexpr,
         BLOCK_K: tl.constexpr):
    """Return five bounds, which say for a tile of queries which tiles of keys it is computed with
    (BY_KEYS: for a tile of keys, which tiles of queries).

        0 .. far       a mask is needed: tiles of global tokens
        low .. near    a mask is needed: the edge of the window (BY_KEYS: the diagonal), or all
                       tiles of a rule with documents
        near .. whole  no mask: every query sees every key
        whole .. end   a mask is needed: the diagonal (BY_KEYS: the edge of the window)

    All other tiles are skipped. For a rule with lists (`counts` is not None), the bounds are
    positions in the list of this tile.
    """
    if counts is not None:
        far, end = tl.load(counts + 2 * tile), tl.load(counts + 2 * tile + 1)
        low, near, whole = far, far, end
    elif BY_KEYS:
        start = tile * BLOCK_K
        end = tl.cdiv(rule.T, BLOCK_Q)
        far, low = start * 0, start // BLOCK_Q
        near = tl.minimum(tl.cdiv(start + BLOCK_K - 1, BLOCK_Q), end)
        whole = end
        if rule.window is not None:
            reach = (start + BLOCK_K + rule.window - 2) // BLOCK_Q + 1
            end = tl.where(start < rule.global_tokens, end, tl.minimum(end, reach))
            near = tl.minimum(near, end)
            whole = tl.maximum(tl.minimum((start + rule.window) // BLOCK_Q, end), near)
        if rule.documents is not None:
            end = tl.minimum(end, tl.load(bound + rule.b * tl.num_programs(1) + tile) + 1)
            near, whole = end, end
    else:
        start = tile * BLOCK_Q
        end = tl.cdiv(tl.minimum(start + BLOCK_Q, rule.T), BLOCK_K)
        far, low, near, whole = start * 0, start * 0, start * 0, start // BLOCK_K
        if rule.window is not None:
            low = tl.maximum(start - rule.window + 1, 0) // BLOCK_K
            near = tl.cdiv(tl.maximum(start + BLOCK_Q - rule.window, 0), BLOCK_K)
            near = tl.minimum(near, whole)
        if rule.documents is not None:
            low = tl.maximum(low, tl.load(bound + rule.b * tl.num_programs(1) + tile))
            near, whole = end, end
        if rule.window is not None:
            far = tl.minimum(tl.cdiv(rule.global_tokens, BLOCK_K), low)
    return far, low, near, whole, end


@jit
def _part(step: tl.constexpr, state, operands, bounds, tile, repeats, rule, tiles, listed,
          MASKED: tl.constexpr, BY_KEYS: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
          BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return `state` after the tiles that need a mask (MASKED), or after those that need none.

    step:     `_attend`, `_to_queries` or `_to_keys`, called once for each tile
    state:    the accumulators that `step` updates
    operands: what `step` reads: this program's tile, and pointers and strides of the other tensors
    repeats:  query heads of the group (BY_KEYS), otherwise 1
    """
    far, low, near, whole, end = bounds
    count = far + near - low + end - whole if MASKED else whole - near
    # One loop over all heads of a group, so that Triton loads the next head's tiles while the
    # current head is computed.
    for n in range(repeats * count):
        i, h = (n % count, n // count) if BY_KEYS else (n, 0)
        at = near + i
        # i counts through the masked ranges: 0 .. far, low .. near, whole .. end
        if MASKED:
            second = i - far
            third = second - (near - low)
            at = tl.where(second < 0, i, tl.where(third < 0, low + second, whole + third))
        if tiles is not None:
            at = tl.load(tiles + tile * listed + at)
        state = step(state, operands, at, h, rule, MASKED, E, BLOCK_E, BLOCK_Q, BLOCK_K)
    return state


@jit
def _over(step: tl.constexpr, state, operands, tile, repeats, rule, bound, tiles, counts, listed,
          BY_KEYS: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr,
          BLOCK_K: tl.constexpr):
    """Return `state` after all tiles that this program's tile is computed with: first the tiles
    that need a mask, then the others."""
    # MASKED is a compile-time constant, so the loop over unmasked tiles contains no mask code.
    bounds = _tile_bounds(tile, rule, bound, counts, BY_KEYS, BLOCK_Q, BLOCK_K)
    state = _part(step, state, operands, bounds, tile, repeats, rule, tiles, listed, True, BY_KEYS,
                  E, BLOCK_E, BLOCK_Q, BLOCK_K)
    if rule.documents is None:
        state = _part(step, state, operands, bounds, tile, repeats, rule, tiles, listed, False,
                      BY_KEYS, E, BLOCK_E, BLOCK_Q, BLOCK_K)
    return state


@jit
def _attend(state, operands, at, h, rule, MASKED: tl.constexpr, E: tl.constexpr,
            BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add one tile of keys to the online softmax of a tile of queries.

    state: `total` (BLOCK_Q, BLOCK_E), the sum of exp2(s - top) v; `top` (BLOCK_Q,), the largest
    score so far; `weight` (BLOCK_Q,), the sum of exp2(s - top).
    """
    total, top, weight = state
    queries, rows, ids, k, v, k_t, v_t = operands
    place = at * BLOCK_K
    columns, column_ids = _places(place, rule, BLOCK_K)
    keys = _tile(k, place, k_t, rule.T, E, BLOCK_E, BLOCK_K, not MASKED)
    scores, _ = _score(tl.dot(queries, keys.T, input_precision="ieee"), rule)
    seen = _seen(rows[:, None], columns[None, :], ids[:, None], column_ids[None, :], rule, MASKED)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    # If a query has seen no key yet, its maximum is -inf, and -inf - (-inf) would be NaN.
    shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    p = tl.exp2(scores - shift[:, None])
    # Online softmax: rescale the sums from the old maximum to the new maximum.
    before = tl.exp2(top - shift)
    values = _tile(v, place, v_t, rule.T, E, BLOCK_E, BLOCK_K, not MASKED)
    total = tl.dot(p.to(values.dtype), values, total * before[:, None], input_precision="ieee")
    return total, higher, weight * before + tl.sum(p, 1)


@jit
def _forward(q, k, v, documents, sinks, bound, tiles, counts, table, out, lse, q_b, q_h, q_t, k_b,
             k_h, k_t, v_b, v_h, v_t, T, H, repeats, window, global_tokens, block, across, listed,
             scale, cap, E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
             BLOCK_E: tl.constexpr):
    """Compute `out` (B, T, H, E) and `lse` (B, H, T). One program computes one tile of queries of
    one head; the grid is (B H, tiles of queries)."""
    # Under a causal rule the last tile has the most keys. It starts first, so that the programs
    # that finish last are short.
    head, tile = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h = head // H, head % H
    g, place = h // repeats, tile * BLOCK_Q
    rule = TileRule(b, T, documents, window, global_tokens, table, block, across, scale, cap)
    rows, ids = _places(place, rule, BLOCK_Q)
    queries = _tile(q + b * q_b + h * q_h, place, q_t, T, E, BLOCK_E, BLOCK_Q, False)
    total = tl.zeros((BLOCK_Q, BLOCK_E), tl.float32)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_Q,), tl.float32)
    if sinks is not None:       # a sink acts as a key without a value
        top = tl.zeros_like(top) + tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
        weight += 1.0
    operands = queries, rows, ids, k + b * k_b + g * k_h, v + b * v_b + g * v_h, k_t, v_t
    total, top, weight = _over(_attend, (total, top, weight), operands, tile, 1, rule, bound, tiles,
                               counts, listed, False, E, BLOCK_E, BLOCK_Q, BLOCK_K)
    total = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    _put(total, out + (b * T * H + h) * E, place, H * E, T, E, BLOCK_E, BLOCK_Q)
    # A query that sees no key has a weight of 0 and a log-sum of -inf. The factor ln 2 converts
    # from base 2 to base e.
    tl.store(lse + head * T + rows, (top + tl.log2(weight)) * 0.6931471805599453, mask=rows < T)


@jit
def _to_queries(state, operands, at, h, rule, MASKED: tl.constexpr, E: tl.constexpr,
                BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add one tile of keys to `state`, dq / slope (BLOCK_Q, BLOCK_E): ds k."""
    queries, rows, ids, k, v, k_t, v_t, grads, sums, deltas = operands
    place = at * BLOCK_K
    columns, column_ids = _places(place, rule, BLOCK_K)
    keys = _tile(k, place, k_t, rule.T, E, BLOCK_E, BLOCK_K, not MASKED)
    values = _tile(v, place, v_t, rule.T, E, BLOCK_E, BLOCK_K, not MASKED)
    seen = _seen(rows[:, None], columns[None, :], ids[:, None], column_ids[None, :], rule, MASKED)
    _, ds = _slope(tl.dot(queries, keys.T, input_precision="ieee"), sums[:, None],
                   tl.dot(grads, values.T, input_precision="ieee"), deltas[:, None], seen, rule,
                   MASKED)
    return tl.dot(ds.to(keys.dtype), keys, state, input_precision="ieee")


@jit
def _backward_queries(q, k, v, documents, bound, tiles, counts, table, out, lse, d_out, deltas, dq,
                      q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, T, H, repeats, window,
                      global_tokens, block, across, listed, scale, cap, slope, E: tl.constexpr,
                      BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr):
    """Compute dq (B, T, H, E). Also store D in `deltas` (B, H, T), which `_backward_keys` reads.
    `slope`: 1 / sqrt(E), the derivative of a score by the product q k."""
    head, tile = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h = head // H, head % H
    g, place, at_head = h // repeats, tile * BLOCK_Q, (b * T * H + h) * E
    rule = TileRule(b, T, documents, window, global_tokens, table, block, across, scale, cap)
    rows, ids = _places(place, rule, BLOCK_Q)
    grads = _tile(d_out + at_head, place, H * E, T, E, BLOCK_E, BLOCK_Q, False)
    output = _tile(out + at_head, place, H * E, T, E, BLOCK_E, BLOCK_Q, False)
    # D = sum(d_out out) equals sum(p dp) over all keys, so it is known before the first tile of
    # keys is read (Dao et al. 2022, appendix B.2).
    delta = tl.sum(grads.to(tl.float32) * output.to(tl.float32), 1)
    tl.store(deltas + head * T + rows, delta, mask=rows < T)
    sums = _sums(lse + head * T, rows, T)
    queries = _tile(q + b * q_b + h * q_h, place, q_t, T, E, BLOCK_E, BLOCK_Q, False)
    operands = (queries, rows, ids, k + b * k_b + g * k_h, v + b * v_b + g * v_h, k_t, v_t, grads,
                sums, delta)
    total = _over(_to_queries, tl.zeros((BLOCK_Q, BLOCK_E), tl.float32), operands, tile, 1, rule,
                  bound, tiles, counts, listed, False, E, BLOCK_E, BLOCK_Q, BLOCK_K)
    _put(total * slope, dq + at_head, place, H * E, T, E, BLOCK_E, BLOCK_Q)


@jit
def _to_keys(state, operands, at, h, rule, MASKED: tl.constexpr, E: tl.constexpr,
             BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add one tile of queries of head h to dk / slope and dv, (BLOCK_K, BLOCK_E) each. Scores are
    transposed here: (keys, queries)."""
    dk, dv = state
    keys, values, columns, ids, q, d_out, lse, deltas, q_h, q_t, out_t = operands
    place, h = at * BLOCK_Q, tl.cast(h, tl.int64)
    rows, row_ids = _places(place, rule, BLOCK_Q)
    queries = _tile(q + h * q_h, place, q_t, rule.T, E, BLOCK_E, BLOCK_Q, False)
    grads = _tile(d_out + h * E, place, out_t, rule.T, E, BLOCK_E, BLOCK_Q, False)
    sums = _sums(lse + h * rule.T, rows, rule.T)
    delta = tl.load(deltas + h * rule.T + rows, mask=rows < rule.T, other=0.0)
    seen = _seen(rows[None, :], columns[:, None], row_ids[None, :], ids[:, None], rule, MASKED)
    p, ds = _slope(tl.dot(keys, queries.T, input_precision="ieee"), sums[None, :],
                   tl.dot(values, grads.T, input_precision="ieee"), delta[None, :], seen, rule,
                   MASKED)
    dv = tl.dot(p.to(grads.dtype), grads, dv, input_precision="ieee")
    return tl.dot(ds.to(queries.dtype), queries, dk, input_precision="ieee"), dv


@jit
def _backward_keys(q, k, v, documents, bound, tiles, counts, table, lse, d_out, deltas, dk, dv, q_b,
                   q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, T, H, repeats, window, global_tokens,
                   block, across, listed, scale, cap, slope, E: tl.constexpr,
                   BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr):
    """Compute dk and dv, (B, T, G, E) each. One program computes one tile of keys of one key/value
    head; the grid is (B G, tiles of keys)."""
    head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = H // repeats
    b, g = head // groups, head % groups
    h, place, at_head = g * repeats, tile * BLOCK_K, (b * T * groups + g) * E
    rule = TileRule(b, T, documents, window, global_tokens, table, block, across, scale, cap)
    columns, ids = _places(place, rule, BLOCK_K)
    keys = _tile(k + b * k_b + g * k_h, place, k_t, T, E, BLOCK_E, BLOCK_K, False)
    values = _tile(v + b * v_b + g * v_h, place, v_t, T, E, BLOCK_E, BLOCK_K, False)
    operands = (keys, values, columns, ids, q + b * q_b + h * q_h, d_out + (b * T * H + h) * E,
           lse + (b * H + h) * T, deltas + (b * H + h) * T, q_h, q_t, H * E)
    none = tl.zeros((BLOCK_K, BLOCK_E), tl.float32)
    of_keys, of_values = _over(_to_keys, (none, none), operands, tile, repeats, rule, bound, tiles,
                               counts, listed, True, E, BLOCK_E, BLOCK_Q, BLOCK_K)
    _put(of_keys * slope, dk + at_head, place, groups * E, T, E, BLOCK_E, BLOCK_K)
    _put(of_values, dv + at_head, place, groups * E, T, E, BLOCK_E, BLOCK_K)


# ---- the operators

# (BLOCK_Q, BLOCK_K, warps, stages) of a program, by the width E of a head in 16-bit numbers. None
# of these shapes spills registers on Hopper or Blackwell, for any rule (docs/kernels.md).
SHAPES = {
    "forward": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2),
                512: (64, 32, 8, 1)},
    "queries": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (32, 32, 4, 1),
                512: (32, 32, 4, 1)},
    "keys": {64: (64, 128, 8, 2), 128: (32, 128, 8, 2), 256: (32, 32, 8, 1), 512: (32, 32, 8, 1)},
}
# smaller tiles for rules with documents or a table of blocks, which need more registers
NARROWER = {"forward": {128: (128, 32, 8, 1)}, "keys": {64: (32, 64, 4, 2)}}


def _shape(which: str, E: int, narrower: bool, itemsize: int = 2) -> dict[str, int]:
    """Return the tile sizes, warps and stages of a program of the kernel `which`, a key of SHAPES.
    Numbers of 4 bytes take the shape of heads twice as wide."""
    block = max(16, triton.next_power_of_2(E))
    at = max(64, block * itemsize // 2)
    shape = (narrower and NARROWER.get(which, {}).get(at)) or SHAPES[which][at]
    names = "BLOCK_Q", "BLOCK_K", "num_warps", "num_stages"
    return {**dict(zip(names, shape, strict=True)), "BLOCK_E": block}


@functools.lru_cache(maxsize=64)
def _lists(rule: Rule, T: int, queries: int, keys: int, by_keys: bool,
           device: torch.device) -> dict[str, Any]:
    """Return kernel arguments for a rule with a table of blocks.

    tiles:  (tiles, listed) int32. Row i lists the tiles of keys that tile i of queries is computed
            with (by_keys: the tiles of queries for tile i of keys). Tiles that need a mask come
            first; the row is padded with zeros
    counts: (tiles, 2) int32: how many tiles of the row need a mask, and how many there are
    table:  (across, across) uint8: which blocks of tokens are visible
    queries, keys: tokens in a tile
    """
    down, over = -(-T // queries), -(-T // keys)
    lists: list[tuple[list[int], list[int]]] = [([], []) for _ in range(over if by_keys else down)]
    for i in range(down):
        first = i * queries
        spans = rule.spans(first, min(first + queries, T), T)
        for j in sorted({j for begin, end in spans for j in range(begin // keys, -(-end // keys))}):
            whole = not rule.documents and not rule.hides(first, first + queries, j * keys,
                                                          (j + 1) * keys)
            lists[j if by_keys else i][whole].append(i if by_keys else j)
    listed = max(1, *(len(masked) + len(whole) for masked, whole in lists))
    tiles = [(masked + whole + listed * [0])[:listed] for masked, whole in lists]
    counts = [(len(masked), len(masked) + len(whole)) for masked, whole in lists]
    tiles, counts = (torch.tensor(t, dtype=torch.int32, device=device) for t in (tiles, counts))
    table = torch.tensor(rule.blocks, dtype=torch.uint8, device=device)
    return {"tiles": tiles, "counts": counts, "table": table, "listed": listed,
            "across": len(table)}


def _meet(documents: Tensor, queries: int, keys: int) -> Tensor:
    """Return whether a tile of queries and a tile of keys may share a document: bool,
    (B, tiles of queries, tiles of keys). They may if their ranges of ids overlap."""
    def ends(size: int) -> tuple[Tensor, Tensor]:
        T = documents.shape[1]
        places = torch.arange(-(-T // size) * size, device=documents.device).clamp(max=T - 1)
        return documents[:, places].unflatten(1, (-1, size)).aminmax(dim=-1)
    (least, most), (of_keys, until) = ends(queries), ends(keys)
    return (least[:, :, None] <= until[:, None]) & (of_keys[:, None] <= most[:, :, None])


def _given(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, rule: Rule,
           which: str) -> dict[str, Any]:
    """Return the arguments that all three kernels take. `which`: a key of SHAPES."""
    (_, H, T, E), G, by_keys = q.shape, k.shape[1], which == "keys"
    shape = _shape(which, E, rule.documents or rule.blocks is not None, q.itemsize)
    queries, keys = shape["BLOCK_Q"], shape["BLOCK_K"]
    log2e, cap, soft_cap = math.log2(math.e), None, rule.soft_cap
    scale = 1 / math.sqrt(E) * log2e
    if soft_cap is not None:    # cap tanh(s / cap); tanh is computed from exp2(2 log2e s / cap)
        # `_score` computes tanh(x) as 1 - 2 / (exp(2 x) + 1)
        scale, cap = 2 * scale / soft_cap, soft_cap * log2e
    given = {"q": q, "k": k, "v": v, "documents": documents, "T": T, "H": H, "repeats": H // G,
             "window": rule.window, "global_tokens": rule.global_tokens, "block": rule.block,
             "scale": scale, "cap": cap, "E": E, **shape, "bound": None, "tiles": None,
             "counts": None, "table": None, "listed": 0, "across": 0}
    for name, t in (("q", q), ("k", k), ("v", v)):
        given |= {f"{name}_{axis}": t.stride(i) for i, axis in enumerate("bht")}
    if rule.blocks is not None:
        given |= _lists(rule, T, queries, keys, by_keys, q.device)
    elif documents is not None:
        # the first tile of keys (by_keys: the last tile of queries) that may share a document
        meet = _meet(documents, queries, keys).int()
        bound = meet.shape[1] - 1 - meet.flip(1).argmax(1) if by_keys else meet.argmax(2)
        given["bound"] = bound.int()
    return given


def _like(q: Tensor) -> Tensor:
    """Return an empty tensor of the shape of q (B, H, T, E), stored as (B, T, H, E)."""
    B, H, T, E = q.shape
    return q.new_empty(B, T, H, E).transpose(1, 2)


def _results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
               sinks: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*map(_like, (q, k, v)), q.new_empty(0) if sinks is None else torch.empty_like(sinks))


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ConfigError for a device, a dtype or shapes that the kernels do not support."""
    problem = why_no_triton()
    if not problem and not q.is_cuda and not INTERPRETED:
        problem = f"needs a GPU, or TRITON_INTERPRET=1, but tensors are on {q.device}"
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        problem = (f"takes float32, bfloat16 or float16, the same for all, not "
                   f"{', '.join(str(t.dtype) for t in (q, k, v))}")
    if q.shape[-1] > FLASH_WIDTH:
        problem = f"takes heads up to {FLASH_WIDTH} numbers wide, not {q.shape[-1]}"
    if problem:
        raise ConfigError(f"system.attention=triton {problem}; sdpa computes the same")
    if k.shape != v.shape or k.shape[:1] + k.shape[2:] != q.shape[:1] + q.shape[2:] \
            or q.shape[1] % k.shape[1]:
        raise ConfigError(f"q (B, H, T, E) takes k and v (B, G, T, E), G a divisor of H; got "
                          f"{', '.join(str(tuple(t.shape)) for t in (q, k, v))}")
    if INTERPRETED:
        from lpkit.kernels.interpreter import mend
        mend()


@operator("flash_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor? sinks, "
          "str rule) -> (Tensor, Tensor)", key=EVERY_DEVICE, fake=_results, product=True,
          flops=over_pairs(2))
def forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None,
            rule: str) -> tuple[Tensor, Tensor]:
    """Return (out, lse). lse (B, H, T) float32: the logarithm of the sum of exponentials of a
    query's scores, -inf for a query that sees no key. Raises ConfigError (`_check`)."""
    _check(q, k, v)
    out, lse = _results(q)
    if out.numel():
        given = _given(q, k, v, documents, in_words(rule), "forward")
        _forward[q.shape[0] * q.shape[1], triton.cdiv(q.shape[2], given["BLOCK_Q"])](
            **given, sinks=sinks, out=out, lse=lse)
    return out, lse


@operator("flash_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor? documents, "
          "Tensor? sinks, Tensor out, Tensor lse, str rule) "
          "-> (Tensor, Tensor, Tensor, Tensor)", key=EVERY_DEVICE, fake=_gradients,
          flops=over_pairs(5))
def backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
             sinks: Tensor | None, out: Tensor, lse: Tensor,
             rule: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dsinks); dsinks is empty without sinks."""
    _check(q, k, v)
    (B, H, T, E), G = q.shape, k.shape[1]
    dq, dk, dv, dsinks = _gradients(d_out, q, k, v, documents, sinks)
    deltas = torch.empty_like(lse)
    if out.numel():
        for which, kernel, heads, own in (
                ("queries", _backward_queries, B * H, {"out": out, "dq": dq}),
                ("keys", _backward_keys, B * G, {"dk": dk, "dv": dv})):
            given = _given(q, k, v, documents, in_words(rule), which)
            tiles = triton.cdiv(T, given["BLOCK_K" if which == "keys" else "BLOCK_Q"])
            kernel[heads, tiles](**given, **own, d_out=d_out, lse=lse, deltas=deltas,
                                 slope=1 / math.sqrt(E))
    if sinks is not None:
        # A sink has no value, so its dp is 0 and ds = p (0 - D). `shares` are its probabilities
        # (B, H, T); the gradient is summed over sequences and queries.
        shares = torch.exp(sinks.float()[:, None] - lse)
        dsinks.copy_(-(shares * deltas).sum((0, 2)))
    return dq, dk, dv, dsinks


class _Flash(torch.autograd.Function):
    """Flash attention by the kernels. A custom Function, because the operators have no
    derivative. It saves lse (B, H, T) instead of the scores (B, H, T, T)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
                sinks: Tensor | None, rule: str) -> Tensor:
        out, lse = forward(q, k, v, documents, sinks, rule)
        ctx.save_for_backward(q, k, v, documents, sinks, out, lse)
        ctx.rule = rule
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor):
        q, k, v, documents, sinks, out, lse = ctx.saved_tensors
        d_out = d_out.transpose(1, 2).contiguous().transpose(1, 2)      # the layout of `out`
        dq, dk, dv, dsinks = backward(d_out, q, k, v, documents, sinks, out, lse, ctx.rule)
        return dq, dk, dv, None, None if sinks is None else dsinks, None


@limited("triton")
def flash_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
                    sinks: Tensor | None = None, rule: Rule = CAUSAL) -> Tensor:
    """Return the same as `attention`, computed by the kernels, for heads up to FLASH_WIDTH wide in
    16 bits or float32. Raises ConfigError for other inputs."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    documents = documents.contiguous() if rule.documents else None
    return _Flash.apply(q, k, v, documents, sinks, rule.words)


# ---- examples, with which versions are verified

def _examples(rng: torch.Generator, device: torch.device):
    def arguments(B: int, H: int, G: int, T: int, E: int, dtype: torch.dtype, rule: Rule) -> tuple:
        q, k, v = (torch.randn(B, T, heads, E, generator=rng).to(device, dtype).transpose(1, 2)
                   for heads in (H, G, G))      # the strides of q, k and v after their product
        ids = torch.arange(T).expand(B, T) * 3 // max(T, 1) + torch.arange(B)[:, None]
        sinks = torch.randn(H, generator=rng).to(device) if rule.sinks else None
        return q, k, v, ids.to(device) if rule.documents else None, sinks, rule

    some = Rule(block=10, blocks=tuple(tuple(seen == "1" for seen in row) for row in (
        "10000", "11000", "11100", "10110", "10011")))
    for dtype in (torch.float32, torch.bfloat16):
        yield arguments(1, 2, 1, 123, 24, dtype, CAUSAL)
        yield arguments(2, 1, 1, 37, 16, dtype, Rule(window=5, global_tokens=2))
        yield arguments(2, 1, 1, 70, 80, dtype, Rule(documents=True))
        yield arguments(1, 1, 1, 65, 16, dtype, Rule(soft_cap=2.0))
        yield arguments(1, 1, 1, 45, 16, dtype, some)
        yield arguments(0, 2, 2, 8, 16, dtype, CAUSAL)
    # Sinks are tested in float32 only. The gradient of a sink is a difference of large sums. In 16
    # bits the rounding of `out`, which enters D, would dominate it.
    yield arguments(1, 2, 1, 9, 16, torch.float32, Rule(sinks=True))
    # the last 4 queries see no key
    nothing = Rule(block=4, blocks=((True, False), (False, False)))
    yield arguments(1, 1, 1, 8, 16, torch.float32, nothing)


FLASH_ATTENTION = Kernel(
    definition=attention, versions={"triton": flash_attention}, examples=_examples,
    # larger slack: p and ds are rounded before their products, and D is computed from the rounded
    # output
    gradients=(0, 1, 2, 4), slack=(4.0, 4.0))
