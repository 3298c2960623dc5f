"""Ranks that fail in every way, and how soon the right one is named; and what their start costs.

`rank` is the function that they run, also in tests/parallel/test_launch.py: it reduces a tensor at
every step, and one of them meets a fault on the way. tests/attack/layouts.py has ranks that train,
in every layout.
"""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist

from lpkit.errors import ConfigError
from lpkit.parallel.meeting import joined, meet
from lpkit.parallel.processes import Place, Processes, WarmParent
from lpkit.presets import preset
from lpkit.training.runs import RunFailedError
from lpkit.training.training import Training
from tests.bench.harness import ROUNDS, Result, paired, steps_in_turns

TRIALS = 20
END_SECONDS = 5.0           # from a rank's death to the error
TIMEOUT_SECONDS = 2.0       # for a rank without a sign of life;
NAMED_SECONDS = 2.0         # and so much later it is named
START_SECONDS = 3.0         # the first step of two ranks after that of one process
ONE_RANK = 1.02             # at most, times the step without ranks
MARK = "LPKIT_BENCH_LAUNCH"     # in the environment of all that a trial starts
STEP = 5                    # where the fault is
NOTES = 100_000             # calls of `Place.at`
START = """
import sys
import lpkit
config = lpkit.preset("cpu-3m").replace({{
    "steps": 3, "system.device": "cpu", "system.threads": 1, "precision.recipe": "fp32"}})
more = {{"out": sys.argv[1], "observers": [lambda record: print(record.step, flush=True)]}}
{begin}
"""
ONE, TWO = "lpkit.train(config, **more)", "lpkit.launch(config, processes=2, **more).result()"


def _wait(place: Place) -> None:
    while True:
        time.sleep(1)


def _raise(place: Place) -> None:
    raise ValueError("a fault that was planted")


def _refuse(place: Place) -> None:
    raise ConfigError("a setting that cannot be; choose another")


def _fill(place: Place) -> None:
    raise MemoryError


FAULTS: dict[str, Callable[[Place], Any]] = {
    "raises": _raise,
    "refuses": _refuse,
    "meets the end of memory": _fill,
    "exits": lambda place: os._exit(9),
    "is killed": lambda place: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda place: ctypes.string_at(0),
    "is stopped": lambda place: os.kill(os.getpid(), signal.SIGSTOP),
    "holds the lock": lambda place: ctypes.PyDLL(None).sleep(1000),
    "never calls": _wait,
}


def rank(place: Place, given: dict[str, Any]) -> int:
    """Reduce `given["steps"]` times; rank 1 meets `given["fault"]` at STEP."""
    torch.set_num_threads(1)
    meet("gloo", **place.among)
    for step in range(1, given.get("steps", 1000) + 1):
        place.at(step, "forward")
        if place.rank == 1 and step == STEP and "fault" in given:
            place.tell({"fault_at": time.monotonic()})
            FAULTS[given["fault"]](place)
        place.at(step, "reduce")
        x = torch.ones(1000)
        dist.all_reduce(x)
        place.tell({"step": step, "sum": float(x[0])})
    return place.rank


def run(rounds: int = ROUNDS) -> list[Result]:
    trials = max(1, round(TRIALS * rounds / ROUNDS))
    results = [_faults("is killed", trials, END_SECONDS, "died at step 5 in forward of SIGKILL"),
               _faults("is stopped", trials, TIMEOUT_SECONDS + NAMED_SECONDS,
                       "gave no sign of life", timeout_seconds=TIMEOUT_SECONDS)]
    starts = [[_first_step(begin) for begin in (ONE, TWO)] for _ in range(rounds)]
    alone, ours = zip(*starts)
    late = [of_two - of_one for of_one, of_two in zip(alone, ours, strict=True)]
    place = Place()
    noted = timeit.timeit(lambda: place.at(1, "forward"), number=NOTES) / NOTES
    return [*results, paired(
        "launch", ours=late, peer=[START_SECONDS] * rounds, peer_name="allowed", target=1,
        better="lower", case="the first step of two ranks, later than one process's",
        facts={"one_process_seconds": alone, "two_ranks_seconds": ours, "note_seconds": noted}),
        _one_rank(rounds)]


def _faults(fault: str, trials: int, within_seconds: float, sentence: str, **limits: float
            ) -> Result:
    """How often rank 1 was not named in time, or something was left behind."""
    wrong, seconds = [], []
    for trial in range(trials):
        error, took, left = _trial(fault, **limits)
        seconds.append(round(took, 2))
        if not error.startswith(f"rank 1 of 2 {sentence}") or took > within_seconds or left:
            wrong.append(f"trial {trial}, after {took:.2f} s: {error}; left: {left}")
    return paired("launch", ours=[len(wrong)], peer=[trials], peer_name="trials", target=0,
                  better="lower", unit="times", facts={"seconds": seconds, "failures": wrong},
                  case=f"a rank {fault}: not named within {within_seconds:g} s, or something left")


def _trial(fault: str, **limits: float) -> tuple[str, float, list[str]]:
    """The error, how many seconds after the fault it came, and what was left."""
    begun: list[float] = []
    error, mark = "none", secrets.token_hex()
    with patch.dict(os.environ, {MARK: mark}), WarmParent() as parent, Processes(
            f"{__name__}:rank", {"fault": fault}, world=2, parent=parent,
            heard=lambda _, message: begun.append(message.get("fault_at", 0)), **limits) as ranks:
        try:
            ranks.wait()
        except RunFailedError as raised:
            error = str(raised)
        took = time.monotonic() - max(begun)
    left = [str(parent.folder)] if parent.folder.exists() else []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                left.append(" ".join(process.cmdline()))
    return error, took, left


def _first_step(begin: str) -> float:
    """Seconds until a fresh interpreter has taken a step."""
    with tempfile.TemporaryDirectory() as place:
        begun = time.monotonic()
        with subprocess.Popen([sys.executable, "-c", START.format(begin=begin), f"{place}/run"],
                              stdout=subprocess.PIPE, text=True) as process:
            line, seconds = process.stdout.readline(), time.monotonic() - begun
            process.stdout.read()
    if line.strip() != "1":
        raise ConfigError(f"a run did not begin, and said {line!r}; what went wrong is above")
    return seconds


def _one_rank(rounds: int) -> Result:
    """A world of one rank beside no ranks, an update of one after an update of the other: losses
    and weights are the same bits."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    config = preset("gpt2-124m" if gpu else "cpu-3m").replace({
        "global_batch": 4, "grad_accum_steps": 1, "model.context": 256})
    with tempfile.TemporaryDirectory() as place, joined(
            config, rank=0, world=1, local_rank=0, local_world=1,
            init_method=f"file://{place}/store") as ranks:
        runs = {"ours": Training.build(config, ranks=ranks), "peer": Training.build(config)}
        seconds, losses = steps_in_turns(runs, 5 * rounds, warm_up=3)
    weights = [torch.cat([p.detach().flatten() for p in run.model.parameters()])
               for run in runs.values()]
    if losses["ours"] != losses["peer"] or not torch.equal(*weights):
        raise AssertionError(f"one rank and none differ: {losses}")
    return paired("launch", **seconds, peer_name="no ranks", target=ONE_RANK, better="lower",
                  case="a step of one rank, to the bit that of none", device=gpu)
