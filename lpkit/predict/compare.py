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
    def of(cls, *, name: str = "", **row: Any) -> "Comparison":
        """A single question: the fields of its Row."""
        return cls((Row(name=name, **row),))

    @classmethod
    def of_rows(cls, formula: dict[str, float], measured: dict[str, float], *, unit: str,
                where: str) -> "Comparison":
        """A row for each name in either; what one side lacks is 0 there."""
        return cls(tuple(Row(name=name, formula=formula.get(name, 0),
                             measured=measured.get(name, 0), unit=unit, where=where)
                         for name in {**formula, **measured}))

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
        rows = []
        for row in self.rows:
            finite = row.error is not None and math.isfinite(row.error)
            rows.append({**asdict(row), "error": row.error if finite else None})
        return rows

    def _repr_html_(self) -> str:
        heads = ["", "formula", "measured", "formula is off by", "where"]
        guessed = any(row.guess is not None for row in self.rows)
        if guessed:
            heads.insert(1, "your guess")
        lines = []
        for row in self.rows:
            values = [row.guess] * guessed + [row.formula, row.measured]
            sizes = ["" if value is None else quantity(value, row.unit) for value in values]
            lines.append([row.name, *sizes, percent(row.error), row.where])
        return html_table(heads, lines, prose=len(heads) - 1)


def percent(error: float | None) -> str:
    """+3.2%, exact, or nothing."""
    if error is None:
        return ""
    if math.isinf(error):
        return "nothing measured"
    if error == 0:
        return "exact"
    return "under 0.1%" if abs(error) < 0.0005 else f"{error:+.1%}"


def _error(value: float | None, measured: float | None) -> float | None:
    if value is None or measured is None:
        return None
    if measured == 0:
        return 0.0 if value == 0 else math.inf
    return value / measured - 1
