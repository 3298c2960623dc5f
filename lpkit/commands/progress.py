"""How a room gets on: what its learners report if they agreed, under names that were drawn for them.

    lpkit progress                          which exercise stops whom, of the room in /srv/lpkit-room
    lpkit progress --csv reports.csv        every report, as a table
    lpkit progress --delete                 all of it, with the drawn names; homes stay
    lpkit progress --collect */learner.json --csv reports.csv     of files that learners handed in

The teacher sees the same live at /services/progress/ of the hub.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

from lpkit.commands import lesson


def arguments(parser: ArgumentParser) -> None:
    lesson("progress").arguments(parser)


def run(args: Namespace) -> dict[str, Any]:
    return lesson("progress").run(args)


def text(result: dict[str, Any]) -> str:
    return lesson("progress").text(result)
