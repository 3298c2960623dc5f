"""Import modules of the folder `notebooks`, which is next to this package: the lessons, and
hosting."""

import sys
from importlib import import_module
from types import ModuleType

from lpkit.errors import ConfigError, named
from lpkit.files import resource


def beside(name: str) -> ModuleType:
    """Return a module of the folder, such as `lessons.catalogue`. The folder comes first in
    sys.path, so no other module of this name is found. Raises ConfigError if there is no folder."""
    if (place := _folder()) != sys.path[0]:
        sys.path.insert(0, place)
    return import_module(name)


def begin() -> None:
    """Make `lessons` importable from any folder, and check this notebook's parameters.

    The folder comes last in sys.path, so a copy of the lessons in the kernel's current folder is
    found first. Raises ConfigError."""
    if (place := _folder()) not in sys.path:
        sys.path.append(place)
    import_module("hosting.parameters").check()


def _folder() -> str:
    if not (place := resource("notebooks")).is_dir():
        raise ConfigError(f"there is no folder {named(place)}; install lpkit again")
    return str(place)
