"""Times of updates and of the phases of an update. Models that are compared take turns, so that a
slow moment of the machine affects all of them."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lpkit.config import Config
from lpkit.contracts import Choice
from lpkit.hardware import synchronised
from lpkit.measure.updates import Bench, take_turns
from lpkit.timing import Watch

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Times of the updates of several models that took turns."""

    seconds: tuple[float, ...]  # of an update of each model: the shortest of its turns
    other_cpu_share: float      # share of the CPUs' time that other processes used
    precision: Choice           # backend that computes the recipe of the last model
    where: str                  # the device, and how the seconds were measured


def in_turns(configs: Iterable[Config], *, device: str | None = None, rounds: int = 5,
             watch: Watch = iter) -> Turns:
    """Run `rounds` rounds; in each round, every config's model does one update."""
    benches = [Bench(config, device) for config in configs]
    times, other_cpu_share = take_turns([bench.seconds for bench in benches], rounds, watch)
    return Turns(seconds=tuple(map(min, times)), other_cpu_share=other_cpu_share,
                 precision=benches[-1].precision,
                 where=f"{benches[-1].where}, the best of {rounds} turns")


def by_phase(bench: Bench, step: int = 0) -> tuple[float, float, float]:
    """Return the seconds of each of PHASES in one update. At the start and the end of each phase,
    the device finishes its queued work before the clock is read."""
    spent = dict.fromkeys(PHASES, 0.0)
    wait = synchronised(lambda: None, bench.device)

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        wait()
        start = time.perf_counter()
        yield
        wait()
        spent[phase] += time.perf_counter() - start

    bench.training.update(step, phases=timed)
    return tuple(spent.values())
