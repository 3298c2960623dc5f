"""What a row is: everything that anybody needs to know of a technique without running it.

A family is a dict of rows by name. A row has its settings with their defaults, a frozen dataclass
that checks itself; its source; and the dotted name of its implementation, which is imported when a
run is built. A field of a Config that names a row (`one_of`) is tagged: `{name: block, every: 2}`,
or the name alone. To add a technique, add a row to its family.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Annotated, Any, get_args, get_type_hints

from lpkit.errors import at_least_zero, below_one, pick, positive, share

# What a number may be, as an annotation: it is checked when settings are made. None may always be.
Count = Annotated[int, positive]
CountOrZero = Annotated[int, at_least_zero]
Positive = Annotated[float, positive]
PositiveOrZero = Annotated[float, at_least_zero]
Share = Annotated[float, share]
Rate = Annotated[float, below_one]


class Checked:
    """Settings that check what their annotations say. `where` is the prefix of their keys."""

    where = ""

    def __post_init__(self):
        for name, check in _checks(type(self)):
            value = getattr(self, name)
            if value is not None:
                check(f"{self.where}{name}", value)


@functools.cache
def _checks(cls: type) -> list[tuple[str, Callable[[str, Any], None]]]:
    found = []
    for name, kind in get_type_hints(cls, include_extras=True).items():
        for option in (kind, *get_args(kind)):      # `Count | None` too
            found += [(name, check) for check in getattr(option, "__metadata__", ())]
    return found


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """What a row can be told. A row with settings of its own extends this, with its defaults."""

    name: str = ""      # of the row

    def __str__(self) -> str:
        """'block, every 2': the name, and what is not as the row has it by default."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class Row:
    """`implementation` is "package.module:name"; what it must be, its family says."""

    why: str = ""                                   # a run has it: what it does, in one clause
    source: str = ""
    implementation: str = ""
    settings: Settings = field(default_factory=Settings)

    def load(self) -> Any:
        """The implementation, imported now."""
        return resolve_name(self.implementation)


@dataclass(frozen=True, kw_only=True)
class Technique(Row):
    """`problem(config, recipe)`: why it cannot be beside the rest of a Config, and the way out;
    empty: it can."""

    problem: Callable[[Any, Any], str] | None = None
    eager: str = ""             # why the model must not be compiled
    needs_compile: str = ""     # why it must be


def one_of(table: Mapping[str, Any], default: str) -> Any:
    """A field of a Config that names a row of `table`; its value is the row's own settings."""
    return field(default_factory=functools.partial(chosen, table, default),
                 metadata={"table": table, "default": default})


def many_of(table: Mapping[str, Any]) -> Any:
    """A field that names any number of rows of `table`, in order."""
    return field(default=(), metadata={"table": table})


def chosen(table: Mapping[str, Any], name: str, where: str = "row") -> Settings:
    """The settings of a row as they are by default. Raises ConfigError for an unknown name."""
    return dataclasses.replace(pick(table, name, where).settings, name=name)
