"""What ranks of tests/parallel/test_launch.py do. Little is imported: the ranks wait for it."""

import atexit
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lpkit import records
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.training import runs


def here(place, job):
    place.tell({"pid": os.getpid(), "job": job})
    return [place.rank, place.world, place.local_rank, place.local_world]


def abort_at_exit(place, job):
    atexit.register(os.abort)
    return place.rank


def exit_early(place, job):
    sys.exit("no more")


def stand_still(place, job):
    place.at(3, "reduce")
    time.sleep(1000)


def wait_for_one(place, job):
    place.at(3, "reduce")
    place.waits(place.rank != 1)
    time.sleep(1000)


def obey(place, job):
    place.tell({"pid": os.getpid()})
    seen = [None]
    while place.asked() != "stop":
        if place.asked() != seen[-1]:
            seen.append(place.asked())
            place.tell({"seen": seen[-1]})
        if not place.asked():
            place.at(1, "work")
        time.sleep(0.005)
    return [*seen[1:], place.asked_by]


def leave_a_child(place, job):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    place.tell({"pid": child.pid})


def tick(place, job):
    """For ever; and rank `job["stopped"]` stops."""
    for number in itertools.count():
        place.tell({"number": number})
        if number == 5 and place.rank == job["stopped"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.01)


def talk(place, job):
    for number in range(job["lines"]):
        place.tell({"number": number, "text": "x" * 300})


def record(step):
    return {"record": {"step": step, "loss": 1 / step, "grad_norm": 1.0, "lr": 0.1,
                       "tokens": 10 * step, "step_seconds": 0.1, "peak_bytes": 1 << 30}}


def deaf(place, job):
    """Never stops; its steps begin to count when it is asked to."""
    step = 1
    while True:
        if place.rank == 0:
            place.tell(record(step))
        step += place.asked() == "stop"
        time.sleep(0.01)


def train(place, job):
    """As much of a run as a handle reads; a telemetry line a step from each rank."""
    config, path = Config.from_dict(job["config"]), Path(job["out"])
    assert config.parallel.devices == place.world
    if config.seed == 13:
        raise ConfigError("seed=13 brings bad luck; choose another")
    step = 0
    while step < config.steps and place.asked() != "stop":
        step += 1
        place.at(step, "forward")
        place.tell({"step": step, "step_seconds": 0.1, "loss": 1.0, "peak_bytes": 1 << 30,
                    "communication_share": 0.25})
        if place.rank == 0:
            place.tell(record(step))
        time.sleep(0.01)
    if place.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        (path / runs.CONFIG).write_text(runs.sealed_yaml(config, ""))
        run = runs.Run(path)
        status = "complete" if step == config.steps else "stopped"
        records.write(path / runs.SUMMARY, runs.results(run) | {
            "status": status, "stopped_by": place.asked_by or None, "damaged": [], "steps": step})


def untold(place, job):
    """As `train`, with steps that are written and not told."""
    place.tell = lambda message: None
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    if place.rank == 0:
        (Path(job["out"]) / runs.METRICS).write_text("a line\n")
    train(place, job)


def crash(place, job):
    os.kill(os.getpid(), 9)


def hang(place, job):
    time.sleep(600)


def wrong(place, job):
    raise AssertionError("the sum is wrong: [1.0]")
