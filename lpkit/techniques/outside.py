"""Rows of other packages, in modules that a Config names in `imports`. Each process of its run
imports these modules.

An import runs code, so only the caller of lpkit may request one: by a Config made in Python, by a
command's flag `--import`, and in the processes that a run starts. A file (a config, a run folder)
may come from a stranger. It may import only the kit's `lessons.rows`, and name modules that this
process has already imported. The `imports` of a Config include the modules of its rows, for its
processes.
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
    """Import the modules. Raises ConfigError for a module that is missing, fails, or replaces a
    row; then no table has changed."""
    for name in convert(imports, tuple[str, ...], "imports"):
        from lpkit.techniques import lessons  # most runs do not need it
        BROUGHT.update(lessons.bring(name, TABLES))


def module_of(field: str, name: str) -> str:
    """Return the module that added a row; "": the row is the kit's, or its module is unknown."""
    if name in OWN[field] or name not in TABLES[field]:
        return ""
    from lpkit.techniques import lessons
    row, module = BROUGHT.get((field, name), (None, ""))
    known = module if row is TABLES[field][name] else ""
    return next(filter(sys.modules.get, (lessons.having(field).get(name), known)), "")


def needed(config: Any) -> tuple[str, ...]:
    """Return the `imports` of a Config and the modules of the rows that it names."""
    modules = [*config.imports]
    for field in TABLES:
        rows = attrgetter(field)(config)
        for row in rows if isinstance(rows, tuple) else (rows,):
            modules.append(module_of(field, getattr(row, "name", row)))
    modules += [module_of("optimizer", name) for group in getattr(config.optimizer, "groups", ())
                for name in re.findall(":optimizer=([^:]+)", group)]
    return tuple(filter(None, dict.fromkeys(modules)))


def refuse_unknown(imports: Any) -> None:
    """Raise ConfigError for a module that is neither the kit's nor already imported."""
    for name in convert(imports, tuple[str, ...], "imports"):
        from lpkit.techniques import lessons
        if name not in sys.modules and not lessons.has(name):
            raise ConfigError(f"imports={shown(name)}: a file imports nothing by itself; if you "
                              f"trust this module, import it first: `import {shown(name)[1:-1]}` "
                              f"in Python, `--import {shown(name)[1:-1]}` behind a command")
