"""`TechniqueRow`: what is known about one technique without running it.

A family is a dict of rows by name. A row has the technique's settings with their defaults (a frozen
dataclass that checks its values), its source, and the name of its implementation, which is imported
when a run is built. A field of a Config that names a row (`one_of`) is written as the row's name
with its settings, `{name: block, every: 2}`, or only as the name. To add a technique, add a row to
its family.
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
    """The settings of a row. A row that has settings extends this class; the fields have the
    defaults."""

    name: str = ""      # the row's name

    def problem(self, of: Any) -> str:
        """Return why the row does not go with `of`, and the way out; "": it does. `of` is the
        ModelConfig; for governors, it is the Config."""
        return ""

    def __str__(self) -> str:
        """Return the row in words. A subclass can add settings, as "block, every 2"."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class TechniqueRow:
    """One technique. `implementation` is "package.module:name" of a function or class; the comment
    of the family says how it is called."""

    why: str = ""                                   # what the technique does, in one clause
    source: str = ""
    implementation: str = ""
    settings: Settings = field(default_factory=Settings)

    def load(self) -> Any:
        """Import and return the implementation."""
        return resolve_name(self.implementation)


@dataclass(frozen=True, kw_only=True)
class Technique(TechniqueRow):
    """A row that may not go with all other techniques. `problem(config, recipe)` returns why the
    row does not go with the rest of `config`, and the way out; "": it does."""

    problem: Callable[[Any, Any], str] = lambda config, recipe: ""
    eager: str = ""             # why the model must not be compiled; "": it may be
    needs_compile: str = ""     # why the model must be compiled; "": it need not be


def one_of(table: Mapping[str, Any], default: str) -> Any:
    """Return a dataclass field for a Config that names one row of `table`. The field's value is the
    settings of the row. `default`: the name of the default row."""
    return field(default_factory=functools.partial(chosen, table, default),
                 metadata={"table": table, "default": default})


def many_of(table: Mapping[str, Any]) -> Any:
    """Return a dataclass field that names any number of rows of `table`, in order. The field's
    value is a tuple of settings."""
    return field(default=(), metadata={"table": table})


def chosen(table: Mapping[str, Any], name: str, where: str = "row") -> Settings:
    """Return the default settings of row `name` of `table`, with the name in them. Raises
    ConfigError for an unknown name; `where` names the field for the error."""
    return dataclasses.replace(pick_row(table, name, where).settings, name=name)


def pick_row(table: Mapping[str, Any], name: Any, what: str,
             families: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """Return row `name` of `table`. For an unknown name, raise ConfigError with the nearest names,
    and with the module that has such a row or the other field to which the name belongs.

    what:     begins with the field of the Config, for the error
    families: other families in which to look for the name
    """
    if isinstance(name, str) and name in table:
        return table[name]
    from lpkit.techniques import lessons  # only a wrong name needs it
    raise lessons.package().unknown(table, name, what, families or {})
