"""Learning-rate schedules as rows: step, counted from 0 -> multiplier of the peak rate.

Each starts with a linear warm-up, if it has one; then a shape runs from progress 0 to 1 at the
last step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi
from typing import Annotated, Any, Literal

from lpkit.errors import ConfigError
from lpkit.techniques.row import Row, Settings
from lpkit.values import CountOrZero, InnerShare, Share, between


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Settings):
    where = "schedule."

    warmup_steps: CountOrZero = 20


@dataclass(frozen=True, kw_only=True)
class DecaySettings(ScheduleSettings):
    final_lr_ratio: Share = 0.1     # the last step's learning rate over the peak's


@dataclass(frozen=True, kw_only=True)
class WsdSettings(DecaySettings):
    decay_fraction: Share = 0.2     # of the steps after the warm-up


@dataclass(frozen=True, kw_only=True)
class OneCycleSettings(Settings):
    """The peak is `optimizer.lr`, and the rise to it is the warm-up."""

    where = "schedule."

    peak_fraction: InnerShare = 0.3     # of the steps, where the peak stands
    initial_division: Annotated[float, between(1, 1e9)] = 25.0  # the peak over the first rate
    final_division: Annotated[float, between(1, 1e9)] = 1e4     # the first rate over the last
    anneal: Literal["cosine", "linear"] = "cosine"
    # down to the first rate as fast as up, then to the last; else to the last at once
    three_phase: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.three_phase and self.peak_fraction >= 0.5:
            raise ConfigError(f"schedule.peak_fraction must be below 0.5 with "
                              f"schedule.three_phase=true, got {self.peak_fraction:g}; the way "
                              f"down takes as many steps as the way up")


def cosine(progress: float, settings: DecaySettings) -> float:
    final = settings.final_lr_ratio
    return final + (1 - final) * 0.5 * (1 + cos(pi * progress))


def wsd(progress: float, settings: WsdSettings) -> float:
    if not settings.decay_fraction:
        return 1.0
    begin = 1 - settings.decay_fraction
    decayed = max(0.0, (progress - begin) / settings.decay_fraction)
    return 1 - (1 - settings.final_lr_ratio) * decayed


def linear(progress: float, settings: DecaySettings) -> float:
    return 1 - (1 - settings.final_lr_ratio) * progress


def constant(progress: float, settings: ScheduleSettings) -> float:
    return 1.0


ANNEAL = {"cosine": lambda way: (1 - cos(pi * way)) / 2, "linear": lambda way: way}


def one_cycle(progress: float, settings: OneCycleSettings) -> float:
    first, peak = 1 / settings.initial_division, settings.peak_fraction
    corners = [(0.0, first), (peak, 1.0), *[(2 * peak, first)] * settings.three_phase,
               (1.0, first / settings.final_division)]
    (begin, low), (end, high) = next(pair for pair in pairwise(corners) if progress <= pair[1][0])
    return low + (high - low) * ANNEAL[settings.anneal]((progress - begin) / (end - begin))


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Row):
    """`shape(progress, settings)`: the multiplier after the warm-up."""

    settings: Settings = ScheduleSettings()
    shape: Callable[[float, Any], float]


SCHEDULES = {
    "cosine": LearningRateSchedule(
        why="half a cosine", settings=DecaySettings(), shape=cosine,
        source="SGDR, Loshchilov & Hutter 2017, arXiv:1608.03983"),
    "wsd": LearningRateSchedule(
        why="stable, then linear at the end", settings=WsdSettings(), shape=wsd,
        source="MiniCPM, Hu et al. 2024, arXiv:2404.06395"),
    "linear": LearningRateSchedule(
        why="a straight line", settings=DecaySettings(), shape=linear,
        source="Devlin et al. 2019, arXiv:1810.04805"),
    "constant": LearningRateSchedule(why="flat", shape=constant),
    "one-cycle": LearningRateSchedule(
        why="up to the peak, then down to far below where it began; momentum stays as it is",
        settings=OneCycleSettings(), shape=one_cycle,
        source="Smith & Topin 2018, arXiv:1708.07120 (`three_phase`); two phases as in PyTorch's "
               "OneCycleLR"),
}


def schedule(settings: Settings, steps: int) -> Callable[[int], float]:
    """The multiplier of every step of a run of `steps`."""
    shape = SCHEDULES[settings.name].shape
    warmup = min(getattr(settings, "warmup_steps", 0), steps)

    def multiplier(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        return shape(min(1.0, progress), settings)

    return multiplier
