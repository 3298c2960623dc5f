"""Number formats, drawn: one value among its neighbours, every format's range and gaps, and where
tensors lie in them.

A format here is anything with the fields of `lpkit.precision.formats.Format`; values and counts
come from the notebook.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import ipywidgets as widgets
import traitlets

from lpkit.tables import FAINT, INK
from lpkit.ui.style import COLOURS

SIGN, EXPONENT, MANTISSA = "#6b7280", "#004488", "#ddaa33"
ROLE_COLOURS = {"weights": COLOURS[0], "activations": COLOURS[1], "gradients": COLOURS[2]}


class Bits(widgets.VBox):
    """Eight bits to switch, and a slider over the number they make: `.value`, 0 to 255. A control
    of an Explorer."""

    value = traitlets.Int(0, min=0, max=255)
    # an Explorer gives its controls words and a width of words; the bits need neither
    description = ""

    def __init__(self, value: int = 0):
        self.style = SimpleNamespace()
        self.buttons = [widgets.ToggleButton(layout=widgets.Layout(width="30px", padding="0",
                                                                   margin="1px"),
                                             tooltip=f"bit {7 - i}") for i in range(8)]
        self.slider = widgets.IntSlider(min=0, max=255, description="code", readout_format="d",
                                        layout=widgets.Layout(width="98%"))
        label = widgets.Label("bits", layout=widgets.Layout(width="46px"))
        super().__init__([widgets.HBox([label, *self.buttons]), self.slider])
        self.slider.style.description_width = "46px"
        for button in self.buttons:
            button.observe(self._switched, names="value")
        self.slider.observe(lambda change: setattr(self, "value", change["new"]), names="value")
        self.observe(self._show, names="value")
        self.value = value
        self._show(None)

    def _switched(self, _change) -> None:
        self.value = sum(button.value << (7 - i) for i, button in enumerate(self.buttons))

    def _show(self, _change) -> None:
        value = self.value
        self.slider.value = value
        with self.hold_trait_notifications():
            for i, button in enumerate(self.buttons):
                on = bool(value >> (7 - i) & 1)
                button.unobserve(self._switched, names="value")
                button.value, button.description = on, str(int(on))
                button.observe(self._switched, names="value")


def value_figure(listed: Any, code: int) -> dict:
    """The plotly spec for one bit pattern of a format of at most 8 bits (a `Listed`: `format`, and
    `values` by code). Bits above the format's own are ignored."""
    fmt, values = listed.format, listed.values
    code &= (1 << fmt.bits) - 1
    value = values[code]
    grid = sorted({abs(v) for v in values if 0 < abs(v) < math.inf})
    gaps = [above / v - 1 for v, above in itertools.pairwise(grid)]
    size, near, words = abs(value), [], _words(value)
    if 0 <= size < math.inf:
        at = bisect_left(grid, size)
        inside = at < len(grid) and grid[at] == size
        near = [grid[i] for i in ((at - 1, at + 1) if inside else (at,)) if 0 <= i < len(grid)]
    gap_at = dict(zip(grid, [*gaps, gaps[-1]]))
    chosen = [size] if size in gap_at else []
    data = [{"type": "scatter", "mode": "markers", "name": "every value", "x": grid[:-1], "y": gaps,
             "marker": {"color": COLOURS[3], "size": 7},
             "hovertemplate": "%{x:.6g}: the next is %{y:.1%} larger<extra></extra>"}]
    for name, points, colour in (("its neighbours", near, COLOURS[1]),
                                 ("this value", chosen, COLOURS[2])):
        data.append({"type": "scatter", "mode": "markers", "name": name, "x": points,
                     "y": [gap_at[v] for v in points], "marker": {"color": colour, "size": 12},
                     "hovertemplate": "%{x:.6g}<extra>" + name + "</extra>"})
    middle = math.log10(chosen[0] if chosen else near[0] if near else 1.0)
    for points, colour, shown in ((grid, COLOURS[3], False), (near, COLOURS[1], True),
                                  (chosen, COLOURS[2], True)):
        data.append({"type": "scatter", "mode": "markers+text" if shown else "markers",
                     "xaxis": "x2", "yaxis": "y2", "x": points, "y": [0] * len(points),
                     "text": [_words(v) for v in points], "showlegend": False,
                     "marker": {"symbol": "line-ns", "size": 26,
                                "line": {"width": 3, "color": colour}},
                     "textposition": "top center" if points is chosen else "bottom center",
                     "hovertemplate": "%{x:.6g}<extra></extra>"})
    shapes, notes = _cells(fmt, code)
    notes.append({"xref": "paper", "yref": "paper", "x": 0.052 * fmt.bits + 0.02, "y": 1.12,
                  "xanchor": "left", "yanchor": "middle", "showarrow": False,
                  "font": {"size": 15, "color": INK}, "text": f"{_terms(fmt, code)} = {words}"})
    beside = " and ".join(_words(math.copysign(v, value)) for v in near)
    log = {"type": "log", "exponentformat": "power"}
    return {"data": data, "layout": {
        "title": {"text": f"{fmt.name.upper()}, code {code} of {len(values)}: {words}"
                  + (f", beside {beside}" if beside else "")},
        "height": 560, "margin": {"t": 120}, "shapes": shapes, "annotations": notes,
        "legend": {"y": 0.62, "yanchor": "bottom"},
        "xaxis": {**log, "title": {"text": "magnitude"}, "anchor": "y"},
        "yaxis": {"type": "log", "title": {"text": "gap to the next value"}, "tickformat": ".0~%",
                  "dtick": "D2",
                  "domain": [0, 0.6]},
        "xaxis2": {**log, "anchor": "y2", "range": [middle - 0.35, middle + 0.35]},
        "yaxis2": {"domain": [0.78, 1], "range": [-1, 1], "visible": False}}}


def _cells(fmt: Any, code: int) -> tuple[list[dict], list[dict]]:
    """The bits as coloured squares over the plot: sign, exponent, mantissa."""
    sign = int(fmt.signed)
    colours = [SIGN] * sign + [EXPONENT] * fmt.exponent_bits + [MANTISSA] * fmt.mantissa_bits
    shapes, notes = [], []
    for i, colour in enumerate(colours):
        x = 0.052 * i
        shapes.append({"type": "rect", "xref": "paper", "yref": "paper", "x0": x, "x1": x + 0.048,
                       "y0": 1.07, "y1": 1.17, "fillcolor": colour, "line": {"width": 0}})
        notes.append({"xref": "paper", "yref": "paper", "x": x + 0.024, "y": 1.12,
                      "xanchor": "center", "yanchor": "middle", "showarrow": False,
                      "text": str(code >> (fmt.bits - 1 - i) & 1),
                      "font": {"size": 16, "color": INK if colour == MANTISSA else "#ffffff"}})
    return shapes, notes


def _terms(fmt: Any, code: int) -> str:
    """The value as a sum: sign, (1 + mantissa) and power of two."""
    magnitude = code & ((1 << (fmt.bits - fmt.signed)) - 1)
    sign = "-" if fmt.signed and code >> (fmt.bits - 1) else ""
    if not fmt.exponent_bits:
        return "two's complement"
    if fmt.first_nan is not None and magnitude >= fmt.first_nan:
        return "reserved"
    if fmt.has_infinities and magnitude == fmt.first_nan - 1:
        return "reserved"
    field, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    if not fmt.mantissa_bits:
        return f"2<sup>{field} - {fmt.bias}</sup>"
    leading, power = (1, f"{field} - {fmt.bias}") if field else (0, f"1 - {fmt.bias}")
    return f"{sign}({leading} + {mantissa}/{1 << fmt.mantissa_bits}) x 2<sup>{power}</sup>"


def _words(value: float) -> str:
    if math.isnan(value):
        return "not a number"
    return f"{value:.6g}" if math.isfinite(value) else ("infinity" if value > 0 else "-infinity")


def ranges_figure(formats: Iterable[Any], *, title: str = "") -> dict:
    """The plotly spec: for each format a line over its magnitudes, as high as the largest relative
    error of rounding to nearest. Left of the kink lie the subnormals."""
    formats = list(formats)
    data = []
    for i, fmt in enumerate(formats):
        flat = 2.0**-(fmt.mantissa_bits + 1)
        if fmt.exponent_bits and fmt.mantissa_bits:
            points = [(fmt.smallest, 0.5), (fmt.smallest_normal, flat), (fmt.largest, flat)]
        elif fmt.exponent_bits:
            # midway between 1 and 2, from 1.5
            points = [(fmt.smallest, 1 / 3), (fmt.largest, 1 / 3)]
        else:
            points = [(1.0, 0.5), (fmt.largest, 0.5 / fmt.largest)]
        data.append({"type": "scatter", "mode": "lines+markers", "name": fmt.name,
                     "x": [math.log2(x) for x, _ in points], "y": [y for _, y in points],
                     "line": {"color": COLOURS[i % len(COLOURS)],
                              "dash": ("solid", "dash")[i // len(COLOURS)]},
                     "text": [f"2<sup>{math.log2(x):.4g}</sup>" for x, _ in points],
                     "hovertemplate": "%{text}: off by at most %{y:.2%}<extra>" + fmt.name
                     + "</extra>"})
    return {"data": data, "layout": {
        "title": {"text": title}, "height": 460,
        # 8 exponent bits reach to 127 on both sides: with all of it in sight, nothing else would be
        "xaxis": {"title": {"text": "log2 of the magnitude"}, "dtick": 5, "range": [-27, 19]},
        "yaxis": {"type": "log", "title": {"text": "largest rounding error"},
                  "tickvals": [10.0**-e for e in range(9)],
                  "ticktext": [f"{10.0**(2 - e):g}%" for e in range(9)]}}}


def exponents_figure(shares: Mapping[str, Mapping[int, float]], formats: Iterable[Any], *,
                     title: str = "") -> dict:
    """The plotly spec: above, the share of each role's elements at each power of two; below, what
    each format holds without a scale, its subnormals paler."""
    formats = list(formats)
    low, high = (f(e for role in shares.values() for e, share in role.items() if share > 1e-5)
                 for f in (min, max))
    low, high = low - 1, max(high, 10) + 2
    data = []
    for role, counts in shares.items():
        data.append({"type": "bar", "name": role, "x": list(counts), "y": list(counts.values()),
                     "opacity": 0.6, "width": 0.95,
                     "marker": {"color": ROLE_COLOURS.get(role, INK)},
                     "hovertemplate": "2<sup>%{x}</sup>: %{y:.1%}<extra>" + role + "</extra>"})
    for i, fmt in enumerate(formats):
        ends = [math.log2(fmt.smallest), math.log2(fmt.smallest_normal or fmt.smallest),
                math.log2(fmt.largest)]
        for start, end, opacity in ((ends[0], ends[1], 0.35), (ends[1], ends[2], 1.0)):
            start, end = max(start, low), min(end, high)
            if end > start:
                data.append({"type": "scatter", "mode": "lines", "x": [start, end],
                             "y": [fmt.name] * 2, "yaxis": "y2", "showlegend": False,
                             "opacity": opacity, "line": {"width": 11, "color": COLOURS[i % 5]},
                             "hovertemplate": f"{fmt.name}: 2<sup>{ends[0]:.4g}</sup> to "
                             f"2<sup>{ends[2]:.4g}</sup>" "<extra></extra>"})
    return {"data": data, "layout": {
        "title": {"text": title}, "height": 320 + 26 * len(formats), "barmode": "overlay",
        "hovermode": "closest",
        "xaxis": {"title": {"text": "log2 of the magnitude"}, "range": [low, high], "dtick": 5,
                  "anchor": "y2"},
        "yaxis": {"title": {"text": "share of the elements"}, "tickformat": ".0%",
                  "domain": [0.1 + 0.05 * len(formats), 1]},
        "yaxis2": {"domain": [0, 0.04 + 0.05 * len(formats)], "autorange": "reversed", "ticks": "",
                   "showgrid": False,
                   "tickfont": {"color": FAINT}}}}
