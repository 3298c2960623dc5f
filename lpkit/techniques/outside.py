"""Rows of one's own, in modules that a Config names under `imports` and each process of its run
imports.

Importing runs code. Only the caller of lpkit may ask for it: a Config that Python makes, the flag
`--import` of a command, and the processes that a run starts. A file (a config, a run folder) may
come from a stranger. It imports the kit's own `lessons.rows` alone, and may name modules that this
process has imported. A Config has the modules of its rows among its `imports`, for its processes.
"""

import importlib
import re
import sys
import traceback
from operator import attrgetter
from typing import Any

from lpkit.errors import ConfigError, named, shown
from lpkit.techniques import FAMILIES, blocks, lessons
from lpkit.techniques.operation import POSITIONS
from lpkit.values import convert

TABLES = FAMILIES | {"model.norm": blocks.NORMS, "model.mlp": blocks.MLPS,
                     "model.position": POSITIONS}
OWN = {field: frozenset(rows) for field, rows in TABLES.items()}
BROUGHT: dict[tuple[str, str], tuple[Any, str]] = {}    # rows that `load` added, and their modules


def load(imports: Any) -> None:
    """Imports the modules. Raises ConfigError for one that is missing, fails, or replaces a row;
    then no table has changed."""
    for name in convert(imports, tuple[str, ...], "imports"):
        if lessons.has(name):
            lessons.package()
        if name not in sys.modules:
            _load(name)


def module_of(field: str, name: str) -> str:
    """Returns the module that added a row here; "": it is the kit's, or its module is not known."""
    if name in OWN[field] or name not in TABLES[field]:
        return ""
    row, module = BROUGHT.get((field, name), (None, ""))
    known = module if row is TABLES[field][name] else ""
    return next(filter(sys.modules.get, (lessons.having(field).get(name), known)), "")


def needed(config: Any) -> tuple[str, ...]:
    """Returns the `imports` of a Config and the modules of the rows that it names."""
    found = [*config.imports]
    for field in TABLES:
        rows = attrgetter(field)(config)
        for row in rows if isinstance(rows, tuple) else (rows,):
            found.append(module_of(field, getattr(row, "name", row)))
    found += [module_of("optimizer", name) for group in getattr(config.optimizer, "groups", ())
              for name in re.findall(":optimizer=([^:]+)", group)]
    return tuple(filter(None, dict.fromkeys(found)))


def refuse_unknown(imports: Any) -> None:
    """Raises ConfigError for a module that is not the kit's and that is not imported here."""
    for name in convert(imports, tuple[str, ...], "imports"):
        if name not in sys.modules and not lessons.has(name):
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
    BROUGHT.update({(field, row): (rows[row], name) for field, rows in TABLES.items()
                    for row in rows.keys() - before[field].keys()})


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
