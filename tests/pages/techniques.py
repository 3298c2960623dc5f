"""Make docs/techniques.md: every family with its rows, and the rows of the lessons' modules."""

from itertools import groupby

from lessons.catalogue import kit_rows, settings_of
from lpkit.techniques.outside import TABLES

HEAD = """# Techniques

All rows that a Config can name, with their settings and defaults. `--set FIELD=NAME` chooses a row,
and `--set FIELD.SETTING=VALUE` changes one of its settings. In a config file, write `FIELD: {name:
NAME, SETTING: VALUE}`. Rows of the lessons need an import, which the line above them names: write
`--import lessons.rows.NAME` behind a command, or `imports` in a Config. You can also [add your own
rows](own_technique.md). `lpkit techniques` prints this list; `python -m tests.pages techniques`
makes this page.
"""
HEADS = "\n| name | meaning | settings | source |\n|---|---|---|---|\n"


def page() -> str:
    parts = [HEAD]
    for field in TABLES:
        rows = kit_rows(field)
        parts.append(f"\n## `{field}`\n" + "\nThe kit has no rows for this field.\n" * (not rows))
        for module, group in groupby(rows, lambda row: row["import"]):
            parts += [f"\n`--import {module}` adds:\n" if module else "", HEADS]
            for row in group:
                pairs = ["`{}`={}".format(*pair.split("=", 1)) for pair in settings_of(row)]
                cells = (f"`{row['name']}`", row["why"], ", ".join(pairs), row["source"])
                cells = (cell.replace("|", "\\|") for cell in cells)
                parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)
