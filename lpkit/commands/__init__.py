"""The commands of `lpkit`, one module per command. Each module has these functions:

    arguments(parser)    add the arguments of the command; `options` returns such a function
    run(args) -> dict    run the command and return its result, JSON-ready; print progress to stderr
    text(result) -> str  return the result as text, which is printed without --json

Importing torch takes seconds. So a command imports torch inside `run`, after all checks that do not
need torch; `--help` and errors in the arguments are printed at once.
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

a_folder = Folder       # the type, for `options`, of an argument that is a folder
Arguments = Callable[[argparse.ArgumentParser], None]
# suffixes of files that commands take; an argument with "=" and such a suffix is not a setting
FILES = (".yaml", ".yml", ".ipynb")


def say(text: str) -> None:
    """Prints to stdout. Characters that its encoding does not have are escaped. Raises OSError, but
    not if stdout is a pipe that its reader has closed."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # at exit, Python would try to write the rest of its buffer, and fail with another error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):      # `lpkit ... | head` closes the pipe
            raise


def needs(what: str, *packages: str) -> None:
    """Raises ConfigError if some of these Python packages are not installed. `what` is the subject
    of the message: "a sweep needs optuna"."""
    absent = [package for package in packages if not _there(package)]
    if absent:
        raise ConfigError(f"{what} needs {', '.join(absent)}, which this Python does not have; run "
                          f"`{sys.executable} -m pip install {' '.join(absent)}`. The commands "
                          f"train, predict, bench and doctor do not need it")


def _there(package: str) -> bool:
    """Return True if a Python package can be imported, without importing it."""
    try:
        return find_spec(package.replace("-", "_")) is not None
    except ImportError:
        return False


def opened(path: Path) -> Any:
    """Returns the run in the folder `path`. Raises ConfigError if the folder contains no run, or if
    its identity files are damaged."""
    from lpkit.training.runs import Run

    run = Run.open(path)
    _ = run.identity        # reads the files and checks them
    return run


# mark at the end of a name in `options` -> arguments of argparse's add_argument
MARKS = {"?": {"nargs": "?"}, "!": {"required": True}, "...": {"action": "append"}}


def options(*parts: Mapping[str, Any] | Arguments) -> Arguments:
    """Return the function `arguments` of a command module. A part is a dict of arguments, or
    another function that adds arguments to a parser. An item of a dict adds one argument:

    key:   name, metavar and default of the argument: "--top N=10". A flag has only a name:
           "--json". The mark `?` after a name means optional, `!` required, `...` repeatable
    value: the help text, or (type, help text), or (tuple of choices, help text)
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
    """Add the arguments `KEY=VALUE` and `--set KEY=VALUE`, which have the same meaning. They may
    come before, between and after options. Add all other positional arguments before this call.
    `asked` returns the values. `what`: the help text."""
    parser.parse_args = parser.parse_intermixed_args
    parser.add_argument("settings", nargs="*", default=[], metavar="KEY=VALUE",
                        help=f"{what}; repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help=f"{what}; repeatable")


def asked(args: argparse.Namespace, **options: str) -> list[str]:
    """Returns all `key=value` arguments of a command line. `options`: name of an option -> the keys
    that this option sets, separated by spaces. Raises ConfigError if the user gives both an option
    and one of its keys, or two values for a key."""
    given = [*args.settings, *args.set]
    parse_settings([*given, *(f"{key}=--{option}" for option, keys in options.items()
                              if getattr(args, option) is not None for key in keys.split())])
    return given


def target_and_asked(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Returns the target and all `key=value` arguments. The target is None if the user left it out;
    argparse then has the first `key=value` in `args.target`."""
    target = args.target
    if target is None or "=" not in target or Path(target).suffix in FILES:
        return target, asked(args)
    return None, [target, *asked(args)]


TARGET = "PRESET|config.yaml|RUN|config.json|FOLDER"    # the targets that `config_of` reads
MODEL = "preset, config file, run folder, or a transformers model (its config.json or its folder)"


def config_of(target: str, settings: Iterable[str]) -> Config:
    """Returns the Config of a target, changed by `settings`. A target is a preset, a YAML file or a
    run folder (`presets.resolve`), or a transformers model: its `config.json`, or the folder of
    this file. Raises ConfigError."""
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
    "--machine MACHINE=h200": "name from the catalogue, YAML file of `lpkit measure`, or `this` to "
                              "measure this machine now (default h200)"})


def machine(target: str) -> Any:
    """Returns the Machine that the option `--machine` names: a row of the catalogue, a YAML file of
    `lpkit measure`, or `this` machine, which is then measured. Raises ConfigError."""
    if target == "this":
        from lpkit import hardware

        return hardware.machine()
    if not target.endswith((".yaml", ".yml")):
        return machines.find(target)
    from lpkit.plain_yaml import read_yaml

    path = Path(target)
    values = read_yaml(path, f"a machine of your own is a YAML file, and {machines.NEEDS}")
    return with_step(machines.from_dict(values, name=path.stem))
