"""The referee of `lpkit claim` on real runs: how often it calls a difference where there is none,
and how often it finds a planted one.

The runs are in data/measured/claim-pool.json: a model of 1M weights, one run a seed. They are
drawn from as they are, never from a normal distribution.

    python -m tests.bench.claims 240        adds runs to the pool for as many seconds
"""

import json
import shutil
import sys
import time
from pathlib import Path

from lpkit.config import Config
from lpkit.files import resource, write_atomically
from lpkit.presets import preset

POOL = resource("data/measured") / "claim-pool.json"
BASE = {"model.layers": 2, "model.width": 192, "model.heads": 4, "model.context": 32,
        "global_batch": 4, "steps": 40, "schedule.warmup_steps": 5, "eval_every": 0,
        "eval_batches": 32, "checkpoint_every": 0, "system.device": "cpu", "system.threads": 1}
# the pool itself; what adds up in another order alone; a change of the rule
ARMS = {"adamw": ({}, 320), "adamw in two pieces": ({"grad_accum_steps": 2}, 40),
        "lion": ({"optimizer": "lion", "optimizer.lr": 3e-4}, 60)}


def config(arm: str, seed: int) -> Config:
    return preset("cpu-3m").replace(BASE | ARMS[arm][0] | {"seed": seed})


def record(seconds: float) -> None:
    """Adds runs to the pool, arm by arm and seed by seed. A kill loses at most the last ten."""
    from lpkit.training.background import train
    from tests.bench.harness import provenance

    end = time.monotonic() + seconds
    pool = json.loads(POOL.read_text()) if POOL.exists() else {"losses": {}, "step_seconds": {}}
    folder = Path("runs/claim-pool")
    due = [(arm, seed) for arm, (_, seeds) in ARMS.items()
           for seed in range(len(pool["losses"].get(arm, [])), seeds)]
    for count, (arm, seed) in enumerate(due, 1):
        if time.monotonic() > end:
            break
        shutil.rmtree(folder, ignore_errors=True)
        found = train(config(arm, seed), out=folder).summary
        pool["losses"].setdefault(arm, []).append(found["val_loss"])
        pool["step_seconds"].setdefault(arm, []).append(round(found["step_seconds"], 6))
        if count % 10 == 0:
            _write(pool, provenance())
    _write(pool, provenance())
    shutil.rmtree(folder, ignore_errors=True)


def _write(pool: dict, facts: dict) -> None:
    arms = {arm: settings for arm, (settings, _) in ARMS.items()}
    command = {"command": "python -m tests.bench.claims SECONDS"}
    pool |= {"unit": "nats per token, validation", "preset": "cpu-3m", "base": BASE, "arms": arms,
             **facts, **command}
    write_atomically(POOL, json.dumps(pool, indent=1) + "\n")


if __name__ == "__main__":
    record(float(sys.argv[1]))
