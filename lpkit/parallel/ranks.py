"""The processes that train together: which one this is, and what they tell one another.

PyTorch's own: `torch.distributed`, and a process group for each of `layouts.GROUPS` that has
several ranks. On GPUs tensors travel by NCCL, and what the host asks (whether to stop) by gloo, so
that no GPU is waited for. How they meet is in `lpkit.parallel.meeting`.
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
MESSAGE_TIMEOUT = timedelta(hours=1)    # `launch` names who hangs long before
MOST_BYTES = 1 << 26        # of what ranks tell one another: settings, sentences, manifests


class Waits:
    """`with waits:` around each wait for a message of an update. `seconds`: the host's, in all
    waits of the update that goes on, or of the last. On GPUs streams wait, and their host does not.
    `tell` hears whether it waits."""

    seconds = since = 0.0
    tell: Callable[[bool], None] = bool

    def __enter__(self) -> None:
        self.tell(True)
        self.since = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.seconds += time.perf_counter() - self.since
        self.tell(False)


def wait_for(message: dist.Work, t: Tensor) -> None:
    """Waits for a message between two ranks, which brings or takes `t`. Without a limit gloo waits
    only as long as ranks may take to meet; a GPU's streams wait by themselves."""
    message.wait(*([MESSAGE_TIMEOUT] if t.device.type == "cpu" else []))


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that train together. Alone, nothing is sent.

    groups: by a name of `layouts.GROUPS`, the process group of this rank; none where it is alone in
            it. Empty: there is no process group at all
    device: the type of what the ranks compute on
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0     # among those of this machine,
    local_world: int = 1    # which are this many
    layout: Layout = field(default_factory=Layout)
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    device: str = "cpu"
    waits: Waits = field(default_factory=Waits, compare=False)

    def __deepcopy__(self, _: Any) -> Ranks:
        """A copy of what trains belongs to the same ranks."""
        return self

    @property
    def in_stage(self) -> int:
        """The number of this rank among those of its pipeline's stage."""
        return self.rank % (self.layout.devices // self.layout.pipeline)

    @property
    def first(self) -> bool:
        """The one that writes and that is asked."""
        return self.rank == 0

    def mean(self, t: Tensor) -> Tensor:
        """Returns the mean of a tensor that each has."""
        if not self.groups:
            return t
        total = t.detach().clone()
        with self.waits:
            dist.all_reduce(total)
        return total / self.world

    def largest(self, t: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Takes the largest of what all (of `group`) have, number by number, in place."""
        if self.groups:
            with self.waits:
                dist.all_reduce(t, dist.ReduceOp.MAX, group=group)
        return t

    def told(self, number: int) -> int:
        """Returns what the first process says; by the host, so that no device is waited for."""
        if not self.groups:
            return number
        said = torch.tensor([number])
        self.waits.tell(True)
        dist.broadcast(said, 0)
        self.waits.tell(False)
        return int(said)

    def by_first(self, work: Callable[[], Any]) -> Any:
        """Does as the function `by_first`; alone, `work` is done here."""
        return work() if not self.groups else by_first(work)

    def agreed(self, what: Any) -> Any:
        """Returns what the first process has, which becomes JSON; the others' is not looked at."""
        return what if not self.groups else _said(what)

    def refuse_differences(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError, on all, when `facts` are not the same on all: it names who differs,
        and in what."""
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
    """Returns, or raises, on all ranks what `work(*args)` did on rank 0 of the process group. It
    becomes JSON: a path is text, and a tuple a list."""
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
    """Returns what each rank of the process group has, on all of them. It becomes JSON."""
    return [_said(what, rank) for rank in range(dist.get_world_size())] if distributed() else [what]


def _said(what: Any, by: int = 0) -> Any:
    """Returns what rank `by` of the process group has. Bytes of JSON travel, and nothing is
    unpickled."""
    mine = dist.get_rank() == by
    text = bytearray(json.dumps(what, default=os.fspath).encode() if mine else b"")
    size = torch.tensor([len(text)])
    dist.broadcast(size, by)
    if not 0 < int(size) <= MOST_BYTES:     # before there is room for it
        raise RuntimeError(f"rank {by} says {int(size):,} bytes, and {MOST_BYTES:,} are the most")
    text = text if mine else bytearray(int(size))
    dist.broadcast(torch.frombuffer(text, dtype=torch.uint8), by)
    return json.loads(text)


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def groups_of(layout: Layout, rank: int) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Makes the groups of a layout in which `rank` is not alone, by name: those of the same ranks
    are one. All ranks call it alike."""
    made = {("", tuple(range(layout.devices))): dist.group.WORLD}
    for name, axes in GROUPS.items():
        each = [tuple(layout.peers(one, axes)) for one in range(layout.devices)
                if not any(layout.coordinates(one)[axis] for axis in axes)]    # the first of each
        own = name if name in APART else ""
        for ranks in each if len(each[0]) > 1 else ():
            if (own, ranks) not in made:
                made[own, ranks] = dist.new_group(ranks)
        mine = own, tuple(layout.peers(rank, axes))
        if mine in made:
            yield name, made[mine]


def shard_mesh(ranks: Ranks) -> DeviceMesh:
    """Returns the mesh of those that keep parts of the same model states, for FSDP2; with replicas
    of it its two axes, `data` first."""
    layout, groups = ranks.layout, ranks.groups
    with _disable_current_modes():      # a trace has real ranks, of fake tensors
        if layout.data == 1:
            return DeviceMesh.from_group(groups["shard"], ranks.device, mesh_dim_names=("shard",))
        those = torch.tensor(layout.peers(ranks.rank, GROUPS["replicas"]), device="cpu")
        return DeviceMesh.from_group([groups["data"], groups["shard"]], ranks.device,
                                     mesh=those.view(layout.data, -1),
                                     mesh_dim_names=("data", "shard"))
