"""The list of techniques that `lpkit techniques` prints and docs/techniques.md contains.

For each family it has the rows of the package, and then the rows of the lessons' modules, under the
`--import` that adds them.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from lpkit.tables import beside
from lpkit.techniques import lessons, outside


def rows_of(field: str) -> list[dict[str, Any]]:
    """Return the rows of the family that `field` of a Config chooses from ("optimizer", ...), as
    JSON-ready dicts: first the package's rows, then the rows of each module that adds some. Imports
    all modules of lessons that add rows."""
    outside.load(lessons.package().modules())
    rows = [{"name": name, "import": outside.module_of(field, name), "why": why(row),
             "settings": {key: value for key, value in vars(row.settings).items() if key != "name"},
             "source": row.source} for name, row in outside.TABLES[field].items()]
    return sorted(rows, key=lambda row: row["import"])


def kit_rows(field: str) -> list[dict[str, Any]]:
    """Return `rows_of(field)` without the rows that neither the package nor a lesson added, for
    example those of a test, so that a page is the same in every process."""
    return [row for row in rows_of(field)
            if row["name"] in outside.OWN[field] or lessons.has(row["import"])]


def why(row: Any) -> str:
    """Return in one clause what a row does: the first sentence of its `why`; for a recipe, its
    formats and the blocks that share a scale."""
    text = row.why
    if hasattr(row, "all_casts"):
        formats = dict.fromkeys(cast.format for cast in row.all_casts)
        sides = [(cast.block[0] or "all", cast.block[1] or "all") for cast in row.all_casts]
        blocks = dict.fromkeys(f"{rows}x{along}" for rows, along in sides)
        text = f"{', '.join(formats)}, a scale for {', '.join(blocks)}"
        text = text if formats else f"matmuls in {row.compute or 'float32'}"
    return " ".join(text.partition(". ")[0].split()).rstrip(".")


def settings_of(row: Mapping[str, Any]) -> list[str]:
    """Return "name=default" for each setting of a row of `rows_of`."""
    return [f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
            for key, value in row["settings"].items()]


def text(families: Mapping[str, list[dict[str, Any]]], settings: bool) -> str:
    """Return the list as text for a terminal. `families`: the rows by field of a Config;
    `settings`: whether to add each row's settings and source."""
    lines = []
    for field, rows in families.items():
        lines.append(f"\n{field}" if lines else field)
        for module, group in groupby(rows, lambda row: row["import"]):
            lines += [f"  --import {module}"] if module else []
            for row in group:
                more = [", ".join(settings_of(row)), row["source"]] if settings else []
                details = [("", detail) for detail in more if detail]
                for name, words in ((row["name"], row["why"]), *details):
                    lines.append(beside(f"  {name}", words, 28, 118))
    return "\n".join(lines)
