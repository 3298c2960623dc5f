"""Notebook 07, when FP8 fails. Decibels, shares, powers of two."""

import math
from collections.abc import Sequence

from lpkit.course.exercises.judge import Exercise


def sqnr_db(x: Sequence[float], y: Sequence[float]) -> float:
    """Signal to quantisation noise of x cast to y, in dB: a ratio of energies."""
    return 10 * math.log10(sum(a * a for a in x) / sum((a - b) ** 2 for a, b in zip(x, y)))


def _of_magnitudes(x: Sequence[float], y: Sequence[float]) -> float:
    return 10 * math.log10(sum(abs(a) for a in x) / sum(abs(a - b) for a, b in zip(x, y)))


def saturated(x: Sequence[float], amax: float) -> float:
    """Share of the non-zero elements that saturate in E4M3 under the scale amax / 448. Its last
    spacing is 32, so up to 464 is still rounded to 448."""
    there = [abs(a) for a in x if a]
    return sum(a > amax * 464 / 448 for a in there) / len(there)


def _beyond_amax(x: Sequence[float], amax: float) -> float:
    return sum(abs(a) > amax for a in x) / len(x)


def margin(growth: float) -> int:
    """The least margin, whole powers of two, with which a tensor may grow `growth` times before its
    scale is renewed."""
    return max(0, math.ceil(math.log2(growth)))


EXERCISES = {
    "07.sqnr_db": Exercise(spec=sqnr_db, mistake=_of_magnitudes, cases=(
        ((1.0, 0.0), (0.9, 0.0)), ((3.0, -1.0, 0.5), (3.25, -1.0, 0.5)),
        ((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 3.5)))),
    "07.saturated": Exercise(spec=saturated, mistake=_beyond_amax, cases=(
        ((1.0, 2.0), 1.0), ((1.02, -3.0, 0.5), 1.0), ((0.0, 0.0, 4.0, -1.0), 2.0))),
    "07.margin": Exercise(spec=margin, mistake=lambda growth: int(math.log2(growth)),
                          cases=((2.0,), (3.0,), (64.0,), (0.5,))),
}
