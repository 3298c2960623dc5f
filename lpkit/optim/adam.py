"""Adam, whose weight decay is part of the gradient (Kingma & Ba 2015, arXiv:1412.6980)."""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

from lpkit.optim.rules import Slots, adamw
from lpkit.techniques.optimizers import AdamWSettings


def adam(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int) -> None:
    """Large gradients make the decay small, since both are divided by the same root (Loshchilov &
    Hutter 2019, arXiv:1711.05101, which takes it out)."""
    coupled = SimpleNamespace(**vars(settings) | {"weight_decay": 0.0})
    adamw(w, g.add(w, alpha=settings.weight_decay), slots, coupled, update)


def adam_kernel(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int) -> None:
    """PyTorch's fused kernel on one parameter: one pass over memory, the bits of `adam_fused`."""
    m, v = slots
    before = torch.full((), update - 1.0, device=w.device)  # the kernel adds one
    torch_adam([w], [g], [m], [v], [], [before], fused=True, amsgrad=False, maximize=False,
               beta1=settings.beta1, beta2=settings.beta2, eps=settings.eps, lr=settings.lr,
               weight_decay=settings.weight_decay)


def adam_fused(groups: list[dict], settings: AdamWSettings) -> torch.optim.Optimizer:
    """Makes the Adam that updates all parameters at once."""
    return torch.optim.Adam(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2),
                            eps=settings.eps, fused=True)
