"""Rows of one's own, in modules that a Config names under `imports` and each process of its run
imports.

Importing runs code. Only the caller of lpkit may ask for it: a Config that Python makes, the flag
`--import` of a command, and the processes that a run starts. A file (a config, a run folder) may
come from a stranger. It imports the kit's own `lessons.rows` alone, and may name modules that this
process has imported. A Config has the modules of its rows among its `imports`, for its processes.
"""

import re
import sys
from operator import attrgetter
from typing import Any

from lpkit.errors import ConfigError, shown
from lpkit.techniques import FAMILIES, blocks, recipes
from lpkit.techniques.layouts import CONTEXT, GATHERED, REDUCTIONS
from lpkit.techniques.operation import POSITIONS
from lpkit.techniques.pipelines import PIPELINES
from lpkit.values import convert

TABLES = FAMILIES | {"model.norm": blocks.NORMS, "model.mlp": blocks.MLPS,
                     "model.position": POSITIONS, "precision.backend": recipes.BACKENDS,
                     "parallel.schedule": PIPELINES, "parallel.attention": CONTEXT,
                     "parallel.gathered": GATHERED, "parallel.reduction": REDUCTIONS}
OWN = {field: frozenset(rows) for field, rows in TABLES.items()}
BROUGHT: dict[tuple[str, str], tuple[Any, str]] = {}    # rows that `load` added, and their modules


def load(imports: Any) -> None:
    """Imports the modules. Raises ConfigError for one that is missing, fails, or replaces a row;
    then no table has changed."""
    for name in convert(imports, tuple[str, ...], "imports"):
        from lpkit.techniques import lessons  # what most runs do without
        BROUGHT.update(lessons.bring(name, TABLES))


def module_of(field: str, name: str) -> str:
    """Returns the module that added a row here; "": it is the kit's, or its module is not known."""
    if name in OWN[field] or name not in TABLES[field]:
        return ""
    from lpkit.techniques import lessons
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
        from lpkit.techniques import lessons
        if name not in sys.modules and not lessons.has(name):
            raise ConfigError(f"imports={shown(name)}: a file imports nothing by itself; if you "
                              f"trust this module, import it first: `import {shown(name)[1:-1]}` "
                              f"in Python, `--import {shown(name)[1:-1]}` behind a command")
