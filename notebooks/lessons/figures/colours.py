"""Each answer, format, recipe and role has one colour in the whole course, and so do the ends of
colour maps. A figure whose legend uses one of these tables uses no other table."""

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
DECIBELS = (0.0, 60.0)      # range of every colour map in dB: from no signal to bf16's best


def _format(name: str) -> str:
    """Returns the format in a run's name: "bf16 weights, stochastic", "float32 master"."""
    return re.split("[ ,:]", name)[0].replace("float", "fp")


def lines_of(names: Iterable[str]) -> dict[str, dict]:
    """Return a line style per name, in the colour of the format or recipe with which the name
    starts, else in the next colour of DISTINCT. Further lines of one colour are dashed."""
    spare, seen, lines = itertools.cycle(DISTINCT), collections.Counter(), {}
    for name in names:
        colour = FORMAT_COLOURS.get(_format(name)) or next(spare)
        lines[name] = {"color": colour, "width": 2, "dash": DASHES[seen[colour] % len(DASHES)]}
        seen[colour] += 1
    return lines
