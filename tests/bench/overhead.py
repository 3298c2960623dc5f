"""A claim of 10 runs beside the seconds of their steps: what its pilot, its tuning, its processes
and its checkpoints cost besides.

    lpkit bench claim-overhead --rounds 3 --out data/measured       10 minutes, beside nothing else

The claim is `lpkit claim FILE --null` as a user has it, in a folder of its own: a pilot of 3 runs,
one of tuning, 3 pairs. What is divided is its seconds of the clock, from the command's start to its
end. By what:

    their steps                     the sum over the 10 runs of `step_seconds` (the median of a
    run's
                                    steps) times its steps, divided by the workers
    their steps, phase after phase  the same as a schedule: runs are whole, and no phase begins
    before
                                    the last run of the one before it has ended
    steps of the comparison         as the first, of 6 runs: pilot and tuning count as overhead, too

What workers take from one another, side by side, is in their steps.
"""

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from lpkit.claims.protocol import Claim
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.machine_facts import cores
from lpkit.timing import interleaved_seconds
from lpkit.training.background import train
from lpkit.training.training import Training
from tests.bench.harness import Result, paired

NAME, RUNS, TARGET, MOST_ROUNDS = "claim-overhead", 10, 1.03, 3
STEPS, IN_ORDER = "their steps", "their steps, phase after phase"
COMPARED, CHOSEN = "steps of the comparison", "steps of pilot and tuning"
PHASES = {"pilot": 3, "tuning": 1, "comparison": 6}     # runs, one phase after another
CLAIM = {
    "settings": {"model.layers": 2, "model.width": 192, "model.heads": 4, "model.context": 64,
                 "global_batch": 8, "eval_every": 0, "eval_batches": 32, "checkpoint_every": 0,
                 "schedule.warmup_steps": 10, "system.device": "cpu"},
    "arms": {"adamw": {"optimizer": "adamw"}, "lion": {"optimizer": "lion"}},
    "differ": ["optimizer"], "target": "val_loss", "effect": 0.5, "budget": {"steps": 400},
    "seeds": 3, "pilot": 3, "tuning": {"optimizer.lr": [1e-3], "optimizer.weight_decay": [0.1]}}


def run(rounds: int = MOST_ROUNDS, claim: dict[str, Any] = CLAIM) -> list[Result]:
    """One worker, and two where there are as many cores. The facts have each claim's parts."""
    alone, timings = _alone(claim), {}
    for _ in range(min(rounds, MOST_ROUNDS)):
        for at_once in sorted({1, min(2, cores())}):
            timings.setdefault(at_once, []).append(_settled(claim, at_once))
    rows = [("workers", "seconds that they were held", "s", "of the steps")]
    for at_once, each in timings.items():
        parts = _middle([timing["parts"] for timing in each])
        steps = parts[COMPARED] + parts[CHOSEN]
        rows += [(str(at_once), part, f"{seconds:.2f}", f"{seconds / steps:.1%}")
                 for part, seconds in parts.items()]
        enough = (sum(parts.values()) - steps) / RUNS / (TARGET - 1)
        rows.append((str(at_once), f"{TARGET - 1:.0%} would be met by runs of", f"{enough:.1f}",
                     ""))
    rows += [("a run alone", part, f"{seconds:.2f}", f"{seconds / alone[STEPS]:.1%}")
             for part, seconds in alone.items()]
    facts = {"claim": claim, "phases": PHASES, "breakdown": rows,
             "claims": {str(at_once): each for at_once, each in timings.items()}}
    return [paired(NAME, ours=[timing["wall"] for timing in each],
                   peer=[timing[peer] for timing in each], peer_name=peer, better="lower",
                   target=target, facts=facts, case=f"{RUNS} runs "
                   f"of {each[0][STEPS] * at_once / RUNS:.1f} s of steps, {at_once} at once")
            for at_once, each in timings.items()
            for peer, target in ((STEPS, TARGET), (IN_ORDER, TARGET), (COMPARED, None))
            if at_once > 1 or peer != IN_ORDER]


def _settled(claim: dict[str, Any], at_once: int) -> dict[str, Any]:
    """Seconds of one claim: of the clock, of its peers, and by `parts`. Raises ConfigError where it
    breaks off or was not RUNS runs."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        path, out = folder / "claim.yaml", folder / "out"
        path.write_text(yaml.safe_dump(claim))
        command = [sys.executable, "-m", "lpkit", "claim", str(path), "--null", "--json", "--out",
                   str(out), "--processes", str(at_once)]
        began = time.time()     # files have this clock's times
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        wall = time.time() - began
        if done.returncode:
            raise ConfigError(f"lpkit claim broke off with exit code {done.returncode}; what it "
                              f"said is above")
        if (count := json.loads(done.stdout)["runs"]) != RUNS:
            raise ConfigError(f"a claim that should make {RUNS} runs made {count}: its null was "
                              f"told "
                              f"apart; choose other settings")
        runs = sorted(({"ended": path.stat().st_mtime - began, **json.loads(path.read_text())}
                       for path in out.glob("*.json")), key=lambda run: run["ended"])
    return accounted(runs, wall, at_once)


def accounted(runs: Sequence[dict[str, Any]], wall: float, at_once: int) -> dict[str, Any]:
    """Where the seconds went that `at_once` workers were held for `wall` seconds. `runs` in the
    order of their ends, each with `ended`, `seconds`, `step_seconds` and its config's steps. The
    parts add up to at_once * wall."""
    steps = [run["step_seconds"] * run["config"]["steps"] for run in runs]
    edges = [0, PHASES["pilot"], PHASES["pilot"] + PHASES["tuning"], len(runs)]
    phases = [steps[a:b] for a, b in itertools.pairwise(edges)]
    # the first run of a worker imports what makes runs
    begun = sorted((run["ended"] - run["seconds"], run["seconds"] - own)
                   for run, own in zip(runs, steps, strict=True))
    usual = statistics.median(beside for _, beside in begun[at_once:])
    first = sum(beside - usual for _, beside in begun[:at_once])
    held, busy = at_once * wall, sum(run["seconds"] for run in runs)
    starts = sum(moment for moment, _ in begun[:at_once])
    end = at_once * (wall - max(run["ended"] for run in runs))
    parts = {COMPARED: sum(phases[2]), CHOSEN: sum(phases[0]) + sum(phases[1]),
             "in runs, beside their steps": busy - sum(steps) - first,
             "in the first run of a worker, more than in others": first,
             "until workers have begun": starts,
             "workers that wait": held - busy - starts - end, "the verdict, and the end": end}
    return {"wall": wall, STEPS: sum(steps) / at_once,
            IN_ORDER: sum(makespan(phase, at_once) for phase in phases),
            COMPARED: sum(phases[2]) / at_once, "parts": parts}


def makespan(seconds: Sequence[float], workers: int) -> float:
    """Returns when the last of these runs ends, if a worker takes the next as soon as it is
    free."""
    free = [0.0] * workers
    for duration in seconds:
        free[free.index(min(free))] += duration
    return max(free)


def _alone(claim: dict[str, Any]) -> dict[str, float]:
    """Parts of one run of the claim, made here and alone; the first of a process is thrown away."""
    parsed = Claim(**claim)
    config = parsed.config(next(iter(parsed.arms)))
    _one(config.replace({"steps": 3}))
    return _one(config)


def _one(config: Config) -> dict[str, float]:
    """Steps at their median, as in a claim. The last record comes when all is evaluated and
    saved."""
    records: list[tuple[float, float]] = []
    training = Training.build(config)
    training.evaluate()     # and once more, when its memory has been touched
    [[evaluation]] = interleaved_seconds([training.evaluate], rounds=1, warm_up=0)
    with TemporaryDirectory() as name:
        path, began = Path(name) / "run", time.time()
        train(config, out=path, observers=[
            lambda record: records.append((time.time() - began, record.step_seconds))])
        seconds = time.time() - began
    each = [step for _, step in records]
    steps, before = statistics.median(each) * len(each), records[0][0] - each[0]
    saving = records[-1][0] - records[-2][0] - each[-1] - evaluation
    return {STEPS: steps, "data, model and folder": before, "evaluation": evaluation,
            "checkpoint": saving, "steps above their median": sum(each) - steps,
            "records and the rest": seconds - sum(each) - before - evaluation - saving}


def _middle(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}
