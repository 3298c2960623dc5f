"""Guess, formula and measurement, side by side: the picture of every `## Reconcile`. And a
roofline: what a machine's ceilings allow at each arithmetic intensity, and where measured products
lie."""

import math
from collections.abc import Iterable, Mapping
from html import escape

from lpkit.errors import ConfigError
from lpkit.predict.compare import Row
from lpkit.predict.flops import Product
from lpkit.predict.roofline import attainable_flops
from lpkit.predict.units import quantity
from lpkit.techniques.machines import Machine
from lpkit.ui.draw import NAMES, axis, bars, figure, note, rule, scatter
from lpkit.ui.style import COLOURS

COLUMNS = {"your guess": ("guess", COLOURS[1]), "formula": ("formula", COLOURS[0]),
           "measured": ("measured", COLOURS[4])}
PRODUCTS = {    # how names of products end
    "forward": (("",), COLOURS[0], "circle"),
    "input gradient": (("input gradient", "left gradient"), COLOURS[1], "square"),
    "weight gradient": (("weight gradient", "right gradient"), COLOURS[2], "diamond"),
}


def comparison_figure(rows: Iterable[Row], *, title: str = "") -> dict:
    """The plotly spec of grouped horizontal bars for a `Comparison` or its rows, the first on top;
    None has no bar. Rows of one unit share an axis in it. Rows of several are shown in multiples of
    what was measured (of the formula where nothing was), with the value itself beside a bar."""
    rows = list(rows)
    if not rows:
        raise ConfigError("a comparison needs at least one row to show")
    units, shapes = {row.unit for row in rows}, []
    if len(units) == 1:
        bases, x = [1.0] * len(rows), axis(*units, exponentformat="SI")
    else:
        bases, x = list(map(_base, rows)), axis("multiple of what was measured")
        shapes = [rule(x=1, layer="below")]
    data, largest = [], 0.0
    for kind, (field, colour) in COLUMNS.items():
        values = [getattr(row, field) for row in rows]
        sizes = [None if value is None else value / base for value, base in zip(values, bases)]
        words = ["" if value is None else quantity(value, row.unit)
                 for value, row in zip(values, rows)]
        if any(words):
            data.append(bars([escape(row.name) for row in rows], sizes, kind, colour, text=words,
                             hover="%{y}: %{text}"))
            largest = max([largest, *filter(None, sizes)])
    x["range"] = [0, 1.18 * largest]        # room for the number
    return figure(data, title, height=130 + len(rows) * (18 + 24 * len(data)), xaxis=x,
                  yaxis=NAMES, shapes=shapes, bargap=0.28, bargroupgap=0.08)


def _base(row: Row) -> float:
    base = row.formula if row.measured is None else row.measured
    if not base:
        raise ConfigError(f"{row.name!r} compares with {base}, so it has no multiple; give every "
                          f"row the same unit")
    return base


def roofline_figure(machine: Machine, rates: Mapping[Product, float], *, dtype: str, itemsize: int,
                    title: str = "") -> dict:
    """The plotly spec, both axes logarithmic. `rates` are measured FLOP/s; intensities assume that
    each operand moves once. Products of equal shape lie on one another."""
    def roof(intensity: float) -> float:
        return attainable_flops(machine, dtype, intensity)

    def words(p: Product) -> str:
        together = f", {p.group} at once" if p.group > 1 else ""
        share = rates[p] / roof(p.intensity(itemsize))
        return (f"{p.name}: ({p.M}, {p.K}) x ({p.K}, {p.N}){together}<br>"
                f"{quantity(rates[p], 'FLOP/s')}, {share:.0%} of the roof")

    ridge, peak = machine.ridge(dtype), machine.peak_flops(dtype)
    intensities = [p.intensity(itemsize) for p in rates]
    ends = [min(ridge, *intensities) / 4, ridge, max(ridge, *intensities) * 4]
    data = [scatter(ends, map(roof, ends), "roof", COLOURS[5], hover=None)]
    for kind, (names, colour, symbol) in PRODUCTS.items():
        ours = [p for p in rates if p.name.partition(": ")[2] in names]
        if ours:
            data.append(scatter([p.intensity(itemsize) for p in ours], [rates[p] for p in ours],
                                kind, colour, mode="markers", text=list(map(words, ours)),
                                marker={"symbol": symbol, "size": 9},
                                hover="%{text}<extra></extra>"))
    bottom = min(roof(ends[0]), *rates.values()) / 2
    speed = (f"memory: {quantity(machine.bytes_per_second, 'B/s')}; "
             f"ridge at {ridge:.0f} FLOPs per byte")
    return figure(
        data, title, height=440, xaxis=axis("FLOPs per byte moved", type="log", dtick="D2"),
        yaxis=axis(f"FLOP/s in {dtype}", type="log", dtick="D2", exponentformat="SI",
                   range=[math.log10(bottom), math.log10(2 * peak)]),
        shapes=[rule(x=ridge, layer="below")],
        annotations=[note(f"arithmetic: {quantity(peak, 'FLOP/s')}", 0.99, math.log10(peak),
                          "right bottom", xref="paper"),
                     note(speed, 0.99, 0.03, "right bottom", xref="paper", yref="paper")])
