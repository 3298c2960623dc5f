"""What a notebook claims: asserts that hold it, and a card that says whether they do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from traceback import extract_tb

from IPython.display import display

from lpkit.course.judge import MARKS, badge
from lpkit.tables import FONT, TEXT


@dataclass(frozen=True)
class Card:
    sentence: str
    why: str = ""           # it does not hold; empty where it does

    def __repr__(self) -> str:
        return f"does not hold: {self.sentence} {self.why}" if self.why else \
            f"holds: {self.sentence}"

    def _repr_html_(self) -> str:
        status = "wrong" if self.why else "right"
        why = self.why and f"<div style='margin-top:4px'>Because: {escape(self.why)}</div>"
        return (f"<div style='border-left:3px solid {MARKS[status][0]};padding:6px 12px;"
                f"font:14px {FONT};color:{TEXT};line-height:1.5'>{badge(status)} "
                f"<b>{'does not hold' if self.why else 'holds'}</b>: "
                f"{escape(self.sentence)}{why}</div>")


@contextmanager
def claim(sentence: str) -> Iterator[None]:
    """Asserts stand within. The card is shown beneath the cell; one that fails still raises its
    AssertionError, in one line instead of a traceback. With the tag `raises-exception` on the cell
    JupyterLab then runs the cells below, too."""
    try:
        yield
    except AssertionError as error:
        # the assert itself, where it says nothing
        why = str(error) or str(extract_tb(error.__traceback__)[-1].line)
        display(Card(sentence, why))
        error._render_traceback_ = lambda: [f"AssertionError: {why}"]     # IPython asks for it
        raise
    display(Card(sentence))
