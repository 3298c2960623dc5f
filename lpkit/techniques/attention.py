"""Kinds of attention: which keys a query sees, and how scores become weights. No torch.

A kind (`model.attention`) changes what a model computes, so it belongs to the model. A backend
(`system.attention`) computes the same numbers in another way, so it belongs to the machine. Each
kind gives its `Rule` for a context. Every backend computes any rule, or says why it does not.

    softmax kinds   weights = softmax(cap(q k^T / sqrt(E)) over the keys that the rule allows, and
                    over a learned score without a key, if there are sinks)
    other kinds     have no rule. The past is a state of constant size, and each kind names the
                    backends that compute it
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lpkit.errors import ConfigError
from lpkit.techniques.row import Row, Settings
from lpkit.values import Count, CountOrZero, Positive


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The keys that a query sees. By default it sees all keys up to its own position.

    causal          later keys are left out, which means j > i for key j and query i
    window          a query sees this many keys, its own included; None: all
    global_tokens   the first tokens, which every query sees in addition (Longformer)
    block, blocks   queries and keys in blocks of `block`; blocks[a][b]: queries of block a see keys
                    of block b
    documents       a query sees only its own document, by ids that come with each batch
    soft_cap        scores s become soft_cap * tanh(s / soft_cap)
    sinks           each head has a learned score that takes weight and has no value
    query_start, key_start      the positions in the sequence where queries and keys begin
    """

    causal: bool = True
    window: int | None = None
    global_tokens: int = 0
    block: int = 0
    blocks: tuple[tuple[bool, ...], ...] | None = field(default=None, hash=False)   # large
    documents: bool = False
    soft_cap: float | None = None
    sinks: bool = False
    query_start: int = 0
    key_start: int = 0

    def __post_init__(self):
        for name in ("window", "soft_cap"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} of a rule must be above 0 or None, got {value}")
        if (not self.causal) + (self.window is not None) + (self.blocks is not None) > 1:
            raise ConfigError("a window and blocks are of the past; give a rule one of them, and "
                              "one that is not causal neither")

    @functools.cached_property
    def words(self) -> str:
        """The whole rule as a string, for operators, which take no objects; `in_words` reads it."""
        return json.dumps(asdict(self))

    @property
    def every_query_sees(self) -> bool:
        """True if each query sees at least one key. A table of blocks may leave out its own."""
        return (not self.causal or self.query_start >= self.key_start) and (
            self.blocks is None or all(any(row[:a + 1]) for a, row in enumerate(self.blocks)))

    def sees(self, i: Any, j: Any) -> Any:
        """Return whether query i sees key j, ignoring documents. Integers, or tensors that
        broadcast."""
        i, j = i + self.query_start, j + self.key_start
        seen = j <= i if self.causal else (i >= 0) & (j >= 0)
        if self.window is not None:
            seen = seen & ((i - j < self.window) | (j < self.global_tokens))
        if self.blocks is not None:
            a, b = i // self.block, j // self.block
            table = self.blocks[a][b] if isinstance(i, int) else i.new_tensor(self.blocks)[a, b] > 0
            seen = seen & table
        return seen

    def spans(self, first: int, last: int, T: int) -> list[tuple[int, int]]:
        """Return disjoint ranges of the T keys, in order, with all keys that queries first to
        last - 1 see."""
        if not self.causal:
            return [(0, T)]
        if self.query_start or self.key_start:
            of, begin = replace(self, query_start=0, key_start=0), self.key_start
            spans = of.spans(max(first + self.query_start, 0), last + self.query_start, begin + T)
            inside = [(max(a - begin, 0), min(b - begin, T)) for a, b in spans]
            return [(a, b) for a, b in inside if a < b]
        if self.blocks is None:
            start = 0 if self.window is None else max(0, first - self.window + 1)
            if self.global_tokens >= start:
                return [(0, last)]
            near = [(0, self.global_tokens)] if self.global_tokens else []
            return [*near, (start, last)]
        size, spans = self.block, []
        rows = self.blocks[first // size:(last - 1) // size + 1]
        for b in range((last - 1) // size + 1):
            if any(row[b] for row in rows):
                span = b * size, min(last, (b + 1) * size)
                if spans and spans[-1][1] == span[0]:
                    span = spans.pop()[0], span[1]
                spans.append(span)
        return spans

    def hides(self, first: int, last: int, begin: int, end: int) -> bool:
        """Return whether queries first to last - 1 and keys begin to end - 1 contain a pair that is
        left out, ignoring documents. If not, no mask is needed."""
        if not self.causal:
            return False
        first, last = first + self.query_start, last + self.query_start
        begin, end = begin + self.key_start, end + self.key_start
        if end - 1 > first:
            return True
        if self.window is not None and last - begin > self.window and end > self.global_tokens:
            return True
        if self.blocks is None:
            return False
        size = self.block
        return not all(all(row[begin // size:(end - 1) // size + 1])
                       for row in self.blocks[first // size:(last - 1) // size + 1])

    def pairs(self, T: int) -> int:
        """Return the number of visible (query, key) pairs in T x T, ignoring documents."""
        if not self.causal:
            return T * T
        if self.blocks is not None:
            total = 0
            for a in range(-(-T // self.block)):
                rows = min(self.block, T - a * self.block)
                total += rows * self.block * sum(self.blocks[a][:a])
                total += rows * (rows + 1) // 2 * self.blocks[a][a]
            return total
        if self.window is None:
            return T * (T + 1) // 2
        W, G = min(self.window, T), min(self.global_tokens, T)
        near = W * (W + 1) // 2 + (T - W) * W
        past = max(0, T - W)        # queries W, W + 1, ... see min(G, i - W + 1) more keys
        full = max(0, past - G)
        return near + (past - full) * (past - full + 1) // 2 + full * G


EVERY_KEY = Rule(causal=False)


@functools.lru_cache
def in_words(words: str) -> Rule:
    fields = json.loads(words)
    if fields["blocks"] is not None:
        fields["blocks"] = tuple(map(tuple, fields["blocks"]))
    return Rule(**fields)


@dataclass(frozen=True, kw_only=True)
class Softmax(Settings):
    """The settings of every softmax kind: a cap on scores, and sinks."""

    soft_cap: Positive | None = None    # Gemma 2 has 50
    sinks: bool = False                 # gpt-oss has them

    def rule(self, T: int) -> Rule:
        return Rule(soft_cap=self.soft_cap, sinks=self.sinks)


@dataclass(frozen=True, kw_only=True)
class Window(Softmax):
    size: Count = 256
    global_tokens: CountOrZero = 0

    def rule(self, T: int) -> Rule:
        return replace(super().rule(T), window=self.size, global_tokens=self.global_tokens)


@dataclass(frozen=True, kw_only=True)
class Documents(Softmax):
    def rule(self, T: int) -> Rule:
        return replace(super().rule(T), documents=True)


@dataclass(frozen=True, kw_only=True)
class AttentionKind(Row):
    """`settings` has `rule(context)`: the Rule of a softmax kind, else None.

    implementation  a module made of a ModelConfig, with what the kind has besides q, k and v. A
                    kind without softmax has a method for each backend that computes it. To generate
                    it has `state`, `after` (a prompt) and `step` (a token)
                    (`lessons.rows.linear_attention`)
    operations      "package.module:name" by backend: f(MicroBatch) -> Op
    products        "package.module:name" of the module's own products: f(MicroBatch) -> Ops
    cache           the dotted name of the `lpkit.nn.kv_cache.Cache` that generates with it
    state_bytes     f(ModelConfig) -> bytes of the state of a layer and a sequence, in place of k, v
    reads_ids       reads ids of documents, which come with each batch
    """

    implementation: str = "lpkit.nn.attention:Softmax"
    operations: Mapping[str, str] = field(default_factory=dict)
    products: str = ""
    cache: str = "lpkit.nn.kv_cache:KeysValues"
    state_bytes: Callable[[Any], int] | None = None
    reads_ids: bool = False


OPERATIONS = "lpkit.predict.attention:"
KINDS: dict[str, AttentionKind] = {
    "full": AttentionKind(why="every token so far", settings=Softmax(),
                 source="Vaswani et al. 2017, https://arxiv.org/abs/1706.03762"),
    "window": AttentionKind(why="the latest tokens, and the first ones where they are global",
                   settings=Window(),
                   source="Beltagy et al. 2020, https://arxiv.org/abs/2004.05150"),
    "documents": AttentionKind(why="the tokens of the same document, of several packed into a sequence",
                      settings=Documents(), reads_ids=True,
                      source="Krell et al. 2021, https://arxiv.org/abs/2107.02027"),
}
