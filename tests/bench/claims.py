"""The referee of `lpkit claim` on real runs: how often it calls a difference where there is none,
and how often it finds a planted one.

The runs are in data/measured/claim-pool.json: a model of 1M weights, one run a seed. They are
drawn from as they are, never from a normal distribution.

    python -m tests.bench.claims 240        adds runs to the pool for as many seconds
"""

import json
import math
import random
import shutil
import statistics
import sys
import time
from pathlib import Path

from lpkit.claims import referee
from lpkit.config import Config
from lpkit.files import resource, write_atomically
from lpkit.presets import preset
from tests.bench.harness import Result, paired, provenance

POOL = resource("data/measured") / "claim-pool.json"
BASE = {"model.layers": 2, "model.width": 192, "model.heads": 4, "model.context": 32,
        "global_batch": 4, "steps": 40, "schedule.warmup_steps": 5, "eval_every": 0,
        "eval_batches": 32, "checkpoint_every": 0, "system.device": "cpu", "system.threads": 1}
# settings over BASE, and seeds: the pool itself; and a change that only adds up in another order,
# evaluated on the same text
ARMS = {"adamw": ({}, 320),
        "adamw in two pieces": ({"grad_accum_steps": 2}, 40)}
CLAIMS, PILOT, PLANTED = 10_000, 5, 0.015
FALSE, MISSED = referee.ALPHA, 1 - referee.POWER        # at most


def run(rounds: int = 9) -> list[Result]:
    """Shares of CLAIMS that go wrong. Nothing is timed, so there are no rounds."""
    pool = json.loads(POOL.read_text())
    return [*(_share(pool, looks, gain) for looks in (1, 2, 3) for gain in (0.0, PLANTED)),
            _rounding(pool)]


def _share(pool: dict, looks: int, gain: float) -> Result:
    rng, losses = random.Random(0), pool["losses"]["adamw"]
    outcomes = [drawn(rng, losses, gain, looks) for _ in range(CLAIMS)]
    wrong = [verdict.word != ("better" if gain else "no difference") for verdict, _ in outcomes]
    asked, used = (statistics.fmean(column) for column in zip(
        *((n, verdict.seeds) for verdict, n in outcomes)))
    what = f"a gain of {gain:.1%} is missed" if gain else "nothing is called a difference"
    return _result(f"looks: {looks}, seeds asked for {asked:.1f}, used {used:.1f}: {what}", wrong,
                   MISSED if gain else FALSE if looks > 1 else None, pool)


def _rounding(pool: dict) -> Result:
    """Pairs of one seed that add up in another order; which of the two comes first is drawn."""
    rng, wrong = random.Random(0), []
    pairs = list(zip(*(pool["losses"][arm] for arm in ("adamw in two pieces", "adamw"))))
    for _ in range(CLAIMS):
        arms = list(zip(*(rng.sample(pair, 2) for pair in rng.sample(pairs, 8))))
        verdict = referee.judge(lambda n, arms=arms: (arms[0][:n], arms[1][:n]), 8, 2)
        wrong.append(verdict.word != "no difference")
    return _result("looks: 2, 8 pairs of one seed that differ by rounding: a difference", wrong,
                   FALSE, pool)


def _result(case: str, wrong: list[bool], target: float | None, pool: dict) -> Result:
    return paired("claims", ours=[sum(wrong) / len(wrong)], peer=[1.0], peer_name="all claims",
                  case=case, better="lower", target=target, unit="of claims",
                  facts={"claims": len(wrong), "runs": len(pool["losses"]["adamw"])})


def drawn(rng: random.Random, losses: list[float], gain: float, looks: int
          ) -> tuple[referee.Verdict, int]:
    """A claim as the command settles it, on runs of the pool: a pilot, the seeds that it asks for,
    and looks at two arms that share no run; the other's loss is lower by `gain`. Returns the
    verdict, and the seeds that were asked for."""
    order = rng.sample(losses, len(losses))
    n = min(asked(order[:PILOT], looks), (len(losses) - PILOT) // 2)
    first, other = order[PILOT:PILOT + n], [loss * (1 - gain) for loss in order[-n:]]
    return referee.judge(lambda seeds: (first[:seeds], other[:seeds]), n, looks), n


def asked(pilot: list[float], looks: int) -> int:
    """Returns the seeds an arm that a gain of PLANTED asks for, by the losses of a pilot."""
    sigma, level = statistics.stdev(map(math.log, pilot)), referee.levels(looks)[-1]
    return referee.needed(PLANTED, math.sqrt(2) * sigma, level, len(pilot) - 1)


def config(arm: str, seed: int) -> Config:
    return preset("cpu-3m").replace(BASE | ARMS[arm][0] | {"seed": seed})


def record(seconds: float) -> None:
    """Adds runs to the pool, arm by arm and seed by seed. A kill loses at most the last ten."""
    from lpkit.training.background import train

    end = time.monotonic() + seconds
    pool = json.loads(POOL.read_text()) if POOL.exists() else {"losses": {}, "step_seconds": {}}
    folder = Path("runs/claim-pool")
    due = [(arm, seed) for arm, (_, seeds) in ARMS.items()
           for seed in range(len(pool["losses"].get(arm, [])), seeds)]
    for count, (arm, seed) in enumerate(due, 1):
        if time.monotonic() > end:
            break
        shutil.rmtree(folder, ignore_errors=True)
        summary = train(config(arm, seed), out=folder).summary
        pool["losses"].setdefault(arm, []).append(summary["val_loss"])
        pool["step_seconds"].setdefault(arm, []).append(round(summary["step_seconds"], 6))
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
