"""Runs a learner's functions on several processes, which exchange real tensors. Lessons with
exercises of this kind judge them on such processes, too (`lessons.ranks.on_ranks`).

Only the text of a function is sent to the processes (`lpkit.parallel.processes`). They define
`torch`, `F`, `dist` and `math`, and nothing else of the notebook. If a rank raises, the other ranks
are ended; ranks that wait for one another forever are ended after some seconds. Both become a
sentence for the learner.
"""

import ast
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.judging.attempts import Parcel, load
from lessons.judging.judge import source_of
from lpkit.parallel.meeting import meet
from lpkit.parallel.processes import Place, Processes, WarmParent

PROGRESS_SECONDS = 20.0     # the time limit without progress of any rank


def on_ranks(function: Callable[[Place, dict], Any], world: int,
             parent: WarmParent | None = None, **given: Any) -> list[Any]:
    """Returns the results of a module's function on each of `world` ranks."""
    with Processes(f"{function.__module__}:{function.__name__}", given, world=world,
                   progress_seconds=PROGRESS_SECONDS, parent=parent) as running:
        return running.wait()


def by_hand(functions: Sequence[Callable[..., Tensor]], given: Tensor, *,
            parent: WarmParent | None = None) -> list[Tensor]:
    """Returns each function's results on all ranks, stacked: rank r of len(given) calls
    f(given[r], r, ranks)."""
    results = on_ranks(_by_hand, len(given), parent, given=given.tolist(),
                       sources=[source_of(function) for function in functions])
    return [torch.tensor(each) for each in zip(*results)]


# Code that runs in a rank.

def _by_hand(place: Place, job: dict[str, Any]) -> list[Any]:
    meet_as(place, "by hand")
    given = torch.tensor(job["given"])[place.rank]
    return [called(source)(given.clone(), place.rank, place.world).tolist()
            for source in job["sources"]]


def meet_as(place: Place, who: str) -> None:
    """Makes a process group of the ranks, a separate one for each `who`."""
    torch.set_num_threads(1)
    meet("gloo", **place.among | {"init_method": f"{place.store}-{who.replace(' ', '-')}"})


def called(source: str) -> Callable[..., Any]:
    """Returns the function with this source."""
    name = ast.parse(source).body[0].name
    return load(Parcel(entry=name, texts={name: source}), torch=torch, dist=dist, math=math,
                Tensor=Tensor, F=torch.nn.functional)
