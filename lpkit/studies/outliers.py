"""One outlier in a Gaussian tensor: what every other element pays for it, by recipe. Expected by
formula, and measured.

    x = gaussian(1000.0)                        # standard deviation 1, one element at 1000
    measured_db(x, cast)                        # of the others
    expected_db(cast, x.shape, outlier=1000.0)

A scale serves a block. In the block that holds the outlier every element is cast as if the tensor
were that large; in all others the largest of n Gaussian numbers sets the scale. So the damage is
(share of the tensor in the outlier's block) x (noise at that crest factor): the smaller the block,
the less is hit. The noise of rounding is spacing^2 / 12 in each binade (Bennett 1948,
https://doi.org/10.1002/j.1538-7305.1948.tb01340.x), and x^2 where x becomes zero.
"""

from __future__ import annotations

import math
from statistics import NormalDist, fmean
from typing import Any

import torch
from torch import Tensor

from lpkit.kernels.scales import MAKE_SCALES
from lpkit.precision.error import sqnr_db
from lpkit.precision.scaled import quantise
from lpkit.studies import linear_operands
from lpkit.techniques.formats import Format, format_of
from lpkit.techniques.recipes import RECIPES, SCALES, Cast

SHAPE = (256, 512)
SHOWN = (32, 128)       # of a picture
COARSE = 0.1            # relative error beyond which an element counts as coarse
GAUSS = NormalDist()
QUANTILES = 40          # of a block's largest magnitude
KINDS = ("fine", "coarse", "flushed to zero", "the outlier")
NAMES = ("fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4", "nvfp4-published",
         "int8")


def casts() -> dict[str, Cast]:
    """How each recipe casts activations."""
    return {name: RECIPES[name].y[0] for name in NAMES}


def gaussian(outlier: float, *, shape: tuple[int, int] = SHAPE, at: tuple[int, int] = (3, 40),
             seed: int = 0) -> Tensor:
    """N(0, 1), but `outlier` at one place. float32."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[at] = outlier
    return x


def measured_db(x: Tensor, cast: Cast, *, at: tuple[int, int] = (3, 40)) -> float | None:
    """Signal over noise of every element but the one at `at`."""
    others = torch.ones_like(x, dtype=torch.bool)
    others[at] = False
    return sqnr_db(x[others], quantise(x, cast).dequantise()[others])


def hit_share(cast: Cast, shape: tuple[int, int]) -> float:
    """Of the tensor, what shares a scale with one element."""
    high, wide = (size or whole for size, whole in zip(cast.block, shape))
    return high * wide / math.prod(shape)


def expected_db(cast: Cast, shape: tuple[int, int], *, outlier: float) -> float:
    """Of the other elements of a Gaussian of standard deviation 1 with one element of that size."""
    fmt, share = format_of(cast.format), hit_share(cast, shape)
    count = max(2, round(share * math.prod(shape)))
    # the largest of `count` Gaussian numbers, at evenly spaced probabilities
    shares = [(u + 0.5) / QUANTILES for u in range(QUANTILES)]
    largest = [GAUSS.inv_cdf((1 + u ** (1 / count)) / 2) for u in shares]
    reach = _reach(fmt, cast, largest, outlier)
    others = fmean(_noise(fmt, cast, top) + _clipped(min(top, amax), amax, count)
                   for amax, top in zip(largest, reach))
    return -10 * math.log10(share * _noise(fmt, cast, outlier) + (1 - share) * others)


def _reach(fmt: Format, cast: Cast, largest: list[float], outlier: float) -> list[float]:
    """The magnitude that a block's scale makes room for. One of two levels is a number of E4M3,
    in shares of the largest of the tensor, and 0 where nothing of the block is left."""
    if SCALES[cast.scale].levels == 1:
        return largest
    scale, tensor = MAKE_SCALES[cast.scale](torch.tensor([*largest, outlier]), fmt)
    return (scale[:-1] * tensor * fmt.largest).tolist()


def _clipped(at: float, amax: float, count: int) -> float:
    """Energy that an element of `count` loses where magnitudes are cut `at` a limit: one is `amax`,
    the others are Gaussian below it."""
    (p, d), (q, e) = ((GAUSS.cdf(x), GAUSS.pdf(x)) for x in (amax, at))
    others = 2 * ((1 + at**2) * (p - q) - at * e - (amax - 2 * at) * d) / (2 * p - 1)
    return ((amax - at) ** 2 + (count - 1) * others) / count


def _noise(fmt: Format, cast: Cast, amax: float) -> float:
    """Energy of the error of an element of energy 1, when `amax` decides the scale.

    A power of two leaves between none and half of the range unused: eight cases in between.
    """
    if not amax:
        return 0.0      # nothing is rounded: it is all lost
    spare = [2 ** ((i + 0.5) / 8) for i in range(8)] if "power-of-two" in cast.scale else [1.0]
    sigmas = [fmt.largest / (amax * unused) for unused in spare]
    return fmean(rounding_noise(fmt, sigma) / sigma**2 for sigma in sigmas)


def rounding_noise(fmt: Format, sigma: float) -> float:
    """E[(x - rounded x)^2] for x of N(0, sigma), sigma small against the largest value."""
    t = fmt.smallest / 2 / sigma
    zeroed = math.erf(t / math.sqrt(2))
    energy = sigma**2 * (zeroed - t * math.sqrt(2 / math.pi) * math.exp(-t * t / 2))
    return energy + linear_operands.rounding_noise(fmt, sigma, zeroed)


def look(recipe: str, outlier: float, row: int, column: int, seed: int = 0) -> dict[str, Any]:
    """For `lpkit.ui.outlier_map`: of a small tensor, what becomes of each element. Kinds by their
    place in KINDS."""
    cast, x = casts()[recipe], gaussian(outlier, shape=SHOWN, at=(row, column), seed=seed)
    y = quantise(x, cast).dequantise()
    kinds = ((y - x).abs() > COARSE * x.abs()).int()
    kinds[y == 0] = 2
    kinds[row, column] = 3
    return {"kinds": kinds.tolist(), "names": KINDS, "values": x.tolist(), "becomes": y.tolist(),
            "recipe": recipe, "sqnr_db": measured_db(x, cast, at=(row, column)),
            "block": cast.block}
