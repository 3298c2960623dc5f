"""AdamW without a schedule: the average of the weights takes the place of a learning rate that falls
(Defazio et al. 2024, arXiv:2405.15682, algorithm 1)."""

from torch import Tensor

from lpkit.optim.rules import Slots
from lpkit.techniques.optimizers import ScheduleFreeSettings


def schedule_free(y: Tensor, g: Tensor, slots: Slots, settings: ScheduleFreeSettings,
                  update: int) -> None:
    """Gradients are taken at y = (1 - beta1) z + beta1 x. z moves against them, and x, which is not
    stored, is the mean of all z, each weighted by the square of its learning rate."""
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
