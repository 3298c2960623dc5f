"""A fault that somebody hid: the losses with it and without, the map from which a layer is accused,
and how bisection came to its verdict."""

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets
import traitlets

from lpkit.tables import FAINT, FONT, TEXT
from lpkit.ui.controls import WIDE, Explorer
from lpkit.ui.draw import NAMES, axis, figure, heat, note, scatter
from lpkit.ui.figure import Stored
from lpkit.ui.style import COLOURS, WARNING

NOTHING = "what was done"      # an answer that is none


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


class Accusation(Stored, widgets.VBox):
    """Telemetry to look at, a row of whose map is accused by a click, a menu of faults, and a
    button. `.value` is (layer, fault) as it stands, each empty until it is chosen; `.answer` is the
    same once the button was pressed, and None until then."""

    value = traitlets.Tuple(("", ""), help="layer and fault, as they stand")
    answer = traitlets.Tuple(None, allow_none=True, help="layer and fault, once accused")

    def __init__(self, explorer: Explorer, faults: Collection[str]):
        self.explorer, self.figure = explorer, explorer.figure
        self.words = widgets.HTML(layout={"flex": "1 1 300px", "min_width": "0"})
        self.fault = widgets.Dropdown(
            options=[(NOTHING, ""), *((name, name) for name in faults)],
            layout={"width": "220px"})
        self.button = widgets.Button(description="Accuse", icon="gavel",
                                     layout={"width": "120px"})
        bar = widgets.HBox([self.words, self.fault, self.button], layout={
            "flex_flow": "row wrap", "align_items": "center", "padding": "4px 12px", **WIDE})
        super().__init__([explorer, bar], layout=WIDE)
        explorer.figure.observe(self._clicked, names="clicked")
        explorer.controls["layer"].observe(self._chosen, names="value")
        self.fault.observe(lambda change: self._stands(self.value[0], change["new"]), names="value")
        self.button.on_click(self._accuse)
        self._say()

    def _clicked(self, change: dict) -> None:
        if change["new"].get("curve") == 0:
            self._stands(change["new"]["y"], self.value[1])

    def _chosen(self, change: dict) -> None:
        self._stands(change["new"], self.value[1])

    def _stands(self, layer: str, fault: str) -> None:
        if self.answer is None:
            self.value = layer, fault
            self._say()

    def _accuse(self, _button: Any) -> None:
        if all(self.value):
            self.answer = self.value
            self.button.disabled = self.fault.disabled = True
        self._say(missing=True)

    def _say(self, missing: bool = False) -> None:
        layer, fault = (f"<b>{escape(word)}</b>" if word else "" for word in self.value)
        if self.answer is not None:
            said = f"You accuse {layer} of {fault}."
        elif missing and layer:
            said = f"{layer}: say what was done to it, then accuse."
        elif layer:
            said = f"The accused: {layer}"
        else:
            said = "Click into the map: the row is the layer that you accuse."
        self.words.value = f'<div style="font:14px {FONT};color:{TEXT}">{said}</div>'


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
