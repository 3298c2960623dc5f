"""Figures of the bytes of a training step: by moment of the closed form; as measured, event by
event, with those moments as markers; and the bytes that techniques save over the time that they
cost."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lessons.figures.colours import ROLE_COLOURS, WARNING
from lessons.figures.drawing import BYTES, NAMES, axis, bars, box, figure, note, rule, scatter
from lpkit.errors import ConfigError
from lpkit.predict import walk
from lpkit.predict.ledger import MOMENTS, Memory
from lpkit.predict.units import quantity
from lpkit.tables import FAINT, INK

ROW_COLOURS = {   # related rows have related colours
    "weights": ROLE_COLOURS["w"], "master weights": "#4d7eb3", "optimizer state": "#a5d8f0",
    "gradients": "#6b7280", "gathered weights": "#b8860b", "weight copies": "#ddaa33",
    "activations": ROLE_COLOURS["x"], "recomputed block": "#e0a3ad", "logits and loss": "#1f7a6f",
    "logits' gradients": "#8fd0c6", "low-precision weights": "#cc9966", "scales": "#996633",
    "amax histories": "#663300", "communication buffers": "#808000", "temporaries": "#bbbbbb",
    "optimizer temporaries": "#888888", "batch": "#000000", "transposed copies": "#e6c79c",
    "attention workspace": "#7b5ea7", "allocator": "#e5e5e5", "buffers": "#4b3f72",
}
SENT_COLOURS = {"all-reduce": ROLE_COLOURS["w"], "reduce-scatter": ROLE_COLOURS["x"],
                "all-gather": "#b8860b"}


# By formula.

def limit_of(held: Memory) -> float | None:
    """Return the device's bytes if they can be drawn; None if they are so large that the bars would
    be squeezed."""
    limit = held.memory_bytes
    return limit if limit and held.peak_bytes > 0.1 * limit else None


def stacked_figure(names: Sequence[str], rows: Mapping[str, Sequence[float | None]], *,
                   title: str = "", axis_title: str = "bytes per device",
                   about: Mapping[str, str] | None = None, predicted: Sequence[float] = (),
                   limit: float | None = None) -> dict:
    """The plotly spec of bytes by row, one bar per name. `about`: hover texts of the rows; `said`:
    the sum of each bar by a formula, a diamond; `limit`: the device's bytes."""
    data, about = [], about or {}
    for row, sizes in rows.items():
        data.append(bars(names, sizes, row, {**ROW_COLOURS, **SENT_COLOURS}[row],
                         textposition="inside",
                         text=["" if size is None else quantity(size, "bytes") for size in sizes],
                         hover=f"{row}: %{{text}}<extra>{about.get(row, '')}</extra>"))
    most = max((sum(filter(None, sizes)) for sizes in zip(*rows.values())), default=0)
    shapes = []
    if limit:
        shapes = [rule(x=limit, colour=INK if most <= limit else WARNING, width=2, dash="dash")]
    if predicted:
        data.append(scatter(predicted, names, "predicted", mode="markers", hover="%{x:.4s}B",
                            marker={"symbol": "diamond", "size": 11, "color": "#ffffff",
                                    "line": {"width": 2, "color": INK}}))
    below = 21 * math.ceil(len(data) / 4)
    return figure(
        data, title, height=120 + 46 * len(names) + below, barmode="stack", bargap=0.35,
        shapes=shapes, yaxis=NAMES,
        # below the plot, since many rows would overlap the title
        legend={"yref": "container", "y": 0, "yanchor": "bottom"}, margin={"b": 60 + below},
        xaxis=axis(axis_title, **BYTES, range=[0, 1.08 * max(most, limit or 0, *predicted)]))


# As measured. The horizontal axis counts events, not seconds, so a forward pass and its backward
# pass have similar widths. A point has `phase` (forward, backward, optimizer), `module`
# ("blocks.3.mlp.up"; empty between modules) and `rows`, bytes by name:
# lpkit.measure.tracking.Point.

MAX_POINTS = 400
PHASES = {"forward": "#ffffff", "backward": "#f3f4f6", "optimizer": "#e5e7eb"}
# shares of the axis: narrower stretches get no name, narrower blocks no number
WORD, NUMBER = 0.075, 0.014
BEGINS, OUTSIDE = ("loss",), ("head", "norm")      # modules at work in the moments LOSS and HEAD
NOBODYS = ("", "gradient")      # no module: between modules, or a gradient reaches its parameter

Points = Sequence[Any]
Places = Sequence[tuple[str, str]]      # phase and part of the model, by point


def timeline_figure(points: Points, *, formula: Memory | None = None, title: str = "",
                    highest: float | None = None) -> dict:
    """The plotly spec of live bytes, stacked by row. `formula`: its moments are diamonds over the
    largest point of the same part of the step. `highest`: bytes at the top of the axis, to compare
    figures. Raises ConfigError without points."""
    if not points:
        raise ConfigError("a timeline needs at least one point; "
                          "`lpkit.measure.memory(config).timeline` has them")
    size = -(-len(points) // MAX_POINTS)      # the largest of `size` neighbours is kept
    points = [max(points[i:i + size], key=total_bytes) for i in range(0, len(points), size)]
    x, totals, places = range(len(points)), list(map(total_bytes, points)), _places(points)
    data = []
    for row, colour in ROW_COLOURS.items():
        held = [point.rows.get(row, 0) for point in points]
        if any(held):
            data.append(scatter(x, held, row, colour, stackgroup="rows", fillcolor=colour,
                                line={"width": 0, "shape": "hv"}, hover=None))
    data.append(scatter(x, totals, "", INK, line={"width": 1, "shape": "hv"}, showlegend=False,
                        text=list(map(_words, points)), hover="%{text}"))
    top = max(totals)
    predicted = list(_predicted(places, totals, formula)) if formula else []
    if predicted:
        at, sizes, words = zip(*predicted)
        top = max(top, *sizes)
        data.append(scatter(at, sizes, "formula", mode="markers", text=words, hover="%{text}",
                            marker={"symbol": "diamond", "size": 10, "color": "#ffffff",
                                    "line": {"width": 2, "color": INK}}))
    shapes, annotations = _phases(places)
    annotations.append(_peak(points, totals))
    return figure(
        data, title, height=470, shapes=shapes, annotations=annotations,
        xaxis=axis("allocations and frees of one step, in order, and the block at work",
                   showgrid=False, range=[0, len(points) - 1], zeroline=False, **_ticks(places)),
        yaxis=axis("live bytes", **BYTES, range=[0, 1.16 * (highest or top)]))


def total_bytes(point: Any) -> int:
    return sum(point.rows.values())


def _words(point: Any) -> str:
    rows = sorted(((nbytes, row) for row, nbytes in point.rows.items()
                   if nbytes >= 1e-3 * total_bytes(point)), reverse=True)
    return "<br>".join([f"<b>{escape(point.phase)} {escape(point.module)}</b>",
                        *(f"{escape(row)}: {quantity(nbytes, 'bytes')}" for nbytes, row in rows)])


def _places(points: Points) -> Places:
    """Return phase and part of the model by point: "blocks.3" or the name of a module outside the
    blocks. Events without a module (accumulating gradients, frees) belong to the previous part;
    updates during backward belong to backward."""
    last = max((i for i, point in enumerate(points) if point.phase == "backward"), default=-1)
    places, part = [], ""
    for i, point in enumerate(points):
        phase = point.phase
        if point.module not in NOBODYS:
            names = point.module.split(".")
            part = ".".join(names[:2]) if names[0] == "blocks" else names[0]
        elif phase == "optimizer" and i > last:
            part = "optimizer"
        if phase == "optimizer" and i < last:
            phase = "backward"
        places.append((phase, part))
    return places


def _predicted(places: Places, totals: Sequence[int],
               formula: Memory) -> Iterator[tuple[int, float, str]]:
    """Yield the place of each moment, its bytes, and its text."""
    blocks = sorted({part for _, part in places if part.startswith("blocks.")},
                    key=lambda part: int(part.split(".")[1]))
    parts = {walk.HEAD: OUTSIDE, walk.LAST: blocks[-1:], walk.FIRST: blocks[:1]}

    def belongs(phase: str, part: str, moment: str) -> bool:
        if moment == walk.UPDATE:
            return phase == "optimizer"
        if moment == walk.LOSS:       # a chunked loss makes its gradients in forward
            return part in BEGINS
        if moment == walk.EMBED:
            return phase == "backward" and part not in (*BEGINS, *OUTSIDE, *blocks)
        return phase == "backward" and part in parts[moment]

    for moment, words in MOMENTS.items():
        at = [i for i, place in enumerate(places) if belongs(*place, moment)]
        nbytes = sum(formula.at(moment).values())
        if at and nbytes:
            yield (max(at, key=totals.__getitem__), nbytes,
                   f"{moment}: {quantity(nbytes, 'bytes')}<br>{escape(words)}")


def _peak(points: Points, totals: Sequence[int]) -> dict:
    """Return an arrow to the largest point, with its bytes and its module."""
    peak = max(range(len(points)), key=totals.__getitem__)
    modules = [point.module for point in points[:peak + 1] if point.module not in NOBODYS]
    place = ", ".join([points[peak].phase, *modules[-1:]])
    across, side = ("right", -1) if peak > len(points) / 2 else ("left", 1)
    words = f"{quantity(totals[peak], 'bytes')}, {escape(place)}"
    return {**note(words, peak, totals[peak], f"{across} auto",
                   font={"size": 12, "color": INK}), "showarrow": True, "ax": 14 * side,
            "ay": -16, "arrowhead": 0, "arrowcolor": FAINT}


def _stretches(keys: Iterator[str]) -> Iterator[tuple[str, int, int]]:
    """Yield each key that repeats, with its start and end."""
    start = 0
    for key, group in itertools.groupby(keys):
        end = start + len(list(group))
        yield key, start, end
        start = end


def _phases(places: Places) -> tuple[list[dict], list[dict]]:
    """Return the phases as bands with names."""
    shapes, annotations = [], []
    for phase, start, end in _stretches(phase for phase, _ in places):
        shapes.append(box(start, end, 0, 1, fill=PHASES[phase], yref="paper", layer="below"))
        if end - start >= WORD * len(places):
            annotations.append(note(phase, (start + end) / 2, 1, "center top", yref="paper",
                                    bgcolor=None, font={"size": 12, "color": FAINT}))
    return shapes, annotations


def _ticks(places: Places) -> dict:
    """Return a tick for each part of the model that is wide enough for its name."""
    ticks = {}
    for part, start, end in _stretches(part for _, part in places):
        if end - start >= len(places) * (NUMBER if part.startswith("blocks.") else WORD):
            ticks[(start + end) / 2] = part.removeprefix("blocks.")
    return {"tickmode": "array", "tickvals": list(ticks), "ticktext": list(ticks.values()),
            "tickangle": 0, "ticks": ""}
