"""When parameters meet their gradients: after the whole backward pass, or each as soon as it has its own.

A row makes `finish() -> grad_norm`, which the trainer calls after forward and backward: whatever is left of the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

Finish = Callable[[], Tensor]   # -> the global norm of the gradients before clipping, ()


def after(optimizer: Optimizer, parameters: list[nn.Parameter], clip: float) -> Finish:
    """Clip by the global norm, step, and free every gradient. clip=0: no clipping."""
    return partial(_after, optimizer, parameters, clip or math.inf)


def _after(optimizer: Optimizer, parameters: list[nn.Parameter], clip: float) -> Tensor:
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


@dataclass(frozen=True, kw_only=True)
class Update:
    make: Callable[[Optimizer, list[nn.Parameter], float], Finish]
    why: str


UPDATES = {
    "after": Update(make=after, why="gradients are clipped by their global norm, so all must be there"),
}
