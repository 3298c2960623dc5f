"""The statistics of a claim, on the standard library alone.

Losses of two arms come in pairs: one seed is one initialisation and one order of the data. The gain
of a pair is log(first / other), whose mean is read back as 1 - exp(-mean); a t-test asks whether
it is 0. It is asked at a few looks, and the error that each look may spend is fixed beforehand (the
spending function of Lan and DeMets 1983 after O'Brien and Fleming 1979; of several comparisons each
has its share). A look is held to what it spends itself, so by the union bound the error rate
is at most ALPHA at any number of seeds, whatever the looks share: the usual boundaries need a known
sigma. That costs 1% more seeds at two looks, 9% at three.
"""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALPHA, POWER = 0.05, 0.8
LEAST = 3           # seeds of an arm: two differences have one degree of freedom
NORMAL = statistics.NormalDist()


def t_cdf(t: float, df: int) -> float:
    """Student's t at `df` whole degrees of freedom: a finite sum, exact to rounding (Abramowitz and
    Stegun 26.7.3 and 26.7.4).

    >>> round(t_cdf(2.776445, 4), 6)
    0.975
    """
    angle = math.atan(t / math.sqrt(df))
    cos2, odd = math.cos(angle) ** 2, df % 2
    term = math.cos(angle) if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + odd, df - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inside / 2


def t_quantile(p: float, df: int) -> float:
    """The inverse of `t_cdf` for p from 0.5 to 1, by bisection to 1e-12 of its value."""
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return high


def levels(looks: int, comparisons: int = 1) -> list[float]:
    """The error that each look of one comparison may spend: ALPHA / comparisons in all.

    >>> [round(level, 4) for level in levels(2)]
    [0.0056, 0.0444]
    """
    z = NORMAL.inv_cdf(1 - ALPHA / 2)
    spent = [2 - 2 * NORMAL.cdf(z / math.sqrt(k / looks)) for k in range(1, looks + 1)]
    return [(now - before) / comparisons
            for before, now in zip([0.0, *spent], [*spent[:-1], ALPHA])]


def sizes(n: int, looks: int) -> list[int]:
    """Seeds at each look; the last has all."""
    return [max(min(LEAST, n), math.ceil(n * k / looks)) for k in range(1, looks + 1)]


def power(shift: float, df: int, critical: float, points: int = 200) -> float:
    """How often |t| exceeds `critical` where the mean is `shift` standard errors: the tails of the
    noncentral t, by the midpoint rule over the sample's sigma (error below 1e-4)."""
    low, high = max(0.0, 1 - 8 / math.sqrt(df)), 1 + 8 / math.sqrt(df)
    scale, total = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2), 0.0
    for i in range(points):
        s = low + (high - low) * (i + 0.5) / points
        density = math.exp(scale + (df - 1) * math.log(s) - df * s * s / 2)
        total += density * (NORMAL.cdf(shift - critical * s) + NORMAL.cdf(-shift - critical * s))
    return total * (high - low) / points


@functools.cache
def shift_seen(df: int, level: float) -> float:
    """The standard errors that are found POWER of the time."""
    critical, low, high = t_quantile(1 - level / 2, df), 0.0, 8.0
    while power(high, df, critical) < POWER:
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, df, critical) < POWER else (low, middle)
    return high


def visible(n: int, sd: float, level: float, pilot_df: int | None = None) -> float:
    """The effect, a share of the loss, that n pairs find POWER of the time at `level`.

    sd: of a pair's gain; from a pilot of pilot_df degrees of freedom, or known (None)

    Of few seeds sigma is as uncertain as the mean: with the pilot's degrees of freedom for the
    test's, the power holds over pilots (Stein 1945, doi:10.1214/aoms/1177731088).
    """
    df = n - 1 if pilot_df is None else min(pilot_df, n - 1)
    return -math.expm1(-shift_seen(df, level) * sd / math.sqrt(n))


def needed(effect: float, sd: float, level: float, pilot_df: int | None = None,
           most: int = 10_000) -> int:
    """The fewest seeds an arm that see `effect`, by bisection; `most` where none does."""
    low, high = LEAST - 1, LEAST
    while high < most and visible(high, sd, level, pilot_df) > effect:
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        seen = visible(middle, sd, level, pilot_df) <= effect
        low, high = (low, middle) if seen else (middle, high)
    return high


def gains(first: Sequence[float], other: Sequence[float]) -> list[float]:
    return [math.log(a / b) for a, b in zip(first, other, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Shares of the first arm's loss: positive where the other's is lower. `interval` holds the
    gain 95 times in 100 whenever one stops; it leaves 0 out where `p` is at most ALPHA."""

    gain: float
    interval: tuple[float, float]
    p: float                # adjusted for looks and comparisons
    seeds: int              # of each arm
    look: int               # counted from 1
    could_see: float        # the smallest gain that these seeds find POWER of the time

    @property
    def word(self) -> str:
        if self.p > ALPHA:
            return "no difference"
        return "better" if self.gain > 0 else "worse"


def look(first: Sequence[float], other: Sequence[float], level: float, number: int = 1) -> Verdict:
    """The losses of both arms by seed, held to `level`."""
    found, n = gains(first, other), len(first)
    mean, sd = statistics.fmean(found), statistics.stdev(found)
    error = sd / math.sqrt(n)
    half = t_quantile(1 - level / 2, n - 1) * error
    if error:
        p = 2 * (1 - t_cdf(abs(mean) / error, n - 1))
    else:
        p = float(mean == 0)
    low, middle, high = (-math.expm1(-end) for end in (mean - half, mean, mean + half))
    return Verdict(gain=middle, interval=(low, high), p=min(1.0, p * ALPHA / level), seeds=n,
                   look=number, could_see=visible(n, sd, level))


def judge(losses: Callable[[int], tuple[Sequence[float], Sequence[float]]], n: int, looks: int = 2,
          comparisons: int = 1) -> Verdict:
    """Looks until a difference is seen, or all n seeds are. `losses(n)`: of both arms, by seed."""
    for number, (seeds, level) in enumerate(zip(sizes(n, looks), levels(looks, comparisons)), 1):
        found = look(*losses(seeds), level, number)
        if found.p <= ALPHA:
            break
    return found
