"""What a learner has written by hand runs on several processes, which exchange real tensors; the
lessons that have exercises of this kind judge them on the same (`lessons.ranks.on_ranks`).

Its text alone goes into the processes (`lpkit.parallel.processes`), which know `torch`, `F`, `dist`
and `math` and nothing else of the notebook. A rank that raises ends the others, and those that wait
for one another for ever are ended after some seconds; both are sentences.
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

PROGRESS_SECONDS = 20.0     # in which no rank gets further


def on_ranks(function: Callable[[Place, dict], Any], world: int,
             parent: WarmParent | None = None, **told: Any) -> list[Any]:
    """Returns what a function of a module returned on each of `world` ranks."""
    with Processes(f"{function.__module__}:{function.__name__}", told, world=world,
                   progress_seconds=PROGRESS_SECONDS, parent=parent) as running:
        return running.wait()


def by_hand(functions: Sequence[Callable[..., Tensor]], given: Tensor, *,
            parent: WarmParent | None = None) -> list[Tensor]:
    """Returns what each function returned on all ranks, stacked: rank r of len(given) calls
    f(given[r], r, ranks)."""
    results = on_ranks(_by_hand, len(given), parent, given=given.tolist(),
                       sources=[source_of(one) for one in functions])
    return [torch.tensor(each) for each in zip(*results)]


# In a rank.

def _by_hand(place: Place, told: dict[str, Any]) -> list[Any]:
    meet_as(place, "by hand")
    given = torch.tensor(told["given"])[place.rank]
    return [called(source)(given.clone(), place.rank, place.world).tolist()
            for source in told["sources"]]


def meet_as(place: Place, who: str) -> None:
    """Makes a process group of the ranks, another for each `who`."""
    torch.set_num_threads(1)
    meet("gloo", **place.among | {"init_method": f"{place.store}-{who.replace(' ', '-')}"})


def called(source: str) -> Callable[..., Any]:
    """Returns the function of this text."""
    name = ast.parse(source).body[0].name
    return load(Parcel(entry=name, texts={name: source}), torch=torch, dist=dist, math=math,
                Tensor=Tensor, F=torch.nn.functional)
