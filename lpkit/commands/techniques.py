"""List the techniques that a Config can name: every family and its rows, or one family, with the
settings of each row and their defaults. A row below `--import MODULE` needs these words."""

import argparse
from typing import Any

from lpkit.beside import beside
from lpkit.commands import options
from lpkit.errors import pick
from lpkit.techniques.outside import TABLES

arguments = options({
    "family? FAMILY": "the field of a Config that names the rows: optimizer, model.block"})


def run(args: argparse.Namespace) -> dict[str, Any]:
    fields = TABLES if args.family is None else {args.family: pick(TABLES, args.family, "family")}
    listed = beside("lessons.catalogue").rows_of
    return {"family": args.family, "families": {field: listed(field) for field in fields}}


def text(result: dict[str, Any]) -> str:
    return beside("lessons.catalogue").text(result["families"], settings=bool(result["family"]))
