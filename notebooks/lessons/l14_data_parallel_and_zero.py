"""Lesson 14, data parallel and ZeRO: its study, its figures and its exercises.

Measures on real processes which bytes a rank keeps and sends in each stage of ZeRO, and when it
sends them.

    configs = spread(config, 2, sequences=4)        # ZeRO 0, 1, 2, 3 on two ranks
    results = steps(configs, processes=2, updates=4)
    results["ZeRO 1"].most["gradients"], results["ZeRO 1"].sent_bytes, results["ZeRO 1"].losses
    steps(gathers(config, 2), processes=2, updates=4)       # weights gathered in bf16, float32, FP8
    timelines(configs, processes=2, updates=4)["ZeRO 3"][0].hidden_seconds      # of rank 0

`lpkit.predict_trace` predicts the bytes, and `lessons.ranks.messages` the messages.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import lessons.rows.cast_gather  # noqa: F401  adds a row
from lessons.draws import normal
from lessons.figures.drawing import SECONDS, axis, bars, figure
from lessons.figures.step_bytes import ROW_COLOURS, SENT_COLOURS, stacked_figure
from lessons.judging.judge import Exercise, adding_to
from lessons.ranks.messages import ROUNDS, each_sends, messages
from lessons.ranks.messages import sent_bytes as bytes_sent
from lessons.ranks.on_ranks import WORLD, OnRanks
from lessons.ranks.rank_exercises import by_hand
from lpkit import hardware
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure.tracking import DATA, Footprint
from lpkit.measure.updates import Bench
from lpkit.parallel import replicas
from lpkit.parallel.meeting import joined
from lpkit.parallel.processes import Place, Processes, WarmParent
from lpkit.parallel.ranks import Ranks, Waits
from lpkit.predict.ledger import memory, model_states
from lpkit.predict.messages import ALL_REDUCE, Message
from lpkit.predict.params import parameter_count
from lpkit.predict.units import quantity
from lpkit.presets import PRESETS
from lpkit.techniques import layouts as rows
from lpkit.techniques import outside
from lpkit.techniques.blocks import FP32
from lpkit.techniques.layouts import STAGES, Layout
from lpkit.techniques.machines import CATALOGUE, Machine
from lpkit.training.training import Training

# the notebook imports these names of other modules from here
__all__ = ["ALL_REDUCE", "CATALOGUE", "PRESETS", "REDUCTIONS", "by_hand", "dist", "each_sends",
           "hardware", "model_states", "parameter_count", "quantity", "replace", "replicas",
           "stacked_figure"]

# ---- The study

# the reductions of the kit, which send all bytes; rows of other lessons that send fewer set `sent`
REDUCTIONS = {name: row for name, row in rows.REDUCTIONS.items() if row.sent is None}
STATES = ("weights", "gathered weights", "gradients", "optimizer state")    # rows of a footprint
PROGRESS_SECONDS = 120.0        # ranks that report no progress for this long are ended


def layouts(ranks: int) -> dict[str, Layout]:
    """Return a layout for each stage of ZeRO, by name, with all ranks along one axis. Gradients are
    sent parameter by parameter: a single bucket of a small model would be a copy of all its
    gradients. Raises ConfigError for fewer than two ranks."""
    if ranks < 2:
        raise ConfigError(f"a layout of ZeRO needs 2 ranks or more, got {ranks}; several ranks can "
                          f"run on one core")
    return {f"ZeRO {stage}": Layout(reduction="per-parameter", zero=stage,
                                    **{"shard" if stage else "data": ranks}) for stage in STAGES}


def spread(config: Config, ranks: int, *, sequences: int, micro_batches: int = 1
           ) -> dict[str, Config]:
    """Return `config` with each of `layouts(ranks)`, by name. In each update, a rank computes
    `sequences` sequences in `micro_batches` micro-batches."""
    sizes = {"global_batch": ranks * sequences, "grad_accum_steps": ranks * micro_batches}
    return {name: replace(config.replace(sizes), parallel=layout)
            for name, layout in layouts(ranks).items()}


# ways to gather weights in ZeRO 3: the recipe, and `parallel.gathered`
GATHERS = {"bf16": ("bf16", "compute"), "FP8, sent in float32": ("fp8-tensorwise", "float32"),
           "FP8": ("fp8-tensorwise", "fp8")}


def gathers(config: Config, ranks: int) -> dict[str, Config]:
    """Return `config` in ZeRO 3 on this many ranks with each of GATHERS, by name."""
    return {name: replace(config.replace({"precision.recipe": recipe}),
                          parallel=Layout(shard=ranks, gathered=gathered))
            for name, (recipe, gathered) in GATHERS.items()}


# Bytes kept and sent.

@dataclass(frozen=True, kw_only=True)
class Step:
    """Results of rank 0."""

    most: dict[str, int]            # the most bytes of each of STATES in an update
    messages: Counter[Message]      # the messages of an update, with their number
    losses: tuple[float, ...]       # nats per token, of each update; means over all ranks

    @property
    def sent_bytes(self) -> dict[str, float]:
        """The bytes that the rank sends in an update, by kind of collective."""
        return counted(self.messages)


def states(footprint: Footprint) -> dict[str, int]:
    """Return the most bytes of each of STATES in a footprint; states of 0 bytes are left out."""
    return {row: footprint.most[row] for row in STATES if footprint.most.get(row)}


def sent(config: Config) -> dict[str, float]:
    """Return the predicted bytes that a rank sends in an update, by kind of collective. Messages of
    a single number, such as the loss, are not counted."""
    return counted(messages(config))


def counted(messages: Mapping[Message, int]) -> dict[str, float]:
    """Return the bytes that these messages send, by kind of collective. `messages` has the number
    of each message; messages of a single number are not counted."""
    return bytes_sent({message: count for message, count in messages.items()
                       if message.nbytes > FP32})


def losses(config: Config, updates: int, ranks: Ranks | None = None) -> tuple[float, ...]:
    """Train `updates` updates on the config's data and return the loss of each, in nats per
    token."""
    training = Training.build(config, ranks=ranks)
    return tuple(training.update(step).loss.item() for step in range(updates))


def steps(configs: Mapping[str, Config], *, processes: int, updates: int,
          parent: WarmParent | None = None) -> dict[str, Step]:
    """Measure a Step of each config on this many processes (ranks), by name of the config.

    updates: updates whose losses are recorded
    parent: a process from which the ranks are forked, which is faster than starting Python

    Raises ConfigError and RunFailedError as `Processes.wait` does."""
    results, *_ = _on_ranks(_steps, configs, processes, updates, parent)
    return {name: Step(most=most, losses=tuple(before),
                       messages=Counter({Message(*of): count for *of, count in message_rows}))
            for name, (most, message_rows, before) in zip(configs, results)}


def _steps(place: Place, job: dict[str, Any]) -> list[Any]:
    """Measure all configs in one rank; runs in its process. `job` is what `_on_ranks` sends. The
    result is sent back as JSON: for each config, states, messages with their number, and losses."""
    results = []
    for config, ranks in _joined(place, job):
        before = losses(config, job["updates"], ranks)
        footprint = Bench(config, ranks=ranks).footprint()
        messages = [[*message, count] for message, count in footprint.messages.items()]
        results.append([states(footprint), messages, before])
    return results


# When messages are sent.

def timelines(configs: Mapping[str, Config], *, processes: int, updates: int
              ) -> dict[str, list[Timeline]]:
    """Measure `updates` updates of each config on CPUs. Return the fastest update of each, by name
    of the config, as a Timeline for each rank."""
    configs = {name: config.replace({"system.device": "cpu"}) for name, config in configs.items()}
    results = _on_ranks(_timelines, configs, processes, updates)
    fastest = {}
    for name, by_rank in zip(configs, zip(*results)):
        each = [Timeline.aligned(spans) for spans in zip(*by_rank)]
        fastest[name] = min(each, key=lambda ranks: max(rank.step_seconds for rank in ranks))
    return fastest


def _timelines(place: Place, job: dict[str, Any]) -> list[Any]:
    """Trace the updates of all configs in one rank; runs in its process. The result has, for each
    config, a list of updates, each a list of spans."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")      # else each profile prints a line
    results = []
    for config, ranks in _joined(place, job):
        training = Bench(config, ranks=replace(ranks, waits=Recorded())).training
        traced(training)    # the first update allocates the optimizer's state
        results.append([traced(training) for _ in range(job["updates"])])
    return results


# Ranks.

def _joined(place: Place, job: Mapping[str, Any]) -> Iterator[tuple[Config, Ranks]]:
    """Yield each config of the job with the ranks of its process group. This rank joins a new group
    for each config and leaves it before the next."""
    for number, given in enumerate(job["configs"]):
        place.at(number, "step")
        outside.load(given["imports"])
        config = Config.from_dict(given)
        with joined(config, local_rank=place.local_rank,
                    **place.among | {"init_method": f"{place.store}-{number}"}) as ranks:
            yield config, ranks


def _on_ranks(function: Any, configs: Mapping[str, Config], processes: int, updates: int,
              parent: WarmParent | None = None) -> list[Any]:
    """Run `function(place, job)` of this module in each of `processes` ranks and return their
    results, rank by rank. The process of a rank receives the job as JSON and imports the function
    by its name."""
    job = {"configs": [config.to_dict() for config in configs.values()], "updates": updates}
    with Processes(f"{__name__}:{function.__name__}", job, world=processes, parent=parent,
                   progress_seconds=PROGRESS_SECONDS) as running:
        return running.wait()


# Timelines from PyTorch's profiler: when a rank computes in an update, and when its messages are
# under way. A message lasts from the call of gloo until gloo's thread has finished it, which
# includes the wait for a late rank. A rank computes whenever it does not wait for a message.
# Timelines are for ranks on CPUs and updates of one micro-batch: forward ends where autograd
# begins, and the update is everything after backward.

FORWARD, BACKWARD, UPDATE = COMPUTING = "forward", "backward", "update"
WHOLE, WAIT = "lpkit::update", "lpkit::wait"    # names of ranges that this module adds to a profile
# beginnings of names of PyTorch's events: backward of an operation, the call of a collective, and
# the work of gloo's thread on it
AUTOGRAD, HANDED, GLOO = "autograd::engine::evaluate_function", "c10d::", "gloo:"
# bytes of a number, by the profiler's name of its dtype
ITEMSIZE = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "unsigned char": 1}


class Span(NamedTuple):
    """A period in which a rank computes, or in which a message is under way."""

    kind: str           # one of COMPUTING, or the kind of collective
    start: float        # seconds; in a Timeline, since the first rank began
    end: float
    nbytes: int = 0     # of a message: bytes of the whole tensor that is reduced or gathered


class Recorded(Waits):
    """Waits for messages that the profiler records as ranges named WAIT."""

    def __enter__(self) -> None:
        self.range = record_function(WAIT)
        self.range.__enter__()
        super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__()
        self.range.__exit__(None, None, None)


@dataclass(frozen=True)
class Timeline:
    """The spans of one rank in one update."""

    spans: tuple[Span, ...]

    @classmethod
    def aligned(cls, by_rank: Iterable[Iterable[Sequence[Any]]]) -> list[Timeline]:
        """Return a timeline for each rank, with times since the first rank began. `by_rank` has the
        spans of each rank, as lists, by the machine's clock: the ranks are on one machine."""
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
        """Seconds from the start of forward to the end of the update."""
        return self.computing[-1].end - self.computing[0].start

    @cached_property
    def message_seconds(self) -> float:
        """Seconds in which at least one message is under way."""
        return covered(self.messages)

    @property
    def hidden_seconds(self) -> float:
        """Seconds in which a message is under way while this rank computes."""
        both = covered([*self.messages, *self.computing])
        return self.message_seconds + covered(self.computing) - both

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which a message is under way while this rank waits."""
        return self.message_seconds - self.hidden_seconds

    @property
    def backward_end(self) -> float:
        """Time at which autograd ends."""
        return max(span.end for span in self.spans if span.kind == BACKWARD)


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def traced(training: Training) -> list[Span]:
    """Do one update of this rank under the profiler and return its spans, by the machine's clock. A
    barrier lets all ranks begin at the same time."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True,
                 acc_events=True) as profiler:     # without `acc_events`, PyTorch 2.11 warns
        dist.barrier()
        with record_function(WHOLE):
            training.update(0)
    return spans(profiler)


def spans(profiler: profile) -> list[Span]:
    """Return the spans in the profile of an update: first those of computing, then the messages."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (begin, end), = (_time(event) for event in events if event.name() == WHOLE)
    seen = {start: [event for event in events
                    if event.name().startswith(start) and _time(event)[0] > begin]
            for start in (WAIT, AUTOGRAD, HANDED, GLOO)}
    waits, backward = ([_time(event) for event in seen[name]] for name in (WAIT, AUTOGRAD))
    bounds = begin, backward[0][0], max(until for _, until in backward), end
    parts = [Span(kind, *times) for kind, phase in zip(COMPUTING, pairwise(bounds))
             for times in _without(waits, *phase)]
    # gloo processes messages in the order of the calls, so calls and work are paired in order
    for handed, sent in zip(seen[HANDED], seen[GLOO], strict=True):
        kind, whole = DATA[handed.name().removeprefix(HANDED)]
        # The call's record has the whole tensor at the index `whole` of its shapes, except where it
        # is a list of parts: then the record of gloo's work has it. (gloo's reduce-scatter is an
        # all-reduce of the whole tensor; its record of an all-gather has only one part.)
        shape = handed.shapes()[whole] or sent.shapes()[0]
        parts.append(Span(kind, _time(handed)[0], _time(sent)[1],
                          ITEMSIZE[sent.dtypes()[0]] * math.prod(shape)))
    return parts


def _time(event: Any) -> tuple[float, float]:
    """Return start and end of an event in seconds, by the machine's clock."""
    return event.start_ns() / 1e9, event.end_ns() / 1e9


def _without(waits: Iterable[tuple[float, float]], begin: float, end: float
             ) -> Iterator[tuple[float, float]]:
    """Yield (start, end) of the parts of the phase from `begin` to `end` that are outside the
    waits, which are in order of time."""
    for start, until in waits:
        if start < end and until > begin:
            if start > begin:
                yield begin, start
            begin = until
    if begin < end:
        yield begin, end


# ---- Figures

def stages_view(model: Config, machine: Machine, ranks: int, micro_batches: int) -> dict:
    """Return a plotly spec for an Explorer: the predicted peak bytes of a rank in each stage of
    ZeRO, for bf16 and AdamW. Each rank computes `micro_batches` micro-batches of one sequence per
    update, and recomputes each block."""
    config = dataclasses.replace(model, global_batch=ranks * micro_batches,
                                 grad_accum_steps=ranks * micro_batches)
    memories = {stage: memory(config, machine, ranks, precision="bf16", optimizer="adamw",
                              zero=stage, recompute="block") for stage in STAGES}
    held = [ledger.at(ledger.peak_moment) for ledger in memories.values()]
    rows = {row: [each.get(row) for each in held]
            for row in ROW_COLOURS if any(row in each for each in held)}
    fit = [str(stage) for stage, ledger in memories.items() if ledger.fits]
    fits = f"fits with ZeRO {', '.join(fit)}" if fit else "fits with no stage of ZeRO"
    return stacked_figure(
        [f"ZeRO {stage}" for stage in memories], rows, limit=machine.memory_bytes,
        title=f"{ranks:,} ranks of {quantity(machine.memory_bytes, 'bytes')}: {fits}",
        axis_title=f"bytes per {machine.title}, at the peak")


COMPUTING_COLOURS = {"forward": "#d1d5db", "backward": "#9ca3af", "update": "#6b7280"}
# height of each of the two lanes of a rank's row, and of the space between two configs
LANE, GAP = 0.38, 0.5


def overlap_figure(timelines: Mapping[str, Sequence[Timeline]], *, title: str = "",
                   others: float = 0.0) -> dict:
    """Return the plotly spec of the timelines of several configs, by name; each is a list over the
    ranks. A rank has a row with two lanes: its computation in the upper lane, blank while it waits,
    and its messages in the lower lane. `others`: the share of the cores that other processes used
    during the measurement."""
    rows: dict[float, str] = {}
    at: dict[str, list[tuple[float, Any]]] = {kind: [] for kind in COMPUTING_COLOURS | SENT_COLOURS}
    for group, (name, ranks) in enumerate(timelines.items()):
        for rank, timeline in enumerate(ranks):
            y = len(rows) + GAP * group
            rows[y] = f"{name}, rank {rank}"
            for span in timeline.spans:
                at[span.kind].append((y, span))
    data = []
    for kind, places in at.items():
        if not places:
            continue
        colour, above = {**COMPUTING_COLOURS, **SENT_COLOURS}[kind], kind in COMPUTING_COLOURS
        data.append(bars(
            [y for y, _ in places], [1e3 * (span.end - span.start) for _, span in places], kind,
            marker={"color": colour, "line": {"color": "#ffffff", "width": 0.5}},
            base=[1e3 * span.start for _, span in places], width=LANE,
            offset=-LANE if above else 0.0, textposition="none",
            customdata=[f", {quantity(span.nbytes, 'bytes')}" if span.nbytes else ""
                        for _, span in places],
            hover="%{x:.2f} ms%{customdata}", **SECONDS))
    return figure(
        data, title, others=others, height=110 + 34 * len(rows), barmode="overlay",
        xaxis=axis("milliseconds since the first rank began", rangemode="nonnegative"),
        yaxis={"tickvals": list(rows), "ticktext": list(rows.values()), "ticks": "",
               "showgrid": False, "zeroline": False, "range": [max(rows) + 0.6, -0.6]})


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)
rank_exercise = adding_to(EXERCISES, OnRanks)

# Exercises: the bytes that a rank sends, the rows that it owns, and messages.

@exercise("14.sent_bytes", (4_000, 2, 0, 1), (4_000, 4, 3, 1), (4_000, 4, 2, 4),
          draw=lambda r: (10 ** r.uniform(3, 12), r.choice((2, 3, 8, 64)), r.randrange(4),
                          r.randint(1, 16)), minutes=8, stars=2,
          mistakes={"a rank does not send its own part to itself":
                        lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, stage, pieces) * ranks / (ranks - 1),
                    "whole gradients are sent once, after the last micro-batch":
                        lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, max(stage, 2), pieces),
                    "ZeRO 2 and 3 send in every micro-batch": lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, stage, 1),
                    "that is the paper's ZeRO 2, whose weights stay whole; FSDP2 gathers them in "
                    "each micro-batch": lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, stage, pieces)
                        * ((pieces + 1) / (2 * pieces) if stage == 2 else 1),
                    "ZeRO 3 gathers once for forward and once for backward":
                        lambda nbytes, ranks, stage, pieces:
                        sent_bytes(nbytes, ranks, min(stage, 2), pieces)})
def sent_bytes(nbytes: float, ranks: int, stage: int, micro_batches: int) -> float:
    rounds = micro_batches * stage if stage > 1 else 2      # ZeRO 3: two gathers and one scatter
    return rounds * (ranks - 1) / ranks * nbytes


@exercise("14.rows", (4, 2, 1), (5, 2, 1), (5, 4, 2), (5, 4, 3), (2, 4, 3),
          draw=lambda r: (r.randint(1, 40), (ranks := r.randint(1, 9)), r.randrange(ranks)),
          minutes=5,
          mistakes={"round the rows of a part up, so that no rows are left over":
                        lambda rows, ranks, rank:
                        (rank * (rows // ranks), (rank + 1) * (rows // ranks)),
                    "there may be fewer rows than ranks: no part goes beyond the last row":
                        lambda rows, ranks, rank: (rank * math.ceil(rows / ranks),
                                                   (rank + 1) * math.ceil(rows / ranks)),
                    "do not give the first parts one row more: all parts but the last ones are "
                    "equal":
                        lambda rows, ranks, rank:
                        tuple(part * (rows // ranks) + min(part, rows % ranks)
                              for part in (rank, rank + 1))})
def rows_of_rank(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    each = math.ceil(rows / ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def _in_order(sizes: list[int], most: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for size in sizes:
        if groups and sum(groups[-1]) + size <= most:
            groups[-1].append(size)
        else:
            groups.append([size])
    return groups


def _until_full(sizes: list[int], most: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for size in sizes[::-1]:
        if sum(groups[-1]) >= most:
            groups.append([])
        groups[-1].append(size)
    return groups


@exercise("14.buckets", ([4], 8), ([4, 3, 2], 5), ([1, 20, 1], 8), ([1, 2, 3, 4, 5], 6),
          draw=lambda r: ([r.randint(1, 9) for _ in range(r.randint(1, 12))], r.randint(1, 20)),
          minutes=8, stars=2,
          mistakes={"backward computes the last parameters' gradients first": _in_order,
                    "a bucket holds at most `most`, unless a single gradient is larger":
                        _until_full,
                    "that is one message per parameter: fill buckets":
                        lambda sizes, most: [[size] for size in sizes[::-1]]})
def buckets(sizes: list[int], most: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for size in sizes[::-1]:
        if groups and sum(groups[-1]) + size <= most:
            groups[-1].append(size)
        else:
            groups.append([size])
    return groups


# Exercises: the norm of a gradient that is stored in parts.

def _parts(r: Random) -> tuple[list[list[Tensor]], float]:
    ranks, parameters = r.randint(1, 4), r.randint(1, 3)
    return ([[normal(r, r.randint(0, 3)) for _ in range(parameters)] for _ in range(ranks)],
            r.choice((0.1, 1.0, 100.0)))


def _clip_own(parts: list[list[Tensor]], most: float) -> list[float]:
    return [clip_factors([part], most)[0] for part in parts]


@exercise("14.clip", ([[torch.tensor([3.0])], [torch.tensor([4.0])]], 1.0),
          ([[torch.tensor([0.3])], [torch.tensor([0.4])]], 1.0),
          draw=_parts, tolerance=1e-4, stars=2, minutes=8,
          mistakes={"take one norm over all ranks: they hold parts of the same gradient": _clip_own,
                    "add up the squares, not the norms": lambda parts, most:
                        [min(1.0, most / max(sum(g.norm().item() for part in parts for g in part),
                                             1e-30))] * len(parts),
                    "a gradient shorter than `most` stays as it is": lambda parts, most:
                        [most / max(math.sqrt(sum(g.square().sum().item() for part in parts
                                                  for g in part)), 1e-30)] * len(parts)})
def clip_factors(parts: list[list[Tensor]], most: float) -> list[float]:
    squares = [sum(g.square().sum().item() for g in part) for part in parts]    # on each rank
    norm = math.sqrt(sum(squares))                                              # an all-reduce
    return [min(1.0, most / norm) if norm else 1.0] * len(parts)


def _step(r: Random) -> tuple[Tensor, Tensor, Tensor, float]:
    each = r.randint(1, 4)
    w = normal(r, WORLD * each).expand(WORLD, -1)
    return w, normal(r, WORLD, WORLD * each), normal(r, WORLD, each), r.choice((0.1, 0.5, 1.0))


# A process of a rank receives only the text of a function, so each function must be complete: it
# uses no names of this module.
def _of_the_sum(w, g, m, lr, rank, ranks, reduce_scatter, all_gather):
    m = 0.9 * m + reduce_scatter(g)
    return all_gather(w.chunk(ranks)[rank] - lr * m), m


def _of_own_gradient(w, g, m, lr, rank, ranks, reduce_scatter, all_gather):
    m = 0.9 * m + g.chunk(ranks)[rank]
    return all_gather(w.chunk(ranks)[rank] - lr * m), m


def _of_the_first_part(w, g, m, lr, rank, ranks, reduce_scatter, all_gather):
    m = 0.9 * m + reduce_scatter(g) / ranks
    return all_gather(w.chunk(ranks)[0] - lr * m), m


def _not_spread(w, g, m, lr, rank, ranks, reduce_scatter, all_gather):
    m = 0.9 * m + reduce_scatter(g) / ranks
    w = w.clone()
    w.chunk(ranks)[rank].sub_(lr * m)
    return w, m


@rank_exercise("14.zero_one",
          (torch.tensor([[1.0, 1.0]] * 2), torch.tensor([[1.0, 0.0], [3.0, 2.0]]),
           torch.zeros(2, 1), 1.0),
          draw=_step, tolerance=1e-5, stars=3, minutes=15,
          mistakes={"take the mean over the ranks, not the sum": _of_the_sum,
                    "the gradients of the other ranks count, too: they saw other sequences":
                        _of_own_gradient,
                    "each rank updates its own part": _of_the_first_part,
                    "the other ranks have parts of the new weights that this one needs":
                        _not_spread})
def zero_one_step(w: Tensor, g: Tensor, m: Tensor, lr: float, rank: int, ranks: int,
                  reduce_scatter: Callable[[Tensor], Tensor],
                  all_gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    m = 0.9 * m + reduce_scatter(g) / ranks
    part = w.chunk(ranks)[rank] - lr * m
    return all_gather(part), m
