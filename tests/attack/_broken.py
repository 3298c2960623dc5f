"""Trials in which what the attacks of words look at is broken on purpose: test_words.py sees that they say so."""

import lpkit.cli
import lpkit.commands.predict
import lpkit.config
import lpkit.errors
import lpkit.files
import lpkit.plain_yaml
from tests.attack import command_line, python_calls

ESCAPE = "\x1b[31mred"


def warm() -> None:
    python_calls.NAMES = vars(lpkit.config)


def no_boundary() -> int:
    lpkit.cli.ConfigError = KeyboardInterrupt
    return command_line.trial(["predict", "nothing"])


def raw_words() -> int:
    lpkit.cli.printable = lpkit.errors.printable = str
    return command_line.trial(["predict", "cpu-3m", "--machine", f"{ESCAPE}.yaml"])


def any_file() -> int:
    lpkit.files.check_regular = lambda path: None
    return command_line.trial(["predict", "../odd/fifo.yaml"])


def aliases() -> int:
    import yaml

    lpkit.plain_yaml._Plain = yaml.SafeLoader
    return command_line.trial(["predict", "../odd/alias.yaml"])


def litter() -> int:
    open("runs", "w").close()
    return command_line.trial(["predict", "nothing"])


def elsewhere() -> int:
    open("/proc/self/comm", "w").close()
    return command_line.trial(["predict", "nothing"])


def right() -> int:
    return command_line.trial(["predict", "cpu-3m"])


def unchecked() -> int:
    from lpkit import values

    values.Checked.__post_init__ = lambda self: None
    return python_calls.trial("SystemConfig(threads=-1)")


def another_error() -> int:
    return python_calls.trial("1 / 0")


def trial(name: str) -> int:
    return globals()[name]()
