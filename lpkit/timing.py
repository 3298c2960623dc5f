"""Time functions in interleaved rounds: if the machine is slow for a moment, all functions are
slow, and the ratios of their times stay fair."""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence

# takes the numbers of the rounds, yields them, and may show progress meanwhile, such as tqdm
Watch = Callable[[Sequence[int]], Iterable[int]]


def interleaved_seconds(runners: Sequence[Callable[[], object]], *, rounds: int, warm_up: int = 1,
                        shuffle: bool = False, within_seconds: float = math.inf,
                        clock: Callable[[], float] | None = None,
                        watch: Watch = iter) -> list[list[float]]:
    """Returns, for each runner, the list of its seconds in each of the `rounds` measured rounds.

    A round calls every runner once, in the given order, or with `shuffle` in a new random order.
    `warm_up` further rounds come first and are not measured. No new round begins after
    `within_seconds`, but at least one round is measured. `clock` is perf_counter by default.
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
