"""The errors of the learner's guess and of the formula against the measurement: the figure below
each notebook's heading `## Reconcile`."""

import math
from collections.abc import Iterable
from html import escape
from textwrap import wrap

from lessons.figures.colours import ANSWER_COLOURS
from lessons.figures.drawing import PALE, axis, figure, note, rule, scatter
from lpkit.errors import ConfigError
from lpkit.predict.compare import DIFFERENCES, Row, disturbance
from lpkit.predict.units import quantity

ANSWERS = {"formula": ("formula", ANSWER_COLOURS["formula"], "circle", ("center bottom", 7)),
           "your guess": ("guess", ANSWER_COLOURS["guess"], "diamond", ("center top", -7))}
LINEAR = 0.1        # errors up to about this size have a linear scale, larger ones a log scale
NAME_LETTERS = 22   # letters per line of a row's name
SHOWN = 10.0        # the axis contains at least -SHOWN to SHOWN, in percent or a row's unit


def comparison_figure(rows: Iterable[Row], *, title: str = "") -> dict:
    """Return the plotly spec of the errors of formula and guess. `rows`: a `Comparison` or its
    rows; the first row is on top. Raises ConfigError without rows.

    Zero on the axis is the measurement, or the formula if nothing was measured. An error is in
    percent of that value; if the row's unit is a key of `DIFFERENCES` (for example dB), the error
    is a difference in that unit. The axis is linear near zero and logarithmic beyond, so that an
    error of 0.001% and a factor of 3 can be read in one figure."""
    rows = list(rows)
    if not rows:
        raise ConfigError("a comparison needs at least one row to show")
    lines, names = range(len(rows)), list(map(_name, rows))
    pale = [PALE if disturbance(row.others) else 1.0 for row in rows]
    data, notes, reach = [], [], _place(SHOWN)
    for answer, (field, colour, symbol, (at, pixels)) in ANSWERS.items():
        values = [getattr(row, field) for row in rows]
        if not any(value is not None for value in values):
            continue
        offs = [None if value is None else _deviation(value, row)
                for value, row in zip(values, rows)]
        places = [None if off is None else _place(off) for off in offs]
        reach = max([reach, *(abs(place) for place in places if place is not None)])
        words = ["" if value is None else f"{quantity(value, row.unit)} ({_off(off, row)})"
                 for value, off, row in zip(values, offs, rows)]
        data.append(scatter(places, lines, answer, colour, mode="markers", text=words,
                            marker={"symbol": symbol, "size": 11, "opacity": pale},
                            cliponaxis=False, hover="%{text}"))
        notes += [note(escape(words_of_row), place, line, at, yshift=pixels, font={"size": 12})
                  for words_of_row, place, line in zip(words, places, lines) if words_of_row]
    high = max(30 + 16 * len(data), *(17 * (2 + name.count("<br>")) for name in names))
    units = dict.fromkeys(DIFFERENCES.get(row.unit, "%") for row in rows)
    return figure(
        data, title, height=120 + high * len(rows), others=max(row.others for row in rows),
        xaxis=axis(f"error against the measurement, {' or '.join(units)}", **_powers(reach)),
        yaxis={"ticks": "", "tickvals": list(lines), "ticktext": names,
               "range": [len(rows) - 0.4, -0.6], "zeroline": False}, annotations=notes,
        shapes=[rule(x=0, colour=ANSWER_COLOURS["measured"], width=2, dash="solid",
                     layer="below")])


def _name(row: Row) -> str:
    """Return the label of a row: its name, wrapped, and the measured value in bold."""
    what = "not measured" if row.measured is None else quantity(row.measured, row.unit)
    name = "<br>".join(map(escape, wrap(row.name, NAME_LETTERS))) or "unnamed"
    return f"{name}<br><b>{what}</b>"


def _deviation(value: float, row: Row) -> float:
    """Return the error of `value`: a difference if the row's unit is in `DIFFERENCES`, else percent
    of the row's measurement (infinite if the measurement is 0)."""
    base = row.truth
    if row.unit in DIFFERENCES or value == base:
        return value - base
    return 100 * (value / base - 1) if base else math.copysign(math.inf, value)


def _off(off: float, row: Row) -> str:
    """Return the error `off` (see `_deviation`) as text: "+12%", "-0.9 dB", "exact"."""
    if off == 0:
        return "exact"
    if math.isinf(off):
        return "relative to 0"
    number = f"{off:+.2g}" if abs(off) < 9.95 else f"{off:+,.0f}"
    return f"{number} {DIFFERENCES[row.unit]}" if row.unit in DIFFERENCES else f"{number}%"


def _place(off: float) -> float:
    """Return the axis coordinate of an error: sign(off) log10(1 + |off| / LINEAR). It is about
    linear up to LINEAR and logarithmic beyond. Errors above 1e6 are drawn at 1e6."""
    return math.copysign(math.log10(1 + min(abs(off), 1e6) / LINEAR), off)


def _powers(reach: float) -> dict:
    """Return the settings of the axis: its range, and ticks at 0 and at plus and minus the powers
    of ten from 1 up to the coordinate `reach` (see `_place`)."""
    sizes = [10.0**power for power in range(7) if _place(10.0**power) <= 1.02 * reach]
    ticks = [-size for size in reversed(sizes)] + [0.0] + sizes
    return {"tickvals": list(map(_place, ticks)),
            "ticktext": [f"{tick:+g}" if tick else "0" for tick in ticks],
            "range": [-1.6 * reach, 1.6 * reach], "zeroline": False}
