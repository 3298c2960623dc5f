"""Who stands so near the first that one cannot tell them apart."""

from collections.abc import Mapping


def rivals(values: Mapping[str, float], within: float) -> list[str]:
    """Names those within `within` of the highest, the highest first."""
    ordered = sorted(values, key=values.__getitem__, reverse=True)
    return [name for name in ordered if values[name] >= values[ordered[0]] - within]
