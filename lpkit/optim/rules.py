"""Update rules: w and its slots, both float32, are changed in place. Each is a definition.

    rule(w, g, slots, settings, update)

`g` is the gradient in float32 and is not changed, `slots` are the tensors of the row's slots in
their order, `settings` has the row's settings with the learning rate and the weight decay of this
parameter at this update, and `update` counts from 1. A rule that reads more than one number at a
time has a row that is `told`, and a sixth argument, the `contracts.Parameter`. Weight decay is
decoupled unless a rule says otherwise: it scales the weight and is no part of the gradient
(Loshchilov & Hutter 2019, arXiv:1711.05101).
"""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw

from lpkit.contracts import Parameter
from lpkit.techniques.optimizers import (
    AdafactorSettings,
    AdamWSettings,
    LarsSettings,
    LionSettings,
    MomentumSettings,
    OptimizerSettings,
    ScheduleFreeSettings,
    SophiaSettings,
)

Slots = list[Tensor]
EPS = torch.finfo(torch.float32).eps    # torch.optim.Adafactor's; the paper's is 1e-30, of squares


def adamw(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int) -> None:
    """Both means start at 0, and dividing by 1 - beta^update takes that bias out."""
    m, v = slots
    m.lerp_(g, 1 - settings.beta1)
    v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
    root = (v / (1 - settings.beta2**update)).sqrt_().add_(settings.eps)
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.addcdiv_(m, root, value=-settings.lr / (1 - settings.beta1**update))


def adamw_kernel(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int,
                 kernel: Callable = torch_adamw) -> None:
    """PyTorch's fused kernel on one parameter: one pass over memory, the bits of `adamw_fused`."""
    m, v = slots
    before = torch.full((), update - 1.0, device=w.device)  # the kernel adds one
    kernel([w], [g], [m], [v], [], [before], fused=True, amsgrad=False, maximize=False,
           beta1=settings.beta1, beta2=settings.beta2, eps=settings.eps, lr=settings.lr,
           weight_decay=settings.weight_decay)


def adamw_fused(groups: list[dict], settings: AdamWSettings,
                kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    """Makes the AdamW that updates all parameters at once."""
    return kind(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps,
                fused=True)


def adam(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int) -> None:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980), whose weight decay is part of the gradient. Large
    gradients make the decay small, since both are divided by the same root."""
    coupled = SimpleNamespace(**vars(settings) | {"weight_decay": 0.0})
    adamw(w, g.add(w, alpha=settings.weight_decay), slots, coupled, update)


adam_kernel = partial(adamw_kernel, kernel=torch_adam)
adam_fused = partial(adamw_fused, kind=torch.optim.Adam)


def lion(w: Tensor, g: Tensor, slots: Slots, settings: LionSettings, update: int) -> None:
    """Every coordinate moves by lr. The direction leans more on this gradient (beta1) than the
    momentum that stays (beta2) does (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""
    (m,) = slots
    direction = torch.lerp(m, g, 1 - settings.beta1).sign_()
    w.mul_(1 - settings.lr * settings.weight_decay).add_(direction, alpha=-settings.lr)
    m.lerp_(g, 1 - settings.beta2)


def momentum(w: Tensor, g: Tensor, slots: Slots, settings: MomentumSettings, update: int) -> None:
    """The velocity is a fading sum, not a mean, as torch.optim.SGD has it."""
    (velocity,) = slots
    velocity.mul_(settings.momentum).add_(g)
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.add_(velocity, alpha=-settings.lr)


def sgd(w: Tensor, g: Tensor, slots: Slots, settings: OptimizerSettings, update: int) -> None:
    w.mul_(1 - settings.lr * settings.weight_decay).add_(g, alpha=-settings.lr)


def sophia(w: Tensor, g: Tensor, slots: Slots, settings: SophiaSettings, update: int) -> None:
    """No number moves by more than lr; it does where there is no curvature (Liu et al. 2023,
    arXiv:2305.14342, algorithm 3)."""
    m, h = slots
    m.lerp_(g, 1 - settings.beta1)
    step = (h * settings.gamma).clamp_(min=settings.eps).reciprocal_().mul_(m).clamp_(-1, 1)
    w.mul_(1 - settings.lr * settings.weight_decay).sub_(step, alpha=settings.lr)


def sophia_estimate(g: Tensor, slots: Slots, settings: SophiaSettings, labels: float) -> None:
    """Algorithm 2, Gauss-Newton-Bartlett. g: of the mean loss over so many drawn labels."""
    slots[1].lerp_(g.square().mul_(labels), 1 - settings.beta2)


def schedule_free(y: Tensor, g: Tensor, slots: Slots, settings: ScheduleFreeSettings,
                  update: int) -> None:
    """AdamW whose average of the weights takes the place of a falling learning rate (Defazio et al.
    2024, arXiv:2405.15682, algorithm 1). Gradients are taken at y = (1 - beta1) z + beta1 x. z
    moves against them, and x, which is not stored, is the mean of all z, each weighted by the
    square of its learning rate."""
    z, v, total = slots
    if update == 1:
        z.copy_(y)
    total.add_(settings.lr**2)
    share = settings.lr**2 / total
    v.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
    step = g / (v / (1 - settings.beta2**update)).sqrt_().add_(settings.eps)
    step.add_(y, alpha=settings.weight_decay)
    y.lerp_(z, share).add_(step * (settings.lr * (settings.beta1 * (1 - share) - 1)))
    z.sub_(step, alpha=settings.lr)


def average(y: Tensor, slots: Slots, settings: ScheduleFreeSettings) -> Tensor:
    """x, from y and z."""
    return y.lerp(slots[0], 1 - 1 / settings.beta1)


def lamb(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int,
         parameter: Parameter) -> None:
    """You et al. 2019, arXiv:1904.00962, algorithm 2. The weight decay is added to Adam's step
    before its norm is taken; a parameter of zeros moves by that step itself."""
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
    """You et al. 2017, arXiv:1708.03888, algorithm 1: the weight decay is part of the gradient, the
    learning rate of the velocity. Without a norm or a gradient a parameter moves as by SGD."""
    (velocity,) = slots
    weight, length = parameter.norm(w), parameter.norm(g)
    local = settings.trust * weight / (length + settings.weight_decay * weight)
    local = torch.where((weight > 0) & (length > 0), local, 1.0)
    step = g.add(w, alpha=settings.weight_decay).mul_(local * settings.lr)
    w.sub_(velocity.mul_(settings.momentum).add_(step))


def adafactor(w: Tensor, g: Tensor, slots: Slots, settings: AdafactorSettings, update: int,
              parameter: Parameter) -> None:
    """Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5, without momentum: the second
    moments of a matrix come from those of its rows and columns. The step's root mean square is at
    most 1, the learning rate counts in the weight's and falls as 1 over the root of the update."""
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
