"""One step as it went: live bytes over its makings and ends, stacked by row, with the moments of
the closed form on top.

The horizontal axis counts events, not seconds: a forward pass and the backward pass that undoes it
look alike. A point of a step has `phase` (forward, backward, optimizer), `module`
("blocks.3.mlp.up"; empty between two) and `rows` (bytes by name): `lpkit.measure.tracking.Point`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

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

Points = Sequence[Any]
Places = Sequence[tuple[str, str]]      # phase and part of the model, by point


def timeline_figure(points: Points, *, formula: Memory | None = None, title: str = "",
                    highest: float | None = None) -> dict:
    """The plotly spec. `formula`: its moments, each a diamond over the largest point of that part
    of the step.

    highest: bytes at the top of the axis, to compare figures. Raises ConfigError without points.
    """
    if not points:
        raise ConfigError("a timeline needs at least one point; "
                          "`lpkit.measure.memory(config).timeline` has them")
    size = -(-len(points) // MAX_POINTS)      # of neighbours the largest
    points = [max(points[i:i + size], key=_total) for i in range(0, len(points), size)]
    x, totals, places = range(len(points)), list(map(_total, points)), _places(points)
    rows = [row for row in COLOURS if any(point.rows.get(row) for point in points)]
    data = [scatter(x, [point.rows.get(row, 0) for point in points], row, COLOURS[row],
                    stackgroup="rows", fillcolor=COLOURS[row], line={"width": 0, "shape": "hv"},
                    hover=None) for row in rows]
    data.append(scatter(x, totals, "", INK, line={"width": 1, "shape": "hv"}, showlegend=False,
                        text=list(map(_words, points)), hover="%{text}"))
    tops, predicted = [max(totals)], list(_predicted(places, totals, formula)) if formula else []
    if predicted:
        ats, sizes, words = zip(*predicted)
        tops += sizes
        data.append(scatter(ats, sizes, "formula", mode="markers", text=words, hover="%{text}",
                            marker={"symbol": "diamond", "size": 10, "color": "#ffffff",
                                    "line": {"width": 2, "color": INK}}))
    shapes, annotations = _phases(places)
    annotations.append(_peak(points, totals))
    return figure(
        data, title, height=470, shapes=shapes, annotations=annotations, hovermode="closest",
        xaxis=axis("what is made and freed in one step, in order, and the block at work",
                   showgrid=False, range=[0, len(points) - 1], zeroline=False, **_ticks(places)),
        yaxis=axis("live bytes", exponentformat="SI", ticksuffix="B",
                   range=[0, 1.16 * (highest or max(tops))]))


def timelines_view(steps: Mapping[str, tuple[Points, Memory | None]]) -> Callable[[str], dict]:
    """For an Explorer: a function of `step`, one of the names, on one axis for all."""
    highest = max(_total(point) for points, _ in steps.values() for point in points)

    def show(step: str) -> dict:
        points, formula = steps[step]
        return timeline_figure(points, formula=formula, title=step, highest=highest)

    return show


def _total(point: Any) -> int:
    return sum(point.rows.values())


def _places(points: Points) -> Places:
    """Phase and part of the model by point: "blocks.3" or the name of what is outside the blocks.
    What has no module of its own, gradients that are added up and frees, belongs to what went
    before; updates in backward are backward's."""
    backward = [i for i, point in enumerate(points) if point.phase == "backward"]
    places, part, last = [], "", backward[-1] if backward else -1
    for i, point in enumerate(points):
        updates = point.phase == "optimizer"
        if point.module not in NOBODYS:
            names = point.module.split(".")
            part = ".".join(names[:2]) if names[0] == "blocks" else names[0]
        elif updates and i > last:
            part = "optimizer"
        places.append(("backward" if updates and i < last else point.phase, part))
    return places


def _predicted(places: Places, totals: Sequence[int],
               formula: Memory) -> Iterator[tuple[int, float, str]]:
    """Where each moment is, its bytes, and words."""
    blocks = sorted({part for _, part in places if part.startswith("blocks.")},
                    key=lambda part: int(part.split(".")[1]))
    parts = {walk.HEAD: OUTSIDE, walk.LAST: blocks[-1:], walk.FIRST: blocks[:1]}

    def belongs(phase: str, part: str, moment: str) -> bool:
        if moment == walk.UPDATE:
            return phase == "optimizer"
        if moment == walk.LOSS:       # in chunks its gradients are made in forward
            return part in BEGINS
        if moment == walk.EMBED:
            return phase == "backward" and part not in (*BEGINS, *OUTSIDE, *blocks)
        return phase == "backward" and part in parts[moment]

    for moment in MOMENTS:
        at = [i for i, place in enumerate(places) if belongs(*place, moment)]
        nbytes = sum(formula.at(moment).values())
        if at and nbytes:
            words = f"{moment}: {quantity(nbytes, 'bytes')}<br>{escape(MOMENTS[moment])}"
            yield max(at, key=totals.__getitem__), nbytes, words


def _peak(points: Points, totals: Sequence[int]) -> dict:
    """An arrow to the largest point, with its bytes and the module that was at work."""
    peak = max(range(len(points)), key=totals.__getitem__)
    modules = [point.module for point in points[:peak + 1] if point.module not in NOBODYS]
    place = ", ".join([points[peak].phase, *modules[-1:]])
    across, side = ("right", -1) if peak > len(points) / 2 else ("left", 1)
    return note(f"{quantity(totals[peak], 'bytes')}, {escape(place)}", peak, totals[peak],
                f"{across} auto", ax=14 * side, ay=-16, arrowhead=0, arrowcolor=FAINT,
                font={"size": 12, "color": INK}, bgcolor="rgba(255,255,255,0.8)",
                ) | {"showarrow": True}


def _stretches(keys: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """A key that stays, and from where to where."""
    start = 0
    for key, group in groupby(keys):
        end = start + len(list(group))
        yield key, start, end
        start = end


def _phases(places: Places) -> tuple[list[dict], list[dict]]:
    """Bands with names."""
    shapes, annotations = [], []
    for phase, start, end in _stretches([phase for phase, _ in places]):
        shapes.append(box(start, end, 0, 1, fill=PHASES[phase], yref="paper", layer="below"))
        if end - start >= WORD * len(places):
            annotations.append(note(phase, (start + end) / 2, 1, "center top", yref="paper",
                                    font={"size": 12, "color": FAINT}))
    return shapes, annotations


def _ticks(places: Places) -> dict:
    """A tick where a part of the model begins; names of those that are wide enough."""
    ticks = {}
    for part, start, end in _stretches([part for _, part in places]):
        least = NUMBER if part.startswith("blocks.") else WORD
        if end - start >= least * len(places):
            ticks[(start + end) / 2] = part.removeprefix("blocks.")
    return {"tickmode": "array", "tickvals": list(ticks), "ticktext": list(ticks.values()),
            "tickangle": 0, "ticks": ""}


def _words(point: Any) -> str:
    rows = sorted(((nbytes, row) for row, nbytes in point.rows.items()
                   if nbytes >= 1e-3 * _total(point)), reverse=True)
    return "<br>".join([f"<b>{escape(point.phase)} {escape(point.module)}</b>",
                        *(f"{escape(row)}: {quantity(nbytes, 'bytes')}" for nbytes, row in rows)])
