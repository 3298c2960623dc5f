"""Import modules that add rows to the families.

Modules of the package `lessons.rows` are part of the kit, and are always imported from the folder
next to its notebooks, even if another package of this name is on Python's path. So they are safe,
and a config file may name them. A notebook that works with a learner's copies of the lessons
(environment variable LPKIT_LESSONS) gets the rows of the copies, and so do its child processes.
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
    """Return whether `module` is the full name of a module of `lessons.rows`."""
    package, _, name = module.rpartition(".")
    return package == PACKAGE and name.isidentifier() and (folder() / f"{name}.py").is_file()


def package() -> Any:
    """Import and return the package `lessons.rows` of the kit. Raises ConfigError if its folder is
    missing, or if this process has imported another package of this name."""
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
    """Return {row: module} for the rows that modules of `lessons.rows` add to the family of Config
    field `field`. The modules are not imported."""
    return package().where().get(field, {}) if folder().is_dir() else {}


def bring(name: str, tables: Mapping[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Import module `name`, and return {(field, row's name): (row, module)} for the rows that it
    adds to `tables`; empty if it was imported before. Raises ConfigError if the module is missing,
    raises an error, or replaces a row; then `tables` has its old rows."""
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
        sys.modules.pop(name, None)     # so that a second import raises the same error
        for field, rows in before.items():
            tables[field].clear()
            tables[field].update(rows)
        raise ConfigError(f"{asked}{why}")
    return {(field, row): (rows[row], name) for field, rows in tables.items()
            for row in rows.keys() - before[field].keys()}


def _why(error: BaseException, name: str) -> str:
    """Return why module `name` could not be imported, with the line of the first file outside of
    the import system: the line at which `error` was raised may be in any library."""
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return ": there is no module of this name; put the folder that holds it on PYTHONPATH"
    own = [frame for frame in traceback.extract_tb(error.__traceback__)
           if frame.filename != __file__ and "importlib" not in frame.filename]
    at = f"line {own[0].lineno} of {named(own[0].filename)}" if own else named(name)
    if isinstance(error, SyntaxError) and not own:
        at = f"line {error.lineno} of {named(error.filename)}"
    return (f" fails at {at}: {type(error).__name__}: {shown(str(error))[1:-1]}; mend it, or leave "
            f"the import out")
