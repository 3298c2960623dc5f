"""Adam, whose weight decay is part of the gradient (Kingma & Ba 2015, arXiv:1412.6980)."""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

from lpkit.optim.rules import Slots, adamw, adamw_fused, adamw_kernel
from lpkit.techniques.optimizers import AdamWSettings


def adam(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int) -> None:
    """Large gradients make the decay small, since both are divided by the same root (Loshchilov &
    Hutter 2019, arXiv:1711.05101, which takes it out)."""
    coupled = SimpleNamespace(**vars(settings) | {"weight_decay": 0.0})
    adamw(w, g.add(w, alpha=settings.weight_decay), slots, coupled, update)


def adam_kernel(w: Tensor, g: Tensor, slots: Slots, settings: AdamWSettings, update: int) -> None:
    """PyTorch's fused kernel on one parameter."""
    adamw_kernel(w, g, slots, settings, update, torch_adam)


def adam_fused(groups: list[dict], settings: AdamWSettings) -> torch.optim.Optimizer:
    """Makes the Adam that updates all parameters at once."""
    return adamw_fused(groups, settings, torch.optim.Adam)
