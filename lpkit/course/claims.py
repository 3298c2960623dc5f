"""What a notebook claims: asserts that hold it, and a card that says whether they do."""

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from traceback import extract_tb

from IPython.display import display

from lpkit.course.judge import MARKS, badge
from lpkit.tables import FONT, TEXT


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
        _show(sentence, "wrong", "does not hold", why)
        error._render_traceback_ = lambda: [f"AssertionError: {why}"]     # IPython asks for it
        raise
    _show(sentence, "right", "holds")


def _show(sentence: str, status: str, words: str, why: str = "") -> None:
    because = why and f"<div style='margin-top:4px'>Because: {escape(why)}</div>"
    display({"text/plain": f"{words}: {sentence} {why}".rstrip(),
             "text/html": f"<div style='border-left:3px solid {MARKS[status][0]};padding:6px 12px;"
                          f"font:14px {escape(FONT)};color:{TEXT};line-height:1.5'>{badge(status)} "
                          f"<b>{words}</b>: {escape(sentence)}{because}</div>"}, raw=True)
