"""GaLore: Adam's moments of a gradient's projection onto few directions (Zhao et al. 2024,
arXiv:2403.03507)."""

import torch
from torch import Tensor

from lpkit.contracts import Parameter
from lpkit.optim.rules import Slots, adamw
from lpkit.techniques.optimizers import GaloreSettings


def galore(w: Tensor, g: Tensor, slots: Slots, settings: GaloreSettings, update: int,
           parameter: Parameter) -> None:
    """Algorithm 2, with the shorter side projected, and AdamW for a vector. The moments stay what
    they are when the projection is renewed."""
    *moments, projection = slots
    if not len(projection):
        return adamw(w, g, moments, settings, update)
    whole = parameter.gather(g)
    high = whole.shape[0] >= whole.shape[1]
    if (update - 1) % settings.every == 0:
        left, _, right = torch.linalg.svd(whole, full_matrices=False)
        projection.copy_((right.mT if high else left)[:, :projection.shape[1]])
        del left, right
    step = torch.zeros_like(moments[0])     # nothing of it decays
    adamw(step, projection.mT @ (whole.mT if high else whole), moments, settings, update)
    step = projection @ step
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.add_(parameter.part(step.mT if high else step), alpha=settings.scale)
