"""Compare three numbers for one question: your guess, the formula's value, the measured value."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lpkit.predict.units import quantity
from lpkit.tables import html_table, text_table

# Units that are a logarithm or a share. Their errors are differences, not ratios.
DIFFERENCES = {"dB": "dB", "nats": "nats", "%": "points"}
TIED = "cannot be told apart"       # two answers of a quiz are equally likely to be right
# If other processes took more than this share of the cores, measured seconds test no formula.
DISTURBED = 0.1
# A formula that is wrong by more than this factor does not describe the measurement.
FAR = 4.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity with up to three values: the guess, the formula's value, the measured value.

    measured      None: nothing was measured
    where         device and method of the measurement: "cpu, median of 5", or
                  "recorded: h200-2026-01.json"
    guess         the reader's guess; None: there is none
    guess_factor  the reader is 90% sure that the truth is from guess / factor to guess * factor
    others        share of the cores that other processes took during the measurement
    because       the reason that is printed if the formula is wrong by more than FAR times
    """

    name: str
    formula: float
    measured: float | None
    unit: str
    where: str
    guess: float | None = None
    guess_factor: float | None = None
    others: float = 0.0
    because: str = "it does not count the largest part of the measured value"

    @property
    def far(self) -> str:
        """A sentence that warns about a formula that is wrong by more than FAR times; else ""."""
        error = self.error
        if error is None or self.unit in DIFFERENCES or 1 / FAR <= 1 + error <= FAR:
            return ""
        sentence = f"{self.name}: {off_by(self.formula, self.measured, self.unit)}."
        if doubt := disturbance(self.others):
            return f"{sentence} The measurement cannot tell whether the formula is wrong: {doubt}."
        return f"{sentence} The formula does not describe this machine, because {self.because}."

    @property
    def truth(self) -> float | None:
        """The value that a guess is compared with: the measured value, or the formula's value if
        nothing was measured."""
        return self.formula if self.measured is None else self.measured

    @property
    def error(self) -> float | None:
        """The relative error with its sign: +0.10 if the formula is 10% above the measurement."""
        return _error(self.formula, self.measured)

    @property
    def held(self) -> bool | None:
        """True if the interval of the guess contains the truth; None if there is no interval."""
        if None in (self.guess, self.guess_factor, self.truth):
            return None
        return self.guess / self.guess_factor <= self.truth <= self.guess * self.guess_factor


@dataclass(frozen=True)
class Comparison:
    """Rows side by side. A notebook shows them as a table."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, *, name: str = "", **row: Any) -> "Comparison":
        """Return a comparison with a single row, from the fields of its Row."""
        return cls((Row(name=name, **row),))

    @classmethod
    def of_rows(cls, formula: dict[str, float], measured: dict[str, float], *, unit: str,
                where: str) -> "Comparison":
        """Return a row for each name in either dict; a missing value is 0."""
        return cls(tuple(Row(name=name, formula=formula.get(name, 0),
                             measured=measured.get(name, 0), unit=unit, where=where)
                         for name in {**formula, **measured}))

    @property
    def worst_error(self) -> float:
        """The largest absolute relative error of the formula."""
        errors = [abs(row.error) for row in self.rows if row.error is not None]
        if not errors:
            raise ValueError("nothing was measured, so there is no error")
        return max(errors)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return JSON-ready rows. The error is None if a row was not measured, or measured as 0."""
        finite = lambda error: error is not None and math.isfinite(error)
        return [asdict(row) | {"error": row.error if finite(row.error) else None}
                for row in self.rows]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        heads = ["", "formula", "measured", "formula is off by", "where"]
        guessed = any(row.guess is not None for row in self.rows)
        if guessed:
            heads[1:1], heads[-2:-2] = ["your guess"], ["your guess is off by"]
        lines = []
        for row in self.rows:
            off = off_by(row.guess, row.truth, row.unit)
            if row.held is not None:
                off += f", {'inside' if row.held else 'outside'} your 90%"
            values = [row.guess] * guessed + [row.formula, row.measured]
            sizes = ["" if value is None else quantity(value, row.unit) for value in values]
            where = "; ".join(filter(None, (row.where, disturbance(row.others))))
            lines.append([row.name, *sizes, *[off] * guessed,
                          off_by(row.formula, row.measured, row.unit), where])
        return heads, lines

    def __str__(self) -> str:
        heads, lines = self._table()
        return text_table([heads, *lines], align="<")

    def _repr_html_(self) -> str:
        return html_table(*self._table(), below=[row.far for row in self.rows if row.far])


def disturbance(share: float) -> str:
    """Return a note about the `share` of the cores that other processes took, if the share is large
    enough to disturb measured seconds; else ""."""
    return f"others took {share:.0%} of the cores meanwhile" if share > DISTURBED else ""


def off_by(value: float | None, truth: float | None, unit: str) -> str:
    """Return the error of `value` in words: a difference if the unit is a logarithm or a share;
    else percent, or a factor if `value` is 1.5 or more times too high or too low.

    >>> off_by(30.2, 31.5, "dB"), off_by(40, 12.5, "%"), off_by(1.1, 1.0, "s")
    ('-1.3 dB', '+28 points', '+10.0%')
    >>> off_by(2.4e9, 1e9, "bytes"), off_by(1, 4, "days"), off_by(1, 617, "s")
    ('2.4 times too high', '4 times too low', '620 times too low')
    """
    error = _error(value, truth)
    if error is None:
        return ""
    if unit in DIFFERENCES and value != truth:
        return f"{float(f'{value - truth:.2g}'):+g} {DIFFERENCES[unit]}"
    if 0.5 <= error < math.inf:
        return f"{float(f'{1 + error:.2g}'):,.15g} times too high"
    if -1 < error <= -1 / 3:
        return f"{float(f'{1 / (1 + error):.2g}'):,.15g} times too low"
    return percent(error)


def percent(error: float | None) -> str:
    """Return a relative error in words: "+3.2%", "under 0.1%", "exact", "nothing measured" (an
    infinite error), or "" (None)."""
    if error is None:
        return ""
    if math.isinf(error):
        return "nothing measured"
    if error == 0:
        return "exact"
    return "under 0.1%" if abs(error) < 0.0005 else f"{error:+.1%}"


def _error(value: float | None, measured: float | None) -> float | None:
    """Return value / measured - 1; None if either is missing, infinite if `measured` is 0."""
    if value is None or measured is None:
        return None
    if measured == 0:
        return 0.0 if value == 0 else math.inf
    return value / measured - 1
