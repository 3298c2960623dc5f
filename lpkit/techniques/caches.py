"""The past keys and values that a model keeps while it generates: where, and in how many bits. No
torch.

A key or value is needed until no later query sees it. Then the next token takes its slot. So full
attention keeps every token of the context, a window keeps its size and the global tokens, and
blocks keep those that a later block sees. A kind with a state names another class in its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lpkit.errors import ConfigError
from lpkit.techniques.attention import Rule
from lpkit.techniques.row import Row


@dataclass(frozen=True, kw_only=True)
class CacheFormat(Row):
    """`group` adjacent numbers of a head's key or value share a scale and, if the codes have an
    offset, their minimum. The implementation is a `lpkit.nn.kv_cache.Stored`."""

    bits: int | None = None     # bits of a number; None: as computed
    group: int | None = None    # None: all numbers of a head
    offset: bool = False

    def groups(self, E: int) -> int:
        return -(-E // (self.group or E))


CACHES: dict[str, CacheFormat] = {
    "same": CacheFormat(why="keys and values as they were computed",
                        implementation="lpkit.nn.kv_cache:Stored"),
    "int8": CacheFormat(why="8 bits, a scale for each head of each token", bits=8,
                        implementation="lpkit.nn.kv_cache:Int8"),
    "int4": CacheFormat(why="4 bits, a scale and an offset for 32 numbers of a head", bits=4,
                        group=32, offset=True, implementation="lpkit.nn.kv_cache:Int4",
                        source="Liu et al. 2024 (KIVI), https://arxiv.org/abs/2402.02750, whose "
                        "values these are; its keys share scales over tokens instead"),
}


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of keys and values. The `first` tokens keep their slots; the others take turns.
    `table`: the slot of each token, if they do not take turns."""

    count: int
    first: int = 0
    table: tuple[int, ...] = ()

    def of(self, place: int) -> int:
        """Return the slot of the token at position `place`, from 0."""
        if self.table:
            return self.table[place]
        if place < self.first:
            return place
        return self.first + (place - self.first) % (self.count - self.first)


def refuse_keys_to_come(model: Any) -> None:
    """Raise ConfigError for attention that is not causal: a new token changes all earlier ones."""
    rule = model.attention.rule(model.T)
    if rule is not None and not rule.causal:
        raise ConfigError(f"model.attention={model.attention.name} sees tokens to come, so that a "
                          f"new one changes all before it, and nothing can be generated or cached; "
                          f"ask Training.logits about whole texts, or train a causal kind")


def slots(rule: Rule, tokens: int, first: int = 0) -> Slots:
    """Return slots for `first` tokens that stay (a prompt) and up to `tokens` others, of which the
    oldest are dropped. A rule with blocks has a table up to the end of the context, where its slots
    end too."""
    if rule.blocks is not None:
        return _of_blocks(rule, tokens)
    if rule.window is None:
        return Slots(count=first + tokens, first=first)
    first = min(rule.global_tokens, tokens - 1)
    return Slots(count=min(tokens, first + rule.window), first=first)


def _of_blocks(rule: Rule, tokens: int) -> Slots:
    """Give each block the place of a block that neither it nor a later block sees."""
    size, places, taken = rule.block, [], {}
    for a in range(-(-tokens // size)):
        taken = {b: at for b, at in taken.items() if any(row[b] for row in rule.blocks[a:])}
        taken[a] = min(set(range(len(taken) + 1)) - set(taken.values()))
        places.append(taken[a])
    table = tuple(places[p // size] * size + p % size for p in range(tokens))
    return Slots(count=max(table) + 1, table=table)
