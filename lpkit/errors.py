"""The error for an invalid setting, and how it shows what was given. Standard library only."""

import difflib
import errno
import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MOST_SHOWN = 80         # characters of a value
MOST_LISTED = 240       # of a list of names; of a longer one, the nearest


class ConfigError(ValueError):
    """An invalid setting. The message names the key, the value and the way out, and holds nothing
    that a terminal would obey."""

    def __init__(self, sentence: object):
        super().__init__(printable(str(sentence)))


class DamagedError(ConfigError):
    """A file is not what was written. The message names it and what is wrong."""


class RunFailedError(RuntimeError):
    """A run that could not go on. The message says at which step, why, and what was kept."""


class GoneError(RunFailedError):
    """A process of a run was killed, or left without an error: no input was wrong."""


# A lack of memory in the words of PyTorch's CPU allocator, of C++, of CUDA and its libraries
NO_MEMORY = ("DefaultCPUAllocator", "annot allocate memory", "bad_alloc", "ALLOC_FAILED",
             "out of memory")


def out_of_memory(error: BaseException | None) -> bool:
    """True if memory ran out, here or in what `error` comes from. PyTorch is not imported."""
    if error is None:
        return False
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return (bool(kinds & {"MemoryError", "OutOfMemoryError"})
            or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
            or (isinstance(error, RuntimeError) and any(one in str(error) for one in NO_MEMORY))
            or out_of_memory(error.__cause__ or error.__context__))


# Errors that go from process to process, by name and arguments.
KINDS = {kind.__name__: kind for kind in (
    ConfigError, DamagedError, GoneError, RunFailedError, OSError, MemoryError, ValueError)}


def packed(error: BaseException) -> list[Any]:
    """Packs the error for `unpacked`, as JSON can say it."""
    kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in KINDS), "")
    if kind == "OSError" and error.errno is not None:
        one, two = (os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else None
                    for name in (error.filename, error.filename2))
        return [kind, error.errno, error.strerror, one, None, two]
    return [kind, str(error) if kind else f"{type(error).__name__}: {error}"]


def unpacked(kind: str, *args: Any) -> Exception:
    """An error of the same kind with the same message; one of no known kind is a RuntimeError."""
    return KINDS.get(kind, RuntimeError)(*args)


class _Short(reprlib.Repr):
    """repr() in bounded time: of a long text its ends, of a container its first few."""

    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, MOST_SHOWN, MOST_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() < 128:
            return repr(x)      # the digits of a huge one take quadratic time
        return f"a whole number of about {round(x.bit_length() * 0.30103)} digits"


_short = _Short()


def shown(value: object) -> str:
    """`value` for a sentence: as repr() has it, at most MOST_SHOWN characters, all of them
    printable."""
    text = " ".join(printable(_short.repr(value)).split("\n"))
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[:MOST_SHOWN * 2 // 3]}...{text[-MOST_SHOWN // 4:]}"


def named(path: object) -> str:
    """A path for a sentence: in one line, whole unless it is longer than any that people give."""
    text = in_one_line(str(path))
    return text if len(text) <= MOST_LISTED else f"{text[:MOST_LISTED // 3]}...{text[-120:]}"


def in_one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def printable(text: str) -> str:
    r"""Escapes what a terminal would obey or hide: control characters, marks of direction,
    characters without width. Ends of lines and tabs stay.

    >>> printable("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns 'did you mean X?' by `lpkit.names`, or the list of what there is; of a long list, the
    three nearest."""
    from lpkit.names import alike  # only a wrong name needs it

    known, name = sorted(known), str(name)[:MOST_LISTED]
    close = alike(name, known)
    if 0 < len(close) <= 3:
        return f"did you mean {' or '.join(map(repr, close))}?"
    if not known:
        return "there is none to choose"
    for names in (close, known):
        if names and len(listed := ", ".join(names)) <= MOST_LISTED:
            return f"choose one of {listed}"
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return f"the nearest of {len(known)} are {', '.join(map(repr, close))}"


def pick(table: Mapping[str, T], name: Any, what: str = "entry") -> T:
    """Look `name` up. Raises ConfigError for an unknown name, with the nearest."""
    if not isinstance(name, str) or name not in table:
        raise ConfigError(f"there is no {what} {shown(name)}; {nearest(name, table)}")
    return table[name]
