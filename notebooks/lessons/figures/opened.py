"""HTML of the details of a prediction: the memory and the step time of a layout, row by row. A
click on a row opens its formula and source."""

import re
from collections.abc import Sequence
from html import escape

from lessons.figures.style import COLOURS
from lpkit.predict.ledger import MOMENTS, Memory
from lpkit.predict.time import StepTime
from lpkit.predict.units import duration, quantity
from lpkit.tables import FONT, LINE, LINK, QUIET, TEXT

KINDS = {   # by kind of row of a step's time: its colour
    "products": COLOURS[0], "attention": COLOURS[2], "limited by memory": COLOURS[3],
    "recomputation": "#e0a3ad", "communication": COLOURS[1], "idle": COLOURS[6],
}
# by name of row: its kind. Of other names, those with a colon are "communication", the rest
# "products" (`lessons.l09_predict_before_you_rent.kind_of`)
KIND_OF = {
    "attention": "attention", "norms, activations, loss": "limited by memory",
    "weight copies": "limited by memory", "optimizer": "limited by memory",
    "recomputation": "recomputation", "pipeline: bubble": "idle", "host": "idle",
}


def opened_rows(title: str, rows: Sequence[tuple[str, float, str, str, Sequence[str]]],
                whole: float) -> str:
    """Return HTML: a title, and rows that open on a click; the row with the largest value is open
    already.

    rows: for each row its name, its value, the value as text, a short text next to it, and the
        lines that a click shows. Web addresses in these lines become links.
    whole: the value that is 100%; each row shows its share of it
    """
    largest, *_ = max(rows, key=lambda row: row[1])
    link = (rf"<a style='color:{LINK};text-decoration:underline' target='_blank' "
            rf"rel='noopener' href='\g<0>'>\g<0></a>")
    html = (f"<div style='font:13px {escape(FONT)};color:{TEXT};line-height:1.5;max-width:1000px'>"
            f"<div style='font-weight:600;padding:8px 0 2px'>{escape(title)}</div>")
    for name, value, value_text, summary, lines in rows:
        html += (f"<details{' open' if name == largest else ''} "
                 f"style='border-bottom:1px solid {LINE}'>"
                 f"<summary style='cursor:pointer;font-variant-numeric:tabular-nums'>")
        for text, width, side in ((name, "15em", "left"), (value_text, "8em", "right"),
                                  (f"{value / whole:.1%}", "4.5em", "right")):
            html += (f"<span style='display:inline-block;width:{width};text-align:{side};"
                     f"white-space:nowrap'>"
                     f"{escape(text)}</span>")
        inside = "<br>".join(re.sub(r"https://[^\s,;)]+", link, escape(line))
                             for line in lines if line)
        html += (f"<span style='padding-left:1.5em;color:{QUIET}'>{escape(summary)}</span>"
                 f"</summary>"
                 f"<div style='padding:2px 0 6px 2em;color:{QUIET}'>{inside}</div></details>")
    return html + "</div>"


def opened_memory(held: Memory) -> str:
    """Return HTML of the predicted memory of a device: `opened_rows` with the bytes of each row of
    the ledger, as shares of the peak."""
    sizes, rows = held.at(held.peak_moment), []
    for row in held.rows:
        moments = ", ".join(row.at) if len(row.at) < len(MOMENTS) else "every moment"
        rows.append((row.name, row.bytes, quantity(row.bytes, "bytes"),
                     "" if row.name in sizes else "not at the peak",
                     (row.formula, row.source, f"allocated at: {moments}")))
    return opened_rows(f"peak memory of a device: {quantity(held.peak_bytes, 'bytes')}", rows,
                       held.peak_bytes)


def opened_time(step: StepTime) -> str:
    """Return HTML of the predicted seconds of a step: `opened_rows` with the seconds of each row.
    Seconds in which a row overlaps with other rows are not in its value; they are named next to
    it."""
    rows = []
    for row in step.rows:
        hidden = f"plus {duration(row.hidden_seconds)} that overlap with other rows"
        rows.append((row.name, row.seconds, duration(row.seconds),
                     hidden if row.hidden_seconds else "", (row.formula, row.source)))
    return opened_rows(f"time of a step: {duration(step.step_seconds)}", rows, step.step_seconds)
