"""One step as it went: live bytes over its makings and ends, stacked by row, with the moments of
the closed form on top.

The horizontal axis counts events, not seconds: a forward pass and the backward pass that undoes it
look alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Protocol

from lpkit.errors import ConfigError
from lpkit.predict import walk
from lpkit.predict.ledger import MOMENTS, Memory
from lpkit.predict.units import quantity
from lpkit.tables import FAINT, INK
from lpkit.ui.draw import axis, box, figure, note, scatter
from lpkit.ui.memory import COLOURS

MAX_POINTS = 400
PHASES = {"forward": "#ffffff", "backward": "#f3f4f6", "optimizer": "#e5e7eb"}
# of the axis: narrower stretches go without a name, blocks without their number
WORD, NUMBER = (0.075, 0.014)
BEGINS, OUTSIDE = ("loss",), ("head", "norm")      # moments of backward, by what is at work
NOBODYS = ("", "gradient")      # no module of the model: a gradient reaches its parameter


class Point(Protocol):
    """A moment of a measured or traced step: `lpkit.measure.tracking.Point`."""

    phase: str                  # forward, backward, optimizer
    module: str                 # "blocks.3.mlp.up"; empty between two
    rows: Mapping[str, int]     # bytes


def timeline_figure(points: Sequence[Point], *, formula: Memory | None = None, title: str = "",
                    highest: float | None = None) -> dict:
    """The plotly spec. `formula`: its moments, each a diamond over the largest point of that part
    of the step.

    highest: bytes at the top of the axis, to compare figures. Raises ConfigError without points.
    """
    if not points:
        raise ConfigError("a timeline needs at least one point; "
                          "`lpkit.measure.memory(config).timeline` has them")
    points = _thin(points)
    totals = [sum(point.rows.values()) for point in points]
    peak = max(range(len(points)), key=totals.__getitem__)
    x, places = list(range(len(points))), _places(points)
    rows = [row for row in COLOURS if any(point.rows.get(row) for point in points)]
    data = [scatter(x, [point.rows.get(row, 0) for point in points], row, stackgroup="rows",
                    fillcolor=COLOURS[row], line={"width": 0, "shape": "hv", "color": COLOURS[row]},
                    hover=None) for row in rows]
    data.append(scatter(x, totals, line={"width": 1, "shape": "hv", "color": INK}, showlegend=False,
                        text=[_words(point) for point in points], hover="%{text}"))
    predicted = list(_predicted(points, places, totals, formula)) if formula else []
    if predicted:
        marker = {"symbol": "diamond", "size": 10, "color": "#ffffff",
                  "line": {"width": 2, "color": INK}}
        data.append(scatter([at for at, _, _ in predicted], [nbytes for _, nbytes, _ in predicted],
                            "formula", mode="markers", marker=marker,
                            text=[words for _, _, words in predicted], hover="%{text}"))
    top = 1.16 * (highest or max([totals[peak], *(nbytes for _, nbytes, _ in predicted)]))
    shapes, annotations = _phases(places)
    side = -1 if peak > len(points) / 2 else 1
    annotations.append(note(
        f"{quantity(totals[peak], 'bytes')}, {escape(_place(points, peak))}", x[peak], totals[peak],
        ("right" if side < 0 else "left") + " auto", ax=14 * side, ay=-16, arrowhead=0,
        arrowcolor=FAINT, font={"size": 12, "color": INK}, bgcolor="rgba(255,255,255,0.8)")
                       | {"showarrow": True})
    return figure(
        data, escape(title), height=470, shapes=shapes, annotations=annotations,
        hovermode="closest", x=axis("what is made and freed in one step, in order, and the block "
                                    "at work", showgrid=False, range=[0, len(points) - 1],
                                    zeroline=False, **_ticks(places)),
        y=axis("live bytes", exponentformat="SI", ticksuffix="B", range=[0, top]))


def timelines_view(steps: Mapping[str, tuple[Sequence[Point], Memory | None]]) -> Callable[[str],
                                                                                           dict]:
    """For an Explorer: a function of `step`, one of the names, on one axis for all."""
    highest = max(sum(point.rows.values()) for points, _ in steps.values() for point in points)

    def show(step: str) -> dict:
        points, formula = steps[step]
        return timeline_figure(points, formula=formula, title=step, highest=highest)

    return show


def _thin(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS: of neighbours the largest."""
    size = -(-len(points) // MAX_POINTS)
    return [max(points[i:i + size], key=lambda point: sum(point.rows.values()))
            for i in range(0, len(points), size)]


def _places(points: Sequence[Point]) -> list[tuple[str, str]]:
    """Phase and part of the model by point: "blocks.3" or the name of what is outside the blocks.
    What has no module of its own, gradients that are added up and frees, belongs to what went
    before; updates in backward are backward's."""
    found, part, last = [], "", _last_backward(points)
    for i, point in enumerate(points):
        if point.module not in NOBODYS:
            names = point.module.split(".")
            part = ".".join(names[:2] if names[0] == "blocks" else names[:1])
        elif point.phase == "optimizer" and i > last:
            part = "optimizer"
        found.append(("backward" if point.phase == "optimizer" and i < last else point.phase, part))
    return found


def _predicted(points: Sequence[Point], places: Sequence[tuple[str, str]], totals: Sequence[int],
               formula: Memory) -> Iterator[tuple[int, float, str]]:
    """Where each moment is, its bytes, and words."""
    blocks = sorted({part for _, part in places if part.startswith("blocks.")},
                    key=lambda part: int(part.split(".")[1]))
    first, last = (blocks[0], blocks[-1]) if blocks else ("", "")
    parts = {walk.HEAD: OUTSIDE, walk.LAST: (last,), walk.FIRST: (first,)}
    backward = [i for i, (phase, _) in enumerate(places) if phase == "backward"]
    for moment in MOMENTS:
        if moment == walk.UPDATE:
            at = [i for i, (phase, _) in enumerate(places) if phase == "optimizer"]
        elif moment == walk.LOSS:       # in chunks its gradients are made in forward
            at = [i for i, (_, part) in enumerate(places) if part in BEGINS]
        elif moment == walk.EMBED:
            at = [i for i in backward if places[i][1] not in (*BEGINS, *OUTSIDE, *blocks)]
        else:
            at = [i for i in backward if places[i][1] in parts[moment]]
        nbytes = sum(formula.at(moment).values())
        if at and nbytes:
            words = f"{moment}: {quantity(nbytes, 'bytes')}<br>{escape(MOMENTS[moment])}"
            yield max(at, key=totals.__getitem__), nbytes, words


def _last_backward(points: Sequence[Point]) -> int:
    return max((i for i, point in enumerate(points) if point.phase == "backward"), default=-1)


def _stretches(keys: Sequence) -> Iterator[tuple[object, int, int]]:
    """A key that stays, and from where to where."""
    start = 0
    for key, group in groupby(keys):
        end = start + len(list(group))
        yield key, start, end
        start = end


def _phases(places: Sequence[tuple[str, str]]) -> tuple[list[dict], list[dict]]:
    """Bands with names."""
    shapes, annotations = [], []
    for phase, start, end in _stretches([phase for phase, _ in places]):
        shapes.append(box(start, end, 0, 1, fill=PHASES.get(phase, "#ffffff"), yref="paper",
                          layer="below"))
        if end - start >= WORD * len(places):
            annotations.append(note(phase, (start + end) / 2, 1, "center top", yref="paper",
                                    font={"size": 12, "color": FAINT}))
    return shapes, annotations


def _ticks(places: Sequence[tuple[str, str]]) -> dict:
    """A tick where a part of the model begins; names of those that are wide enough."""
    ticks = []
    for part, start, end in _stretches([part for _, part in places]):
        block, wide = part.startswith("blocks."), (end - start) / len(places)
        if wide >= WORD or (block and wide >= NUMBER):
            ticks.append(((start + end) / 2, part.removeprefix("blocks.")))
    return {"tickmode": "array", "tickvals": [at for at, _ in ticks],
            "ticktext": [name for _, name in ticks], "tickangle": 0, "ticks": ""}


def _place(points: Sequence[Point], i: int) -> str:
    module = next((points[j].module for j in range(i, -1, -1) if points[j].module not in NOBODYS),
                  "")
    return f"{points[i].phase}, {module}".rstrip(", ")


def _words(point: Point) -> str:
    held = sorted(((nbytes, row) for row, nbytes in point.rows.items()
                   if nbytes >= 1e-3 * sum(point.rows.values())), reverse=True)
    return f"<b>{escape(point.phase)} {escape(point.module)}</b><br>" + "<br>".join(
        f"{escape(row)}: {quantity(nbytes, 'bytes')}" for nbytes, row in held)
