"""A learning rate for each parameter, by its norm: LARS (You et al. 2017, arXiv:1708.03888), and
LAMB for large batches (You et al. 2019, arXiv:1904.00962)."""

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import AdamWSettings, LarsSettings


def lamb(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int,
         parameter: Parameter) -> None:
    """Algorithm 2. The weight decay is added to Adam's step before its norm is taken; a parameter
    of zeros moves by that step itself."""
    m, v = slots
    m.lerp_(g, 1 - settings.beta1)
    v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
    root = (v / (1 - settings.beta2**update)).sqrt_().add_(settings.eps)
    step = torch.div(m, 1 - settings.beta1**update).div_(root)
    del root
    step.add_(w, alpha=settings.weight_decay)
    weight, length = parameter.norm(w), parameter.norm(step)
    trust = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
    w.sub_(step.mul_(trust * settings.lr))


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
