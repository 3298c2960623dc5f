"""What a run, a command and a folder stand up to: `python -m tests.attack [NAME ...]`.

An attack is a module of this folder with

    COUNT                               of trials by hand; `lpkit bench reliability` runs them all
    FEW                                 of trials in the test suite, a few seconds long
    attack(count, seed, folder)         does them in the empty `folder`, and returns an Outcome;
    where this machine has not
                                        what it needs, one of no trial, with NOT_TRIED and why among
                                        its facts
"""

import os
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lpkit.machine_facts import cores

NOT_TRIED = "not tried"
NAMES = sorted(module.name
               for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def patience() -> float:
    """What is promised in seconds is so of a machine that does nothing else; beside more work than
    cores, times this."""
    return max(1, os.getloadavg()[0] / cores())


def until(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60 * patience()
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@dataclass
class Outcome:
    """How many trials there were and, by what went wrong, a line for each that failed: enough to
    do it again."""

    tried: int = 0
    failures: dict[str, list[str]] = field(default_factory=dict)
    # what else was seen, with units; counts by kind
    facts: dict[str, float | str | dict] = field(default_factory=dict)

    def failed(self, what: str, trial: object) -> None:
        self.failures.setdefault(what, []).append(str(trial))
