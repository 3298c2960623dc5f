"""Three goals that cannot all be best, as points to turn and filter; those that no other beats
stand out."""

import math
from collections.abc import Callable, Sequence

from lpkit.predict.frontier import Point, frontier
from lpkit.predict.units import quantity
from lpkit.tables import FAINT, GRID, INK, html_table
from lpkit.ui.draw import axis, figure, scatter
from lpkit.ui.style import COLOURS

LOGARITHMIC = {"type": "log", "dtick": 1}
GOALS = {"days": axis("days", **LOGARITHMIC), "loss": axis("loss (nats a token)", type="linear"),
         "dollars": axis("US dollars", **LOGARITHMIC)}
SYMBOLS = {"formula": "circle", "extrapolated": "circle-open", "measured": "diamond"}
EVERY = "every machine"


def frontier_figure(points: Sequence[Point], *, title: str = "") -> dict:
    """The plotly spec: three axes, days, loss and dollars, one legend entry for each kind of point.
    Drag to turn, click the legend to filter."""
    best = {id(point) for point in frontier(points, least=GOALS)}
    groups: dict[tuple[bool, str], list[Point]] = {}
    for point in points:
        groups.setdefault((id(point) in best, point.where), []).append(point)
    data = []
    for (leads, where), group in sorted(groups.items(), reverse=True):
        marker = {"symbol": SYMBOLS.get(where, "circle"), "size": 4, "color": FAINT, "opacity": 0.6}
        if leads:
            marker |= {"size": 6, "color": COLOURS[0], "opacity": 1.0}
        x, y, z = ([point.values[goal] for point in group] for goal in GOALS)
        data.append(scatter(x, y, f"{'not beaten' if leads else 'beaten'}, {where}", mode="markers",
                            marker=marker, text=[_words(point) for point in group],
                            hover="%{text}<extra></extra>") | {"type": "scatter3d", "z": z})
    scene: dict = {"aspectmode": "cube",
                   "camera": {"eye": {"x": 1.45, "y": 1.45, "z": 0.7}, "center": {"z": -0.2}}}
    for place, goal in zip(("xaxis", "yaxis", "zaxis"), GOALS.values()):
        scene[place] = {**goal, "gridcolor": GRID, "color": INK, "exponentformat": "SI"}
    return figure(data, title, height=560, showlegend=True, margin={"l": 0, "r": 0, "b": 0},
                  scene=scene)


def frontier_view(points: Sequence[Point],
                  ) -> tuple[Callable[..., tuple[dict, str]], dict[str, list]]:
    """A function for an Explorer, and its controls: which machine, and at most how many dollars and
    days.

    show, controls = frontier_view(points); Explorer(show, **controls)
    """
    machines = {point.facts.get("machine", "") for point in points}
    controls = {"machine": [EVERY, *sorted(machines)],
                "dollars_at_most": _steps([point.values["dollars"] for point in points]),
                "days_at_most": _steps([point.values["days"] for point in points])}

    def show(machine: str, dollars_at_most: float, days_at_most: float) -> tuple[dict, str]:
        inside = [point for point in points if machine in (EVERY, point.facts.get("machine"))
                  and point.values["dollars"] <= dollars_at_most
                  and point.values["days"] <= days_at_most]
        best = sorted(frontier(inside, least=GOALS), key=lambda point: point.values["loss"])
        rows = [(point.name, quantity(point.values["days"], "days"), f"{point.values['loss']:.3f}",
                 "$" + quantity(point.values["dollars"]), point.where) for point in best[:12]]
        title = f"{len(best)} of {len(inside)} are not beaten in speed, quality and cost"
        table = html_table(("not beaten", "time", "loss", "cost", "loss is"), rows)
        return frontier_figure(inside, title=title), table

    return show, controls


def _steps(values: Sequence[float]) -> list[float]:
    """Ten limits from all points to few, the widest first; rounded up to two digits."""
    limits = set()
    for value in values:
        unit = 10.0 ** (math.floor(math.log10(value)) - 1)
        limits.add(float(f"{math.ceil(value / unit) * unit:.2g}"))
    ordered = sorted(limits, reverse=True)
    return ordered[::max(1, len(ordered) // 10)]


def _words(point: Point) -> str:
    values = "<br>".join(f"{name.replace('_', ' ')}: {quantity(value)}"
                         for name, value in point.values.items())
    return (f"{point.name}<br>{values}<br>{point.facts.get('layout', '')}<br>"
            f"{point.facts.get('note', point.where)}")
