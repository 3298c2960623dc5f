"""When a rank computes in an update, and when its messages are under way, by PyTorch's profiler.

    training = Training.build(config, ranks=replace(ranks, waits=Recorded()))
    spans = traced(training)                    # of an update, on each rank
    timelines = Timeline.aligned(all_spans)     # of all ranks
    timelines[0].message_seconds, timelines[0].hidden_seconds, timelines[0].exposed_seconds

A message is under way from when it was handed to gloo until a thread of gloo's is done with it; for
a rank that is late, too. What is not spent in waits for messages is spent computing.
For ranks on CPUs, and updates of one micro-batch: forward ends where autograd begins, and update is
what follows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from lpkit.measure.messages import DATA
from lpkit.parallel.ranks import Waits
from lpkit.predict.messages import ROUNDS
from lpkit.training.training import Training

FORWARD, BACKWARD, UPDATE = COMPUTING = "forward", "backward", "update"
WHOLE, WAIT = "lpkit::update", "lpkit::wait"    # ranges in the profile
AUTOGRAD, HANDED, GLOO = "autograd::engine::evaluate_function", "c10d::", "gloo:"
ITEMSIZE = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "unsigned char": 1}


class Span(NamedTuple):
    """`kind`: of COMPUTING, or of a message, with all that is reduced, scattered or gathered. Times
    are seconds since the first rank began."""

    kind: str
    start: float
    end: float
    nbytes: int = 0


class Recorded(Waits):
    """Which the profiler sees."""

    def __enter__(self) -> None:
        self.range = record_function(WAIT)
        self.range.__enter__()
        super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__()
        self.range.__exit__(None, None, None)


@dataclass(frozen=True)
class Timeline:
    """Of one rank, in one update."""

    spans: tuple[Span, ...]

    @classmethod
    def aligned(cls, by_rank: Iterable[Iterable[Sequence[Any]]]) -> list[Timeline]:
        """Of the spans of all ranks of a machine: its clock is theirs."""
        by_rank = [[Span(*span) for span in spans] for spans in by_rank]
        began = min(span.start for spans in by_rank for span in spans)
        return [cls(tuple(span._replace(start=span.start - began, end=span.end - began)
                          for span in spans)) for spans in by_rank]

    @property
    def messages(self) -> list[Span]:
        return [span for span in self.spans if span.kind in ROUNDS]

    @property
    def computing(self) -> list[Span]:
        return [span for span in self.spans if span.kind in COMPUTING]

    @property
    def step_seconds(self) -> float:
        return self.computing[-1].end - self.computing[0].start

    @cached_property
    def message_seconds(self) -> float:
        """In which at least one message is under way."""
        return covered(self.messages)

    @property
    def hidden_seconds(self) -> float:
        """Of these, in which this rank computes."""
        both = covered([*self.messages, *self.computing])
        return self.message_seconds + covered(self.computing) - both

    @property
    def exposed_seconds(self) -> float:
        return self.message_seconds - self.hidden_seconds

    @property
    def backward_end(self) -> float:
        """When autograd is done."""
        return max(span.end for span in self.spans if span.kind == BACKWARD)


def covered(spans: Iterable[Span]) -> float:
    """Seconds in which there is at least one."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def traced(training: Training) -> list[Span]:
    """Of an update, as this rank sees it, by the clock of the machine. All ranks begin together."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.barrier()
        with record_function(WHOLE):
            training.update(0)
    return spans(profiler)


def spans(profiler: profile) -> list[Span]:
    """Of the profile of an update."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (begin, end), = (_time(event) for event in events if event.name() == WHOLE)
    seen = {start: [event for event in events
                    if event.name().startswith(start) and _time(event)[0] > begin]
            for start in (WAIT, AUTOGRAD, HANDED, GLOO)}
    waits, backward = ([_time(event) for event in seen[name]] for name in (WAIT, AUTOGRAD))
    bounds = begin, backward[0][0], max(until for _, until in backward), end
    found = [Span(kind, *part) for kind, phase in zip(COMPUTING, pairwise(bounds))
             for part in _without(waits, *phase)]
    # gloo takes them in the order in which they are handed to it
    for handed, sent in zip(seen[HANDED], seen[GLOO], strict=True):
        kind, whole = DATA[handed.name().removeprefix(HANDED)]
        # gloo scatters what it has all-reduced; of what it gathers it has one part
        shape = handed.shapes()[whole] or sent.shapes()[0]
        found.append(Span(kind, _time(handed)[0], _time(sent)[1],
                          ITEMSIZE[sent.dtypes()[0]] * math.prod(shape)))
    return found


def _time(event: Any) -> tuple[float, float]:
    return event.start_ns() / 1e9, event.end_ns() / 1e9


def _without(waits: Iterable[tuple[float, float]], begin: float, end: float
             ) -> Iterator[tuple[float, float]]:
    """What is left of a phase."""
    for start, until in waits:
        if start < end and until > begin:
            if start > begin:
                yield begin, start
            begin = until
    if begin < end:
        yield begin, end
