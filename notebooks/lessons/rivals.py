"""Candidates that cannot be distinguished from the best one."""

from collections.abc import Mapping


def rivals(values: Mapping[str, float], within: float) -> list[str]:
    """Return the names whose values are within `within` of the highest, the highest first."""
    ordered = sorted(values, key=values.__getitem__, reverse=True)
    return [name for name in ordered if values[name] >= values[ordered[0]] - within]
