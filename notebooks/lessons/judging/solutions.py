"""When a learner sees an exercise's solution: set by `LPKIT_SOLUTIONS` for a whole classroom.

Learners learn from comparing their own attempt with a solution, even a failed attempt, but not from
only reading the solution (Kapur 2008, Productive failure). The setting is a nudge and no lock: the
source of the lesson has the solution in plain text.
"""

import os

from lpkit.errors import pick

VARIABLE, DEFAULT = "LPKIT_SOLUTIONS", "attempted"
WHEN = {    # by setting: what must have happened before
    "always": "",
    "attempted": "a first attempt that was judged",
    "solved": "a right answer",
}


def shown_when() -> str:
    """Return the setting, a key of WHEN. Raises ConfigError for any other value."""
    word = os.environ.get(VARIABLE) or DEFAULT
    pick(WHEN, word, f"word for {VARIABLE}")
    return word
