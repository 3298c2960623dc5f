"""How every figure and widget of the kit looks, in one place.

The colours differ in lightness as well as in hue (after Paul Tol's high-contrast scheme), and each
is a line that has a contrast of 3 to 1 or more in the light and in the dark theme. The sequential
scale is cividis.

One colour for each format, role and answer goes through the course, and the ends of every map of
colours are fixed, so that a small difference looks small. `figure.css` turns figures from white to
dark in a dark theme, in the lab and on the site. Where there is less room than 520 pixels, as on a
phone, a figure keeps its 760 and scrolls under a title that wraps. Figures of measured seconds are
pale where other programs took more than a tenth of the cores, and say so below the title.
"""

import collections
import itertools
import re
from collections.abc import Iterable

from lpkit.tables import FONT, GRID, INK

COLOURS = ("#004488", "#ad7a00", "#bb5566", "#2b6c99", "#2ca392", "#222222", "#575757")
WARNING = "#a3293d"

# The same through the course. A figure whose legend has one of these tables has no other.
ANSWER_COLOURS = {"guess": "#ad7a00", "formula": "#004488", "measured": "#2a9d8f"}
ROLE_COLOURS = {"x": "#bb5566", "w": "#004488", "dy": "#ad7a00"}     # input, weights, gradient of y
FORMAT_COLOURS = {      # and of the recipes that cast to them
    "fp32": "#222222", "bf16": "#6b7280", "fp16": "#12a37f", "int8": "#b88a00",
    "e4m3fn": "#004488", "fp8-tensorwise": "#004488", "fp8-delayed": "#004488",
    "fp8-rowwise": "#4a86cf", "fp8-blockwise": "#4a86cf", "fp8-blockwise-pow2": "#4a86cf",
    "mxfp8": "#a05fb5", "e4m3fnuz": "#004488", "e5m2fnuz": "#3d97e0",
    "e5m2": "#3d97e0", "e2m1": "#b83a10", "nvfp4": "#b83a10", "nvfp4-published": "#b83a10",
    "tf32": "#7d7d7d", "e3m2": "#8c5a2b", "e2m3": "#8c5a2b", "e8m0": "#cc79a7", "int4": "#b88a00",
}
DASHES = ("solid", "dash", "dot", "dashdot")
DECIBELS = (0.0, 60.0)      # of every map in colour: from nothing left to bf16 at its best


def _format(name: str) -> str:
    """Returns the format in a run's name: "bf16 weights, stochastic", "float32 master"."""
    return re.split("[ ,:]", name)[0].replace("float", "fp")


def lines_of(names: Iterable[str]) -> dict[str, dict]:
    """A line for each name: in the colour of the format or recipe that it begins with, others in
    the next of COLOURS. What comes again in one colour is dashed."""
    spare, seen, lines = itertools.cycle(COLOURS), collections.Counter(), {}
    for name in names:
        colour = FORMAT_COLOURS.get(_format(name)) or next(spare)
        lines[name] = {"color": colour, "width": 2, "dash": DASHES[seen[colour] % len(DASHES)]}
        seen[colour] += 1
    return lines


_AXIS = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": "#9ca3af", "showline": True,
         "ticks": "outside", "ticklen": 4, "tickcolor": "#9ca3af", "ticklabelstandoff": 3,
         "automargin": True, "title": {"font": {"size": 13}, "standoff": 8}}

TEMPLATE = {
    "layout": {
        "font": {"family": FONT, "size": 13, "color": INK},
        "title": {"font": {"size": 16}, "x": 0, "xref": "container", "xanchor": "left",
                  "pad": {"l": 12, "t": 12},
                  "y": 1, "yref": "container", "yanchor": "top"},
        "colorway": list(COLOURS),
        "colorscale": {"sequential": "Cividis", "sequentialminus": "Cividis"},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0,
                   "traceorder": "normal"},
        "margin": {"l": 60, "r": 24, "t": 64, "b": 48},
        "hoverlabel": {"font": {"family": FONT, "size": 13}},
        "barmode": "group",
        "bargap": 0.3,
        # a segment too narrow for its number goes without
        "uniformtext": {"mode": "hide", "minsize": 11},
        "height": 360,
    },
    "data": {
        "bar": [{"marker": {"line": {"color": "#ffffff", "width": 1}}, "insidetextanchor": "middle",
                 "textangle": 0}],
        "scatter": [{"line": {"width": 2}, "marker": {"size": 7}}],
    },
}
