"""The error for a setting that is invalid, and the checks that raise it. Standard library only."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """An invalid setting. The message names the key, the value and the way out."""


def nearest(name: str, known: Iterable[str]) -> str:
    """'did you mean X?', or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"choose one of {', '.join(known)}"


def pick(table: Mapping[str, T], name: str, what: str = "entry") -> T:
    """Look `name` up. Raises ConfigError for an unknown name, with the nearest."""
    if name not in table:
        raise ConfigError(f"there is no {what} {name!r}; {nearest(name, table)}")
    return table[name]


def positive(where: str, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{where}{name} must be positive, got {value}")


def at_least_zero(where: str, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{where}{name} must be 0 or more, got {value}")


def share(where: str, **values: float) -> None:
    """From 0 to 1, both included."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{where}{name} must be between 0 and 1, got {value}")
