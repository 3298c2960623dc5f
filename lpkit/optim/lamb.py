"""LAMB: large batches, by a learning rate for each parameter (You et al. 2019, arXiv:1904.00962)."""

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import AdamWSettings


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
