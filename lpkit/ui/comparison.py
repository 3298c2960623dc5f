"""Guess, formula and measurement, side by side: the picture of every `## Reconcile`."""

from collections.abc import Sequence
from html import escape

from lpkit.config import ConfigError
from lpkit.ui.style import COLOURS, quantity

Row = tuple[str, float | None, float | None, float | None, str]   # (name, guess, formula, measured, unit)
KINDS = (("your guess", COLOURS[1]), ("formula", COLOURS[0]), ("measured", COLOURS[4]))


def comparison_figure(rows: Sequence[Row], *, title: str = "") -> dict:
    """The plotly spec of grouped horizontal bars, first row on top; None leaves a bar out.

    Rows of one unit share an axis in that unit. Rows of several units are shown in multiples of what was measured (of
    the formula where nothing was); the number beside a bar is always the value itself.
    """
    if not rows:
        raise ConfigError("a comparison needs at least one row (name, guess, formula, measured, unit)")
    units = {row[4] for row in rows}
    shared = next(iter(units)) if len(units) == 1 else None
    labels = [escape(row[0]) for row in rows]
    data = []
    for i, (kind, colour) in enumerate(KINDS, start=1):
        if all(row[i] is None for row in rows):
            continue
        data.append({
            "type": "bar", "orientation": "h", "name": kind, "y": labels, "marker": {"color": colour},
            "x": [None if row[i] is None else row[i] if shared is not None else row[i] / _base(row) for row in rows],
            "text": ["" if row[i] is None else quantity(row[i], row[4]) for row in rows],
            "textposition": "outside", "cliponaxis": False, "hovertemplate": "%{y}: %{text}<extra>" + kind + "</extra>",
        })
    largest = max((x for trace in data for x in trace["x"] if x is not None), default=1)
    if shared is not None:
        axis = {"title": {"text": shared}, "exponentformat": "SI"}
        shapes = []
    else:
        axis = {"title": {"text": "multiple of what was measured"}}
        shapes = [{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "layer": "below",
                   "line": {"color": "#6b7280", "width": 1, "dash": "dot"}}]
    return {"data": data, "layout": {
        "title": {"text": escape(title)}, "height": 130 + len(rows) * (18 + 24 * len(data)), "shapes": shapes,
        "xaxis": {**axis, "range": [0, largest * 1.18]},   # room for the number beside the longest bar
        "yaxis": {"autorange": "reversed", "ticks": "", "showgrid": False}, "bargap": 0.28, "bargroupgap": 0.08}}


def _base(row: Row) -> float:
    base = row[3] if row[3] is not None else row[2]
    if not base:
        raise ConfigError(f"{row[0]!r} has neither a measurement nor a formula to compare with; "
                          f"give every row the same unit")
    return base
