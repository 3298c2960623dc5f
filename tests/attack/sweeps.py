"""SIGKILL to a worker of a sweep, or to its keeper, at a random moment: the same command goes on, and in the end the sweep is the unbroken
one: no trial is lost, done twice, or left under way."""

import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from lpkit import processes
from lpkit.claims import runs, sweep
from lpkit.errors import RunFailedError
from tests.attack import Outcome
from tests.attack._nursery import prepare

COUNT, FEW = 200, 3
TRIALS, AT_ONCE = 12, 2
SEARCH = {"optimizer": {"choices": ["adamw", "lion"]}, "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}}
SAID = ("trial", "settings", "val_loss", "name")


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, rng = Outcome(), random.Random(seed)
    told = sweep.Sweep(base=str(prepare(folder, steps=40)), search=SEARCH, trials=TRIALS, target="val_loss", sampler="random", at_once=AT_ONCE)
    whole, begun = _settled(told, folder / "whole"), time.monotonic()
    _settled(told, folder / "timed")
    seconds, rounds, heard = time.monotonic() - begun, 0, 0
    while outcome.tried < count:
        out, rounds = folder / f"sweep-{rounds}", rounds + 1
        found = None
        while found is None:
            over = threading.Event()
            killer = threading.Thread(target=_kill, args=(rng.uniform(0, seconds / 2), rng.random(), over, outcome))
            killer.start()
            try:
                found = _settled(told, out)
            except RunFailedError:
                heard += 1
            finally:
                over.set()
                killer.join()
        _same(found, whole, out, f"seed {seed}, sweep {rounds}", outcome)
    outcome.facts = {"sweeps": rounds, "heard of": heard, "sweep_seconds": round(seconds, 3)}
    return outcome


def _settled(told: sweep.Sweep, out: Path) -> dict:
    out.mkdir(exist_ok=True)
    with runs.Workers(out, processes.Children(), AT_ONCE) as workers:
        return sweep.settle(told, out / "few", lambda what, configs: workers.finished(configs))


def _kill(seconds: float, which: float, over: threading.Event, outcome: Outcome) -> None:
    """One that is there after so many seconds; none where the sweep was quicker."""
    if over.wait(seconds):
        return
    with suppress(psutil.NoSuchProcess):
        there = psutil.Process().children(recursive=True)
        if there:
            there[int(which * len(there))].kill()
            outcome.tried += 1


def _same(found: dict, whole: dict, out: Path, trial: str, outcome: Outcome) -> None:
    one, two = ([{key: line[key] for key in SAID} for line in each["trials"]] for each in (found, whole))
    if one != two:
        outcome.failed("a trial differs", trial)
    records = {path.stem for path in out.glob("*.json")}
    if records != {line["name"] for line in two} or len(Path(found["journal"]).read_text().splitlines()) != TRIALS:
        outcome.failed("a trial was lost or done twice", trial)
    if left := [path.name for path in out.iterdir() if path.is_dir() or path.name.endswith(".tmp")]:
        outcome.failed("something was left behind", f"{trial}: {left}")
