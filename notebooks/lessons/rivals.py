"""Candidates that cannot be distinguished from the best candidate."""

from collections.abc import Mapping


def rivals(values: Mapping[str, float], within: float) -> list[str]:
    """Return the names whose value is at most `within` below the highest value; highest first.

    >>> rivals({"a": 1.0, "b": 3.0, "c": 2.5}, within=0.5)
    ['b', 'c']
    """
    ordered = sorted(values, key=values.__getitem__, reverse=True)
    return [name for name in ordered if values[name] >= values[ordered[0]] - within]
