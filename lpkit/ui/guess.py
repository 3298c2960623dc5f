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


class Question(widgets.VBox):
    """A question above the widget that takes the answer, which is `.value`."""

    unit = ""

    def __init__(self, question: str, answer: widgets.Widget, value: float | str):
        style = f"font:600 14px {FONT};color:{INK};line-height:1.5"
        text = widgets.HTML(f"<div style='{style}'>{escape(question)}</div>")
        super().__init__([text, answer], layout={"padding": "4px 12px"}, value=value)

    def _repr_mimebundle_(self, **kwargs) -> dict:
        value = f"{self.value:g} {self.unit}" if self.unit else self.value
        return {**super()._repr_mimebundle_(**kwargs), "text/plain": f"your guess: {value}"}


class Guess(Question):
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
        self.slider = widgets.FloatLogSlider(
            value=value, min=math.log10(low), max=math.log10(high), step=0.01, readout=False,
            description="your guess", style={"description_width": "90px"},
            layout={"width": "460px"})
        self.field = widgets.BoundedFloatText(value=value, min=low, max=high, step=None,
                                              layout={"width": "130px"})
        super().__init__(question, widgets.HBox([self.slider, self.field, widgets.Label(unit)]),
                         value)
        self.slider.observe(self._moved, names="value")
        widgets.link((self, "value"), (self.field, "value"))
        widgets.dlink((self, "value"), (self.slider, "value"))

    @traitlets.validate("value")
    def _bounded(self, proposal) -> float:
        return min(max(proposal["value"], self.low), self.high)

    def _moved(self, change) -> None:
        # a typed value lies between two steps
        if not math.isclose(change["new"], self.value, rel_tol=0.02):
            self.value = _round(change["new"])


class Pick(Question):
    """A question and the answers to choose from. `.value` is one of them; the first, until somebody
    chooses."""

    value = traitlets.Unicode(help="the answer that is chosen")

    def __init__(self, question: str, answers: Sequence[str]):
        if not answers:
            raise ConfigError("Pick needs at least one answer to choose from")
        self.buttons = widgets.ToggleButtons(options=list(answers), style={"button_width": "auto"},
                                             layout={"width": "100%"})
        super().__init__(question, self.buttons, answers[0])
        widgets.link((self, "value"), (self.buttons, "value"))


def _round(value: float) -> float:
    return float(f"{value:.3g}")
