"""A row says everything that anybody needs to know of a technique without running it.

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
from typing import Any

from lpkit.values import Checked


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """The settings that a row can be told. A row with settings of its own extends this, with its
    defaults."""

    name: str = ""      # of the row

    def problem(self, of: Any) -> str:
        """Why it cannot be of this model (of governors: of this Config), and the way out; empty: it
        can."""
        return ""

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

    problem: Callable[[Any, Any], str] = lambda config, recipe: ""
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
    return dataclasses.replace(pick_row(table, name, where).settings, name=name)


def pick_row(table: Mapping[str, Any], name: Any, what: str,
             families: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Look `name` up in a table; `what` begins with its field. Raises ConfigError with the nearest
    names, the import that has such a row, or its field of `families`."""
    if isinstance(name, str) and name in table:
        return table[name]
    from lpkit.techniques import lessons  # only a wrong name needs it
    raise lessons.package().unknown(table, name, what, families or {})
