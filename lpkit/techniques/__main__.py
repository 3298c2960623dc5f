"""Every family with its rows, in Markdown: docs/techniques.md."""

import dataclasses
from typing import Any

from lpkit.techniques import families

HEAD = """# Techniques

Every row that a Config can name, with its settings and their defaults. `--set FIELD=NAME` chooses one, and
`--set FIELD.SETTING=VALUE` changes a setting of it; in a file, `FIELD: {name: NAME, SETTING: VALUE}`. This page is made by
`python -m lpkit.techniques`.
"""


def page() -> str:
    parts = [HEAD]
    for field, table in families().items():
        parts.append(f"\n## `{field}`\n")
        if not table:
            parts.append("\nNone yet: rows come from outside.\n")
            continue
        parts.append("\n| name | what | settings | source |\n|---|---|---|---|\n")
        for name, row in table.items():
            cells = (f"`{name}`", what(row), settings(row.settings), row.source)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def what(row: Any) -> str:
    """Why a run has it; of a block, what its operations say of themselves; of a recipe, its
    casts."""
    said = (row.why or (getattr(row, "operations", None).__doc__ if hasattr(row, "operations")
                        else "") or "")
    casts = getattr(row, "products", {})
    if casts:
        formats = dict.fromkeys(cast.format for pair in casts.values() for cast in pair)
        blocks = dict.fromkeys("x".join(str(side or "all") for side in cast.block)
                               for pair in casts.values() for cast in pair)
        said = f"{', '.join(formats)}, a scale for {', '.join(blocks)}"
    return " ".join(said.partition(". ")[0].split()).rstrip(".")


def settings(defaults: Any) -> str:
    """'`every`=1, ...'"""
    values = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(defaults)
              if f.name != "name"}
    return ", ".join(f"`{name}`={','.join(value) if isinstance(value, tuple) else value}"
                     for name, value in values.items())


if __name__ == "__main__":
    print(page(), end="")
