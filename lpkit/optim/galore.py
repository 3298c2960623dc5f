"""GaLore: Adam's moments of a gradient's projection onto few directions (Zhao et al. 2024,
arXiv:2403.03507)."""

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.rules import Slots, adamw
from lpkit.techniques.optimizers import GaloreSettings


def galore(w: Tensor, g: Tensor, slots: Slots, settings: GaloreSettings, update: int,
           parameter: Parameter) -> None:
    """Algorithm 2, of the shorter side; AdamW for a vector. Moments outlive their projection."""
    *moments, projection = slots
    if not len(projection):
        return adamw(w, g, moments, settings, update)
    whole = parameter.gather(g)
    x = whole if whole.shape[0] < whole.shape[1] else whole.mT
    if (update - 1) % settings.every == 0:
        projection.copy_(torch.linalg.svd(x, full_matrices=False)[0][:, :projection.shape[1]])
    step = torch.zeros_like(moments[0])     # nothing of it decays
    adamw(step, projection.mT @ x, moments, settings, update)
    step = projection @ step
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.add_(parameter.part(step if x is whole else step.mT), alpha=settings.scale)
