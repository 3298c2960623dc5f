"""The layers of each stage of a pipeline: a cut whose slowest rank is as fast as it can be.

Layers are alike, the embedding multiplies nothing, and the head takes as many products as some
layers: 5 of GPT-2's, 2 of Llama 3 8B's, 0.6 of its 405B's. So each layer goes to the rank that has
the least so far, to the stage there that has the least, and to the later one of two that have as
little, since earlier ones hold more micro-batches. No cut of layers that are alike beats that. It
is Llama 3's own of 126 layers over 16 ranks, one fewer in the first and in the last
(https://arxiv.org/abs/2407.21783, section 3.3.2). Stages of as many layers stay where that would
gain less than GAIN: an order made for stages that are alike may lose as much (the clock, of a V).

FLOPs of the model alone decide, so that all ranks and each start of a run have the same cut.
"""

import functools
import heapq
import itertools
from typing import Any

from lpkit.techniques.blocks import operations
from lpkit.techniques.layouts import Layout
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.pipelines import PIPELINES

GAIN = 0.02     # of the slowest rank's seconds
LEAST = 1e-6    # layers: a head that only says which of two stages gets a layer

def stage_layers(m: Any, layout: Layout) -> list[range]:
    """Those of each stage, or chunk; of a model that is not cut, all."""
    counts = stage_counts(m, layout.schedule, layout.pipeline, layout.interleave)
    return [range(*cut) for cut in itertools.pairwise((0, *itertools.accumulate(counts)))]


@functools.lru_cache(maxsize=1024)
def rank_layers(m: Any, layout: Layout, balanced: bool = True) -> tuple[int, ...]:
    """How many each rank has, and last of all that with the head. Without `balanced` as other stacks
    cut: all as many, or the first and the last one fewer."""
    counts = stage_counts(m, layout.schedule, layout.pipeline, layout.interleave, balanced)
    by_rank = PIPELINES[layout.schedule].by_rank(layout.pipeline, layout.interleave)
    return tuple(sum([counts[stage] for stage in stages])
                 for stages in sorted(by_rank, key=lambda stages: len(counts) - 1 in stages))


@functools.lru_cache(maxsize=1024)
def stage_counts(m: Any, schedule: str, ranks: int, chunks: int,
                 balanced: bool = True) -> tuple[int, ...]:
    """How many layers each stage has."""
    last, by_rank = ranks * chunks - 1, PIPELINES[schedule].by_rank(ranks, chunks)
    # the ends may have the embedding and the head alone
    counts = [int(m.L > last or 0 < stage < last) for stage in range(last + 1)]
    seconds = [*map(float, counts)]         # in those of a layer
    seconds[last] += (head := head_layers(m) if balanced else LEAST)
    load = lambda rank: (sum([seconds[one] for one in by_rank[rank]]), -rank)
    heapq.heapify(loads := [load(rank) for rank in range(ranks)])
    for _ in range(m.L - sum(counts)):
        rank = -loads[0][1]
        stage = min(sorted(by_rank[rank], reverse=True), key=seconds.__getitem__)
        counts[stage] += 1
        seconds[stage] += 1
        heapq.heapreplace(loads, load(rank))
    slowest = max(sum([seconds[one] for one in stages]) for stages in by_rank)
    if m.L % (last + 1) == 0 and m.L / ranks + head < (1 + GAIN) * slowest:
        return (m.L // (last + 1),) * (last + 1)
    return tuple(counts)


def head_layers(m: Any) -> float:
    """The FLOPs of the head, over those of a layer."""
    ops, tokens = operations(s := MicroBatch(model=m)), s.tokens
    pairs = sum(op.pairs_share * one.M * one.N * one.K * one.group
                for op in ops.block for one in op.pairs)
    return tokens * ops.head.weights / (tokens * sum(op.weights for op in ops.linears) + pairs)
