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
POWERS = {"type": "log", "dtick": 1, "exponentformat": "power"}         # an axis of powers of ten
BYTES = {"exponentformat": "SI", "ticksuffix": "B"}
SECONDS = {"meta": "seconds"}       # marks a trace whose values are measured seconds
PALE = 0.35
GROUND = "rgba(255,255,255,0.8)"


def figure(data: Iterable[dict], title: str, *, others: float = 0.0, **layout: Any) -> dict:
    """Return a figure. `others`: the share of the cores that other processes used while seconds
    were measured. If it is large enough to disturb them, the traces with SECONDS are pale, and the
    line below the title gives the reason."""
    heading, data = {"text": escape(title, quote=False)}, list(data)
    if doubt := disturbance(others):
        heading["subtitle"] = {"text": f"pale: {doubt}", "font": {"size": 12, "color": FAINT}}
        data = [{**trace, "opacity": PALE} if trace.get("meta") == SECONDS["meta"] else trace
                for trace in data]
    return {"data": data, "layout": {"title": heading, **layout}}


def axis(title: str, **more: Any) -> dict:
    """Return an axis. For ticks between powers of ten ("D1", "D2"), plotly writes bare digits
    (5, 100, 2); the format set here writes whole numbers (50, 100, 200)."""
    whole = {}
    if str(more.get("dtick")).startswith("D"):
        whole = {"tickformat": "~s" if more.get("exponentformat") == "SI" else ",~r"}
    return {"title": {"text": title}, **whole, **more}


def scatter(x: Iterable, y: Iterable, name: str = "", colour: str | None = None, *,
            mode: str = "lines", hover: str | None = "", line: dict | None = None,
            marker: dict | None = None, **more: Any) -> dict:
    """Return lines, markers or both. `hover`: plotly's template of the text at a point; None: no
    text."""
    paint = {"color": colour} if colour else {}
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), "name": name,
            "line": paint | (line or {}), "marker": paint | (marker or {}),
            **_hover(hover, name), **more}


def bars(names: Iterable[str], sizes: Iterable[float | None], name: str = "", colour: Any = None, *,
         hover: str, **more: Any) -> dict:
    """Return horizontal bars, one per name, each with its `text` at its end."""
    return {"type": "bar", "orientation": "h", "y": list(names), "x": list(sizes), "name": name,
            "marker": {"color": colour}, "textposition": "outside", "cliponaxis": False,
            **_hover(hover, name), **more}


def columns(x: Iterable, y: Iterable, name: str, colour: str, *, hover: str = "",
            **more: Any) -> dict:
    """Return vertical bars over numbers."""
    return {"type": "bar", "x": list(x), "y": list(y), "name": name, "marker": {"color": colour},
            **_hover(hover, name), **more}


def heat(x: list, y: list, z: list, *, ends: tuple[float, float], bar: dict, **more: Any) -> dict:
    """Return coloured cells; lighter is higher, None is a gap. `ends`: the range of the colours,
    fixed so that a colour means the same value in every map and a small difference looks small.
    `bar`: settings of the colour bar."""
    return {"type": "heatmap", "x": x, "y": y, "z": z, "zmin": ends[0], "zmax": ends[1],
            "colorscale": "Cividis", "xgap": 1, "ygap": 1, "hoverongaps": False,
            "colorbar": {"thickness": 10, "len": 1, "ypad": 0, "tickfont": {"size": 11}, **bar},
            **more}


def _hover(words: str | None, name: str) -> dict:
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
    return {"type": "rect", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "fillcolor": fill,
            "line": {"color": edge, "width": width}, **more}


def note(text: str, x: float, y: float, at: str = "left bottom", **more: Any) -> dict:
    """Return text whose corner `at` is at (x, y). A pale background hides the grid lines behind it;
    text in the middle of a cell or a box has the cell's colour as background."""
    across, down = at.split()
    ground = {} if at == "center middle" else {"bgcolor": GROUND}
    return {"text": text, "x": x, "y": y, "xanchor": across, "yanchor": down, "showarrow": False,
            **ground, **more}
