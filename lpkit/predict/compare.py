"""Three numbers for one question: what you said, what the formula says, what the run did."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lpkit.predict.units import quantity
from lpkit.tables import html_table


@dataclass(frozen=True, kw_only=True)
class Row:
    """One question. `guess` and `measured` may be missing; `where` says what the measurement is:
    "cpu, median of 5", "recorded: h200-2026-01.json"."""

    name: str
    formula: float
    measured: float | None
    unit: str
    where: str
    guess: float | None = None

    @property
    def error(self) -> float | None:
        """Relative and signed: +0.10 means that the formula is 10% above the measurement."""
        return _error(self.formula, self.measured)

    @property
    def guess_error(self) -> float | None:
        return _error(self.guess, self.measured)


@dataclass(frozen=True)
class Comparison:
    """Rows side by side; shows itself as a table in a notebook."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, *, guess: float | None = None, formula: float, measured: float | None, unit: str,
           where: str, name: str = "") -> "Comparison":
        """A single question."""
        return cls((Row(name=name, guess=guess, formula=formula, measured=measured, unit=unit,
                        where=where),))

    @classmethod
    def of_rows(cls, formula: dict[str, float], measured: dict[str, float], *, unit: str,
                where: str) -> "Comparison":
        """A row for each name in either; what one side lacks is 0 there."""
        names = [*formula, *(name for name in measured if name not in formula)]
        return cls(tuple(Row(name=name, formula=formula.get(name, 0),
                             measured=measured.get(name, 0), unit=unit, where=where)
                         for name in names))

    @property
    def worst_error(self) -> float:
        """The largest relative error of the formula, without its sign."""
        errors = [abs(row.error) for row in self.rows if row.error is not None]
        if not errors:
            raise ValueError("nothing was measured, so there is no error")
        return max(errors)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def to_dict(self) -> list[dict[str, Any]]:
        """JSON-ready: the error of a row that was not measured, or measured as nothing, is None."""
        return [{**asdict(row), "error": None if row.error is None or math.isinf(row.error)
                 else row.error}
                for row in self.rows]

    def _repr_html_(self) -> str:
        guessed = any(row.guess is not None for row in self.rows)
        heads = ["", *(["your guess"] if guessed else []), "formula", "measured",
                 "formula is off by", "where"]
        lines = []
        for row in self.rows:
            values = [*([row.guess] if guessed else []), row.formula, row.measured]
            sizes = ["" if value is None else quantity(value, row.unit) for value in values]
            lines.append([row.name, *sizes, percent(row.error), row.where])
        return html_table(heads, lines, prose=len(heads) - 1)


def percent(error: float | None) -> str:
    """+3.2%, exact, or nothing."""
    if error is None:
        return ""
    if math.isinf(error):
        return "nothing measured"
    return "exact" if error == 0 else "under 0.1%" if abs(error) < 0.0005 else f"{error:+.1%}"


def _error(value: float | None, measured: float | None) -> float | None:
    if value is None or measured is None:
        return None
    if measured == 0:
        return 0.0 if value == 0 else float("inf")
    return value / measured - 1
