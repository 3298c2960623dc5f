"""The layers of each pipeline stage: a cut that minimises the time of the slowest rank.

Layers are alike, the embedding multiplies nothing, and the head takes as many FLOPs as some layers:
5 of GPT-2's, 2 of Llama 3 8B's, 0.6 of its 405B's. So each layer goes to the rank with the least
work so far, and there to the stage with the least. Of equal stages it goes to the later one, since
earlier stages hold more micro-batches. No other cut of equal layers is better. For 126 layers over
16 ranks the result is that of Llama 3, with one layer fewer in the first and the last rank
(https://arxiv.org/abs/2407.21783, section 3.3.2). Stages of equal size stay if another cut gains
less than GAIN, because a schedule made for equal stages may lose as much (the simulated clock shows
this for a V).

Only the model's FLOPs decide, so that all ranks and every start of a run have the same cut.
"""

import functools
import heapq
import itertools
from typing import Any

from lpkit.techniques.blocks import operations
from lpkit.techniques.layouts import Layout
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.pipelines import PIPELINES

GAIN = 0.02     # share of the slowest rank's seconds
LEAST = 1e-6    # layers: a tiny head, which only decides between two equal stages

def stage_layers(m: Any, layout: Layout) -> list[range]:
    """Return the layers of each stage or chunk; all layers if the model is not cut."""
    counts = stage_counts(m, layout.schedule, layout.pipeline, layout.interleave)
    return [range(*cut) for cut in itertools.pairwise((0, *itertools.accumulate(counts)))]


@functools.lru_cache(maxsize=1024)
def rank_layers(m: Any, layout: Layout, balanced: bool = True) -> tuple[int, ...]:
    """Return the number of layers of each rank; the last entry is the rank with the head. Not
    `balanced`: as other stacks cut, in equal parts or with one layer fewer at both ends."""
    counts = stage_counts(m, layout.schedule, layout.pipeline, layout.interleave, balanced)
    by_rank = PIPELINES[layout.schedule].by_rank(layout.pipeline, layout.interleave)
    return tuple(sum([counts[stage] for stage in stages])
                 for stages in sorted(by_rank, key=lambda stages: len(counts) - 1 in stages))


@functools.lru_cache(maxsize=1024)
def stage_counts(m: Any, schedule: str, ranks: int, chunks: int,
                 balanced: bool = True) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    last, by_rank = ranks * chunks - 1, PIPELINES[schedule].by_rank(ranks, chunks)
    # the first and the last stage may have only the embedding and the head
    counts = [int(m.L > last or 0 < stage < last) for stage in range(last + 1)]
    seconds = [*map(float, counts)]         # in units of a layer's seconds
    seconds[last] += (head := head_layers(m) if balanced else LEAST)
    load = lambda rank: (sum([seconds[stage] for stage in by_rank[rank]]), -rank)
    heapq.heapify(loads := [load(rank) for rank in range(ranks)])
    for _ in range(m.L - sum(counts)):
        rank = -loads[0][1]
        stage = min(sorted(by_rank[rank], reverse=True), key=seconds.__getitem__)
        counts[stage] += 1
        seconds[stage] += 1
        heapq.heapreplace(loads, load(rank))
    slowest = max(sum([seconds[stage] for stage in stages]) for stages in by_rank)
    if m.L % (last + 1) == 0 and m.L / ranks + head < (1 + GAIN) * slowest:
        return (m.L // (last + 1),) * (last + 1)
    return tuple(counts)


def head_layers(m: Any) -> float:
    """Return the FLOPs of the head, divided by those of a layer."""
    ops, tokens = operations(s := MicroBatch(model=m)), s.tokens
    pairs = sum(op.pairs_share * product.M * product.N * product.K * product.group
                for op in ops.block for product in op.pairs)
    return tokens * ops.head.weights / (tokens * sum(op.weights for op in ops.linears) + pairs)
