"""Rows of one's own, in modules that a Config names under `imports` and each process of its run
imports.

Importing runs code. So only who calls lpkit may ask for it: a Config that Python makes, the flag
`--import` of a command, and the ranks that a launch starts. A file (a config, a run folder) may
come from a stranger: it may name modules that this process has imported already, and imports none.
"""

import importlib
import sys
import traceback
from typing import Any

from lpkit.errors import ConfigError, named, shown
from lpkit.techniques import FAMILIES, blocks
from lpkit.techniques.operation import POSITIONS
from lpkit.values import convert

TABLES = FAMILIES | {"model.norm": blocks.NORMS, "model.mlp": blocks.MLPS,
                     "model.position": POSITIONS}


def load(imports: Any) -> None:
    """Imports the modules. Raises ConfigError for one that is missing, fails, or replaces a row;
    then no table has changed."""
    for name in convert(imports, tuple[str, ...], "imports"):
        if name not in sys.modules:
            _load(name)


def refuse_unknown(imports: Any) -> None:
    """Raises ConfigError for a module that this process has not imported."""
    for name in convert(imports, tuple[str, ...], "imports"):
        if name not in sys.modules:
            raise ConfigError(f"imports={shown(name)}: a file imports nothing by itself; if you "
                              f"trust this module, import it first: `import {shown(name)[1:-1]}` "
                              f"in Python, `--import {shown(name)[1:-1]}` behind a command")


def _load(name: str) -> None:
    asked = f"imports={shown(name)}"
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{asked} is no module's name; write it as in `import my_rows`")
    before = {field: dict(rows) for field, rows in TABLES.items()}
    why = ""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        why = _why(error, name)
    replaced = [f"{field}={row}" for field, rows in before.items() for row in rows
                if TABLES[field].get(row) is not rows[row]]
    if replaced and not why:
        why = f" replaces {replaced[0]}, a row that exists; give its own row another name"
    if why:
        sys.modules.pop(name, None)     # who asks again hears the same
        for field, rows in before.items():
            TABLES[field].clear()
            TABLES[field].update(rows)
        raise ConfigError(f"{asked}{why}")


def _why(error: BaseException, name: str) -> str:
    """The module's own line, not the deepest one, which may be anybody's."""
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return ": there is no module of this name; put the folder that holds it on PYTHONPATH"
    own = [frame for frame in traceback.extract_tb(error.__traceback__)
           if frame.filename != __file__ and "importlib" not in frame.filename]
    at = f"line {own[0].lineno} of {named(own[0].filename)}" if own else named(name)
    if isinstance(error, SyntaxError) and not own:
        at = f"line {error.lineno} of {named(error.filename)}"
    return (f" fails at {at}: {type(error).__name__}: {shown(str(error))[1:-1]}; mend it, or leave "
            f"the import out")
