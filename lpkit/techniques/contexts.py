"""Attention over sequences of which each rank of a context group has a part. No torch."""

from dataclasses import dataclass

from lpkit.techniques.row import Row


@dataclass(frozen=True, kw_only=True)
class ContextAttention(Row):
    """The implementation makes a `contracts.Attend` of what one rank attends with, and of the ranks.
    `partial`: it is a `contracts.Partial`, of some keys; else of some heads, which must divide."""

    partial: bool = False


CONTEXT = {
    "ring": ContextAttention(
        why="keys and values go from rank to rank, while those at hand are used", partial=True,
        implementation="lpkit.parallel.context:Ring",
        source="Liu et al. 2023, https://arxiv.org/abs/2310.01889"),
    "all-to-all": ContextAttention(
        why="each rank attends over whole sequences with its share of the heads",
        implementation="lpkit.parallel.context:AllToAll",
        source="DeepSpeed-Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509"),
}
