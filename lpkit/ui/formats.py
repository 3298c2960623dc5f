"""Number formats, drawn: one value among its neighbours, every format's range and gaps, where
tensors lie in them; scaling recipes around an outlier; what mixed precision and few bits lose.

A format here is anything with the fields of `lpkit.techniques.formats.Format`; values and counts
come from the notebook. Every figure is a plotly spec.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lpkit.tables import FAINT, INK, html_table
from lpkit.ui.draw import NAMES, POWERS, axis, box, columns, figure, note, rule, scatter
from lpkit.ui.style import ANSWER_COLOURS, COLOURS, FORMAT_COLOURS, ROLE_COLOURS, lines_of

BIT_COLOURS = {"s": (FAINT, "#ffffff"), "e": (COLOURS[0], "#ffffff"), "m": ("#ddaa33", INK)}
OPERANDS = {"weights": "w", "activations": "x", "gradients": "dy"}      # as roles
FATE_COLOURS = ("#e8eef5", COLOURS[1], COLOURS[2], INK)
PAPER = {"xref": "paper", "yref": "paper"}
CELL = 0.052        # the width of a bit, in that of the plot


# Formats.

def value_figure(listed: Any, code: int) -> dict:
    """One bit pattern of a format of at most 8 bits (a `Listed`: `format`, and `values` by code).
    Bits above the format's own are ignored."""
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

    data = [scatter(grid[:-1], gaps, "every value", FORMAT_COLOURS[fmt.name],
                    mode="markers", hover="%{x:.6g}: the next is %{y:.1%} larger<extra></extra>")]
    for name, points, colour in (("its neighbours", near, FAINT), ("this value", chosen, INK)):
        data.append(scatter(points, [gap_at[v] for v in points], name, colour, mode="markers",
                            marker={"size": 12}, hover="%{x:.6g}"))
    for points, colour, mode, place in (
            (grid, FORMAT_COLOURS[fmt.name], "markers", "bottom center"),
            (near, FAINT, "markers+text", "bottom center"),
            (chosen, INK, "markers+text", "top center")):
        line = {"width": 3, "color": colour}
        data.append(scatter(points, [0] * len(points), mode=mode, xaxis="x2", yaxis="y2",
                            text=list(map(_words, points)), textposition=place, showlegend=False,
                            marker={"symbol": "line-ns", "size": 20, "line": line},
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
    kinds = "s" * fmt.signed + "e" * fmt.exponent_bits + "m" * fmt.mantissa_bits
    shapes, notes = [], []
    for i, (kind, bit) in enumerate(zip(kinds, f"{code:0{fmt.bits}b}")):
        x, (fill, ink) = CELL * i, BIT_COLOURS[kind]
        shapes.append(box(x, x + 0.048, 1.07, 1.17, fill=fill, **PAPER))
        notes.append(note(bit, x + 0.024, 1.12, "center middle", **PAPER,
                          font={"size": 16, "color": ink}))
    return shapes, notes


def _terms(fmt: Any, code: int) -> str:
    """The value as a sum: sign, (1 + mantissa) and power of two."""
    magnitude = code & ((1 << (fmt.bits - fmt.signed)) - 1)
    if not fmt.exponent_bits:
        return "two's complement"
    if code == fmt.nan or (fmt.first_nan and magnitude >= fmt.first_nan - fmt.has_infinities):
        return "reserved"
    field, mantissa = divmod(magnitude, 1 << fmt.mantissa_bits)
    if not fmt.mantissa_bits:
        return f"2<sup>{field} - {fmt.bias}</sup>"
    sign = "-" if magnitude < code else ""
    leading, power = (1, field) if field else (0, 1)
    return (f"{sign}({leading} + {mantissa}/{1 << fmt.mantissa_bits}) x "
            f"2<sup>{power} - {fmt.bias}</sup>")


def _words(value: float) -> str:
    special = {"nan": "not a number", "inf": "infinity", "-inf": "-infinity"}
    return special.get(str(value), f"{value:.6g}")


def ranges_figure(formats: Iterable[Any], *, title: str = "") -> dict:
    """For each format a line over its magnitudes, as high as the largest relative error of rounding
    to nearest. Left of the kink lie the subnormals."""
    formats = list(formats)
    data, lines = [], lines_of(fmt.name for fmt in formats)
    for fmt in formats:
        flat = 2.0**-(fmt.mantissa_bits + 1)
        if fmt.exponent_bits and fmt.mantissa_bits:
            points = {fmt.smallest: 0.5, fmt.smallest_normal: flat, fmt.largest: flat}
        elif fmt.exponent_bits:
            # midway between 1 and 2, from 1.5
            points = {fmt.smallest: 1 / 3, fmt.largest: 1 / 3}
        else:
            points = {1.0: 0.5, fmt.largest: 0.5 / fmt.largest}
        powers = list(map(math.log2, points))
        data.append(scatter(powers, points.values(), fmt.name, lines[fmt.name]["color"],
                            mode="lines+markers", line=lines[fmt.name],
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
    """Above, the share of each role's elements at each power of two; below, what each format holds
    without a scale, its subnormals paler."""
    formats = list(formats)
    seen = [e for counts in shares.values() for e, share in counts.items() if share > 1e-5]
    low, high = min(seen) - 1, max(*seen, 10) + 2
    data = [columns(counts, counts.values(), role, ROLE_COLOURS[OPERANDS[role]], opacity=0.6,
                    width=0.95, hover="2<sup>%{x}</sup>: %{y:.1%}")
            for role, counts in shares.items()]
    for fmt in formats:
        first, normal, last = map(math.log2, (
            fmt.smallest, fmt.smallest_normal or fmt.smallest, fmt.largest))
        words = f"{fmt.name}: 2<sup>{first:.4g}</sup> to 2<sup>{last:.4g}</sup><extra></extra>"
        for start, end, opacity in ((first, normal, 0.35), (normal, last, 1.0)):
            start, end = max(start, low), min(end, high)
            if end > start:
                data.append(scatter([start, end], [fmt.name] * 2, "", FORMAT_COLOURS[fmt.name],
                                    line={"width": 11}, yaxis="y2", showlegend=False,
                                    opacity=opacity, hover=words))
    rows = 0.05 * len(formats)
    return figure(
        data, title, height=320 + 26 * len(formats), barmode="overlay",
        xaxis=axis("log2 of the magnitude", range=[low, high], dtick=5, anchor="y2"),
        yaxis=axis("share of the elements", tickformat=".0%", domain=[0.1 + rows, 1]),
        yaxis2={**NAMES, "domain": [0, 0.04 + rows], "tickfont": {"color": FAINT}})


def landing_figure(landings: Iterable[Any]) -> tuple[dict, str]:
    """For an Explorer: where a number lands in each format (a `Landing`:
    lpkit.precision.formats.landings), and the table. A row is the gap that the number is in, all
    drawn to one length; the mark is the number, the dot the value that it becomes."""
    data, notes, rows, names = [], [], [], []
    for line, landing in enumerate(landings):
        name, value, ends = landing.format.name, landing.value, (landing.toward, landing.away)
        names.append(name)
        exact, beyond = landing.nearest == value, landing.away is None
        gap = 0.0 if exact or beyond else abs(ends[1] - ends[0])
        rows.append((name, f"{landing.nearest:.8g}", landing.bits,
                     "exact" if exact else _share(landing.nearest - value, value),
                     "" if exact else "beyond" if beyond else _share(gap, value)))
        at = 1.1 if beyond else abs(value - ends[0]) / gap if gap else 0.0
        dot = 1.0 if beyond else float(gap and landing.nearest != ends[0])
        words = f"{value:.8g} becomes {landing.nearest:.8g}<extra>{name}</extra>"
        for x, mode, marker in (
                ([0, float(not exact)], "lines", {}), ([dot], "markers", {"size": 12}),
                ([at], "markers", {"symbol": "line-ns", "size": 20,
                                   "line": {"width": 2, "color": INK}})):
            data.append(scatter(x, [line] * len(x), name, FORMAT_COLOURS[name], mode=mode,
                                marker=marker, hover=words, showlegend=False, cliponaxis=False))
        sides = [(-0.04, "right middle", landing.toward), (1.04, "left middle", landing.away)]
        if exact:
            sides = [(0.04, "left middle", value)]
        elif beyond:
            sides = [(1.15, "left middle", landing.toward)]
        notes += [note(f"{end:.6g}", x, line, side, font={"size": 12}) for x, side, end in sides]
    spec = figure(
        data, f"{value:g} between its neighbours in each format", height=110 + 30 * len(names),
        annotations=notes, margin={"t": 60},
        xaxis={"range": [-0.5, 1.5], "showgrid": False, "zeroline": False, "ticks": "",
               "tickvals": [0, 1], "ticktext": ["toward zero", "away from zero"]},
        yaxis={"range": [len(names) - 0.4, -0.6], "tickvals": list(range(len(names))),
               "ticktext": names, "ticks": "", "showgrid": False, "zeroline": False})
    return spec, html_table(("format", "becomes", "bits", "off by", "gap"), rows)


def _share(part: float, whole: float) -> str:
    return f"{float(f'{100 * part / whole:.2g}'):g}%" if whole else "-"


# Recipes around an outlier.

def outlier_map(*, kinds: Sequence[Sequence[int]], names: Sequence[str],
                values: Sequence[Sequence[float]], becomes: Sequence[Sequence[float]], recipe: str,
                sqnr_db: float, block: tuple[int, int]) -> dict:
    """Every element of a small tensor by what became of it; the frame is the block that holds the
    outlier."""
    everything = [kind for line in kinds for kind in line]
    row, column = divmod(everything.index(len(names) - 1), len(kinds[0]))
    high, wide = block[0] or len(kinds), block[1] or len(kinds[0])
    top, left = row // high * high - 0.5, column // wide * wide - 0.5
    scale = []
    for i, colour in enumerate(FATE_COLOURS):
        scale += [[i / len(names), colour], [(i + 1) / len(names), colour]]
    words = [[f"{x:.4g} becomes {y:.4g}" for x, y in zip(*lines)] for lines in zip(values, becomes)]
    cells = {
        "type": "heatmap", "z": kinds, "zmin": -0.5, "zmax": len(names) - 0.5, "colorscale": scale,
        "text": words, "xgap": 0.4, "ygap": 0.4,
        "hovertemplate": "row %{y}, column %{x}: %{text}<extra></extra>",
        "colorbar": {"tickvals": list(range(len(names))), "ticktext": list(names), "ticks": "",
                     "len": 0.9, "thickness": 14}}
    flushed = everything.count(2) / len(everything)
    return figure(
        [cells], f"{recipe}: {sqnr_db:.1f} dB for the others, {flushed:.0%} of them flushed to "
        f"zero", height=330, yaxis=axis("row", autorange="reversed", showgrid=False),
        xaxis=axis("column (the contracted axis)", showgrid=False, constrain="domain"),
        shapes=[box(left, left + wide, top, top + high, edge=INK, width=2)])


def outlier_figure(axis_values: Sequence[float], formula: Mapping[str, Sequence[float]],
                   sizes: Sequence[float], measured: Mapping[str, Sequence[float]], *,
                   title: str = "") -> dict:
    """Signal over noise of the other elements against the outlier's size: lines over `axis_values`
    by formula, points measured."""
    data = []
    for i, (name, line) in enumerate(lines_of(formula).items()):
        shared = {"name": name, "colour": line["color"], "line": line, "legendgroup": name}
        data += [scatter(axis_values, formula[name], hover="%{y:.1f} dB by formula", **shared),
                 scatter(sizes, measured[name], hover="%{y:.1f} dB measured", mode="markers",
                         marker={"symbol": i}, showlegend=False, **shared)]
    return figure(data, title, height=440,
                  xaxis=axis("outlier, in standard deviations of the others", **POWERS),
                  yaxis=axis("signal over noise of the others, dB", rangemode="tozero"))


# Mixed precision, and few bits.

def lost_figure(rates: Sequence[float], formula: Mapping[str, Sequence[float]],
                measured: Mapping[float, float], *, title: str = "") -> dict:
    """Share of the updates that a bf16 weight does not feel, against the learning rate: limits, and
    what was counted."""
    data = [scatter(rates, [100 * y for y in shares], name, ANSWER_COLOURS["formula"],
                    line={"dash": ("solid", "dash")[i % 2]})
            for i, (name, shares) in enumerate(formula.items())]
    data.append(scatter(measured, [100 * y for y in measured.values()], "measured",
                        ANSWER_COLOURS["measured"], mode="markers", marker={"size": 10}))
    return figure(data, title, height=360, xaxis=axis("learning rate", **POWERS),
                  yaxis=axis("updates lost, %", range=[0, 105]))


def losses_figure(curves: Mapping[str, Sequence[float]], *, title: str = "") -> dict:
    """Training losses by name, step by step; the first are broad, so that equal ones show."""
    lines = [scatter(range(1, len(curves[name]) + 1), curves[name], name,
                     line={**line, "width": 2 + 2.5 * below})
             for below, (name, line) in zip(reversed(range(len(curves))),
                                            lines_of(curves).items())]
    return figure(lines, title, height=380, xaxis=axis("step"),
                  yaxis=axis("training loss, nats per token"))


def scaling_view(shares: Mapping[int, float], smallest: float,
                 largest: float) -> Callable[[int], dict]:
    """For an Explorer with one control, `exponent` of the scale: gradients, as `shares` by the
    exponent of two, times 2^exponent between the ends of a format. What lies left of the window
    becomes zero, what lies right of it infinite."""
    low, high = math.log2(smallest) - 1, math.log2(largest)

    def show(exponent: int) -> dict:
        moved = {float(e + exponent): 100 * share for e, share in shares.items()}
        held = {e: share for e, share in moved.items() if low <= e + 0.999 and e <= high}
        lost = {e: share for e, share in moved.items() if e not in held}
        zero = sum(share for e, share in lost.items() if e < low)
        return figure(
            [columns(held, held.values(), "held", COLOURS[0], width=0.9),
             columns(lost, lost.values(), "lost", COLOURS[2], width=0.9)],
            f"Scaled by 2^{exponent}: {zero:.1f}% of the gradients become zero", height=360,
            barmode="overlay", yaxis=axis("share of the gradients, %"),
            xaxis=axis("exponent of two of a gradient, scaled", range=[-50, 20]),
            shapes=[rule(x=x, width=1.5, dash="dash") for x in (low, high)])

    return show


def bits_figure(formula: Callable[[int], float], measured: Mapping[int, float], *,
                title: str = "") -> dict:
    """An error by bits, on a log scale."""
    bits, words = range(min(measured), max(measured) + 1), "%{x} bits: %{y:.2g}"
    return figure(
        [scatter(bits, map(formula, bits), "formula", ANSWER_COLOURS["formula"], hover=words),
         scatter(measured, measured.values(), "measured",
                 ANSWER_COLOURS["measured"], mode="markers", marker={"size": 11}, hover=words)],
        title, height=340, xaxis=axis("bits of a saved number", tickvals=list(bits)),
        yaxis=axis("error of the gradient, relative", type="log", dtick=1))
