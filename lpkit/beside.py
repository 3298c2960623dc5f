"""Import modules of the folder `notebooks`: the packages `lessons` and `hosting`. In a checkout,
the folder is next to this package; in an installed wheel, it is inside the package."""

import sys
from importlib import import_module
from types import ModuleType

from lpkit.errors import ConfigError, named
from lpkit.files import resource


def beside(name: str) -> ModuleType:
    """Return a module of the folder `notebooks`, such as `lessons.catalogue`. This function puts
    the folder first in sys.path, so that no other module of the same name is imported. Raises
    ConfigError if the folder is missing."""
    if (place := _folder()) != sys.path[0]:
        sys.path.insert(0, place)
    return import_module(name)


def begin() -> None:
    """Make `lessons` importable from any current folder, and check the parameters of the notebook
    that calls this function.

    The folder `notebooks` comes last in sys.path, so a copy of the lessons in the kernel's current
    folder takes precedence. Raises ConfigError for a wrong parameter, or if the folder is
    missing."""
    if (place := _folder()) not in sys.path:
        sys.path.append(place)
    import_module("hosting.parameters").check()


def _folder() -> str:
    """Return the path of the folder `notebooks`. Raises ConfigError if it is missing."""
    if not (place := resource("notebooks")).is_dir():
        raise ConfigError(f"there is no folder {named(place)}; install lpkit again")
    return str(place)
