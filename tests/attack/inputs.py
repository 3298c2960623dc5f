"""What users bring (tests/inputs): folders, tokenizers, texts, YAML files and command lines are
right, or refused in one sentence.

A trial is a case of a table. A case that is wrong without a word, or that ends in a traceback, did
harm.
"""

import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import inputs
from tests.attack import Outcome

COUNT, FEW = 2000, 30       # all cases that there are, and a draw
NAMED = {"folders": "folders to import", "yamls": "YAML files", "command_lines": "command lines"}


def tables() -> dict[str, list[tuple[str, Callable[[], str]]]]:
    """The cases by module of tests/inputs."""
    names = sorted(module.name for module in pkgutil.iter_modules(inputs.__path__)
                   if not module.name.startswith("_"))
    return {name: list(importlib.import_module(f"tests.inputs.{name}").cases()) for name in names}


def drawn(count: int, seed: int) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """`count` of the cases, or all of them, by table."""
    every = [(table, name, case) for table, cases in tables().items() for name, case in cases]
    chosen = random.Random(seed).sample(range(len(every)), min(count, len(every)))
    return (every[i] for i in sorted(chosen))


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, counts = Outcome(), {}
    for table, name, case in drawn(count, seed):
        of_table = counts.setdefault(table, {"tried": 0, "right": 0, "refused": 0, "silent": 0,
            "tracebacks": 0})
        ended = _ended(case)
        outcome.tried += 1
        of_table["tried"] += 1
        of_table[ended.partition(":")[0]] += 1
        if ended.startswith(("silent", "tracebacks")):
            outcome.failed(ended.partition(":")[0], f"{table}, {name}: {ended.partition(':')[2]}")
    outcome.facts |= {NAMED.get(table, table): of_table for table, of_table in counts.items()}
    return outcome


def _ended(case: Callable[[], str]) -> str:
    try:
        verdict = case()
    except AssertionError as error:
        return f"silent: {error!r:.300}"
    except Exception as error:      # what a user would see as a traceback
        return f"tracebacks: {error!r:.300}"
    return "right" if verdict == "right" else "refused"
