"""What one update does before the optimizer: forward and backward, in one piece or in micro-batches."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lpkit.contracts import Loss, Step


class LossScaler(nn.Module):
    """Dynamic loss scaling: gradients that float16 would lose are multiplied by `scale`, and divided again in float32.

    An update whose gradients overflowed is skipped: they are dropped, so that there is nothing to clip and the optimizer
    leaves every parameter and its moments alone; the scale is halved. At a scale of `least` nothing is skipped any more:
    then it is the run that diverges, and not the scale. Its state is in buffers, for the checkpoint.
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
        finite = torch.stack([g.sum() for g in grads]).isfinite().all().item() or all(g.isfinite().all() for g in grads)
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


def _nothing(model: nn.Module) -> None:
    pass


def accumulate(parts: int, loss: Loss, *, after: Callable[[nn.Module], None] = _nothing,
               scaler: LossScaler | None = None) -> Step:
    """`parts` micro-batches, one update: the same gradient as the whole batch, 1/parts of the activations.

    `after(model)` is called after each backward.
    """
    return partial(_accumulate, parts=parts, loss=loss, after=after, scaler=scaler)


def _accumulate(model: nn.Module, x: Tensor, y: Tensor, *, parts: int, loss: Loss,
                after: Callable[[nn.Module], None], scaler: LossScaler | None) -> Tensor:
    losses = []
    for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
        part = loss(model, x_part, y_part) / parts
        (part if scaler is None else part * scaler.scale).backward()
        after(model)
        losses.append(part.detach())
    if scaler is not None:
        scaler.unscale(model)
    return torch.stack(losses).sum()
