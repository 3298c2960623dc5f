"""One file per command of `lpkit`. Each has

    arguments(parser)    add its arguments, by `options`
    run(args) -> dict    do it, and return one JSON-ready object; progress goes to standard error
    text(result) -> str  the same object for a person

A command imports what needs torch inside `run`, after all that can be refused without it:
`--help` and a wrong word are answered at once.
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

a_folder = Folder       # the type of an argument
Arguments = Callable[[argparse.ArgumentParser], None]
FILES = (".yaml", ".yml", ".ipynb")     # whose names may hold an =


def say(text: str) -> None:
    """Prints to stdout, in its encoding. Raises OSError, but not when its reader has left."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # Python would try the rest of its buffer again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):      # `lpkit ... | head`: it has seen enough
            raise


def needs(what: str, *packages: str) -> None:
    """Raises ConfigError for those that are not installed."""
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
    """The run in a folder, when its own files agree. Raises ConfigError."""
    from lpkit.training.runs import Run

    run = Run.open(path)
    _ = run.identity        # reads them
    return run


MARKS = {"?": {"nargs": "?"}, "!": {"required": True}, "...": {"action": "append"}}


def options(*parts: Mapping[str, Any] | Arguments) -> Arguments:
    """Return the function `arguments` of a command. It adds an argument for each row.

    The key of a row has the name, the metavar and the default: "--top N=10", or "--json" for a
    flag. `name?` may be left out, `name!` must be given, `name...` is repeatable. The value is the
    help, or (type, help), or (choices, help). A part may be another such function.
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
    """`KEY=VALUE` and `--set KEY=VALUE`, which mean the same, before, between and after options.
    Comes after the other positional arguments; `asked` reads what was given."""
    parser.parse_args = parser.parse_intermixed_args
    parser.add_argument("settings", nargs="*", default=[], metavar="KEY=VALUE",
                        help=f"{what}; repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help=f"{what}; repeatable")


def asked(args: argparse.Namespace, **options: str) -> list[str]:
    """Returns every `key=value`. Refuses a key that one of the `options`, by name, sets too."""
    given = [*args.settings, *args.set]
    parse_settings([*given, *(f"{key}=--{option}" for option, keys in options.items()
                              if getattr(args, option) is not None for key in keys.split())])
    return given


def target_and_asked(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The same beside a target that may be left out, and whose place a setting then took."""
    target = args.target
    if target is None or "=" not in target or Path(target).suffix in FILES:
        return target, asked(args)
    return None, [target, *asked(args)]


TARGET = "PRESET|config.yaml|RUN|config.json|FOLDER"    # which `config_of` reads
MODEL = "preset, config file, run folder, or a transformers model (its config.json or its folder)"


def config_of(target: str, settings: Iterable[str]) -> Config:
    """Returns what `presets.resolve` does, and also the Config of a model of transformers: target
    is its `config.json`, or a folder with one that is no run. Raises ConfigError."""
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


# the arguments of every command that predicts
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
