"""Exercises of 06_fp8_training: the noise of a product, the layers to keep, the time to an equal
loss. Decibels, seconds."""

import math
from collections.abc import Sequence
from statistics import fmean

from lpkit.course.exercises.judge import Exercise


def product_db(x: float, w: float) -> float:
    """Signal over noise of x w^T, whose operands have been cast with these, all in dB: shares of
    noise add up."""
    return -10 * math.log10(10 ** (-x / 10) + 10 ** (-w / 10))


def keep(samples: Sequence[tuple[str, float]], budget: int) -> list[str]:
    """The `budget` layers to leave in 16 bits, the worst first: those with the largest mean noise
    over their samples, each a layer and its signal over noise in dB."""
    noise: dict[str, list[float]] = {}
    for layer, db in samples:
        noise.setdefault(layer, []).append(10 ** (-db / 10))
    return sorted(noise, key=lambda layer: -fmean(noise[layer]))[:budget]


def _by_mean_decibel(samples: Sequence[tuple[str, float]], budget: int) -> list[str]:
    decibels: dict[str, list[float]] = {}
    for layer, db in samples:
        decibels.setdefault(layer, []).append(db)
    return sorted(decibels, key=lambda layer: fmean(decibels[layer]))[:budget]


def speedup(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
            base_seconds: float) -> float:
    """How many times as fast a run reaches the last loss of the base. One loss a step, falling;
    `seconds` and `base_seconds` are those of a step; between two steps the loss is a straight line.
    0: never."""
    target = base_losses[-1]
    for step, loss in enumerate(losses, 1):
        if loss <= target:
            above = losses[step - 2] if step > 1 else loss
            part = (loss - target) / (loss - above) if above > loss else 0.0
            return len(base_losses) * base_seconds / ((step - part) * seconds)
    return 0.0


def _at_equal_steps(losses: Sequence[float], seconds: float, base_losses: Sequence[float],
                    base_seconds: float) -> float:
    return base_seconds / seconds * base_losses[-1] / losses[-1]


EXERCISES = {
    "06.product_db": Exercise(
        spec=product_db, mistake=lambda x, w: (x + w) / 2,
        cases=((31.5, 31.5), (31.5, 25.5), (40.0, 20.0))), "06.keep": Exercise(
        spec=keep, mistake=_by_mean_decibel, cases=(
            ([("head", 30.0), ("up", 20.0)], 1),
            ([("up", 31.0), ("down", 24.0), ("up", 31.0), ("down", 24.0), ("head", 36.0),
              ("head", 12.0)], 2),
            ([("q", 30.0), ("k", 31.0), ("v", 29.0)], 0))),
    "06.speedup": Exercise(
        spec=speedup, mistake=_at_equal_steps, cases=(
            ([4.0, 3.0, 2.0, 1.0], 0.5, [4.0, 3.0, 2.0], 1.0),
            ([4.0, 3.5, 3.0, 2.5, 2.0], 0.8, [4.0, 3.0, 2.8], 1.0),
            ([4.0, 3.5, 3.4], 0.5, [4.0, 3.0], 1.0))),
}
