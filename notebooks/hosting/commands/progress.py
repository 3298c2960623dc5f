"""Show the progress of the learners of a room. Only learners who agreed to report their progress
are included. Reports have random names.

    lpkit progress                          show how many learners solved each exercise
    lpkit progress --csv reports.csv        write every report to a table
    lpkit progress --delete                 delete all reports and random names; homes stay
    lpkit progress --collect */learner.json --csv reports.csv     read files that learners handed in

The teacher sees the same numbers live at /services/progress/ of the hub.
"""

import argparse
from pathlib import Path
from typing import Any

from hosting.progress import Store, collected, stops, table
from hosting.room import FOLDER
from lpkit.errors import ConfigError, named
from lpkit.files import whole_file
from lpkit.tables import text_table


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--room", type=Path, default=FOLDER, metavar="DIR",
                        help=f"folder of the room (default {FOLDER})")
    parser.add_argument("--collect", type=Path, nargs="+", metavar="FILE", help="read these files "
                        "instead, for rooms without a hub: learners have them in their data "
                        "directories, as lpkit/learner.json or lpkit/course/learner.json")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all reports as a table")
    parser.add_argument("--delete", action="store_true", help="delete all reports of the room and "
                        "the random names of its learners")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.collect and args.delete:
        raise ConfigError("--delete deletes the reports of a room, and --collect reads files; give "
                          "only one of them")
    store = Store(args.room)
    if not args.collect and not (args.room / "room.json").exists():
        raise ConfigError(f"there is no room in {named(args.room)}; give its folder with --room, "
                          f"or files of learners with --collect")
    events = [event for path in args.collect for event in collected(path)] if args.collect else \
        store.events()
    if args.csv:
        with whole_file(args.csv) as temporary:
            temporary.write_text(table(events))
    return {"problems": store.problems, "reports": len(events),
            "learners": len({event["pseudonym"] for event in events}), "exercises": stops(events),
            "csv": str(args.csv or ""), "deleted": store.delete() if args.delete else 0}


def text(result: dict[str, Any]) -> str:
    lines = [*result["problems"], f"{result['reports']} reports of {result['learners']} learners"]
    if result["exercises"]:
        lines += ["", text_table([("exercise", "right", "not yet"), *(
            (name, str(counts["right"]), str(counts["not_yet"])) for name, counts in
            result["exercises"].items())])]
    lines += [f"wrote all reports to {named(result['csv'])}"] if result["csv"] else []
    lines += [f"deleted {result['deleted']} reports"] if result["deleted"] else []
    return "\n".join(lines)
