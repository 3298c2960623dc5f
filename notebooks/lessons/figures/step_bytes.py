"""Figures of the bytes of a training step.

`stacked_figure` draws bytes by row of the ledger, one bar per name: for example one bar for each
moment of a step, by formula. `timeline_figure` draws the measured live bytes event by event, with
the formula's moments as markers.
"""

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
    """Return the bytes of the device's memory. Return None if they are unknown, or if the peak is
    at most a tenth of them, so that an axis up to the limit would squeeze the bars."""
    limit = held.memory_bytes
    return limit if limit and held.peak_bytes > 0.1 * limit else None


def stacked_figure(names: Sequence[str], rows: Mapping[str, Sequence[float | None]], *,
                   title: str = "", axis_title: str = "bytes per device",
                   about: Mapping[str, str] | None = None, predicted: Sequence[float] = (),
                   limit: float | None = None) -> dict:
    """Return the plotly spec of stacked horizontal bars of bytes, one bar per name.

    names: the labels of the bars
    rows: for each row of the ledger (a key of ROW_COLOURS) or kind of message (a key of
        SENT_COLOURS), its bytes in each bar; None: the row is not in that bar
    about: hover texts of rows
    predicted: the sum of each bar by a formula, drawn as a diamond
    limit: bytes of the device's memory, drawn as a dashed line; red if a bar is longer
    """
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


# As measured. The horizontal axis counts allocations and frees, not seconds, so a forward pass and
# its backward pass have similar widths. Each point is a `lpkit.measure.tracking.Point` with `phase`
# (forward, backward, optimizer), `module` ("blocks.3.mlp.up"; "" between modules) and `rows` (live
# bytes by row of the ledger).

MAX_POINTS = 400
PHASES = {"forward": "#ffffff", "backward": "#f3f4f6", "optimizer": "#e5e7eb"}
# the smallest share of the axis that has room for a word, and for the number of a block
WORD, NUMBER = 0.075, 0.014
# modules that run in the formula's moment LOSS, and in its moment HEAD
BEGINS, OUTSIDE = ("loss",), ("head", "norm")
# values of `module` that name no module: between modules; a gradient is added to its parameter's
NOBODYS = ("", "gradient")

Points = Sequence[Any]
Places = Sequence[tuple[str, str]]      # phase and part of the model, by point


def timeline_figure(points: Points, *, formula: Memory | None = None, title: str = "",
                    highest: float | None = None) -> dict:
    """Return the plotly spec of the live bytes of one step, stacked by row of the ledger.

    points: the state after each allocation or free, in order. Of more than MAX_POINTS points, the
        largest of every few neighbours is drawn.
    formula: the prediction; each of its moments is a diamond at the largest point of the same part
        of the step
    highest: bytes at the top of the axis, so that several figures can be compared

    Raises ConfigError without points."""
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
        xaxis=axis("allocations and frees of one step, in order; number: the block that runs",
                   showgrid=False, range=[0, len(points) - 1], zeroline=False, **_ticks(places)),
        yaxis=axis("live bytes", **BYTES, range=[0, 1.16 * (highest or top)]))


def total_bytes(point: Any) -> int:
    """Return the live bytes of a point, over all rows."""
    return sum(point.rows.values())


def _words(point: Any) -> str:
    """Return the hover text of a point: its phase and module, and its rows, the largest first.
    Rows below a thousandth of the total are left out."""
    rows = sorted(((nbytes, row) for row, nbytes in point.rows.items()
                   if nbytes >= 1e-3 * total_bytes(point)), reverse=True)
    return "<br>".join([f"<b>{escape(point.phase)} {escape(point.module)}</b>",
                        *(f"{escape(row)}: {quantity(nbytes, 'bytes')}" for nbytes, row in rows)])


def _places(points: Points) -> Places:
    """Return (phase, part of the model) for each point. A part is "blocks.3", the name of a module
    outside the blocks, or "optimizer".

    A point without a module (a gradient is accumulated, a tensor is freed) belongs to the part of
    the previous point. If the optimizer updates parameters during backward, these points belong to
    backward."""
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
    """Yield (index of a point, bytes, hover text) for each moment of the formula. The index is the
    point with the most bytes in the part of the step that the moment describes. Moments without
    such points are left out."""
    blocks = sorted({part for _, part in places if part.startswith("blocks.")},
                    key=lambda part: int(part.split(".")[1]))
    parts = {walk.HEAD: OUTSIDE, walk.LAST: blocks[-1:], walk.FIRST: blocks[:1]}

    def belongs(phase: str, part: str, moment: str) -> bool:
        if moment == walk.UPDATE:
            return phase == "optimizer"
        if moment == walk.LOSS:       # in any phase: a chunked loss computes gradients in forward
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
    """Return an annotation: an arrow to the point with the most bytes, labelled with the bytes, the
    phase and the last module that ran."""
    peak = max(range(len(points)), key=totals.__getitem__)
    modules = [point.module for point in points[:peak + 1] if point.module not in NOBODYS]
    place = ", ".join([points[peak].phase, *modules[-1:]])
    across, side = ("right", -1) if peak > len(points) / 2 else ("left", 1)
    words = f"{quantity(totals[peak], 'bytes')}, {escape(place)}"
    return {**note(words, peak, totals[peak], f"{across} auto",
                   font={"size": 12, "color": INK}), "showarrow": True, "ax": 14 * side,
            "ay": -16, "arrowhead": 0, "arrowcolor": FAINT}


def _stretches(keys: Iterator[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (key, start, end) for each run of equal neighbouring keys; `end` is exclusive."""
    start = 0
    for key, group in itertools.groupby(keys):
        end = start + len(list(group))
        yield key, start, end
        start = end


def _phases(places: Places) -> tuple[list[dict], list[dict]]:
    """Return the bands in the background that mark the phases, and the annotations that name the
    phases."""
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
