"""Numbers for people. Base units everywhere else."""

import math
from collections.abc import Callable, Sequence

_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
_SMALL = ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_COUNT = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))
_SHORT = {"bytes": "B", "byte": "B", "seconds": "s", "second": "s"}


def quantity(value: float | None, unit: str = "") -> str:
    """Three significant digits with the decimal prefix that reads best.

    >>> quantity(79_104_000, "bytes"), quantity(0.0123, "seconds")
    ('79.1 MB', '12.3 ms')
    >>> quantity(1.5e12, "FLOPs"), quantity(0.25, "nats")
    ('1.50 TFLOPs', '0.250 nats')
    >>> quantity(124_475_904, "parameters"), quantity(12_345, "tokens/s"), quantity(4, "GPUs")
    ('124M parameters', '12.3k tokens/s', '4 GPUs')
    """
    if value is None or not math.isfinite(value):
        return "-"
    unit = _SHORT.get(unit, unit)
    physical = unit.split("/")[0] in ("B", "s", "FLOP", "FLOPs", "W", "Wh", "J")
    table = (*_SI, *_SMALL) if unit == "s" else _SI if physical else _COUNT
    scale, prefix = next(((scale, prefix) for scale, prefix in table
                          if abs(value) >= scale * 0.9995), (1, ""))
    whole = scale == 1 and value == round(value)
    number = f"{value:.0f}" if whole else f"{value / scale:#.3g}".rstrip(".")
    return f"{number} {prefix}{unit}".strip() if physical else f"{number}{prefix} {unit}".strip()


def between(pair: Sequence[float], show: Callable[[float], str]) -> str:
    """
    >>> between((3600, 7200), duration), between((5, 5), duration)
    ('1.00 h to 2.00 h', '5 s')
    """
    low, high = map(show, pair)
    return low if low == high else f"{low} to {high}"


def duration(seconds: float) -> str:
    """
    >>> duration(0.0123), duration(90), duration(7200), duration(1e6), duration(1e8)
    ('12.3 ms', '1.50 min', '2.00 h', '11.6 days', '1,157 days')
    """
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            value = seconds / size
            return (f"{value:,.0f} {unit}" if value >= 999.5
                    else f"{value:#.3g}".rstrip(".") + f" {unit}")
    return quantity(seconds, "seconds")
