"""ZeRO 2 and 3 by PyTorch's FSDP2: weights, gradients and optimizer state are sharded over ranks.

The weights of a block are gathered when its forward and backward need them. Its gradients are
reduce-scattered as soon as they are computed, for each micro-batch: whole gradients that wait for
the last micro-batch would take the memory that sharding saves. With `data` replicas of the sharded
model, this is hybrid sharding. No rank ever has the whole model: a rank initialises its rows alone
(`lpkit.parallel.drawn`), and reads only its rows from a checkpoint.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor

from lpkit.contracts import Stage, Transform
from lpkit.parallel.drawn import drawing
from lpkit.parallel.ranks import Waits, shard_mesh
from lpkit.parallel.sharding import OfRows
from lpkit.techniques.layouts import GATHERED


@dataclass(frozen=True)
class Shard(Transform):
    """Apply FSDP2 to each block and then to the rest of the model. FSDP2 gathers weights in the
    dtype `sharding.gathered`, and reduces gradients in float32. If the model was built from
    stand-ins, their rows are moved from `sharding.drawn` into FSDP2's shards."""

    sharding: FullySharded
    stage = Stage.DATA

    def __call__(self, model: nn.Module) -> nn.Module:
        layout, ranks, drawn = self.sharding.layout, self.sharding.ranks, self.sharding.drawn
        mesh = shard_mesh(ranks)
        policy = MixedPrecisionPolicy(param_dtype=self.sharding.gathered,
                                      reduce_dtype=torch.float32)
        # reshard_after_forward=None is FSDP2's default: a block's whole weights are freed after its
        # forward and gathered again for backward; the rest of the model stays gathered. False: all
        # whole weights stay until backward has used them (ZeRO 2).
        again = None if layout.zero == 3 else False
        for module in (*model.blocks, model):
            stand_ins = {name: p for name, p in module.named_parameters() if p in drawn}
            # FSDP2 cuts whole parameters, so each stand-in gets memory; no number is written to it.
            for stand_in in stand_ins.values():
                stand_in.data = torch.empty(stand_in.shape, dtype=stand_in.dtype,
                                            device=stand_in.device)
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
            shards = dict(module.named_parameters())
            for name, stand_in in stand_ins.items():
                shards[name].detach().to_local().copy_(drawn.pop(stand_in))
            module.set_custom_all_gather(Gather(ranks.waits))
            module.set_custom_reduce_scatter(Scatter(ranks.waits, replicas=layout.data > 1))
            if layout.data > 1:         # ends the wait that `Scatter` has begun
                module.set_all_reduce_hook(ranks.waits.__exit__)
        if self.sharding.entry:
            register_fsdp_forward_method(model, self.sharding.entry)
        return model


class Gather(DefaultAllGather):
    """FSDP2's all-gather of weights, timed by `waits`."""

    def __init__(self, waits: Waits):
        self.waits = waits

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.waits:
            return super().__call__(*args, **kwargs)


class Scatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter of gradients, timed by `waits`. With `replicas`, FSDP2 then
    all-reduces the gradients over the replicas, and `waits` counts this time too: see `Shard`."""

    def __init__(self, waits: Waits, replicas: bool):
        self.waits, self.replicas = waits, replicas

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.waits:
            work = super().__call__(*args, **kwargs)
        if self.replicas:
            self.waits.__enter__()
        return work


def gathered(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers into which FSDP2 gathers whole parameters. FSDP2 frees their memory when it
    reshards, and allocates it again when it unshards."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs


class FullySharded(OfRows):
    """ZeRO 2 and 3. The model's parameters are DTensors over this rank's rows (the `shard` of
    `lpkit.parallel.sharding`); the optimizer updates plain parameters over the same memory."""

    def __post_init__(self):
        super().__post_init__()
        row = GATHERED[self.layout.gathered]
        self.gathered = self.compute if row.mixed else None     # None: gathered as stored
        self.autocasts = self.gathered is None
        self.drawn: dict[nn.Parameter, Tensor] = {}
        self.casts = row.load()(self) if row.cast else None
        self.transforms = (Shard(self), *filter(None, [self.casts]))

    @contextmanager
    def making(self, device: torch.device) -> Iterator[None]:
        # A fake tensor takes no memory, so it needs no stand-in. Tensor parallelism cuts columns,
        # for which it needs whole parameters.
        if isinstance(torch.empty(0), FakeTensor) or self.layout.tensor > 1:
            yield
            return
        with drawing(self.rows, device) as drawn:
            yield
        self.drawn |= drawn.rows

    def own(self, model: nn.Module) -> dict[str, nn.Parameter]:
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        super().own(model)
        self.spread()
        return self.owned

    def mine(self, shard: DTensor) -> nn.Parameter:
        return nn.Parameter(shard.detach().to_local())

    def reduce(self) -> None:
        for shard, owned in self.owned_of.items():
            # FSDP2 may have moved the shard to other memory, so `owned` must point to it again
            owned.data = shard.detach().to_local()
            owned.grad = None if shard.grad is None else shard.grad.to_local()
            shard.grad = None
        super().reduce()

    def spread(self) -> None:
        # Free the gathered weights: an evaluation may have left weights from before the update.
        for module in self.modules:
            module.reshard()
        if self.casts:
            self.casts.agree()
