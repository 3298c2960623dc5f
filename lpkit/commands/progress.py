"""How a room gets on: what its learners report if they agreed, under names that were drawn for them.

    lpkit progress                          which exercise stops whom, of the room in /srv/lpkit-room
    lpkit progress --csv reports.csv        every report, as a table
    lpkit progress --delete                 all of it, with the drawn names; homes stay
    lpkit progress --collect */learner.json --csv reports.csv     of files that learners handed in

The teacher sees the same live at /services/progress/ of the hub.
"""

import argparse
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from lpkit.files import resource


def _lesson() -> ModuleType:
    if str(resource("notebooks")) not in sys.path:
        sys.path.insert(0, str(resource("notebooks")))
    return import_module("lessons.progress")


def arguments(parser: argparse.ArgumentParser) -> None:
    _lesson().arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    return _lesson().run(args)


def text(result: dict[str, Any]) -> str:
    return _lesson().text(result)
