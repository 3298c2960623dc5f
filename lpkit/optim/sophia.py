"""Sophia-G: a momentum over a curvature that the model's own answers show, with every number clipped
(Liu et al. 2023, arXiv:2305.14342)."""

from torch import Tensor

from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import SophiaSettings


def sophia(w: Tensor, g: Tensor, slots: Slots, settings: SophiaSettings, update: int) -> None:
    """Algorithm 3. No number moves by more than lr, and where no curvature is known, by lr."""
    m, h = slots
    m.lerp_(g, 1 - settings.beta1)
    step = (h * settings.gamma).clamp_(min=settings.eps).reciprocal_().mul_(m).clamp_(-1, 1)
    w.mul_(1 - settings.lr * settings.weight_decay).sub_(step, alpha=settings.lr)


def estimate(g: Tensor, slots: Slots, settings: SophiaSettings, labels: float) -> None:
    """Algorithm 2 (Gauss-Newton-Bartlett). g: of the mean loss over so many drawn labels."""
    slots[1].lerp_(g.square().mul_(labels), 1 - settings.beta2)
