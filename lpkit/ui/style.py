"""How every figure and widget of the kit looks, in one place.

The colours differ in lightness as well as in hue, so that they survive a grey printer and the common colour
deficiencies (after Paul Tol's high-contrast scheme); the sequential scale is cividis.
"""

from html import escape

COLOURS = ("#004488", "#ddaa33", "#bb5566", "#a5d8f0", "#2a9d8f", "#222222", "#9a9a9a")
INK, FAINT, GRID, WARNING = "#24292f", "#6b7280", "#e5e7eb", "#a3293d"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"

_AXIS = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": "#9ca3af", "showline": True, "ticks": "outside",
         "ticklen": 4, "tickcolor": "#9ca3af", "ticklabelstandoff": 3, "automargin": True, "title": {"font": {"size": 13}, "standoff": 8}}

TEMPLATE = {
    "layout": {
        "font": {"family": FONT, "size": 13, "color": INK},
        "title": {"font": {"size": 16}, "x": 0, "xref": "container", "xanchor": "left", "pad": {"l": 12, "t": 12},
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
        "uniformtext": {"mode": "hide", "minsize": 11},   # a segment too narrow for its number goes without
        "height": 360,
    },
    "data": {
        "bar": [{"marker": {"line": {"color": "#ffffff", "width": 1}}, "insidetextanchor": "middle", "textangle": 0}],
        "scatter": [{"line": {"width": 2}, "marker": {"size": 7}}],
    },
}


def html_table(header: tuple[str, ...], rows: list[tuple], *, caption: str = "", prose: int | None = None) -> str:
    """A quiet table. Cells are escaped; all columns but the first, and `prose`, one of sentences, are set to the right."""
    fits = "" if prose is None else "white-space:nowrap;"     # what is no sentence stays on its line

    def line(cells, tag, style=""):
        return "<tr>" + "".join(
            f"<{tag} style='padding:3px 12px;text-align:{'left' if i in (0, prose) else 'right'};{'' if i == prose else fits}{style}'>"
            f"{escape(str(cell))}</{tag}>" for i, cell in enumerate(cells)) + "</tr>"

    rule = f"border-bottom:1px solid {GRID};"
    return (f"<table style='border-collapse:collapse;font:13px {escape(FONT)};color:{INK};line-height:1.5;"
            f"font-variant-numeric:tabular-nums'>"
            + (f"<caption style='text-align:left;padding:3px 12px;color:{FAINT}'>{escape(caption)}</caption>" if caption
               else "")
            + line(header, "th", f"{rule}font-weight:600;") + "".join(line(row, "td", rule) for row in rows)
            + "</table>")
