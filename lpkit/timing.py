"""Time functions in interleaved rounds, so that a slow moment of the machine slows all of them and
their ratios stay fair."""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence

# iterates over the rounds, and may show progress
Watch = Callable[[Sequence[int]], Iterable[int]]


def interleaved_seconds(runners: Sequence[Callable[[], object]], *, rounds: int, warm_up: int = 1,
                        shuffle: bool = False, within_seconds: float = math.inf,
                        clock: Callable[[], float] | None = None,
                        watch: Watch = iter) -> list[list[float]]:
    """Returns the seconds of each runner in each round, without the first `warm_up` rounds.

    A round calls every runner once, in the given order, or with `shuffle` in a new random order. No
    new round begins after `within_seconds`, but at least one round is measured. `clock` is
    perf_counter by default.
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
