"""Ranks of a context group hold a part of each sequence; attention alone needs the others' parts. No
torch.

Rank r of c holds the chunks r and 2c - 1 - r of 2c: an early one, whose queries see few keys, and a
late one, whose queries see many, so that a causal mask leaves all ranks the same work (zig-zag).
"""

from dataclasses import dataclass

from lpkit.techniques.row import Row


@dataclass(frozen=True, kw_only=True)
class ContextAttention(Row):
    """The implementation makes a `contracts.Attend` over the ranks of a group: of what one rank
    attends with, the group, and what to wait within.

    partial:    ranks attend with a `contracts.Partial`, else with a `contracts.Attend`
    by_heads:   heads are split over the ranks, and must divide
    """

    partial: bool = False
    by_heads: bool = False


CONTEXT = {
    "ring": ContextAttention(
        why="keys and values go from rank to rank, while those at hand are used", partial=True,
        implementation="lpkit.parallel.context:Ring",
        source="Liu et al. 2023, https://arxiv.org/abs/2310.01889"),
    "all-to-all": ContextAttention(
        why="each rank attends over whole sequences with its share of the heads", by_heads=True,
        implementation="lpkit.parallel.context:AllToAll",
        source="DeepSpeed-Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509"),
}
