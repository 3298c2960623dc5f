"""Weights that ranks send as their casts: one byte per element, half as many as bf16.

FSDP2 lets a shard define what is gathered: `fsdp_pre_all_gather` returns the tensors to send, and
`fsdp_post_all_gather` builds the whole parameter from them. Here the tensors are the recipe's cast
of a Linear's weight, with the scale of the whole weight's cast, so the layer multiplies the
received bytes: results equal those of one device, bit by bit. Bytes are sent as uint8, since gloo
does not support float8. The gathered parameter is a float8 tensor over the received bytes, with
gradients in float32; shards, optimizer and checkpoints are not affected.

One scale per tensor needs an amax over all ranks: `CastGathers.agree` computes all amaxes by one
all-reduce per update. If scales are per block of rows, each block is on one rank, and its scales
are sent with it.

Source: https://pytorch.org/blog/training-using-float8-fsdp2/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lpkit.contracts import Stage, Transform
from lpkit.errors import ConfigError
from lpkit.kernels import cast as kernel
from lpkit.kernels.scales import Scaled, decide, stored_dtype
from lpkit.parallel.sharding import OfRows
from lpkit.precision.linear import ScaledLinear, scaled_linears
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import ALL, untiled


class CastGather:
    """Gathers the weight (N, K) of one layer as FP8. Each rank has up to `most` rows of it; a rank
    with fewer rows pads them, since all ranks must send the same number of bytes."""

    def __init__(self, layer: ScaledLinear, most: int):
        self.layer, self.rows = layer, layer.weight._local_tensor
        # FSDP2 looks for both methods on this tensor at the first forward; `to_local` returns
        # another object
        self.rows.fsdp_pre_all_gather = self.fsdp_pre_all_gather
        self.rows.fsdp_post_all_gather = self.fsdp_post_all_gather
        self.padding = most - len(self.rows)
        self.cast = layer.recipe.y[1]
        self.to, (side, along) = format_of(self.cast.format), self.cast.block
        self.one_scale = self.cast.block == (ALL, ALL)
        N, K = layer.out_features, layer.in_features
        if problem := untiled(layer.recipe, {"N": N, "K": K}, layer.arithmetic.alignment):
            raise ConfigError(f"{layer.name}: {problem}, and parallel.gathered=fp8 does not pad "
                              f"weights; set parallel.gathered=compute")
        if not self.one_scale and most % side:
            raise ConfigError(
                f"parallel.gathered=fp8 sends whole blocks of {side} rows, and a rank has {most} "
                f"of the {N} of {layer.name}; set parallel.gathered=compute, shard over fewer "
                f"ranks, or use a recipe with one scale a tensor: fp8-tensorwise, fp8-delayed")
        zeros = partial(torch.zeros, device=self.rows.device)
        shape = (1, 1) if self.one_scale else (N // side, K // along)
        layer.gathered = Scaled(data=self.rows, scale=zeros(shape), amax=zeros(1, 1),
                                nonfinite=zeros((), dtype=torch.int64))
        layer.carrier = zeros(1).expand(N, K).requires_grad_()      # takes no memory
        layer.carrier.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, carrier: Tensor) -> None:
        """Move the gradient to the shard, where FSDP2 looks for it."""
        shard, g, carrier.grad = self.layer.weight, carrier.grad, None
        shard.grad_dtype = torch.float32
        shard.grad = g if shard.grad is None else shard.grad + g

    def extremes(self) -> Tensor:
        """Return (2,) float32: the largest magnitude of this rank's rows (infinite if there is a
        NaN), and the number of their elements that are not finite."""
        if not len(self.rows):
            return self.rows.new_zeros(2)
        largest, nonfinite = kernel.amax(self.rows.detach())
        return torch.stack((largest.nan_to_num(nan=torch.inf), nonfinite.float()))

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
        rows = self.rows.detach()
        if self.padding:        # without padding, F.pad would copy the rows
            rows = F.pad(rows, (0, 0, 0, self.padding))
        amax = (self.layer.gathered.amax if self.one_scale else
                kernel.amax(rows, self.cast.block).values)
        past = self.layer.past_amax("w") if self.layer.recipe.delayed else None
        scale, *_ = decide(amax, past, self.cast.scale, self.to)
        values = kernel.qdq(rows, self.to, scale, block=self.cast.block, dtype=torch.uint8,
                            rescale=False)
        if not self.one_scale:
            return (values, scale), None
        self._take(scale)
        return (values,), None

    def fsdp_post_all_gather(self, arrived: Sequence[Tensor], metadata: None, dtype: torch.dtype, *,
                             out: Tensor | None = None) -> tuple[Tensor, tuple] | None:
        values, *scales = arrived
        for scale in scales:
            self._take(scale)
            self.layer.gathered.nonfinite.copy_(scale.isfinite().logical_not().sum())
        # `out` is a view of the received bytes
        return None if out is not None else (values.view(stored_dtype(self.to)), ())

    def _take(self, scale: Tensor) -> None:
        """Copy a scale without autograd's version counter: in backward, the same scale is copied
        again."""
        with torch.autograd._unsafe_preserve_version_counter(self.layer.gathered.scale):
            self.layer.gathered.scale.copy_(scale)


class CastGathers(Transform):
    """Lets FSDP2 gather casts of all weights that are cast, except weights that two modules share.
    Raises ConfigError if there are none."""

    stage = Stage.DATA      # after the model is sharded

    def __init__(self, sharding: OfRows):
        self.sharding = sharding

    def __call__(self, model: nn.Module) -> nn.Module:
        uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self.gathers = [CastGather(layer, self.sharding.each(layer.out_features))
                        for layer in scaled_linears(model) if uses[id(layer.weight)] == 1]
        if not self.gathers:
            raise ConfigError("parallel.gathered=fp8 finds no weight that lpkit casts (a library "
                              "backend casts weights itself); set precision.backend=auto, or "
                              "parallel.gathered=compute")
        return model

    def agree(self) -> None:
        """After an update, compute per-tensor scales from the largest magnitude over all ranks."""
        whole = [gather for gather in self.gathers if gather.one_scale]
        if not whole:
            return
        extremes = torch.stack([gather.extremes() for gather in whole])
        self.sharding.ranks.largest(extremes, group=self.sharding.group)
        for gather, (amax, nonfinite) in zip(whole, extremes.unbind()):
            gather.layer.gathered.amax.fill_(amax)
            gather.layer.gathered.nonfinite.copy_(nonfinite)
