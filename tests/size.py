"""Count the project: `python -m tests.size`. Lines and code tokens of the package, the lessons,
hosting and the tests, and the largest modules of the package.

A code token is a token of Python without comments, docstrings, line ends and indents. Python 3.12
and later count each piece of an f-string; the figures of docs/log.md are of 3.11.
"""

import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("lpkit", "notebooks/lessons", "notebooks/hosting", "tests")
COLUMNS = 100
LARGEST = 15
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
         tokenize.ENCODING, tokenize.ENDMARKER}
BEFORE_DOCSTRING = {None, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


class Size(NamedTuple):
    lines: int
    tokens: int
    wide: int       # lines over COLUMNS


def size_of(path: Path) -> Size:
    text, tokens, before = path.read_text(encoding="utf-8"), 0, None
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.ENCODING:
                continue
            docstring = token.type == tokenize.STRING and before in BEFORE_DOCSTRING
            tokens += token.type not in BLANK and not docstring
            before = token.type
    lines = text.splitlines()
    return Size(len(lines), tokens, sum(len(line) > COLUMNS for line in lines))


def total(sizes: Iterable[Size]) -> Size:
    return Size(*map(sum, zip(Size(0, 0, 0), *sizes)))


def main() -> None:
    sizes = {folder: {path: size_of(path) for path in sorted((ROOT / folder).rglob("*.py"))}
             for folder in FOLDERS}
    rows = {f"{folder}/": total(sizes[folder].values()) for folder in FOLDERS}
    rows["together"] = total(rows.values())
    print(f"{'':<20}{'lines':>10}{'code tokens':>14}{f'over {COLUMNS}':>12}")
    for name, size in rows.items():
        print(f"{name:<20}{size.lines:>10,}{size.tokens:>14,}{size.wide:>12,}")
    print(f"\nThe largest {LARGEST} modules of {FOLDERS[0]}/")
    modules = sorted(sizes[FOLDERS[0]].items(), key=lambda pair: -pair[1].lines)
    for path, size in modules[:LARGEST]:
        print(f"{path.relative_to(ROOT)!s:<42}{size.lines:>6,} lines{size.tokens:>8,} tokens")


if __name__ == "__main__":
    sys.exit(main())
