"""How every figure and widget of the kit looks, in one place.

The colours differ in lightness as well as in hue (after Paul Tol's high-contrast scheme), and each
is a line that has a contrast of 3 to 1 or more in the light and in the dark theme. The sequential
scale is cividis.

One colour for each answer, format and role goes through the course (`lessons.figures.colours`), and the
ends of every map of colours are fixed, so that a small difference looks small. `figure.css` turns
figures from white to dark in a dark theme, in the lab and on the site. Where there is less room
than 520 pixels, as on a phone, a figure is scaled to the width, under a title that wraps. Figures
of measured seconds are pale where other programs took more than a tenth of the cores, and say so
below the title.
"""

from lpkit.tables import FONT, GRID, INK

COLOURS = ("#004488", "#ad7a00", "#bb5566", "#2b6c99", "#2ca392", "#222222", "#575757")
# for the series of one legend: the fourth of COLOURS looks like the first, the last like a note
DISTINCT = tuple(COLOURS[i] for i in (0, 1, 2, 4, 5))

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
