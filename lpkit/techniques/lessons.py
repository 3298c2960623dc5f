"""Import modules that have rows.

Modules of `lessons.rows` are always the kit's own, next to the notebooks, whatever else is on
Python's path. So files may name them, too. A kernel that imports a learner's copies of the lessons
has the rows of the copies, and so do its processes.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from lpkit.errors import ConfigError, named, nearest, shown
from lpkit.files import resource

PACKAGE, COPIES = "lessons.rows", "LPKIT_LESSONS"       # COPIES: an environment variable


def folder() -> Path:
    """Return the folder of the modules: in a checkout, in an installed wheel, or of copies."""
    return Path(os.environ.get(COPIES) or resource("notebooks") / "lessons") / "rows"


def has(module: str) -> bool:
    """Return whether `module` is the full name of such a module."""
    package, _, name = module.rpartition(".")
    return package == PACKAGE and name.isidentifier() and (folder() / f"{name}.py").is_file()


def package() -> Any:
    """Return the package `lessons.rows`, whose modules Python finds only in its folder. Raises
    ConfigError if the folder is missing, or this process imported another package of this name."""
    if not folder().is_dir():
        raise ConfigError(f"there is no folder {named(folder())}; install lpkit again")
    if (package := sys.modules.get(PACKAGE)) is None:
        spec = spec_from_file_location(PACKAGE, folder() / "__init__.py")
        package = sys.modules[PACKAGE] = module_from_spec(spec)
        spec.loader.exec_module(package)
    if (other := Path(*package.__path__).resolve()) != (here := folder().resolve()):
        raise ConfigError(f"{PACKAGE} is {named(other)} in this process, and the kit's own is "
                          f"{named(here)}; start Python in another folder")
    return package


def having(field: str) -> Mapping[str, str]:
    """Return the module of each row that lessons add to a family, without importing one."""
    return package().where().get(field, {}) if folder().is_dir() else {}


def bring(name: str, tables: Mapping[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Import a module, unless it is imported, and return the rows that it adds to `tables` by field
    and name, each with the module. Raises ConfigError as `outside.load` does."""
    asked = f"imports={shown(name)}"
    if name.startswith(f"{PACKAGE}."):
        package()
        if not has(name):
            raise ConfigError(f"{asked}: the kit has no such module of rows; "
                              f"{nearest(name, package().modules())}")
    if name in sys.modules:
        return {}
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{asked} is no module's name; write it as in `import my_rows`")
    before = {field: dict(rows) for field, rows in tables.items()}
    why = ""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        why = _why(error, name)
    replaced = [f"{field}={row}" for field, rows in before.items() for row in rows
                if tables[field].get(row) is not rows[row]]
    if replaced and not why:
        why = f" replaces {replaced[0]}, a row that exists; give its own row another name"
    if why:
        sys.modules.pop(name, None)     # a second import fails in the same way
        for field, rows in before.items():
            tables[field].clear()
            tables[field].update(rows)
        raise ConfigError(f"{asked}{why}")
    return {(field, row): (rows[row], name) for field, rows in tables.items()
            for row in rows.keys() - before[field].keys()}


def _why(error: BaseException, name: str) -> str:
    """Return the reason at the module's own line; the deepest line may be in any library."""
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return ": there is no module of this name; put the folder that holds it on PYTHONPATH"
    own = [frame for frame in traceback.extract_tb(error.__traceback__)
           if frame.filename != __file__ and "importlib" not in frame.filename]
    at = f"line {own[0].lineno} of {named(own[0].filename)}" if own else named(name)
    if isinstance(error, SyntaxError) and not own:
        at = f"line {error.lineno} of {named(error.filename)}"
    return (f" fails at {at}: {type(error).__name__}: {shown(str(error))[1:-1]}; mend it, or leave "
            f"the import out")
