"""A row has the facts about a technique that are known without running it.

A family is a dict of rows by name. A row has its settings with their defaults (a frozen dataclass
that checks itself), its source, and the dotted name of its implementation, which is imported when a
run is built. A Config's field that names a row (`one_of`) is tagged: `{name: block, every: 2}`, or
only the name. To add a technique, add a row to its family.
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
    """The settings of a row. A row with its own settings extends this class, with its defaults."""

    name: str = ""      # the row's name

    def problem(self, of: Any) -> str:
        """Return why the row does not go with this model (for governors: with this Config), and the
        way out; "": it does."""
        return ""

    def __str__(self) -> str:
        """Return the name, and the settings that are not defaults: 'block, every 2'."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class Row:
    """One technique. `implementation` is "package.module:name"; its family says what it must be."""

    why: str = ""                                   # what the technique does, in one clause
    source: str = ""
    implementation: str = ""
    settings: Settings = field(default_factory=Settings)

    def load(self) -> Any:
        """Import and return the implementation."""
        return resolve_name(self.implementation)


@dataclass(frozen=True, kw_only=True)
class Technique(Row):
    """`problem(config, recipe)` returns why the row does not go with the rest of a Config, and the
    way out; "": it does."""

    problem: Callable[[Any, Any], str] = lambda config, recipe: ""
    eager: str = ""             # why the model must not be compiled
    needs_compile: str = ""     # why the model must be compiled


def one_of(table: Mapping[str, Any], default: str) -> Any:
    """Return a field of a Config that names a row of `table`; its value is the row's settings."""
    return field(default_factory=functools.partial(chosen, table, default),
                 metadata={"table": table, "default": default})


def many_of(table: Mapping[str, Any]) -> Any:
    """Return a field that names any number of rows of `table`, in order."""
    return field(default=(), metadata={"table": table})


def chosen(table: Mapping[str, Any], name: str, where: str = "row") -> Settings:
    """Return the default settings of a row. Raises ConfigError for an unknown name."""
    return dataclasses.replace(pick_row(table, name, where).settings, name=name)


def pick_row(table: Mapping[str, Any], name: Any, what: str,
             families: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Return the row `name` of a table; `what` begins with its field. Raises ConfigError with the
    nearest names, the import that has such a row, or its field of `families`."""
    if isinstance(name, str) and name in table:
        return table[name]
    from lpkit.techniques import lessons  # only a wrong name needs it
    raise lessons.package().unknown(table, name, what, families or {})
