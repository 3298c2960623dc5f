"""A rank of a training in any layout is killed, is stopped, or never enters the next message, at
any moment: in every layout that parity is proved for, on up to 8 processes. That very rank is
named, in time, and no process is left.

SIGUSR2 makes a rank hang, as tests/attack/_hanging.py says. SIGTERM to this process ends the attack
early, with what it has.
"""

import importlib
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import psutil

from lpkit.errors import ConfigError
from lpkit.machine_facts import cores
from lpkit.parallel.processes import WarmParent
from lpkit.presets import preset
from lpkit.techniques.layouts import Layout
from lpkit.training.runs import RunFailedError
from tests.attack import Outcome, patience, until
from tests.parallel import parity

COUNT, FEW = 1000, 3        # one of each fault
PROMISED_SECONDS = 5.0      # from the fault to the error
TIMEOUT_SECONDS = 2.0       # without a sign of life
PROGRESS_SECONDS = 4.0      # in which no rank gets further
FAULTS = {signal.SIGKILL: "died ", signal.SIGSTOP: "gave no sign of life for ",
          signal.SIGUSR2: "got no further for "}
LAYOUTS = {name: layout for name, layout in (parity.LAYOUTS | parity.AXES).items()
           if parity._goes("fp32", layout)}
CONFIG = preset("cpu-3m").replace({
    "model.layers": 4, "model.width": 32, "model.heads": 4, "model.context": 32, "steps": 10**6,
    "system.device": "cpu",
    "system.threads": 1, "precision.recipe": "fp32", "global_batch": 8, "grad_accum_steps": 8,
    "eval_every": 0,
    "checkpoint_every": 0})


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, seconds, over = Outcome(), {sent.name: [] for sent in FAULTS}, threading.Event()
    launching = importlib.import_module("lpkit.training.launch")
    chance = random.Random(seed)
    decks = zip(*(chance.sample([*LAYOUTS], len(LAYOUTS)) for _ in FAULTS), strict=True)
    order = [turn for names in decks for turn in zip(names, FAULTS, strict=True)]
    # as a test it runs beside others, whose load comes and goes
    beside = 4 if count == FEW else 1

    def trial(number: int, parent: WarmParent) -> None:
        if over.is_set():
            return
        name, sent = order[number % len(order)]
        draw = random.Random(f"{seed} {number}")
        world = Layout(**LAYOUTS[name]).devices
        victim, delay = draw.randrange(world), draw.uniform(0, 0.5)
        place = f"seed {seed}, trial {number}, {name}, {sent.name} to {victim} after {delay:.3f} s"
        config = CONFIG.replace({f"parallel.{key}": value for key, value in LAYOUTS[name].items()})
        slack = beside * patience()
        handle = launching.launch(config, processes=world, parent=parent, out=folder / str(number),
                                  timeout_seconds=TIMEOUT_SECONDS * slack,
                                  progress_seconds=PROGRESS_SECONDS * slack)
        until(lambda: len(handle.ranks) == world or handle.done)
        time.sleep(delay)
        pids, begun, error = [status["pid"]
                              for status in handle.ranks.values()], time.monotonic(), "none"
        if began := not handle.done:
            os.kill(handle.ranks[victim]["pid"], sent)
        try:
            handle.result()
        except (RunFailedError, ConfigError) as raised:
            error = str(raised).splitlines()[0]
        took = time.monotonic() - begun
        outcome.tried += 1
        if not began:
            outcome.failed("ends before the fault", f"{place}: {error}")
        elif not error.startswith(f"rank {victim} of {world} {FAULTS[sent]}"):
            outcome.failed("another is named", f"{place}: {error}")
        if took > PROMISED_SECONDS * beside * patience():
            outcome.failed("late", f"{place}: {took:.2f} s")
        if left := [pid for pid in pids if psutil.pid_exists(pid)]:
            outcome.failed("left", f"{place}: {left}")
        seconds[sent.name].append(took)
        if outcome.tried % 50 == 0:
            print(f"{outcome.tried} trials; {outcome.failures}", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGTERM, lambda *_: over.set())
    try:
        with WarmParent("tests.attack._hanging") as parent, patch.object(launching, "cores",
                lambda: 8), \
                ThreadPoolExecutor(cores()) as pool:
            list(pool.map(lambda number: trial(number, parent), range(count)))
    finally:
        signal.signal(signal.SIGTERM, before)
    outcome.facts = {"layouts": len({order[number % len(order)][0]
                                     for number in range(outcome.tried)})}
    for name, of in seconds.items():
        if of:
            outcome.facts |= {f"{name} trials": len(of),
                              f"{name} slowest_seconds": round(max(of), 2)}
    return outcome
