"""Learning-rate schedules beyond the kit's own (cosine, wsd, constant).

    lpkit train cpu-3m --import lessons.rows.schedules schedule=linear
"""

from lpkit.techniques.schedules import SCHEDULES, DecaySettings, LearningRateSchedule


def linear(progress: float, settings: DecaySettings) -> float:
    """Returns the multiplier of the peak rate on a straight line to `final_lr_ratio`."""
    return 1 - (1 - settings.final_lr_ratio) * progress


SCHEDULES["linear"] = LearningRateSchedule(
    why="a straight line", settings=DecaySettings(), shape=linear,
    source="Devlin et al. 2019, arXiv:1810.04805")
