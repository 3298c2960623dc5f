"""The colours of answers, formats, recipes and roles, and the range of colour maps in dB. They are
the same in every figure of the course. A legend uses only one of these tables, because a colour can
be in two of them."""

import collections
import itertools
import re
from collections.abc import Iterable

from lessons.figures.style import DISTINCT

WARNING = "#a3293d"
ANSWER_COLOURS = {"guess": "#ad7a00", "formula": "#004488", "measured": "#2a9d8f"}
ROLE_COLOURS = {"x": "#bb5566", "w": "#004488", "dy": "#ad7a00"}     # input, weights, gradient of y
FORMAT_COLOURS = {      # also for recipes that cast to these formats
    "fp32": "#222222", "bf16": "#6b7280", "fp16": "#12a37f", "int8": "#b88a00",
    "e4m3fn": "#004488", "fp8-tensorwise": "#004488", "fp8-delayed": "#004488",
    "fp8-rowwise": "#4a86cf", "fp8-blockwise": "#4a86cf", "fp8-blockwise-pow2": "#4a86cf",
    "mxfp8": "#a05fb5", "e4m3fnuz": "#004488", "e5m2fnuz": "#3d97e0",
    "e5m2": "#3d97e0", "e2m1": "#b83a10", "nvfp4": "#b83a10", "nvfp4-published": "#b83a10",
    "tf32": "#7d7d7d", "e3m2": "#8c5a2b", "e2m3": "#8c5a2b", "e8m0": "#cc79a7", "int4": "#b88a00",
}
SYMBOLS = {"solid": "circle", "dash": "diamond", "dot": "square", "dashdot": "cross"}   # by dash
DASHES = tuple(SYMBOLS)
DECIBELS = (0.0, 60.0)      # range of every colour map in dB; about 60 dB: the SQNR of bf16


def _format(name: str) -> str:
    """Return the format with which the name of a run or recipe begins.

    >>> _format("bf16 weights, stochastic"), _format("float32 master")
    ('bf16', 'fp32')
    """
    return re.split("[ ,:]", name)[0].replace("float", "fp")


def lines_of(names: Iterable[str]) -> dict[str, dict]:
    """Return plotly's style of a line ({"color", "width", "dash"}) for each name.

    The colour is that of the format or recipe with which the name begins; other names get the next
    colour of DISTINCT. The first line of a colour is solid; later lines of that colour have the
    next of DASHES."""
    spare, seen, lines = itertools.cycle(DISTINCT), collections.Counter(), {}
    for name in names:
        colour = FORMAT_COLOURS.get(_format(name)) or next(spare)
        lines[name] = {"color": colour, "width": 2, "dash": DASHES[seen[colour] % len(DASHES)]}
        seen[colour] += 1
    return lines
