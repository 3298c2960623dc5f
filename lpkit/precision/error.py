"""The signal-to-quantisation-noise ratio says how much a cast has lost: sum x^2 / sum (y - x)^2, in
decibels.

A decibel is a tenth of a power of ten; one more bit of mantissa is a quarter of the noise, 6.02 dB.
Source: Bennett 1948, https://doi.org/10.1002/j.1538-7305.1948.tb01340.x
"""

import math

from torch import Tensor


def decibel(ratio: float) -> float | None:
    """None where there is no logarithm: nothing was lost (infinite), or there was no signal (0,
    NaN)."""
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def sqnr_db(x: Tensor, y: Tensor) -> float | None:
    """Returns the SQNR in dB of y, the cast of x; None: y is exact."""
    ratio = x.double().square().sum() / (y - x).double().square().sum()
    return decibel(ratio.item())
