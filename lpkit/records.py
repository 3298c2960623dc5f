"""JSON that shows when it is not what was written: a flipped bit, a lost half, another hand.

An object carries the SHA-256 of the rest of it, a line the first 16 digits of its own. Both are of
the canonical text (sorted keys, no spaces), so only what changes a value is damage. Lines of a file
are a chain: a line that is lost, doubled, moved or of another run shows, too.
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
RUN, NUMBER, BEFORE = "run", "line", "before"       # what a line carries besides its value
MARK_DIGITS = 16            # of a SHA-256, in lines and in what names a run
MOST_BYTES = 1 << 28        # a header of tokens holds its tokenizer
LONGEST_LINE = 1 << 20
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def plain(value: Any) -> Any:
    """Returns it as JSON gives it back: without tuples, numbers as keys, and NaN, which is null."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def sealed(value: Mapping[str, Any]) -> str:
    value = plain(value)
    return json.dumps({**value, SUM: digest(value)}, indent=1)


def unsealed(text: str, path: Path) -> dict[str, Any]:
    """Returns what `sealed` was given. Raises DamagedError, which names `path`."""
    try:
        value = json.loads(text)
        due, found = value.pop(SUM), digest(value)
    except UNREADABLE as error:
        raise DamagedError(f"{named(path)} is not a whole record ({type(error).__name__}: {error})"
                           f"; it was cut off or altered") from None
    if found != due:
        raise DamagedError(f"{named(path)} does not match its checksum; it was altered after it "
                           f"was written")
    return value


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all; NaN becomes null. Raises OSError."""
    write_atomically(path, sealed(value))


def read(path: Path) -> dict[str, Any]:
    """Raises DamagedError, also for a file that is not there or cannot be read."""
    return unsealed(text_of(path), path)


def of_others(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """A JSON object without a checksum of ours. Raises DamagedError."""
    text = text_of(path, most_bytes)
    try:
        said = json.loads(text)
    except UNREADABLE:
        said = None
    if not isinstance(said, dict):
        raise DamagedError(f"{named(path)} is not the JSON object that it should be; get it again")
    return said


def text_of(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Raises DamagedError."""
    try:
        return read_text(path, most_bytes)
    except ConfigError as error:
        raise DamagedError(str(error)) from None


class Chain:
    """Makes the lines of a file. Each carries its run, its number and the checksum of the line
    before it, so its own checksum stands for all lines up to it."""

    def __init__(self, path: Path, run: str | None):
        self.run, (self.number, self.sum) = run, head(path)

    def line(self, value: Mapping[str, Any]) -> str:
        self.number += 1
        value = plain({**value, RUN: self.run, NUMBER: self.number, BEFORE: self.sum})
        self.sum = digest(value)[:MARK_DIGITS]
        return json.dumps({**value, LINE_SUM: self.sum}) + "\n"


@dataclass(frozen=True)
class Line:
    value: dict[str, Any]
    run: str | None
    number: int
    before: str
    sum: str

    @classmethod
    def parse(cls, text: bytes) -> "Line":
        """Raises one of UNREADABLE."""
        value = json.loads(text)
        due = value.pop(LINE_SUM)
        if due != digest(value)[:MARK_DIGITS] or not text.endswith(b"\n"):
            raise ValueError("it does not match its checksum")
        return cls(value, value.pop(RUN), value.pop(NUMBER), value.pop(BEFORE), due)


def head(path: Path) -> tuple[int, str]:
    """The number and the checksum of the last whole line, which stand for all lines. (0, "") where
    there is none."""
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
    """The lines that are as they were written, and a sentence for each that is not. Of a missing
    file, none.

    run:     whose lines they are; None: nobody knows, and lines are read one by one
    vouched: (who says so, the number of a line, its checksum)
    """
    good, problems, sums = [], [], {}
    before: Line | None = Line({}, run, 0, "", "")      # None: the one before is not known
    text = path.read_bytes() if path.is_file() else b""
    for place, one in enumerate(text.splitlines(keepends=True), 1):
        why = ""
        try:
            line = Line.parse(one)
        except UNREADABLE as error:
            line, why = None, "cut off, as a kill leaves it; it is passed over"
            if one.endswith(b"\n"):
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
    told = {place for place, _ in problems}
    lacking = sorted({who for who, number, due in vouched
                      if number and number not in told and sums.get(number) != due})
    return good, [*_told(path, problems), *(
        f"{named(path)} lacks lines that {who} vouches for, or has others in their place"
        for who in lacking[:1])]


def _told(path: Path, problems: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Yield a sentence for each run of neighbours that have one reason."""
    runs = groupby(enumerate(problems), lambda one: (one[1][1], one[1][0] - one[0]))
    for (why, _), group in runs:
        places = [place for _, (place, _) in group]
        which = f"line {places[0]}, is" if len(places) == 1 else f"lines {places[0]} to " \
            f"{places[-1]}, are"
        yield f"{named(path)}, {which} {why}"


def rewind(path: Path, step: int) -> None:
    """Keep the lines up to `step`, since what came after is done again. Damage before it stays."""
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
