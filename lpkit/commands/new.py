"""Write the files of an experiment: a notebook, a module that adds a row, a test, and a claim.

  lpkit new experiment my_rule                      my_rule.ipynb, .py, .yaml, and test_my_rule.py
  lpkit new experiment my_cast --family recipe      a precision recipe instead of an optimizer

All four files run unchanged: they contain an example, which you replace by your technique. See
docs/own_technique.md.
"""

import argparse
import importlib.util
import keyword
import re
from contextlib import ExitStack
from typing import Any

from lpkit.commands import a_folder, options
from lpkit.errors import ConfigError, named, shown
from lpkit.files import own_folder, resource, write_atomically
from lpkit.tables import text_table
from lpkit.techniques.lessons import having
from lpkit.techniques.outside import TABLES

# family -> the field of a Config that chooses a row of it. notebooks/experiments has one example
# for each family.
FAMILIES = {"optimizer": "optimizer", "recipe": "precision.recipe"}
FILES = {"{}.ipynb": "notebook", "{}.py": "module with the row and its implementation",
         "test_{}.py": "test against an independent reference", "{}.yaml": "claim"}


arguments = options({
    "kind {experiment}": (("experiment",), "what to write"),
    "name NAME": "name of the row, the module and the files",
    "--family FAMILY=optimizer": (tuple(FAMILIES), "family of the new row (default optimizer)"),
    "--out DIR=.": (a_folder, "folder for the files (default: the current folder)")})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the files. Return their paths, and the commands that run them. Raises ConfigError for a
    name that is taken, before any file is written."""
    name, field, example = args.name, FAMILIES[args.family], f"my_{args.family}"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name) or keyword.iskeyword(name):
        raise ConfigError(f"{shown(name)} is no module's name; use at most 64 letters, digits and "
                          f"_, a letter first, and no path: my_rule")
    files = {args.out / file.format(name): file.format(example) for file in FILES}
    for path in (*files, args.out / name):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{named(path)} exists, and lpkit new overwrites nothing; choose "
                              f"another name, or another --out")
    row = name in TABLES[field] or name in having(field)
    if row or name == "lessons" or importlib.util.find_spec(name):
        what = f"row {field}={name}" if row else f"module {name}"
        raise ConfigError(f"there is a {what} already; choose another name, so that neither hides "
                          f"the other")
    own_folder(args.out)
    with ExitStack() as undo:       # remove the written files if writing one fails
        for path, source in files.items():
            text = (resource("notebooks") / "experiments" / source).read_text(encoding="utf-8")
            undo.callback(path.unlink, missing_ok=True)
            write_atomically(path, text.replace(example, name))
        undo.pop_all()
    commands = (f"notebook {name}.ipynb --tier smoke",
                f"train cpu-3m --import {name} {field}={name} steps=20 --out runs/{name}",
                f"claim {name}.yaml --import {name}")
    return {"files": list(map(str, files)), "commands": [
        f"python -m pytest test_{name}.py",
        *(f"PYTHONPATH=. lpkit {command}" for command in commands)]}


def text(result: dict[str, Any]) -> str:
    files = text_table(zip(map(named, result["files"]), FILES.values()))
    return "\n".join([files, "", "To run the files in their folder:", *result["commands"]])
