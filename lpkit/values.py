"""Convert and check values by their annotations. The rule of a setting or an argument is written
once, where the setting or the argument is declared.

    steps: Count = 300              a field of a Checked dataclass: checked when an object is made
    @checked                        arguments of a function: checked when it is called
    def sample(run, tokens: Count = 200): ...

Texts are converted as people type values: "8e3" becomes 8000, "no" becomes False. Standard library
only.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import operator
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from lpkit.errors import ConfigError, named, nearest, shown
from lpkit.files import expanded

Check = Callable[[str, Any], None]      # (key, value); raises ConfigError
Function = TypeVar("Function", bound=Callable[..., Any])
UNIONS = (UnionType, typing.Union)
MOST_CHARACTERS = 4096                  # of a text: the length of the longest path on Linux


def check(holds: Callable[[Any], bool], must_be: str) -> Check:
    """Returns a check that raises ConfigError unless `holds(value)`. `must_be` completes the
    message: "lr must be positive, got -1". All comparisons below are false for NaN, so NaN is
    refused."""
    def refuse(name: str, value: Any) -> None:
        if not holds(value):
            raise ConfigError(f"{name} must be {must_be}, got {shown(value)}")

    return refuse


def between(least: float, most: float) -> Check:
    """Returns a check that a value is from `least` to `most`, both included."""
    return check(lambda value: least <= value <= most, f"from {least:,} to {most:,}")


positive = check(lambda value: 0 < value < math.inf, "positive")
at_least_zero = check(lambda value: 0 <= value < math.inf, "0 or more")
share = check(lambda value: 0 <= value <= 1, "between 0 and 1")
inner_share = check(lambda value: 0 < value < 1, "above 0 and below 1")
# the rate of a moving average; with rate 1, it would ignore every new gradient
below_one = check(lambda value: 0 <= value < 1, "0 or more and below 1")


def at_most(most: float) -> Check:
    """Return a check that a value is `most` or less."""
    return check(lambda value: value <= most, f"at most {most:,}")


def text(name: str, value: object) -> None:
    """Raises ConfigError for a text that is longer than MOST_CHARACTERS or contains NUL, because a
    text may be used as a path."""
    if isinstance(value, str) and (len(value) > MOST_CHARACTERS or "\0" in value):
        raise ConfigError(f"{name} must be at most {MOST_CHARACTERS:,} characters and none of them "
                          f"NUL, got {len(value):,}: {shown(value)}")
    utf8(name, value)


def utf8(name: str, value: object) -> None:
    """Raises ConfigError for a text with surrogates. Python turns invalid UTF-8 in arguments and
    file names into surrogates, which it cannot write as UTF-8 again."""
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise ConfigError(f"{name} must be UTF-8, got {shown(value)}")


def not_empty(name: str, value: object) -> None:
    """Raise ConfigError if the text of `value` is empty or only spaces."""
    if not str(value).strip():
        raise ConfigError(f"{name} is empty; give one, or leave it out")


def place(name: str, value: Any) -> None:
    """Raises ConfigError for a path that no file system can store. Ignores values that are not
    paths, because an argument `Run | Place` may also be a Run."""
    if not isinstance(value, (str, Path)):
        return
    not_empty(name, value)
    text(name, str(value))
    if any(len(os.fsencode(part)) > 255 for part in expanded(value).parts):
        raise ConfigError(f"{name} has a part of more than 255 bytes, which no folder can hold: "
                          f"{shown(str(value))}")


def folder(name: str, value: str | Path) -> None:
    """Raises ConfigError if `value`, or a folder above it, exists and is not a folder."""
    place(name, value)
    path = expanded(value)
    existing = next((place for place in (path, *path.parents) if os.path.lexists(place)), None)
    if existing is not None and not existing.is_dir():
        raise ConfigError(f"{name} must be a folder, and {named(existing)} is something else; "
                          f"choose another path")


# Annotations of numbers and texts. With `| None`, None is valid, too. The upper limits keep sums of
# settings finite, and all divisors of a setting can be found within milliseconds.
Count = Annotated[int, positive, at_most(2**31 - 1)]
CountOrZero = Annotated[int, at_least_zero, at_most(2**31 - 1)]
# seeds that every random generator accepts
Seed = Annotated[int, at_least_zero, at_most(2**63 - 1)]
Positive = Annotated[float, positive]
PositiveOrZero = Annotated[float, at_least_zero]
Share = Annotated[float, share]
InnerShare = Annotated[float, inner_share]
Rate = Annotated[float, below_one]
Text = Annotated[str, not_empty]
Place = Annotated[str | Path, place]
Folder = Annotated[str | Path, folder]


class Checked:
    """Base class of dataclasses that convert and check their values by the annotations of the
    fields. `where`: the text before a field's name in messages, such as "model.". Raises
    ConfigError."""

    where = ""

    def __post_init__(self):
        for name, rule in _rules(type(self)).items():
            read = rule.read(f"{self.where}{name}", getattr(self, name))
            object.__setattr__(self, name, read)


def read(kind: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the values of `given`, converted and checked by the annotations of the dataclass
    `kind`. `where`: the text before their names in messages. Raises ConfigError."""
    rules = _rules(kind)
    return {name: rules[name].read(f"{where}{name}", value) if name in rules else value
            for name, value in given.items()}


def checked(function: Function) -> Function:
    """Decorate a function: its arguments are converted and checked by their annotations. A call
    raises ConfigError for an invalid value, and TypeError for unknown or missing arguments.

    Arguments with other annotations (a callback, an array) are not checked.
    """
    @functools.wraps(function)
    def call(*args, **kwargs):
        signature = _signature(function)
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}(): {error}; it takes "
                            f"{', '.join(signature.parameters)}") from None
        for name, rule in _rules(function).items():
            if name in given.arguments:
                given.arguments[name] = rule.read(name, given.arguments[name])
        return function(*given.args, **given.kwargs)

    return call


_signature = functools.cache(inspect.signature)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How the value of a field or argument is converted and checked."""

    kind: Any                   # the annotation
    as_it_is: frozenset[type]   # values of exactly these types need no conversion
    checks: tuple[Check, ...]

    def read(self, name: str, value: Any) -> Any:
        """Return `value`, converted and checked. `name`: for messages. Raises ConfigError."""
        if type(value) not in self.as_it_is:
            value = convert(value, self.kind, name)
        if value is not None:
            for check in self.checks:
                check(name, value)
        if isinstance(value, (str, Path)) and not {place, folder}.isdisjoint(self.checks):
            return expanded(value)      # all arguments that are paths pass through here
        return value


@functools.cache
def _rules(owner: Any) -> dict[str, _Rule]:
    """Returns the rule of each field of a dataclass, or of each argument of a function, by name.
    Leaves out fields that choose rows and fields that are groups of settings, because
    `config.Group` converts these."""
    kinds = typing.get_type_hints(owner)
    if dataclasses.is_dataclass(owner):
        kinds = {f.name: kinds[f.name] for f in dataclasses.fields(owner)
                 if "table" not in f.metadata and not dataclasses.is_dataclass(kinds[f.name])}
    noted = typing.get_type_hints(owner, include_extras=True)
    rules = {}
    for name, kind in kinds.items():
        if name == "return" or not _readable(kind):
            continue
        options = set(get_args(kind)) if get_origin(kind) in UNIONS else {kind}
        checks = [check for note in (noted[name], *get_args(noted[name]))
                  for check in getattr(note, "__metadata__", ())]
        if str in options and dataclasses.is_dataclass(owner):
            checks.append(text)
        plain = options & {int, float, bool, str, NoneType}
        rules[name] = _Rule(kind, frozenset(plain), tuple(checks))
    return rules


def _readable(kind: Any) -> bool:
    """Returns True if `convert` can convert values to the annotation `kind`."""
    if get_origin(kind) in (tuple, Mapping, Sequence, Iterable, *UNIONS):
        return all(option is Ellipsis or _readable(option) for option in get_args(kind))
    return get_origin(kind) is Literal or isinstance(kind, type)


# Conversion of typed values.

BOOLS = {"true": True, "yes": True, "on": True, "1": True,
         "false": False, "no": False, "off": False, "0": False}
WRITTEN = {int: "; write it as 8000 or 8e3", float: "; write it as 0.4 or 4e-1"}


def convert(value: Any, kind: Any, name: str) -> Any:
    """Returns `value`, converted to the annotation `kind`. `name`: for messages. Raises
    ConfigError.

    >>> convert("1e-3", float, "lr"), convert("no", bool, "compile")
    (0.001, False)
    >>> convert("none", int | None, "threads") is None
    True
    """
    origin, args = get_origin(kind), get_args(kind)
    typed = value.lower() if isinstance(value, str) else None
    if origin in UNIONS:
        # NoneType first, so that "none" becomes None; str last, since it accepts any text
        for option in sorted(args, key=lambda option: (option is not NoneType, option is str)):
            with contextlib.suppress(ConfigError):
                return convert(value, option, name)
    if origin is Literal:
        if isinstance(value, str):
            value = {str(option): option for option in args}.get(value, value)
        if isinstance(value, (str, int, float)) and value in args:
            return value
        raise ConfigError(f"{name} cannot be {shown(value)}; "
                          f"{nearest(shown(value).strip(chr(39)), map(str, args))}")
    if origin in (tuple, Sequence, Iterable):
        parts = value
        if isinstance(value, str):
            parts = [*filter(None, map(str.strip, value.split(",")))] if typed != "none" else []
        if isinstance(parts, (list, tuple)):
            return tuple(convert(part, args[0], name) for part in parts)
    if origin is Mapping and isinstance(value, Mapping):
        return {convert(key, args[0], f"a name in {name}"): convert(inner, args[1], name)
                for key, inner in value.items()}
    if kind is NoneType and (value is None or typed in ("none", "null", "")):
        return None
    if kind is bool and typed in BOOLS:
        return BOOLS[typed]
    if kind is float or kind is int:
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            return _number(value, kind)
    if kind is Path and typed is not None:
        return Path(value)
    if isinstance(kind, type) and kind not in (int, float) and isinstance(value, kind):
        return value
    raise ConfigError(f"{name} must be {_described(kind)}, got {shown(value)}"
                      f"{WRITTEN.get(kind, '') if isinstance(value, str) else ''}")


def annotated(value: Any, kind: Any, name: str) -> Any:
    """Returns `value`, converted and checked by an annotation such as int or Count. `name`: for
    messages. Raises ConfigError."""
    checks, kind = getattr(kind, "__metadata__", ()), getattr(kind, "__origin__", kind)
    return _Rule(kind, frozenset({str} & {kind, *get_args(kind)}), checks).read(name, value)


def unique(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns (key, value) pairs as a dict. Raises ConfigError if a key has two different
    values."""
    values: dict[str, str] = {}
    for key, value in pairs:
        if values.setdefault(key, value) != value:
            raise ConfigError(f"{key} is both {shown(values[key])} and {shown(value)}; give one")
    return values


def _number(value: Any, kind: type) -> float:
    """Returns `value` as an int or a float. Raises ValueError, TypeError or OverflowError."""
    if isinstance(value, (bool, bytes, bytearray)):
        raise TypeError
    if kind is float:
        return float(value)
    with contextlib.suppress(ValueError, TypeError):
        # exact: a float has only 53 bits
        return int(value) if isinstance(value, str) else operator.index(value)
    number = float(value)       # such as "1e3"
    if not number.is_integer():
        raise ValueError
    return int(number)


def _described(kind: Any) -> str:
    """Return the values of an annotation in words, for messages: "a whole number or none"."""
    if get_origin(kind) is Mapping:
        return f"a mapping to {_described(get_args(kind)[1])}"
    if get_origin(kind) in (tuple, Sequence):
        return f"a list of {_described(get_args(kind)[0])}"
    if args := get_args(kind):
        return " or ".join(_described(option) for option in args if option is not Ellipsis)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
             NoneType: "none", Path: "a path", Mapping: "a mapping"}
    return words.get(kind) or (f"a {kind.__name__}" if isinstance(kind, type) else str(kind))
