"""Techniques that only one lesson studies. Each module has the rows of a family and their code.

To use a row, name its module in a Config's `imports`, or on the command line by `--import`:
`lpkit train cpu-3m optimizer=soap --import lessons.rows.optimizers`. The name always refers to the
kit's own folder or to a learner's copy of it (`lpkit.techniques.lessons`). Modules of this package
import only the standard library, `lpkit` and `lessons.rows`. They import `lessons.rows` only by
`from lessons.rows.NAME import ...`. Only modules named `NAME_torch` import PyTorch; they add no
rows.
"""

import ast
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lpkit.techniques.outside  # noqa: F401   it lists the kit's own rows before others are added
from lpkit.errors import ConfigError, nearest, shown

FIELDS = {      # by name of a table in lpkit.techniques: the Config's field that names its rows
    "OPTIMIZERS": "optimizer", "OBJECTIVES": "objective", "SCHEDULES": "schedule",
    "INITS": "model.init", "BLOCKS": "model.block", "KINDS": "model.attention",
    "MODEL_CHANGES": "model.changes", "NORMS": "model.norm", "MLPS": "model.mlp",
    "POSITIONS": "model.position", "ATTENTION": "system.attention", "GROWTH": "start.grow",
    "POLICIES": "data.policy", "SIZES": "sizes", "RECIPES": "precision.recipe",
    "BACKENDS": "precision.backend", "MODEL_TRANSFORMS": "transforms", "GOVERNORS": "governors",
    "PIPELINES": "parallel.schedule", "CONTEXT": "parallel.attention",
    "GATHERED": "parallel.gathered", "REDUCTIONS": "parallel.reduction",
    "MOMENT_FORMATS": "memory.moment_format", **{key.upper(): f"memory.{key}" for key in (
        "recompute", "activation_offload", "cross_entropy", "param_dtype", "optimizer_state",
        "optimizer_step")}}


@functools.cache
def where() -> Mapping[str, Mapping[str, str]]:
    """Return the module of each lesson row, by field and row name. Reads syntax trees and imports
    nothing.

    A module adds rows by `TABLE["name"] = ...` or `TABLE |= {"name": ...}`, with literal names;
    tests/exchange/test_imports.py compares the result with the rows that the modules add.
    """
    modules_of: dict[str, dict[str, str]] = {field: {} for field in FIELDS.values()}
    for path in sorted(Path(*__path__).glob("*.py")):
        tree = ast.parse("" if path.stem.endswith("_torch") else path.read_bytes())
        for node in ast.walk(tree):
            match node:
                case ast.Subscript(value=table, slice=name, ctx=ast.Store()):
                    names = [name]
                case ast.AugAssign(target=table, value=ast.Dict(keys=names)):
                    pass
                case _:
                    continue
            if field := FIELDS.get(ast.unparse(table).rpartition(".")[2]):
                modules_of[field] |= {name.value: f"{__name__}.{path.stem}" for name in names}
    return modules_of


def unknown(table: Mapping[str, Any], name: Any, what: str,
            families: Mapping[str, Mapping[str, Any]]) -> ConfigError:
    """Return the error for a name that `table` lacks. It suggests the import that adds such a row,
    the nearest names, or the field of `families` that has such a row. `what` begins with the field
    of `table`."""
    field = what.partition(" ")[0]
    ways = {row: f'{what} {row!r} is in {at}: add --import {at}, in Python imports=("{at}",)'
            for row, at in where().get(field, {}).items() if row not in table}
    if str(name) in ways:
        return ConfigError(ways[name])
    meant = nearest(name, [*table, *ways])
    others = [of for of in families if str(name) in families[of] or str(name) in where()[of]]
    others = [of for of in others if of.endswith(field.rpartition(".")[2])] or others
    if len(others) == 1 and "did you mean" not in meant:
        meant = f"set {others[0]}={name}, or choose one of {', '.join(table)}"
    more = [way for row, way in ways.items() if repr(row) in meant]
    return ConfigError(" ".join([f"there is no {what} {shown(name)}; {meant}", *more]))


def modules() -> list[str]:
    """Return the names of the modules that add rows."""
    return sorted({module for rows in where().values() for module in rows.values()})
