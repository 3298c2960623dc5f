"""Attention that never stores the scores: FlashAttention-2 (Dao 2023,
https://arxiv.org/abs/2307.08691) for every `techniques.attention.Rule`, forward and backward.

    s = cap(q k^T / sqrt(E))    p = exp(s - lse)    lse = log sum exp(s) over the keys that are seen
    out = p v                   D = sum(d_out out)  ds = p (d_out v^T - D) cap'
    dq = ds k / sqrt(E)         dk = ds^T q / sqrt(E)           dv = p^T d_out

Forward: a program has a tile of queries and iterates over tiles of keys, with the online softmax of
Milakov and Gimelshein (2018, https://arxiv.org/abs/1805.02867). Exponentials are to base 2, and the
scale contains the factor log2(e). Backward recomputes the scores twice. One kernel iterates per
tile of queries and computes dq. The other one iterates per tile of keys and computes dk and dv,
summed over the query heads that share the keys. No two programs add to the same numbers, so the
same input gives the same bits.

Tiles without a visible pair are skipped, not masked. For causality, windows and documents, the
loops' bounds skip them (for documents by the smallest and the largest id of each tile); for tables
of blocks, lists do. Tiles in which all pairs are visible are computed without a mask.

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
    """The definition, in float32 (float64 if q is float64), rounded once. It stores the scores. A
    query that sees nothing gets zeros."""
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
    # hidden scores are finite: a row of -inf has a NaN softmax, and a NaN gradient
    weights = torch.where(seen, scores, torch.finfo(wide).min).softmax(-1) * seen
    return (weights[..., :T] @ v).to(q.dtype)


# ---- the kernels

# Facts that decide which pairs of a sequence b count, and how they score. None: not in this rule.
TileRule = namedtuple("TileRule", "b T documents window global_tokens table block across scale cap")


@jit
def _tile(start, place, stride, T, E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
          INSIDE: tl.constexpr):
    """Load rows `place`, place + 1, ... of a matrix (T, E), and zeros outside of it. INSIDE: no
    row is below the matrix."""
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
    row, e = tl.arange(0, ROWS), tl.arange(0, BLOCK_E)
    where = start + tl.cast(place, tl.int64) * stride + (row[:, None] * stride + e[None, :])
    inside = (place + row < T)[:, None] & (e < E)[None, :]
    tl.store(where, tile.to(start.dtype.element_ty), mask=inside)


@jit
def _places(place, rule, ROWS: tl.constexpr):
    """Return the places of a tile's tokens, and the document of each."""
    places = place + tl.arange(0, ROWS)
    ids = places
    if rule.documents is not None:
        ids = tl.load(rule.documents + rule.b * rule.T + places, mask=places < rule.T, other=-1)
    return places, ids


@jit
def _sums(lse, rows, T):
    """Load log-sums, to base 2. Outside of the matrix they are inf, so that exp(s - inf) is 0."""
    return tl.load(lse + rows, mask=rows < T, other=float("inf")) * 1.4426950408889634


@jit
def _seen(rows, columns, row_ids, column_ids, rule, MASKED: tl.constexpr):
    """`Rule.sees`, for queries and keys that broadcast."""
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
    """Return the scores times log2(e), and their tanh if the rule caps them."""
    scores = products * rule.scale
    reached = scores
    if rule.cap is not None:
        reached = 1.0 - 2.0 / (tl.exp2(scores) + 1.0)       # tanh
        scores = rule.cap * reached
    return scores, reached


@jit
def _slope(products, sums, values, deltas, seen, rule, MASKED: tl.constexpr):
    """Return (p, ds) from q k^T and d_out v^T, or from their transposes."""
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
    """Return which tiles of keys a tile of queries is computed with (BY_KEYS: which tiles of
    queries a tile of keys), as five bounds. Tiles before `far` (global tokens), from `low` to
    `near`, and from `whole` to `end` have hidden pairs and need a mask. Tiles from `near` to
    `whole` have none. With lists, the bounds are places in the lists."""
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
    far, low, near, whole, end = bounds
    count = far + near - low + end - whole if MASKED else whole - near
    # all heads of a group in one loop, so that loads of the next head overlap with the current one
    for n in range(repeats * count):
        i, h = (n % count, n // count) if BY_KEYS else (n, 0)
        at = near + i
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
    """Return `state` after all tiles that this tile is computed with: first those with a mask."""
    # MASKED is a constant of the kernel: the loop without a mask has no code for one
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
    """Add one tile of keys to the online softmax of a tile of queries."""
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
    # while all scores were -inf, a shift by -inf would give NaN
    shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    p = tl.exp2(scores - shift[:, None])
    # what was summed under the old maximum is rescaled to the new one: the online softmax
    before = tl.exp2(top - shift)
    values = _tile(v, place, v_t, rule.T, E, BLOCK_E, BLOCK_K, not MASKED)
    total = tl.dot(p.to(values.dtype), values, total * before[:, None], input_precision="ieee")
    return total, higher, weight * before + tl.sum(p, 1)


@jit
def _forward(q, k, v, documents, sinks, bound, tiles, counts, table, out, lse, q_b, q_h, q_t, k_b,
             k_h, k_t, v_b, v_h, v_t, T, H, repeats, window, global_tokens, block, across, listed,
             scale, cap, E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
             BLOCK_E: tl.constexpr):
    # the tiles with the most keys start first, so that the last programs to finish are short
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
    # where nothing was seen, weight is 0 and the log-sum -inf
    tl.store(lse + head * T + rows, (top + tl.log2(weight)) * 0.6931471805599453, mask=rows < T)


@jit
def _to_queries(state, operands, at, h, rule, MASKED: tl.constexpr, E: tl.constexpr,
                BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Add the share of one tile of keys to dq."""
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
    """Compute dq. Also stores D, which the other kernel reads."""
    head, tile = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h = head // H, head % H
    g, place, at_head = h // repeats, tile * BLOCK_Q, (b * T * H + h) * E
    rule = TileRule(b, T, documents, window, global_tokens, table, block, across, scale, cap)
    rows, ids = _places(place, rule, BLOCK_Q)
    grads = _tile(d_out + at_head, place, H * E, T, E, BLOCK_E, BLOCK_Q, False)
    output = _tile(out + at_head, place, H * E, T, E, BLOCK_E, BLOCK_Q, False)
    # D = sum(d_out out) is sum(p dp) over all keys, known before the first key (Dao et al.
    # 2022, appendix B.2)
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
    """Add one tile of queries to dk and dv. Scores are transposed, (keys, queries)."""
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

# BLOCK_Q, BLOCK_K, warps and stages of a program, by width, for 16-bit numbers. None of these
# spills registers on Hopper or Blackwell, for any rule (docs/kernels.md).
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
    """Return the tile sizes, warps and stages of a program."""
    block = max(16, triton.next_power_of_2(E))
    at = max(64, block * itemsize // 2)
    shape = (narrower and NARROWER.get(which, {}).get(at)) or SHAPES[which][at]
    names = "BLOCK_Q", "BLOCK_K", "num_warps", "num_stages"
    return {**dict(zip(names, shape, strict=True)), "BLOCK_E": block}


@functools.lru_cache(maxsize=64)
def _lists(rule: Rule, T: int, queries: int, keys: int, by_keys: bool,
           device: torch.device) -> dict[str, Any]:
    """Return the tiles that each tile of queries (by_keys: of keys) is computed with, (tiles,
    listed), those with a mask first; and the counts (tiles, 2): with a mask, and in all."""
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
    """Return whether tiles of queries and keys may share a document, (B, down, over)."""
    def ends(size: int) -> tuple[Tensor, Tensor]:
        T = documents.shape[1]
        places = torch.arange(-(-T // size) * size, device=documents.device).clamp(max=T - 1)
        return documents[:, places].unflatten(1, (-1, size)).aminmax(dim=-1)
    (least, most), (of_keys, until) = ends(queries), ends(keys)
    return (least[:, :, None] <= until[:, None]) & (of_keys[:, None] <= most[:, :, None])


def _given(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, rule: Rule,
           which: str) -> dict[str, Any]:
    """Return the arguments that all kernels have in common."""
    (_, H, T, E), G, by_keys = q.shape, k.shape[1], which == "keys"
    shape = _shape(which, E, rule.documents or rule.blocks is not None, q.itemsize)
    queries, keys = shape["BLOCK_Q"], shape["BLOCK_K"]
    log2e, cap, soft_cap = math.log2(math.e), None, rule.soft_cap
    scale = 1 / math.sqrt(E) * log2e
    if soft_cap is not None:    # cap tanh(s / cap); tanh is computed from exp2(2 log2e s / cap)
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
        meet = _meet(documents, queries, keys).int()
        bound = meet.shape[1] - 1 - meet.flip(1).argmax(1) if by_keys else meet.argmax(2)
        given["bound"] = bound.int()
    return given


def _like(q: Tensor) -> Tensor:
    B, H, T, E = q.shape
    return q.new_empty(B, T, H, E).transpose(1, 2)


def _results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
               sinks: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*map(_like, (q, k, v)), q.new_empty(0) if sinks is None else torch.empty_like(sinks))


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    problem = why_no_triton()
    if not problem and not q.is_cuda and not INTERPRETED:
        problem = f"needs a GPU, or TRITON_INTERPRET=1, and tensors are on {q.device}"
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
    query's scores, -inf for a query that sees nothing. Raises ConfigError (`_check`)."""
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
        # a sink's value is 0, so dp is 0 and ds = -p D, summed over sequences and queries
        shares = torch.exp(sinks.float()[:, None] - lse)
        dsinks.copy_(-(shares * deltas).sum((0, 2)))
    return dq, dk, dv, dsinks


class _Flash(torch.autograd.Function):
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
    """Compute `attention`, for heads up to 256 wide in 16 bits or float32. Raises ConfigError."""
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
    # D is a sum over a rounded `out`. A sink's gradient, a difference of large sums, would show it
    # in 16 bits.
    yield arguments(1, 2, 1, 9, 16, torch.float32, Rule(sinks=True))
    # the last 4 queries see no key
    nothing = Rule(block=4, blocks=((True, False), (False, False)))
    yield arguments(1, 1, 1, 8, 16, torch.float32, nothing)


FLASH_ATTENTION = Kernel(
    definition=attention, versions={"triton": flash_attention}, examples=_examples,
    # p and ds are rounded for their products, and D is a sum over a rounded output
    gradients=(0, 1, 2, 4), slack=(4.0, 4.0))
