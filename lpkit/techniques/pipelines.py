"""Pipeline schedules: the order in which each rank computes the parts of an update.

The layers are cut into stages, with `chunks` of them on each rank. The batch is cut into
micro-batches. An action is one stage's work on one micro-batch: (stage, kind, micro-batch).

    F   forward                     needs F of the stage before
    B   whole backward, I and W     needs F, and I or B of the stage after
    I   gradient of the input, dx   needs the same; the stage before waits for it
    W   gradients of weights, dw    needs I; no other action waits for it, so it can fill a bubble

The bubble is the time in which a rank has no action to compute. A smaller bubble needs more
micro-batches under way, whose activations are held. The rows have the sources. Narayanan et al.
2021, https://arxiv.org/abs/2104.04473, explain the three schedules of this module.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from lpkit.techniques.row import TechniqueRow

Action = tuple[int, str, int]           # stage, kind, micro-batch
Order = dict[int, list[Action]]         # the actions of each rank, in order
# Where the stages are: f(rank, chunk, ranks) -> the stage that is chunk number `chunk` of a rank.
# "v": rank 0 has the first and the last stage (of two chunks on each rank).
PLACES: dict[str, Callable[[int, int, int], int]] = {
    "loop": lambda rank, chunk, ranks: chunk * ranks + rank,
    "v": lambda rank, chunk, ranks: 2 * ranks - 1 - rank if chunk else rank,
}


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(TechniqueRow):
    """A row of PIPELINES. `implementation` is the name of PyTorch's class.

    places      a row of PLACES
    splits      backward is split into I and W
    chunks      fewest and most chunks on a rank
    fits        f(ranks, m) -> whether the schedule has an order of m micro-batches
    needs       the condition of `fits` in words, for an error
    bubble      f(ranks, F, I, W) -> seconds of an update in which a rank computes nothing, if its
                stages take F, I and W seconds, messages take no time, and there are at least as
                many micro-batches as stages
    even        `bubble` is exact only if F, I and W are equal; otherwise it may be wrong by up to a
                tenth of the update
    hops        f(ranks, chunks, micro-batches) -> messages of an update that wait for one another,
                if F, I and W are equal and a message takes much less time
    warm_up     f(rank, ranks, chunks, micro-batches of a round) -> number of forwards before a rank
                alternates forwards and backwards. None: there is no closed form, and PyTorch
                computes the order
    breadth_first
                a chunk computes all micro-batches before the next chunk begins
    """

    places: str = "loop"
    splits: bool = False
    chunks: tuple[int, int] = (1, 1)
    fits: Callable[[int, int], bool] = lambda ranks, m: True
    needs: str = ""
    bubble: Callable[[int, float, float, float], float] = lambda p, f, i, w: (p - 1) * (f + i + w)
    even: bool = False
    hops: Callable[[int, int, int], float] = lambda p, v, m: 2 * (p - 1)
    warm_up: Callable[[int, int, int, int], int] | None = None
    breadth_first: bool = False

    def stages(self, rank: int, ranks: int, chunks: int) -> list[int]:
        """Return the stages of a rank, by chunk.

        >>> PIPELINES["interleaved"].stages(0, ranks=2, chunks=2)
        [0, 2]
        """
        return [PLACES[self.places](rank, chunk, ranks) for chunk in range(chunks)]

    def by_rank(self, ranks: int, chunks: int) -> list[list[int]]:
        """Return the stages of each rank."""
        return [self.stages(rank, ranks, chunks) for rank in range(ranks)]

    def problem(self, ranks: int, chunks: int, m: int) -> str:
        """Return the end of a sentence "... has no order of", if the schedule has no order of m
        micro-batches for these numbers; "": it has one."""
        if chunks != (near := self.nearest_chunks(chunks)):
            return f"{chunks} chunks a rank, but of {near}"
        needs = f"{m} micro-batches over {ranks} ranks, but of {self.needs}"
        return "" if self.fits(ranks, m) else needs

    def nearest_chunks(self, chunks: int) -> int:
        """Return the nearest number of chunks that the schedule can have."""
        return min(max(chunks, self.chunks[0]), self.chunks[1])


def whole_rounds(ranks: int, m: int) -> bool:
    """Return whether m micro-batches can be divided into m // ranks equal rounds."""
    return m % max(1, m // ranks) == 0


TORCH = "torch.distributed.pipelining.schedules:Schedule"
MANY, ROUNDS = 64, "a whole number in each of m // ranks rounds, such as multiples of the ranks"
PIPELINES = {        # by the names of `parallel.schedule`
    "gpipe": PipelineSchedule(
        why="all forwards, then all backwards; the activations of all micro-batches are held",
        breadth_first=True,
        source="Huang et al. 2019, https://arxiv.org/abs/1811.06965",
        implementation=f"{TORCH}GPipe",
        warm_up=lambda rank, p, v, m: m * v),
    "1f1b": PipelineSchedule(
        why="each backward as early as possible: the bubble of gpipe, but a stage holds at most "
            "one micro-batch for each stage from itself to the last",
        source="Narayanan et al. 2020, https://arxiv.org/abs/2006.09503",
        implementation=f"{TORCH}1F1B", fits=lambda p, m: m >= p, needs="one a rank or more",
        hops=lambda p, v, m: 2 * (p - 1) * m / p + 2 * (p - 2),
        warm_up=lambda rank, p, v, m: p - 1 - rank),
    "interleaved": PipelineSchedule(
        why="1f1b with several chunks on each rank: a smaller bubble, more messages, more memory",
        source="Narayanan et al. 2021, https://arxiv.org/abs/2104.04473",
        implementation=f"{TORCH}Interleaved1F1B", chunks=(2, MANY),
        fits=whole_rounds, needs=ROUNDS, hops=lambda p, v, m: 2 * (p * v - 1),
        warm_up=lambda rank, p, v, m: (v - 1) * m + 2 * (p - 1 - rank)),
}


def closed_order(row: PipelineSchedule, ranks: int, chunks: int, m: int) -> Order:
    """Return the order of a schedule that has `warm_up`, by its closed form, which is fast even for
    thousands of ranks."""
    return {rank: _rank_order(row, rank, ranks, chunks, m) for rank in range(ranks)}


def _rank_order(row: PipelineSchedule, rank: int, ranks: int, chunks: int, m: int) -> list[Action]:
    """Return the actions of one rank: `first` forwards, then a forward and a backward in turn, then
    the backwards that are left. A chunk computes the `of_round` micro-batches of a round, then the
    next chunk does; backwards go through the chunks in reverse."""
    of_round = m if row.breadth_first else m // max(1, m // ranks)
    forwards = [(n // of_round % chunks, n // (of_round * chunks) * of_round + n % of_round)
                for n in range(m * chunks)]
    last_first = row.breadth_first and chunks > 1
    backwards = [(chunks - 1 - chunk, m - 1 - micro if last_first else micro)
                 for chunk, micro in forwards]
    f = [(chunk * ranks + rank, "F", micro) for chunk, micro in forwards]
    b = [(chunk * ranks + rank, "B", micro) for chunk, micro in backwards]
    first = min(len(f), row.warm_up(rank, ranks, chunks, of_round))
    turns = [action for pair in zip(f[first:], b) for action in pair]
    return f[:first] + turns + b[len(f) - first:]


# (stage in backward, micro-batches that each stage of the rank holds, which have gradients already)
Held = tuple[int, tuple[float, ...], tuple[bool, ...]]


@functools.lru_cache(maxsize=4096)
def held(rank: int, schedule: str, ranks: int, chunks: int, m: int) -> tuple[Held, ...]:
    """Return the moments of an update at which a rank may hold most memory.

    A moment is: the stage that is in backward; for each stage of the rank, the number of micro-
    batches whose activations it holds (with the one in backward); and for each stage, whether it
    has gradients of earlier micro-batches. If the schedule has no closed form for m micro-batches,
    the assumption is that each stage holds as many micro-batches as there are ranks."""
    row, stages = PIPELINES[schedule], PIPELINES[schedule].stages(rank, ranks, chunks)
    if chunks > 1 and row.chunks == (1, 1):     # other stacks call 1f1b with chunks "1f1b", too
        row = PIPELINES["interleaved"]
    if row.warm_up is None or row.problem(ranks, chunks, m):
        return tuple((stage, (min(m, ranks),) * chunks, (m > 1,) * chunks) for stage in stages)
    if not row.breadth_first:       # the rounds after the third hold as much as the third
        m = min(m, 3 * (m // max(1, m // ranks)))
    counts, added = dict.fromkeys(stages, 0), dict.fromkeys(stages, False)
    moments: set[Held] = set()
    for stage, kind, _ in _rank_order(row, rank, ranks, chunks, m):
        if kind == "B":
            moments.add((stage, (*counts.values(),), (*added.values(),)))
            added[stage] = True
        counts[stage] += 1 if kind == "F" else -1
    # leave out moments at which another moment of the same stage holds at least as much
    return tuple(a for a in moments if not any(a != b and a[0] == b[0] and all(
        x <= y for x, y in zip((*a[1], *a[2]), (*b[1], *b[2]))) for b in moments))
