"""How the model states of a run (weights, gradients, optimizer state) are divided over its ranks.

Each stage of ZeRO has a class: `lpkit.techniques.layouts` names it in STAGES, or in REDUCTIONS for
ZeRO 0. The class `Sharding` of this module is for one device.

An optimizer gets plain tensors that this rank owns: whole parameters, or this rank's rows of each
parameter. So every optimizer, moment format and rounding works as on one device. Rows are divided
as FSDP2 divides them: each rank has ceil(rows / ranks), and the last ranks have fewer or none. For
example, of 10 rows over 4 ranks, the ranks have 3, 3, 3 and 1. A checkpoint stores rows as pieces
with their offsets (`cut`), so that a run in any other layout can read them.

These names say in which form a parameter is:

    stand_in    replaces a parameter while a model is built for ZeRO 2 or 3: it has the shape of the
                parameter and almost no memory (`drawn`)
    whole       the whole parameter, as in one process; in ZeRO 2 and 3, one exists at a time
    part        this rank's part under tensor parallelism (`tensor`); otherwise the same as whole
    rows        this rank's rows of the part, a plain tensor
    shard       the model's parameter in ZeRO 2 and 3: a DTensor over these rows (`fully_sharded`)
    owned       the parameter that the optimizer updates: a plain parameter over these rows
    gathered    a Linear's whole weight in the form in which it is sent: its cast
                (`lessons.rows.cast_gather`)

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
from lpkit.parallel.cut import Cut, Split, TensorPiece, pieces
from lpkit.parallel.ranks import Ranks, all_gather, wait_for
from lpkit.techniques.layouts import GROUPS, REDUCTIONS, STAGES, Layout


@dataclass(kw_only=True)
class Sharding:
    """The model states of one device: no parameter is divided. Subclasses divide them over ranks.

    compute: the dtype in which the recipe computes; None: float32
    entry:   the name of the model's method that the loss calls; None: the model itself
    """

    ranks: Ranks = field(default_factory=Ranks)
    layout: Layout = field(default_factory=Layout)
    compute: torch.dtype | None = None
    entry: str | None = None

    autocasts = True        # the model computes under autocast
    index = 0               # this rank has share number `index` of the rows
    by_rows = False         # each rank of the group `shard` owns some rows of every parameter

    def __post_init__(self):
        self.transforms: tuple[Transform, ...] = ()
        self.owned: dict[str, nn.Parameter] = {}
        # by name: objects whose state must be in checkpoints, for example the momentum of a
        # reduction (`lessons.rows.reductions_torch`); a Training treats them as governors
        self.governors: dict[str, Governor] = {}
        # by name of a parameter: how tensor parallelism cut it; and the shape of this rank's part
        self.splits: dict[str, Split] = {}
        self.shapes: dict[str, torch.Size] = {}     # includes frozen parameters
        # by name of a parameter that two ranks of the pipeline have: the number of the other rank
        self.twice: dict[str, int] = {}

    def making(self, device: torch.device) -> AbstractContextManager:
        """Return a context in which the model must be built and initialised."""
        return nullcontext()

    def own(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Set `owned`, the parameters that the optimizer of this rank updates, by name, and return
        it. `model`: the model after all transforms, whose parameters are this rank's parts."""
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.owned_of = {p: self.mine(p) for p in trained.values()}
        self.owned = {name: self.owned_of[p] for name, p in trained.items()}
        return self.owned

    def mine(self, p: nn.Parameter) -> nn.Parameter:
        """Return the owned parameter for a parameter of the model: here the same parameter."""
        return p

    def backward(self, last: bool) -> None:
        """Called before the backward of each micro-batch. `last`: no other micro-batch follows, so
        gradients may be sent as soon as they are computed."""

    def reduce(self) -> None:
        """Called after the last backward. Afterwards each owned parameter has the mean gradient of
        the whole batch."""
        self._sum_replicated()
        for name, peer in self.twice.items():
            mine, group = self.owned[name].grad.contiguous(), self.ranks.groups["pipeline"]
            theirs = torch.empty_like(mine)
            both = [dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
                    dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer)]
            with self.ranks.waits:
                for work in dist.batch_isend_irecv(both):
                    wait_for(work, mine)
            self.owned[name].grad = mine + theirs

    def _sum_replicated(self) -> None:
        """Sum over the tensor group the gradients of parameters that all of its ranks have, for
        example the weights of a norm: each rank computed them from a part of the tokens."""
        if self.layout.tensor == 1:
            return
        for name, split in self.splits.items():
            owned = self.owned.get(name)        # None: another stage of the pipeline has it
            if owned is not None and split.dim is None and split.index and owned.grad is not None:
                # Only rank 0 of the tensor group has this parameter (a bias, learned positions).
                # The other ranks have zeros, which the optimizer must not change.
                owned.grad.zero_()
        replicated = [p for name, p in self.owned.items()
                      if name not in self.splits and p.grad is not None]
        for dtype in {p.dtype for p in replicated}:
            # One message for all gradients of a dtype: many small messages cost mostly latency.
            grads = [p.grad for p in replicated if p.dtype == dtype]
            flat = _flatten_dense_tensors(grads)
            with self.ranks.waits:
                dist.all_reduce(flat, group=self.ranks.groups["tensor"])
            torch._foreach_copy_(grads, list(_unflatten_dense_tensors(flat, grads)))

    def norm(self, norms: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients of the model, the same number on all ranks. `norms` are
        the norms of the gradients of the owned `parameters`."""
        # Squares of norms are summed over ranks, and a parameter must count once. A parameter that
        # all t tensor ranks have gets the factor t^-0.5. Of a parameter that the first and the last
        # stage have, the last stage (`twice` is 0, the first stage's rank) counts nothing.
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
        """Called after the optimizer's step. Afterwards each rank computes with the new weights,
        also with those that other ranks have updated."""

    def parameter(self, name: str) -> Parameter:
        """Return the `contracts.Parameter` of an owned parameter, which optimizer rules ask for
        norms and whole tensors."""
        return Parameter(name, tuple(self.owned[name].shape))

    def first_row(self, name: str) -> int:
        """Return the index of the first row that this rank owns, in its part of parameter `name`.
        """
        return 0

    def saved(self, name: str, p: Tensor) -> Tensor | Cut:
        """Return parameter `p` of the model in the form that a checkpoint stores: a Cut with this
        rank's pieces, or a tensor that all ranks have."""
        return self._whole(name, local(p).detach(), isinstance(p, DTensor))

    def whole(self, name: str, t: Tensor) -> Tensor | Cut:
        """Return `t` in the form that a checkpoint stores. `t` has the shape of the owned parameter
        `name`: it is the parameter, or a slot of its optimizer state."""
        return self._whole(name, t, self.by_rows)

    def _whole(self, name: str, t: Tensor, by_rows: bool) -> Tensor | Cut:
        """As `whole`. `by_rows`: `t` has only the owned rows of this rank's part."""
        split, part = self.splits.get(name), self.shapes[name]
        if not (by_rows or split) or not part.numel() or not t.ndim:
            return t
        cut = {*(("shard", "context") if by_rows else ()), *(("tensor",) if split else ())}
        owners = self.layout.peers(self._owner(name), {*GROUPS["stage"]} - cut)
        return Cut(shape=part if split is None else split.shape(part), dtype=t.dtype,
                   pieces=pieces(t, self.first_row(name) if by_rows else 0, part, split),
                   owners=tuple(owners))

    def _owner(self, name: str) -> int:
        """Return the number of the rank that saves a parameter for this pipeline stage: this rank;
        or, if the first stage has the parameter too, the rank of the first stage."""
        return self.ranks.in_stage if self.twice.get(name) == 0 else self.ranks.rank

    def placed(self, name: str, t: Tensor | Cut) -> Tensor | Cut:
        """Return a tensor of a training's state in the form that a checkpoint stores. In a
        pipeline, only the ranks of this stage have the tensor, so it becomes a Cut that they own.
        """
        if self.layout.pipeline == 1 or isinstance(t, Cut):
            return t
        return Cut(shape=t.shape, dtype=t.dtype, pieces=(TensorPiece((0,) * t.ndim, t),),
                         owners=tuple(self.layout.peers(self._owner(name.split("/")[1]),
                                                        GROUPS["stage"])))

    def part(self, name: str, whole: Tensor | Cut) -> Tensor:
        """Inverse of `whole`: return the rows that this rank owns, from a checkpoint's tensor. A
        slot with another shape than the parameter is whole on every rank, and is returned."""
        owned = self.owned[name]
        if isinstance(whole, Tensor) and (not (self.by_rows or name in self.splits)
                                          or whole.shape != self.whole(name, owned).shape):
            return whole
        if isinstance(whole, Cut) and [t.shape for _, t in whole.pieces] == [owned.shape]:
            return whole.pieces[0].data
        mine = torch.zeros(owned.shape, dtype=whole.dtype)
        self.whole(name, mine).copy_(whole)
        return mine


def local(t: Tensor) -> Tensor:
    """Return this rank's rows of a DTensor; a plain tensor is returned as it is."""
    return t.to_local() if isinstance(t, DTensor) else t


def sharding(ranks: Ranks, layout: Layout, **of_run: Any) -> Sharding:
    """Return the Sharding of a layout, with the transforms that divide the model. `of_run`: the
    fields `compute` and `entry`."""
    if not ranks.groups:        # one process, which may read a run of several ranks
        return Sharding(ranks=ranks, **of_run)
    # No other rank has the same weights, so there are no gradients to average.
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
    """The `contracts.Parameter` of a parameter of which each rank owns some rows."""

    sharding: OfRows

    def sum(self, t: Tensor) -> Tensor:
        total = t.clone()
        with self.sharding.ranks.waits:
            dist.all_reduce(total, group=self.sharding.group)
        return total

    def gather(self, t: Tensor) -> Tensor:
        if not self.shape:
            return t
        # all-gather needs equal sizes, so the last ranks pad their rows with zeros
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
        """Return ceil(rows / ranks), the number of rows that a rank has. The last ranks may have
        fewer or none."""
        return -(-rows // self.size)

    def rows(self, whole: Tensor) -> Tensor:
        """Return a view of this rank's rows of `whole`."""
        each = self.each(len(whole))
        return whole[self.index * each:][:each]

    def parameter(self, name: str) -> Parameter:
        return CutParameter(name, tuple(self.shapes[name]), self)

    def first_row(self, name: str) -> int:
        rows = self.shapes[name][0]
        return min(self.index * self.each(rows), rows)
