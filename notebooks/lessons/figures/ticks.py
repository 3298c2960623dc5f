"""Ticks of an axis as plotly.js chooses and writes them: positions and texts, without drawing.

`nice` chooses the step, `number` and `d3` write a value. Sources:
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
APART = {"x": 80, "y": 40}      # least pixels between two ticks
EXACT = 12                      # digits to which a multiple of a step is rounded


def nice(rough: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if rough <= step * power * (1 + 1e-9))


def positions(axis: Mapping[str, Any], letter: str, low: float, high: float,
              pixels: float) -> list[float]:
    """Return where the ticks of a numeric axis are, between `low` and `high`, in data units."""
    if "tickvals" in axis:
        return [value for value in axis["tickvals"] if low <= value <= high]
    many = axis.get("nticks") or min(max(pixels / APART[letter], 4), 9) + 1
    if axis.get("type") == "log":
        return _of_log(axis.get("dtick"), low, high, many)
    step = axis.get("dtick") or nice((high - low) / many)
    return _multiples(step, axis.get("tick0", 0), low, high)


def _multiples(step: float, first: float, low: float, high: float) -> list[float]:
    slack = 1e-6 * (high - low)
    begin = math.ceil((low - first - slack) / step)
    end = math.floor((high - first + slack) / step)
    return [float(f"{first + i * step:.{EXACT}g}") for i in range(begin, end + 1)]


def _of_log(step: float | str | None, low: float, high: float, many: float) -> list[float]:
    """Return ticks of a log axis. `step`: a number of decades; "D1" and "D2" add 2 and 5."""
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
    """Return the texts at `values`, which are `positions` of the axis."""
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
    """Return the power of ten that is written as a prefix or an exponent; 0 from a thousandth to
    ten thousand. `whole`: an axis of powers writes all powers except 1 and 10, as plotly does."""
    if not value:
        return 0
    power = math.floor(math.log10(abs(value)) + 0.01)
    if form == "power":
        return power if abs(power) > 2 or (whole and power not in (0, 1)) else 0
    if form == "none" or abs(power) <= 3:
        return 0
    return 3 * math.floor((power - 1) / 3 + 0.5)


def number(value: float, form: str, power: int, step: float = 0) -> str:
    """Return a value as plotly writes it at a tick, with as many digits as `step` needs."""
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
    """Return a value in the d3 format `form`. Errors: ConfigError for a form outside `,.2~f` with
    f, %, s, d, e, g or r."""
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
