"""The style of all figures and widgets of the kit.

The colours differ in lightness as well as in hue (after Paul Tol's high-contrast scheme). A line in
any of these colours has a contrast of at least 3 to 1 with the background, in the light and in the
dark theme. Heat maps use the colour scale cividis.

Each answer, format and role has one colour in the whole course (`lessons.figures.colours`), and the
range of every colour map is fixed, so that a small difference looks small. `figure.css` turns white
figures dark in a dark theme, in the lab and on the site. On a screen that is narrower than 520
pixels, for example a phone, a figure is scaled to the width and its title wraps. Measured seconds
are drawn pale if other programs used more than a tenth of the cores; a line below the title then
gives the reason.
"""

from lpkit.tables import FONT, GRID, INK

COLOURS = ("#004488", "#ad7a00", "#bb5566", "#2b6c99", "#2ca392", "#222222", "#575757")
# Colours for the series of one legend. Left out: COLOURS[3], which looks like COLOURS[0], and the
# last, which looks like the grey of notes.
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
        # a segment that is too narrow for its number shows no number
        "uniformtext": {"mode": "hide", "minsize": 11},
        "height": 360,
    },
    "data": {
        "bar": [{"marker": {"line": {"color": "#ffffff", "width": 1}}, "insidetextanchor": "middle",
                 "textangle": 0}],
        "scatter": [{"line": {"width": 2}, "marker": {"size": 7}}],
    },
}
