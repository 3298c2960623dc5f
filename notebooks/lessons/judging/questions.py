"""Guess, commit, reveal, score: questions to answer before a run answers them.

No code waits for an answer or computes with it, so a headless run is not interrupted. Only
`.answer` counts: the value that the learner locked in, by a click, before the result was shown.

In a live front end, `guess.reveal(content)` hides the content until the guess is locked; the stored
output of the notebook is the content. `guess.scored(row)` puts the guess into a comparison's row.
`keep` (in `lessons.judging.learner`) connects a question to the learner's file.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

import ipywidgets as widgets
import traitlets

from lessons.figures.figure import WIDGET_MIME
from lpkit.errors import ConfigError
from lpkit.predict.compare import TIED, Row, off_by
from lpkit.predict.units import quantity
from lpkit.tables import FONT, QUIET, TEXT

FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class Question(widgets.VBox):
    """A question with its inputs, its `.value`, and a button that locks the value."""

    locked = traitlets.Bool(False, help="the value can no longer change")
    late = traitlets.Bool(False, help="the result was shown before the value was locked")
    waived = traitlets.Bool(False, help="the hidden content was shown without an answer")
    result = traitlets.Dict(help="for an answer that counts: the `measured` value, and whether the "
                            "answer `held`")
    note = traitlets.Unicode(help="a message from the code that stores the answer")
    unit: str = ""
    factor: float | None = None

    def __init__(self, question: str, inputs: Sequence[widgets.Widget], value: float | str | None):
        style = f"font:600 14px {FONT};color:{TEXT};line-height:1.5"
        text = widgets.HTML(f'<div style="{style}">{escape(question)}</div>')
        self.question, self.inputs = question, inputs
        self.button = widgets.Button(description="Lock in", icon="lock", button_style="primary",
                                     layout={"width": "110px"})
        self.button.on_click(lambda _: self.lock())
        self.status = widgets.HTML()
        wrap = {"flex_flow": "row wrap", "align_items": "center"}
        super().__init__([text, widgets.HBox(inputs, layout=wrap),
                          widgets.HBox([self.button, self.status], layout=wrap)],
                         layout={"padding": "4px 12px"}, value=value)
        self.observe(self._tell, names=["value", "factor", "locked", "late", "result", "note"])
        self._tell()

    @property
    def answer(self) -> Any:
        """The value, if it was locked in before the result was shown, else None."""
        return self.value if self.locked and not self.late else None

    @property
    def answer_text(self) -> str:
        return str(self.value)

    def lock(self) -> None:
        """Lock the value, unless nothing is chosen yet."""
        if self.value is not None:
            self.locked = True

    def restore(self, value: float | str, factor: float | None) -> None:
        """Restore a locked answer."""
        self.value = value
        if factor is not None:
            self.factor = factor
        self.lock()

    def waive(self) -> None:
        """Show the hidden content. A later answer does not count."""
        if not self.locked:
            self.late = self.waived = True

    def reveal(self, content: Any, *also: "Question") -> "Reveal":
        """Hide `content` until this question and the other questions are locked."""
        return Reveal(content, self, *also)

    def _ends(self, measured: float | str, held: bool) -> None:
        """Record that the result is known."""
        if not self.locked:
            self.late = True
        elif not self.late:
            self.result = {"measured": measured, "held": held}

    def _tell(self, _change: dict | None = None) -> None:
        """Update the button and the message below it."""
        for control in self.inputs:
            control.disabled = self.locked
        self.button.disabled = self.locked or self.value is None
        self.button.description = "Locked" if self.locked else "Lock in"
        if self.late:
            words = "The answer was shown before you locked in a guess: this guess does not count."
        elif self.locked:
            words = f"You said {self.answer_text}.{self._outcome()}"
        else:
            words = "Lock in your guess to make it count and to show what follows."
        self.status.value = (f'<div style="font:13px {FONT};color:{QUIET};padding:0 8px;'
                             f'line-height:1.4">{escape(f"{words} {self.note}".strip())}</div>')

    def _outcome(self) -> str:
        if not self.result:
            return ""
        return " That is right." if self.result["held"] else f" Right: {self.result['measured']}."

    def _repr_mimebundle_(self, **kwargs) -> dict:
        return {**super()._repr_mimebundle_(**kwargs), "text/plain": self.question}


class Guess(Question):
    """A slider on a log scale from `low` to `high` and a text field for `.value` in `unit`, and
    `.factor` for a 90% interval: value / factor to value * factor. It starts at `low`, far from any
    answer, so that a guess that was not moved is never right."""

    value = traitlets.Float(help="the guess, between low and high")
    factor = traitlets.Float(2.0)

    def __init__(self, question: str, *, unit: str, low: float, high: float):
        if not 0 < low < high < math.inf:
            raise ConfigError(f"Guess needs 0 < low < high on its log scale, got low={low} and "
                              f"high={high}")
        self.unit, self.low, self.high = unit, low, high
        self.slider = widgets.FloatLogSlider(
            value=low, min=math.log10(low), max=math.log10(high), step=0.01, readout=False,
            description="your guess", style={"description_width": "90px"},
            layout={"width": "420px", "max_width": "100%"})
        self.field = widgets.BoundedFloatText(value=low, min=low, max=high, step=None,
                                              layout={"width": "130px"})
        self.sure = widgets.Dropdown(options=[(f"{f:g}", f) for f in FACTORS], value=2.0,
                                     description="90% sure within a factor of",
                                     style={"description_width": "initial"},
                                     layout={"width": "260px", "margin": "2px 2px 2px 24px",
                                             "max_width": "calc(100% - 26px)"})
        super().__init__(question, [self.slider, self.field, widgets.Label(unit), self.sure], low)
        self.slider.observe(self._moved, names="value")
        widgets.link((self, "value"), (self.field, "value"))
        widgets.dlink((self, "value"), (self.slider, "value"))
        widgets.link((self, "factor"), (self.sure, "value"))

    @property
    def answer_text(self) -> str:
        guess, low, high = (quantity(value, self.unit) for value in (
            self.value, self.value / self.factor, self.value * self.factor))
        return f"{guess}, 90% sure of {low} to {high}"

    def scored(self, row: Row, scale: float = 1.0) -> Row:
        """Return `row` with the guess, if the guess counts. A guess that is not locked when this is
        called never counts. `scale` converts the guess's unit to the row's."""
        if row.truth is not None:
            guessed = replace(row, guess=scale * self.value, guess_factor=self.factor)
            self._ends(row.truth / scale, bool(guessed.held))
        if self.answer is None:
            return row
        return replace(row, guess=scale * self.answer, guess_factor=self.factor)

    def _outcome(self) -> str:
        if not self.result:
            return ""
        measured, held = self.result["measured"], self.result["held"]
        return (f" It is {quantity(measured, self.unit)} (your guess: "
                f"{off_by(self.value, measured, self.unit)}), and your 90% interval "
                f"{'held' if held else 'did not hold'}.")

    @traitlets.validate("value")
    def _bounded(self, proposal: dict) -> float:
        return min(max(proposal["value"], self.low), self.high)

    def _moved(self, change: dict) -> None:
        # a typed value is between two steps of the slider
        if not math.isclose(change["new"], self.value, rel_tol=0.02):
            self.value = float(f"{change['new']:.3g}")


class Pick(Question):
    """Answers to choose from. `.value` is one of the answers, or None before a choice. If several
    candidates may share the first place, offer TIED as an answer, too."""

    value = traitlets.Unicode(None, allow_none=True, help="the answer that is chosen")

    def __init__(self, question: str, answers: Sequence[str]):
        if not answers:
            raise ConfigError("Pick needs at least one answer to choose from")
        self.answers = list(answers)
        self.buttons = widgets.ToggleButtons(options=self.answers, value=None,
                                             style={"button_width": "auto"},
                                             layout={"width": "100%"})
        super().__init__(question, [self.buttons], None)
        widgets.link((self, "value"), (self.buttons, "value"))

    @traitlets.validate("value")
    def _offered(self, proposal: dict) -> str | None:
        if proposal["value"] not in (None, *self.answers):
            raise traitlets.TraitError(f"{proposal['value']!r} is not one of the answers "
                                       f"{self.answers}")
        return proposal["value"]

    def scored(self, best: Sequence[str]) -> str:
        """Return the right answer and the learner's answer as text: "a (you said b)". `best`: the
        candidates that share the first place. If there are several, TIED is the right answer if it
        is offered; otherwise each candidate is right. Raises ConfigError if `best` is empty."""
        if not best:
            raise ConfigError("a Pick cannot be scored without a right answer; give at least one")
        right = [TIED] if len(best) > 1 and TIED in self.answers else list(best)
        self._ends(" or ".join(right), self.value in right)
        words = f"{TIED}: {', '.join(best)}" if right == [TIED] else " or ".join(right)
        return words if self.answer is None else f"{words} (you said {self.answer})"


class Reveal(widgets.VBox):
    """`content` (text, an object with `_repr_html_`, or a widget), hidden until all `questions` are
    locked or the learner clicks to see it. Without a live front end, the output is the content."""

    def __init__(self, content: Any, *questions: Question):
        self.content, self.questions = content, questions
        words = f"Lock in your guess{'es' if len(questions) > 1 else ''} first."
        self.button = widgets.Button(description="Show it without a guess", icon="eye",
                                     layout={"width": "auto"})
        self.button.on_click(self._waive)
        self.hidden = widgets.HBox([
            widgets.HTML(f'<div style="font:13px {FONT};color:{QUIET};padding:0 8px">'
                         f"Hidden. {words}</div>"), self.button],
            layout={"padding": "4px 12px", "flex_flow": "row wrap", "align_items": "center"})
        super().__init__(layout={"width": "100%", "overflow": "auto hidden"})
        for question in questions:
            question.observe(self._look, names=["locked", "waived"])
        self._look()

    @property
    def shown(self) -> bool:
        return all(question.locked or question.waived for question in self.questions)

    def _waive(self, _button: widgets.Button) -> None:
        for question in self.questions:
            question.waive()

    def _look(self, _change: dict | None = None) -> None:
        content = self.content
        if not isinstance(content, widgets.Widget):
            content = widgets.HTML(_stored(content)["text/html"])
        self.children = [content if self.shown else self.hidden]

    def _repr_mimebundle_(self, **kwargs) -> dict:
        return {**super()._repr_mimebundle_(**kwargs), **_stored(self.content)}


def _stored(content: Any) -> dict[str, Any]:
    """Return the output for viewers without a kernel."""
    if isinstance(content, str):
        return {"text/plain": content, "text/html": f"<pre>{escape(content)}</pre>"}
    if isinstance(content, widgets.Widget):
        return {mime: data for mime, data in content._repr_mimebundle_().items()
                if mime != WIDGET_MIME}
    return {"text/plain": repr(content), "text/html": content._repr_html_()}
