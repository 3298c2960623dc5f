"""Techniques that one lesson studies: each module holds the rows of a family and their code.

A Config names a module under `imports`, or a command names it by `--import`:
`lpkit train cpu-3m optimizer=soap --import lessons.rows.optimizers`. The name always means the
kit's own folder, or a learner's copy of it (`lpkit.techniques.lessons`). So a module here imports the standard library,
`lpkit` and `lessons.rows` alone, the latter by `from lessons.rows.NAME import ...`. PyTorch is in
modules named `NAME_torch`, which add no rows.
"""

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

import lpkit.techniques.outside  # noqa: F401   it knows the kit's own rows before others come

FIELDS = {      # the field of a Config, by the name of its table in lpkit.techniques
    "OPTIMIZERS": "optimizer", "OBJECTIVES": "objective", "SCHEDULES": "schedule",
    "INITS": "model.init", "BLOCKS": "model.block", "KINDS": "model.attention",
    "MODEL_CHANGES": "model.changes", "NORMS": "model.norm", "MLPS": "model.mlp",
    "POSITIONS": "model.position", "ATTENTION": "system.attention", "GROWTH": "start.grow",
    "POLICIES": "data.policy", "SIZES": "sizes", "RECIPES": "precision.recipe",
    "MODEL_TRANSFORMS": "transforms", "GOVERNORS": "governors",
    "MOMENT_FORMATS": "memory.moment_format", **{key.upper(): f"memory.{key}" for key in (
        "recompute", "activation_offload", "cross_entropy", "param_dtype", "optimizer_state",
        "optimizer_step")}}


@functools.cache
def where() -> Mapping[str, Mapping[str, str]]:
    """Returns the module of each row, by field and name, read from syntax trees: nothing is imported.

    A module adds rows by `TABLE["name"] = ...` or `TABLE |= {"name": ...}`, with the names written
    down; tests/test_imports.py compares this with what the modules add.
    """
    found: dict[str, dict[str, str]] = {field: {} for field in FIELDS.values()}
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
                found[field] |= {name.value: f"{__name__}.{path.stem}" for name in names}
    return found


def modules() -> list[str]:
    """Returns the names of the modules that add rows."""
    return sorted({module for rows in where().values() for module in rows.values()})
