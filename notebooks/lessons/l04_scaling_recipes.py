"""Lesson 04, scaling recipes: its study, its figures and its exercises.

How much precision does one outlier in a Gaussian tensor cost all other elements? The answer depends
on the recipe; it is predicted by formula and measured.

    x = gaussian(1000.0)                        # standard deviation 1, one element is 1000
    measured_db(x, cast)                        # SQNR of the other elements
    expected_db(cast, x.shape, outlier=1000.0)

Each block of the tensor has a scale. In the outlier's block, the outlier sets the scale; in every
other block of n elements, the largest of n Gaussian numbers sets it. So the damage is the share of
the tensor in the outlier's block, times the noise at that block's crest factor: smaller blocks
confine the damage. The mean square of the rounding errors is spacing^2 / 12 in each binade (Bennett
1948, https://doi.org/10.1002/j.1538-7305.1948.tb01340.x), and x^2 for an x that becomes zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from statistics import NormalDist, fmean
from typing import Any

import torch
from torch import Tensor

from lessons import l03_number_formats as linear_operands
from lessons.draws import LARGEST, normal
from lessons.figures.colours import lines_of
from lessons.figures.drawing import POWERS, axis, box, figure, scatter
from lessons.figures.style import COLOURS
from lessons.judging.judge import Exercise, adding_to
from lessons.l03_number_formats import sqnr_db
from lpkit.kernels.scales import MAKE_SCALES
from lpkit.precision.scaled import product, quantise
from lpkit.tables import INK
from lpkit.techniques.formats import Format, format_of
from lpkit.techniques.recipes import RECIPES, SCALES, Cast
from lpkit.training.training import Training

# notebook 04 imports these from here
__all__ = ["Training", "product"]

# ---- The study

SHAPE = (256, 512)
SHOWN = (32, 128)       # shape of the tensor in a picture
COARSE = 0.1            # an element with a larger relative error counts as coarse
GAUSS = NormalDist()
QUANTILES = 40          # number of quantiles of a block's amax over which the formula averages
KINDS = ("fine", "coarse", "flushed to zero", "the outlier")    # fates of an element
NAMES = ("fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4", "nvfp4-published",
         "int8")


def casts() -> dict[str, Cast]:
    """Return each recipe's cast of activations in the forward matmul, by name."""
    return {name: RECIPES[name].y[0] for name in NAMES}


def gaussian(outlier: float, *, shape: tuple[int, int] = SHAPE, at: tuple[int, int] = (3, 40),
             seed: int = 0) -> Tensor:
    """Return a float32 tensor of numbers from N(0, 1), with `outlier` at (row, column) = `at`."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[at] = outlier
    return x


def measured_db(x: Tensor, cast: Cast, *, at: tuple[int, int] = (3, 40)) -> float | None:
    """Return the SQNR in dB, after the cast, of all elements of x except the outlier at `at`."""
    others = torch.ones_like(x, dtype=torch.bool)
    others[at] = False
    return sqnr_db(x[others], quantise(x, cast).dequantise()[others])


def hit_share(cast: Cast, shape: tuple[int, int]) -> float:
    """Return the share of a tensor's elements that are in one block, and so share its scale."""
    high, wide = (size or whole for size, whole in zip(cast.block, shape))
    return high * wide / math.prod(shape)


def expected_db(cast: Cast, shape: tuple[int, int], *, outlier: float) -> float:
    """Return the expected SQNR in dB of the other elements of a tensor of N(0, 1) with one outlier
    of this size."""
    fmt, share = format_of(cast.format), hit_share(cast, shape)
    count = max(2, round(share * math.prod(shape)))
    # quantiles of the largest of `count` Gaussian numbers, at evenly spaced probabilities
    shares = [(u + 0.5) / QUANTILES for u in range(QUANTILES)]
    largest = [GAUSS.inv_cdf((1 + u ** (1 / count)) / 2) for u in shares]
    reach = _reach(fmt, cast, largest, outlier)
    others = fmean(_noise(fmt, cast, top) + _clipped(min(top, amax), amax, count)
                   for amax, top in zip(largest, reach))
    return -10 * math.log10(share * _noise(fmt, cast, outlier) + (1 - share) * others)


def _reach(fmt: Format, cast: Cast, largest: list[float], outlier: float) -> list[float]:
    """Return, for each amax of a block in `largest`, the largest magnitude that the block's scale
    can represent. With one level of scales, this is the amax. With two levels, the block's scale is
    rounded to E4M3 in units of the tensor's scale, which `outlier` sets; 0 if it underflows."""
    if SCALES[cast.scale].levels == 1:
        return largest
    scale, tensor = MAKE_SCALES[cast.scale](torch.tensor([*largest, outlier]), fmt)
    return (scale[:-1] * tensor * fmt.largest).tolist()


def _clipped(at: float, amax: float, count: int) -> float:
    """Return the mean square of the errors of `count` elements whose magnitudes are clipped at
    `at`. One element has the magnitude `amax`; the others are Gaussian with smaller magnitudes."""
    (p, d), (q, e) = ((GAUSS.cdf(x), GAUSS.pdf(x)) for x in (amax, at))
    others = 2 * ((1 + at**2) * (p - q) - at * e - (amax - 2 * at) * d) / (2 * p - 1)
    return ((amax - at) ** 2 + (count - 1) * others) / count


def _noise(fmt: Format, cast: Cast, amax: float) -> float:
    """Return the mean square of the errors of elements from N(0, 1) in a block whose scale `amax`
    sets; 0 for amax = 0.

    A scale that is a power of two leaves up to half of the format's range unused. The unused part
    depends on `amax`; the result is the mean over eight cases.
    """
    if not amax:
        return 0.0      # no element is rounded; `_clipped` counts all of them as lost
    spare = [2 ** ((i + 0.5) / 8) for i in range(8)] if "power-of-two" in cast.scale else [1.0]
    sigmas = [fmt.largest / (amax * unused) for unused in spare]
    return fmean(rounding_noise(fmt, sigma) / sigma**2 for sigma in sigmas)


def rounding_noise(fmt: Format, sigma: float) -> float:
    """Return E[(x - rounded x)^2] for x from N(0, sigma), if sigma is far below the format's
    largest value. Elements that become zero are included."""
    t = fmt.smallest / 2 / sigma
    zeroed = math.erf(t / math.sqrt(2))
    energy = sigma**2 * (zeroed - t * math.sqrt(2 / math.pi) * math.exp(-t * t / 2))
    return energy + linear_operands.rounding_noise(fmt, sigma, zeroed)


def look(recipe: str, outlier: float, row: int, column: int, seed: int = 0) -> dict[str, Any]:
    """Cast a small Gaussian tensor with an outlier at (row, column), and return the arguments of
    `outlier_map`. "kinds" has an index into KINDS for each element."""
    cast, x = casts()[recipe], gaussian(outlier, shape=SHOWN, at=(row, column), seed=seed)
    y = quantise(x, cast).dequantise()
    kinds = ((y - x).abs() > COARSE * x.abs()).int()
    kinds[y == 0] = 2
    kinds[row, column] = 3
    return {"kinds": kinds.tolist(), "names": KINDS, "values": x.tolist(), "becomes": y.tolist(),
            "recipe": recipe, "sqnr_db": measured_db(x, cast, at=(row, column)),
            "block": cast.block}


# ---- Figures

FATE_COLOURS = ("#e8eef5", COLOURS[1], COLOURS[2], INK)


# Recipes around an outlier.

def outlier_map(*, kinds: Sequence[Sequence[int]], names: Sequence[str],
                values: Sequence[Sequence[float]], becomes: Sequence[Sequence[float]], recipe: str,
                sqnr_db: float, block: tuple[int, int]) -> dict:
    """Return the plotly spec of a small tensor: each element has the colour of its fate; a frame
    marks the block of the outlier. The arguments come from `look`.

    kinds: for each element an index into `names`, of which the last is the outlier
    values, becomes: each element before and after the cast
    block: rows and columns of a block; 0: all
    """
    everything = [kind for line in kinds for kind in line]
    row, column = divmod(everything.index(len(names) - 1), len(kinds[0]))
    high, wide = block[0] or len(kinds), block[1] or len(kinds[0])
    top, left = row // high * high - 0.5, column // wide * wide - 0.5
    scale = []
    for i, colour in enumerate(FATE_COLOURS):
        scale += [[i / len(names), colour], [(i + 1) / len(names), colour]]
    words = [[f"{x:.4g} becomes {y:.4g}" for x, y in zip(*lines)] for lines in zip(values, becomes)]
    cells = {
        "type": "heatmap", "z": kinds, "zmin": -0.5, "zmax": len(names) - 0.5, "colorscale": scale,
        "text": words, "xgap": 0.4, "ygap": 0.4,
        "hovertemplate": "row %{y}, column %{x}: %{text}<extra></extra>",
        "colorbar": {"tickvals": list(range(len(names))), "ticktext": list(names), "ticks": "",
                     "len": 0.9, "thickness": 14}}
    flushed = everything.count(2) / len(everything)
    return figure(
        [cells], f"{recipe}: {sqnr_db:.1f} dB for the other elements, {flushed:.0%} of them "
        f"flushed to zero", height=330, yaxis=axis("row", autorange="reversed", showgrid=False),
        xaxis=axis("column (the contracted axis)", showgrid=False, constrain="domain"),
        shapes=[box(left, left + wide, top, top + high, edge=INK, width=2)])


def outlier_figure(axis_values: Sequence[float], formula: Mapping[str, Sequence[float]],
                   sizes: Sequence[float], measured: Mapping[str, Sequence[float]], *,
                   title: str = "") -> dict:
    """Return the plotly spec of the SQNR of the other elements over the size of the outlier: for
    each recipe, a line by formula, at `axis_values`, and points as measured, at `sizes`."""
    data = []
    for i, (name, line) in enumerate(lines_of(formula).items()):
        shared = {"name": name, "colour": line["color"], "line": line, "legendgroup": name}
        data += [scatter(axis_values, formula[name], hover="%{y:.1f} dB by formula", **shared),
                 scatter(sizes, measured[name], hover="%{y:.1f} dB measured", mode="markers",
                         marker={"symbol": i}, showlegend=False, **shared)]
    return figure(data, title, height=440,
                  xaxis=axis("outlier (standard deviations of the other elements)", **POWERS),
                  yaxis=axis("SQNR of the other elements (dB)", rangemode="tozero"))


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: elements that share a scale, the cost of an outlier for integers, the source of a
# delayed scale.

@exercise("04.shared_by", (256, 512, 1, 32), (256, 512, 0, 0), (256, 512, 1, 0),
          (256, 512, 128, 128),
          draw=lambda r: (r.choice((256, 4096)), r.choice((512, 1024)), r.choice((0, 1, 16, 128)),
                          r.choice((0, 1, 32, 128))),
          mistakes={"a side of 0 spans the whole axis":
                        lambda rows, columns, high, wide: high * wide})
def shared_by(rows: int, columns: int, block_rows: int, block_columns: int) -> int:
    return (block_rows or rows) * (block_columns or columns)


# 52.9 dB minus the crest is accepted too, since notebook 03 rounds to that
@exercise("04.int8_db", (4.5,), (12.0,), draw=lambda r: (r.uniform(1.1, 12),), tolerance=0.0012,
          mistakes={"the noise is a twelfth of the spacing's square":
                        lambda crest: 20 * math.log10(127 / crest)})
def int8_db(crest: float) -> float:
    return 10 * math.log10(12 * (127 / crest) ** 2)


@exercise("04.delayed_scale", ([4.48], 0, 448.0), ([1.0, 8.0, 2.0], 0, 448.0),
          ([1.0, 2.0, 9.0], 1, 57344.0),
          draw=lambda r: ([10 ** r.uniform(-3, 3) for _ in range(r.randint(1, 16))], r.randrange(4),
                          r.choice((448.0, 57344.0))),
          mistakes={"the largest of the history, not the newest":
                        lambda history, margin, largest: history[0] * 2**margin / largest,
                    "all of the history counts":
                        lambda history, margin, largest: max(history[:2]) * 2**margin / largest})
def delayed_scale(history: list[float], margin: int, largest: float) -> float:
    return max(history) * 2**margin / largest


# Exercises: the scale of a block, and a delayed scale.

def _column_scales(x: Tensor, block: int) -> Tensor:
    amax = x.unflatten(1, (-1, block)).abs().amax((0, 2)) / LARGEST
    return torch.where(amax > 0, amax, 1.0).expand(len(x), -1)


def _rows(r: Random) -> tuple[Tensor, int]:
    block = r.choice((1, 2, 4))
    x = normal(r, r.randint(1, 4), block * r.randint(1, 4), size=10 ** r.uniform(-3, 3))
    return x * (normal(r, len(x), 1) > -0.7), block


@exercise("04.block_scales", (torch.tensor([[1.0, -448.0, 2.0, 0.0]]), 2),
          (torch.tensor([[0.0, 0.0, 1.0, 1.0]]), 2),
          draw=_rows, minutes=6, stars=2,
          mistakes={"a block of zeros has the scale 1, or its values become NaN":
                        lambda x, block: x.unflatten(1, (-1, block)).abs().amax(-1) / LARGEST,
                    "each row has its own scales": _column_scales,
                    "the largest magnitude, not the largest value": lambda x, block: torch.where(
                        (top := x.unflatten(1, (-1, block)).amax(-1)) > 0, top / LARGEST, 1.0)})
def block_scales(x: Tensor, block: int) -> Tensor:
    amax = x.unflatten(1, (-1, block)).abs().amax(-1)
    return torch.where(amax > 0, amax / 448, 1.0)


@exercise("04.delayed", ([448.0], 2), ([448.0, 896.0, 448.0], 2),
          draw=lambda r: ([10 ** r.uniform(-2, 4) for _ in range(r.randint(1, 12))],
                          r.randint(1, 4)), minutes=8, stars=2,
          mistakes={"the amax of this step is not known before the cast": lambda amaxes, length:
                        [max(amaxes[max(0, i + 1 - length):i + 1]) / LARGEST
                         for i in range(len(amaxes))],
                    "steps older than `length` are forgotten": lambda amaxes, length:
                        [max(amaxes[:i], default=LARGEST) / LARGEST for i in range(len(amaxes))]})
def delayed(amaxes: list[float], length: int) -> list[float]:
    scales = []
    for step in range(len(amaxes)):
        history = amaxes[max(0, step - length):step]
        scales.append(max(history) / 448 if history else 1.0)
    return scales
