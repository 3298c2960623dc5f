"""Functions that build the plotly specs of the lessons' figures, as plain dicts.

`figure` puts traces into a layout; `scatter`, `bars`, `columns` and `heat` return traces; `rule`,
`box` and `note` are drawn over them. Other keyword arguments are passed to plotly unchanged:
https://plotly.com/javascript/reference/
"""

from collections.abc import Iterable
from html import escape
from typing import Any

from lpkit.predict.compare import disturbance
from lpkit.tables import FAINT

# an axis of names, with the first name on top
NAMES = {"autorange": "reversed", "ticks": "", "showgrid": False}
POWERS = {"type": "log", "dtick": 1, "exponentformat": "power"}     # a log axis, ticks at 10^n
BYTES = {"exponentformat": "SI", "ticksuffix": "B"}
SECONDS = {"meta": "seconds"}       # marks a trace whose values are measured seconds
PALE = 0.35                         # opacity of traces that other processes disturbed
GROUND = "rgba(255,255,255,0.8)"    # background of notes


def figure(data: Iterable[dict], title: str, *, others: float = 0.0, **layout: Any) -> dict:
    """Return the plotly spec {"data", "layout"} of traces `data` under `title`.

    others: the share of the cores that other processes used while seconds were measured. If the
        share is large enough to disturb the seconds (`lpkit.predict.compare.disturbance`), the
        traces marked with SECONDS are pale, and a line below the title gives the reason.
    layout: further plotly settings of the layout, for example `xaxis` and `height`."""
    heading, data = {"text": escape(title, quote=False)}, list(data)
    if doubt := disturbance(others):
        heading["subtitle"] = {"text": f"pale: {doubt}", "font": {"size": 12, "color": FAINT}}
        data = [{**trace, "opacity": PALE} if trace.get("meta") == SECONDS["meta"] else trace
                for trace in data]
    return {"data": data, "layout": {"title": heading, **layout}}


def axis(title: str, **more: Any) -> dict:
    """Return the settings of an axis with this title.

    If a log axis also has ticks between powers of ten (`dtick` "D1" or "D2"), plotly labels those
    ticks with a single digit: 5, 100, 2. The `tickformat` set here labels them with the whole
    number: 50, 100, 200."""
    whole = {}
    if str(more.get("dtick")).startswith("D"):
        whole = {"tickformat": "~s" if more.get("exponentformat") == "SI" else ",~r"}
    return {"title": {"text": title}, **whole, **more}


def scatter(x: Iterable, y: Iterable, name: str = "", colour: str | None = None, *,
            mode: str = "lines", hover: str | None = "", line: dict | None = None,
            marker: dict | None = None, **more: Any) -> dict:
    """Return a scatter trace: lines, markers or both (plotly's `mode`), in one `colour`.

    hover: plotly's template of the text that is shown at a point, for example "%{y:.2f}"; "":
        plotly's own text; None: no text. The trace's name is added to the text.
    line, marker: further settings, which replace `colour`."""
    paint = {"color": colour} if colour else {}
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "name": name,
            "line": paint | (line or {}), "marker": paint | (marker or {}),
            **_hover(hover, name), **more}


def bars(names: Iterable[str], sizes: Iterable[float | None], name: str = "", colour: Any = None, *,
         hover: str, **more: Any) -> dict:
    """Return a trace of horizontal bars, one per name; None in `sizes` leaves a gap. `hover` is as
    in `scatter`. A `text` in `more` is written at the end of each bar."""
    return {"type": "bar", "orientation": "h", "y": list(names), "x": list(sizes), "name": name,
            "marker": {"color": colour}, "textposition": "outside", "cliponaxis": False,
            **_hover(hover, name), **more}


def columns(x: Iterable, y: Iterable, name: str, colour: str, *, hover: str = "",
            **more: Any) -> dict:
    """Return a trace of vertical bars of height `y` at the numbers `x`. `hover` is as in
    `scatter`."""
    return {"type": "bar", "x": list(x), "y": list(y), "name": name, "marker": {"color": colour},
            **_hover(hover, name), **more}


def heat(x: list, y: list, z: list, *, ends: tuple[float, float], bar: dict, **more: Any) -> dict:
    """Return a heat map of `z`, one list per row `y` with one value per column `x`. Lighter colours
    are higher values; None is a gap.

    ends: lowest and highest value of the colour scale. They are fixed, not taken from `z`, so that
        a colour means the same value in every map and a small difference looks small.
    bar: settings of the colour bar."""
    return {"type": "heatmap", "x": x, "y": y, "z": z, "zmin": ends[0], "zmax": ends[1],
            "colorscale": "Cividis", "xgap": 1, "ygap": 1, "hoverongaps": False,
            "colorbar": {"thickness": 10, "len": 1, "ypad": 0, "tickfont": {"size": 11}, **bar},
            **more}


def _hover(words: str | None, name: str) -> dict:
    """Return the keys of a trace for its hover text (see `scatter`). Plotly shows the text inside
    <extra> in a box of its own next to the hover text."""
    if words is None:
        return {"hoverinfo": "skip"}
    extra = "" if "<extra>" in words else f"<extra>{name}</extra>"
    return {"hovertemplate": words + extra} if words else {}


def rule(*, x: float | None = None, y: float | None = None, colour: str = FAINT, width: float = 1,
         dash: str = "dot", **more: Any) -> dict:
    """Return a straight line across the whole plot, at `x` or at `y`."""
    ends = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    if y is not None:
        ends = {"y0": y, "y1": y, "xref": "paper", "x0": 0, "x1": 1}
    return {"type": "line", **ends, "line": {"color": colour, "width": width, "dash": dash}, **more}


def box(x0: float, x1: float, y0: float, y1: float, *, fill: str | None = None,
        edge: str | None = None, width: float = 0, **more: Any) -> dict:
    """Return a rectangle with corners (x0, y0) and (x1, y1), filled with the colour `fill` and
    outlined in the colour `edge`, `width` pixels wide."""
    return {"type": "rect", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "fillcolor": fill,
            "line": {"color": edge, "width": width}, **more}


def note(text: str, x: float, y: float, at: str = "left bottom", **more: Any) -> dict:
    """Return an annotation: `text` at (x, y) without an arrow.

    at: the point of the text that is at (x, y), as plotly's xanchor and yanchor: "left bottom",
        "center middle", "right top", ...

    A pale background hides the grid lines behind the text. "center middle" has no background,
    because such a text is inside a coloured cell or box."""
    across, down = at.split()
    ground = {} if at == "center middle" else {"bgcolor": GROUND}
    return {"text": text, "x": x, "y": y, "xanchor": across, "yanchor": down, "showarrow": False,
            **ground, **more}
