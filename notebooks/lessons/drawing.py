"""Parts of a plotly spec that only lessons draw, beside those of `lpkit.ui.draw`: `bars`, `columns`
and `heat` are traces, `box` is drawn over them."""

from collections.abc import Iterable
from typing import Any

from lpkit.ui.draw import hovering

# an axis of names, the first on top
NAMES = {"autorange": "reversed", "ticks": "", "showgrid": False}
POWERS = {"type": "log", "dtick": 1, "exponentformat": "power"}         # an axis of powers of ten
BYTES = {"exponentformat": "SI", "ticksuffix": "B"}


def bars(names: Iterable[str], sizes: Iterable[float | None], name: str = "", colour: Any = None, *,
         hover: str, **more: Any) -> dict:
    """Horizontal bars, one a name, each with its `text` at its end."""
    return {"type": "bar", "orientation": "h", "y": list(names), "x": list(sizes), "name": name,
            "marker": {"color": colour}, "textposition": "outside", "cliponaxis": False,
            **hovering(hover, name), **more}


def columns(x: Iterable, y: Iterable, name: str, colour: str, *, hover: str = "",
            **more: Any) -> dict:
    """Upright bars over numbers."""
    return {"type": "bar", "x": list(x), "y": list(y), "name": name, "marker": {"color": colour},
            **hovering(hover, name), **more}


def heat(x: list, y: list, z: list, *, ends: tuple[float, float], bar: dict, **more: Any) -> dict:
    """Cells in colour, light: high; None is a gap. `ends` of the colours: fixed, so that a colour
    means one value in every map, and a small difference looks small. `bar`: of the colours."""
    return {"type": "heatmap", "x": x, "y": y, "z": z, "zmin": ends[0], "zmax": ends[1],
            "colorscale": "Cividis", "xgap": 1, "ygap": 1, "hoverongaps": False,
            "colorbar": {"thickness": 10, "len": 1, "ypad": 0, "tickfont": {"size": 11}, **bar},
            **more}


def box(x0: float, x1: float, y0: float, y1: float, *, fill: str | None = None,
        edge: str | None = None, width: float = 0, **more: Any) -> dict:
    return {"type": "rect", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "fillcolor": fill,
            "line": {"color": edge, "width": width}, **more}
