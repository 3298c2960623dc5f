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
    import yaml

    try:
        values = yaml.safe_load(Path(target).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the machine file {target!r} "
                          f"({' '.join(str(error).split())}); {machines.HOW}") from None
    return machines.from_dict(values, name=Path(target).stem)
