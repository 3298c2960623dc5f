"""Lesson 17, pipelines: its study, its figures and its exercises.

Computes when each rank of a pipeline works, the time of an update, and the activations that ranks
hold, in three ways: by a formula, by a simulated clock that steps through a schedule's order, and
by real processes whose stages sleep. Also counts the matmuls of a backward that is split into dx
and dw.

    paths = fitting(4, 8)                           # schedules of 4 ranks and 8 micro-batches
    timed(paths["1f1b"], 1, 1, 1).step_seconds      # F, dx and dw of all layers of a rank
    rehearse(paths, (0.01, 0.01, 0.01)).kit["1f1b"].step_seconds
    split("fp8-tensorwise")["asked twice"].products         # of a block, by part
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import lessons.rows.pipelines  # noqa: F401  adds rows
from lessons.figures.drawing import NAMES, axis, bars, figure
from lessons.judging.judge import Exercise, adding_to
from lessons.ranks import rehearsal
from lessons.ranks.clock import Timed, clock
from lessons.ranks.rehearsal import Nap, Sleeper
from lpkit import hardware
from lpkit.config import Config
from lpkit.parallel.meeting import meet
from lpkit.parallel.pipeline import Pipeline, order
from lpkit.parallel.processes import Place, Processes, WarmParent
from lpkit.precision import deferred
from lpkit.precision.deferred import deferring
from lpkit.precision.linear import ScaledLinear
from lpkit.predict.compare import disturbance
from lpkit.tables import html_table
from lpkit.techniques.pipelines import PIPELINES as SCHEDULES
from lpkit.techniques.pipelines import Order
from lpkit.training.training import RandomTokens, Training

# the notebook imports these names of other modules from here
__all__ = ["SCHEDULES", "Pipeline", "WarmParent", "clock", "deferred", "deferring"]

# ---- The study: orders and their clock

LEAST, LABELLED = 1, 600        # fewest chunks of a rank; most actions that a figure labels
# also rehearsed by PyTorch's runtime; dualpipev mixes whole backwards with split ones
PEERS = ("1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv")


@dataclass(frozen=True, kw_only=True)
class Path:
    """A schedule for a number of ranks, each with `chunks` stages, and a number of micro-batches.
    `order` has the actions of each rank."""

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    order: Order

    def on_paper(self, forward: float, dx: float, dw: float) -> float:
        """Return the seconds of an update by formula: work plus bubble. `forward`, `dx` and `dw`:
        seconds of all layers of a rank for one micro-batch."""
        each = [seconds / self.chunks for seconds in (forward, dx, dw)]
        return (self.micro_batches * (forward + dx + dw)
                + SCHEDULES[self.name].bubble(self.ranks, *each))


def path(name: str, ranks: int, micro_batches: int, chunks: int = LEAST) -> Path:
    """Return a schedule with `chunks` chunks per rank, or the nearest number that it supports.
    Raises ConfigError for ranks and micro-batches that the schedule does not support."""
    least, most = SCHEDULES[name].chunks
    chunks = min(max(chunks, least), most)
    return Path(name=name, ranks=ranks, micro_batches=micro_batches, chunks=chunks,
                order=order(name, ranks, chunks, micro_batches))


def fitting(ranks: int, micro_batches: int) -> dict[str, Path]:
    """Return all schedules that support these numbers, by name."""
    return {name: path(name, ranks, micro_batches) for name, row in SCHEDULES.items()
            if not row.problem(ranks, row.chunks[0], micro_batches)}


def timed(path: Path, forward: float, dx: float, dw: float, message_seconds: float = 0.0) -> Timed:
    """Return the times of a schedule by the simulated clock. `forward`, `dx` and `dw`: seconds of
    all layers of a rank for one micro-batch; each stage takes its share."""
    return clock(path.order, forward=forward / path.chunks, dx=dx / path.chunks,
                 dw=dw / path.chunks, message_seconds=message_seconds)


def timed_twice(path: Path, forward: float, dx: float, dw: float) -> Timed:
    """Return the times of a schedule on PyTorch's runtime by the simulated clock. PyTorch runs
    autograd's graph for dx and later again for dw, so a Function that computes both gradients
    computes both twice. The first stage needs no dx, so its graph runs only once."""
    last = path.ranks * path.chunks - 1
    both = (dx + dw) / path.chunks
    first = 0.0 if SCHEDULES[path.name].splits else both
    return clock(path.order, forward=forward / path.chunks, dx=[first, *[both] * last],
                 dw=both if SCHEDULES[path.name].splits else 0.0)


def held(path: Path, times: Timed) -> list[float]:
    """Return the peak of the activations that each rank holds. The unit is the activations of all
    layers of a rank for one micro-batch."""
    return [times.rank_peaks[rank] / path.chunks for rank in range(path.ranks)]


# ---- The study: a rehearsal. Stages sleep, so two cores can run eight ranks.

PROGRESS_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The times of an update on both runtimes.

    kit     by schedule: times on the kit's runtime, with `deferring`
    torch   by schedule of PEERS: seconds on PyTorch's runtime
    others  share of the cores that other processes used
    """

    kit: Mapping[str, Timed]
    torch: Mapping[str, float]
    others: float


def rehearse(paths: Mapping[str, Path], seconds: tuple[float, float, float], *, rounds: int = 2,
             parent: WarmParent | None = None) -> Rehearsal:
    """Rehearse the schedules on both runtimes. `seconds`: the time of F, dx and dw of all layers of
    a rank for one micro-batch."""
    others, kit = hardware.others(), {}
    for name, path in paths.items():
        forward, dx, dw = (each / path.chunks for each in seconds)
        kit[name] = rehearsal.rehearse(path.order, forward=forward, dx=dx, dw=dw, rounds=rounds,
                                       parent=parent)
    given = {"rounds": rounds, "seconds": seconds,
            "cases": [[each.name, each.chunks, each.micro_batches] for each in paths.values()
                      if each.name in PEERS]}
    world = next(iter(paths.values())).ranks
    with Processes(f"{__name__}:rehearsed", given, world=world, parent=parent,
                   progress_seconds=PROGRESS_SECONDS) as running:
        peers = running.wait()[0]
    return Rehearsal(kit=kit, torch=peers, others=others())


class Stage(nn.Module):
    """A stage for PyTorch's runtime that sleeps instead of computing."""

    def __init__(self, number: int, sleeper: Sleeper):
        super().__init__()
        self.w, self.number, self.sleeper = nn.Parameter(torch.zeros(())), number, sleeper

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(x, self.w, self.sleeper, self.number)


def rehearsed(place: Place, given: dict[str, Any]) -> dict[str, float]:
    """Return the shortest update by schedule on PyTorch's runtime; each rank calls it."""
    torch.set_num_threads(1)
    meet("gloo", **place.among)
    shortest = {}
    try:
        for number, (name, chunks, m) in enumerate(given["cases"]):
            place.at(number, "rehearsal")
            naps = [[each / chunks for each in given["seconds"]]] * place.world * chunks
            step = _torchs(name, place, chunks, m, Sleeper(naps))
            shortest[name] = min(_seconds(step) for _ in range(given["rounds"]))
    finally:
        dist.destroy_process_group()
    return shortest


def _seconds(step: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - began


def _torchs(name: str, place: Place, chunks: int, m: int, sleeper: Sleeper) -> Callable[[], Any]:
    """Return a function that runs one update of m micro-batches on PyTorch's runtime."""
    kind, stages = SCHEDULES[name].load(), place.world * chunks
    ids = SCHEDULES[name].stages(place.rank, place.world, chunks)
    parts = [PipelineStage(Stage(stage, sleeper), stage, stages, torch.device("cpu"))
             for stage in ids]
    schedule = kind(parts[0] if issubclass(kind, PipelineScheduleSingle) else parts,
                    n_microbatches=m, loss_fn=lambda y, target: (y - target).sum())
    first = (torch.zeros(m, 1),) if 0 in ids else ()
    last = {"target": torch.zeros(m, 1), "losses": []} if stages - 1 in ids else {}
    return partial(schedule.step, *first, **last)


# ---- The study: the number of products of a backward in two parts

WHOLE, TWICE, LATER = "one backward", "asked twice", "deferring"
PARTS = ("F", "dx", "dw")


class Counting:
    """A backend that counts its matmuls (`count`); everything else is the wrapped backend's."""

    def __init__(self, inner: Any):
        self.inner, self.count = inner, 0

    def product(self, *args: Any, **how: Any) -> Tensor:
        self.count += 1
        return self.inner.product(*args, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A block's forward and backward in one of three ways: WHOLE, TWICE or LATER. `products`
    (matmuls) and `seconds` (medians) are by part of PARTS; a backward that is not split counts as
    dx. `gradients`: the gradients of the block's parameters."""

    products: Mapping[str, int]
    seconds: Mapping[str, float]
    gradients: tuple[Tensor, ...]


def block_of(recipe: str, width: int) -> Config:
    return Config().replace({
        "model.layers": 1, "model.width": width, "model.heads": 4, "model.context": 128,
        "model.vocab": 256, "model.norm": "rmsnorm", "model.mlp": "gelu", "model.bias": False,
        "global_batch": 2, "grad_accum_steps": 1, "precision.recipe": recipe,
        "system.device": "cpu", "system.threads": 1, "system.compile": False})


def split(recipe: str = "fp8-tensorwise", *, width: int = 256, rounds: int = 3) -> dict[str, Split]:
    """Run a block of a Transformer in three ways and return the results by way: with a whole
    backward; with a backward that is split by running autograd's graph twice, as PyTorch's
    pipelines do; and with a backward that is split by `deferring`."""
    config = block_of(recipe, width)
    training = Training.build(config, data=RandomTokens(config))
    block, autocast = training.model.blocks[0], training.decisions.autocast
    layers = [module for module in block.modules() if isinstance(module, ScaledLinear)]
    for layer in layers:
        layer.arithmetic = Counting(layer.arithmetic)
    draw = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, 128, width, generator=draw) for _ in range(2))
    x.requires_grad_()
    rotation = training.model.positions.rotation(128, 0, x)

    def forward() -> Tensor:
        with autocast:
            return block(x, rotation)

    results = {}
    for name, steps in {WHOLE: _whole, TWICE: _by_the_graph, LATER: _by_queue}.items():
        counts, seconds = {}, {}
        for _ in range(rounds):
            block.zero_grad()
            began = time.perf_counter()
            for part, _ in zip(PARTS, steps(forward, block, x, g)):
                seconds.setdefault(part, []).append(time.perf_counter() - began)
                counts[part] = sum(layer.arithmetic.count for layer in layers)
                for layer in layers:
                    layer.arithmetic.count = 0
                began = time.perf_counter()
        results[name] = Split(products=counts, gradients=tuple(
            p.grad.clone() for p in block.parameters()),
            seconds={part: median(each) for part, each in seconds.items()})
    return results


# Each function below runs the parts of a step and yields after each part, so that the caller can
# time it and count its matmuls.

def _whole(forward: Callable[[], Tensor], block: nn.Module, x: Tensor, g: Tensor) -> Iterator[None]:
    y = forward()
    yield
    y.backward(g)
    yield


def _by_the_graph(forward: Callable[[], Tensor], block: nn.Module, x: Tensor,
                  g: Tensor) -> Iterator[None]:
    y = forward()
    yield
    weights = list(block.parameters())
    _, groups = stage_backward_input([y], [g], [x], iter(weights))
    yield
    stage_backward_weight(iter(weights), groups)
    yield


def _by_queue(forward: Callable[[], Tensor], block: nn.Module, x: Tensor,
              g: Tensor) -> Iterator[None]:
    queue: list[Callable[[], None]] = []
    with deferring(queue):
        y = forward()
    yield
    y.backward(g)
    yield
    while queue:
        queue.pop(0)()
    yield


def same_bits(splits: Mapping[str, Split], name: str) -> bool:
    """Whether the gradients of a way equal the gradients of the whole backward, bit by bit."""
    return all(map(torch.equal, splits[name].gradients, splits[WHOLE].gradients))


# ---- Figures and tables

KINDS = {"F": ("forward", "#004488"), "B": ("backward, whole", "#bb5566"),
         "I": ("dx", "#ad7a00"), "W": ("dw", "#2ca392")}
FAINTER = 0.55          # opacity factor for each further chunk of a rank


def gantt(rows: Mapping[str, tuple[Path, Timed]], title: str, unit: str = "") -> dict:
    """Return the plotly spec of the actions of each rank over time, one schedule below the other.
    White areas are the bubble. `rows`: by the schedule's label; `unit`: of the time axis."""
    # each block is one action: its row, its micro-batch, its begin and end, its stage, and the
    # place of this stage among the rank's stages
    many = sum(len(actions) for path, _ in rows.values() for actions in path.order.values())
    names = [_rank(name, rank) for name, (path, _) in rows.items() for rank in range(path.ranks)]
    traces = []
    for kind, (words, colour) in KINDS.items():
        blocks = [(_rank(name, rank), micro, times.begins[rank][i], times.ends[rank][i],
                  stage, SCHEDULES[path.name].stages(rank, path.ranks, path.chunks).index(stage))
                 for name, (path, times) in rows.items() for rank, actions in path.order.items()
                 for i, (stage, is_kind, micro) in enumerate(actions) if is_kind == kind]
        if blocks:
            traces.append(bars(
                [row for row, *_ in blocks], [end - begin for _, _, begin, end, *_ in blocks],
                words, colour, base=[begin for _, _, begin, *_ in blocks],
                text=[str(micro) if many <= LABELLED else "" for _, micro, *_ in blocks],
                textposition="inside", insidetextanchor="middle", constraintext="none",
                textfont={"size": 10, "color": "#ffffff"},
                customdata=[[micro, stage, end] for _, micro, _, end, stage, _ in blocks],
                marker={"color": colour, "line": {"color": "#ffffff", "width": 0.5},
                        "opacity": [FAINTER**chunk for *_, chunk in blocks]},
                hover="micro-batch %{customdata[0]} in stage %{customdata[1]}, "
                      "%{base:.4g} to %{customdata[2]:.4g}"))
    return figure(traces, title, height=120 + 27 * len(names), barmode="overlay", bargap=0.12,
                  uniformtext={"mode": False},
                  yaxis={**NAMES, "categoryorder": "array", "categoryarray": names},
                  xaxis=axis(f"time, {unit}" if unit else "time"))


def _rank(name: str, rank: int) -> str:
    return f"{name}{', ' * bool(name)}rank {rank}"


def view(schedule: str, ranks: int, micro_batches: int, chunks: int, forward: float, dx: float,
         dw: float, message: float) -> tuple[dict, str]:
    """Return a figure and a table of one schedule for an Explorer."""
    planned = path(schedule, ranks, micro_batches, chunks)
    times = timed(planned, forward, dx, dw, message)
    work = micro_batches * (forward + dx + dw)
    paper, most = planned.on_paper(forward, dx, dw), held(planned, times)
    rows = [("time of an update", f"{times.step_seconds:.4g}", f"{paper:.4g}"),
            ("work of a rank", f"{work:.4g}", f"{work:.4g}"),
            ("bubble", f"{times.bubble_share:.1%}", f"{1 - work / paper:.1%}"),
            ("micro-batches held by rank 0", f"{most[0]:g}", ""),
            (f"micro-batches held by rank {ranks - 1}", f"{most[-1]:g}", "")]
    title = f"{schedule}: {ranks} ranks, {planned.chunks} stage{'s' * (planned.chunks > 1)} each"
    return gantt({"": (planned, times)}, title), html_table(
        ("", "by the clock", "by formula"), rows)


def steps_table(paths: Mapping[str, Path], seconds: tuple[float, float, float]) -> str:
    """Return an HTML table of the time of an update and its bubble by schedule: by formula and by
    the simulated clock."""
    lines, work = [], sum(seconds)
    for name, path in paths.items():
        times, paper = timed(path, *seconds), path.on_paper(*seconds)
        lines.append((name, path.chunks, _ms(paper), f"{1 - path.micro_batches * work / paper:.1%}",
                      _ms(times.step_seconds), f"{times.bubble_share:.1%}"))
    return html_table(("schedule", "stages per rank", "update, by formula", "bubble",
                       "update, by the clock", "bubble"), lines)


def rehearsal_table(paths: Mapping[str, Path], seconds: tuple[float, float, float],
                    run: Rehearsal) -> str:
    """Return an HTML table of the time of an update by schedule: by the simulated clock and as
    measured on both runtimes. PyTorch's runtime computes dw twice (`timed_twice`)."""
    lines, kit = [], {name: each.step_seconds for name, each in run.kit.items()}
    for name, path in paths.items():
        line = [name]
        for predict, runs in ((timed, kit), (timed_twice, run.torch)):
            if name in runs:
                predicted, measured = predict(path, *seconds).step_seconds, runs[name]
                line += [_ms(predicted), _ms(measured), f"{measured / predicted - 1:+.1%}"]
            else:
                line += ["", "", ""]
        lines.append(tuple(line))
    return html_table(("schedule", "by the clock", "kit's runtime", "difference",
                       "by the clock, dw computed twice", "PyTorch's runtime", "difference"), lines,
                      caption="; ".join(filter(None, (rehearsal.HOW,
                                                      disturbance(run.others)))))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def held_table(paths: Mapping[str, Path], seconds: tuple[float, float, float],
               run: Rehearsal) -> str:
    """Return an HTML table of the most micro-batches that each rank holds: by the simulated clock
    and as counted on the kit's runtime."""
    lines = []
    for name, path in paths.items():
        both = held(path, timed(path, *seconds)), held(path, run.kit[name])
        lines.append((name, *(" ".join(f"{each:g}" for each in ranks) for ranks in both)))
    return html_table(("micro-batches held by rank 0, 1, ...", "by the clock", "counted"), lines)


def split_table(splits: Mapping[str, Split]) -> str:
    """Return an HTML table of the matmuls and the seconds of a block, by part."""
    lines = []
    for name, split in splits.items():
        by_part = [(f"{split.products[part]}", f"{1e3 * split.seconds[part]:.1f} ms")
                   if part in split.products else ("", "") for part in PARTS]
        lines.append((name, *(" in ".join(filter(None, each)) for each in by_part),
                      str(sum(split.products.values())),
                      "yes" if same_bits(splits, name) else "no"))
    return html_table(("matmuls of a block", "forward", "dx", "dw", "total",
                       "gradients equal one backward's, bit by bit"), lines)


def worst(paths: Mapping[str, Path], seconds: tuple[float, float, float],
          run: Rehearsal) -> tuple[float, str]:
    """Return the largest relative difference between the time of an update on the kit's runtime and
    by the simulated clock, and the name of its schedule."""
    return max((abs(run.kit[name].step_seconds / timed(path, *seconds).step_seconds - 1), name)
               for name, path in paths.items())


def by_products(splits: Mapping[str, Split], ranks: int, micro_batches: int
                ) -> dict[str, tuple[Path, Timed]]:
    """Return schedules for `gantt` with one block of the model per rank. The time unit is one
    matmul: `splits` has the matmuls of each part."""
    plain, zero = (path(schedule, ranks, micro_batches) for schedule in ("1f1b", "zero-bubble"))
    whole, later, twice = ([float(splits[how].products.get(part, 0)) for part in PARTS]
                           for how in (WHOLE, LATER, TWICE))
    return {"1f1b": (plain, timed(plain, *whole)),
            "zero bubble, deferring": (zero, timed(zero, *later)),
            "zero bubble, asked twice": (zero, timed_twice(zero, twice[0], twice[1], 0.0))}


# ---- Exercises

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)


@exercise("17.bubble", (2, 1, 1), (4, 8, 1), (4, 8, 2), minutes=4,
          draw=lambda r: (r.randint(1, 64), r.randint(1, 128), r.randint(1, 8)),
          mistakes={"divide by the update, which includes the bubble":
                        lambda ranks, micro_batches, chunks: (ranks - 1) / (micro_batches * chunks),
                    "a chunk has only a part of a rank's layers, so each wait is shorter":
                        lambda ranks, micro_batches, chunks:
                        (ranks - 1) / (micro_batches + ranks - 1)})
def bubble(ranks: int, micro_batches: int, chunks: int) -> float:
    return (ranks - 1) / (micro_batches * chunks + ranks - 1)


def _gpipe(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """Return a rank's actions by GPipe: all forwards, then all backwards."""
    return [f"{kind}{i}" for kind in "FB" for i in range(micro_batches)]


@exercise("17.order", (0, 1, 1), (1, 2, 3), (0, 2, 3), (0, 4, 2), minutes=8, stars=2,
          draw=lambda r: ((rank := r.randint(0, 5)), rank + r.randint(1, 4), r.randint(1, 9)),
          mistakes={"that is GPipe: in 1F1B a backward runs as soon as it can": _gpipe,
                    "a rank begins with one forward more than there are ranks after it":
                        lambda rank, ranks, micro_batches: one_f_one_b(0, ranks, micro_batches)})
def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[str]:
    first = min(ranks - rank, micro_batches)
    actions = [f"F{i}" for i in range(first)]
    for i in range(micro_batches):
        actions.append(f"B{i}")
        if first + i < micro_batches:
            actions.append(f"F{first + i}")
    return actions


def _needed(rank: int, action: str) -> set[tuple[int, str]]:
    """Return the actions (rank, action) that must end before this action."""
    if action[0] == "F":
        return {(rank - 1, action)}
    return {(rank, action.replace("B", "F")), (rank + 1, action)}


def _in_any_order(r: Random, ranks: int, m: int) -> list[list[str]]:
    """Return orders in which each next action is drawn from those whose inputs are ready."""
    left = {(rank, f"{kind}{i}") for rank in range(ranks) for kind in "FB" for i in range(m)}
    orders: list[list[str]] = [[] for _ in range(ranks)]
    while left:
        ready = sorted(action for action in left if not _needed(*action) & left)
        rank, action = r.choice(ready)
        left.remove((rank, action))
        orders[rank].append(action)
    return orders


def _orders(r: Random) -> tuple[list[list[str]], float, float]:
    """Draw orders: the first ranks use GPipe and the others 1F1B, or the order is random."""
    ranks, m = r.randint(1, 4), r.randint(1, 5)
    first = r.randint(0, ranks)
    orders = [(_gpipe if rank < first else one_f_one_b)(rank, ranks, m) for rank in range(ranks)]
    if r.random() < 0.5:
        orders = _in_any_order(r, ranks, m)
    return orders, r.choice((0.5, 1.0, 3.0)), r.choice((1.0, 2.0, 2.5))


@exercise("17.step", ([["F0", "B0"]], 1.0, 2.0), ([["F0", "B0"], ["F0", "B0"]], 1.0, 2.0),
          ([["F0", "F1", "B0"], ["F0", "B0", "F1", "B1"]], 1.0, 2.0),
          minutes=10, stars=3, draw=_orders, drawn=60,
          mistakes={"ranks wait for one another": lambda orders, forward, backward: max(
                        sum(forward if action[0] == "F" else backward for action in actions)
                        for actions in orders)})
def step_seconds(orders: list[list[str]], forward: float, backward: float) -> float:
    ends = {}

    def end(rank: int, place: int) -> float:
        if (rank, place) not in ends:
            action = orders[rank][place]
            begin = end(rank, place - 1) if place else 0.0
            other = rank - 1 if action[0] == "F" else rank + 1
            if 0 <= other < len(orders):
                begin = max(begin, end(other, orders[other].index(action)))
            ends[rank, place] = begin + (forward if action[0] == "F" else backward)
        return ends[rank, place]

    return max(end(rank, len(actions) - 1) for rank, actions in enumerate(orders))
