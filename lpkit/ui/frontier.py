"""Three goals that cannot all be best, as points to turn and filter; those that no other beats
stand out."""

import math
from collections.abc import Callable, Sequence

from lpkit.predict.frontier import Point, frontier
from lpkit.predict.units import quantity
from lpkit.tables import FAINT, GRID, INK, html_table
from lpkit.ui.draw import axis, figure, scatter
from lpkit.ui.style import COLOURS

TITLES = {"days": "days", "dollars": "US dollars", "loss": "loss (nats a token)",
          "tokens_per_second": "tokens a second"}
SYMBOLS = {"formula": "circle", "extrapolated": "circle-open", "measured": "diamond"}
LINEAR = ("loss",)


def frontier_figure(points: Sequence[Point], *, least: Sequence[str] = ("days", "loss", "dollars"),
                    most: Sequence[str] = (), title: str = "") -> dict:
    """The plotly spec: three axes (x, y, z in the order of `least`, then `most`), one legend entry
    for each kind of point. Drag to turn, click the legend to filter."""
    axes = (*least, *most)[:3]
    best = {id(point) for point in frontier(points, least=least, most=most)}
    groups: dict[tuple[bool, str], list[Point]] = {}
    for point in points:
        groups.setdefault((id(point) in best, point.where), []).append(point)
    data = []
    for (leads, where), some in sorted(groups.items(), reverse=True):
        name = f"{'not beaten' if leads else 'beaten'}, {where}"
        x, y, z = ([point.values[axis] for point in some] for axis in axes)
        marker = {"size": 6 if leads else 4, "symbol": SYMBOLS.get(where, "circle"),
                  "color": COLOURS[0] if leads else FAINT, "opacity": 1.0 if leads else 0.6}
        data.append(scatter(x, y, name, mode="markers", marker=marker,
                            text=[_words(point) for point in some], hover="%{text}<extra></extra>")
                    | {"type": "scatter3d", "z": z})
    scene: dict = {"aspectmode": "cube",
                   "camera": {"eye": {"x": 1.45, "y": 1.45, "z": 0.7}, "center": {"z": -0.2}}}
    for place, name in zip(("xaxis", "yaxis", "zaxis"), axes):
        scene[place] = axis(TITLES.get(name, name.replace("_", " ")), gridcolor=GRID, color=INK,
                            exponentformat="SI", **({"type": "linear"} if name in LINEAR
                                                    else {"type": "log", "dtick": 1}))
    return figure(data, title, height=560, showlegend=True, margin={"l": 0, "r": 0, "b": 0},
                  scene=scene)


def frontier_view(points: Sequence[Point]) -> tuple[Callable[..., tuple[dict, str]],
                                                    dict[str, list]]:
    """A function for an Explorer, and its controls: which machine, and at most how many dollars and
    days.

    show, controls = frontier_view(points); Explorer(show, **controls)
    """
    every = "every machine"
    controls = {
        "machine": [every, *sorted({str(point.facts.get("machine", "")) for point in points})],
        "dollars_at_most": _steps([point.values["dollars"] for point in points]),
        "days_at_most": _steps([point.values["days"] for point in points]),
    }

    def show(machine: str, dollars_at_most: float, days_at_most: float) -> tuple[dict, str]:
        some = [point for point in points
                if machine in (every, point.facts.get("machine"))
                and point.values["dollars"] <= dollars_at_most
                and point.values["days"] <= days_at_most]
        best = frontier(some, least=("days", "loss", "dollars")) if some else ()
        figure = frontier_figure(some, title=f"{len(best)} of {len(some)} are not beaten in speed, "
                                 f"quality and cost")
        rows = [(point.name, quantity(point.values["days"], "days"), f"{point.values['loss']:.3f}",
                 "$" + quantity(point.values["dollars"]), point.where)
                for point in sorted(best, key=lambda point: point.values["loss"])[:12]]
        return figure, html_table(("not beaten", "time", "loss", "cost", "loss is"), rows)

    return show, controls


def _steps(values: Sequence[float]) -> list[float]:
    """Ten limits from all points to few, the widest first; rounded up to two digits."""
    ordered = sorted({_up(value) for value in values}, reverse=True)
    return ordered[::max(1, len(ordered) // 10)]


def _up(value: float) -> float:
    digits = 1 - math.floor(math.log10(value))
    return (math.ceil(value * 10**digits) / 10**digits if digits > 0
            else math.ceil(value / 10**-digits) * 10**-digits)


def _words(point: Point) -> str:
    values = "<br>".join(f"{name.replace('_', ' ')}: {quantity(value)}"
                         for name, value in point.values.items())
    note = point.facts.get("note", point.where)
    return f"{point.name}<br>{values}<br>{point.facts.get('layout', '')}<br>{note}"
