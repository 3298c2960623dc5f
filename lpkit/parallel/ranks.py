"""`Ranks`: this process among the processes that train together, and how they exchange values.

Messages use `torch.distributed`, with a process group for each of `layouts.GROUPS` that has several
ranks. Between GPUs, tensors travel by NCCL. Values of the host (for example whether to stop) travel
by gloo, so that no rank waits for its GPU. `lpkit.parallel.meeting` creates the groups.
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

# up to torch 2.11, these functions have the second names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MESSAGE_TIMEOUT = timedelta(hours=1)    # `launch` finds a hung rank after minutes
MOST_BYTES = 1 << 26        # largest message of JSON (settings, errors, manifests of checkpoints)


class Waits:
    """A context to enter around each wait for a message, to measure waiting time.

    seconds: the time that the host has waited in the current (or last) update. On GPUs the host
             does not wait: the GPU's streams wait
    tell:    called with True when a wait begins, and with False when it ends
    """

    seconds = since = 0.0
    tell: Callable[[bool], None] = bool

    def __enter__(self) -> None:
        self.tell(True)
        self.since = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.seconds += time.perf_counter() - self.since
        self.tell(False)


def wait_for(message: dist.Work, t: Tensor) -> None:
    """Wait until the send or receive of `t` between two ranks is complete. On CPUs the limit is
    MESSAGE_TIMEOUT, because gloo's default is the short time in which ranks must connect. On GPUs,
    the GPU's stream waits, not the host, so no limit is given."""
    message.wait(*([MESSAGE_TIMEOUT] if t.device.type == "cpu" else []))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the processes that train together. `Ranks()` is a process without other
    ranks: its methods send no messages.

    groups: this rank's process groups, by their names in `layouts.GROUPS`. Groups in which this
            rank is the only member are left out. Empty for a process without other ranks
    device: the type of the devices on which ranks compute, "cpu" or "cuda"
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
        """Return this object itself: a copy of a Training uses the same process groups."""
        return self

    @property
    def in_stage(self) -> int:
        """The number of this rank among the ranks of its pipeline stage."""
        return self.rank % (self.layout.devices // self.layout.pipeline)

    @property
    def first(self) -> bool:
        """True for rank 0, which writes the run folder and decides for all ranks."""
        return self.rank == 0

    def mean(self, t: Tensor) -> Tensor:
        """Return the elementwise mean of `t` over all ranks, as a new tensor."""
        if not self.groups:
            return t
        total = t.detach().clone()
        with self.waits:
            dist.all_reduce(total)
        return total / self.world

    def largest(self, t: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Replace `t` in place by its elementwise maximum over all ranks (or those of `group`), and
        return `t`."""
        if self.groups:
            with self.waits:
                dist.all_reduce(t, dist.ReduceOp.MAX, group=group)
        return t

    def broadcast(self, number: int) -> int:
        """Return the number that rank 0 passes. The message is a CPU tensor, so that no rank waits
        for its GPU."""
        if not self.groups:
            return number
        message = torch.tensor([number])
        self.waits.tell(True)
        dist.broadcast(message, 0)
        self.waits.tell(False)
        return int(message)

    def by_first(self, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0 only, and return its result on all ranks: see the function
        `by_first` below."""
        return work() if not self.groups else by_first(work)

    def agreed(self, what: Any) -> Any:
        """Return rank 0's value on all ranks. It becomes JSON. Values of other ranks are ignored.
        """
        return what if not self.groups else _sent(what)

    def refuse_differences(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError on all ranks if a rank has other `facts` (by name) than rank 0. The
        error has the rank, the name and both values."""
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
    """Call `work(*args)` on rank 0 only. On all ranks, return its result or raise its error. The
    result becomes JSON: a path becomes text, and a tuple becomes a list."""
    if not distributed():
        return work(*args)
    result = raised = None
    if dist.get_rank() == 0:
        try:
            result = work(*args)
        except Exception as error:
            raised = error
    result, failure = _sent([result, raised and packed(raised)])
    if failure:
        raise raised or unpacked(*failure)
    return result


def everybodys(what: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. The values become JSON."""
    return [_sent(what, rank) for rank in range(dist.get_world_size())] if distributed() else [what]


def _sent(what: Any, by: int = 0) -> Any:
    """Return the value `what` of rank `by`, on all ranks. It is sent as JSON, not as a pickle: a
    pickle from a program that is not a rank could run any code."""
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
    """Return whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


def groups_of(layout: Layout, rank: int) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Create the process groups of a layout. Yield (name in `layouts.GROUPS`, process group) for
    each group in which `rank` has other members. Two groups with the same ranks share a process
    group, except those of `layouts.APART`. All ranks must call this function at the same point,
    because each process group is created by all ranks together."""
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
    """Return the DeviceMesh for FSDP2: the ranks that shard the same model states. With `data`
    replicas it has two dimensions, ("data", "shard")."""
    layout, groups = ranks.layout, ranks.groups
    with _disable_current_modes():      # a trace computes with fake tensors; a mesh needs real ones
        if layout.data == 1:
            return DeviceMesh.from_group(groups["shard"], ranks.device, mesh_dim_names=("shard",))
        those = torch.tensor(layout.peers(ranks.rank, GROUPS["replicas"]), device="cpu")
        return DeviceMesh.from_group([groups["data"], groups["shard"]], ranks.device,
                                     mesh=those.view(layout.data, -1),
                                     mesh_dim_names=("data", "shard"))
