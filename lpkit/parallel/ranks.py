"""The processes that train together: the number of this process, and how they exchange values.

Messages use `torch.distributed`, with a process group for each of `layouts.GROUPS` that has several
ranks. On GPUs tensors travel by NCCL. Values of the host (for example whether to stop) travel by
gloo, so that no rank waits for its GPU. `lpkit.parallel.meeting` makes the groups.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from lpkit import records
from lpkit.errors import ConfigError, packed, unpacked
from lpkit.techniques.layouts import APART, GROUPS, Layout

# their names up to torch 2.11
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MESSAGE_TIMEOUT = timedelta(hours=1)    # `launch` names a hung rank long before
MOST_BYTES = 1 << 26        # the largest message of JSON: settings, sentences, manifests


class Waits:
    """A context around each wait for a message in an update. `seconds`: the host's time in all
    waits of the current or last update. On GPUs the streams wait and the host does not. `tell` is
    called with whether the rank waits."""

    seconds = since = 0.0
    tell: Callable[[bool], None] = bool

    def __enter__(self) -> None:
        self.tell(True)
        self.since = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.seconds += time.perf_counter() - self.since
        self.tell(False)


def wait_for(message: dist.Work, t: Tensor) -> None:
    """Waits for a message between two ranks that sends or receives `t`. gloo's default limit is the
    short time in which ranks must meet, so a limit is given; a GPU's streams wait by themselves."""
    message.wait(*([MESSAGE_TIMEOUT] if t.device.type == "cpu" else []))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the processes that train together. A process that is alone sends nothing.

    groups: this rank's process group by its name in `layouts.GROUPS`, without the groups in which
            the rank is alone. Empty if there is no process group at all
    device: the type of the devices on which ranks compute
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0     # the number of this rank on this machine
    local_world: int = 1    # how many ranks are on this machine
    layout: Layout = field(default_factory=Layout)
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    device: str = "cpu"
    waits: Waits = field(default_factory=Waits, compare=False)

    def __deepcopy__(self, _: Any) -> Ranks:
        """Returns itself: a copy of a Training has the same ranks."""
        return self

    @property
    def in_stage(self) -> int:
        """The number of this rank among the ranks of its pipeline stage."""
        return self.rank % (self.layout.devices // self.layout.pipeline)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes the run folder and decides."""
        return self.rank == 0

    def mean(self, t: Tensor) -> Tensor:
        """Returns the mean over ranks of a tensor that each rank has."""
        if not self.groups:
            return t
        total = t.detach().clone()
        with self.waits:
            dist.all_reduce(total)
        return total / self.world

    def largest(self, t: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Takes the elementwise maximum over all ranks (of `group`), in place."""
        if self.groups:
            with self.waits:
                dist.all_reduce(t, dist.ReduceOp.MAX, group=group)
        return t

    def told(self, number: int) -> int:
        """Returns the first rank's number. It travels by the host, so that no rank waits for its
        device."""
        if not self.groups:
            return number
        message = torch.tensor([number])
        self.waits.tell(True)
        dist.broadcast(message, 0)
        self.waits.tell(False)
        return int(message)

    def by_first(self, work: Callable[[], Any]) -> Any:
        """Calls the function `by_first`; a process that is alone calls `work`."""
        return work() if not self.groups else by_first(work)

    def agreed(self, what: Any) -> Any:
        """Returns the first rank's value, as JSON. Other ranks' values are ignored."""
        return what if not self.groups else _said(what)

    def refuse_differences(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError on all ranks if `facts` differ between ranks. The error names the rank
        and the fact."""
        if not self.groups:
            return
        everybody = everybodys(records.plain(dict(facts)))
        for rank, theirs in enumerate(everybody):
            for name, due in everybody[0].items():
                if theirs[name] != due:
                    raise ConfigError(f"rank {rank} has another {name} than rank 0: "
                                      f"{theirs[name]} and {due}; start all ranks from the same "
                                      f"settings, code and versions")


def by_first(work: Callable, *args: Any) -> Any:
    """Calls `work(*args)` on rank 0 of the process group, and returns its result, or raises its
    error, on all ranks. The result becomes JSON: a path becomes text, and a tuple a list."""
    if not distributed():
        return work(*args)
    result = raised = None
    if dist.get_rank() == 0:
        try:
            result = work(*args)
        except Exception as error:
            raised = error
    result, failure = _said([result, raised and packed(raised)])
    if failure:
        raise raised or unpacked(*failure)
    return result


def everybodys(what: Any) -> list[Any]:
    """Returns the values of all ranks of the process group, on each rank. They become JSON."""
    return [_said(what, rank) for rank in range(dist.get_world_size())] if distributed() else [what]


def _said(what: Any, by: int = 0) -> Any:
    """Returns the value of rank `by` of the process group. It travels as JSON: unpickling could run
    code of whoever sent it."""
    mine = dist.get_rank() == by
    text = bytearray(json.dumps(what, default=os.fspath).encode() if mine else b"")
    size = torch.tensor([len(text)])
    dist.broadcast(size, by)
    if not 0 < int(size) <= MOST_BYTES:     # check before allocating the memory
        raise RuntimeError(f"rank {by} says {int(size):,} bytes, and {MOST_BYTES:,} are the most")
    text = text if mine else bytearray(int(size))
    dist.broadcast(torch.frombuffer(text, dtype=torch.uint8), by)
    return json.loads(text)


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def groups_of(layout: Layout, rank: int) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yields the groups of a layout in which `rank` is not alone, with their names. Groups of the
    same ranks share one process group. All ranks must call it, in the same order."""
    group_by_ranks = {("", tuple(range(layout.devices))): dist.group.WORLD}
    for name, axes in GROUPS.items():
        each = [tuple(layout.peers(first, axes)) for first in range(layout.devices)
                # the first rank of each group
                if not any(layout.coordinates(first)[axis] for axis in axes)]
        own = name if name in APART else ""
        for ranks in each if len(each[0]) > 1 else ():
            if (own, ranks) not in group_by_ranks:
                group_by_ranks[own, ranks] = dist.new_group(ranks)
        mine = own, tuple(layout.peers(rank, axes))
        if mine in group_by_ranks:
            yield name, group_by_ranks[mine]


def shard_mesh(ranks: Ranks) -> DeviceMesh:
    """Returns FSDP2's mesh of the ranks that shard the same model states. With `data` replicas it
    has two axes, `data` first."""
    layout, groups = ranks.layout, ranks.groups
    with _disable_current_modes():      # a trace has real ranks, and fake tensors
        if layout.data == 1:
            return DeviceMesh.from_group(groups["shard"], ranks.device, mesh_dim_names=("shard",))
        those = torch.tensor(layout.peers(ranks.rank, GROUPS["replicas"]), device="cpu")
        return DeviceMesh.from_group([groups["data"], groups["shard"]], ranks.device,
                                     mesh=those.view(layout.data, -1),
                                     mesh_dim_names=("data", "shard"))
