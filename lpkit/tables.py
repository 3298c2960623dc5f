"""Format results: as a dict for JSON, as HTML for a notebook, as aligned text for a terminal."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from html import escape
from operator import attrgetter
from textwrap import fill
from typing import Any

from lpkit.errors import in_one_line

INK, FAINT, GRID = "#24292f", "#6b7280", "#e5e7eb"     # colours of figures on a white background
# colours in HTML: the colour of JupyterLab's theme, or outside of JupyterLab the second value
TEXT, QUIET, LINE, LINK = (f"var(--jp-{name}, {colour})" for name, colour in (
    ("content-font-color1", INK), ("content-font-color2", FAINT), ("border-color2", GRID),
    ("content-link-color", "#004488")))
SENTENCE = 16       # a cell with more letters counts as a sentence, which may wrap
FONT = ("system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', Arial, "
        "sans-serif")


def picked(source: object, names: str, **renamed: str) -> dict[str, Any]:
    """Return some attributes of `source` as a dict for JSON. `names`: the attributes, separated by
    spaces; of a dotted name, the last part becomes the key. `renamed`: key=attribute, for other
    keys.

    >>> picked(range(2, 9), "start stop.real", every="step")
    {'start': 2, 'real': 9, 'every': 1}
    """
    paths = {name.rpartition(".")[2]: name for name in names.split()} | renamed
    values = {key: attrgetter(path)(source) for key, path in paths.items()}
    return {key: dict(value) if isinstance(value, Mapping) else value
            for key, value in values.items()}


def page(lines: Callable[[Any], Iterator[str]]) -> Callable[[Any], str]:
    """Decorate a function that yields the lines and tables of a result: the decorated function
    joins them by line breaks and returns one text."""
    return wraps(lines)(lambda result: "\n".join(lines(result)))


def html_table(heads: Sequence[str], rows: Iterable[Sequence[object]], *,
               caption: str = "", below: Iterable[str] = ()) -> str:
    """Return a plain HTML table. Cells are escaped. The first column and columns with sentences are
    aligned left, other columns right. Only sentences may wrap.

    heads:   texts of the header row; empty: no header row
    caption: text above the table
    below:   sentences below the last row
    """
    rows = [list(map(str, row)) for row in rows]
    columns = list(zip(*rows)) or [()] * len(heads)
    # minimum width of each column in em; 0 if the column has no sentence
    least = [min(16, max(map(len, column)) / 2) if any(
        sum(map(str.isalpha, cell)) > SENTENCE for cell in column) else 0 for column in columns]

    def line(cells: Sequence[str], tag: str, style: str) -> str:
        """Return a row <tr>. tag: th or td; style: further CSS of each cell."""
        html = ""
        for i, (cell, em) in enumerate(zip(cells, least)):
            side = "left" if em or i == 0 else "right"
            wrap = f"min-width:{em:g}em;" if em else "white-space:nowrap;" * (tag == "td")
            html += (f"<{tag} style='padding:3px 12px;text-align:{side};{wrap}{style}'>"
                     f"{escape(cell)}</{tag}>")
        return f"<tr>{html}</tr>"

    rule, font = f"border-bottom:1px solid {LINE};", f"font:13px {escape(FONT)};line-height:1.5"
    above = (f"<div style='max-width:60em;padding:3px 12px;color:{QUIET};{font}'>"
             # not a <caption> element, which would wrap at the width of a narrow table
             f"{escape(caption)}</div>")
    return "".join([
        above if caption else "",
        f"<table style='border-collapse:collapse;{font};color:{TEXT};"
        f"font-variant-numeric:tabular-nums'>",
        line(heads, "th", f"{rule}font-weight:600;") if heads else "",
        *(line(row, "td", rule) for row in rows),
        *(f"<tr><td colspan='{len(columns)}' style='padding:3px 12px;text-align:left'>"
          f"{escape(words)}</td></tr>" for words in below), "</table>"])


def text_table(rows: Iterable[Sequence[str]], *, align: str = "<", indent: str = "") -> str:
    """Return a table of text. Each column is as wide as its widest cell. `align`: < or > for each
    column; the last one applies to all further columns."""
    rows = [[in_one_line(cell) for cell in row] for row in rows]
    sides = align + align[-1] * max(map(len, rows), default=0)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths))
             for row in rows)
    return "\n".join((indent + line).rstrip() for line in lines)


def beside(name: str, value: str, at: int, width: int) -> str:
    """Return `name`, followed by `value` in lines that begin at column `at` and end at `width`. No
    word is broken."""
    return fill(value, width, initial_indent=f"{name:<{at - 2}}  ", subsequent_indent=" " * at,
                break_long_words=False, break_on_hyphens=False)
