"""`lpkit lab` and `lpkit notebook`, ended by a signal at a random moment: nothing may be left.

Left are processes that descend from the command (they inherit a mark in their environment, however
they hide), and files and folders below the temporary folder and Jupyter's runtime folder. SIGTERM,
SIGHUP and SIGINT must have ended everything within 2 s, and no record may say that it still runs.
"""

import itertools
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
from nbformat.v4 import new_code_cell, new_notebook

from hosting.lab import FIRST
from tests.attack import Outcome

COUNT, FEW = 40, 4
POLITE_SECONDS = 2.0
KILLED_SECONDS = 5.0        # of our own: nobody waits for what is left after SIGKILL
EARLIEST_SECONDS, LATEST_SECONDS = 0.0, 5.0     # a kernel runs by then
MARK = "LPKIT_ATTACK"
PRELUDE = ""                # a test breaks something here
COMMANDS = {
    "lab": ["lab", "--no-browser", "--port", "0"],
    "notebook": ["notebook", f"./{FIRST}", "--out", "out"],
    "notebooks": ["notebook", f"./{FIRST}", "a=1,2", "--on", "processes=2", "--out", "out"],
}
READY = re.compile(r"JupyterLab is open|cell 2 of 2")       # it serves; the cell runs
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
CELL = """\
import subprocess, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
time.sleep(600)"""
# It has imported what a command imports, and forks for each. A line in: where, environment, words.
# A line out: the process; and when it has ended, its status and when.
NURSERY = """
import json, os, signal, sys, time
sys.modules["rfc3987_syntax"] = None            # slow to import, and not needed
import nbformat
from lpkit import cli, processes
cli.module_of("lab")         # finds hosting
cli.module_of("notebook")
{prelude}
signal.signal(signal.SIGINT, signal.SIG_DFL)    # Python's own is lost in what runs after a fork
signal.signal(signal.SIGHUP, signal.SIG_DFL)    # and what nohup began, ignores this
for line in sys.stdin:
    folder, environment, words = json.loads(line)
    pid = os.fork()
    if not pid:
        os.chdir(folder)
        os.environ |= environment
        output = os.open("said", os.O_WRONLY | os.O_CREAT)
        for fd in (1, 2):
            os.dup2(output, fd)
        code = 1
        try:
            code = cli.main(words)
        except SystemExit as leaving:
            code = leaving.code
        finally:
            os._exit(code)
    print(pid, flush=True)
    status = os.waitpid(pid, 0)[1]
    print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic()]), flush=True)
"""


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, slowest, under_way = Outcome(), 0.0, 0
    command = [sys.executable, "-c", NURSERY.format(prelude=PRELUDE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as nursery:
        for number, (sent, name) in enumerate(itertools.islice(itertools.cycle(
                itertools.product(SIGNALS, COMMANDS)), count)):
            delay = random.Random(f"{seed} {number}").uniform(EARLIEST_SECONDS, LATEST_SECONDS)
            trial = f"{name}, {sent.name} after {delay:.3f} s"
            place = folder / str(number)
            environment = prepare(place)
            print(json.dumps([str(place), environment, COMMANDS[name]]), file=nursery.stdin,
                  flush=True)
            pid = int(nursery.stdout.readline())
            time.sleep(delay)
            under_way += READY.search((place / "said").read_text()) is not None
            begun = time.monotonic()
            os.kill(pid, sent)
            if not select.select([nursery.stdout], [], [], KILLED_SECONDS)[0]:
                os.kill(pid, signal.SIGKILL)
            _, ended = json.loads(nursery.stdout.readline())
            polite = sent != signal.SIGKILL
            left = until_nothing(place, (POLITE_SECONDS if polite else KILLED_SECONDS) + begun)
            took = max(ended, time.monotonic()) - begun
            slowest = max(slowest, took if polite else 0)
            outcome.tried += 1
            if ended - begun > POLITE_SECONDS:
                outcome.failed("too slow", f"{trial}: {ended - begun:.2f} s")
            if left:
                outcome.failed("left behind", f"{trial}: {left}")
            if polite and (running := [s for s in statuses(place) if s in ("asked", "running")]):
                outcome.failed("a record lies", f"{trial}: {running}")
            end_all(place)
    outcome.facts |= {"slowest_polite_seconds": round(slowest, 2), "under_way": under_way}
    return outcome


def prepare(place: Path) -> dict[str, str]:
    """A folder with a course and places for all that is temporary; the environment that says so."""
    book = new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    book.cells = [new_code_cell("a: int = 1", metadata={"tags": ["parameters"]}),
                  new_code_cell(CELL)]
    for name in (Path(FIRST).parent, "tmp", "runtime"):
        (place / name).mkdir(parents=True)
    nbformat.write(book, place / FIRST)
    (place / "said").touch()
    return {"TMPDIR": str(place / "tmp"), "JUPYTER_RUNTIME_DIR": str(place / "runtime"),
            MARK: str(place)}


def processes(place: Path) -> list[psutil.Process]:
    """All that inherited the mark of `place`."""
    marked = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(place):
                marked.append(process)
    return marked


def leftovers(place: Path) -> list[str]:
    left = []
    for process in processes(place):
        with suppress(psutil.Error):
            left.append(f"process {' '.join(process.cmdline())[:100]}")
    files = [*(place / "tmp").iterdir(), *(place / "runtime").iterdir(), *place.glob("out/.*")]
    return left + [str(path.relative_to(place)) for path in files]


def until_nothing(place: Path, deadline: float) -> list[str]:
    """What is still left at `deadline`, in seconds of time.monotonic."""
    while (left := leftovers(place)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def statuses(place: Path) -> list[str]:
    return [json.loads(path.read_text())["status"] for path in place.glob("out/*.json")]


def end_all(place: Path) -> None:
    for process in processes(place):
        with suppress(psutil.Error):
            process.kill()
