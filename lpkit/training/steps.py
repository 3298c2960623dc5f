"""Forward and backward of an update, in one or several micro-batches, with loss scaling. `training`
has the step of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lpkit.contracts import Batch, Loss
from lpkit.parallel.ranks import Ranks
from lpkit.parallel.sharding import Sharding
from lpkit.techniques.data import SIZES

# Smallest sum of weights to divide by. If all tokens of a batch have weight 0, the loss is
# 0 / LEAST_WEIGHT = 0, not 0 / 0 = NaN.
LEAST_WEIGHT = 1e-37


class LossScaler(nn.Module):
    """Dynamic loss scaling: the loss is multiplied by `scale`, so that small gradients do not
    become 0 in float16. Afterwards the gradients are divided by `scale` in float32.

    If a gradient overflows, all gradients of the update are dropped, and the scale is halved. The
    optimizer then changes no parameter and no moment. After `growth_steps` updates without an
    overflow, the scale is doubled. At the scale `least`, gradients are never dropped: an overflow
    then means that the run itself diverges. A dropped update still counts as a step of the
    learning-rate schedule. The scale and `good_steps` are in persistent buffers, so that
    checkpoints include them; `dropped` only describes the last update.

    initial: scale of the first update (a factor)
    """

    def __init__(self, *, initial: float, growth_steps: int, least: float = 1.0):
        super().__init__()
        self.growth_steps, self.least = growth_steps, least
        self.register_buffer("scale", torch.tensor(float(initial)))
        # updates that were not dropped, since the last change of the scale
        self.register_buffer("good_steps", torch.tensor(0))
        # 1 if the last update was dropped, else 0
        self.register_buffer("dropped", torch.tensor(0.0), persistent=False)

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        """Divide the gradients of this rank's `parameters` by the scale, in place. If a gradient on
        any rank is not finite, drop the gradients on all ranks. Then adapt the scale."""
        scale, parameters = self.scale.item(), list(parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(grads, ranks.layout.replicas / scale)
        # If the sum of a gradient is finite, all of its numbers are. If it is not, the sum itself
        # may have overflowed, so all numbers are checked.
        overflowed = not (torch.stack([g.sum() for g in grads]).isfinite().all().item()
                          or all(g.isfinite().all() for g in grads))
        dropped = ranks.largest(self.scale.new_tensor(overflowed)).item() and scale > self.least
        self.dropped.fill_(dropped)
        if not dropped:
            self.good_steps += 1
            if self.good_steps >= self.growth_steps:
                # a limit, because gradients of 0 never overflow
                self.scale.mul_(2).clamp_(max=2.0**100)
                self.good_steps.zero_()
            return
        for p in parameters:
            p.grad = None
        self.scale.mul_(0.5).clamp_(min=self.least)
        self.good_steps.zero_()


# a context around "forward", "backward" or "optimizer"
Phases = Callable[[str], AbstractContextManager]


class Executor:
    """Runs forward and backward of this rank's part of an update. `pipelined` has the executor of
    pipelines, and `graphs` the executor of CUDA graphs.

    in_parts: an update can be given up between two micro-batches
    """

    in_parts = True

    def fresh(self) -> Executor:
        """Return an executor for a copy of the training, without recorded state."""
        return self

    @property
    def plain(self) -> Executor:
        """Return an executor without a captured graph, so that the objective can be replaced."""
        return Executor()

    def loss(self, training: Any, batch: Batch) -> Tensor:
        """Return the loss of evaluation for this rank's `batch`. Its mean over all ranks is the
        loss of the whole batch."""
        return training.loss(training.model, batch)

    def forward_backward(self, training: Any, batch: Batch, *, phases: Phases) -> Tensor:
        """Run forward and backward. Leave the gradients of the batch in the owned parameters, and
        return the mean loss of all ranks. `batch`: this rank's part of the update's batch."""
        config = training.config
        parts = config.micro_batches
        # With a schedule of sizes, micro-batches keep their size, and their number changes.
        if SIZES[config.sizes.name].at:
            parts = len(batch.tokens) // config.micro_batch
        with training.cached_casts(training.model):
            return accumulate(training.model, training.objective, batch, parts,
                              scaler=training.scaler, phases=phases, sharding=training.sharding)


def accumulate(model: nn.Module, loss: Loss, batch: Batch, parts: int = 1, *,
               scaler: LossScaler | None = None, phases: Phases = nullcontext,
               sharding: Sharding | None = None) -> Tensor:
    """Run forward and backward of `batch` in `parts` micro-batches, and return the mean loss of all
    ranks.

    The gradients are those of the whole batch. They are left in the parameters that this rank owns
    (without `sharding`: in the model's parameters). Activations take 1 / parts of the memory that
    the whole batch would take.
    """
    sharding = sharding or Sharding()
    ranks, losses = sharding.ranks, []
    whole_weight = None if batch.weights is None else (
        ranks.mean(batch.weights.sum()).clamp(min=LEAST_WEIGHT))
    for i, piece in enumerate(batch.chunk(parts)):
        # `loss` returns the mean over the micro-batch. Divided by whole_over_piece, the means of
        # all micro-batches add up to the mean over the batch (weighted, if tokens have weights).
        with phases("forward"):
            whole_over_piece = (len(batch.tokens) / len(piece.tokens) if whole_weight is None
                                else whole_weight / piece.weights.sum())
            part = loss(model, piece) / whole_over_piece
        with phases("backward"):
            sharding.backward(last=i == parts - 1)
            # Gradients are averaged over ranks after backward. So before, a micro-batch's gradient
            # is `replicas` times as large as on one device, and would overflow earlier. Therefore
            # the scale is divided by the number of replicas, and `unscale` multiplies by it.
            (part if scaler is None else part * (scaler.scale / ranks.layout.replicas)).backward()
            advance(model, ranks.largest if ranks.world > 1 else None)
            if i == parts - 1:
                sharding.reduce()
        losses.append(part.detach())
    if scaler is not None:
        scaler.unscale(sharding.owned.values() or model.parameters(), ranks)
    return ranks.mean(torch.stack(losses).sum())


def advance(model: nn.Module, agree: Callable[[Tensor], Tensor] | None = None) -> None:
    """Add the newest amaxes to the histories of delayed scaling. Call it after the backward of each
    micro-batch: it calls `advance()` of each module that has this method (`linear.ScaledLinear`).

    agree: replaces a tensor by its maximum over all ranks, in place, so that all ranks have equal
           histories; None: there is one rank
    """
    if agree is not None and (amaxes := [
            t for module in model.modules() if hasattr(module, "advance") and module.recipe.delayed
            for t in module.of_roles("amax")]):
        torch._foreach_copy_(amaxes, list(agree(torch.stack(amaxes)).unbind()))
    for module in model.modules():
        if hasattr(module, "advance"):
            module.advance()
