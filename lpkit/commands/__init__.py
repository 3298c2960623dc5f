"""One file per command of `lpkit`. Each has

    arguments(parser)    add its arguments
    run(args) -> dict    do it, and return one JSON-ready object; progress goes to standard error
    text(result) -> str  the same object for a person

A command imports what needs torch inside `run`, so that `--help` is fast.
"""

import argparse
from pathlib import Path
from typing import Any

from lpkit.errors import ConfigError
from lpkit.techniques import machines
from lpkit.values import folder


def a_folder(text: str) -> Path:
    """The type of an argument that names a folder, which may be there or not."""
    try:
        folder("it", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def settings_and_machine(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that predicts."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a setting; repeatable")
    parser.add_argument("--machine", default="h200", help="a row of the catalogue, a YAML file, or "
                        "`this`: the one at hand, measured")


def machine(target: str) -> Any:
    """What `--machine` means. Raises ConfigError."""
    if target == "this":
        from lpkit import hardware

        return hardware.machine()
    if not target.endswith((".yaml", ".yml")):
        return machines.find(target)
    from lpkit.plain_yaml import read_yaml

    try:
        values = read_yaml(Path(target))
    except ConfigError as error:
        raise ConfigError(f"{error}; a machine of your own is a YAML file, and {machines.NEEDS}"
                          ) from None
    return machines.from_dict(values, name=Path(target).stem)
