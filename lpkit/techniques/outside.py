"""Rows of other packages. A Config names their modules in `imports`, and each process of its run
imports them.

An import runs code, so only the person who calls lpkit may request an import: with a Config that is
created in Python, or with the flag `--import` of a command. Processes that a run starts import the
same modules. A file (a config, a run folder) may come from another person. It may only name modules
of the kit's `lessons.rows`, and modules that this process has already imported. The `imports` of a
Config also contain the modules of the rows that it names, so that its processes import them.
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
# {(field, row's name): (row, module)} of the rows that `load` has added
BROUGHT: dict[tuple[str, str], tuple[Any, str]] = {}


def load(imports: Any) -> None:
    """Import the modules `imports`, which add their rows to the tables. Raises ConfigError for a
    module that is missing, raises an error, or replaces a row. Such a module changes no table."""
    for name in convert(imports, tuple[str, ...], "imports"):
        from lpkit.techniques import lessons  # most runs do not need it
        BROUGHT.update(lessons.bring(name, TABLES))


def module_of(field: str, name: str) -> str:
    """Return the module that has added row `name` to the family of Config field `field`. "": the
    row is the kit's, there is no such row, or its module is not known."""
    if name in OWN[field] or name not in TABLES[field]:
        return ""
    from lpkit.techniques import lessons
    row, module = BROUGHT.get((field, name), (None, ""))
    known = module if row is TABLES[field][name] else ""
    return next(filter(sys.modules.get, (lessons.having(field).get(name), known)), "")


def needed(config: Any) -> tuple[str, ...]:
    """Return the `imports` of a Config, followed by the modules of the rows that it names."""
    modules = [*config.imports]
    for field in TABLES:
        rows = attrgetter(field)(config)
        for row in rows if isinstance(rows, tuple) else (rows,):
            modules.append(module_of(field, getattr(row, "name", row)))
    modules += [module_of("optimizer", name) for group in getattr(config.optimizer, "groups", ())
                for name in re.findall(":optimizer=([^:]+)", group)]
    return tuple(filter(None, dict.fromkeys(modules)))


def refuse_unknown(imports: Any) -> None:
    """Raise ConfigError for a module in `imports` that is neither a module of `lessons.rows` nor
    already imported in this process."""
    for name in convert(imports, tuple[str, ...], "imports"):
        from lpkit.techniques import lessons
        if name not in sys.modules and not lessons.has(name):
            raise ConfigError(f"imports={shown(name)}: a file imports nothing by itself; if you "
                              f"trust this module, import it first: `import {shown(name)[1:-1]}` "
                              f"in Python, or `--import {shown(name)[1:-1]}` after a command")
