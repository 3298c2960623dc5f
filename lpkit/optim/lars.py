"""LARS: a learning rate for each parameter, by its norm and its gradient's (You et al. 2017,
arXiv:1708.03888)."""

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import LarsSettings


def lars(w: Tensor, g: Tensor, slots: Slots, settings: LarsSettings, update: int,
         parameter: Parameter) -> None:
    """Algorithm 1: the weight decay is part of the gradient, and the learning rate of the velocity.
    A parameter of zeros, or with a gradient of zeros, moves as by SGD."""
    (velocity,) = slots
    weight, length = parameter.norm(w), parameter.norm(g)
    local = settings.trust * weight / (length + settings.weight_decay * weight)
    local = torch.where((weight > 0) & (length > 0), local, 1.0)
    step = g.add(w, alpha=settings.weight_decay).mul_(local * settings.lr)
    w.sub_(velocity.mul_(settings.momentum).add_(step))
