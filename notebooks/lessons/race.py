"""Runs of several recipes on one model, one after the other, drawn while they train."""

from collections.abc import Collection, Mapping
from html import escape
from typing import Any

from lessons.figures.colours import lines_of
from lessons.figures.drawing import axis, figure, scatter


def race_figure(losses: Mapping[str, Mapping[int, float]], *, title: str = "",
                planned_steps: int | None = None, paired: Collection[str] | None = None) -> dict:
    """Return the plotly spec of runs while they train. Upper panel: training loss over steps. Lower
    panel: how many percent each loss is above the first run's loss in the same step.

    losses: for each run, its losses in nats per token by step
    planned_steps: the end of the step axis
    paired: the names of the runs that use the same batches as the first run; None: all runs. Only
        these are in the lower panel. Without a second such run, there is no lower panel.
    """
    base, first = next(iter(losses.items()), ("the first", {}))
    compared = paired is None or len(paired) > 1
    data: list[dict] = []
    lines = lines_of(losses)
    for name, curve in losses.items():
        above = {}
        if paired is None or name in paired:
            above = {step: 100 * (loss / first[step] - 1)
                     for step, loss in curve.items() if step in first}
        shared = {"name": escape(name), "line": lines[name], "legendgroup": name}
        data.append(scatter(curve, curve.values(), hover="step %{x}: %{y:.4f}", **shared))
        if compared:
            data.append(scatter(above, above.values(), hover="step %{x}: %{y:+.2f}%",
                                showlegend=False, xaxis="x2", yaxis="y2", **shared))
    left: dict[str, Any] = {"domain": [0, 1]}
    if planned_steps:
        left |= {"range": [0, planned_steps], "autorange": False}
    if not compared:
        return figure(data, title, height=380, uirevision="race", margin={"t": 112},
                      legend={"y": 1.07}, xaxis=axis("step", **left), yaxis=axis("training loss"))
    return figure(
        data, title, height=500, uirevision="race", margin={"t": 112, "r": 70}, legend={"y": 1.07},
        xaxis={**left, "anchor": "y", "matches": "x2", "showticklabels": False},
        yaxis=axis("training loss", domain=[0.54, 1]), xaxis2=axis("step", anchor="y2", **left),
        yaxis2=axis(f"% above {escape(base)}", domain=[0, 0.44], anchor="x2"))
