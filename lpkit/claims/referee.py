"""The statistics of a claim, on the standard library alone.

Losses of two arms come in pairs: one seed is one initialisation and one order of the data. The gain
of a pair is log(first / other); a t-test asks whether its mean is 0, at a few looks. The error that
each look may spend is fixed beforehand (the spending function of Lan and DeMets 1983, after O'Brien
and Fleming 1979), and a look is held to its own part: by the union bound the error rate is at most
ALPHA at any number of seeds. Boundaries that use what looks share need a known sigma, and would
save 1% of the seeds at two looks, 9% at three.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALPHA, POWER = 0.05, 0.8
LEAST, MOST = 3, 10_000     # seeds of an arm
NORMAL = statistics.NormalDist()
Losses = Sequence[float]


def t_cdf(t: float, df: int) -> float:
    """Student's t at `df` whole degrees of freedom: a finite sum, exact to rounding (Abramowitz and
    Stegun 26.7.3 and 26.7.4)."""
    angle, odd = math.atan(t / math.sqrt(df)), df % 2
    term = math.cos(angle) if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + odd, df - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    half = math.sin(angle) * total / 2
    return 0.5 + (angle / math.pi + half * 2 / math.pi if odd else half)


@functools.cache
def t_quantile(p: float, df: int) -> float:
    """Inverts `t_cdf` for p from 0.5 to 1, to 1e-12 of its value."""
    return _least(lambda t: t_cdf(t, df) >= p, 0.0, 1.0, 1e-12)


def _least(holds: Callable[[float], bool], low: float, high: float, share: float) -> float:
    """Returns the least value above `low` that holds, as all above it do, to a share of itself."""
    while not holds(high):
        low, high = high, 2 * high
    while high - low > share * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def levels(looks: int, comparisons: int = 1) -> list[float]:
    """Returns the error that each look of one comparison may spend: ALPHA / comparisons in all."""
    z = NORMAL.inv_cdf(1 - ALPHA / 2)
    spent = [0.0, *(2 - 2 * NORMAL.cdf(z * math.sqrt(looks / k)) for k in range(1, looks)), ALPHA]
    return [(now - before) / comparisons for before, now in itertools.pairwise(spent)]


def visible(n: int, sd: float, level: float, sd_df: int | None = None) -> float:
    """Returns the gain, a share of the loss, that n pairs find POWER of the time at `level`.

    sd: of a pair's log gain, known (None) or from a pilot of sd_df degrees of freedom

    A sample's sigma is taken for normal, with its own mean and variance, as is usual for the
    noncentral t: of a known sd the power is 80.0 to 80.4%, over pilots 80 to 93% (more where few
    pairs do).
    """
    z, critical = NORMAL.inv_cdf(POWER), t_quantile(1 - level / 2, n - 1)
    own, planned = _mean_sigma(n - 1), _mean_sigma(sd_df) if sd_df else 1.0
    # (shift * planned - critical * own)^2 = z^2 (their variances, and the mean's, which is 1)
    a, b = planned**2 - z**2 * (1 - planned**2), planned * critical * own
    c = (critical * own) ** 2 - z**2 * (1 + critical**2 * (1 - own**2))
    shift = (b + math.sqrt(b * b - a * c)) / a
    return -math.expm1(-shift * sd / math.sqrt(n))


def _mean_sigma(df: int) -> float:
    """Returns the mean of a sample's sigma over the true one; the mean of its square is 1."""
    return math.sqrt(2 / df) * math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2))


def needed(effect: float, sd: float, level: float, sd_df: int | None = None) -> int:
    """Returns the fewest pairs that see `effect`; MOST where none do."""
    def seen(n: float) -> bool:
        return n > MOST - 1 or visible(math.ceil(n), sd, level, sd_df) <= effect

    return math.ceil(_least(seen, LEAST - 1, LEAST, 1 / (4 * MOST)))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Shares of the first arm's loss, positive where the other's is lower. The interval holds the
    gain 95 times in 100 whenever looking ends; it leaves 0 out where p is at most ALPHA."""

    gain: float
    interval: tuple[float, float]
    p: float                # adjusted for looks and comparisons
    seeds: int              # of each arm
    could_see: float        # the smallest gain that as many seeds find POWER of the time
    level: float            # of the error, what this look may spend

    @property
    def word(self) -> str:
        return "no difference" if self.p > ALPHA else "better" if self.gain > 0 else "worse"


def look(first: Losses, other: Losses, level: float) -> Verdict:
    """Judges the losses of both arms by seed, held to `level`."""
    gains = [math.log(a / b) for a, b in zip(first, other, strict=True)]
    mean, sd, n = statistics.fmean(gains), statistics.stdev(gains), len(gains)
    error = sd / math.sqrt(n)
    p = 2 * t_cdf(-abs(mean) / error, n - 1) if error else float(mean == 0)
    half = t_quantile(1 - level / 2, n - 1) * error
    low, middle, high = (-math.expm1(-end) for end in (mean - half, mean, mean + half))
    return Verdict(gain=middle, interval=(low, high), p=min(1.0, p * ALPHA / level), seeds=n,
                   could_see=visible(n, sd, level), level=level)


def judge(losses: Callable[[int], tuple[Losses, Losses]], n: int, looks: int,
          comparisons: int = 1) -> Verdict:
    """Looks until a difference is seen or all n seeds are. `losses(seeds)`: of both arms."""
    for number, level in enumerate(levels(looks, comparisons), 1):
        found = look(*losses(max(LEAST, math.ceil(n * number / looks))), level)
        if found.p <= ALPHA:
            break
    return found
