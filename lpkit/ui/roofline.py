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

KINDS = (   # and how the names of such products end
    ("forward", ("",), COLOURS[0], "circle"),
    ("input gradient", ("input gradient", "left gradient"), COLOURS[1], "square"),
    ("weight gradient", ("weight gradient", "right gradient"), COLOURS[2], "diamond"),
)


def roofline_figure(machine: Machine, rates: Mapping[Product, float], *, dtype: str, itemsize: int,
                    title: str = "") -> dict:
    """The plotly spec, both axes logarithmic. `rates` are measured FLOP/s; intensities assume that
    each operand moves once. Products of equal shape lie on one another."""
    def roof(intensity: float) -> float:
        return attainable_flops(machine, dtype, intensity)

    ridge, peak = machine.ridge(dtype), machine.peak_flops(dtype)
    intensities = {p: p.intensity(itemsize) for p in rates}
    ends = [min(ridge, *intensities.values()) / 4, ridge, max(ridge, *intensities.values()) * 4]
    data = [scatter(ends, map(roof, ends), "roof", COLOURS[5], hover=None)]
    for kind, names, colour, symbol in KINDS:
        products = [p for p in rates if p.name.partition(": ")[2] in names]
        if products:
            data.append(scatter(
                [intensities[p] for p in products], [rates[p] for p in products], kind, colour,
                mode="markers", marker={"symbol": symbol, "size": 9},
                hover="%{text}<extra></extra>",
                text=[_words(p, rates[p], roof(intensities[p])) for p in products]))
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


def _words(p: Product, rate: float, roof: float) -> str:
    together = f", {p.group} at once" if p.group > 1 else ""
    return (f"{p.name}: ({p.M}, {p.K}) x ({p.K}, {p.N}){together}<br>"
            f"{quantity(rate, 'FLOP/s')}, {rate / roof:.0%} of the roof")
