"""What a notebook claims: asserts that hold it, and a card that says whether they do, or that this
machine cannot tell."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from traceback import extract_tb
from typing import Any

from lpkit.course.reports import report
from lpkit.tables import FONT, TEXT

CARD = "lpkit_claim"    # in the metadata of a card's output: what the runner of notebooks reads
HOLDS, FAILS, UNDECIDED = "holds", "fails", "cannot tell"
LOOKS = {HOLDS: ("#15803d", "✓"), UNDECIDED: ("#8a6500", "?"), FAILS: ("#b91c1c", "✗")}


class _UndecidedError(Exception):
    """Leaves a claim undecided."""


def cannot_tell(when: Any, why: str) -> None:
    """Ends a claim where `when` is true: what stands below is not decided here, and the card says
    why. An assert above it counts."""
    if when:
        raise _UndecidedError(why)


@contextmanager
def claim(sentence: str) -> Iterator[None]:
    """Asserts stand within. The card is shown beneath the cell; one that fails still raises its
    AssertionError, in one line instead of a traceback. With the tag `raises-exception` on the cell
    JupyterLab then runs the cells below, too."""
    try:
        yield
    except _UndecidedError as undecided:
        _show(sentence, UNDECIDED, str(undecided))
    except AssertionError as error:
        # the assert itself, where it says nothing
        why = str(error) or str(extract_tb(error.__traceback__)[-1].line)
        _show(sentence, FAILS, why)
        error._render_traceback_ = lambda: [f"AssertionError: {why}"]     # IPython asks for it
        raise
    else:
        _show(sentence, HOLDS)


def _show(sentence: str, state: str, why: str = "") -> None:
    from IPython.display import display  # the runner, which reads cards, goes without

    report("claim", name=sentence, verdict=state)
    display({"text/plain": f"{state}: {sentence} {why}".rstrip(),
             "text/html": card(state, state, sentence, [f"Because: {why}"] if why else [])},
            raw=True, metadata={CARD: {"claim": sentence, "state": state, "why": why}})


def card(state: str, word: str, sentence: str, below: Iterable[str] = ()) -> str:
    """Return the HTML of a card in the colour of `state`; `below` are lines under the sentence."""
    (colour, sign), lines = LOOKS[state], (f"<div style='margin-top:4px'>{escape(line)}</div>"
                                           for line in below)
    return (f"<div style='border-left:3px solid {colour};padding:6px 12px;font:14px {escape(FONT)};"
            f"color:{TEXT};line-height:1.5'><span style='background:{colour};color:#fff;padding:0 4"
            f"px'>{sign}</span> <b>{word}</b>: {escape(sentence)}{''.join(lines)}</div>")


def cards(outputs: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """The claims that an executed cell has shown."""
    return [output["metadata"][CARD] for output in outputs if CARD in output.get("metadata", {})]


def verdict(shown: list[dict[str, str]], claims: int) -> tuple[str, str]:
    """The state of `claims` claims together, and the reason: the worst of them."""
    for state in (FAILS, UNDECIDED):
        for one in shown:
            if one["state"] == state:
                return state, one["why"]
    if len(shown) < claims:
        return UNDECIDED, f"{claims - len(shown)} of {claims} claims showed no card"
    return (HOLDS, "") if claims else ("", "")
