"""A page to print: the exercises that a learner solved, and how many of the 90% intervals held.

    certificate("Ada Lovelace")     # certificate.html in the notebook's folder, A4 in landscape

The page shows the contents of the learner's file on this machine and proves nothing more: the owner
of the file can change it, and nobody signs the page. It is one file without a script, and it loads
nothing.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path

from IPython.display import HTML

import lpkit
from lessons.figures.style import COLOURS
from lessons.judging.index import exercises, lesson
from lessons.judging.judge import Exercise
from lessons.judging.learner import Answered, Learner, Tried, read
from lpkit.errors import ConfigError, named, shown
from lpkit.files import write_atomically
from lpkit.tables import FAINT, FONT, GRID, INK

FILE = "certificate.html"
LONGEST = 80            # most characters of a name
JOINERS = "\u200c\u200d"        # some scripts need them; other control characters are not allowed
MAIN, RIGHT = COLOURS[0], COLOURS[4]
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

STYLE = f"""
@page {{ size: A4 landscape; margin: 11mm; }}
* {{ box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
body {{ margin: 0 auto; max-width: 275mm; padding: 6mm; color: {INK}; font: 12px/1.45 {FONT};
        font-variant-numeric: tabular-nums; background: #fff; overflow-wrap: anywhere; }}
@media print {{ body {{ padding: 0; font-size: 10px; }} section {{ margin-bottom: 2mm; }} }}
header {{ border-top: 5px solid {MAIN}; padding-top: 5mm; }}
.top {{ display: flex; justify-content: space-between; gap: 4mm; }}
.of {{ color: {FAINT}; }}
h1 {{ margin: 1mm 0; font-size: 30px; line-height: 1.15; font-weight: 600; color: {MAIN}; }}
.numbers {{ display: flex; flex-wrap: wrap; gap: 4mm 12mm; margin: 5mm 0; }}
.numbers b {{ display: block; font-size: 24px; line-height: 1.2; font-weight: 600; }}
main {{ columns: 3; column-gap: 8mm; border-top: 1px solid {GRID}; padding-top: 4mm; }}
@media (max-width: 720px) {{ main {{ columns: 1; }} }}
section {{ break-inside: avoid; margin-bottom: 4mm; }}
h2 {{ display: flex; justify-content: space-between; gap: 3mm; margin: 0; font-size: 13px; }}
.bar {{ height: 3px; margin: 1mm 0; background: {GRID}; }}
.bar div {{ height: 3px; background: {RIGHT}; }}
table {{ width: 100%; border-collapse: collapse; }}
td {{ padding: 0; vertical-align: top; }}
td + td {{ width: 21mm; text-align: right; white-space: nowrap; color: {FAINT}; }}
footer {{ border-top: 1px solid {GRID}; margin-top: 3mm; padding-top: 3mm; color: {FAINT};
          break-inside: avoid; }}
"""


def certificate(name: str = "", folder: Path | None = None) -> HTML | None:
    """Write the page into `folder`, by default the notebook's. Print the reason if it cannot."""
    if not name:
        print('Write your name between the quotes: certificate("Ada Lovelace")')
        return None
    path = (folder or Path.cwd()) / FILE
    try:
        write_atomically(path, page(checked_name(name), read(), exercises()), mode=0o600)
    except ConfigError as error:
        print(error)
        return None
    except OSError as error:
        print(f"{named(path)} was not written: {error.strerror or error}")
        return None
    return HTML(f"<a href='{FILE}' target='_blank'>{FILE}</a> is in the folder of this notebook. "
                f"Open it in a browser, and print it on A4 in landscape.")


def checked_name(name: object) -> str:
    """Return the name. Raises ConfigError if it is not a name on one line."""
    text = " ".join(name.split()) if isinstance(name, str) else ""
    visible = "".join(letter for letter in text if letter not in JOINERS)
    if not visible or not visible.isprintable() or len(text) > LONGEST:
        raise ConfigError(f"{shown(name)} cannot be the name on a certificate; use at most "
                          f"{LONGEST} letters, on one line")
    return text


@dataclass(frozen=True)
class Part:
    """What a learner did in one notebook. `total`: its number of exercises."""

    number: str
    title: str
    total: int
    known: int              # solved exercises that the course still has
    solved: Mapping[str, Tried]
    guesses: Sequence[Answered]


def parts_of(learner: Learner, course: Mapping[str, Exercise]) -> list[Part]:
    """Return the notebooks in which an exercise was solved or a guess locked, in order."""
    names = [*course, *sorted(learner.exercises.keys() - course.keys())]
    solved = {name: learner.exercises[name] for name in names
              if name in learner.exercises and learner.exercises[name].first_right}
    numbers = sorted({name.partition(".")[0] for name in
                      (*solved, *(guess.name for guess in learner.guesses))})
    return [Part(number, title(number), len(_within(number, course)),
                 len(_within(number, course.keys() & solved.keys())),
                 {name: solved[name] for name in _within(number, solved)},
                 [guess for guess in learner.guesses if guess.name.partition(".")[0] == number])
            for number in numbers]


def _within(number: str, names: Iterable[str]) -> list[str]:
    """Return the names of exercises that belong to notebook `number`."""
    return [name for name in names if name.partition(".")[0] == number]


def title(number: str) -> str:
    """Return the title of the lesson with this number; empty if there is no such lesson now."""
    try:
        match = re.match(r"Lesson \d\d, (.+?): its ", lesson(number).__doc__ or "")
    except ConfigError:
        return ""
    return match[1][:1].upper() + match[1][1:] if match else ""


def intervals(guesses: Iterable[Answered]) -> list[Answered]:
    """Return the guesses with a 90% interval that have been compared with a result."""
    return [guess for guess in guesses if guess.factor and guess.held is not None]


def page(name: str, learner: Learner, course: Mapping[str, Exercise]) -> str:
    """Return the certificate as an HTML page. `course`: the exercises that there are now."""
    parts = parts_of(learner, course)
    dates = sorted([str(tried.first_right) for part in parts for tried in part.solved.values()]
                   + [guess.date for guess in learner.guesses])
    when = "" if not dates else (f"on {dates[0]}" if dates[0] == dates[-1]
                                 else f"from {dates[0]} to {dates[-1]}")
    scored = intervals(learner.guesses)
    held = sum(bool(guess.held) for guess in scored)
    choices = [guess for guess in learner.guesses if not guess.factor and guess.held is not None]
    numbers = [
        (f"{sum(part.known for part in parts)} of {len(course)}", "exercises solved"),
        (f"{sum(bool(part.solved) for part in parts)}", "notebooks"),
        (f"{len(learner.guesses)}", "guesses before the result"),
        (f"{held} of {len(scored)}", "90% intervals held" + (
            f": {held / len(scored):.0%}" if scored else "")),
        (f"{sum(bool(guess.held) for guess in choices)} of {len(choices)}", "choices right")]
    summary = "".join(f"<div><b>{escape(value)}</b>{escape(what)}</div>" for value, what in numbers)
    nothing = "<p>Nothing was solved or guessed yet.</p>"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width">
<title>lpkit: {escape(name)}</title><style>{STYLE}</style></head><body>
<header><div class="of top"><span>lpkit: predict, run, reconcile</span>
<span>from the learner's own file; not signed</span></div><h1>{escape(name)}</h1>
<div>worked through what makes training Transformers cheaper {escape(when)}</div></header>
<div class="numbers">{summary}</div>
<main>{"".join(map(section, parts)) or nothing}</main>
<footer>lpkit {escape(lpkit.__version__)} made this page on {date.today().isoformat()} from the
learner's file on the learner's machine. The page shows the contents of that file. It is not signed,
and nobody supervised the exercises. The date of an exercise is the date of its first right answer.
Each judged answer counts as an attempt, except further right answers after the first one. A 90%
interval holds if it contains the result.</footer>
</body></html>
"""


def section(part: Part) -> str:
    """Return the HTML of one notebook's exercises and guesses."""
    rows = "".join(f"<tr><td>{escape(name.partition('.')[2])}</td>"
                   f"<td>{escape(str(tried.first_right))}</td>"
                   f"<td>{tried.attempts} attempt{'s' * (tried.attempts != 1)}</td></tr>"
                   for name, tried in part.solved.items())
    share = part.known / part.total if part.total else 0
    scored = intervals(part.guesses)
    line = f"guesses: {len(part.guesses)}" if part.guesses else ""
    if scored:
        held = sum(bool(guess.held) for guess in scored)
        line += f"; 90% intervals held: {held} of {len(scored)}"
    return (f"<section><h2><span>{escape(f'{part.number} {part.title}'.strip())}</span>"
            f"<span>{part.known} of {part.total}</span></h2>"
            f"<div class='bar'><div style='width:{share:.0%}'></div></div>"
            f"<table>{rows}</table><div class='of'>{escape(line)}</div></section>")
