"""Guess, formula and measurement, side by side: the picture of every `## Reconcile`."""

from collections.abc import Iterable
from html import escape

from lpkit.config import ConfigError
from lpkit.predict.compare import Row
from lpkit.predict.units import quantity
from lpkit.tables import FAINT
from lpkit.ui.style import COLOURS

KINDS = (("your guess", "guess", COLOURS[1]), ("formula", "formula", COLOURS[0]), ("measured", "measured", COLOURS[4]))


def comparison_figure(rows: Iterable[Row], *, title: str = "") -> dict:
    """The plotly spec of grouped horizontal bars for a `Comparison` or its rows, the first on top; None has no bar.

    Rows of one unit share an axis in that unit. Rows of several units are shown in multiples of what was measured (of
    the formula where nothing was); the number beside a bar is always the value itself.
    """
    rows = list(rows)
    if not rows:
        raise ConfigError("a comparison needs at least one row to show")
    units = {row.unit for row in rows}
    bases = [1.0] * len(rows) if len(units) == 1 else [_base(row) for row in rows]
    data = []
    for kind, field, colour in KINDS:
        values = [getattr(row, field) for row in rows]
        if all(value is None for value in values):
            continue
        data.append({
            "type": "bar", "orientation": "h", "name": kind, "y": [escape(row.name) for row in rows],
            "x": [None if value is None else value / base for value, base in zip(values, bases)],
            "text": ["" if value is None else quantity(value, row.unit) for value, row in zip(values, rows)],
            "marker": {"color": colour}, "textposition": "outside", "cliponaxis": False,
            "hovertemplate": "%{y}: %{text}<extra>" + kind + "</extra>",
        })
    largest = max((x for trace in data for x in trace["x"] if x is not None), default=1)
    axis = {"title": {"text": "multiple of what was measured"}, "range": [0, largest * 1.18]}   # room for the number
    one = {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "layer": "below",
           "line": {"color": FAINT, "width": 1, "dash": "dot"}}
    if len(units) == 1:
        axis |= {"title": {"text": units.pop()}, "exponentformat": "SI"}
    return {"data": data, "layout": {
        "title": {"text": escape(title)}, "height": 130 + len(rows) * (18 + 24 * len(data)), "xaxis": axis,
        "yaxis": {"autorange": "reversed", "ticks": "", "showgrid": False}, "shapes": [one] if units else [],
        "bargap": 0.28, "bargroupgap": 0.08}}


def _base(row: Row) -> float:
    base = row.formula if row.measured is None else row.measured
    if not base:
        raise ConfigError(f"{row.name!r} compares with {base}, so it has no multiple; give every row the same unit")
    return base
