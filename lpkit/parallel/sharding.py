"""How the model states of a run are divided over its ranks. Each of ZeRO's stages has a class,
named by `lpkit.techniques.layouts`: STAGES, or REDUCTIONS for ZeRO 0. The class `Sharding` here is
for one device.

An optimizer is given plain tensors that this rank owns: whole parameters, or its rows of each. So
every optimizer, moment format and rounding works as on one device. Rows are cut as FSDP2 cuts them:
each rank has ceil(rows / ranks), and the last ranks have fewer or none. A checkpoint stores rows as
pieces with their offsets (`cut`), which a run in any other layout can read. A parameter has a name
for each of its forms:

    stand_in    in the model while it is built in ZeRO 2 and 3: a shape without memory (`drawn`)
    whole       the whole parameter, as in one process; in ZeRO 2 and 3 one at a time
    part        this rank's part under tensor parallelism (`tensor`); otherwise the same as whole
    rows        this rank's rows of the part, a plain tensor
    shard       the DTensor over these rows that the model has in ZeRO 2 and 3 (`fully_sharded`)
    owned       the plain parameter over the same rows that the optimizer updates
    gathered    a Linear's whole weight as it travels: its cast (`lessons.rows.cast_gather`)

Source: Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from lpkit.contracts import Governor, Parameter, Transform
from lpkit.parallel.cut import Cut, Piece, Split, pieces
from lpkit.parallel.ranks import Ranks, all_gather, wait_for
from lpkit.techniques.layouts import GROUPS, REDUCTIONS, STAGES, Layout


@dataclass(kw_only=True)
class Sharding:
    """`compute`: the dtype of the recipe's computation, None for float32. `entry`: the model's
    method that the loss calls, None for the model itself."""

    ranks: Ranks = field(default_factory=Ranks)
    layout: Layout = field(default_factory=Layout)
    compute: torch.dtype | None = None
    entry: str | None = None

    autocasts = True        # whether the model computes under autocast
    index = 0               # number of this rank's share of the rows
    by_rows = False         # whether each rank of the group `shard` owns some rows

    def __post_init__(self):
        self.transforms: tuple[Transform, ...] = ()
        self.owned: dict[str, nn.Parameter] = {}
        # state of averages that checkpoints store, by name
        self.governors: dict[str, Governor] = {}
        self.splits: dict[str, Split] = {}      # how tensor parallelism cut a parameter, by name
        self.shapes: dict[str, torch.Size] = {}     # shapes of the parts, also of frozen parameters
        # the other rank of the pipeline that has a parameter, too, by name
        self.twice: dict[str, int] = {}

    def making(self, device: torch.device) -> AbstractContextManager:
        """Returns a context around the code that builds the model and initialises it."""
        return nullcontext()

    def own(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters of the transformed model that this rank updates, by name."""
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.owned_of = {p: self.mine(p) for p in trained.values()}
        self.owned = {name: self.owned_of[p] for name, p in trained.items()}
        return self.owned

    def mine(self, p: nn.Parameter) -> nn.Parameter:
        """Returns the parameter that this rank updates in place of the model's parameter."""
        return p

    def backward(self, last: bool) -> None:
        """Called before a micro-batch's backward; after the `last`, gradients must be reduced."""

    def reduce(self) -> None:
        """Called after the last backward: gives owned parameters the whole batch's gradients."""
        self._sum_alike()
        for name, peer in self.twice.items():
            mine, group = self.owned[name].grad.contiguous(), self.ranks.groups["pipeline"]
            theirs = torch.empty_like(mine)
            both = [dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
                    dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer)]
            with self.ranks.waits:
                for work in dist.batch_isend_irecv(both):
                    wait_for(work, mine)
            self.owned[name].grad = mine + theirs

    def _sum_alike(self) -> None:
        """Sums the gradients of parameters that are replicated over the tensor group, for example a
        norm's weights: each rank of the group saw only a part of the tokens."""
        if self.layout.tensor == 1:
            return
        for name, split in self.splits.items():
            own = self.owned.get(name)      # None: another stage of the pipeline has it
            if own is not None and split.dim is None and split.index and own.grad is not None:
                # only the first rank adds these; zeros of other ranks must stay zeros
                own.grad.zero_()
        alike = [p for name, p in self.owned.items()
                 if name not in self.splits and p.grad is not None]
        for dtype in {p.dtype for p in alike}:
            # One message for all gradients of a dtype: many small messages cost mostly latency.
            these = [p.grad for p in alike if p.dtype == dtype]
            flat = _flatten_dense_tensors(these)
            with self.ranks.waits:
                dist.all_reduce(flat, group=self.ranks.groups["tensor"])
            torch._foreach_copy_(these, list(_unflatten_dense_tensors(flat, these)))

    def norm(self, norms: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Tensor:
        """Returns the norm of all gradients, from the norms of the owned `parameters`."""
        # a parameter that several ranks have counts once
        if self.layout.tensor > 1 or self.twice:
            names = {p: name for name, p in self.owned.items()}
            norms = [norm * (self.twice.get(names[p]) != 0)
                     * (1 if names[p] in self.splits else self.layout.tensor**-0.5)
                     for norm, p in zip(norms, parameters, strict=True)]
        norm = torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.tensor(0.0)
        over = [name for name, cut in (("shard", self.by_rows), ("tensor", self.layout.tensor > 1),
                                       ("pipeline", self.layout.pipeline > 1)) if cut]
        if not over:
            return norm
        squares = norm.square()
        for name in over:
            with self.ranks.waits:
                dist.all_reduce(squares, group=self.ranks.groups[name])
        return squares.sqrt()

    def spread(self) -> None:
        """Called after the optimizer's step: gives every rank the new weights that it computes
        with."""

    def parameter(self, name: str) -> Parameter:
        """Returns the facts about an owned parameter that a rule of an optimizer may ask for."""
        return Parameter(name, tuple(self.owned[name].shape))

    def first_row(self, name: str) -> int:
        """Returns the index, in this rank's part of a parameter, of the first row it owns."""
        return 0

    def saved(self, name: str, p: Tensor) -> Tensor | Cut:
        """Returns a parameter of the model in the form that a checkpoint stores."""
        return self._whole(name, local(p).detach(), isinstance(p, DTensor))

    def whole(self, name: str, t: Tensor) -> Tensor | Cut:
        """Returns `t`, which has the owned rows of a parameter, in the form of a checkpoint."""
        return self._whole(name, t, self.by_rows)

    def _whole(self, name: str, t: Tensor, by_rows: bool) -> Tensor | Cut:
        split, part = self.splits.get(name), self.shapes[name]
        if not (by_rows or split) or not part.numel() or not t.ndim:
            return t
        cut = {*(("shard", "context") if by_rows else ()), *(("tensor",) if split else ())}
        owners = self.layout.peers(self._owner(name), {*GROUPS["stage"]} - cut)
        return Cut(shape=part if split is None else split.shape(part), dtype=t.dtype,
                   pieces=pieces(t, self.first_row(name) if by_rows else 0, part, split),
                   owners=tuple(owners))

    def _owner(self, name: str) -> int:
        """Returns this rank, or the rank that saves a parameter that both have."""
        return self.ranks.in_stage if self.twice.get(name) == 0 else self.ranks.rank

    def placed(self, name: str, t: Tensor | Cut) -> Tensor | Cut:
        """Returns a state's tensor that only the ranks of this stage have, in the form that a
        checkpoint stores."""
        if self.layout.pipeline == 1 or isinstance(t, Cut):
            return t
        return Cut(shape=t.shape, dtype=t.dtype, pieces=(Piece((0,) * t.ndim, t),),
                   owners=tuple(self.layout.peers(self._owner(name.split("/")[1]),
                                                  GROUPS["stage"])))

    def part(self, name: str, whole: Tensor | Cut) -> Tensor:
        """The inverse of `whole`: returns the rows that this rank owns."""
        own = self.owned[name]
        if isinstance(whole, Tensor) and (not (self.by_rows or name in self.splits)
                                          or whole.shape != self.whole(name, own).shape):
            return whole
        if isinstance(whole, Cut) and [t.shape for _, t in whole.pieces] == [own.shape]:
            return whole.pieces[0].data
        mine = torch.zeros(own.shape, dtype=whole.dtype)
        self.whole(name, mine).copy_(whole)
        return mine


def local(t: Tensor) -> Tensor:
    """Returns this rank's numbers of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def sharding(ranks: Ranks, layout: Layout, **of_run: Any) -> Sharding:
    if not ranks.groups:        # a single process that reads a run of several ranks
        return Sharding(ranks=ranks, **of_run)
    # a single rank would only send messages to itself
    alone = layout.replicas == 1 and not layout.stage
    kind = Sharding if alone else (STAGES[layout.stage] if layout.stage else
                                   REDUCTIONS[layout.reduction]).load()
    shards = kind(ranks=ranks, layout=layout, **of_run)
    if layout.pipeline > 1:
        from lpkit.parallel.stages import KeepStages

        shards.transforms = (KeepStages(ranks=ranks, twice=shards.twice), *shards.transforms)
    if layout.tensor > 1:
        from lpkit.parallel.tensor import TensorParallel

        shards.transforms = (TensorParallel(ranks=ranks, splits=shards.splits), *shards.transforms)
    return shards


@dataclass(frozen=True)
class CutParameter(Parameter):
    """A parameter of which each rank of a group has some rows."""

    sharding: OfRows

    def sum(self, t: Tensor) -> Tensor:
        total = t.clone()
        with self.sharding.ranks.waits:
            dist.all_reduce(total, group=self.sharding.group)
        return total

    def gather(self, t: Tensor) -> Tensor:
        if not self.shape:
            return t
        # the last ranks pad, since all-gather needs equal sizes
        each = self.sharding.each(self.shape[0])
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

    by_rows = True

    def __post_init__(self):
        super().__post_init__()
        self.group = self.ranks.groups["shard"]
        self.size, self.index = self.layout.state_ranks, dist.get_rank(self.group)

    def each(self, rows: int) -> int:
        """Returns how many of `rows` rows most ranks have; the last ranks have fewer or none."""
        return -(-rows // self.size)

    def rows(self, whole: Tensor) -> Tensor:
        """Returns a view of this rank's rows."""
        each = self.each(len(whole))
        return whole[self.index * each:][:each]

    def parameter(self, name: str) -> Parameter:
        return CutParameter(name, tuple(self.shapes[name]), self)

    def first_row(self, name: str) -> int:
        rows = self.shapes[name][0]
        return min(self.index * self.each(rows), rows)
