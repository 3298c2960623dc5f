"""The command line: find the command, run it, print one object. Everything else goes to standard
error.

Exit codes: 0 done; 2 the input was wrong (one sentence says what and the way out); 130 interrupted;
143 terminated.
"""

import argparse
import importlib
import json
import os
import sys

from lpkit import __version__
from lpkit.errors import ConfigError, nearest
from lpkit.tables import text_table
from lpkit.training.runs import RunFailedError

COMMANDS = {
    "lab": "open JupyterLab on the course, on this machine only",
    "doctor": "what this machine can do; for what it cannot, why and the nearest thing that works",
    "predict": "parameters, memory, FLOPs, time and cost of a training step, before it runs",
    "plan": "which layouts train a model on time and within a budget, and why the rest do not",
    "advise": "whether low precision would be faster for a model on a machine, and why",
    "data": "prepare a corpus: text in, token files out",
    "train": "train a preset or a config file",
    "sample": "generate text from a run",
    "notebook": "run notebooks with parameters, without a browser",
    "bench": "every performance figure that the project claims, measured beside its peer",
}


def usage() -> str:
    table = text_table(COMMANDS.items(), indent="  ")
    return (f"usage: lpkit COMMAND [...] [--json]\n\n{table}\n\n"
            f"`lpkit COMMAND --help` explains one; --json prints one object on standard output.")


def complain(sentence: object) -> int:
    print(f"lpkit: {sentence}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.print_usage(sys.stderr)
        sys.exit(complain(message))


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    name = argv[0]
    if name not in COMMANDS:
        return complain(f"there is no command {name!r}; {nearest(name, COMMANDS)}")
    command = importlib.import_module(f"lpkit.commands.{name}")
    parser = _Parser(prog=f"lpkit {name}", description=command.__doc__,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true",
                        help="print one JSON object on standard output")
    command.arguments(parser)
    args = parser.parse_args(argv[1:])
    try:
        result = command.run(args)
    except (ConfigError, RunFailedError) as error:
        return complain(error)
    except KeyboardInterrupt:
        print("lpkit: interrupted", file=sys.stderr)
        return 130
    code = result.pop("exit_code", 0)   # a command that ran, and has bad news
    try:
        print(json.dumps(result, allow_nan=False) if args.json else command.text(result),
              flush=True)
    except BrokenPipeError:             # `lpkit ... | head`: whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
