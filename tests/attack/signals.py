"""SIGTERM, SIGINT and SIGHUP to `lpkit train` at a random moment, while the corpus is prepared too:
heard within 2 s, what can be kept is kept, and the run goes on."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from lpkit.training import checkpoint
from lpkit.training.runs import Run
from tests.attack import Outcome, patience
from tests.attack._nursery import nursery, prepare

COUNT, FEW = 40, 3
SECONDS = 2.0
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, rng, slowest = Outcome(), random.Random(seed), 0.0
    config = prepare(folder, steps=1_000_000, checkpoint_every=0)
    words = "".join(f"{rng.getrandbits(48):x} " for _ in range(1_000_000))      # 12 MB without a repeated word
    (folder / "words.txt").write_text(words)
    with nursery(folder) as forks:
        assert forks.lpkit("train", config, "--set", "steps=1", "--out", folder / "warm") == 0, forks.said
        for number in range(count):
            run, number_of = folder / f"run-{number}", rng.choice(list(CODES))
            preparing = number % 2
            more = ["--set", f"data.source={folder / 'words.txt'}", "--set", "data.tokenizer=bpe", "--set",
                    "model.vocab=2000"] if preparing else []
            pid = forks.begin("train", config, "--out", run, *more)
            time.sleep(rng.uniform(0, 3 if preparing else 1.5))
            trial = f"seed {seed}, {number_of.name} {number}{', preparing' if preparing else ''}"
            begun = time.monotonic()
            with suppress(ProcessLookupError):      # seen by its exit code
                os.kill(pid, number_of)
            code, seconds = forks.end(), time.monotonic() - begun
            outcome.tried += 1
            slowest = max(slowest, seconds)
            if seconds > SECONDS * patience():
                outcome.failed("not heard within 2 s", f"{trial}: {seconds:.1f} s at a load of {os.getloadavg()[0]:.1f}")
            if code != CODES[number_of]:
                outcome.failed("another exit code", f"{trial}: {code}: {forks.said[-300:]}")
            if "Traceback" in forks.said:
                outcome.failed("a traceback", f"{trial}: {forks.said[-300:]}")
            _kept(run, trial, outcome)
        left = list((folder / "cache").rglob("*.tmp"))
        if left:
            outcome.failed("something was left behind", left)
    outcome.facts = {"slowest_seconds": round(slowest, 2)}
    return outcome


def _kept(run: Path, trial: str, outcome: Outcome) -> None:
    if not (run / "metrics.jsonl").exists():
        return
    one = Run.open(run)
    steps = one.summary.get("steps", 0)
    found, _ = checkpoint.load_latest(one.checkpoints)
    if steps and (found is None or found.step != steps):
        outcome.failed("a step was lost", f"{trial}: of {steps} steps {found and found.step} are kept")
    if one.summary["status"] != "stopped" or one.problems:
        outcome.failed("the record differs", f"{trial}: {one.summary['status']}, {one.problems}")
