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
from lpkit.ui.draw import NAMES, axis, box, columns, figure, note, scatter
from lpkit.ui.style import COLOURS

SIGN, EXPONENT, MANTISSA = "#6b7280", "#004488", "#ddaa33"
ROLE_COLOURS = {"weights": COLOURS[0], "activations": COLOURS[1], "gradients": COLOURS[2]}
PAPER = {"xref": "paper", "yref": "paper"}
CELL = 0.052        # the width of a bit, in that of the plot


class Bits(widgets.VBox):
    """Eight bits to switch, and a slider over the number they make: `.value`, 0 to 255. A control
    of an Explorer."""

    value = traitlets.Int(0, min=0, max=255)
    # an Explorer gives its controls words and a width of words; the bits need neither
    description = ""

    def __init__(self):
        self.style = SimpleNamespace()
        small = {"width": "30px", "padding": "0", "margin": "1px"}
        self.buttons = [widgets.ToggleButton(tooltip=f"bit {7 - i}", description="0", layout=small)
                        for i in range(8)]
        self.slider = widgets.IntSlider(min=0, max=255, description="code",
                                        style={"description_width": "46px"},
                                        layout={"width": "98%"})
        label = widgets.Label("bits", layout={"width": "46px"})
        super().__init__([widgets.HBox([label, *self.buttons]), self.slider])
        for button in self.buttons:
            button.observe(self._switched, names="value")
        widgets.link((self, "value"), (self.slider, "value"))
        self.observe(self._show, names="value")

    def _switched(self, change: dict) -> None:
        bit = 128 >> self.buttons.index(change["owner"])
        self.value = self.value | bit if change["new"] else self.value & ~bit

    def _show(self, change: dict) -> None:
        for button, bit in zip(self.buttons, f"{change['new']:08b}"):
            button.value, button.description = bit == "1", bit


def value_figure(listed: Any, code: int) -> dict:
    """The plotly spec for one bit pattern of a format of at most 8 bits (a `Listed`: `format`, and
    `values` by code). Bits above the format's own are ignored."""
    fmt, values = listed.format, listed.values
    code &= (1 << fmt.bits) - 1
    value = values[code]
    size, words = abs(value), _words(value)
    grid = sorted({abs(v) for v in values if 0 < abs(v) < math.inf})
    gaps = [above / v - 1 for v, above in itertools.pairwise(grid)]
    gap_at = dict(zip(grid, [*gaps, gaps[-1]]))
    near, chosen = [], [size] if size in gap_at else []
    if math.isfinite(size):
        at = bisect_left(grid, size)
        sides = (at - 1, at + 1) if chosen else (at,)
        near = [grid[i] for i in sides if 0 <= i < len(grid)]
    middle = math.log10([*chosen, *near, 1.0][0])

    data = [scatter(grid[:-1], gaps, "every value", COLOURS[3], mode="markers",
                    hover="%{x:.6g}: the next is %{y:.1%} larger<extra></extra>")]
    for name, points, colour in (("its neighbours", near, COLOURS[1]),
                                 ("this value", chosen, COLOURS[2])):
        data.append(scatter(points, [gap_at[v] for v in points], name, colour, mode="markers",
                            marker={"size": 12}, hover="%{x:.6g}"))
    for points, colour, mode, place in ((grid, COLOURS[3], "markers", "bottom center"),
                                        (near, COLOURS[1], "markers+text", "bottom center"),
                                        (chosen, COLOURS[2], "markers+text", "top center")):
        data.append(scatter(points, [0] * len(points), mode=mode, xaxis="x2", yaxis="y2",
                            text=[_words(v) for v in points], textposition=place, showlegend=False,
                            marker={"symbol": "line-ns", "size": 26,
                                    "line": {"width": 3, "color": colour}},
                            hover="%{x:.6g}"))
    shapes, notes = _cells(fmt, code)
    notes.append(note(f"{_terms(fmt, code)} = {words}", CELL * fmt.bits + 0.02, 1.12, "left middle",
                      **PAPER, font={"size": 15, "color": INK}))
    title = f"{fmt.name.upper()}, code {code} of {len(values)}: {words}"
    if near:
        title += ", beside " + " and ".join(_words(math.copysign(v, value)) for v in near)
    log = {"type": "log", "exponentformat": "power"}
    return figure(
        data, title, height=560, margin={"t": 120}, shapes=shapes, annotations=notes,
        legend={"y": 0.62}, xaxis=axis("magnitude", **log, anchor="y"),
        yaxis=axis("gap to the next value", type="log", tickformat=".0~%", dtick="D2",
                   domain=[0, 0.6]),
        xaxis2={**log, "anchor": "y2", "range": [middle - 0.35, middle + 0.35]},
        yaxis2={"domain": [0.78, 1], "range": [-1, 1], "visible": False})


def _cells(fmt: Any, code: int) -> tuple[list[dict], list[dict]]:
    """The bits as coloured squares over the plot: sign, exponent, mantissa."""
    colours = [EXPONENT] * fmt.exponent_bits + [MANTISSA] * fmt.mantissa_bits
    if fmt.signed:
        colours.insert(0, SIGN)
    shapes, notes = [], []
    for i, (colour, bit) in enumerate(zip(colours, f"{code:0{fmt.bits}b}")):
        x, ink = CELL * i, INK if colour == MANTISSA else "#ffffff"
        shapes.append(box(x, x + 0.048, 1.07, 1.17, fill=colour, **PAPER))
        notes.append(note(bit, x + 0.024, 1.12, "center middle", **PAPER,
                          font={"size": 16, "color": ink}))
    return shapes, notes


def _terms(fmt: Any, code: int) -> str:
    """The value as a sum: sign, (1 + mantissa) and power of two."""
    magnitude = code & ((1 << (fmt.bits - fmt.signed)) - 1)
    sign = "-" if magnitude < code else ""
    if not fmt.exponent_bits:
        return "two's complement"
    if fmt.first_nan is not None and magnitude >= fmt.first_nan - fmt.has_infinities:
        return "reserved"
    field, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
    if not fmt.mantissa_bits:
        return f"2<sup>{field} - {fmt.bias}</sup>"
    leading, power = (1, field) if field else (0, 1)
    return (f"{sign}({leading} + {mantissa}/{1 << fmt.mantissa_bits}) x "
            f"2<sup>{power} - {fmt.bias}</sup>")


def _words(value: float) -> str:
    return {"nan": "not a number", "inf": "infinity", "-inf": "-infinity"}.get(
        str(value), f"{value:.6g}")


def ranges_figure(formats: Iterable[Any], *, title: str = "") -> dict:
    """The plotly spec: for each format a line over its magnitudes, as high as the largest relative
    error of rounding to nearest. Left of the kink lie the subnormals."""
    data = []
    for i, fmt in enumerate(formats):
        flat = 2.0**-(fmt.mantissa_bits + 1)
        if fmt.exponent_bits and fmt.mantissa_bits:
            points = {fmt.smallest: 0.5, fmt.smallest_normal: flat, fmt.largest: flat}
        elif fmt.exponent_bits:
            # midway between 1 and 2, from 1.5
            points = {fmt.smallest: 1 / 3, fmt.largest: 1 / 3}
        else:
            points = {1.0: 0.5, fmt.largest: 0.5 / fmt.largest}
        again, colour = divmod(i, len(COLOURS))
        powers = [math.log2(x) for x in points]
        data.append(scatter(powers, points.values(), fmt.name, COLOURS[colour],
                            mode="lines+markers", line={"dash": ("solid", "dash")[again]},
                            text=[f"2<sup>{power:.4g}</sup>" for power in powers],
                            hover="%{text}: off by at most %{y:.2%}"))
    return figure(
        data, title, height=460,
        # 8 exponent bits reach to 127 on both sides: with all of it in sight, nothing else would be
        xaxis=axis("log2 of the magnitude", dtick=5, range=[-27, 19]),
        yaxis=axis("largest rounding error", type="log", tickvals=[10.0**-e for e in range(9)],
                   ticktext=[f"{10.0**(2 - e):g}%" for e in range(9)]))


def exponents_figure(shares: Mapping[str, Mapping[int, float]], formats: Iterable[Any], *,
                     title: str = "") -> dict:
    """The plotly spec: above, the share of each role's elements at each power of two; below, what
    each format holds without a scale, its subnormals paler."""
    formats = list(formats)
    seen = [e for counts in shares.values() for e, share in counts.items() if share > 1e-5]
    low, high = min(seen) - 1, max(*seen, 10) + 2
    data = [columns(counts, counts.values(), role, ROLE_COLOURS.get(role, INK), opacity=0.6,
                    width=0.95, hover="2<sup>%{x}</sup>: %{y:.1%}")
            for role, counts in shares.items()]
    for i, fmt in enumerate(formats):
        first, normal, last = map(math.log2, (
            fmt.smallest, fmt.smallest_normal or fmt.smallest, fmt.largest))
        words = f"{fmt.name}: 2<sup>{first:.4g}</sup> to 2<sup>{last:.4g}</sup><extra></extra>"
        for start, end, opacity in ((first, normal, 0.35), (normal, last, 1.0)):
            start, end = max(start, low), min(end, high)
            if end > start:
                data.append(scatter([start, end], [fmt.name] * 2, colour=COLOURS[i % 5],
                                    line={"width": 11}, yaxis="y2", showlegend=False,
                                    opacity=opacity, hover=words))
    rows = 0.05 * len(formats)
    return figure(
        data, title, height=320 + 26 * len(formats), barmode="overlay", hovermode="closest",
        xaxis=axis("log2 of the magnitude", range=[low, high], dtick=5, anchor="y2"),
        yaxis=axis("share of the elements", tickformat=".0%", domain=[0.1 + rows, 1]),
        yaxis2={**NAMES, "domain": [0, 0.04 + rows], "tickfont": {"color": FAINT}})
