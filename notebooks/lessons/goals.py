"""The card of a notebook's goal: whether the goal was reached, condition by condition."""

from collections.abc import Mapping

from IPython.display import display

from lessons.claims import FAILS, HOLDS, LOOKS, UNDECIDED, card

WORDS = {HOLDS: "The goal is reached", FAILS: "The goal failed",
         UNDECIDED: "This machine cannot tell whether the goal is reached"}


def goal(sentence: str, conditions: Mapping[str, bool | None]) -> None:
    """Show a card: whether a goal was reached, and which of its conditions hold.

    sentence: the goal, as the notebook's first cell states it
    conditions: for each condition (a sentence with the measured value) whether it holds; None if
        this machine cannot tell

    A goal is set before the run and may fail, while a claim states a result. So a failed goal
    raises no error, and the runner of notebooks does not count it as a failure."""
    results = list(conditions.values())
    state = UNDECIDED if None in results else HOLDS
    if any(holds is False for holds in results):
        state = FAILS
    signs = {True: LOOKS[HOLDS][1], False: LOOKS[FAILS][1], None: LOOKS[UNDECIDED][1]}
    lines = [f"{signs[holds]} {condition}" for condition, holds in conditions.items()]
    display({"text/plain": "\n".join([f"{WORDS[state]}: {sentence}", *lines]),
             "text/html": card(state, WORDS[state], sentence, lines)}, raw=True)
