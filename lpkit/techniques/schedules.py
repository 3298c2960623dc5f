"""Learning-rate schedules as rows. A schedule is a function from a step (counted from 0) to a
factor, by which the peak learning rate is multiplied.

A schedule starts with a linear warm-up of `warmup_steps`. Afterwards, the progress goes from 0 to 1
at the last step of the run, and the row's `shape` returns the factor for a progress.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import Any

from lpkit.techniques.row import Settings, TechniqueRow
from lpkit.values import CountOrZero, Share


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Settings):
    warmup_steps: CountOrZero = 20


@dataclass(frozen=True, kw_only=True)
class DecaySettings(ScheduleSettings):
    final_lr_ratio: Share = 0.1     # learning rate of the last step, divided by the peak rate


def cosine(progress: float, settings: DecaySettings) -> float:
    """Return a factor that falls from 1 to final_lr_ratio along half a cosine."""
    final = settings.final_lr_ratio
    return final + (1 - final) * 0.5 * (1 + cos(pi * progress))


def constant(progress: float, settings: ScheduleSettings) -> float:
    """Return 1 at any progress."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(TechniqueRow):
    """A row of SCHEDULES. `shape(progress, settings)` returns the factor after the warm-up."""

    settings: Settings = ScheduleSettings()
    shape: Callable[[float, Any], float]


SCHEDULES = {
    "cosine": LearningRateSchedule(
        why="falls along half a cosine", settings=DecaySettings(), shape=cosine,
        source="SGDR, Loshchilov & Hutter 2017, arXiv:1608.03983"),
    "constant": LearningRateSchedule(why="constant after the warm-up", shape=constant),
}


def schedule(settings: Settings, steps: int) -> Callable[[int], float]:
    """Return the function from a step (0 to steps - 1) to its factor.

    >>> factor = schedule(ScheduleSettings(name="constant", warmup_steps=20), steps=100)
    >>> [factor(step) for step in (0, 9, 19, 50)]
    [0.05, 0.5, 1.0, 1.0]
    """
    shape = SCHEDULES[settings.name].shape
    warmup = min(getattr(settings, "warmup_steps", 0), steps)

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        return shape(min(1.0, progress), settings)

    return multiplier
