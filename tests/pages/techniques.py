"""docs/techniques.md: every family with its rows, and those of the lessons' modules."""

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any

from lessons import rows
from lpkit.techniques import FAMILIES
from lpkit.techniques.outside import TABLES

HEAD = """# Techniques

Every row that a Config can name, with its settings and their defaults. `--set FIELD=NAME` chooses
one, and `--set FIELD.SETTING=VALUE` changes a setting of it; in a file, `FIELD: {name: NAME,
SETTING: VALUE}`. A row of one's own lives in a module beside the notebook: [A technique of one's
own](own_technique.md). This page is made by `python -m tests.pages techniques`.

Rows that one lesson studies are in modules of `notebooks/lessons/rows/`. An import brings them:
`--import lessons.rows.NAME` behind a command, or `imports` in a Config. They are at the end of
this page.
"""


def page() -> str:
    """Returns the page. Raises RuntimeError where a module of rows has been imported before, whose
    rows would be listed as the package's."""
    parts = [HEAD]
    if early := [name for name in modules() if name in sys.modules]:
        raise RuntimeError(f"{early[0]} has been imported; make this page in a process of its own")
    known = {field: dict(table) for field, table in TABLES.items()}
    for field in FAMILIES:
        parts.append(family(f"## `{field}`", known[field]))
    for name in modules():
        importlib.import_module(name)
        parts.append(f"\n## Rows of `{name}`\n")
        for field, table in TABLES.items():
            new = {row: table[row] for row in table.keys() - known[field].keys()}
            if new:
                parts.append(family(f"### `{field}`", dict(sorted(new.items()))))
            known[field] = dict(table)
    return "".join(parts)


def modules() -> list[str]:
    """Returns the names of the lessons' modules of rows; of `NAME_torch`, `NAME` has the rows."""
    names = [one.name for one in pkgutil.iter_modules(rows.__path__, f"{rows.__name__}.")]
    return sorted(name for name in names if not name.endswith("_torch"))


def family(heading: str, table: Mapping[str, Any]) -> str:
    if not table:
        return f"\n{heading}\n\nNone yet: rows come from outside.\n"
    parts = [f"\n{heading}\n", "\n| name | what | settings | source |\n|---|---|---|---|\n"]
    for name, row in table.items():
        cells = (f"`{name}`", what(row), settings(row.settings), row.source)
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def what(row: Any) -> str:
    """Why a run has it; of a block, what its operations say; of a recipe, its casts."""
    text = row.why
    if hasattr(row, "formula"):
        text = text or row.formula.__doc__
    if casts := getattr(row, "all_casts", ()):
        formats = dict.fromkeys(cast.format for cast in casts)
        sides = [(cast.block[0] or "all", cast.block[1] or "all") for cast in casts]
        blocks = dict.fromkeys(f"{rows}x{along}" for rows, along in sides)
        text = f"{', '.join(formats)}, a scale for {', '.join(blocks)}"
    return " ".join(text.partition(". ")[0].split()).rstrip(".")


def settings(defaults: Any) -> str:
    """'`every`=1, ...'"""
    texts = []
    for name, value in vars(defaults).items():
        if name != "name":
            texts.append(f"`{name}`={','.join(value) if isinstance(value, tuple) else value}")
    return ", ".join(texts)
