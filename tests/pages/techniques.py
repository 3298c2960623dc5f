"""docs/techniques.md: every family with its rows, and those of the lessons' modules."""

from itertools import groupby

from lessons.catalogue import kit_rows, settings_of
from lpkit.techniques.outside import TABLES

HEAD = """# Techniques

Every row that a Config can name, with its settings and their defaults. `--set FIELD=NAME` chooses
one, and `--set FIELD.SETTING=VALUE` changes a setting of it; in a file, `FIELD: {name: NAME,
SETTING: VALUE}`. Rows that one lesson studies are in modules of `notebooks/lessons/rows/`. The line
above them names the import that brings them: `--import lessons.rows.NAME` behind a command, or
`imports` in a Config. A row of your own is in a module of yours: [A technique of one's
own](own_technique.md). `lpkit techniques` prints this list, and `python -m tests.pages techniques`
makes this page.
"""
HEADS = "\n| name | what | settings | source |\n|---|---|---|---|\n"


def page() -> str:
    parts = [HEAD]
    for field in TABLES:
        rows = kit_rows(field)
        parts.append(f"\n## `{field}`\n" + "\nNone yet: rows come from outside.\n" * (not rows))
        for module, group in groupby(rows, lambda row: row["import"]):
            parts += [f"\n`--import {module}` brings:\n" if module else "", HEADS]
            for row in group:
                pairs = ["`{}`={}".format(*pair.split("=", 1)) for pair in settings_of(row)]
                cells = (f"`{row['name']}`", row["why"], ", ".join(pairs), row["source"])
                cells = (cell.replace("|", "\\|") for cell in cells)
                parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)
