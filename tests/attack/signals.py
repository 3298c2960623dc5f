"""SIGTERM, SIGINT and SIGHUP to `lpkit train` in every phase, on one process and on two: heard
within 2 s, the exit code says which, what can be kept is kept, and it is what an uninterrupted run
has."""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lpkit.training import checkpoint
from lpkit.training.runs import Run
from tests.attack import Outcome, patience
from tests.attack._nursery import LONGEST_SECONDS, nursery, prepare, saving, wait_until

COUNT, FEW = 60, 4
SECONDS = 2.0
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}
ENDLESS = {"steps": 1_000_000, "checkpoint_every": 0}
# a step of 100 micro-batches, each of them far below the 2 s
LONG = ENDLESS | {"model.layers": 2, "model.width": 128, "model.context": 128, "global_batch": 800,
                  "grad_accum_steps": 100}


@dataclass(frozen=True)
class Phase:
    """`there`: whether a run is in it; the signal comes within so many `seconds` after."""

    settings: dict
    there: Callable[[Path], bool]
    seconds: float
    # whether so many may be kept
    steps: Callable[[int], bool] = field(default=lambda steps: True)


def _lines(run: Path) -> int:
    with suppress(FileNotFoundError):
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


PHASES = {
    "a step": Phase(LONG, lambda run: _lines(run) >= 1, 1.0, lambda steps: steps >= 1),
    "an evaluation": Phase(ENDLESS | {"eval_every": 2, "eval_batches": 10**6},
                           lambda run: _lines(run) >= 1, 1.0, lambda steps: steps in (1, 2)),
    "preparing": Phase(ENDLESS | {"data.source": "words.txt", "data.tokenizer": "bpe",
                                  "model.vocab": 2000}, lambda run: True, 3.0),
    "building": Phase(ENDLESS, lambda run: True, 0.3),
    "the first step": Phase(LONG, lambda run: (run / "summary.json").exists(), 0.5),
    "compiling": Phase(LONG | {"system.compile": True}, lambda run: (run / "summary.json").exists(),
                       3.0),
    "saving": Phase(ENDLESS | {"checkpoint_every": 2}, saving, 0.002),
    "the end": Phase({"steps": 30, "checkpoint_every": 0}, lambda run: _lines(run) >= 20, 0.1),
}
# by turns; a compiler of ranks cannot be broken off between two micro-batches, and says so in
# docs/checkpoints.md
TRIALS = [(name, ranks) for ranks in (1, 2) for name in PHASES if (name, ranks) != ("compiling", 2)]
TRIALS.insert(1, TRIALS.pop(TRIALS.index(("an evaluation", 2))))


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, rng, slowest, losses = Outcome(), random.Random(seed), {}, {}
    config = prepare(folder)
    # 12 MB without a repeated word
    words = "".join(f"{rng.getrandbits(48):x} " for _ in range(1_000_000))
    (folder / "words.txt").write_text(words)
    with nursery(folder) as forks:
        assert (forks.lpkit("train", config, "--set", "steps=1", "--out", folder / "warm")
                == 0), forks.printed
        for number, (name, ranks) in zip(range(count), itertools.cycle(TRIALS)):
            phase, run, number_of = PHASES[name], folder / f"run-{number}", rng.choice(list(CODES))
            more = [word for key, value in phase.settings.items()
                    for word in ("--set", f"{key}={value}")]
            pid = forks.begin("train", config, "--out", run, *more,
                              *(["--processes", ranks] if ranks > 1 else []))
            reached = wait_until(partial(phase.there, run), LONGEST_SECONDS * patience())
            time.sleep(rng.uniform(0, phase.seconds))
            trial = f"seed {seed}, {number}: {number_of.name} in {name}, processes {ranks}"
            begun = time.monotonic()
            with suppress(ProcessLookupError):      # seen by its exit code
                os.kill(pid, number_of)
            code, seconds = forks.end(), time.monotonic() - begun
            outcome.tried += 1
            slowest[name] = max(slowest.get(name, 0), round(seconds, 2))
            if not reached:       # nothing to judge
                outcome.failed("never there", f"{trial}: {forks.printed[-300:]}")
            if seconds > SECONDS * patience():
                outcome.failed("not heard within 2 s",
                               f"{trial}: {seconds:.1f} s at a load of {os.getloadavg()[0]:.1f}")
            if code != CODES[number_of] and not (name == "the end" and code == 0):
                outcome.failed("another exit code", f"{trial}: {code}: {forks.printed[:600]}")
            if "Traceback" in forks.printed:
                start = forks.printed.index("Traceback") - 300
                outcome.failed("a traceback", f"{trial}: {forks.printed[start:][:2000]}")
            _kept(run, phase, code, ranks, trial, losses.setdefault((name, ranks), {}), outcome)
        left = list((folder / "cache").rglob("*.tmp"))
        if left:
            outcome.failed("something was left behind", left)
    outcome.facts = {f"slowest seconds in {name}": seconds for name, seconds in slowest.items()}
    return outcome


def _kept(run: Path, phase: Phase, code: int, ranks: int, trial: str, losses: dict,
          outcome: Outcome) -> None:
    if not (run / "summary.json").exists():
        return
    opened = Run.open(run)
    steps, status = opened.summary["steps"], opened.summary["status"]
    loaded, _ = checkpoint.load_latest(opened.checkpoints)
    if (loaded.step if loaded else 0) != steps or len(opened.metrics) != steps:
        outcome.failed("a step was lost",
                       f"{trial}: of {steps} steps {loaded and loaded.step} are kept")
    if not phase.steps(steps):
        outcome.failed("another step was kept", f"{trial}: {steps}")
    # ranks without a step have nothing to keep, and are ended when they do not hear it
    due = ({"complete"} if code == 0 or steps == opened.config.steps else {"stopped", "killed"}
           if ranks > 1 and not steps else {"stopped"})
    if status not in due or opened.problems:
        outcome.failed("the record differs", f"{trial}: {status}, {opened.problems}")
    for line in opened.metrics:
        if line["loss"] != losses.setdefault(line["step"], line["loss"]):
            outcome.failed("a loss differs", f"{trial}: step {line['step']}")
