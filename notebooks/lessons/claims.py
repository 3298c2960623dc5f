"""Claims of a notebook: a sentence, asserts that check it, and a card below the cell that shows
whether they hold, fail, or cannot be decided on this machine."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from html import escape
from traceback import extract_tb
from typing import Any

from lpkit.tables import FONT, TEXT

CARD = "lpkit_claim"    # key in the metadata of a card's output, which the notebooks' runner reads
HOLDS, FAILS, UNDECIDED = "holds", "fails", "cannot tell"
# colour and sign of a card
LOOKS = {HOLDS: ("#15803d", "✓"), UNDECIDED: ("#8a6500", "?"), FAILS: ("#b91c1c", "✗")}


class _UndecidedError(Exception):
    """Raised by `cannot_tell`, caught by `claim`."""


def cannot_tell(when: Any, why: str) -> None:
    """If `when` is true, end the enclosing `claim` as undecided; its card gives the reason `why`.
    Asserts before this call must still hold."""
    if when:
        raise _UndecidedError(why)


@contextmanager
def claim(sentence: str, on_verdict: Callable[[str], None] = lambda state: None) -> Iterator[None]:
    """Show a card below the cell: whether the asserts inside `with claim(...):` hold.

    If an assert fails, its AssertionError is raised again and IPython shows only its message; if
    the cell has the tag `raises-exception`, JupyterLab still runs the cells below. `on_verdict` is
    called with the verdict: HOLDS, FAILS or UNDECIDED."""
    try:
        yield
    except _UndecidedError as undecided:
        _show(sentence, on_verdict, UNDECIDED, str(undecided))
    except AssertionError as error:
        # the assert's message, or its line of code if it has none
        why = str(error) or str(extract_tb(error.__traceback__)[-1].line)
        _show(sentence, on_verdict, FAILS, why)
        error._render_traceback_ = lambda: [f"AssertionError: {why}"]     # IPython calls this
        raise
    else:
        _show(sentence, on_verdict, HOLDS)


def _show(sentence: str, on_verdict: Callable[[str], None], state: str, why: str = "") -> None:
    """Show the card of a claim in the state HOLDS, FAILS or UNDECIDED, and call `on_verdict`. The
    card is also stored in the metadata of the output, where the runner of notebooks reads it."""
    # imported here, because the runner of notebooks imports this module without IPython
    from IPython.display import display

    on_verdict(state)
    display({"text/plain": f"{state}: {sentence} {why}".rstrip(),
             "text/html": card(state, state, sentence, [f"Because: {why}"] if why else [])},
            raw=True, metadata={CARD: {"claim": sentence, "state": state, "why": why}})


def card(state: str, word: str, sentence: str, below: Iterable[str] = ()) -> str:
    """Return the HTML of a card: the sign and the colour of `state`, `word` in bold, the sentence,
    and the lines `below` it."""
    (colour, sign), lines = LOOKS[state], (f"<div style='margin-top:4px'>{escape(line)}</div>"
                                           for line in below)
    return (f"<div style='border-left:3px solid {colour};padding:6px 12px;font:14px {escape(FONT)};"
            f"color:{TEXT};line-height:1.5'><span style='background:{colour};color:#fff;padding:0 4"
            f"px'>{sign}</span> <b>{word}</b>: {escape(sentence)}{''.join(lines)}</div>")


def cards(outputs: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the claims ({"claim", "state", "why"}) in the outputs of an executed cell."""
    return [output["metadata"][CARD] for output in outputs if CARD in output.get("metadata", {})]


def verdict(shown: list[dict[str, str]], claims: int) -> tuple[str, str]:
    """Return the worst state of a cell's claims, and the reason: FAILS before UNDECIDED before
    HOLDS. `shown` is the result of `cards`; if it has fewer than `claims` claims, the state is
    UNDECIDED. ("", "") for a cell without claims."""
    worst = [claim for state in (FAILS, UNDECIDED) for claim in shown if claim["state"] == state]
    if worst:
        return worst[0]["state"], worst[0]["why"]
    if len(shown) < claims:
        return UNDECIDED, f"{claims - len(shown)} of {claims} claims showed no card"
    return (HOLDS, "") if claims else ("", "")
