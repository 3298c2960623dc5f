"""What one update does before the optimizer: forward and backward, whole or in micro-batches."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from lpkit.contracts import Batch, Loss
from lpkit.precision.linear import advance


class LossScaler(nn.Module):
    """Dynamic loss scaling: gradients that float16 would lose are multiplied by `scale`, and
    divided again in float32.

    Gradients that overflowed are dropped, so that there is nothing to clip and the optimizer
    leaves every parameter and its moments alone; the scale is halved. At a scale of `least` none
    are dropped: then it is the run that diverges. The state is in buffers, for the checkpoint.
    """

    def __init__(self, *, initial: float, growth_steps: int, least: float = 1.0):
        super().__init__()
        self.growth_steps, self.least = growth_steps, least
        self.register_buffer("scale", torch.tensor(float(initial)))
        self.register_buffer("good_steps", torch.tensor(0))     # in a row

    @torch.no_grad()
    def unscale(self, model: nn.Module) -> None:
        scale = self.scale.item()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(grads, 1 / scale)
        finite = (torch.stack([g.sum() for g in grads]).isfinite().all().item()
                  or all(g.isfinite().all() for g in grads))
        if finite or scale <= self.least:
            self.good_steps += 1
            if self.good_steps >= self.growth_steps:
                self.scale *= 2
                self.good_steps.zero_()
            return
        for p in model.parameters():
            p.grad = None
        self.scale.mul_(0.5).clamp_(min=self.least)
        self.good_steps.zero_()


# a context around "forward", "backward" or "optimizer"
Phases = Callable[[str], AbstractContextManager]


def accumulate(model: nn.Module, loss: Loss, batch: Batch, parts: int = 1, *,
               scaler: LossScaler | None = None, phases: Phases = nullcontext) -> Tensor:
    """Forward and backward of `parts` micro-batches; leaves the gradients in the model and returns
    the mean loss.

    The gradient is that of the whole batch, and the activations take 1 / parts of its memory.
    """
    losses = []
    for piece in batch.chunk(parts):
        with phases("forward"):
            whole_over_piece = parts        # makes the mean of the batch of means of micro-batches
            if batch.weights is not None:
                whole_over_piece = batch.weights.sum() / piece.weights.sum()
            part = loss(model, piece) / whole_over_piece
        with phases("backward"):
            (part if scaler is None else part * scaler.scale).backward()
            advance(model)
        losses.append(part.detach())
    if scaler is not None:
        scaler.unscale(model)
    return torch.stack(losses).sum()
