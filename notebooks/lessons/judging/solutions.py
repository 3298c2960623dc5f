"""The setting `LPKIT_SOLUTIONS`: when learners see the solution of an exercise.

Learners learn from comparing their own attempt, even a failed attempt, with a solution, but not
from only reading the solution (Kapur 2008, Productive failure). The setting cannot keep a solution
secret: the source of the lesson contains it in plain text.
"""

import os

from lpkit.errors import pick

VARIABLE, DEFAULT = "LPKIT_SOLUTIONS", "attempted"
WHEN = {    # by setting: the event after which the solution is shown
    "always": "",
    "attempted": "a first attempt that was judged",
    "solved": "a right answer",
}


def shown_when() -> str:
    """Return the setting, a key of WHEN. Raises ConfigError for any other value."""
    word = os.environ.get(VARIABLE) or DEFAULT
    pick(WHEN, word, f"value of {VARIABLE}")
    return word
