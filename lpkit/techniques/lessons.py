"""The rows that lessons have: modules of the package `lessons.rows`, which is always the kit's own
folder beside the notebooks, whatever else is on Python's path. So files may name its modules, too.
A kernel that imports a learner's copies of the lessons has their rows, and so have its processes.
"""

import os
import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from lpkit.errors import ConfigError, named, nearest, shown
from lpkit.files import resource

PACKAGE, COPIES = "lessons.rows", "LPKIT_LESSONS"       # a variable of the environment


def folder() -> Path:
    """Returns the folder of the modules, in a checkout, in an installed wheel or of copies."""
    return Path(os.environ.get(COPIES) or resource("notebooks") / "lessons") / "rows"


def has(module: str) -> bool:
    """Returns whether `module` is the full name of one of them."""
    package, _, name = module.rpartition(".")
    return package == PACKAGE and name.isidentifier() and (folder() / f"{name}.py").is_file()


def package() -> Any:
    """Returns the package, in whose folder alone Python looks for its modules. Raises ConfigError
    where this process has imported another package of its name."""
    if (found := sys.modules.get(PACKAGE)) is None:
        spec = spec_from_file_location(PACKAGE, folder() / "__init__.py")
        found = sys.modules[PACKAGE] = module_from_spec(spec)
        spec.loader.exec_module(found)
    if (other := Path(*found.__path__).resolve()) != (here := folder().resolve()):
        raise ConfigError(f"{PACKAGE} is {named(other)} in this process, and the kit's own is "
                          f"{named(here)}; start Python in another folder")
    return found


def having(field: str) -> Mapping[str, str]:
    """Returns the module of each row of a family that lessons have. No module is imported."""
    return package().where().get(field, {}) if folder().is_dir() else {}


def pick(table: Mapping[str, Any], name: Any, field: str, what: str = "") -> Any:
    """Look `name` up, as `errors.pick` does. Raises ConfigError for an unknown name, which says how
    to import a lesson's row."""
    if isinstance(name, str) and name in table:
        return table[name]
    what, ways = what or field, {
        row: f'{what or field} {row!r} is in {module}: add --import {module}, in Python '
             f'imports=("{module}",)' for row, module in having(field).items() if row not in table}
    if str(name) in ways:
        raise ConfigError(ways[name])
    meant = nearest(name, [*table, *ways])
    more = [way for row, way in ways.items() if repr(row) in meant]
    raise ConfigError(" ".join([f"there is no {what} {shown(name)}; {meant}", *more]))
