"""JSON with checksums, which detect a flipped bit, a truncated file and later edits.

A JSON object contains the SHA-256 of its other fields; a line of a JSON Lines file contains the
first 16 digits of the SHA-256 of its other fields. Both are computed from the canonical text
(sorted keys, no spaces), so a change of spaces or order is no damage. Each line also contains the
checksum of the line before it, so a line that is lost, repeated, moved or from another run is
detected, too.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lpkit.errors import ConfigError, DamagedError, named
from lpkit.files import read_text, whole_file, write_atomically

SUM, LINE_SUM = "sha256", "sum"
RUN, NUMBER, BEFORE = "run", "line", "before"       # fields of a line in addition to its value
MARK_DIGITS = 16            # digits of a SHA-256 in lines and in the names of runs
MOST_BYTES = 1 << 28        # large, because the header of token files contains the tokenizer
LONGEST_LINE = 1 << 20
# errors that reading a damaged record can raise
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def plain(value: Any) -> Any:
    """Returns `value` in the form that it has after json.dumps and json.loads: lists for tuples,
    texts as keys. NaN and infinity become None.

    >>> plain({1: (2.0, float("nan"))})
    {'1': [2.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def canonical(value: Any) -> bytes:
    """Return the JSON text from which checksums are computed. Raises ValueError for NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    """Return the SHA-256 of `canonical(value)`, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def sealed(value: Mapping[str, Any]) -> str:
    """Return `value` as JSON text with its checksum in the field SUM."""
    value = plain(value)
    return json.dumps({**value, SUM: digest(value)}, indent=1)


def unsealed(text: str, path: Path) -> dict[str, Any]:
    """Returns the value of a text that `sealed` returned, without its checksum. `path`: the file of
    the text, for messages. Raises DamagedError."""
    try:
        value = json.loads(text)
        expected, actual = value.pop(SUM), digest(value)
    except UNREADABLE as error:
        raise DamagedError(f"{named(path)} is not a whole record ({type(error).__name__}: {error})"
                           f"; it was cut off or altered") from None
    if actual != expected:
        raise DamagedError(f"{named(path)} does not match its checksum; it was altered after it "
                           f"was written")
    return value


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a sealed value to a file atomically. NaN becomes null. Raises OSError."""
    write_atomically(path, sealed(value))


def read(path: Path) -> dict[str, Any]:
    """Returns the value of a sealed file. Raises DamagedError, also for a file that does not exist
    or cannot be read."""
    return unsealed(text_of(path), path)


def of_others(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Returns the JSON object in a file that another program wrote, without a checksum. Raises
    DamagedError."""
    text = text_of(path, most_bytes)
    try:
        content = json.loads(text)
    except UNREADABLE:
        content = None
    if not isinstance(content, dict):
        raise DamagedError(f"{named(path)} is not the JSON object that it should be; get it again")
    return content


def text_of(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Returns the text of a file. Raises DamagedError if it cannot be read."""
    try:
        return read_text(path, most_bytes)
    except ConfigError as error:
        raise DamagedError(str(error)) from None


class Chain:
    """Makes the lines of a file. Each line contains its run, its number and the checksum of the
    previous line, so its own checksum covers all lines up to it. Continues after the last
    undamaged line of `path`."""

    def __init__(self, path: Path, run: str | None):
        self.run, (self.number, self.sum) = run, head(path)

    def line(self, value: Mapping[str, Any]) -> str:
        """Return the next line of the file, with its line break. The caller writes it."""
        self.number += 1
        value = plain({**value, RUN: self.run, NUMBER: self.number, BEFORE: self.sum})
        self.sum = digest(value)[:MARK_DIGITS]
        return json.dumps({**value, LINE_SUM: self.sum}) + "\n"


@dataclass(frozen=True)
class Line:
    """A line of a file, as `Chain.line` made it."""

    value: dict[str, Any]
    run: str | None
    number: int
    before: str     # checksum of the previous line
    sum: str        # checksum of this line

    @classmethod
    def parse(cls, text: bytes) -> "Line":
        """Returns the Line that `text` contains. Raises one of UNREADABLE if it is damaged."""
        value = json.loads(text)
        expected = value.pop(LINE_SUM)
        if expected != digest(value)[:MARK_DIGITS] or not text.endswith(b"\n"):
            raise ValueError("it does not match its checksum")
        return cls(value, value.pop(RUN), value.pop(NUMBER), value.pop(BEFORE), expected)


def head(path: Path) -> tuple[int, str]:
    """Returns the number and the checksum of the last undamaged line of a file, or (0, "") if there
    is none. Reads only the end of the file."""
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LONGEST_LINE))
            for text in reversed(file.readlines()):
                with suppress(*UNREADABLE):
                    last = Line.parse(text)
                    return last.number, last.sum
    return 0, ""


def read_lines(path: Path, run: str | None = None, vouched: Iterable[tuple[str, int, str]] = ()
               ) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the values of the undamaged lines, and a sentence for each group of damaged or
    missing lines. A missing file has no lines.

    run:     the run that wrote the lines; None: unknown, so each line is checked by itself, and
             lost or moved lines are not detected
    vouched: (name of another file, number of a line, its checksum): lines of which another file
             records that they were written, so that a cut at the end of this file is detected
    """
    good, problems, sums = [], [], {}
    # the previous line; None if it is damaged, so that the chain cannot be checked
    before: Line | None = Line({}, run, 0, "", "")
    text = path.read_bytes() if path.is_file() else b""
    for place, raw in enumerate(text.splitlines(keepends=True), 1):
        why = ""
        try:
            line = Line.parse(raw)
        except UNREADABLE as error:
            line, why = None, "cut off, as a kill leaves it; it is passed over"
            if raw.endswith(b"\n"):
                why = f"damaged ({type(error).__name__}: {error}); it is passed over"
        if line and run is not None:
            if line.run != run:
                line, why = None, "of another run; it is passed over"
            elif sums.get(line.number) == line.sum:
                line, why = before, "there twice; it is passed over"
            elif before and line.before != before.sum:
                why = "not the one that followed the line before it: lines are missing, or altered"
        if why:
            problems.append((place, why))
        if line and line is not before:
            good.append(line.value)
            sums[line.number] = line.sum
        before = line
    reported = {place for place, _ in problems}
    lacking = sorted({who for who, number, checksum in vouched
                      if number and number not in reported and sums.get(number) != checksum})
    return good, [*_sentences(path, problems), *(
        f"{named(path)} lacks lines that {who} vouches for, or has others in their place"
        for who in lacking[:1])]


def _sentences(path: Path, problems: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Yield a sentence for each group of consecutive lines with the same problem. `problems`:
    (number of a line, problem)."""
    # within a group, the line number and the index grow together, so their difference is constant
    runs = groupby(enumerate(problems), lambda pair: (pair[1][1], pair[1][0] - pair[0]))
    for (why, _), group in runs:
        places = [place for _, (place, _) in group]
        which = f"line {places[0]}, is" if len(places) == 1 else f"lines {places[0]} to " \
            f"{places[-1]}, are"
        yield f"{named(path)}, {which} {why}"


def rewind(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, because a resumed run repeats these steps. Damaged
    lines before the last line that stays are kept, too."""
    lines, end = [], 0
    for text in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        try:
            if Line.parse(text).value["step"] > step:
                continue
            end = len(lines) + 1
        except UNREADABLE:
            pass
        lines.append(text)
    with whole_file(path) as temporary:
        temporary.write_bytes(b"".join(lines[:end]))
