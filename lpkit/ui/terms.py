"""Formulas from the code that computes them (`lpkit.predict.terms`): as a table in letters, and row
by row with numbers put in."""

from collections.abc import Mapping

from lpkit.predict.terms import Term
from lpkit.predict.units import quantity
from lpkit.tables import html_table, opened_rows


def terms_table(columns: Mapping[str, Mapping[str, Term]], *, rows: str = "",
                caption: str = "") -> str:
    """HTML, in letters: a column for each, by row. `rows`: what the rows are."""
    longest = max(columns.values(), key=len)
    names = dict.fromkeys((*longest, *(name for terms in columns.values() for name in terms)))
    return html_table((rows, *columns), [
        (name, *(str(terms.get(name, "")) for terms in columns.values())) for name in names],
        caption=caption)


def terms_opened(terms: Mapping[str, Term], sizes: Mapping[str, int], unit: str, *,
                 title: str) -> str:
    """HTML: each term's value; a click opens it in letters and in numbers."""
    whole = sum(float(term) for term in terms.values())
    rows = [(name, float(term), quantity(float(term), unit), "",
             (f"{term}  =  {term.put_in(sizes)}  =  {float(term):,.0f} {unit}",))
            for name, term in terms.items() if term]
    return opened_rows(f"{title}: {quantity(whole, unit)}", rows, whole)
