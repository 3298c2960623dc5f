"""The course on a machine that does nothing else, and beside four busy processes.

Each notebook runs at tier cpu in a process of its own, as `lpkit notebook` runs it: alone, then
with the others. A minute is the budget alone, and six times its own time beside them. All
answers to the exercises go through the judge within two minutes. A row against a budget is the
share of it that is used. A round takes about 80 minutes on two cores, so there is one for every
nine that are requested. The record has the load of the machine at the beginning: docs/teach shows
only records of a quiet machine. `--pieces 20,21` times these notebooks alone, in a record of their
own.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hosting import notebooks, runner
from lessons.judging import puzzles
from lpkit.errors import pick
from lpkit.processes import tell
from tests.bench.harness import ROUNDS, Result, paired
from tests.lessons.judging.course import EXERCISES, PUZZLES

BUSY, TIMES, BUDGET_SECONDS, JUDGED_SECONDS = 4, 6.0, 60.0, 120.0
PACKAGES = ("torch", "jupyterlab", "ipykernel", "nbclient")
# ends with the bench, also when that is killed
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**6))"


def run(rounds: int = ROUNDS, pieces: str = "") -> list[Result]:
    """pieces: numbers of notebooks, as "20,21"; "": the whole course and its exercises.

    Errors: ConfigError for an unknown number; RuntimeError for a notebook that does not run to its
    end, or an exercise whose answer is not right."""
    rounds = max(1, rounds // ROUNDS)
    by_number = {path.stem[:2]: path for path in notebooks.course()}
    paths = [pick(by_number, number, "notebook") for number in pieces.split(",")] if pieces \
        else list(by_number.values())
    name = "-".join(["course", *(path.stem[:2] for path in paths if pieces)])
    common = {"better": "lower", "packages": PACKAGES, "facts": {"load": os.getloadavg()[0]}}
    results = []
    if not pieces:
        judged = [_judged() for _ in range(rounds)]
        results.append(paired(name, case=f"all {len(EXERCISES)} exercises judged", ours=judged,
                              peer=[JUDGED_SECONDS] * rounds, peer_name="a budget of 2 minutes",
                              target=1.0, **common))
    for path in paths:
        idle, beside = [], []
        for _ in range(rounds):
            idle.append(_seconds(path))
            with busy():
                beside.append(_seconds(path))
        tell(f"{path.stem}: {idle[-1]:.0f} s alone, {beside[-1]:.0f} s beside {BUSY} busy "
             f"processes")
        results.append(paired(name, case=path.stem, ours=idle, peer=[BUDGET_SECONDS] * rounds,
                              peer_name="a budget of a minute", target=1.0, **common))
        results.append(paired(name, case=f"{path.stem} beside {BUSY} busy processes",
                              ours=beside, peer=idle, peer_name="alone", target=TIMES, **common))
    return results


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """With BUSY processes beside this one that never rest."""
    with contextlib.ExitStack() as stack:
        for _ in range(BUSY):
            child = stack.enter_context(subprocess.Popen(       # as somebody else's: Linux shares
                [sys.executable, "-c", SPIN], start_new_session=True))      # out by session
            stack.callback(child.kill)
        yield


def _seconds(path: Path) -> float:
    """Of one run, with its kernel's start. A claim about time may fail beside others; what it took
    to the end counts."""
    with tempfile.TemporaryDirectory() as out:
        jobs = runner.plan(path, [], tier="cpu", out=Path(out))
        (record,) = runner.run_all(jobs)
    if record["status"] != "done":
        raise RuntimeError(f"{path.stem} did not run to its end: {record['error']}")
    return record["seconds"]


def _judged() -> float:
    began = time.perf_counter()
    wrong = [name for name, exercise in EXERCISES.items() if name not in PUZZLES
             and exercise.judged(exercise.answer).status != "right"]
    verdicts = puzzles.run([(name, puzzle.solution) for name, puzzle in PUZZLES.items()])
    wrong += [name for name, verdict in zip(PUZZLES, verdicts) if verdict["status"] != "right"]
    if wrong:
        raise RuntimeError(f"the answer of {wrong[0]} does not stand its own cases")
    return time.perf_counter() - began
