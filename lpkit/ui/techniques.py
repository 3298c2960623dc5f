"""Bytes bought against time paid, a point for each technique, and the bits of what is saved against
the gradient's error."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from lpkit.errors import ConfigError
from lpkit.predict.units import quantity
from lpkit.tables import FAINT, INK
from lpkit.ui.draw import axis, figure, rule, scatter
from lpkit.ui.style import COLOURS

# pixels of the axes, about: where names go is decided here, and the browser draws them
INSIDE = (820, 420)
HIGH, WIDE = 16, 6.6    # pixels of a name, and of a letter
# by plotly's name: where the middle of a name is, in its width and height
ANCHORS: dict[str, tuple[float, float]] = {
    "middle right": (0.5, 0), "middle left": (-0.5, 0), "top center": (0, 1),
    "bottom center": (0, -1), "top right": (0.5, 0.9), "bottom right": (0.5, -0.9),
    "top left": (-0.5, 0.9), "bottom left": (-0.5, -0.9)}

Points = Mapping[str, tuple[float, float]]  # by technique: percent of time more, bytes less
Box = tuple[float, float, float, float]     # left, low, right, high; pixels


def bought_figure(predicted: Mapping[str, tuple[float, float | None]], measured: Points, *,
                  plain: str = "plain", title: str = "") -> dict:
    """The plotly spec. Both by name: bytes at the peak, and time as a multiple of the plain step's,
    None without a formula: such a prediction is a dash at the measured time. Edge: what no other
    technique beats in both, as measured.

    Raises ConfigError when `plain` is not among them.
    """
    if plain not in predicted or plain not in measured:
        raise ConfigError(f"what is bought is counted from {plain!r}, and it is missing")
    most = measured[plain][0]
    at = {name: (100 * (time - 1), most - size)
          for name, (size, time) in measured.items() if name != plain}
    timed, untimed = {}, {}
    for name in at:
        if name in predicted:
            size, time = predicted[name]
            less = predicted[plain][0] - size
            if time is None:
                untimed[name] = (at[name][0], less)
            else:
                timed[name] = (100 * (time - 1), less)
    said = timed | untimed
    xs, ys = zip((0, 0), (1, 1), *at.values(), *said.values())
    wide, high = max(xs) - min(xs), max(ys) - min(ys)
    x_range = [min(xs) - 0.12 * wide, max(xs) + 0.25 * wide]
    y_range = [min(ys) - 0.08 * high, max(ys) + 0.1 * high]
    edge = _edge(at)
    joined = [point for name in said for point in (at[name], said[name], (None, None))]
    names = {"mode": "markers+text", "text": [escape(name) for name in at],
             "textfont": {"size": 12, "color": INK}, "cliponaxis": False,
             "textposition": list(_positions(at, said, edge, x_range, y_range))}
    data = [
        scatter([at[name][0] for name in edge], [at[name][1] for name in edge],
                "not beaten by another", COLOURS[1], line={"width": 3, "shape": "hv"}, hover=None),
        scatter([x for x, _ in joined], [y for _, y in joined], colour=FAINT, line={"width": 1.5},
                showlegend=False, hover=None),
        _points("formula", timed, "circle-open", COLOURS[0]),
        _points("formula for the bytes alone", untimed, "line-ew-open", COLOURS[0]),
        _points("measured", at, "circle", COLOURS[4]) | names,
    ]
    return figure(
        [trace for trace in data if trace["x"]], title, height=560,
        xaxis=axis("time of a step, over plain", range=x_range, ticksuffix="%", zeroline=False),
        yaxis=axis(f"bytes less than plain's {quantity(most, 'bytes')}", range=y_range,
                   exponentformat="SI", ticksuffix="B", zeroline=False),
        shapes=[rule(x=0, layer="below"), rule(y=0, layer="below")])


def bits_figure(formula: Callable[[int], float], measured: Mapping[int, float], *,
                title: str = "") -> dict:
    """The plotly spec: an error by bits, on a log scale."""
    bits = list(range(min(measured), max(measured) + 1))
    words = "%{x} bits: %{y:.2g}"
    return figure(
        [scatter(bits, map(formula, bits), "formula", COLOURS[0], hover=words),
         scatter(measured, measured.values(), "measured", COLOURS[4], mode="markers",
                 marker={"size": 11}, hover=words)],
        title, height=340, xaxis=axis("bits of a saved number", tickvals=bits),
        yaxis=axis("error of the gradient, relative", type="log", dtick=1))


def _points(name: str, points: Points, symbol: str, colour: str) -> dict:
    words = [f"{escape(technique)}: {quantity(less, 'bytes')} less, {more:+.0f}% time"
             for technique, (more, less) in points.items()]
    return scatter([x for x, _ in points.values()], [y for _, y in points.values()], name, colour,
                   mode="markers", customdata=words, hover="%{customdata}",
                   marker={"symbol": symbol, "size": 11, "line": {"width": 2, "color": colour}})


def _edge(at: Points) -> list[str]:
    """Those that save more than all that cost less, from cheap to dear."""
    best, edge = 0.0, []
    for name in sorted(at, key=lambda name: (at[name][0], -at[name][1])):
        if at[name][1] > best:
            best = at[name][1]
            edge.append(name)
    return edge


def _positions(at: Points, said: Points, edge: Sequence[str], x_range: Sequence[float],
               y_range: Sequence[float]) -> Iterator[str]:
    """For each name the side of its point on which it covers least: other names, points, and
    lines."""
    def pixel(point: tuple[float, float]) -> tuple[float, float]:
        return tuple(size * (value - low) / (high - low)
                     for size, value, (low, high) in zip(INSIDE, point, (x_range, y_range)))

    taken = []
    for name in at:
        (x, y), (u, v) = pixel(at[name]), pixel(said.get(name, at[name]))
        taken.append((min(x, u) - 7, min(y, v) - 7, max(x, u) + 7, max(y, v) + 7))
    # to the right, then up
    for (x, y), (u, v) in itertools.pairwise(pixel(at[name]) for name in edge):
        taken += [(x, y - 2, u, y + 2), (u - 2, y, u + 2, v)]
    for name in at:
        boxes = {anchor: _box(*pixel(at[name]), WIDE * len(name), anchor) for anchor in ANCHORS}
        best = min(boxes, key=lambda anchor: _hidden(boxes[anchor], taken))
        taken.append(boxes[best])
        yield best


def _box(x: float, y: float, width: float, anchor: str) -> Box:
    x, y = x + ANCHORS[anchor][0] * (width + 20), y + ANCHORS[anchor][1] * HIGH
    return x - width / 2, y - HIGH / 2, x + width / 2, y + HIGH / 2


def _hidden(box: Box, others: Sequence[Box]) -> float:
    """Square pixels, those outside the axes too."""
    left, low, right, high = box
    area = HIGH * (max(0.0, -left) + max(0.0, right - INSIDE[0] - 20))
    for a, b, c, d in others:
        area += max(0.0, min(right, c) - max(left, a)) * max(0.0, min(high, d) - max(low, b))
    return area
