"""Attention as operations, and who computes it: the backends of `system.attention`. No torch.

Each says what it saves, moves and computes of a micro-batch (`Op`), and why it cannot, where it
cannot. `attention.KINDS` has the kinds; those without softmax name operations of here.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name
from typing import Any, Literal

from lpkit.errors import ConfigError, pick
from lpkit.techniques.attention import EVERY_KEY, KINDS, Rule
from lpkit.techniques.operation import FP32, POSITIONS, Hold, Kind, MicroBatch, Op, Pairs, linear

BLOCKED_CONTEXT = 1024      # tokens, of full attention in 16 bits on a CPU
QUERY_BLOCK = 128           # queries that blocked attention takes at a time
CHUNK = 64                  # tokens between two states of attention without softmax
TILE = 128                  # queries, and keys, that tiled attention takes at a time
SCORES = 2**18              # and their scores: a core's cache holds them
FLASH_WIDTH = 256           # of a head, that a program of the kit's flash attention holds
FLASH_TILE = 128, 64        # queries and keys that it takes at a time
AMPERE = 8, 0


@dataclass(frozen=True, kw_only=True)
class Attending:
    """The task that a backend is asked to do. `model` is a ModelConfig, whose heads are E numbers
    wide and share G keys and values. `here`: on this machine, so that what is not installed cannot;
    `capability`: of its GPU, where it is known."""

    model: Any
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "gpu"] = "cpu"
    here: bool = False
    capability: tuple[int, int] | None = None
    interpreter: bool = False       # Triton's stands in for a GPU: far too slow for auto

    @property
    def rule(self) -> Rule | None:
        """None: a kind without softmax, which `why_not` answers for."""
        return self.model.attention.rule(self.model.T)


@dataclass(frozen=True, kw_only=True)
class Backend(Kind):
    """`why_not`: why it cannot, in one clause, and the nearest that can; empty: it can. Asked of
    softmax kinds alone. No `implementation`: computes none of these.

    assumed:  predictions may take it for `auto`; others have to be verified and raced first.
    rounding: of what it casts to fewer bits by design, relative; such a one is used by name alone.
    partial:  a `contracts.Partial`, by which parts of the keys can be combined; "": it has none.
    """

    why_not: Callable[[Attending], str] = lambda asked: ""
    assumed: bool = True
    rounding: float = 0.0
    partial: str = ""


HALF = ("bfloat16", "float16")
WORDS = {"causal": "attention to keys to come", "window": "windows",
         "global_tokens": "global tokens", "blocks": "sparse blocks", "documents": "documents",
         "soft_cap": "cap on scores", "sinks": "sinks"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A row's `why_not`, from what its library takes. Softmax kinds alone."""

    rule: tuple[str, ...] = ()          # of WORDS, what it computes besides full attention
    gpu_alone: str = "runs on a GPU alone"
    dtypes: tuple[str, ...] = HALF
    widest: int = 0                     # head; 0: any. Multiples of `multiple`
    multiple: int = 1
    capability: tuple[int, int] = (0, 0)
    package: str = ""                   # that has to be installed

    def __call__(self, asked: Attending) -> str:
        problem = next(self._problems(asked), "")
        return f"{problem}; {nearest(asked)} can" if problem else ""

    def _problems(self, asked: Attending) -> Iterator[str]:
        m, rule = asked.model, asked.rule
        if asked.device != "gpu":
            yield self.gpu_alone
        if asked.here and self.package and not _installed(self.package):
            yield f"needs the package {self.package}, which is not installed here"
        if asked.capability is not None and asked.capability < self.capability:
            yield "needs compute capability {}.{}, and here is {}.{}".format(*self.capability,
                                                                             *asked.capability)
        if asked.dtype not in self.dtypes:
            yield f"takes {' or '.join(self.dtypes)}, not {asked.dtype}"
        for name, word in WORDS.items():
            if name not in self.rule and getattr(rule, name) != getattr(FULL, name):
                yield f"has no {word}"
        if (self.widest and m.E > self.widest) or m.E % self.multiple:
            room = f"up to {self.widest}" if self.widest else "wide"
            kind = f" that are multiples of {self.multiple}" if self.multiple > 1 else ""
            yield f"takes heads {room}{kind}, not {m.E}"


FULL = Rule()


@functools.cache
def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def nearest(asked: Attending) -> str:
    """A backend that can, and needs nothing: PyTorch's own before the others."""
    able = [name for name, row in ATTENTION.items()
            if row.assumed and not why_not(name, asked)]
    return "sdpa" if "sdpa" in able else able[-1]


# q, k and v come out of one product. v is a view of it, and so are q and k unless
# positions or norms make them anew; but the queries of several groups do not lie side by side and
# are copied. One view keeps the whole product alive.

def _attention(s: MicroBatch, *, numbers: int, views: int, saved: float, work: float, out: float,
               saves_result: bool = False, pairs: tuple[Pairs, ...] = (), gates: int = 0,
               **facts: Any) -> Op:
    """`numbers` are saved for each token, `views` of them with q, k and v, and `gates` besides.
    Backward holds `work`,
    and makes `out` bytes of gradients of q, k and v; they are turned back in float32, with halves
    exchanged; then their parts and the whole lie side by side."""
    m, tokens, compute = s.model, s.tokens, s.compute_bytes
    whole, given = tokens * _qkv(m) * compute, tokens * m.H * m.E * compute
    turned = POSITIONS[m.position].turns
    turn = tokens * m.H * m.E * (2 * s.residual_bytes + compute) if turned else 0
    held = tokens * numbers * compute + saved
    if s.attends_again:
        work += held - tokens * views * compute
        held, saves_result = tokens * _given(s) * compute, False
    held += tokens * gates * compute
    return Op(name="attention", part="attention", saved_itemsize=compute, saved_bytes=held,
              params=m.H if getattr(m.attention, "sinks", False) else 0,
              saves_result=saves_result,
              pairs=pairs or (Pairs(name="scores", M=m.T, N=m.T, K=m.E, group=s.batch * m.H),
                              Pairs(name="values", M=m.T, N=m.E, K=m.T, group=s.batch * m.H)),
              moved_bytes=2 * tokens * (m.H + m.G) * m.E * compute if turned else 0,
              backward=(Hold(nbytes=work, frees=1.0, grows=out - given),
                        Hold(nbytes=turn, grows=whole - out)), **facts)


def sdpa(s: MicroBatch) -> Op:
    """A flash kernel: q, k, v, the output, and a float32 log-sum per query instead of T scores.
    What is not causal alone is a mask of the scores' dtype, and every pair is computed."""
    m, views, masked = s.model, _given(s), s.rule not in (Rule(), EVERY_KEY)
    sums, grads = s.tokens * m.H * FP32, s.tokens * _qkv(m) * s.compute_bytes
    mask = s.masked_pairs * s.compute_bytes if masked else 0
    return _attention(s, numbers=views + m.H * m.E, views=views, saved=sums + mask, work=grads,
                      out=grads, saves_result=True,
                      pairs_share=(m.T + 1) / (2 * m.T) if s.rule == Rule() else 1.0,
                      backward_pairs=2.5,       # scores once more
                      result_bytes=s.tokens * m.H * m.E * s.compute_bytes + sums)


def tiled(s: MicroBatch) -> Op:
    """Keeps what sdpa keeps. Backward holds three tiles of scores, and one that the next tile will
    free, beside those of queries and keys, and sums gradients of k and v, all in float32."""
    m, T, views = s.model, int(s.model.T), _given(s)
    sums, grads = s.tokens * m.H * FP32, s.tokens * _qkv(m) * s.compute_bytes
    side = min(TILE, T)
    copied = 6 if s.compute_bytes < FP32 or m.G < m.H else 4    # of queries and keys
    wide = FP32 // s.compute_bytes
    at_work = s.batch * m.H * side * FP32 * ((3 + (T >= 2 * TILE)) * side + copied * m.E)
    summed = 2 * s.tokens * m.G * m.E * FP32 if s.compute_bytes < FP32 else 0
    rule = m.attention.rule(T)
    pairs = sum((min(first + TILE, T) - first) * (end - begin) for first in range(0, T, TILE)
                for begin, end in rule.spans(first, min(first + TILE, T), T))
    return _attention(s, numbers=views + m.H * m.E, views=views, saved=sums, out=grads,
                      work=grads + summed + at_work, saves_result=True,
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
    q = _qkv(m) if is_view else heads
    probability = s.compute_bytes
    if s.kind == "gpu" and s.compute_bytes < FP32:
        probability += FP32
    pairs, given = s.batch * m.H * m.T * m.T, s.tokens * heads * s.compute_bytes
    saved = s.masked_pairs + (pairs + s.tokens * m.H * s.rule.sinks) * probability
    if s.rule.soft_cap is not None:
        saved += pairs * s.compute_bytes
    return _attention(s, numbers=q + 2 * heads, views=q if is_view else 0,
                      saved=saved, out=3 * given,
                      work=given + 2 * pairs * s.compute_bytes, score_passes=(6, 12))


@functools.lru_cache(maxsize=64)
def query_blocks(rule: Rule, T: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Queries from first to last - 1, and the spans of keys that they meet."""
    blocks = [(i, min(i + QUERY_BLOCK, T)) for i in range(0, T, QUERY_BLOCK)]
    return [(first, last, rule.spans(first, last, T)) for first, last in blocks]


def masked(rule: Rule, first: int, last: int, spans: list[tuple[int, int]],
           hides: Callable[[int, int], bool] = lambda begin, end: False) -> list[tuple[int, int]]:
    """Returns these spans, from the first on that hides a key from a query of first to last - 1 by
    the rule, documents apart, or by `hides`: a mask is for them alone."""
    parts = [part for a, b in spans for part in ((a, min(b, first)), (max(a, first), b))
             if part[0] < part[1]]
    while parts and not (rule.hides(first, last, *parts[0]) or hides(*parts[0])):
        parts.pop(0)
    return parts


def _count(spans: list[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)


@functools.lru_cache(maxsize=64)
def most_scores(rule: Rule, T: int) -> int:
    """Returns the most scores that one of a head's blocks of queries makes."""
    return max((last - first) * _count(spans) for first, last, spans in query_blocks(rule, T))


def at_once(rule: Rule, T: int, sequences: int, groups: int, repeats: int) -> tuple[int, int]:
    """Sequences and groups of heads that blocked attention takes at a time."""
    one = max(1, SCORES // (repeats * max(1, most_scores(rule, T))))
    if one < groups or rule.documents:
        return 1, min(one, groups)
    return min(one // groups, sequences), groups


def blocked(s: MicroBatch, *, wide: bool = False) -> Op:
    """q, k, v and a log-sum per query, as a flash kernel, but not the output: the product after it
    saves that. At work: copies of some heads' k and v, their gradients, the rows of one block, and
    two blocks of scores; and masks, a byte a pair. Of the pairs, the spans that blocks of queries
    meet: documents count as one, which has the most."""
    m, rule, T, repeats = s.model, s.rule, int(s.model.T), s.model.H // s.model.G
    B, G, itemsize = int(s.batch), int(m.G), FP32 if wide else s.compute_bytes
    views, grads = _given(s), s.tokens * _qkv(m) * s.compute_bytes
    pairs = masks = near = 0
    for first, last, spans in query_blocks(rule, T):
        pairs += (last - first) * _count(spans)
        masks += (last - first) * _count(masked(rule, first, last, spans))
        near = max(near, _count(spans) * (len(spans) > 1))      # a copy, where they lie apart
    groups = math.prod(at_once(rule, T, B, G, repeats))
    # what is between the products is one pass in place on a CPU, and its definition elsewhere
    scores, passes = (2, (4, 8)) if s.kind == "cpu" else (5, (10, 14))
    rows = repeats * min(QUERY_BLOCK, T)        # of queries, and of gradients that come and go
    copies = 4 * T + 2 * rows + max(2 * near, near + rows)
    work = masks + groups * itemsize * (
        m.E * copies + scores * repeats * most_scores(rule, T))
    return _attention(s, numbers=views, views=views, saved=s.tokens * m.H * FP32,
                      work=grads + work, out=grads, pairs_share=pairs / T**2, backward_pairs=2.5,
                      score_passes=passes)


# Attention without softmax. What is over pairs of tokens is over pairs in a chunk; with the state,
# (F, E), each token meets F x E numbers twice.

def chunk_of(T: int) -> tuple[int, int]:
    """Tokens of a chunk, and of all chunks: the last is filled up."""
    C = max(1, min(CHUNK, T))
    rest = T % C
    return C, T - rest + C if rest else T


def linear_pairs(B: int, H: int, G: int, T: int, E: int, features: int) -> tuple[Pairs, ...]:
    """Lists the products of linear attention in chunks; a column of ones is beside the values."""
    C = chunk_of(T)[0]
    return _in_each_chunk(B, T, ("scores", H, C, C, features), ("values", H, C, E + 1, C),
                          ("states", G, features, E + 1, C), ("read", H, C, E + 1, features))


def delta_pairs(B: int, H: int, G: int, T: int, E: int) -> tuple[Pairs, ...]:
    """Lists the products of the delta rule in chunks; a triangular system counts as a product."""
    C = chunk_of(T)[0]
    return _in_each_chunk(B, T, ("scores", H, C, C, E), ("values", H, C, E, C),
                          ("overlaps", G, C, C, E), ("system", G, C, 2 * E, C),
                          ("read", H, C, E, E), ("replaced", G, C, E, E), ("states", G, E, E, C))


def _in_each_chunk(B: int, T: int, *products: tuple[str, int, int, int, int]) -> tuple[Pairs, ...]:
    """Makes the Pairs of products given by name, heads, M, N, K."""
    C, padded = chunk_of(T)
    return tuple(Pairs(name=name, M=M, N=N, K=K, group=B * padded // C * heads)
                 for name, heads, M, N, K in products)


def _in_chunks(s: MicroBatch, *, pairs: tuple[Pairs, ...], moves: int, work: float,
               **facts: Any) -> Op:
    """An operator that keeps what it is given and works in float32: forward `moves` numbers for
    each token, and backward holds `work` numbers at the most, its gradients among them."""
    padded = chunk_of(s.model.T)[1]
    grads = s.tokens * _qkv(s.model) * s.compute_bytes
    op = _attention(s, views=_given(s), work=FP32 * work, out=grads, pairs=pairs,
                    score_passes=(4, 8), **facts)
    return replace(op, moved_bytes=op.moved_bytes + grads + s.batch * padded * moves * FP32)


def linear_chunks(s: MicroBatch) -> Op:
    """Sums over the past, from chunk to chunk: q, k, v, the output, and a float32 normaliser per
    query, which is the sum of a column of ones beside the values. The most of backward is where
    the gradient of q, or of k, goes back through its features."""
    m, T, (C, padded) = s.model, s.model.T, chunk_of(s.model.T)
    F, drawn = getattr(m.attention, "features", m.E), hasattr(m.attention, "features")
    keys = padded * (T != padded or (s.batch > 1 and not drawn))    # else a view, and so for q
    queries = padded if m.G < m.H else keys
    last = [max(F, drawn * wide * m.E) for wide in (2, 3)]      # FAVOR+ goes back by a product
    common = m.H * queries * F + m.G * keys * F + padded * (m.G * F + (m.H + 2 * m.G) * (m.E + 1))
    common += 2 * m.H * padded * C + m.G * (2 * padded / C + 1) * F * (m.E + 1)
    common += (s.compute_bytes < FP32) * m.H * T * m.E
    through_q = m.H * (padded * F + T * (3 * F + last[0])) + m.G * T * F
    through_k = m.H * T * (F + m.E) + m.G * T * (3 * F + last[1])
    return _in_chunks(s, pairs=linear_pairs(s.batch, m.H, m.G, T, m.E, F),
                      moves=(m.H + m.G) * (4 * F + m.E),
                      work=s.batch * (common + max(through_q, through_k)),
                      numbers=_given(s) + m.H * m.E, saved=s.tokens * m.H * FP32,
                      saves_result=True, backward_pairs=2.5)


def delta_chunks(s: MicroBatch) -> Op:
    """The delta rule: a triangular system in each chunk, then from state to state; keeps q, k, v
    and the gates. The most of backward is where the gradient of q goes back through its length, or
    before, where that of k is summed."""
    m, T, (C, padded) = s.model, s.model.T, chunk_of(s.model.T)
    narrow = s.compute_bytes < FP32
    shared = (s.batch == 1 and T == padded) * (2 - narrow) * (m.G + m.H * (m.G == m.H))    # views
    common = T * (m.H + m.G) * m.E + padded * (3 * m.H + 15 * m.G - shared) * m.E
    common += padded * (2 * m.H + 4 * m.G) * C + m.G * m.E**2 * (3 * padded / C + 1)
    common += padded * 5 * m.G                                  # gates
    most = max(T * (6 + narrow) * m.H * m.E, padded * m.G * (m.E + C))
    return _in_chunks(s, pairs=delta_pairs(s.batch, m.H, m.G, T, m.E),
                      moves=(4 * m.H + 11 * m.G) * m.E, work=s.batch * (common + most),
                      numbers=_given(s), saved=0, gates=m.G, backward_pairs=2.75)


def quadratic(s: MicroBatch) -> Op:
    """The definition of kinds that sum over the past: features, and the weights of all pairs, in
    float32."""
    m = s.model
    features = getattr(m.attention, "features", m.E)
    pairs = s.batch * m.H * m.T * m.T * FP32
    mapped = 4 * s.tokens * m.H * (features + m.E) * FP32
    given = s.tokens * m.H * m.E * s.compute_bytes
    return _attention(s, numbers=_given(s), views=_given(s), saved=pairs + mapped, out=3 * given,
                      work=2 * pairs + mapped, score_passes=(6, 8), pairs=(
                          Pairs(name="scores", M=m.T, N=m.T, K=features, group=s.batch * m.H),
                          Pairs(name="values", M=m.T, N=m.E, K=m.T, group=s.batch * m.H)))


def delta_steps(s: MicroBatch) -> Op:
    """The delta rule token by token: each keeps the state that it leaves, in float32."""
    m, grads = s.model, s.tokens * _qkv(s.model) * s.compute_bytes
    states = s.tokens * m.G * m.E * m.E * FP32
    mapped = 2 * s.tokens * _qkv(m) * FP32
    return _attention(s, numbers=_given(s), views=_given(s), saved=states + mapped, gates=m.G,
                      work=grads, out=grads, score_passes=(5, 8), pairs=(
                          Pairs(name="states", M=m.T * m.E, N=m.E, K=1, group=s.batch * m.G),
                          Pairs(name="replaced", M=m.T, N=m.E, K=m.E, group=s.batch * m.G),
                          Pairs(name="read", M=m.T, N=m.E, K=m.E, group=s.batch * m.H)))


def delta_gates(s: MicroBatch) -> Iterator[Op]:
    """One number for each token and key/value head, of the input that q, k and v are made of."""
    m, wide = s.model, s.tokens * s.model.D * s.residual_bytes
    yield Op(name="attention.kind", part="", backward=(Hold(grows=-wide),))    # both are added up
    yield linear("attention.kind.beta", s, m.D, m.G, cut="column", bias=m.bias,
                 input_is_saved=not s.mixed)


def _qkv(m: Any) -> int:
    return (m.H + 2 * m.G) * m.E


def _kept_qkv(s: MicroBatch) -> int:
    """Numbers of a token's q, k and v that attention is the first to save."""
    return 0 if s.norms_save_qkv else _qkv(s.model)


def _given(s: MicroBatch) -> int:
    """Numbers of a token's q, k and v as attention has them: views, but for those made anew."""
    m = s.model
    turned = (m.H + m.G) * m.E if s.turns else m.H * m.E if 1 < m.G < m.H else 0
    return _kept_qkv(s) + turned


def head_norms(s: MicroBatch) -> Iterator[Op]:
    """An RMSNorm of each head's q, and one of its k (Qwen3, https://arxiv.org/abs/2505.09388).
    Saves its input, a number of each head, and, on a CPU, what it makes of its input."""
    m, tokens, grouped = s.model, s.tokens, 1 < s.model.G < s.model.H
    product = tokens * _qkv(m) * s.compute_bytes
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


def fp8(s: MicroBatch) -> Op:
    """Does as plain, emulated: q, k, v and the probabilities are copied when they are cast."""
    m, heads = s.model, s.model.H * s.model.E
    pairs, given = s.batch * m.H * m.T * m.T, s.tokens * heads * s.compute_bytes
    softmax = FP32 if s.kind == "gpu" and s.compute_bytes < FP32 else 0
    return _attention(s, numbers=3 * heads, views=0, out=3 * given,
                      saved=m.T * m.T + pairs * (2 * s.compute_bytes + softmax),
                      work=given + 2 * pairs * s.compute_bytes, score_passes=(10, 12))


def attention(s: MicroBatch) -> Iterator[Op]:
    """Yields all its operations, from the residual stream back to what is added to it."""
    m, kind = s.model, KINDS[s.model.attention.name]
    attend = ATTENTION[s.attention].operations
    if kind.operations:     # the last, where the backend does not matter
        attend = resolve_name(kind.operations.get(s.attention, [*kind.operations.values()][-1]))
    attend = attend(s)
    if kind.products:
        yield from resolve_name(kind.products)(s)
    yield linear("attention.qkv", s, m.D, _qkv(m), cut="column", bias=m.biased_qkv)
    parts = Hold(nbytes=s.tokens * _qkv(m) * s.compute_bytes)      # beside the whole, in backward
    yield Op(name="attention.split", part="", backward=(parts,))
    if m.qk_norm:
        yield from head_norms(s)
    yield attend
    yield linear("attention.out", s, m.H * m.E, m.D, cut="row", bias=m.bias,
                 input_is_saved=attend.saves_result)


def _no_scores_changed(asked: Attending) -> str:
    rule = asked.rule
    if rule.soft_cap is not None:
        return "cannot cap scores; plain can"
    return "has no sinks; plain has" if rule.sinks else ""


def _needs_a_gpu(asked: Attending) -> str:
    if not asked.rule.causal:
        return "sees no keys to come; plain does"
    if asked.device == "cpu" and not asked.interpreter:
        return "needs a GPU, or TRITON_INTERPRET=1; plain can"
    if asked.capability and asked.capability < AMPERE:      # 64 KB a program, and it takes 96
        return "needs compute capability {}.{}, and here is {}.{}; plain can".format(
            *AMPERE, *asked.capability)
    wide = asked.model.E > FLASH_WIDTH
    return f"takes heads up to {FLASH_WIDTH} wide, not {asked.model.E}; plain can" * wide


MASKS = ("window", "global_tokens", "blocks", "documents")
ATTENTION: dict[str, Backend] = {
    "plain": Backend(why="the definition", operations=plain,
                     implementation="lpkit.nn.attention:plain",
                     partial="lpkit.nn.attention:plain_partial"),
    "tiled": Backend(why="tiles of queries and keys, in PyTorch: FlashAttention, to be read",
                     operations=tiled, implementation="lpkit.kernels.tiled_attention:tiled",
                     partial="lpkit.kernels.tiled_attention:tiled_partial",
                     source="Dao et al. 2022, https://arxiv.org/abs/2205.14135"),
    "blocked": Backend(why="blocks of queries, in 16 bits where they are", operations=blocked,
                       implementation="lpkit.kernels.blocked_attention:blocked"),
    "blocked-wide": Backend(why="the same, multiplied in float32 whatever it is given",
                            operations=functools.partial(blocked, wide=True), assumed=False,
                            implementation="lpkit.kernels.blocked_attention:blocked_wide"),
    "sdpa": Backend(why="PyTorch's fused kernels", operations=sdpa,
                    implementation="lpkit.nn.attention:sdpa", why_not=_no_scores_changed,
                    source="Dao et al. 2022, https://arxiv.org/abs/2205.14135"),
    "triton": Backend(why="the kit's own flash kernel, of every kind", operations=flash,
                      implementation="lpkit.kernels.flash_attention:flash_attention",
                      why_not=_needs_a_gpu, source="Dao 2023, https://arxiv.org/abs/2307.08691"),
    # kernels that PyTorch does not choose by itself
    "sdpa-cudnn": Backend(
        why="cuDNN's kernel, or none", operations=sdpa, assumed=False,
        implementation="lpkit.nn.library_attention:sdpa_cudnn",
        why_not=Limits(rule=MASKS, widest=256, multiple=8, capability=(8, 0)),
        source="https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html"),
    "sdpa-fa3": Backend(
        why="FlashAttention 3 in the place of PyTorch's flash kernel", operations=sdpa,
        assumed=False, implementation="lpkit.nn.library_attention:sdpa_fa3",
        why_not=Limits(widest=256, multiple=8, capability=(9, 0), package="flash_attn_3"),
        source="Shah et al. 2024, https://arxiv.org/abs/2407.08608"),
    "flex": Backend(
        why="FlexAttention, compiled for the mask", operations=sdpa, assumed=False,
        implementation="lpkit.nn.library_attention:flex",
        why_not=Limits(rule=tuple(WORDS), dtypes=("float32", *HALF),
                       gpu_alone="has no backward on a CPU"),
        source="Dong et al. 2024, https://arxiv.org/abs/2412.05496"),
    "varlen": Backend(
        why="PyTorch's flash kernel over packed sequences", operations=sdpa, assumed=False,
        implementation="lpkit.nn.library_attention:varlen",
        why_not=Limits(rule=("window", "documents"), widest=256, multiple=8, capability=(8, 0)),
        source="https://docs.pytorch.org/docs/stable/nn.attention.varlen.html"),
    "flash-attn": Backend(
        why="the flash-attn package, version 2", operations=sdpa, assumed=False,
        implementation="lpkit.nn.library_attention:flash_attn",
        why_not=Limits(rule=("window", "documents", "soft_cap"), widest=256, capability=(8, 0),
                       package="flash-attn"),
        source="Dao 2023, https://arxiv.org/abs/2307.08691"),
    "flash-attn-4": Backend(
        why="the flash-attn-4 package, for Hopper and Blackwell", operations=sdpa, assumed=False,
        implementation="lpkit.nn.library_attention:flash_attn_4",
        why_not=Limits(rule=("window", "documents", "soft_cap", "sinks"), widest=256, multiple=8,
                       capability=(9, 0), package="flash-attn-4"),
        source="https://github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute"),
    "fp8": Backend(
        why="q, k, v and the probabilities in E4M3, emulated", operations=fp8, assumed=False,
        rounding=2**-4, implementation="lpkit.nn.library_attention:fp8",
        source="Shah et al. 2024, https://arxiv.org/abs/2407.08608"),
    "chunked": Backend(why="chunks of tokens and a state between them, for kinds without softmax",
                       operations=linear_chunks,
                       why_not=lambda asked: "computes kinds without softmax alone; plain computes "
                       "every kind"),
}


def why_not(name: str, asked: Attending) -> str:
    """Says why a backend cannot, in one clause, and the nearest that can; empty: it can."""
    able = KINDS[asked.model.attention.name].operations
    if not able:
        return ATTENTION[name].why_not(asked)
    if name in able:
        return ""
    return f"computes softmax attention alone; {' and '.join(able)} can"


def interpreted(asked: str) -> bool:
    return asked != "auto" and os.environ.get("TRITON_INTERPRET") == "1"


def choose_attention(asked: str, *, device: str, low_precision: bool, model: Any,
                     tiles: bool = False) -> tuple[str, str]:
    """The backend on a kind of device, and why, where nothing is raced. `tiles`: this CPU has units
    that multiply tiles of bf16 (AMX). See `lpkit bench attention-cpu`. Raises ConfigError for one
    that cannot."""
    given = Attending(model=model, dtype="bfloat16" if low_precision else "float32",
                      device="cpu" if device == "cpu" else "gpu",
                      interpreter=interpreted(asked))
    if asked != "auto":
        pick(ATTENTION, asked, "system.attention")
        if problem := why_not(asked, given):
            raise ConfigError(f"system.attention={asked} {problem}")
        return asked, "asked for"
    if device == "cpu" and given.rule not in (None, Rule(), EVERY_KEY):
        return "blocked", f"it skips what {model.attention.name} attention leaves out"
    if given.rule != Rule():
        able = [name for name, row in ATTENTION.items()
                if row.assumed and not why_not(name, given)]
        return able[-1], f"of {', '.join(able)}, which compute {model.attention.name} attention"
    if device == "cpu" and low_precision and model.T <= BLOCKED_CONTEXT and not tiles:
        return "blocked", ("without AMX, blocks of low-precision products are faster than PyTorch's "
                           "CPU flash kernel")
    return "sdpa", "PyTorch picks the fastest fused kernel for this device and dtype"
