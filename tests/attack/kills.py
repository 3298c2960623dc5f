"""SIGKILL to a training at a random moment, half of them inside a save: in the end the run is the
uninterrupted one, bit for bit, and nothing lies about."""

import os
import random
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from lpkit.training import checkpoint
from lpkit.training.runs import Run
from tests.attack import Outcome
from tests.attack._nursery import nursery, prepare, saving, wait_until

COUNT, FEW = 1000, 6


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, rng, inside = Outcome(), random.Random(seed), 0
    config, whole = prepare(folder), folder / "whole"
    with nursery(folder) as forks:
        assert forks.lpkit("train", config, "--out", whole) == 0, forks.printed
        begun = time.monotonic()
        assert forks.lpkit("train", config, "--out", folder / "again") == 0, forks.printed
        seconds = time.monotonic() - begun
        run, number = folder / "run-0", 0
        while outcome.tried < count:
            trial = f"seed {seed}, kill {outcome.tried}"
            resume = ["--resume"] if run.exists() else []
            before = checkpoint.folders(run / "checkpoints")
            pid = forks.begin("train", config, "--out", run, *resume)
            if outcome.tried % 2:
                wait_until(partial(saving, run), seconds)
                time.sleep(rng.choice([0, rng.uniform(0, 0.004)]))
            else:
                time.sleep(rng.uniform(0, seconds))
            with suppress(ProcessLookupError):      # it was quicker
                os.kill(pid, signal.SIGKILL)
            code = forks.end()
            if code == 0:           # it was quicker: begin another, which is not a trial
                _same(run, whole, trial, outcome)
                number, run = number + 1, folder / f"run-{number + 1}"
                continue
            if code != -signal.SIGKILL:
                outcome.failed("could not go on", f"{trial}: {forks.printed[-300:]}")
                number, run = number + 1, folder / f"run-{number + 1}"
            outcome.tried += 1
            inside += saving(run)
            _nothing_lost(before, run, trial, outcome)
        if forks.lpkit("train", config, "--out", run, *(["--resume"] if run.exists() else [])):
            outcome.failed("could not go on", forks.printed[-300:])
        _same(run, whole, f"seed {seed}, at the end", outcome)
    outcome.facts = {"inside a save": inside, "runs": number + 1, "run_seconds": round(seconds, 3)}
    return outcome


def _nothing_lost(before: list[Path], run: Path, trial: str, outcome: Outcome) -> None:
    after = checkpoint.folders(run / "checkpoints")
    if before and (not after or after[0].name < before[0].name):
        outcome.failed("a checkpoint was lost", trial)
    for folder in after:
        try:
            checkpoint.verify(folder)      # what looks complete is complete
        except checkpoint.DamagedError as error:
            outcome.failed("a checkpoint was torn", f"{trial}: {error}")


def _same(run: Path, whole: Path, trial: str, outcome: Outcome) -> None:
    a, b = Run.open(run), Run.open(whole)
    if [line["loss"] for line in a.metrics] != [line["loss"] for line in b.metrics]:
        outcome.failed("a loss differs", trial)
    first, second = (checkpoint.load_latest(each.checkpoints, quarantine=False)[0].tensors
                     for each in (a, b))
    if (first.keys() != second.keys()
        or not all(torch.equal(first[name], second[name]) for name in first)):
        outcome.failed("a tensor differs", trial)
    if a.summary["status"] != "complete" or a.problems or a.summary["damaged"]:
        outcome.failed("the record differs",
                       f"{trial}: {a.summary['status']}, {a.problems}, {a.summary['damaged']}")
    left = [path for path in run.rglob("*") if path.name.endswith(".tmp")
            or "quarantine" in path.parts]
    left += (run.parent / "cache").rglob("*.tmp")
    if left:
        outcome.failed("something was left behind", f"{trial}: {left}")
