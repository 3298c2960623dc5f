"""The command line: import the module of the command, run it, and print its result to standard
output. Progress and errors go to standard error.

Exit codes:
    0              done
    1              a process was killed
    2              wrong input, or this machine cannot run the command; a message explains why
    129, 130, 143  ended by SIGHUP, SIGINT, SIGTERM

If you see a traceback, it is a bug of lpkit.
"""

import argparse
import contextlib
import errno
import json
import os
import signal
import sys
from importlib import import_module
from types import ModuleType

from lpkit import __version__, errors
from lpkit.beside import beside
from lpkit.commands import say
from lpkit.errors import ConfigError, named, nearest, out_of_memory, pick, printable, shown
from lpkit.signals import POLITE, heard_by
from lpkit.tables import text_table
from lpkit.training.runs import RunFailedError
from lpkit.values import annotated, unique

COMMANDS = {
    "lab": "open JupyterLab on your copies of the course, on this machine only",
    "room": "open JupyterLab for several learners on this machine; each learner has a separate lab",
    "progress": "show the progress of the learners of a room who agreed to report their progress",
    "doctor": "test what works on this machine; if something fails, say what to use instead",
    "measure": "measure this machine once and save it as mine.yaml, for `predict` and `plan`",
    "predict": "predict parameters, memory, FLOPs, time and cost of a training step before it runs",
    "plan": "find parallel layouts that meet a deadline and a budget, and say why others do not",
    "claim": "test whether X beats Y on this machine: tune both, train both, and run a t-test",
    "sweep": "search settings with Optuna; each trial is one training run",
    "claims": "list published claims about cheaper training, with our results and our verdict",
    "cards": "print a table of prediction files (cards): predicted and measured memory and time",
    "advise": "say whether low precision would be faster for a model on a machine, and why",
    "techniques": "list the techniques that a config can name, by family",
    "data": "turn text into token files, or check token files and print what they contain",
    "train": "train a preset or a config file",
    "launch": "write a job for several machines: torchrun, Slurm, Kubernetes or SkyPilot",
    "warm": "verify, time and compile the kernels of a config before its first run",
    "sample": "generate text with the model of a run",
    "import": "turn a transformers folder into a run that other runs can start from",
    "export": "write the weights of a run for transformers",
    "new": "write the files of an experiment: a notebook, a technique, a test and a claim",
    "notebook": "run notebooks with parameters, without a browser",
    "slides": "turn an executed notebook into slides: one HTML file, which needs no network",
    "pack": "write one file that installs lpkit and the course without a network",
    "bench": "run benchmarks that compare lpkit with other libraries in the same process",
}
# commands whose modules are in `hosting.commands`; the others are in `lpkit.commands`
HOSTED = {"lab", "room", "progress", "notebook", "slides", "pack"}
MOST_CHARACTERS = 600       # limit of argparse's messages, because they repeat the input
# errno -> what the user can do
WAYS_OUT = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or choose another folder"),
    errno.EROFS: "choose a folder that can be written",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "choose another path, or change its permissions"),
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "close other programs, or choose smaller settings",
}


class _SignalError(KeyboardInterrupt):
    """SIGTERM or SIGHUP. It unwinds like Ctrl-C, so that half-written files are removed."""


def usage() -> str:
    """Return the help of `lpkit`: the list of commands."""
    table = text_table(COMMANDS.items(), indent="  ")
    return (f"usage: lpkit COMMAND [...] [--json]\n\n{table}\n\n"
            f"`lpkit COMMAND --help` explains COMMAND; --json prints one JSON object.")


def module_of(name: str) -> ModuleType:
    """Return the module of a command. Raises ConfigError if the module is in the folder
    `notebooks`, and this folder is missing."""
    return beside(f"hosting.commands.{name}") if name in HOSTED else \
        import_module(f"lpkit.commands.{name}")


def complain(sentence: object, code: int = 2) -> int:
    """Print an error message to standard error, and return the exit code. All lines after the first
    are indented."""
    first, *more = printable(str(sentence)).split("\n")
    with contextlib.suppress(OSError):      # stderr is closed
        print("\n    ".join([f"lpkit: {first}", *more]), file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that checks values by their annotations (`values.annotated`). A wrong value
    raises ConfigError, whose message names the nearest valid value."""

    def _get_values(self, action: argparse.Action, words: list[str]):
        # argparse reads --budget=-- as an empty list
        if action.option_strings and words == ["--"]:
            raise argparse.ArgumentError(action, "'--' is not a value")
        if action.option_strings and isinstance(action, argparse._StoreAction):
            # argparse would silently use the last of two values; `unique` raises ConfigError
            first = vars(action).setdefault("given", words)
            unique((action.option_strings[-1], " ".join(values)) for values in (first, words))
        return super()._get_values(action, words)

    def _get_value(self, action: argparse.Action, word: str):
        """Convert and check a word by the annotation that the argument has as its `type`."""
        return annotated(word, action.type or str, (action.option_strings or [action.dest])[-1])

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None:
            pick(dict.fromkeys(action.choices), value, action.dest)

    def error(self, message: str):
        """Print a message of argparse in one line, shortened, and exit with code 2."""
        sentence = " ".join(message.split())[:MOST_CHARACTERS]
        sys.exit(complain(f"{sentence}; see `{self.prog} --help`"))


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit code. `argv`: the words after `lpkit`; None: those of
    sys.argv. Expected errors become one message on standard error; others are raised."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        with heard_by(_unwind, set(POLITE) - {signal.SIGINT}):
            return _main(argv)
    except (ConfigError, RunFailedError) as error:
        return complain(error, 1 if isinstance(error, errors.GoneError) else 2)
    except _SignalError as heard:
        complain(f"stopped by {signal.Signals(heard.args[0]).name}")
        return 128 + heard.args[0]
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except OSError as error:
        return complain(_of_system(error))
    except RecursionError:
        return complain("the input nests too deeply to be read; flatten it")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return complain("memory ran out; choose a smaller model, model.context or batch (more "
                        "grad_accum_steps); `lpkit predict` predicts the memory")


def _main(argv: list[str]) -> int:
    """Parse `argv`, run the command, print its result, and return the exit code. Raises the errors
    that `main` handles."""
    if not argv or argv[0] in ("-h", "--help"):
        say(usage())
        return 0
    if argv[0] == "--version":
        say(__version__)
        return 0
    name = argv[0]
    if name not in COMMANDS:
        return complain(f"there is no command {shown(name)}; {nearest(name, COMMANDS)}")
    command = module_of(name)
    parser = _Parser(prog=f"lpkit {name}", description=command.__doc__,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true",
                        help="print one JSON object on standard output")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE",
                        help="import a module with your own rows; repeatable")
    command.arguments(parser)
    pending: list[int] = []
    # delay signals until argparse has finished, because an exception would break its clean-up
    with heard_by(lambda number, _frame: pending.append(number)):
        args = parser.parse_args(argv[1:])
    for number in pending:
        signal.raise_signal(number)
    if args.imports:
        from lpkit.config import Config

        # importing executes the modules; after this, config files may name them, too
        Config(imports=args.imports)
    result = command.run(args)
    code = result.pop("exit_code", 0)   # not 0 if the command finished but found a problem
    try:
        say(json.dumps(result, allow_nan=False) if args.json else printable(command.text(result)))
    except OSError:
        if not code:        # with a code that is not 0, the exit code reports the problem
            raise
    return code


def _unwind(number: int, frame: object) -> None:
    """Handle SIGTERM and SIGHUP: raise _SignalError."""
    raise _SignalError(number)


def _of_system(error: OSError) -> str:
    """Returns the message for an OSError: the file, the system's error text, and what to do."""
    files = [named(os.fsdecode(name)) for name in (error.filename, error.filename2)
             if isinstance(name, (str, bytes, os.PathLike))]
    where = f"{' -> '.join(files)}: " if files else ""
    way_out = WAYS_OUT.get(error.errno, "choose another path")
    return f"{where}{error.strerror or error or type(error).__name__}; {way_out}"
