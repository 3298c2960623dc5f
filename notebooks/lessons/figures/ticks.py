"""Ticks of an axis as plotly.js chooses and writes them: positions and texts, without drawing.

`positions` returns where the ticks are, `words` the text at each tick. Sources:
https://plotly.com/javascript/reference/layout/xaxis/ and https://d3js.org/d3-format
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lpkit.errors import ConfigError

NUMBER_FORMAT = re.compile(r"(,?)(?:\.(\d+))?(~?)([f%sdegr]?)")
PREFIXES = {-12: "p", -9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P",
            18: "E", 21: "Z", 24: "Y"}
RAISED = str.maketrans("0123456789+-()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ")
LOWERED = str.maketrans("0123456789+-()", "₀₁₂₃₄₅₆₇₈₉₊₋₍₎")
APART = {"x": 80, "y": 40}      # pixels between two ticks at which plotly aims, by axis
EXACT = 12      # digits to which a multiple of a step is rounded: 3 * 0.1 is written as 0.3


def nice(rough: float) -> float:
    """Return the smallest number of the form 1, 2 or 5 times a power of ten that is at least
    `rough`.

    >>> nice(0.03), nice(2.5), nice(60)
    (0.05, 5.0, 100.0)
    """
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if rough <= step * power * (1 + 1e-9))


def positions(axis: Mapping[str, Any], letter: str, low: float, high: float,
              pixels: float) -> list[float]:
    """Return the ticks of a numeric axis between `low` and `high`, in data units.

    axis: plotly's settings of the axis
    letter: "x" or "y"
    pixels: the length of the axis
    """
    if "tickvals" in axis:
        return [value for value in axis["tickvals"] if low <= value <= high]
    many = axis.get("nticks") or min(max(pixels / APART[letter], 4), 9) + 1
    if axis.get("type") == "log":
        return _of_log(axis.get("dtick"), low, high, many)
    step = axis.get("dtick") or nice((high - low) / many)
    return _multiples(step, axis.get("tick0", 0), low, high)


def _multiples(step: float, first: float, low: float, high: float) -> list[float]:
    """Return first + i * step, for integers i, between `low` and `high`."""
    slack = 1e-6 * (high - low)
    begin = math.ceil((low - first - slack) / step)
    end = math.floor((high - first + slack) / step)
    return [float(f"{first + i * step:.{EXACT}g}") for i in range(begin, end + 1)]


def _of_log(step: float | str | None, low: float, high: float, many: float) -> list[float]:
    """Return the ticks of a log axis. `step` is plotly's `dtick`: a number of decades between two
    ticks, or "D1" or "D2", which add ticks at 2 and 5 times each power of ten. None: choose a step
    for about `many` ticks; an axis of less than one decade gets evenly spaced ticks."""
    ends = math.log10(low), math.log10(high)
    if step is None:
        rough = (ends[1] - ends[0]) / many
        if ends[1] - ends[0] < 1:
            return _multiples(nice((high - low) / many), 0, low, high)
        step = math.ceil(rough) if rough > 0.7 else "D2"
    if not isinstance(step, str):
        return [10.0**value for value in _multiples(float(step), 0, *ends)]
    powers = range(math.floor(ends[0]), math.ceil(ends[1]) + 1)
    candidates = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [value for value in candidates if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def words(axis: Mapping[str, Any], values: Sequence[float]) -> list[str]:
    """Return the text of each tick; `values` is the result of `positions` for the same axis."""
    if "ticktext" in axis:
        named = dict(zip(axis["tickvals"], axis["ticktext"]))
        return [str(named[value]) for value in values]
    form, suffix = axis.get("exponentformat", "B"), axis.get("ticksuffix", "")
    if "tickformat" in axis:
        return [axis.get("tickprefix", "") + d3(axis["tickformat"], value) + suffix
                for value in values]
    largest = max(map(abs, values), default=0)
    if axis.get("type") == "log":       # each tick has its own power
        texts = [number(value, form, _power(value, form, whole=True)) for value in values]
    else:
        steps = [right - left for left, right in itertools.pairwise(values)]
        power = _power(largest, form)
        texts = [number(value, form, power, min(map(abs, steps), default=0)) for value in values]
    return [axis.get("tickprefix", "") + word + suffix for word in texts]


def _power(value: float, form: str, whole: bool = False) -> int:
    """Return the power of ten that plotly writes as a prefix or an exponent of `value`; 0 if it
    writes none, as for values from about 0.001 to 10,000.

    form: plotly's `exponentformat`
    whole: the axis is logarithmic; with `form` "power", plotly then writes every power except 1
        and 10 as an exponent
    """
    if not value:
        return 0
    power = math.floor(math.log10(abs(value)) + 0.01)
    if form == "power":
        return power if abs(power) > 2 or (whole and power not in (0, 1)) else 0
    if form == "none" or abs(power) <= 3:
        return 0
    return 3 * math.floor((power - 1) / 3 + 0.5)


def number(value: float, form: str, power: int, step: float = 0) -> str:
    """Return a value as plotly writes it at a tick.

    form: plotly's `exponentformat`: "B" (k, M, B), "SI" (k, M, G), "power", "e" or "none"
    power: the power of ten that becomes a prefix or an exponent (see `_power`)
    step: the distance of two ticks, which sets how many decimal places are needed; 0: six digits

    >>> number(1500.0, "SI", 3), number(20000.0, "power", 4), number(0.75, "none", 0, step=0.25)
    ('1.5k', '2×10⁴', '0.75')
    """
    scaled = float(f"{value / 10.0**power:.{EXACT}g}")
    if step:
        digits = max(0, math.ceil(-math.log10(step / 10.0**power) - 1e-9))
        digits += round(step / 10.0**power * 10**digits, 6) % 1 > 0
        text = f"{scaled:.{digits}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{scaled:.6g}" if "e" not in f"{scaled:.6g}" else f"{scaled:f}".rstrip("0")
    text = "0" if not float(text) else text.replace("-", "\N{MINUS SIGN}")
    if not power or text == "0":
        return text
    if form in ("power", "e", "E"):
        tail = f"10{str(power).translate(RAISED)}"
        return tail if text == "1" else f"{text}\N{MULTIPLICATION SIGN}{tail}"
    prefix = PREFIXES.get(power)
    if prefix is None:
        return f"{text}e{power}"
    return text + ("B" if form == "B" and power == 9 else prefix)


def d3(form: str, value: float) -> str:
    """Return a value in the d3 format `form`: optionally a comma between thousands, a precision
    (".2") and "~" (no trailing zeros), then one of the letters f, %, s, d, e, g and r. Raises
    ConfigError for any other form.

    >>> d3(",.1f", 12345.67), d3(".0%", 0.25), d3(".3~s", 1500.0)
    ('12,345.7', '25%', '1.5k')
    """
    match = NUMBER_FORMAT.fullmatch(form)
    if not match:
        raise ConfigError(f"a static picture cannot write numbers as {form!r}; use a form such as "
                          f"'.1f', '.0%' or '.3~s'")
    comma, digits, trim, kind = match.groups()
    if kind == "s":
        power = 3 * math.floor(math.log10(abs(value)) / 3) if value else 0
        scaled = value / 10.0**power
        places = int(digits or 6) - (len(str(int(abs(scaled)))))
        text, tail = f"{scaled:.{max(places, 0)}f}", PREFIXES[power]
    elif kind == "%":
        text, tail = f"{100 * value:{comma}.{digits or 6}f}", "%"
    elif kind == "d":
        text, tail = f"{round(value):{comma}d}", ""
    elif kind == "r":
        text, tail = f"{float(f'{value:.{digits or 6}g}'):{comma}f}", ""
        trim = "~"
    else:
        default = "" if digits is None else f".{digits}"
        text, tail = f"{value:{comma}{default}{kind or 'g'}}", ""
    if trim and "." in text and "e" not in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace("-", "\N{MINUS SIGN}") + tail
