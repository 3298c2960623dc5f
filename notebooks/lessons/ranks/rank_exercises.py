"""Run a learner's functions on several processes, which exchange real tensors. The exercises of
`lessons.ranks.on_ranks` are judged on such processes, too.

Only the text of a function is sent to the processes (`lpkit.parallel.processes`). In each process
the names `torch`, `F`, `dist`, `math` and `Tensor` are defined, and no other name of the notebook.
If a rank raises, the other ranks are killed; ranks that wait for one another forever are killed
after some seconds. In both cases the learner reads a message.
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
    """Call a module's function on each of `world` ranks, and return the results by rank. The
    function gets its Place and a dict of the keyword arguments."""
    with Processes(f"{function.__module__}:{function.__name__}", given, world=world,
                   progress_seconds=PROGRESS_SECONDS, parent=parent) as running:
        return running.wait()


def by_hand(functions: Sequence[Callable[..., Tensor]], given: Tensor, *,
            parent: WarmParent | None = None) -> list[Tensor]:
    """Return, for each function f, its results on all ranks, stacked: (ranks, ...). Rank r calls
    f(given[r], r, ranks), with ranks = len(given)."""
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
    """Make a process group of all ranks. Each name `who` makes a separate group, so that messages
    of an attempt and of the definition never mix."""
    torch.set_num_threads(1)
    meet("gloo", **place.among | {"init_method": f"{place.store}-{who.replace(' ', '-')}"})


def called(source: str) -> Callable[..., Any]:
    """Return the function with this source."""
    name = ast.parse(source).body[0].name
    return load(Parcel(entry=name, texts={name: source}), torch=torch, dist=dist, math=math,
                Tensor=Tensor, F=torch.nn.functional)
