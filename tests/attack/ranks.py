"""Launches of two ranks beside another user of the machine, who reads in /proc/net/tcp where they
listen, and takes a rank's place at once: he says pickles, lengths of exabytes, garbage, what he
just heard, or nothing. The launch ends well, with the numbers that it has alone, or in one
sentence, in time; nothing that he says is executed, no checkpoint is torn.
And while ranks train he opens more connections than they may have files.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from lpkit.config import Config
from lpkit.training import checkpoint
from lpkit.training.runs import Run
from tests.attack import NOT_TRIED, Outcome, patience
from tests.attack._nursery import ROOT, prepare

COUNT, FEW = 50, 8
# in which a launch ends, well or not; 30 of them are for a proof that does not come
PROMISED_SECONDS = 60.0
KINDS = ("pickle", "huge length", "huge header", "garbage", "replay", "silent", "closes",
         "late flood")
LAYOUTS = ({"parallel.data": 2}, {"parallel.shard": 2})
STEPS = 20


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome = Outcome()
    counts = {"complete": 0, "refused": 0, "spoke with a rank": 0}
    config = Config.from_yaml(prepare(folder, steps=STEPS, checkpoint_every=5).read_text())
    environment = dict(os.environ, XDG_CACHE_HOME=str(folder / "cache"), OMP_NUM_THREADS="1",
                       PYTHONPATH=str(ROOT))
    with subprocess.Popen([sys.executable, "-m", "tests.attack._strangers", str(folder)],
                          stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as host:
        if why := json.loads(host.stdout.readline())["cannot"]:
            outcome.facts = {NOT_TRIED: why}
            host.stdin.close()
            return outcome

        def launched(name: str, kind: str, layout: dict, **changes: object) -> tuple[dict, Path,
                Path]:
            run, marker = folder / name, folder / f"{name}.marker"
            trial = {"kind": kind, "config": config.replace(layout | changes).to_dict(),
                     "out": str(run),
                     "marker": str(marker), "seed": f"{seed} {name}",
                     "seconds": PROMISED_SECONDS * patience()}
            print(json.dumps(trial), file=host.stdin, flush=True)
            return json.loads(host.stdout.readline()), run, marker

        alone = []
        for number, layout in enumerate(LAYOUTS):
            result, run, _ = launched(f"alone-{number}", "", layout)
            assert not result["error"], result
            alone.append(run)
        for number, kind in enumerate(itertools.islice(itertools.cycle(KINDS), count)):
            which = (number + number // len(KINDS)) % len(LAYOUTS)
            whole, layout = alone[which], LAYOUTS[which]
            trial = f"seed {seed}, launch {number}, {kind}, {layout}"
            late = kind == "late flood"
            result, run, marker = launched(f"run-{number}", kind, layout,
                                           **({"steps": 1_000_000, "schedule": "constant"} if late
                                              else {}))
            outcome.tried += 1
            error, met = result["error"], result["met"]
            counts["refused" if error else "complete"] += 1
            counts["spoke with a rank"] += bool(met[1:] and met[1])
            if marker.exists():
                outcome.failed("his pickle ran", trial)
            if result["hung"]:
                outcome.failed("it hung", f"{trial}: {result['seconds']:.0f} s")
            elif late and (error or met[1]):
                outcome.failed("a run that goes on was reached",
                               f"{trial}: {error}; connected: {met}")
            elif error and ("\n" in error or "alloc" in error):
                outcome.failed("not one sentence", f"{trial}: {error[:300]}")
            if not met or not met[0]:
                outcome.failed("he found no rank", trial)
            _whole(run, None if error or late else whole, trial, outcome)
        host.stdin.close()
    outcome.facts = counts
    return outcome


def _whole(run: Path, alone: Path | None, trial: str, outcome: Outcome) -> None:
    """No checkpoint is torn, and the numbers are those of `alone`."""
    for folder in checkpoint.folders(run / "checkpoints"):
        try:
            checkpoint.verify(folder)
        except checkpoint.DamagedError as error:
            outcome.failed("a checkpoint was torn", f"{trial}: {error}")
    if alone is None:
        return
    a, b = ([line["loss"] for line in Run.open(each).metrics] for each in (run, alone))
    first, second = (checkpoint.load_latest(each / "checkpoints", quarantine=False)[0].tensors
                     for each in (run, alone))
    if (a != b or first.keys() != second.keys()
        or not all(torch.equal(first[name], second[name]) for name in first)):
        outcome.failed("other numbers", trial)
