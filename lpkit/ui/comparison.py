"""Guess, formula and measurement, side by side: the picture of every `## Reconcile`."""

from collections.abc import Iterable
from html import escape

from lpkit.errors import ConfigError
from lpkit.predict.compare import Row
from lpkit.predict.units import quantity
from lpkit.ui.draw import NAMES, axis, bars, figure, rule
from lpkit.ui.style import COLOURS

KINDS = (("your guess", "guess", COLOURS[1]), ("formula", "formula", COLOURS[0]),
         ("measured", "measured", COLOURS[4]))


def comparison_figure(rows: Iterable[Row], *, title: str = "") -> dict:
    """The plotly spec of grouped horizontal bars for a `Comparison` or its rows, the first on top;
    None has no bar.

    Rows of one unit share an axis in that unit. Rows of several units are shown in multiples of
    what was measured (of the formula where nothing was); the number beside a bar is always the
    value itself.
    """
    rows = list(rows)
    if not rows:
        raise ConfigError("a comparison needs at least one row to show")
    units = {row.unit for row in rows}
    bases = [1.0] * len(rows) if len(units) == 1 else [_base(row) for row in rows]
    data = []
    for kind, field, colour in KINDS:
        values = [getattr(row, field) for row in rows]
        if any(value is not None for value in values):
            data.append(bars(
                [escape(row.name) for row in rows],
                [None if value is None else value / base for value, base in zip(values, bases)],
                kind, colour, text=["" if value is None else quantity(value, row.unit)
                                    for value, row in zip(values, rows)], textposition="outside",
                cliponaxis=False, hover="%{y}: %{text}"))
    largest = max((x for trace in data for x in trace["x"] if x is not None), default=1)
    x = axis("multiple of what was measured", range=[0, largest * 1.18])   # room for the number
    if len(units) == 1:
        x |= axis(*units, exponentformat="SI")
    return figure(data, escape(title), height=130 + len(rows) * (18 + 24 * len(data)), x=x, y=NAMES,
                  shapes=[rule(x=1, layer="below")] if len(units) > 1 else [], bargap=0.28,
                  bargroupgap=0.08)


def _base(row: Row) -> float:
    base = row.formula if row.measured is None else row.measured
    if not base:
        raise ConfigError(f"{row.name!r} compares with {base}, so it has no multiple; give every "
                          f"row the same unit")
    return base
