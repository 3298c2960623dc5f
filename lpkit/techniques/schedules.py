"""Learning-rate schedules as rows: f(step, counted from 0) -> multiplier of the peak rate.

A schedule starts with a linear warm-up, if it has one. Then its shape runs from progress 0 to
progress 1 at the last step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import Any

from lpkit.techniques.row import Row, Settings
from lpkit.values import CountOrZero, Share


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Settings):
    warmup_steps: CountOrZero = 20


@dataclass(frozen=True, kw_only=True)
class DecaySettings(ScheduleSettings):
    final_lr_ratio: Share = 0.1     # the last step's learning rate over the peak's


def cosine(progress: float, settings: DecaySettings) -> float:
    final = settings.final_lr_ratio
    return final + (1 - final) * 0.5 * (1 + cos(pi * progress))


def constant(progress: float, settings: ScheduleSettings) -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Row):
    """`shape(progress, settings)`: the multiplier after the warm-up."""

    settings: Settings = ScheduleSettings()
    shape: Callable[[float, Any], float]


SCHEDULES = {
    "cosine": LearningRateSchedule(
        why="half a cosine", settings=DecaySettings(), shape=cosine,
        source="SGDR, Loshchilov & Hutter 2017, arXiv:1608.03983"),
    "constant": LearningRateSchedule(why="flat", shape=constant),
}


def schedule(settings: Settings, steps: int) -> Callable[[int], float]:
    """Return the function from a step to its multiplier, for a run of `steps`."""
    shape = SCHEDULES[settings.name].shape
    warmup = min(getattr(settings, "warmup_steps", 0), steps)

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        return shape(min(1.0, progress), settings)

    return multiplier
