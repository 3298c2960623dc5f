"""Formulas in letters, derived from the code that computes the numbers.

    kept(Lettered(model), batch=letter("B", 8)).operations["norm1"]     # 4 B T (D + 2)

A `Term` is a number that also records how it was computed: as a polynomial in the letters B, T, D,
... (docs/notation.md). The sums of `lpkit.predict` work with Terms as with numbers, so a printed
formula is a result of the same code as the prediction. If that code branches on a size, the branch
is decided by the number; the formula then holds for all sizes that take the same branch.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lessons.activations import kept
from lessons.figures.opened import opened_rows
from lpkit.config import ModelConfig
from lpkit.predict.activations import OUTSIDE
from lpkit.predict.units import quantity
from lpkit.tables import html_table
from lpkit.techniques.blocks import operations
from lpkit.techniques.operation import MicroBatch

ORDER = "LBHGTVEDFMNK"      # order in which the letters of a product are written
POWERS = {2: "²", 3: "³"}
Monomial = tuple[tuple[str, int], ...]      # (letter, power) pairs, sorted: (("B", 1), ("T", 2))


@functools.total_ordering
class Term:
    """A number `value`, and the polynomial `parts`: the coefficient of each product of letters.

    >>> str(4 * letter("B", 8) * (letter("D", 256) + 2))
    '4 B (D + 2)'

    A Term compares like its value. Dividing by a sum, floor division and remainder give plain
    numbers, because their results are not polynomials."""

    __slots__ = ("parts", "value")

    def __init__(self, value: float, parts: Mapping[Monomial, Fraction]):
        self.value = value
        self.parts = {monomial: count for monomial, count in parts.items() if count}

    def __add__(self, other: "Term | float") -> "Term":
        other = _term(other)
        parts = dict(self.parts)
        for monomial, count in other.parts.items():
            parts[monomial] = parts.get(monomial, 0) + count
        return Term(self.value + other.value, parts)

    def __mul__(self, other: "Term | float") -> "Term":
        other = _term(other)
        parts: dict[Monomial, Fraction] = {}
        for ours, count in self.parts.items():
            for theirs, times in other.parts.items():
                both = _times(ours, theirs)
                parts[both] = parts.get(both, 0) + count * times
        return Term(self.value * other.value, parts)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Term":
        return -1 * self

    def __sub__(self, other: "Term | float") -> "Term":
        return self + -1 * other

    def __rsub__(self, other: float) -> "Term":
        return -self + other

    def __truediv__(self, other: "Term | float") -> "Term | float":
        other = _term(other)
        if len(other.parts) != 1:
            return self.value / other.value
        (monomial, count), = other.parts.items()
        inverse = {tuple((letter, -power) for letter, power in monomial): 1 / count}
        return Term(self.value / other.value, (self * Term(1, inverse)).parts)

    def __pow__(self, power: int) -> "Term":
        return math.prod([self] * power)

    def __floordiv__(self, other: "Term | float") -> float:
        return self.value // _term(other).value

    def __mod__(self, other: "Term | float") -> float:
        return self.value % _term(other).value

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Term) else other)

    def __lt__(self, other: "Term | float") -> bool:
        return self.value < _term(other).value

    def __hash__(self) -> int:
        """Return a hash of value and polynomial. It differs from the hash of the plain number,
        although the two are equal: a cached function must not return its result for the number 1
        if it is called with a Term of value 1."""
        return hash((self.value, frozenset(self.parts.items())))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        """Return the term in letters: `4 B T (D + 2)`."""
        return self.written(lambda letter: letter)

    def written(self, shown: Callable[[str], str], times: str = " ") -> str:
        """Return the term as text. `shown` returns the text of a letter; `times` is written between
        two factors. Factors that all parts share are written in front of a parenthesis."""
        parts = {_of_heads(monomial): count for monomial, count in self.parts.items()}
        if len(parts) < 2:
            return "".join(_product(count, monomial, shown, times)
                           for monomial, count in parts.items()) or "0"
        letters = {letter for monomial in parts for letter, _ in monomial}
        shared = tuple((letter, least) for letter in sorted(letters) if (least := min(
            dict(monomial).get(letter, 0) for monomial in parts)))
        count = Fraction(math.gcd(*(number.numerator for number in parts.values())),
                         math.lcm(*(number.denominator for number in parts.values())))
        inverse = tuple((letter, -power) for letter, power in shared)
        rest = {_times(monomial, inverse): number / count for monomial, number in parts.items()}
        inside = ""
        for monomial, number in sorted(rest.items(), key=_place):
            sign = (" - " if number < 0 else " + ") if inside else ("-" if number < 0 else "")
            inside += sign + _product(abs(number), monomial, shown, times)
        if count == 1 and not shared:
            return inside
        return _product(count, shared, shown, times, more=f"({inside})")

    def put_in(self, sizes: Mapping[str, int]) -> str:
        """Return the term with numbers for letters: `4 x 8 x 256 x (256 + 2)`."""
        return self.written(lambda letter: f"{sizes[letter]:,}", " x ")


def _term(number: Term | float) -> Term:
    """Return the number as a Term without letters; return a Term unchanged."""
    return number if isinstance(number, Term) else Term(number, {(): Fraction(number)})


def _times(left: Monomial, other: Monomial) -> Monomial:
    """Return the product of two monomials: powers of equal letters are added."""
    powers = Counter(dict(left))
    powers.update(dict(other))
    return tuple(sorted((letter, power) for letter, power in powers.items() if power))


def _of_heads(monomial: Monomial) -> Monomial:
    """Replace D / H by E, the width of a head."""
    powers = dict(monomial)
    heads = max(0, min(-powers.get("H", 0), powers.get("D", 0)))
    return _times(monomial, (("D", -heads), ("E", heads), ("H", heads)))


def _place(part: tuple[Monomial, Fraction]) -> tuple:
    """Sort key: longest products first, then the largest count; plain numbers last."""
    monomial, count = part
    return (-sum(power for _, power in monomial), -count,
            [ORDER.index(letter) for letter, _ in monomial])


def _product(count: Fraction, monomial: Monomial, shown: Callable[[str], str], times: str, *,
             more: str = "") -> str:
    """Return the text of `count` times a monomial; negative powers become " / letter". `more` is a
    last factor, written as it is."""
    up, down = [], []
    for letter, power in sorted(monomial, key=lambda factor: ORDER.index(factor[0])):
        raised = shown(letter) + ("" if abs(power) == 1 else POWERS[abs(power)])
        (up if power > 0 else down).append(raised)
    if more:
        up.append(more)
    if count.numerator != 1 or not up:
        up.insert(0, f"{count.numerator:,}")
    if count.denominator != 1:
        down.insert(0, f"{count.denominator:,}")
    return times.join(up) + "".join(f" / {divisor}" for divisor in down)


def letter(name: str, value: float) -> Term:
    """Return the Term of one letter with this value."""
    return Term(value, {((name, 1),): Fraction(1)})


@dataclass(frozen=True)
class Lettered:
    """A model config whose sizes (T, L, D, ...) are Terms. All other attributes are the model's. G
    becomes H, and E becomes D / H, if the model's numbers agree."""

    model: ModelConfig

    def __getattr__(self, name: str) -> Any:
        size = getattr(self.model, name)
        if name not in ORDER:
            return size
        if name == "G" and self.model.G == self.model.H:
            return self.H
        if name == "E" and self.model.H * self.model.E == self.model.D:
            return self.D / self.H
        return letter(name, size)


def sizes(model: ModelConfig, **more: int) -> dict[str, int]:
    """Return the number of each letter: the model's sizes, and `more`, for example B=8."""
    return more | {name: getattr(model, name) for name in "TLDHGEFV"}


# Bytes of a model's operations in letters: within one block, and outside the blocks.

Terms = dict[str, Term]


def kept_terms(model: ModelConfig, batch: int, **of: Any) -> tuple[Terms, Terms]:
    """Return the bytes that autograd keeps of `batch` sequences, by operation: within one block,
    and outside the blocks. `of` are other fields of a MicroBatch."""
    lettered = Lettered(model)
    kept_bytes = kept(lettered, batch=letter("B", batch), **of)
    outside = {name: kept_bytes.operations[name] for name in OUTSIDE}
    # what no operation accounts for: the tables of rotary positions, kept once for all blocks
    tables = kept_bytes.total_bytes - lettered.L * kept_bytes.block_bytes - sum(outside.values())
    return kept_bytes.block, outside | ({"cos and sin": tables} if tables else {})


def moved_terms(model: ModelConfig, batch: int, **of: Any) -> tuple[Terms, Terms]:
    """Return the bytes that the operations without a matmul read and write in the forward pass of
    `batch` sequences, by operation: within one block, and outside the blocks. `of` are other fields
    of a MicroBatch."""
    ops = operations(MicroBatch(model=Lettered(model), batch=letter("B", batch), **of))
    outside = (ops.embed, ops.norm, ops.loss)
    return ({op.name: op.moved_bytes for op in ops.block if op.moved_bytes},
            {op.name: op.moved_bytes for op in outside})


# Terms as HTML tables.

def terms_table(columns: Mapping[str, Mapping[str, Term]], *, rows: str = "",
                caption: str = "") -> str:
    """Return an HTML table of terms in letters: a column for each key of `columns`, a row for each
    operation. `rows`: the heading of the first column."""
    longest = max(columns.values(), key=len)
    names = dict.fromkeys((*longest, *(name for terms in columns.values() for name in terms)))
    return html_table((rows, *columns), [
        (name, *(str(terms.get(name, "")) for terms in columns.values())) for name in names],
        caption=caption)


def terms_opened(terms: Mapping[str, Term], sizes: Mapping[str, int], unit: str, *,
                 title: str) -> str:
    """Return HTML with the value of each term in `unit`; a click on a row shows the term in letters
    and with the numbers `sizes` for the letters."""
    whole = sum(float(term) for term in terms.values())
    rows = [(name, float(term), quantity(float(term), unit), "",
             (f"{term}  =  {term.put_in(sizes)}  =  {float(term):,.0f} {unit}",))
            for name, term in terms.items() if term]
    return opened_rows(f"{title}: {quantity(whole, unit)}", rows, whole)
