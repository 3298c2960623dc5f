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
    names, units = [escape(row.name) for row in rows], {row.unit for row in rows}
    bases = [1.0 if len(units) == 1 else _base(row) for row in rows]
    data, largest = [], 0.0
    for kind, field, colour in KINDS:
        sizes, words = [], []
        for row, base in zip(rows, bases):
            value = getattr(row, field)
            sizes.append(None if value is None else value / base)
            words.append("" if value is None else quantity(value, row.unit))
        if any(words):
            largest = max(largest, *(size for size in sizes if size is not None))
            data.append(bars(names, sizes, kind, colour, text=words, textposition="outside",
                             cliponaxis=False, hover="%{y}: %{text}"))
    x = axis("multiple of what was measured", range=[0, largest * 1.18])   # room for the number
    if len(units) == 1:
        x |= axis(*units, exponentformat="SI")
    return figure(data, title, height=130 + len(rows) * (18 + 24 * len(data)), xaxis=x,
                  yaxis=NAMES, shapes=[rule(x=1, layer="below")] if len(units) > 1 else [],
                  bargap=0.28, bargroupgap=0.08)


def _base(row: Row) -> float:
    base = row.formula if row.measured is None else row.measured
    if not base:
        raise ConfigError(f"{row.name!r} compares with {base}, so it has no multiple; give every "
                          f"row the same unit")
    return base
