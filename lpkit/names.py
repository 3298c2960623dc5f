"""Find the known names that are similar to a mistyped name. Standard library only."""

import difflib
import math
import re
from collections.abc import Iterator

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# least similarity (difflib's ratio, 0 to 1) of a typing mistake, and of a rough match
SLIP, ROUGHLY = 0.8, 0.6


def alike(name: str, known: list[str]) -> list[str]:
    """Return the similar known names, by the first rule of `_rules` that finds any; else []."""
    return next(filter(None, _rules(name, known)), [])


def _rules(name: str, known: list[str]) -> Iterator[list[str]]:
    """Yield the similar names that each rule finds, from the strictest to the loosest rule."""
    plain, words, size = _plain(name), _words(name), _size(name)
    theirs = {entry: _words(entry) for entry in known}
    # the same letters and digits, in upper or lower case
    yield [entry for entry in known if _plain(entry) == plain]
    # a name of the same family with the nearest size
    sized = {entry: abs(math.log(of / size)) for entry in known if size and (of := _size(entry))
             and difflib.get_close_matches(theirs[entry][0], words, 1, SLIP)}
    yield [entry for entry, off in sized.items() if off == min(sized.values())]
    yield _close(name, known, SLIP)
    # names that consist of words of `name`: those with the most words
    fewer = {entry: len(each) for entry, each in theirs.items() if each and {*each} <= {*words}}
    yield [entry for entry, count in fewer.items() if count == max(fewer.values())]
    # names that contain all words of `name`, or that begin with it
    yield [entry for entry, each in theirs.items() if (words and {*words} <= {*each})
           or (len(plain) > 1 and _plain(entry).startswith(plain))]
    yield _close(name, known, ROUGHLY)
    # names with at least one common word (batch_size: global_batch)
    yield [entry for entry, each in theirs.items() if {*each} & {*words}]


def _close(name: str, known: list[str], cutoff: float) -> list[str]:
    """Returns a list with the known name of the most similar spelling, or an empty list. A name
    with the same first letter comes first; among equally similar names, the name with the nearest
    number."""
    lower, name = {entry.lower(): entry for entry in known}, name.lower()
    matches = difflib.get_close_matches(name, lower, 10, cutoff)
    number = {entry: int(re.sub(r"\D", "", f"0{entry}")) for entry in (*matches, name)}
    order = {match: (match[0] != name[0], -difflib.SequenceMatcher(None, match, name).ratio(),
                   abs(number[match] - number[name])) for match in matches}
    return [lower[match] for match in sorted(matches, key=order.get)[:1]]


def _plain(name: str) -> str:
    """Return the letters and digits of `name` in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> list[str]:
    """Returns the words and numbers of `name` in lower case. Numbers lose leading zeros and a
    trailing GB: a100-080GB becomes ['a100', '80']."""
    parts = re.findall(r"\d+\.\d+[kmbt]\b|[a-z0-9]+", name.lower())
    return [re.sub(r"^0+(?=\d)|(?<=\d)gb?$", "", word) for word in parts]


def _size(name: str) -> float:
    """Returns the last size in a name, such as 8B or 1.5b, as a number; 0 if there is none."""
    sizes = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([kmbt])(?![a-z0-9])", name.lower())
    return float(sizes[-1][0]) * UNITS[sizes[-1][1]] if sizes else 0.0
