"""Adam, whose weight decay is part of the gradient (Kingma & Ba 2015, arXiv:1412.6980)."""

from functools import partial
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


adam_kernel = partial(adamw_kernel, kernel=torch_adam)
adam_fused = partial(adamw_fused, kind=torch.optim.Adam)
