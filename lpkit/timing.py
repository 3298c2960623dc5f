"""Timing callables in turns: a slow moment of the machine meets all of them, ratios stay fair."""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence

# what goes through the rounds, and may say how far it is
Watch = Callable[[Sequence[int]], Iterable[int]]


def interleaved_seconds(runners: Sequence[Callable[[], object]], *, rounds: int, warm_up: int = 1,
                        shuffle: bool = False, within_seconds: float = math.inf,
                        clock: Callable[[], float] | None = None,
                        watch: Watch = iter) -> list[list[float]]:
    """Seconds of each runner in each round, after `warm_up` rounds that are thrown away.

    A round calls every runner once: in the order given, or in a new random order with `shuffle`. No
    new round begins after `within_seconds`, but one is always measured. `clock` is perf_counter by
    default.
    """
    clock = clock or time.perf_counter
    seconds: list[list[float]] = [[] for _ in runners]
    order, draw = list(range(len(runners))), random.Random(0)
    begun = time.perf_counter()
    for i in watch(range(warm_up + rounds)):
        if i > warm_up and time.perf_counter() - begun > within_seconds:
            break
        if shuffle:
            draw.shuffle(order)
        for j in order:
            start = clock()
            runners[j]()
            seconds[j].append(clock() - start)
    return [times[warm_up:] for times in seconds]
