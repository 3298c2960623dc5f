"""The error for a setting that is invalid, and the checks that raise it. Standard library only."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """An invalid setting. The message names the key, the value and the way out."""


class DamagedError(ConfigError):
    """A file is not what was written. The message names it and what is wrong."""


def nearest(name: str, known: Iterable[str]) -> str:
    """'did you mean X?': what is spelled alike, else what shares a word (batch_size: global_batch).
    Or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    close = close or [one for one in known if _words(one) & _words(name)]
    if 0 < len(close) <= 3:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"choose one of {', '.join(known)}"


def _words(name: str) -> set[str]:
    return set(re.split(r"[._-]", name))


def pick(table: Mapping[str, T], name: str, what: str = "entry") -> T:
    """Look `name` up. Raises ConfigError for an unknown name, with the nearest."""
    if name not in table:
        raise ConfigError(f"there is no {what} {name!r}; {nearest(name, table)}")
    return table[name]


# Checks of one setting, by its dotted name.

def positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be positive, got {value}")


def at_least_zero(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} must be 0 or more, got {value}")


def share(name: str, value: float) -> None:
    """From 0 to 1, both included."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be between 0 and 1, got {value}")


def below_one(name: str, value: float) -> None:
    """The rate of a moving average: one that forgets nothing (1) takes in no gradient."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name} must be 0 or more and below 1, got {value}")
