"""How every figure and widget of the kit looks, in one place.

The colours differ in lightness as well as in hue, so that they survive a grey printer and the
common colour deficiencies (after Paul Tol's high-contrast scheme); the sequential scale is cividis.
"""

from lpkit.tables import FONT, GRID, INK

COLOURS = ("#004488", "#ddaa33", "#bb5566", "#a5d8f0", "#2a9d8f", "#222222", "#9a9a9a")
WARNING = "#a3293d"

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
