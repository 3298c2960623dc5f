"""Learning-rate schedules beyond the kit's own (cosine, constant).

    lpkit train cpu-3m --import lessons.rows.schedules schedule=linear
"""

from dataclasses import dataclass

from lpkit.techniques.schedules import SCHEDULES, DecaySettings, LearningRateSchedule
from lpkit.values import Share


@dataclass(frozen=True, kw_only=True)
class WsdSettings(DecaySettings):
    decay_fraction: Share = 0.2     # share of the steps after the warm-up


def linear(progress: float, settings: DecaySettings) -> float:
    """Return the multiplier of the peak learning rate, on a straight line from 1 to
    `final_lr_ratio`. `progress`: the share of the steps after the warm-up that are done."""
    return 1 - (1 - settings.final_lr_ratio) * progress


def wsd(progress: float, settings: WsdSettings) -> float:
    """Return the multiplier of the peak learning rate: 1, then linear in the last steps."""
    if not settings.decay_fraction:
        return 1.0
    begin = 1 - settings.decay_fraction
    decayed = max(0.0, (progress - begin) / settings.decay_fraction)
    return 1 - (1 - settings.final_lr_ratio) * decayed


SCHEDULES["linear"] = LearningRateSchedule(
    why="a straight line", settings=DecaySettings(), shape=linear,
    source="Devlin et al. 2019, arXiv:1810.04805")
SCHEDULES["wsd"] = LearningRateSchedule(
    why="stable, then linear at the end", settings=WsdSettings(), shape=wsd,
    source="MiniCPM, Hu et al. 2024, arXiv:2404.06395")
