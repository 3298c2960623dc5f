"""Lesson 03, number formats: its study, its figures and its exercises.

Measures what a number format does to the tensors of a real training step, and predicts it by
formula.

    tensors = operands(Training.build(config), steps=40)    # by role
    measured_db(x, fmt)     expected_db(fmt, crest=crest(x))
    zero_share(x, fmt)      expected_zero_share(fmt, sigma=...)

A ratio in dB is 10 log10 of a ratio of energies; the energy of a tensor is the sum of its squares.
Sources of the formulas: Bennett 1948, https://doi.org/10.1002/j.1538-7305.1948.tb01340.x (rounding
errors that are uniform over a spacing d have the mean square d^2 / 12); Widrow and Kollar 2008,
Quantization Noise.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import ipywidgets as widgets
import torch
import traitlets
from torch import Tensor, nn

from lessons.draws import FP8, LARGEST, UNCLAMPED, normal
from lessons.figures.colours import FORMAT_COLOURS, ROLE_COLOURS, lines_of
from lessons.figures.drawing import NAMES, axis, box, columns, figure, note, scatter
from lessons.figures.style import COLOURS
from lessons.judging.judge import Exercise, adding_to
from lessons.number_formats import decode, encode, round_to, spacing, values
from lpkit.errors import ConfigError
from lpkit.kernels import cast as casting
from lpkit.measure.telemetry import decibel, observed
from lpkit.tables import FAINT, INK, html_table
from lpkit.techniques.formats import FORMATS, Format
from lpkit.training.training import Training

# notebook 03 imports these from here
__all__ = ["decode", "fmean"]

# ---- The study

def operands(training: Training, *, steps: int) -> dict[str, list[Tensor]]:
    """Make `steps` updates and return the operands of each nn.Linear in the next step.

    The result has the keys "weights", "activations" (inputs) and "gradients" (of outputs), each
    with one float32 tensor per Linear. Inputs and gradients are flattened to (tokens, features).
    Raises ConfigError for less than 1 step.
    """
    if steps < 1:
        raise ConfigError(f"the model must train before its tensors are recorded: steps must be 1 "
                          f"or more, got {steps}")
    for step in range(steps):
        training.update(step)
    by_role: dict[str, list[Tensor]] = {"w": [], "x": [], "dy": []}

    def keep(name: str, layer: nn.Linear, tensor: str, x: Tensor, dtype: torch.dtype) -> None:
        by_role[tensor].append(x.detach().float().flatten(0, -2))

    linears = {name: layer for name, layer in training.model.named_modules()
               if isinstance(layer, nn.Linear)}
    with observed(linears, keep):
        # With `phases`, a step runs without CUDA graphs; a graph would not call the observers.
        training.forward_backward(training.batch(steps), phases=lambda name: nullcontext())
    training.optimizer.zero_grad(set_to_none=True)
    return dict(zip(("weights", "activations", "gradients"), by_role.values()))


def sqnr_db(x: Tensor, y: Tensor) -> float | None:
    """Return the SQNR of y, the cast of x, in dB: 10 log10(sum x^2 / sum (y - x)^2). None if y
    equals x.

    10 dB are a factor of ten. One more mantissa bit divides the energy of the errors by four, which
    is 6.02 dB. Source: Bennett 1948, https://doi.org/10.1002/j.1538-7305.1948.tb01340.x"""
    ratio = x.double().square().sum() / (y - x).double().square().sum()
    return decibel(ratio.item())


def measured_db(x: Tensor, fmt: Format) -> float | None:
    """Return the SQNR in dB of a cast of x to `fmt` with one scale, which maps the amax of x to the
    format's largest value. None if the cast is exact."""
    scale = casting.amax(x).values / fmt.largest
    return sqnr_db(x, casting.qdq(x, fmt, scale, dtype=torch.float32))


def crest(x: Tensor) -> float:
    """Return the crest factor of x: the largest magnitude divided by the root mean square."""
    return (x.abs().max() / x.double().square().mean().sqrt()).item()


def zero_share(x: Tensor, fmt: Format) -> float:
    """Return the share of the non-zero elements of x that become zero in a cast without a scale:
    elements of at most half of the format's smallest value."""
    return ((x.abs() <= fmt.smallest / 2) & (x != 0)).sum().item() / (x != 0).sum().item()


def exponent_shares(tensors: list[Tensor]) -> dict[int, float]:
    """Return {e: share} of the non-zero elements of all tensors by e = floor(log2 |x|); exponents
    are clamped to -60 .. 20."""
    x = torch.cat([t.flatten() for t in tensors])
    e = torch.frexp(x[x != 0]).exponent.sub(1).clamp(-60, 20)
    counts = torch.bincount(e + 60, minlength=81)
    return {k - 60: n / e.numel() for k, n in enumerate(counts.tolist()) if n}


def expected_db(fmt: Format, *, crest: float) -> float:
    """Return the expected SQNR in dB of a cast of Gaussian numbers whose largest magnitude, `crest`
    standard deviations, is scaled to the format's largest value."""
    sigma = fmt.largest / crest
    return 10 * math.log10(sigma**2 / rounding_noise(fmt, sigma))


def rounding_noise(fmt: Format, sigma: float, share_below: float = 0.0) -> float:
    """Return the mean square of the rounding errors of numbers from N(0, sigma). The share
    `share_below` of the numbers, those closest to zero, is left out. Within a binade (the values
    from one power of two to the next), the spacing d is constant, and the mean square is d^2 / 12.
    """
    noise = 0.0
    # the first binade includes the subnormals, which have the same spacing
    for e in range(fmt.min_exponent, max(fmt.min_exponent, fmt.max_exponent) + 1):
        share = math.erf(2.0**(e + 1) / sigma / math.sqrt(2))
        noise += (share - share_below) * 4.0**(e - fmt.mantissa_bits) / 12
        share_below = share
    return noise


def expected_zero_share(fmt: Format, *, sigma: float) -> float:
    """Return the share of numbers from N(0, sigma) that round to zero: magnitudes below half of the
    format's smallest value."""
    return math.erf(fmt.smallest / 2 / sigma / math.sqrt(2))


@dataclass(frozen=True, kw_only=True, eq=False)
class Listed:
    """A format and its values; `values[code]` is the value of a bit pattern. Instances are compared
    by identity, since NaN != NaN would make equal lists of values unequal."""

    format: Format
    values: tuple[float, ...]


def listed() -> dict[str, Listed]:
    """Return a `Listed` for each format of at most 8 bits, by name."""
    return {name: Listed(format=fmt, values=tuple(values(fmt).tolist()))
            for name, fmt in FORMATS.items() if fmt.bits <= 8}


@dataclass(frozen=True, kw_only=True)
class Landing:
    """The rounding of a number to a format."""

    format: Format
    value: float            # the number
    nearest: float          # the value of the format that it is rounded to
    code: int               # bit pattern of `nearest`
    # the neighbours of the number in the format; both equal `value` if the format contains it
    toward: float           # the neighbour toward zero
    away: float | None      # the neighbour away from zero; None beyond the largest value

    @property
    def bits(self) -> str:
        """The code in binary, with spaces between sign, exponent and mantissa."""
        digits = f"{self.code:0{self.format.bits}b}"
        ends = self.format.signed, self.format.signed + self.format.exponent_bits
        parts = digits[:ends[0]], digits[ends[0]:ends[1]], digits[ends[1]:]
        return " ".join(filter(None, parts))


def landings(x: float) -> dict[str, Landing]:
    """Return the rounding of x to each format, by name; a number that is too large saturates.
    Formats without a sign are left out for negative x. Raises ConfigError for a number that is not
    finite."""
    if not math.isfinite(x):
        raise ConfigError(f"only a finite number can be rounded to a format, got {x}")
    number, results = torch.tensor([x], dtype=torch.float64), {}
    for name, fmt in FORMATS.items():
        nearest = round_to(number, fmt)
        if nearest.isnan():
            continue
        toward = round_to(number, fmt, rounding="toward-zero").double()
        away = toward + torch.copysign(spacing(toward.abs(), fmt), number)
        ends = toward.item(), away.item()
        if ends[0] == x:
            ends = x, x
        elif not fmt.lowest <= ends[1] <= fmt.largest:
            ends = ends[0], None
        results[name] = Landing(format=fmt, value=x, nearest=nearest.item(), toward=ends[0],
                              away=ends[1], code=int(encode(nearest, fmt)))
    return results


# ---- Figures

class Bits(widgets.VBox):
    """A control of an Explorer: eight buttons, one per bit, and a slider for the number from 0 to
    255 that the bits form, which is `.value`."""

    value = traitlets.Int(0, min=0, max=255)
    # an Explorer sets the description of its controls; the bits need none
    description = ""

    def __init__(self):
        self.style = SimpleNamespace()
        small = {"width": "30px", "padding": "0", "margin": "1px"}
        self.buttons = [widgets.ToggleButton(tooltip=f"bit {7 - i}", description="0", layout=small)
                        for i in range(8)]
        self.slider = widgets.IntSlider(min=0, max=255, description="code", layout={"width": "98%"},
                                        style={"description_width": "46px"})
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


# Values.

def number_line_figure(formats: Mapping[str, Any], *, title: str = "") -> dict:
    """Return the plotly spec: for each `Listed` format, by name, a row with a tick at each of its
    non-negative values, as a share of its largest value. The upper panel has a linear axis, the
    lower panel a logarithmic axis."""
    data, names, lines = [], list(formats), lines_of(formats)
    for row, (name, listed) in enumerate(formats.items()):
        values = sorted({v for v in listed.values if math.isfinite(v) and v >= 0})
        shares = [v / values[-1] for v in values]
        for panel, xs in (("", shares), ("2", [s for s in shares if s])):
            data.append(scatter(
                xs, [row] * len(xs), name, mode="markers",
                showlegend=False, text=[f"{v:g}" for v in values[-len(xs):]],
                xaxis=f"x{panel}", yaxis=f"y{panel}", hover="%{text}, %{x:.3g} of the largest",
                marker={"symbol": "line-ns", "size": 18,
                        "line": {"width": 1.2, "color": lines[name]["color"]}}))
    rows = {"tickvals": list(range(len(names))), "ticktext": names, "showgrid": False,
            "range": [len(names) - 0.4, -0.6], "zeroline": False}
    powers = {"type": "log", "dtick": 4 * math.log10(2), "tick0": 0, "showgrid": True}
    exponents = range(-32, 1, 4)
    return figure(
        data, title, height=150 + 62 * len(names), hovermode="closest",
        xaxis=axis("share of the largest value", anchor="y", range=[-0.01, 1.01], zeroline=False),
        yaxis={**rows, "domain": [0.6, 1]},
        xaxis2={**axis("share of the largest value (log scale)"), **powers, "anchor": "y2",
                "range": [-32 * math.log10(2), 0.1], "tickvals": [2.0**e for e in exponents],
                "ticktext": [f"2<sup>{e}</sup>" if e else "1" for e in exponents]},
        yaxis2={**rows, "anchor": "x2", "domain": [0, 0.38]})


BIT_COLOURS = {"s": (FAINT, "#ffffff"), "e": (COLOURS[0], "#ffffff"), "m": ("#ddaa33", INK)}
OPERANDS = {"weights": "w", "activations": "x", "gradients": "dy"}      # role of each operand
PAPER = {"xref": "paper", "yref": "paper"}
CELL = 0.052        # width of a bit as a share of the plot's width


# Formats.

def value_figure(listed: Any, code: int) -> dict:
    """Return the plotly spec of a bit pattern of a `Listed` format: its bits and its value on top,
    then its neighbours on a log axis, and below the gaps between all values of the format. Bits
    above the format's width are ignored."""
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
        title += "; neighbours: " + " and ".join(_words(math.copysign(v, value)) for v in near)
    log = {"type": "log", "exponentformat": "power"}
    return figure(
        data, title, height=560, margin={"t": 120}, shapes=shapes, annotations=notes,
        legend={"y": 0.62}, xaxis=axis("magnitude", **log, anchor="y"),
        yaxis=axis("gap to the next value", type="log", tickformat=".0~%", dtick="D2",
                   domain=[0, 0.6]),
        xaxis2={**log, "showgrid": False, "anchor": "y2", "range": [middle - 0.35, middle + 0.35]},
        yaxis2={"domain": [0.78, 1], "range": [-1, 1], "visible": False})


def _cells(fmt: Any, code: int) -> tuple[list[dict], list[dict]]:
    """Return the shapes and notes of the bits of a code: a square for each bit above the plot, in
    the colour of sign, exponent or mantissa."""
    kinds = "s" * fmt.signed + "e" * fmt.exponent_bits + "m" * fmt.mantissa_bits
    shapes, notes = [], []
    for i, (kind, bit) in enumerate(zip(kinds, f"{code:0{fmt.bits}b}")):
        x, (fill, ink) = CELL * i, BIT_COLOURS[kind]
        shapes.append(box(x, x + 0.048, 1.07, 1.17, fill=fill, **PAPER))
        notes.append(note(bit, x + 0.024, 1.12, "center middle", **PAPER,
                          font={"size": 16, "color": ink}))
    return shapes, notes


def _terms(fmt: Any, code: int) -> str:
    """Return the value of a code as an expression, for example "-(1 + 3/8) x 2<sup>5 - 7</sup>":
    sign, leading 1 (or 0) plus mantissa, power of two."""
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
    """Return a value as text, with words for NaN and infinities."""
    special = {"nan": "not a number", "inf": "infinity", "-inf": "-infinity"}
    return special.get(str(value), f"{value:.6g}")


def ranges_figure(formats: Iterable[Any], *, title: str = "") -> dict:
    """Return the plotly spec: for each format, a line of the largest relative error of rounding to
    nearest over the magnitude. Left of the kink are the subnormals, where the error grows toward
    zero."""
    formats = list(formats)
    data, lines = [], lines_of(fmt.name for fmt in formats)
    for fmt in formats:
        flat = 2.0**-(fmt.mantissa_bits + 1)
        if fmt.exponent_bits and fmt.mantissa_bits:
            points = {fmt.smallest: 0.5, fmt.smallest_normal: flat, fmt.largest: flat}
        elif fmt.exponent_bits:
            # the worst case is 1.5, midway between 1 and 2: 0.5 / 1.5
            points = {fmt.smallest: 1 / 3, fmt.largest: 1 / 3}
        else:
            points = {1.0: 0.5, fmt.largest: 0.5 / fmt.largest}
        powers = list(map(math.log2, points))
        data.append(scatter(powers, points.values(), fmt.name, lines[fmt.name]["color"],
                            mode="lines+markers", line=lines[fmt.name],
                            text=[f"2<sup>{power:.4g}</sup>" for power in powers],
                            hover="%{text}: error of at most %{y:.2%}"))
    return figure(
        data, title, height=460,
        # formats with 8 exponent bits reach from -127 to 127; the range shows the other formats
        xaxis=axis("log2 of the magnitude", dtick=5, range=[-27, 19]),
        yaxis=axis("largest relative rounding error", type="log",
                   tickvals=[10.0**-e for e in range(9)],
                   ticktext=[f"{10.0**(2 - e):g}%" for e in range(9)]))


def exponents_figure(shares: Mapping[str, Mapping[int, float]], formats: Iterable[Any], *,
                     title: str = "") -> dict:
    """Return the plotly spec of two panels over log2 of the magnitude. Upper panel: for each role,
    the share of its elements by exponent (`shares` from `exponent_shares`). Lower panel: the range
    that each format has without a scale; the range of its subnormals is paler."""
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


def landing_figure(landings: Iterable[Landing]) -> tuple[dict, str]:
    """Return (spec, html) for an Explorer: a row for each format with the gap between the two
    neighbours of a number, all gaps drawn at the same length. A vertical mark is the number; a dot
    is the value that it is rounded to."""
    data, notes, rows, names = [], [], [], []
    for line, landing in enumerate(landings):
        name, value, ends = landing.format.name, landing.value, (landing.toward, landing.away)
        names.append(name)
        exact, beyond = landing.nearest == value, landing.away is None
        gap = 0.0 if exact or beyond else abs(ends[1] - ends[0])
        rows.append((name, f"{landing.nearest:.8g}", landing.bits,
                     "exact" if exact else _share(landing.nearest - value, value),
                     "" if exact else "out of range" if beyond else _share(gap, value)))
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
    heads = ("format", "rounded to", "bits", "relative error", "relative gap")
    return spec, html_table(heads, rows)


def _share(part: float, whole: float) -> str:
    """Return part / whole in percent, with two digits."""
    return f"{float(f'{100 * part / whole:.2g}'):g}%" if whole else "-"


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: the value of a code, stochastic rounding, the exponent of an MX scale.

def _no_subnormals(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    field, fraction = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    return (1 + fraction) * 2.0 ** (field - 2 ** (exponent_bits - 1) + 1)


def _code(r: Random) -> tuple[int, int, int]:
    exponent_bits, mantissa_bits = r.randint(2, 5), r.randint(1, 3)
    return r.randrange(2 ** (exponent_bits + mantissa_bits)), exponent_bits, mantissa_bits


@exercise("03.value_of", (0, 2, 1), (1, 2, 1), (7, 2, 1), (5, 4, 3), (126, 4, 3), (75, 5, 2),
          draw=_code, mistakes={"with exponent field 0 there is no leading one": _no_subnormals})
def value_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    bias = 2 ** (exponent_bits - 1) - 1
    field, fraction = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
    return (1 + fraction) * 2.0 ** (field - bias) if field else fraction * 2.0 ** (1 - bias)


@exercise("03.stochastic", (1.25, 1.0, 0.2), (1.25, 1.0, 0.3), (3.0, 0.5, 0.0), (0.75, 0.5, 0.6),
          draw=lambda r: (r.uniform(0, 8), r.choice((0.125, 0.5, 1.0, 2.0)), r.random()),
          mistakes={"this rounds to nearest, but `u` must decide":
                        lambda x, step, u: round(x / step) * step,
                    "round up when `u` is below the remainder":
                        lambda x, step, u: (x // step + (u >= x / step - x // step)) * step})
def stochastic(x: float, step: float, u: float) -> float:
    down = x // step
    return (down + (u < x / step - down)) * step


@exercise("03.mx_exponent", (448.0, 8), (1.0, 8), (0.75, 2), (6.5, 2), (1e-3, 15),
          draw=lambda r: (2 ** r.uniform(-30, 30), r.choice((2, 8, 15))),
          mistakes={"the exponent is rounded down":
                        lambda amax, largest: round(math.log2(amax)) - largest,
                    "below 1 exponents are negative":
                        lambda amax, largest: max(round(amax), 1).bit_length() - 1 - largest})
def mx_exponent(amax: float, largest_exponent: int) -> int:
    return math.frexp(amax)[1] - 1 - largest_exponent       # frexp's fraction is in [1/2, 1)


# Exercises: the cast, and the cast of a block.

def _cast(x: Tensor, exponent_bits: int, mantissa_bits: int, largest: float, *,
          subnormals: bool = True, even: bool = True) -> Tensor:
    exponent = torch.frexp(x.double())[1] - 1
    if subnormals:
        exponent = exponent.clamp(min=2 - 2 ** (exponent_bits - 1))
    step = 2.0 ** (exponent - mantissa_bits)
    steps = x.double() / step
    whole = steps.round() if even else steps.sign() * (steps.abs() + 0.5).floor()
    return (whole * step).clamp(-largest, largest).float()


GRIDS = ((4, 3, 448.0), (5, 2, 57344.0), (2, 1, 6.0), (3, 2, 28.0))


@exercise("03.cast", (torch.tensor([1.0, 1.06]), 4, 3, 448.0),
          (torch.tensor([1.0625, 1.1875, -1.0625]), 4, 3, 448.0),
          (torch.tensor([2.0**-9, 2.0**-10, -(2.0**-11), -0.0, 0.0]), 4, 3, 448.0),
          (torch.tensor([449.0, -1e9, math.inf]), 4, 3, 448.0),
          draw=lambda r: (normal(r, 16, size=2.0 ** r.randint(-12, 8)), *r.choice(GRIDS)),
          tolerance=0, stars=3, minutes=20,
          mistakes={"half way goes to the even neighbour": lambda x, e, m, largest:
                        _cast(x, e, m, largest, even=False),
                    "below the smallest normal number the spacing stays":
                        lambda x, e, m, largest: _cast(x, e, m, largest, subnormals=False),
                    "values that are too large become the largest":
                        lambda x, e, m, largest: cast(x, e, m, math.inf)})
def cast(x: Tensor, exponent_bits: int, mantissa_bits: int, largest: float) -> Tensor:
    exponent = torch.frexp(x.double())[1] - 1           # frexp's fraction is in [1/2, 1)
    exponent = exponent.clamp(min=2 - 2 ** (exponent_bits - 1))     # subnormals share a spacing
    step = 2.0 ** (exponent - mantissa_bits)
    whole = torch.round(x.double() / step)              # ties go to the even integer
    return (whole * step).clamp(-largest, largest).float()


def _nearest_scale(x: Tensor) -> Tensor:
    scale = x.abs().amax() / LARGEST if x.any() else torch.tensor(1.0)
    return (x / scale).clamp(-LARGEST, LARGEST).to(FP8).float() * scale


def _scaled_up(x: Tensor) -> Tensor:
    scale = 2.0 ** torch.ceil(torch.log2(x.abs().amax() / LARGEST)) if x.any() else 1.0
    return (x / scale).to(FP8).float() * scale


@exercise("03.mx_cast", (torch.ones(32),), (torch.arange(32.0),), (torch.zeros(32),),
          draw=lambda r: (normal(r, 32, size=10 ** r.uniform(-4, 4)),), tolerance=0, stars=2,
          minutes=10,
          mistakes={UNCLAMPED: lambda x: mx_cast(x).masked_fill(     # 464 in units of the scale
                        x.abs() > 464 * 2.0 ** (torch.frexp(x.abs().amax())[1] - 9), math.nan),
                    "the scale is a power of two": _nearest_scale,
                    "OCP rounds the scale down, and values above 448 then saturate": _scaled_up})
def mx_cast(x: Tensor) -> Tensor:
    scale = 2.0 ** (torch.frexp(x.abs().amax())[1] - 1 - 8.0)   # 2^8 <= amax / scale < 2^9
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _dice(r: Random) -> tuple[Tensor, Tensor]:
    return (normal(r, 16, size=10 ** r.uniform(-6, 6)),
            torch.tensor([r.randrange(2**16) for _ in range(16)], dtype=torch.int32))


@exercise("03.stochastic_bf16",
          (torch.tensor([1.001953125]), torch.tensor([2**15], dtype=torch.int32)),
          (torch.tensor([-1.001953125, 1.0, -0.0, 1.99999]),
           torch.tensor([2**16 - 1] * 4, dtype=torch.int32)), draw=_dice, tolerance=0, stars=2,
          minutes=10,
          mistakes={"nearest never uses the dice": lambda x, dice: x.bfloat16().float(),
                    "dice of 0 round toward zero, large ones away from it": lambda x, dice:
                        (x.view(torch.int32) - dice & -(2**16)).view(torch.float32)})
def stochastic_bf16(x: Tensor, dice: Tensor) -> Tensor:
    bits = x.view(torch.int32) + dice           # a carry into the exponent is correct
    return (bits & -(2**16)).view(torch.float32)
