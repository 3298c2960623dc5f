"""Learning-rate schedules: step, counted from 0 -> multiplier of the peak rate. Each starts with a linear warm-up."""

import math
from functools import partial

from lpkit.contracts import Schedule


def cosine(progress: float, *, final: float, decay_fraction: float) -> float:
    """Half a cosine from 1 to `final` (SGDR, https://arxiv.org/abs/1608.03983)."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def wsd(progress: float, *, final: float, decay_fraction: float) -> float:
    """Warm-up, stable, decay: flat, then linear over the last `decay_fraction` (MiniCPM, https://arxiv.org/abs/2404.06395)."""
    return 1 - (1 - final) * max(0.0, (progress - (1 - decay_fraction)) / decay_fraction) if decay_fraction else 1.0


def linear(progress: float, *, final: float, decay_fraction: float) -> float:
    return 1 - (1 - final) * progress


def constant(progress: float, *, final: float, decay_fraction: float) -> float:
    return 1.0


SCHEDULES = {"cosine": cosine, "wsd": wsd, "linear": linear, "constant": constant}


def with_warmup(shape, *, steps: int, warmup_steps: int, final: float, decay_fraction: float) -> Schedule:
    """`shape` runs from progress 0 after the warm-up to 1 at the last step."""
    return partial(_multiplier, shape=partial(shape, final=final, decay_fraction=decay_fraction),
                   steps=steps, warmup_steps=min(warmup_steps, steps))


def _multiplier(step: int, *, shape, steps: int, warmup_steps: int) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return shape(min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps)))
