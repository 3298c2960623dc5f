"""When a learner sees an exercise's solution: `LPKIT_SOLUTIONS` says it for a lab or a room.

To compare one's own attempt with a solution teaches, to read the solution instead does not: an
attempt first, even a failed one, prepares for the explanation (Kapur 2008, Productive failure).
This is a nudge and no lock: the lesson's source has the solution in plain text.
"""

import os

from lpkit.errors import pick

VARIABLE, DEFAULT = "LPKIT_SOLUTIONS", "attempted"
WHEN = {    # word: what has to be there first
    "always": "",
    "attempted": "a first attempt that was judged",
    "solved": "a right answer",
}


def shown_when() -> str:
    """A word of WHEN. Raises ConfigError for another."""
    word = os.environ.get(VARIABLE) or DEFAULT
    pick(WHEN, word, f"word for {VARIABLE}")
    return word
