"""The kit's errors, and functions that format values for error messages. Standard library only."""

import difflib
import errno
import os
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MOST_SHOWN = 80         # characters of a value
MOST_LISTED = 240       # characters of a list of names; for a longer list, the nearest are shown


class ConfigError(ValueError):
    """An invalid setting, argument or file. The message names the key, the value and the way out.
    Control characters in the message are escaped, so that a terminal does not execute them."""

    def __init__(self, sentence: object):
        super().__init__(printable(str(sentence)))


class DamagedError(ConfigError):
    """A file was changed after it was written, or is cut off. The message names the file and the
    damage."""


class RunFailedError(RuntimeError):
    """A run could not continue. The message says at which step, why, and what was saved."""


class GoneError(RunFailedError):
    """A process of a run was killed, or exited without an error message. The user's input is not
    the cause."""


# parts of out-of-memory messages: of PyTorch's CPU allocator, of C++, of CUDA and its libraries
NO_MEMORY = ("DefaultCPUAllocator", "annot allocate memory", "bad_alloc", "ALLOC_FAILED",
             "out of memory")


def out_of_memory(error: BaseException | None) -> bool:
    """Returns True if `error`, or an error that caused it, says that memory ran out. Does not
    import PyTorch."""
    if error is None:
        return False
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return (bool(kinds & {"MemoryError", "OutOfMemoryError"})
            or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
            or (isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY))
            or out_of_memory(error.__cause__ or error.__context__))


# Errors that can be sent to another process as a name and arguments. A name is looked up here, so
# that a message cannot create an object of any other class.
KINDS = {kind.__name__: kind for kind in (
    ConfigError, DamagedError, GoneError, RunFailedError, OSError, MemoryError, ValueError)}


def packed(error: BaseException) -> list[Any]:
    """Returns the error as a JSON-ready list for `unpacked`: the name of the nearest class in
    KINDS, and the arguments.

    >>> packed(ConfigError("steps must be positive"))
    ['ConfigError', 'steps must be positive']
    """
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in KINDS), "")
    if kind == "OSError" and error.errno is not None:
        first, two = (os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else None
                    for name in (error.filename, error.filename2))
        return [kind, error.errno, error.strerror, first, None, two]
    return [kind, str(error) if kind else f"{type(error).__name__}: {error}"]


def unpacked(kind: str, *args: Any) -> Exception:
    """Returns the error that `packed` described. A `kind` that is not in KINDS becomes a
    RuntimeError."""
    return KINDS.get(kind, RuntimeError)(*args)


class _Short(reprlib.Repr):
    """repr() in bounded time: the ends of a long text, the first few elements of a container."""

    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, MOST_SHOWN, MOST_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() < 128:
            return repr(x)      # above this, computing the digits takes quadratic time
        return f"a whole number of about {round(x.bit_length() * 0.30103)} digits"


_short = _Short()


def shown(value: object) -> str:
    """Returns `value` as text for a message: its repr(), with at most MOST_SHOWN characters, all
    printable."""
    text = " ".join(printable(_short.repr(value)).split("\n"))
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[:MOST_SHOWN * 2 // 3]}...{text[-MOST_SHOWN // 4:]}"


def named(path: object) -> str:
    """Returns a path as text for a message: in one line. The middle of a path with more than
    MOST_LISTED characters is left out."""
    text = in_one_line(str(path))
    return text if len(text) <= MOST_LISTED else f"{text[:MOST_LISTED // 3]}...{text[-120:]}"


def in_one_line(text: str) -> str:
    """Return `text` with line breaks and control characters escaped."""
    return printable(text).replace("\n", "\\n")


def printable(text: str) -> str:
    r"""Escapes characters that a terminal would execute or hide: control characters, direction
    marks, characters without width. Keeps line breaks and tabs.

    >>> printable("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns the end of an error message about the unknown name `name`:

    - `did you mean X?`, if `lpkit.names` finds one to three similar names;
    - otherwise `choose one of X, Y`, the similar names or all known names, if this list has at most
      MOST_LISTED characters;
    - otherwise the three known names with the most similar spelling.
    """
    from lpkit.names import alike  # imported late, since only a wrong name needs it

    known, name = sorted(known), str(name)[:MOST_LISTED]
    close = alike(name, known)
    if 0 < len(close) <= 3:
        return f"did you mean {' or '.join(map(repr, close))}?"
    if not known:
        return "there are no names to choose from"
    for names in (close, known):
        if names and len(listed := ", ".join(names)) <= MOST_LISTED:
            return f"choose one of {listed}"
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return f"the nearest of {len(known)} are {', '.join(map(repr, close))}"


def pick(table: Mapping[str, T], name: Any, what: str = "entry") -> T:
    """Return table[name]. Raises ConfigError for an unknown name, and names the nearest."""
    if not isinstance(name, str) or name not in table:
        raise ConfigError(f"there is no {what} {shown(name)}; {nearest(name, table)}")
    return table[name]
