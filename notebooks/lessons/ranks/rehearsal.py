"""Rehearse a pipeline: real ranks and messages, with stages that sleep instead of multiplying.

The matmuls of eight ranks would compete for two cores, while sleeping needs no core. The order, the
runtime, autograd's graph, the queues of dw and the waits are those of training, so a rehearsal can
be compared with the simulated clock (`lessons.ranks.clock`). Both return a `Timed`:

    actions = order("1f1b", ranks=8, chunks=1, m=16)
    seconds = {"forward": 0.03, "dx": 0.03, "dw": 0.03}     # for all stages, or a list by stage
    rehearse(actions, **seconds).step_seconds / clock(actions, **seconds).step_seconds
"""

import time
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.ranks.clock import Seconds, Timed, of_stages
from lpkit.parallel.meeting import meet
from lpkit.parallel.pipeline import Pipeline
from lpkit.parallel.processes import Place, Processes, WarmParent
from lpkit.precision.deferred import QUEUE
from lpkit.techniques.pipelines import Order

HOW = "rehearsed: stages that sleep"


def rehearse(order: Order, *, forward: Seconds, dx: Seconds, dw: Seconds, rounds: int = 2,
             parent: WarmParent | None = None) -> Timed:
    """Run `rounds` updates, with one process per rank, and return the times of the fastest one. The
    peaks are counted, not computed: each forward holds a tensor until its backward has ended."""
    given = {"order": [order[rank] for rank in range(len(order))], "rounds": rounds,
             "seconds": list(zip(*of_stages(order, forward, dx, dw)))}
    with Processes(f"{__name__}:naps", given, world=len(order), parent=parent) as ranks:
        fastest = min(zip(*ranks.wait(), strict=True), key=_step_seconds)
    began = min(notes["naps"][0][0] for notes in fastest)
    begins, ends = ({rank: [nap[side] - began for nap in notes["naps"]]
                     for rank, notes in enumerate(fastest)} for side in (0, 1))
    most = {int(stage): count for notes in fastest for stage, count in notes["stages"].items()}
    return Timed(begins=begins, ends=ends, peaks=[most[stage] for stage in sorted(most)],
                 rank_peaks={rank: notes["most"] for rank, notes in enumerate(fastest)}, how=HOW)


def _step_seconds(ranks: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of an update: from the first rank's start to the last rank's end."""
    return (max(notes["naps"][-1][1] for notes in ranks)
            - min(notes["naps"][0][0] for notes in ranks))


class Sleeper:
    """The stages of one rank. `naps` records the start and end of each sleep. `most` records the
    largest number of micro-batches that each stage held at once, by stage, and under the key RANK
    the largest number that all stages of the rank held at once. `now` has the numbers of
    micro-batches that are held at this moment, by the same keys."""

    RANK = -1

    def __init__(self, seconds: Sequence[Sequence[float]]):
        self.w, self.seconds = torch.zeros((), requires_grad=True), seconds
        self.naps: list[tuple[float, float]] = []
        self.now, self.most = Counter[int](), Counter[int]()

    def sleep(self, *seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(sum(seconds))
        self.naps.append((began, time.perf_counter()))

    def hold(self, stage: int) -> Tensor:
        """Return a tensor that counts as one held micro-batch until it is freed."""
        held = torch.empty(0)
        self._count(stage, 1)
        weakref.finalize(held, self._count, stage, -1)
        return held

    def _count(self, stage: int, more: int) -> None:
        for key in (stage, self.RANK):
            self.now[key] += more
            self.most[key] = max(self.most[key], self.now[key])

    def __call__(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        return Nap.apply(torch.zeros(1) if x is None else x, self.w, self, stage)


class Nap(torch.autograd.Function):
    """x + w, with a sleep in place of a matmul. Like any Function in Python, it computes dx and dw
    together, whichever gradient is requested; but if a queue was active in forward (`deferring`),
    dw is deferred to that queue."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, sleeper: Sleeper, stage: int) -> Tensor:
        ctx.sleeper, ctx.seconds, ctx.queue = sleeper, sleeper.seconds[stage], QUEUE.get()
        ctx.save_for_backward(sleeper.hold(stage))
        sleeper.sleep(ctx.seconds[0])
        return x + w

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        (held,), (_, dx, dw), sleep = ctx.saved_tensors, ctx.seconds, ctx.sleeper.sleep
        if ctx.queue is None:
            sleep(dx, dw)
            return g, g.sum(), None, None
        sleep(dx)
        # the queued call refers to `held`, so the micro-batch counts as held until dw has run
        ctx.queue.append(partial(lambda held: sleep(dw), held))
        return g, None, None, None


def naps(place: Place, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Run all rounds on this rank. Returns one dict per round:

    naps:   start and end of each sleep of this rank
    stages: largest number of micro-batches that each stage holds at once
    most:   largest number of micro-batches that all stages of this rank hold at once
    """
    torch.set_num_threads(1)
    meet("gloo", **place.among)
    try:
        order = {rank: [tuple(action) for action in actions]
                 for rank, actions in enumerate(given["order"])}
        run = Pipeline(order, place.rank, groups=(dist.group.WORLD,) * 2)
        noted = []
        for number in range(given["rounds"]):
            place.at(number, "rehearsal")
            sleeper = Sleeper(given["seconds"])
            dist.barrier()
            run.step(sleeper, torch.zeros(1))
            most = sleeper.most.pop(Sleeper.RANK)
            noted.append({"naps": sleeper.naps, "stages": sleeper.most, "most": most})
    finally:
        dist.destroy_process_group()
    return noted
