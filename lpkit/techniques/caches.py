"""The key/value cache of generation: how many bits a number has, and which slot each token gets.
This module does not import torch.

A key and a value are needed as long as a later query sees them. Then a new token can take their
slot. So full attention keeps a slot for each token of the context; window attention, for the tokens
of the window and the global tokens; block-sparse attention, for the tokens of blocks that a later
block sees. A kind of attention with a state has its own cache class in its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lpkit.errors import ConfigError
from lpkit.techniques.attention import Rule
from lpkit.techniques.row import TechniqueRow


@dataclass(frozen=True, kw_only=True)
class CacheFormat(TechniqueRow):
    """A format in which keys and values are stored. The implementation is a subclass of
    `lpkit.nn.kv_cache.Stored`."""

    bits: int | None = None     # bits of a code; None: numbers are stored as they were computed
    group: int | None = None    # adjacent numbers that share a scale; None: all E of a head
    offset: bool = False        # a group also stores its minimum, to which its codes are relative

    def groups(self, E: int) -> int:
        """Return the number of groups in the key of a head with E dimensions."""
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
    """Which of the `count` slots of a cache each token gets. The `first` tokens keep their slots.
    The other slots are used in turn, so that a new token replaces the oldest one.

    table: the slot of each token by position, for block-sparse attention; (): as above
    """

    count: int
    first: int = 0
    table: tuple[int, ...] = ()

    def of(self, place: int) -> int:
        """Return the slot of the token at position `place` (the first token has position 0).

        >>> [Slots(count=4, first=1).of(place) for place in range(8)]
        [0, 1, 2, 3, 1, 2, 3, 1]
        """
        if self.table:
            return self.table[place]
        if place < self.first:
            return place
        return self.first + (place - self.first) % (self.count - self.first)


def refuse_keys_to_come(model: Any) -> None:
    """Raise ConfigError for attention that is not causal: there, a new token changes the results of
    all earlier tokens, so nothing can be cached."""
    rule = model.attention.rule(model.T)
    if rule is not None and not rule.causal:
        raise ConfigError(f"model.attention={model.attention.name} sees tokens to come, so that a "
                          f"new token changes all tokens before it, and nothing can be generated "
                          f"or cached; ask Training.logits for the logits of whole texts, or train "
                          f"a model with a causal kind")


def slots(rule: Rule, tokens: int, first: int = 0) -> Slots:
    """Return the slots that a rule needs.

    tokens: most tokens after the `first` ones; then the oldest of them is replaced
    first:  tokens that stay, as a learned prompt

    A rule with blocks gets a table of the slots of all `tokens` positions, and no others.
    """
    if rule.blocks is not None:
        return _of_blocks(rule, tokens)
    if rule.window is None:
        return Slots(count=first + tokens, first=first)
    first = min(rule.global_tokens, tokens - 1)
    return Slots(count=min(tokens, first + rule.window), first=first)


def _of_blocks(rule: Rule, tokens: int) -> Slots:
    """Return slots for block-sparse attention: a new block takes the slots of a block that no query
    of this or a later block sees, if there is one."""
    size, places, taken = rule.block, [], {}
    for a in range(-(-tokens // size)):
        taken = {b: at for b, at in taken.items() if any(row[b] for row in rule.blocks[a:])}
        taken[a] = min(set(range(len(taken) + 1)) - set(taken.values()))
        places.append(taken[a])
    table = tuple(places[p // size] * size + p % size for p in range(tokens))
    return Slots(count=max(table) + 1, table=table)
