"""A roofline: what a machine's ceilings allow at each arithmetic intensity, and where measured products lie."""

import math
from collections.abc import Mapping

from lpkit.predict.flops import Product
from lpkit.predict.roofline import attainable_flops
from lpkit.predict.units import quantity
from lpkit.tables import FAINT
from lpkit.techniques.machines import Machine
from lpkit.ui.style import COLOURS

STYLES = {"forward": (COLOURS[0], "circle"), "input gradient": (COLOURS[1], "square"),
          "weight gradient": (COLOURS[2], "diamond")}
KINDS = {"": "forward", "left gradient": "input gradient", "right gradient": "weight gradient"}


def roofline_figure(machine: Machine, rates: Mapping[Product, float], *, dtype: str, itemsize: int,
                    title: str = "") -> dict:
    """The plotly spec, both axes logarithmic. `rates` are measured FLOP/s; intensities assume that each operand moves
    once. Products of equal shape lie on one another."""
    ridge = machine.ridge(dtype)
    intensities = [p.intensity(itemsize) for p in rates]
    low, high = min(ridge, *intensities) / 4, max(ridge, *intensities) * 4
    peak = machine.peak_flops(dtype)
    bottom = min(attainable_flops(machine, dtype, low), *rates.values()) / 2
    data = [{"type": "scatter", "mode": "lines", "name": "roof", "x": [low, ridge, high], "hoverinfo": "skip",
             "y": [attainable_flops(machine, dtype, x) for x in (low, ridge, high)], "line": {"color": COLOURS[5]}}]
    groups: dict[str, list[Product]] = {}
    for p in rates:
        kind = p.name.partition(": ")[2]
        groups.setdefault(KINDS.get(kind, kind), []).append(p)
    for kind, products in groups.items():
        colour, symbol = STYLES[kind]
        data.append({
            "type": "scatter", "mode": "markers", "name": kind, "x": [p.intensity(itemsize) for p in products],
            "y": [rates[p] for p in products], "marker": {"color": colour, "symbol": symbol, "size": 9},
            "text": [_words(p, rates[p], attainable_flops(machine, dtype, p.intensity(itemsize))) for p in products],
            "hovertemplate": "%{text}<extra></extra>"})
    return {"data": data, "layout": {
        "title": {"text": title}, "height": 440,
        "xaxis": {"type": "log", "dtick": "D2", "title": {"text": "FLOPs per byte moved"}},
        "yaxis": {"type": "log", "dtick": "D2", "title": {"text": f"FLOP/s in {dtype}"}, "exponentformat": "SI",
                  "range": [math.log10(bottom), math.log10(2 * peak)]},
        "shapes": [{"type": "line", "x0": ridge, "x1": ridge, "yref": "paper", "y0": 0, "y1": 1, "layer": "below",
                    "line": {"color": FAINT, "width": 1, "dash": "dot"}}],
        "annotations": [
            {"xref": "paper", "x": 0.99, "y": math.log10(peak), "xanchor": "right", "yanchor": "bottom",
             "showarrow": False, "text": f"arithmetic: {quantity(peak, 'FLOP/s')}"},
            {"xref": "paper", "x": 0.99, "yref": "paper", "y": 0.03, "xanchor": "right", "yanchor": "bottom",
             "showarrow": False,
             "text": f"memory: {quantity(machine.bytes_per_second, 'B/s')}; ridge at {ridge:.0f} FLOPs per byte"}]}}


def _words(p: Product, rate: float, roof: float) -> str:
    together = f", {p.group} at once" if p.group > 1 else ""
    return (f"{p.name}: ({p.M}, {p.K}) x ({p.K}, {p.N}){together}<br>"
            f"{quantity(rate, 'FLOP/s')}, {rate / roof:.0%} of the roof")
