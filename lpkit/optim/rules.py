"""Update rules: functions that update one parameter in place.

    rule(w, g, slots, settings, update)

    w         the weight, float32; changed
    g         its gradient, float32; not changed
    slots     the optimizer state of the parameter, for example its moments, float32, in the order
              of the row's slots; changed
    settings  the settings of the row, with the learning rate and the weight decay of this parameter
              at this update
    update    the number of this update, from 1 on

If a rule needs the whole matrix, and not only one number at a time, its row has `takes_parameter`,
and the rule has a sixth argument, a `contracts.Parameter`. Weight decay is decoupled unless the
docstring of a rule states otherwise: it scales the weight, and is not added to the gradient
(Loshchilov & Hutter 2019, arXiv:1711.05101).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from lpkit.techniques.optimizers import (
    AdamWSettings,
    LionSettings,
    MomentumSettings,
    OptimizerSettings,
)

Slots = list[Tensor]


def adamw(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int) -> None:
    """AdamW: m and v are running means of g and of g^2. Both start at 0. Dividing them by
    1 - beta^update removes this bias."""
    m, v = slots
    m.lerp_(g, 1 - settings.beta1)
    v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
    root = (v / (1 - settings.beta2**update)).sqrt_().add_(settings.eps)
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.addcdiv_(m, root, value=-settings.lr / (1 - settings.beta1**update))


def adamw_kernel(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int,
                 kernel: Callable = torch_adamw) -> None:
    """AdamW by PyTorch's fused kernel, for one parameter, in one pass over memory. Bit-equal to
    `adamw_fused`."""
    m, v = slots
    before = torch.full((), update - 1.0, device=w.device)  # the kernel adds 1
    kernel([w], [g], [m], [v], [], [before], fused=True, amsgrad=False, maximize=False,
           beta1=settings.beta1, beta2=settings.beta2, eps=settings.eps, lr=settings.lr,
           weight_decay=settings.weight_decay)


def adamw_fused(groups: list[dict], settings: AdamWSettings,
                kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    """Return PyTorch's fused AdamW, which updates all parameters in one call."""
    return kind(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps,
                fused=True)


def lion(w: Tensor, g: Tensor, slots: Slots, settings: LionSettings, update: int) -> None:
    """Lion: each number moves by lr, in the direction of the sign of a mean of momentum and
    gradient. In this mean (beta1) the gradient has more weight than in the update of the momentum
    (beta2) (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""
    (m,) = slots
    direction = torch.lerp(m, g, 1 - settings.beta1).sign_()
    w.mul_(1 - settings.lr * settings.weight_decay).add_(direction, alpha=-settings.lr)
    m.lerp_(g, 1 - settings.beta2)


def momentum(w: Tensor, g: Tensor, slots: Slots, settings: MomentumSettings, update: int) -> None:
    """SGD with momentum: the velocity is a decaying sum of gradients, not a mean, as in
    torch.optim.SGD."""
    (velocity,) = slots
    velocity.mul_(settings.momentum).add_(g)
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.add_(velocity, alpha=-settings.lr)


def sgd(w: Tensor, g: Tensor, slots: Slots, settings: OptimizerSettings, update: int) -> None:
    """SGD without momentum: w moves by -lr g."""
    w.mul_(1 - settings.lr * settings.weight_decay).add_(g, alpha=-settings.lr)
