"""Find the known names that a person may have meant. Standard library only."""

import difflib
import math
import re
from collections.abc import Iterator

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
SLIP, ROUGHLY = 0.8, 0.6        # least ratio of difflib


def alike(name: str, known: list[str]) -> list[str]:
    """Return the known names that the first successful rule of `_rules` finds."""
    return next(filter(None, _rules(name, known)), [])


def _rules(name: str, known: list[str]) -> Iterator[list[str]]:
    plain, words, size = _plain(name), _words(name), _size(name)
    theirs = {entry: _words(entry) for entry in known}
    # the same letters and digits, in upper or lower case
    yield [entry for entry in known if _plain(entry) == plain]
    # a name of the same family with the nearest size
    sized = {entry: abs(math.log(of / size)) for entry in known if size and (of := _size(entry))
             and difflib.get_close_matches(theirs[entry][0], words, 1, SLIP)}
    yield [entry for entry, off in sized.items() if off == min(sized.values())]
    yield _close(name, known, SLIP)
    # some of the same words and no others: as many as possible
    fewer = {entry: len(each) for entry, each in theirs.items() if each and {*each} <= {*words}}
    yield [entry for entry, count in fewer.items() if count == max(fewer.values())]
    # all the same words, or the same beginning, and more
    yield [entry for entry, each in theirs.items() if (words and {*words} <= {*each})
           or (len(plain) > 1 and _plain(entry).startswith(plain))]
    yield _close(name, known, ROUGHLY)
    # a common word (batch_size: global_batch)
    yield [entry for entry, each in theirs.items() if {*each} & {*words}]


def _close(name: str, known: list[str], cutoff: float) -> list[str]:
    """Returns the name with the most similar spelling. Prefers the same first letter; among equals,
    the nearest number."""
    lower, name = {entry.lower(): entry for entry in known}, name.lower()
    matches = difflib.get_close_matches(name, lower, 10, cutoff)
    number = {entry: int(re.sub(r"\D", "", f"0{entry}")) for entry in (*matches, name)}
    order = {match: (match[0] != name[0], -difflib.SequenceMatcher(None, match, name).ratio(),
                   abs(number[match] - number[name])) for match in matches}
    return [lower[match] for match in sorted(matches, key=order.get)[:1]]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> list[str]:
    """Returns the words in lower case. Numbers lose leading zeros and a trailing GB."""
    parts = re.findall(r"\d+\.\d+[kmbt]\b|[a-z0-9]+", name.lower())
    return [re.sub(r"^0+(?=\d)|(?<=\d)gb?$", "", word) for word in parts]


def _size(name: str) -> float:
    """Returns the last size in a name, such as 8B or 1.5b, as a number; 0 if there is none."""
    sizes = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([kmbt])(?![a-z0-9])", name.lower())
    return float(sizes[-1][0]) * UNITS[sizes[-1][1]] if sizes else 0.0
