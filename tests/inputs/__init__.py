"""What users bring, as tables: each case is right, or refused in one sentence.

`cases()` of a module yields a name and a function. The function returns "right", or the sentence
that refuses the input or warns of it; it raises AssertionError for a result that is wrong without a
word, or for a case that ends otherwise than the table says.
"""

import re
import warnings
from collections.abc import Callable

from lpkit.errors import ConfigError

RIGHT = "right"


def outcome(due: str, call: Callable[[], str]) -> str:
    """Returns what `call` does, "right" for an empty text, and the sentence where it refuses.
    `due`: "right", or a pattern of the sentence."""
    try:
        result = call() or RIGHT
    except ConfigError as error:
        result = str(error)
    assert "\n" not in result and len(result) < 1000, f"not one sentence: {result!r}"
    assert result == RIGHT if due == RIGHT else re.search(due, result), (
        f"it is to be {due!r}, and is {result!r}")
    return result


def warned(call: Callable[[], object]) -> tuple[object, list[str]]:
    """Returns what `call` returns, and the warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(warning.message) for warning in caught
                    if issubclass(warning.category, UserWarning)]
