"""Widgets that ask for a number, or for one of several words, before the run gives it.

They hold a value and show it; they neither compute nor wait. The cell below reads `.value`, which
is set from the start, so that a headless run goes straight through.
"""

import math
from collections.abc import Sequence
from html import escape

import ipywidgets as widgets
import traitlets

from lpkit.errors import ConfigError
from lpkit.tables import FONT, INK


class Guess(widgets.VBox):
    """A question, a slider on a log scale from `low` to `high`, and a field to type into. `.value`
    is in `unit`."""

    value = traitlets.Float(help="the guess, between low and high")

    def __init__(self, question: str, *, unit: str, low: float, high: float,
                 value: float | None = None):
        if not 0 < low < high < math.inf:
            raise ConfigError(f"Guess needs 0 < low < high on its log scale, got low={low} and "
                              f"high={high}")
        value = _round((low * high) ** 0.5) if value is None else value
        if not low <= value <= high:
            raise ConfigError(f"Guess starts at value={value}, outside low={low} to high={high}")
        self.unit, self.low, self.high = unit, low, high
        text = _asked(question)
        self.slider = widgets.FloatLogSlider(
            value=value, min=math.log10(low), max=math.log10(high), step=0.01, readout=False,
            description="your guess", style={"description_width": "90px"},
            layout=widgets.Layout(width="460px"))
        self.field = widgets.BoundedFloatText(value=value, min=low, max=high, step=None,
                                              layout=widgets.Layout(width="130px"))
        row = widgets.HBox([self.slider, self.field, widgets.Label(unit)])
        super().__init__([text, row], layout=widgets.Layout(padding="4px 12px"), value=value)
        self.slider.observe(self._moved, names="value")
        self.field.observe(self._typed, names="value")
        self.observe(self._set, names="value")

    @traitlets.validate("value")
    def _bounded(self, proposal) -> float:
        return min(max(proposal["value"], self.low), self.high)

    def _moved(self, change) -> None:
        # a typed value lies between two steps
        if not math.isclose(change["new"], self.value, rel_tol=0.02):
            self.value = _round(change["new"])

    def _typed(self, change) -> None:
        self.value = change["new"]

    def _set(self, change) -> None:
        self.slider.value, self.field.value = change["new"], change["new"]

    def _repr_mimebundle_(self, **kwargs) -> dict:
        return {**super()._repr_mimebundle_(**kwargs), "text/plain": f"your guess: {self.value:g} "
                f"{self.unit}"}


class Pick(widgets.VBox):
    """A question and the answers to choose from. `.value` is one of them; the first, until somebody
    chooses."""

    value = traitlets.Unicode(help="the answer that is chosen")

    def __init__(self, question: str, answers: Sequence[str]):
        if not answers:
            raise ConfigError("Pick needs at least one answer to choose from")
        self.buttons = widgets.ToggleButtons(options=list(answers), style={"button_width": "auto"},
                                             layout=widgets.Layout(width="100%"))
        super().__init__([_asked(question), self.buttons],
                         layout=widgets.Layout(padding="4px 12px"), value=answers[0])
        widgets.link((self, "value"), (self.buttons, "value"))

    def _repr_mimebundle_(self, **kwargs) -> dict:
        return {**super()._repr_mimebundle_(**kwargs), "text/plain": f"your guess: {self.value}"}


def _asked(question: str) -> widgets.HTML:
    return widgets.HTML(f"<div style='font:600 14px "
                        f"{FONT};color:{INK};line-height:1.5'>{escape(question)}</div>")


def _round(value: float) -> float:
    return float(f"{value:.3g}")
