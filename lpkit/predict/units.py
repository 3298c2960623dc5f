"""Format numbers with units, for sentences, lines and tables. All other code computes in base units
(bytes, seconds, FLOPs)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
_SMALL = ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_COUNT = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))
_SHORT = {"bytes": "B", "byte": "B", "seconds": "s", "second": "s"}


def quantity(value: float | None, unit: str = "") -> str:
    """Return `value` with three significant digits, a decimal prefix and the unit. Whole numbers
    below 1,000 keep all digits; None and infinity become "-".

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
    """Return a range in words; a single value if both ends look equal. `show` formats an end.

    >>> between((3600, 7200), duration), between((5, 5), duration)
    ('1.00 h to 2.00 h', '5 s')
    """
    low, high = map(show, pair)
    return low if low == high else f"{low} to {high}"


def duration(seconds: float) -> str:
    """Return a duration in days, hours, minutes, seconds or parts of a second: the largest of these
    units that is not longer than the duration.

    >>> duration(0.0123), duration(90), duration(7200), duration(1e6), duration(1e8)
    ('12.3 ms', '1.50 min', '2.00 h', '11.6 days', '1,157 days')
    """
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            value = seconds / size
            return (f"{value:,.0f} {unit}" if value >= 999.5
                    else f"{value:#.3g}".rstrip(".") + f" {unit}")
    return quantity(seconds, "seconds")


class _Words(Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        spec, at, place = spec.partition(":")
        if at:
            return format(self.format_field(value, spec), place)
        if value is None and spec:
            return "-"
        if isinstance(value, (list, tuple)):
            return between(value, lambda end: self.format_field(end, spec))
        if spec[:1] == "$":
            return "$" + self.format_field(value, spec[1:] or "number")
        if spec[:1] == "+" and spec[1:].isalpha():
            return f"{'-' if value < 0 else '+'}{quantity(abs(value), spec[1:])}" if value else "0"
        if spec in _NAMED:
            return _NAMED[spec](value)
        if spec[:1].isalpha() and spec[1:]:     # a Python format spec ends with its letter
            return quantity(value, spec)
        return format(value, spec)


_NAMED = {"number": quantity, "time": duration}


def words(template: str, values: Mapping[str, Any], **more: Any) -> str:
    """Return `template` filled in as by `str.format`, with these additional format specs:

    bytes, W, ...   a number with this unit, as by `quantity`
    time, number    a duration; a number without a unit
    $               in front of another spec: US dollars
    +bytes          a difference: a number with this unit and with its sign
    :>10            after a second colon: alignment and width, as in {peak:bytes:>10}

    If a value is a pair of numbers, it is formatted as a range.

    >>> words("{name}: {peak:bytes}, {step:time}, {cost:$,.0f}", {"name": "a", "peak": 79_104_000,
    ...       "step": (3600, 7200), "cost": 1234.5})
    'a: 79.1 MB, 1.00 h to 2.00 h, $1,234'
    >>> words("{a[more]:+bytes} {speed:B/s} {watts:W} {cost:$} {mfu:.2f}", {"a": {"more": -5e6}},
    ...       speed=1e9, watts=None, cost=1e6, mfu=0.5)
    '-5.00 MB 1.00 GB/s - $1.00M 0.50'
    """
    return _Words().vformat(template, (), {**values, **more})


def cells(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return the lines of a table: first the heads, then a line for each of `rows`. `columns` has a
    template of `words` for each head."""
    return [list(columns), *([words(cell, row) for cell in columns.values()] for row in rows)]
