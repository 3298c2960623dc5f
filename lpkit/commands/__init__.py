"""One module per command of `lpkit`. Each module has these functions:

    arguments(parser)    add the arguments of the command; `options` makes this function
    run(args) -> dict    do the work, and return one JSON-ready object; progress goes to stderr
    text(result) -> str  the text that shows this object to a person

A command imports torch inside `run`, after every check that does not need torch, so that `--help`
and errors in the arguments are printed at once.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lpkit.config import Config, parse_settings
from lpkit.errors import ConfigError, named
from lpkit.predict.time import with_step
from lpkit.presets import is_preset, resolve
from lpkit.techniques import machines
from lpkit.values import Folder

a_folder = Folder       # the type of an argument that is a folder
Arguments = Callable[[argparse.ArgumentParser], None]
FILES = (".yaml", ".yml", ".ipynb")     # suffixes of files; their names may contain "="


def say(text: str) -> None:
    """Prints to stdout, in its encoding. Raises OSError, except if the reader has closed a pipe."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # Python would write the rest of its buffer again at exit, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):      # `lpkit ... | head` closes the pipe
            raise


def needs(what: str, *packages: str) -> None:
    """Raises ConfigError if some of these Python packages are not installed."""
    absent = [package for package in packages if not _there(package)]
    if absent:
        raise ConfigError(f"{what} needs {', '.join(absent)}, which this Python does not have; run "
                          f"`{sys.executable} -m pip install {' '.join(absent)}`. The commands "
                          f"train, predict, bench and doctor work without")


def _there(package: str) -> bool:
    try:
        return find_spec(package.replace("-", "_")) is not None
    except ImportError:
        return False


def opened(path: Path) -> Any:
    """Returns the run in a folder, after checking its identity files. Raises ConfigError."""
    from lpkit.training.runs import Run

    run = Run.open(path)
    _ = run.identity        # reads and checks the files
    return run


MARKS = {"?": {"nargs": "?"}, "!": {"required": True}, "...": {"action": "append"}}


def options(*parts: Mapping[str, Any] | Arguments) -> Arguments:
    """Return the function `arguments` of a command. It adds one argument for each row of `parts`.

    key:   name, metavar and default of the argument: "--top N=10"; a flag has the name only:
           "--json". `name?` is optional, `name!` is required, `name...` is repeatable
    value: the help, or (type, help), or (choices, help)

    A part may also be a function like the one returned.
    """
    def arguments(parser: argparse.ArgumentParser) -> None:
        for part in parts:
            if callable(part):
                part(parser)
                continue
            for key, row in part.items():
                name, _, rest = key.partition(" ")
                metavar, equals, default = rest.partition("=")
                kind, about = row if isinstance(row, tuple) else (str, row)
                mark = re.search(r"\W*$", name)[0]
                how = {"type": kind, "metavar": metavar} if metavar else {"action": "store_true"}
                if isinstance(kind, tuple):
                    how = {"choices": kind}
                if equals:
                    how["default"] = default
                how |= MARKS.get(mark, {})
                parser.add_argument(name.removesuffix(mark), help=about, **how)

    return arguments


def settings(parser: argparse.ArgumentParser, what: str = "change a setting") -> None:
    """Add the arguments `KEY=VALUE` and `--set KEY=VALUE`, which mean the same. They may stand
    before, between and after options. Call this after adding the other positional arguments.
    `asked` reads the values."""
    parser.parse_args = parser.parse_intermixed_args
    parser.add_argument("settings", nargs="*", default=[], metavar="KEY=VALUE",
                        help=f"{what}; repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help=f"{what}; repeatable")


def asked(args: argparse.Namespace, **options: str) -> list[str]:
    """Returns every given `key=value`. `options` maps the name of an option to the keys that this
    option sets. Raises ConfigError if such a key and its option are both given."""
    given = [*args.settings, *args.set]
    parse_settings([*given, *(f"{key}=--{option}" for option, keys in options.items()
                              if getattr(args, option) is not None for key in keys.split())])
    return given


def target_and_asked(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Returns the target and every given `key=value`. The target is None if it was left out:
    argparse then took the first setting for the target."""
    target = args.target
    if target is None or "=" not in target or Path(target).suffix in FILES:
        return target, asked(args)
    return None, [target, *asked(args)]


TARGET = "PRESET|config.yaml|RUN|config.json|FOLDER"    # the targets that `config_of` reads
MODEL = "preset, config file, run folder, or a transformers model (its config.json or its folder)"


def config_of(target: str, settings: Iterable[str]) -> Config:
    """Returns the Config of a target. A target is anything that `presets.resolve` takes, or a model
    of transformers: its `config.json`, or its folder. Raises ConfigError."""
    path = Path(target)
    theirs = path / "config.json" if path.is_dir() else path
    if is_preset(target) or (path / "config.yaml").is_file() or not (
            theirs.suffix == ".json" and (theirs == path or theirs.is_file())):
        return resolve(target, settings)
    from lpkit.exchange.families import described

    config, changes = described(theirs), parse_settings(settings)
    print(f"{named(theirs)}: by default an update has {config.global_batch} sequences of "
          f"{config.model.T:,} tokens; set global_batch, grad_accum_steps and model.context",
          file=sys.stderr)
    return config.replace(changes)


# arguments of every command that predicts
settings_and_machine = options(settings, {
    "--machine MACHINE=h200": "name from the catalogue, YAML file, or `this` to measure this "
                              "machine now (default h200)"})


def machine(target: str) -> Any:
    """Returns the machine that `--machine` names. Raises ConfigError."""
    if target == "this":
        from lpkit import hardware

        return hardware.machine()
    if not target.endswith((".yaml", ".yml")):
        return machines.find(target)
    from lpkit.plain_yaml import read_yaml

    path = Path(target)
    values = read_yaml(path, f"a machine of your own is a YAML file, and {machines.NEEDS}")
    return with_step(machines.from_dict(values, name=path.stem))
