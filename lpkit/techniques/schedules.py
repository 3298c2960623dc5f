"""Learning-rate schedules as rows: step, counted from 0 -> multiplier of the peak rate.

Each starts with a linear warm-up; then a shape runs from progress 0 to 1 at the last step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import cos, pi
from typing import Any

from lpkit.errors import at_least_zero, pick, share
from lpkit.techniques.row import Row, Settings


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Settings):
    warmup_steps: int = 20

    def __post_init__(self):
        at_least_zero("schedule.", warmup_steps=self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class DecaySettings(ScheduleSettings):
    final_lr_ratio: float = 0.1     # the last step's learning rate over the peak's

    def __post_init__(self):
        super().__post_init__()
        share("schedule.", final_lr_ratio=self.final_lr_ratio)


@dataclass(frozen=True, kw_only=True)
class WsdSettings(DecaySettings):
    decay_fraction: float = 0.2     # of the steps after the warm-up

    def __post_init__(self):
        super().__post_init__()
        share("schedule.", decay_fraction=self.decay_fraction)


def cosine(progress: float, settings: DecaySettings) -> float:
    final = settings.final_lr_ratio
    return final + (1 - final) * 0.5 * (1 + cos(pi * progress))


def wsd(progress: float, settings: WsdSettings) -> float:
    if not settings.decay_fraction:
        return 1.0
    begin = 1 - settings.decay_fraction
    return 1 - (1 - settings.final_lr_ratio) * max(0.0, (progress - begin) / settings.decay_fraction)


def linear(progress: float, settings: DecaySettings) -> float:
    return 1 - (1 - settings.final_lr_ratio) * progress


def constant(progress: float, settings: ScheduleSettings) -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Row):
    """`shape(progress, settings)`: the multiplier after the warm-up."""

    settings: ScheduleSettings = ScheduleSettings()
    shape: Callable[[float, Any], float]


SCHEDULES = {
    "cosine": LearningRateSchedule(settings=DecaySettings(), shape=cosine, why="half a cosine",
                                   source="SGDR, Loshchilov & Hutter 2017, arXiv:1608.03983"),
    "wsd": LearningRateSchedule(settings=WsdSettings(), shape=wsd, why="stable, then linear at the end",
                                source="MiniCPM, Hu et al. 2024, arXiv:2404.06395"),
    "linear": LearningRateSchedule(settings=DecaySettings(), shape=linear, why="a straight line",
                                   source="Devlin et al. 2019, arXiv:1810.04805"),
    "constant": LearningRateSchedule(settings=ScheduleSettings(), shape=constant, why="flat"),
}


def find(name: str) -> LearningRateSchedule:
    return pick(SCHEDULES, name, "schedule")


def schedule(settings: ScheduleSettings, steps: int) -> Callable[[int], float]:
    """The multiplier of every step of a run of `steps`."""
    shape = partial(find(settings.name).shape, settings=settings)
    return partial(_multiplier, shape=shape, steps=steps, warmup_steps=min(settings.warmup_steps, steps))


def _multiplier(step: int, *, shape: Callable[[float], float], steps: int, warmup_steps: int) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return shape(min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps)))
