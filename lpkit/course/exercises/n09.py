"""Notebook 09, predict before you rent. Micro-batches, tokens, ranks."""

import math

from lpkit.course.exercises.judge import Exercise


def micro_batches(stages: int, most: float) -> int:
    """The fewest micro-batches with which at most `most` of a step is bubble: (p - 1) of (m + p -
    1) turns are idle."""
    return max(1, math.ceil((stages - 1) * (1 - most) / most))


def tokens(dollars: float, price_per_hour: float, peak_flops: float, mfu: float,
           parameters: float) -> float:
    """Dollars to device hours, to FLOPs at that utilisation, to tokens at 6 FLOPs a parameter;
    price and peak of a device."""
    return dollars / price_per_hour * 3600 * peak_flops * mfu / (6 * parameters)


def tensor_ranks(state_bytes: float, device_bytes: float, kv_heads: int) -> int:
    """The fewest ranks that divide the key and value heads and hold the states; 0 where not even
    all of them do."""
    return next((n for n in range(1, kv_heads + 1) if kv_heads % n == 0
                 and state_bytes <= n * device_bytes), 0)


EXERCISES = {
    # (p - 1) / m is the bubble over the ideal time, not its share of the step
    "09.micro_batches": Exercise(
        spec=micro_batches, mistake=lambda stages, most: max(1, math.ceil((stages - 1) / most)),
        cases=((1, 0.5), (2, 0.5), (8, 0.125), (16, 0.11))),
    "09.tokens": Exercise(
        spec=tokens, mistake=lambda dollars, price_per_hour, peak_flops, mfu, parameters:
            dollars / price_per_hour * 3600 * peak_flops / (6 * parameters),
        cases=((1.0, 1.0, 6e12, 0.5, 1e9), (250_000.0, 3.5, 989.4e12, 0.4, 70.6e9))),
    "09.tensor_ranks": Exercise(
        spec=tensor_ranks, mistake=lambda state_bytes, device_bytes,
        kv_heads: math.ceil(state_bytes / device_bytes),
        cases=((60e9, 80e9, 8), (141e9, 72e9, 8), (200e9, 72e9, 8), (1.13e12, 130e9, 8))),
}
