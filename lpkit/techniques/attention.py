"""Kinds of attention: which keys a query sees, and how scores become weights. This module does not
import torch.

A kind (`model.attention`) changes the numbers that a model computes, so it belongs to the model. A
backend (`system.attention`) computes the same numbers in another way, so it belongs to the machine.

    softmax kinds   have a `Rule` for each context length. The attention weights are
                    softmax(cap(q k^T / sqrt(E))) over the keys that the rule allows. With sinks,
                    the softmax also includes a learned score that has no key. Every backend
                    computes a rule, or says why it cannot
    other kinds     have no rule. They store the past tokens in a state of constant size, and name
                    the backends that compute them
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lpkit.errors import ConfigError
from lpkit.techniques.row import Settings, TechniqueRow
from lpkit.values import Count, CountOrZero, Positive


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The keys that a query sees. By default, a query sees all keys up to its own position.

    causal          query i does not see a key j > i
    window          number of the latest keys that a query sees, with its own; None: all
    global_tokens   number of the first tokens of a sequence, which every query sees in addition to
                    its window (Longformer)
    block, blocks   queries and keys are divided into blocks of `block` tokens; queries of block a
                    see keys of block b if blocks[a][b] is true
    documents       a query sees only keys of its own document; the batch has the ids of documents
    soft_cap        a score s becomes soft_cap * tanh(s / soft_cap)
    sinks           each head has a learned score, which takes softmax weight but has no value
    query_start     position in the sequence of the first query; others follow it
    key_start       position in the sequence of the first key
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
            raise ConfigError("a window and blocks are of the past; give a causal rule only one of "
                              "the two, and a rule that is not causal neither of them")

    @functools.cached_property
    def words(self) -> str:
        """The rule as JSON. A custom operator of PyTorch takes strings, but not this object;
        `in_words` returns the rule again."""
        return json.dumps(asdict(self))

    @property
    def every_query_sees(self) -> bool:
        """True if each query sees at least one key. With a table of blocks, a query may see none:
        not even its own block."""
        return (not self.causal or self.query_start >= self.key_start) and (
            self.blocks is None or all(any(row[:a + 1]) for a, row in enumerate(self.blocks)))

    def sees(self, i: Any, j: Any) -> Any:
        """Return whether query i sees key j, ignoring documents. i and j are integers, or tensors
        that broadcast to the shape of the result."""
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
        """Return ranges (begin, end) of the T keys that together contain all keys that the queries
        first to last - 1 see. The ranges are in order and do not overlap. For example, with
        window=4, queries 8 to 9 see the keys 5 to 9:

        >>> Rule(window=4).spans(8, 10, 16)
        [(5, 10)]
        """
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
        """Return whether one of the queries first to last - 1 does not see one of the keys begin to
        end - 1, ignoring documents. If not, this tile of scores needs no mask."""
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
        """Return the number of pairs (query, key) in which the query sees the key, of T queries and
        T keys, ignoring documents.

        >>> Rule().pairs(4), Rule(window=2).pairs(4), Rule(causal=False).pairs(4)
        (10, 7, 16)
        """
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
        near = W * (W + 1) // 2 + (T - W) * W       # pairs inside the window
        # The `past` queries i >= W also see global tokens that are not in their window:
        # min(G, i - W + 1) of them. For the last `full` queries these are all G global tokens.
        past = max(0, T - W)
        full = max(0, past - G)
        return near + (past - full) * (past - full + 1) // 2 + full * G


EVERY_KEY = Rule(causal=False)


@functools.lru_cache
def in_words(words: str) -> Rule:
    """Return the rule that `Rule.words` has written."""
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
class AttentionKind(TechniqueRow):
    """A kind of attention. Its `settings` have `rule(context)`, which returns the Rule of a softmax
    kind, or None for another kind.

    implementation  f(ModelConfig) -> a module with the parameters that the kind needs in addition
                    to the projections of q, k and v. The module of a kind without softmax has a
                    method for each backend that computes the kind. To generate text, it has the
                    methods `state`, `after` (a prompt) and `step` (a token): see
                    `lessons.rows.linear_attention`
    operations      by backend, "package.module:name" of f(MicroBatch) -> Op
    products        "package.module:name" of f(MicroBatch) -> Ops: the module's own matmuls
    cache           "package.module:name" of the `lpkit.nn.kv_cache.Cache` for generation
    state_bytes     f(ModelConfig) -> bytes of the state of one layer for one sequence, which
                    replaces keys and values; None: the kind keeps keys and values
    reads_ids       the kind reads the ids of documents, which come with each batch
    """

    implementation: str = "lpkit.nn.attention:SoftmaxAttention"
    operations: Mapping[str, str] = field(default_factory=dict)
    products: str = ""
    cache: str = "lpkit.nn.kv_cache:KeysValues"
    state_bytes: Callable[[Any], int] | None = None
    reads_ids: bool = False


OPERATIONS = "lpkit.predict.attention:"
KINDS: dict[str, AttentionKind] = {
    "full": AttentionKind(why="a token sees itself and all tokens before it", settings=Softmax(),
                          source="Vaswani et al. 2017, https://arxiv.org/abs/1706.03762"),
    "window": AttentionKind(why="a token sees the latest tokens, and the first global_tokens",
                            settings=Window(),
                            source="Beltagy et al. 2020, https://arxiv.org/abs/2004.05150"),
    "documents": AttentionKind(why="a token sees only its own document of a packed sequence",
                               settings=Documents(), reads_ids=True,
                               source="Krell et al. 2021, https://arxiv.org/abs/2107.02027"),
}
