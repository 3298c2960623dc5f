"""AMSGrad (Reddi et al. 2018, https://arxiv.org/abs/1904.09237): Adam with a second moment that
never decreases.

This row is a working example. Replace it by your own: its state (`slots`), its update (`rule`) and
its source. docs/own_technique.md describes the other fields of a row.
"""

import sys

from lpkit.files import resource
from lpkit.techniques.optimizers import FLOAT32, OPTIMIZERS, AdamWSettings, Optimizer, Slot

sys.path.append(str(resource("notebooks")))     # the course's `lessons`, for my_optimizer.ipynb


def rule(w, g, slots, settings, update):
    """Update w and its slots in place with the gradient g. All tensors are float32 and have the
    shape of w; `update` counts from 1."""
    mean, square, largest = slots
    mean.lerp_(g, 1 - settings.beta1)
    square.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
    largest.copy_(largest.maximum(square))
    root = (largest / (1 - settings.beta2**update)).sqrt_().add_(settings.eps)
    w.mul_(1 - settings.lr * settings.weight_decay)
    w.addcdiv_(mean, root, value=-settings.lr / (1 - settings.beta1**update))


def definition(gradients: list[float], lr: float) -> float:
    """Return the weight after updates by `gradients`. It is one number that starts at 0, without
    weight decay."""
    w = mean = square = largest = 0.0
    for update, g in enumerate(gradients, 1):
        mean = 0.9 * mean + 0.1 * g
        square = 0.95 * square + 0.05 * g**2
        largest = max(largest, square)
        root = (largest / (1 - 0.95**update))**0.5 + 1e-8
        w -= lr * mean / (1 - 0.9**update) / root
    return w


OPTIMIZERS["my_optimizer"] = Optimizer(
    why="AdamW, divided by the largest second moment so far",
    source="Reddi et al. 2018, https://arxiv.org/abs/1904.09237, algorithm 2",
    settings=AdamWSettings(), temporary_bytes=FLOAT32, implementation="my_optimizer:rule",
    slots=(Slot(name="exp_avg"), Slot(name="exp_avg_sq", signed=False),
           Slot(name="max_exp_avg_sq", signed=False)))
