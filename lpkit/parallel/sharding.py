"""The model states of a run lie on its ranks in one of ZeRO's ways. One class for each of ZeRO's
ways, named by `lpkit.techniques.layouts.STAGES`; this one, `Sharding`, is one device.

An optimizer is given what a rank owns, as plain tensors: whole parameters, or its rows of each. So
every optimizer, format of moments and rounding is what it is on one device. Rows are cut as FSDP2
cuts them, ceil(rows / ranks) to each, the last ranks have fewer or none; in a checkpoint they are
DTensors, which any other layout can read. A parameter has one name for each of its forms:

    stand_in    in the model while that is made in ZeRO 2 and 3: a shape without memory (`drawn`)
    whole       all of it, in one process; in ZeRO 2 and 3 one at a time
    rows        this rank's rows of it, a plain tensor
    shard       the DTensor over these rows that the model has in ZeRO 2 and 3 (`fully_sharded`)
    owned       the plain parameter over the same rows that the optimizer updates
    gathered    a Linear's whole weight as it travels: its cast (`cast_gather`)

Source: Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lpkit.contracts import Parameter, Transform
from lpkit.parallel.ranks import Ranks, all_gather
from lpkit.techniques.layouts import STAGES, Layout


@dataclass(kw_only=True)
class Sharding:
    """`compute`: the dtype of the recipe's computation, None for float32. `entry`: the method of the
    model that the loss calls, None for the model itself."""

    ranks: Ranks = field(default_factory=Ranks)
    layout: Layout = field(default_factory=Layout)
    compute: torch.dtype | None = None
    entry: str | None = None

    autocasts = True        # whether the model computes under autocast
    index = 0               # of the part that this rank owns

    def __post_init__(self):
        self.transforms: tuple[Transform, ...] = ()
        self.owned: dict[str, nn.Parameter] = {}

    def making(self, device: torch.device) -> AbstractContextManager:
        """A context around what makes the model and initialises it."""
        return nullcontext()

    def own(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Returns what this rank updates of the built and transformed model, by name."""
        self.owned = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return self.owned

    def backward(self, last: bool) -> None:
        """Called before a micro-batch's backward; after the `last`, gradients must be reduced."""

    def reduce(self) -> None:
        """Called after it: what is owned then has the gradients of the whole batch."""

    def norm(self, norm: Tensor) -> Tensor:
        """Returns the norm of all gradients, from that of the owned ones."""
        return norm

    def spread(self) -> None:
        """Is called after the optimizer's step: every rank then has the new weights that it is to
        have."""

    def told(self, name: str) -> Parameter:
        """Returns what a rule may ask of an owned parameter."""
        return Parameter(name, tuple(self.owned[name].shape))

    def whole(self, name: str, t: Tensor) -> Tensor:
        """`t`, which belongs to the owned part of a parameter, as a checkpoint has it."""
        return t

    def part(self, name: str, whole: Tensor) -> Tensor:
        """The other way: what belongs to the owned part."""
        return whole


def local(t: Tensor) -> Tensor:
    """Returns what this rank has of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def sharding(ranks: Ranks, layout: Layout, **of_run: Any) -> Sharding:
    # one rank would send itself copies
    alone = ranks.mesh is None or (layout.devices == 1 and not layout.stage)
    kind = Sharding if alone else STAGES[layout.stage].load()
    return kind(ranks=ranks, layout=layout, **of_run)


@dataclass(frozen=True)
class CutParameter(Parameter):
    """A parameter of which each rank of a group has rows."""

    sharding: OfRows

    def sum(self, t: Tensor) -> Tensor:
        total = t.clone()
        with self.sharding.ranks.waits:
            dist.all_reduce(total, group=self.sharding.group)
        return total

    def gather(self, t: Tensor) -> Tensor:
        if not self.shape:
            return t
        each = -(-self.shape[0] // self.sharding.size)      # rows of most ranks; others pad
        rows = t.new_zeros(each, *t.shape[1:])
        rows[:len(t)] = t
        whole = t.new_empty(each * self.sharding.size, *t.shape[1:])
        with self.sharding.ranks.waits:
            all_gather(whole, rows, group=self.sharding.group)
        return whole[:self.shape[0]]

    def part(self, whole: Tensor) -> Tensor:
        return self.sharding.rows(whole) if self.shape else whole


class OfRows(Sharding):
    """Each rank of the group `shard` owns some rows of every parameter."""

    def __post_init__(self):
        super().__post_init__()
        self.shapes: dict[str, torch.Size] = {}
        self.group = self.ranks.mesh.get_group("shard")
        self.size, self.index = self.layout.shard, self.ranks.mesh.get_local_rank("shard")

    def rows(self, whole: Tensor) -> Tensor:
        """A view of those of this rank."""
        each = -(-whole.shape[0] // self.size)
        start = min(self.index * each, whole.shape[0])
        return whole[start:start + each]

    def norm(self, norm: Tensor) -> Tensor:
        squares = norm.square()
        with self.ranks.waits:
            dist.all_reduce(squares, group=self.group)
        return squares.sqrt()

    def told(self, name: str) -> Parameter:
        return CutParameter(name, tuple(self.shapes[name]), self)

    def whole(self, name: str, t: Tensor) -> Tensor:
        shape = self.shapes[name]
        if t.shape != self.owned[name].shape or not shape:      # a number for the whole parameter
            return t
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(t, self.ranks.mesh, [Replicate(), Shard(0)], run_check=False,
                                  shape=shape, stride=stride)

    def part(self, name: str, whole: Tensor) -> Tensor:
        if isinstance(whole, DTensor):
            return whole.to_local()
        return self.rows(whole) if whole.shape == self.shapes[name] else whole
