"""An update begins with forward and backward, whole or in micro-batches; the optimizer comes
after."""

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

LEAST_WEIGHT = 1e-37    # of a batch, to divide by: where no token counts, the loss is 0, not 0 / 0


class LossScaler(nn.Module):
    """Dynamic loss scaling: gradients that float16 would lose are multiplied by `scale`, and
    divided again in float32.

    Gradients that overflowed are dropped, so that there is nothing to clip and the optimizer
    leaves every parameter and its moments alone; the scale is halved. At a scale of `least` none
    are dropped: then it is the run that diverges. Schedules count dropped updates, as PyTorch's do.
    The state is in buffers, for the checkpoint.
    """

    def __init__(self, *, initial: float, growth_steps: int, least: float = 1.0):
        super().__init__()
        self.growth_steps, self.least = growth_steps, least
        self.register_buffer("scale", torch.tensor(float(initial)))
        self.register_buffer("good_steps", torch.tensor(0))     # in a row
        self.register_buffer("dropped", torch.tensor(0.0), persistent=False)    # 1: the latest was

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        """The gradients of what this rank owns; it is dropped everywhere, or nowhere."""
        scale, parameters = self.scale.item(), list(parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(grads, ranks.layout.replicas / scale)
        overflowed = not (torch.stack([g.sum() for g in grads]).isfinite().all().item()
                          or all(g.isfinite().all() for g in grads))
        dropped = ranks.largest(self.scale.new_tensor(overflowed)).item() and scale > self.least
        self.dropped.fill_(dropped)
        if not dropped:
            self.good_steps += 1
            if self.good_steps >= self.growth_steps:
                self.scale.mul_(2).clamp_(max=2.0**100)     # gradients of 0 double it for ever
                self.good_steps.zero_()
            return
        for p in parameters:
            p.grad = None
        self.scale.mul_(0.5).clamp_(min=self.least)
        self.good_steps.zero_()


# a context around "forward", "backward" or "optimizer"
Phases = Callable[[str], AbstractContextManager]


class Executor:
    """Runs forward and backward of what a rank reads of an update, on one device. A pipeline's
    stages have another (`pipelined`). `in_parts`: it can be given up between micro-batches."""

    in_parts = True

    def fresh(self) -> Executor:
        """Returns one for another training."""
        return self

    @property
    def plain(self) -> Executor:
        """One that takes another objective."""
        return Executor()

    def loss(self, training: Any, batch: Batch) -> Tensor:
        """Returns what is, as a mean over the ranks, the loss of evaluation."""
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
    """Forward and backward of `parts` micro-batches; leaves the gradients in what this rank owns
    (without `sharding` in the model) and returns the mean loss, that of all ranks.

    The gradient is that of the whole batch, and the activations take 1 / parts of its memory.
    """
    sharding = sharding or Sharding()
    ranks, losses = sharding.ranks, []
    whole_weight = None if batch.weights is None else (
        ranks.mean(batch.weights.sum()).clamp(min=LEAST_WEIGHT))
    for i, piece in enumerate(batch.chunk(parts)):
        with phases("forward"):     # to the mean of the batch, of means of micro-batches
            whole_over_piece = (len(batch.tokens) / len(piece.tokens) if whole_weight is None
                                else whole_weight / piece.weights.sum())
            part = loss(model, piece) / whole_over_piece
        with phases("backward"):
            sharding.backward(last=i == parts - 1)
            # of fewer micro-batches each is a larger part, and overflows at the scale of one device
            (part if scaler is None else part * (scaler.scale / ranks.layout.replicas)).backward()
            advance(model, ranks.largest if ranks.world > 1 else None)
            if i == parts - 1:
                sharding.reduce()
        losses.append(part.detach())
    if scaler is not None:
        scaler.unscale(sharding.owned.values() or model.parameters(), ranks)
    return ranks.mean(torch.stack(losses).sum())


def advance(model: nn.Module, agree: Callable[[Tensor], Tensor] | None = None) -> None:
    """Called after the backward of every micro-batch, for each part that has `advance()`, as
    `linear.ScaledLinear` has. `agree` makes of numbers the largest that any rank has, in place:
    histories are the same on all of them."""
    if agree is not None and (amaxes := [
            t for module in model.modules() if hasattr(module, "advance") and module.recipe.delayed
            for t in module.of_roles("amax")]):
        torch._foreach_copy_(amaxes, list(agree(torch.stack(amaxes)).unbind()))
    for module in model.modules():
        if hasattr(module, "advance"):
            module.advance()
