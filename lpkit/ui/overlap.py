"""When ranks compute, and when their messages are under way, drawn."""

from collections.abc import Mapping, Sequence
from typing import Any

from lpkit.predict.units import quantity
from lpkit.ui.draw import SECONDS, axis, bars, figure
from lpkit.ui.memory import SENT_COLOURS

COMPUTING_COLOURS = {"forward": "#d1d5db", "backward": "#9ca3af", "update": "#6b7280"}
LANE, GAP = 0.38, 0.5       # of a rank's row; between two ways


def overlap_figure(timelines: Mapping[str, Sequence[Any]], *, title: str = "",
                   others: float = 0.0) -> dict:
    """The plotly spec. `timelines`: by name, those of the ranks (lpkit.measure.overlap.Timeline). A
    row for each rank: above what it computes, and blank where it waits; below its messages."""
    rows: dict[float, str] = {}
    at: dict[str, list[tuple[float, Any]]] = {kind: [] for kind in COMPUTING_COLOURS | SENT_COLOURS}
    for group, (name, ranks) in enumerate(timelines.items()):
        for rank, one in enumerate(ranks):
            y = len(rows) + GAP * group
            rows[y] = f"{name}, rank {rank}"
            for span in one.spans:
                at[span.kind].append((y, span))
    data = []
    for kind, found in at.items():
        if not found:
            continue
        colour, above = {**COMPUTING_COLOURS, **SENT_COLOURS}[kind], kind in COMPUTING_COLOURS
        data.append(bars(
            [y for y, _ in found], [1e3 * (span.end - span.start) for _, span in found], kind,
            marker={"color": colour, "line": {"color": "#ffffff", "width": 0.5}},
            base=[1e3 * span.start for _, span in found], width=LANE,
            offset=-LANE if above else 0.0, textposition="none",
            customdata=[f", {quantity(span.nbytes, 'bytes')}" if span.nbytes else ""
                        for _, span in found],
            hover="%{x:.2f} ms%{customdata}", **SECONDS))
    return figure(
        data, title, others=others, height=110 + 34 * len(rows), barmode="overlay",
        xaxis=axis("ms since the first rank began", rangemode="nonnegative"),
        yaxis={"tickvals": list(rows), "ticktext": list(rows.values()), "ticks": "",
               "showgrid": False, "zeroline": False, "range": [max(rows) + 0.6, -0.6]})
