"""A roofline: what a machine's ceilings allow at each arithmetic intensity, and where measured
products lie."""

import math
from collections.abc import Mapping

from lpkit.predict.flops import Product
from lpkit.predict.roofline import attainable_flops
from lpkit.predict.units import quantity
from lpkit.techniques.machines import Machine
from lpkit.ui.draw import axis, figure, note, rule, scatter
from lpkit.ui.style import COLOURS

STYLES = {"forward": (COLOURS[0], "circle"), "input gradient": (COLOURS[1], "square"),
          "weight gradient": (COLOURS[2], "diamond")}
KINDS = {"": "forward", "left gradient": "input gradient", "right gradient": "weight gradient"}


def roofline_figure(machine: Machine, rates: Mapping[Product, float], *, dtype: str, itemsize: int,
                    title: str = "") -> dict:
    """The plotly spec, both axes logarithmic. `rates` are measured FLOP/s; intensities assume that
    each operand moves once. Products of equal shape lie on one another."""
    ridge = machine.ridge(dtype)
    intensities = [p.intensity(itemsize) for p in rates]
    low, high = min(ridge, *intensities) / 4, max(ridge, *intensities) * 4
    peak = machine.peak_flops(dtype)
    bottom = min(attainable_flops(machine, dtype, low), *rates.values()) / 2
    data = [scatter([low, ridge, high],
                    [attainable_flops(machine, dtype, x) for x in (low, ridge, high)], "roof",
                    COLOURS[5], hover=None)]
    groups: dict[str, list[Product]] = {}
    for p in rates:
        kind = p.name.partition(": ")[2]
        groups.setdefault(KINDS.get(kind, kind), []).append(p)
    for kind, products in groups.items():
        colour, symbol = STYLES[kind]
        data.append(scatter(
            [p.intensity(itemsize) for p in products], [rates[p] for p in products], kind, colour,
            mode="markers", marker={"symbol": symbol, "size": 9}, hover="%{text}<extra></extra>",
            text=[_words(p, rates[p], attainable_flops(machine, dtype, p.intensity(itemsize)))
                  for p in products]))
    speed = (f"memory: {quantity(machine.bytes_per_second, 'B/s')}; "
             f"ridge at {ridge:.0f} FLOPs per byte")
    return figure(
        data, title, height=440, x=axis("FLOPs per byte moved", type="log", dtick="D2"),
        y=axis(f"FLOP/s in {dtype}", type="log", dtick="D2", exponentformat="SI",
               range=[math.log10(bottom), math.log10(2 * peak)]),
        shapes=[rule(x=ridge, layer="below")],
        annotations=[note(f"arithmetic: " f"{quantity(peak, 'FLOP/s')}", 0.99, math.log10(peak),
                          "right bottom", xref="paper"),
                     note(speed, 0.99, 0.03, "right bottom", xref="paper", yref="paper")])


def _words(p: Product, rate: float, roof: float) -> str:
    together = f", {p.group} at once" if p.group > 1 else ""
    return (f"{p.name}: ({p.M}, {p.K}) x ({p.K}, {p.N}){together}<br>"
            f"{quantity(rate, 'FLOP/s')}, {rate / roof:.0%} of the roof")
