"""Block-sparse attention: which blocks of keys are visible to a block of queries.

    lpkit train cpu-3m model.attention=block-sparse --import lessons.rows.sparse_attention

Every backend that takes the `blocks` of a `lpkit.techniques.attention.Rule` computes it.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

from lpkit.errors import shown
from lpkit.techniques.attention import KINDS, AttentionKind, Rule, Softmax
from lpkit.values import Count

MOST_BLOCKS = 1024      # rows of a table; Python stores a table as a whole


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Softmax):
    """Without a table, a block of queries sees the latest `local` blocks of keys, and every
    `stride`-th block before them. A `table` has a row per block of queries with a digit per block
    of keys: 1 for a visible block, else 0. A row may be all 0; future keys are never visible."""

    block: Count = 64
    local: Count = 2
    stride: Count = 4
    table: tuple[str, ...] | None = None

    def problem(self, m: Any) -> str:
        count = -(-m.T // self.block)
        if count > MOST_BLOCKS:
            return (f"model.context={m.T} has {count} blocks of model.attention.block={self.block}, "
                    f"and a table has at most {MOST_BLOCKS}; set model.attention.block="
                    f"{-(-m.T // MOST_BLOCKS)}")
        if self.table is None or (len(self.table) == count and all(
                len(row) == count and set(row) <= {"0", "1"} for row in self.table)):
            return ""
        return (f"model.attention.table must have {count} rows of {count} digits 0 or 1, one for "
                f"each {self.block} tokens of model.context={m.T}, got {shown(self.table)}")

    def rule(self, T: int) -> Rule:
        blocks = (_strided(-(-T // self.block), self.local, self.stride) if self.table is None
                  else _written(self.table))
        return replace(super().rule(T), block=self.block, blocks=blocks)


@functools.lru_cache(maxsize=64)
def _written(table: tuple[str, ...]) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(seen == "1" for seen in row) for row in table)


@functools.lru_cache(maxsize=64)
def _strided(count: int, local: int, stride: int) -> tuple[tuple[bool, ...], ...]:
    return tuple(tuple(0 <= a - b < local or (b < a and b % stride == 0) for b in range(count))
                 for a in range(count))


KINDS["block-sparse"] = AttentionKind(
    why="blocks of tokens: the latest, and every few before; or a table", settings=BlockSparse(),
    source="Child et al. 2019, https://arxiv.org/abs/1904.10509")
