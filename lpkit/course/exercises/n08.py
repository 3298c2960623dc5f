"""Notebook 08, recomputation and offload. Bytes, and numbers of blocks."""

import math

from lpkit.course.exercises.judge import Exercise


def every(layers: int, block: int, kept: int, budget: int) -> int:
    """The largest n for which activations fit when blocks 0, n, 2n, ... run again; 0 when none
    does. A block keeps `block` bytes, one that runs again `kept` until then. At the peak the last
    block is there whole, whether it ran twice or not."""
    def peak(n: int) -> int:
        return sum(kept if i % n == 0 else block for i in range(layers - 1)) + block

    return max((n for n in range(1, layers + 1) if peak(n) <= budget), default=0)


def _without_the_block(layers: int, block: int, kept: int, budget: int) -> int:
    fits = [n for n in range(1, layers + 1)
            if sum(kept if i % n == 0 else block for i in range(layers)) <= budget]
    return max(fits, default=0)


def moment_bytes(parameters: int, block: int) -> int:
    """AdamW's two moments in a byte a parameter, and a float32 scale for each block of them, the
    last one not full."""
    return 2 * (parameters + 4 * math.ceil(parameters / block))


def segment(layers: int, block: int, kept: int) -> int:
    """How many blocks between two checkpoints hold least: a checkpoint of `kept` bytes for each
    segment, and one segment whole. The smallest such number."""
    return min(range(1, layers + 1), key=lambda n: math.ceil(layers / n) * kept + n * block)


EXERCISES = {
    "08.every": Exercise(spec=every, mistake=_without_the_block, cases=(
        (4, 10, 1, 12), (4, 10, 1, 22), (4, 10, 1, 25), (12, 34, 2, 60), (12, 34, 2, 250),
        (3, 5, 1, 100))), "08.moment_bytes": Exercise(spec=moment_bytes, mistake=lambda parameters,
                                                      block: 2 * parameters, cases=(
        (256, 256), (1000, 256), (124_000_000, 2048))),
    "08.segment": Exercise(spec=segment, mistake=lambda layers, block,
                           kept: round(math.sqrt(layers)), cases=(
        (64, 1, 1), (64, 16, 1), (32, 4, 2), (96, 34, 2))),
}
