"""A fault that somebody hid: the losses with it and without, the map from which a layer is accused,
and how bisection came to its verdict."""

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets
import traitlets

from lpkit.tables import FAINT
from lpkit.ui.controls import Explorer
from lpkit.ui.draw import NAMES, axis, figure, heat, note, scatter
from lpkit.ui.figure import Stored
from lpkit.ui.questions import Question
from lpkit.ui.style import COLOURS, WARNING

NOBODY, NOTHING = "Click a row of the map", "what was done"      # answers that are none


def case_figure(losses: Mapping[str, Sequence[float]], *, title: str = "") -> dict:
    """The plotly spec of losses (nats per token) by the name of their run. A run that broke ends
    where it did, with a word."""
    lines, notes = [], []
    for i, (name, curve) in enumerate(losses.items()):
        whole = [loss if math.isfinite(loss) else None for loss in curve]
        steps = list(range(1, 1 + len(whole)))
        lines.append(scatter(steps, whole, escape(name), COLOURS[(0, 2, 4)[i % 3]],
                             mode="lines+markers", marker={"size": 5}, line={"width": 2},
                             hover="step %{x}: %{y:.3f} nats"))
        if None in whole:
            at = whole.index(None)
            notes.append(note(f"{escape(name)}: NaN from step {steps[at]} on", 1,
                              1.02 + 0.08 * len(notes), "right bottom", xref="paper",
                              yref="paper", font={"color": WARNING}))
    return figure(lines, title, height=340, annotations=notes, xaxis=axis("step"),
                  yaxis=axis("loss (nats per token)"))


class Accusation(Stored, Question):
    """Telemetry to look at, a row of whose map is accused by a click, and a menu of faults.
    `.value` is "fault in layer", and None until both are chosen."""

    value = traitlets.Unicode(None, allow_none=True)

    def __init__(self, question: str, explorer: Explorer, faults: Collection[str]):
        self.explorer, self.figure, self.layer = explorer, explorer.figure, ""
        self.fault = widgets.Dropdown(
            options=[(NOTHING, ""), *((name, name) for name in faults)], description=NOBODY,
            style={"description_width": "initial"}, layout={"max_width": "100%"})
        super().__init__(question, [self.fault], None)
        self.children = [self.children[0], explorer, *self.children[1:]]
        explorer.figure.observe(self._clicked, names="clicked")
        explorer.controls["layer"].observe(lambda change: self._accuse(change["new"]), "value")
        self.fault.observe(lambda _: self._accuse(self.layer), "value")

    def _clicked(self, change: dict) -> None:
        if change["new"].get("curve") == 0:
            self._accuse(change["new"]["y"])

    def _accuse(self, layer: str) -> None:
        if not self.locked:
            self.layer, self.fault.description = layer, layer or NOBODY
            self.value = f"{self.fault.value} in {layer}" if layer and self.fault.value else None

    def restore(self, value: float | str, factor: float | None) -> None:
        self.fault.value, _, layer = str(value).partition(" in ")
        self._accuse(layer)
        super().restore(value, factor)

    def judged(self, right: Sequence[str]) -> None:
        """By the answers that are right."""
        self._ends(" or ".join(right), self.value in right)


def search_figure(finding: Any, layers: Sequence[str], *, title: str = "") -> dict:
    """The plotly spec of a `Finding`'s path, run by run: which of `layers` (top: the first) were in
    16 bits, and what of the lost loss that brought back."""
    runs = []
    values, words = ([[gap] * len(finding.path) for _ in layers] for gap in (None, ""))
    for column, trial in enumerate(finding.path):
        runs.append(f"{column + 1}<br>{round(100 * trial.recovery)}%")     # no -0%
        for row, layer in enumerate(layers):
            products = [product for name, product in trial.promoted if name == layer]
            if products:
                values[row][column] = 100 * trial.recovery
                words[row][column] = "" if len(products) == 3 else ", ".join(products)
    cells = heat(runs, list(layers), values, ends=(0, 100), bar={"title": {"text": "%"}},
                 text=words, texttemplate="%{text}",
                 hovertemplate="%{y} in 16 bits: %{z:.0f}% back<extra></extra>")
    nothing = note("there was no loss to search for", 0.5, 0.5, "center middle", xref="paper",
                   yref="paper", font={"color": FAINT})
    return figure([cells], title, height=140 + 26 * len(layers), showlegend=False,
                  annotations=[] if finding.path else [nothing],
                  xaxis=axis("run, and the share of the lost loss that came back",
                             type="category", showgrid=False, ticks=""),
                  yaxis={**NAMES, "type": "category"})
