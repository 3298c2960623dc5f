"""List the techniques that a Config can name. Without FAMILY, list all families. With FAMILY, list
its techniques with their settings, default values and sources.

To use a technique that is listed below a line `--import MODULE`, add this option to your
command."""

import argparse
from typing import Any

from lpkit.beside import beside
from lpkit.commands import options
from lpkit.errors import pick
from lpkit.techniques.outside import TABLES

arguments = options({
    "family? FAMILY": "field of a Config that names a technique: optimizer, model.block"})


def run(args: argparse.Namespace) -> dict[str, Any]:
    fields = TABLES if args.family is None else {args.family: pick(TABLES, args.family, "family")}
    listed = beside("lessons.catalogue").rows_of
    return {"family": args.family, "families": {field: listed(field) for field in fields}}


def text(result: dict[str, Any]) -> str:
    return beside("lessons.catalogue").text(result["families"], settings=bool(result["family"]))
