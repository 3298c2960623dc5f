"""Divide the layers of a model into pipeline stages, so that the slowest rank is as fast as
possible.

All layers take the same time, and the embedding has no matmul. The head has as many FLOPs as some
layers: 5 layers of GPT-2, 2 of Llama 3 8B, 0.6 of Llama 3 405B. Each layer is given to the rank
that has the least work so far, and on this rank to the stage with the least work. Between equal
stages, it is given to the later one, because earlier stages hold more micro-batches. For equal
layers, no other division is better. For 126 layers over 16 ranks, the result is that of Llama 3:
the first and the last rank have one layer fewer (https://arxiv.org/abs/2407.21783, section 3.3.2).

If all stages can have the same number of layers, and another division would gain less than GAIN,
all stages get the same number: a schedule for equal stages may lose as much with unequal stages
(the simulated clock shows this for a V).

The division depends only on the FLOPs of the model, so all ranks and every start of a run have the
same one.
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
LEAST = 1e-6    # time of the head, in layers, if it is ignored; decides between equal stages


def stage_layers(m: Any, layout: Layout) -> list[range]:
    """Return the layers of each stage (with `interleave`: of each chunk). Without a pipeline, there
    is one stage with all layers."""
    counts = stage_counts(m, layout.schedule, layout.pipeline, layout.interleave)
    return [range(*cut) for cut in itertools.pairwise((0, *itertools.accumulate(counts)))]


@functools.lru_cache(maxsize=1024)
def rank_layers(m: Any, layout: Layout, balanced: bool = True) -> tuple[int, ...]:
    """Return the number of layers of each rank of a pipeline; the last entry is the rank with the
    head.

    balanced: False: as other stacks divide layers, without the time of the head: in equal parts, or
              with one layer fewer on the first and the last rank
    """
    counts = stage_counts(m, layout.schedule, layout.pipeline, layout.interleave, balanced)
    by_rank = PIPELINES[layout.schedule].by_rank(layout.pipeline, layout.interleave)
    return tuple(sum([counts[stage] for stage in stages])
                 for stages in sorted(by_rank, key=lambda stages: len(counts) - 1 in stages))


@functools.lru_cache(maxsize=1024)
def stage_counts(m: Any, schedule: str, ranks: int, chunks: int,
                 balanced: bool = True) -> tuple[int, ...]:
    """Return the number of layers of each stage. `balanced`: as in `rank_layers`."""
    last, by_rank = ranks * chunks - 1, PIPELINES[schedule].by_rank(ranks, chunks)
    # Each stage has at least one layer; if there are too few layers, the first and the last stage
    # have none, but only the embedding and the head.
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
    """Return the FLOPs of the head, divided by the FLOPs of one layer."""
    ops, tokens = operations(s := MicroBatch(model=m)), s.tokens
    pairs = sum(op.pairs_share * product.M * product.N * product.K * product.group
                for op in ops.block for product in op.pairs)
    return tokens * ops.head.weights / (tokens * sum(op.weights for op in ops.linears) + pairs)
