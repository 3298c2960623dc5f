"""docs/techniques.md: every family with its rows."""

from typing import Any

from lpkit.techniques import FAMILIES

HEAD = """# Techniques

Every row that a Config can name, with its settings and their defaults. `--set FIELD=NAME` chooses
one, and `--set FIELD.SETTING=VALUE` changes a setting of it; in a file, `FIELD: {name: NAME,
SETTING: VALUE}`. A row of one's own lives in a module beside the notebook: [A technique of one's
own](own_technique.md). This page is made by `python -m tests.pages techniques`.
"""


def page() -> str:
    parts = [HEAD]
    for field, table in FAMILIES.items():
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
