"""Forward and backward of an update, whole or in micro-batches. The optimizer comes afterwards."""

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

# smallest weight of a batch to divide by: without weighted tokens the loss is 0, not 0 / 0
LEAST_WEIGHT = 1e-37


class LossScaler(nn.Module):
    """Dynamic loss scaling: the loss is multiplied by `scale`, so that float16 does not lose small
    gradients. Gradients are divided by it in float32.

    If gradients overflow, they are dropped and the scale is halved. Without gradients there is
    nothing to clip, and the optimizer leaves parameters and moments as they are. At the scale
    `least` nothing is dropped, because then the run itself diverges. Schedules count dropped
    updates, as PyTorch's do. The state is in buffers, for the checkpoint.
    """

    def __init__(self, *, initial: float, growth_steps: int, least: float = 1.0):
        super().__init__()
        self.growth_steps, self.least = growth_steps, least
        self.register_buffer("scale", torch.tensor(float(initial)))
        self.register_buffer("good_steps", torch.tensor(0))     # since the last overflow or growth
        # 1: the last update was dropped
        self.register_buffer("dropped", torch.tensor(0.0), persistent=False)

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        """Unscales the gradients of this rank's parameters. All ranks drop them, or none."""
        scale, parameters = self.scale.item(), list(parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(grads, ranks.layout.replicas / scale)
        # a finite sum proves that all are finite; an infinite sum may itself have overflowed
        overflowed = not (torch.stack([g.sum() for g in grads]).isfinite().all().item()
                          or all(g.isfinite().all() for g in grads))
        dropped = ranks.largest(self.scale.new_tensor(overflowed)).item() and scale > self.least
        self.dropped.fill_(dropped)
        if not dropped:
            self.good_steps += 1
            if self.good_steps >= self.growth_steps:
                # gradients of 0 never overflow, so without a limit the scale would grow for ever
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
    """Runs forward and backward of this rank's part of an update, on one device. Pipeline stages
    have another executor (`pipelined`). `in_parts`: an update can be given up between two
    micro-batches."""

    in_parts = True

    def fresh(self) -> Executor:
        """Returns an executor for another training."""
        return self

    @property
    def plain(self) -> Executor:
        """Returns an executor that accepts another objective."""
        return Executor()

    def loss(self, training: Any, batch: Batch) -> Tensor:
        """Returns a loss whose mean over the ranks is the loss of evaluation."""
        return training.loss(training.model, batch)

    def forward_backward(self, training: Any, batch: Batch, *, phases: Phases) -> Tensor:
        """Leaves the gradients of `batch` in the parameters, and returns its mean loss."""
        config = training.config
        parts = config.micro_batches
        if SIZES[config.sizes.name].at:     # micro-batches stay, and their number changes
            parts = len(batch.tokens) // config.micro_batch
        with training.cached_casts(training.model):
            return accumulate(training.model, training.objective, batch, parts,
                              scaler=training.scaler, phases=phases, sharding=training.sharding)


def accumulate(model: nn.Module, loss: Loss, batch: Batch, parts: int = 1, *,
               scaler: LossScaler | None = None, phases: Phases = nullcontext,
               sharding: Sharding | None = None) -> Tensor:
    """Runs forward and backward of `parts` micro-batches. Leaves the gradients in the parameters
    that this rank owns (without `sharding`, in the model), and returns the mean loss of all ranks.

    The gradient is the whole batch's gradient, and activations take 1 / parts of its memory.
    """
    sharding = sharding or Sharding()
    ranks, losses = sharding.ranks, []
    whole_weight = None if batch.weights is None else (
        ranks.mean(batch.weights.sum()).clamp(min=LEAST_WEIGHT))
    for i, piece in enumerate(batch.chunk(parts)):
        # weights the micro-batch's mean so that the parts sum to the batch's mean
        with phases("forward"):
            whole_over_piece = (len(batch.tokens) / len(piece.tokens) if whole_weight is None
                                else whole_weight / piece.weights.sum())
            part = loss(model, piece) / whole_over_piece
        with phases("backward"):
            sharding.backward(last=i == parts - 1)
            # With several ranks, each micro-batch is a larger part of its rank's batch, and so
            # would
            # overflow earlier than on one device: the scale is divided by the number of replicas.
            (part if scaler is None else part * (scaler.scale / ranks.layout.replicas)).backward()
            advance(model, ranks.largest if ranks.world > 1 else None)
            if i == parts - 1:
                sharding.reduce()
        losses.append(part.detach())
    if scaler is not None:
        scaler.unscale(sharding.owned.values() or model.parameters(), ranks)
    return ranks.mean(torch.stack(losses).sum())


def advance(model: nn.Module, agree: Callable[[Tensor], Tensor] | None = None) -> None:
    """Advances the histories of casts, after the backward of every micro-batch: calls `advance()`
    of each part that has it (`linear.ScaledLinear`). `agree` takes the maximum over all ranks in
    place, so that all ranks have the same histories."""
    if agree is not None and (amaxes := [
            t for module in model.modules() if hasattr(module, "advance") and module.recipe.delayed
            for t in module.of_roles("amax")]):
        torch._foreach_copy_(amaxes, list(agree(torch.stack(amaxes)).unbind()))
    for module in model.modules():
        if hasattr(module, "advance"):
            module.advance()
