"""Adafactor: the second moments of a matrix from those of its rows and columns (Shazeer & Stern 2018,
arXiv:1804.04235)."""

import math

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import AdafactorSettings

EPS = torch.finfo(torch.float32).eps    # torch.optim.Adafactor's; the paper's is 1e-30, of squares


def adafactor(w: Tensor, g: Tensor, slots: Slots, settings: AdafactorSettings, update: int,
              parameter: Parameter) -> None:
    """Algorithms 4 and 5, without momentum. The step's root mean square is at most 1, and the
    learning rate counts in those of the weight, and falls as 1 over the root of the update."""
    rows, columns, v = slots
    share, numbers = update**-settings.decay, math.prod(parameter.shape)
    if len(parameter.shape) == 2:
        rows.lerp_(parameter.gather(g.square().mean(1)), share)
        columns.lerp_(parameter.sum(g.square().sum(0)) / parameter.shape[0], share)
        v = parameter.part(rows)[:, None] * (columns / rows.mean().clamp(min=EPS))
    else:
        v.lerp_(g.square(), share)
        v = v.clone()
    step = v.clamp_(min=EPS**2).rsqrt_().mul_(g)
    length = (parameter.norm(step) / math.sqrt(numbers)).clamp(min=1.0)
    scale = (parameter.norm(w) / math.sqrt(numbers)).clamp(min=settings.least)
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.sub_(step.mul_(scale / length * min(settings.lr, update**-0.5)))
