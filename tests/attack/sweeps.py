"""SIGKILL to a worker of a sweep or of a claim, or to its keeper, at a random moment: the same
command goes on, and in the end the sweep, or the verdict, is the unbroken one: no run is lost, done
twice, or left under way."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from lpkit import processes
from lpkit.claims import runs, sweep
from lpkit.claims.protocol import Claim
from lpkit.claims.settle import Settling
from lpkit.errors import RunFailedError
from tests.attack import Outcome
from tests.attack._nursery import prepare

COUNT, FEW = 200, 2     # few: of sweeps; tests/claims/test_claim.py kills claims
TRIALS, AT_ONCE = 12, 2
SEARCH = {"optimizer": {"choices": ["adamw", "lion"]},
          "optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}}
SAID = ("trial", "settings", "val_loss", "name", "pruned", "evaluations")


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, rng = Outcome(), random.Random(seed)
    base = str(prepare(folder, steps=40))
    unpruned = sweep.Sweep(base=base, search=SEARCH, trials=TRIALS, target="val_loss",
                           sampler="random", at_once=AT_ONCE)
    cut = replace(unpruned, sampler="tpe", pruner="asha", settings={"eval_every": 4})
    claim = Claim(base=base, arms={"adamw": {}, "lion": {"optimizer": "lion"}},
                  differ=("optimizer",), target="val_loss", effect=0.3,
                  budget={"steps": 40}, seeds=3, pilot=3,
                  tuning={"optimizer.lr": [1e-3, 1e-2], "optimizer.weight_decay": [0.0]})
    kinds = {"sweep": lambda *ways: sweep.settle(unpruned, *ways),
             "pruned": lambda *ways: sweep.settle(cut, *ways),
             "claim": lambda out, finished: _verdict(claim, finished)}
    whole, seconds, rounds, heard = {}, {}, 0, 0
    while outcome.tried < count:
        kind = [*kinds][rounds % len(kinds)]
        out, rounds = folder / f"{kind}-{rounds}", rounds + 1
        if kind not in whole:
            begun = time.monotonic()
            whole[kind] = _settled(kinds[kind], folder / f"whole-{kind}")
            seconds[kind] = time.monotonic() - begun
        result = None
        while result is None:
            over = threading.Event()
            killer = threading.Thread(target=_kill,
                                      args=(rng.uniform(0, seconds[kind]), rng.random(), over,
                                            outcome))
            killer.start()
            try:
                result = _settled(kinds[kind], out)
            except RunFailedError:
                heard += 1
            finally:
                over.set()
                killer.join()
        _same(result, whole[kind], out, f"seed {seed}, {kind} {rounds}", outcome)
    outcome.facts = {"rounds": rounds, "heard of": heard,
                     **{f"{kind}_seconds": round(took, 3) for kind, took in seconds.items()}}
    return outcome


def _settled(settle: Callable[..., tuple], out: Path) -> tuple[Any, set[str]]:
    """Returns what was found, without its seconds, and the names of its runs."""
    out.mkdir(exist_ok=True)
    with runs.Workers(out, processes.Children(), AT_ONCE) as workers:
        names: set[str] = set()

        def finished(what: str, configs: list, judges: list = ()) -> list[dict]:
            names.update(map(runs.name_of, configs))
            return workers.finished(configs, judges=judges)

        result = settle(out / "few", finished)
    if "trials" in result:
        journal_lines = len(Path(result["journal"]).read_text().splitlines())
        # a sweep that goes on asks for what its journal lacks
        trials = [{key: line[key] for key in SAID} for line in result["trials"]]
        return (journal_lines, trials), {line["name"] for line in result["trials"]}
    return result, names


def _verdict(claim: Claim, finished: Callable) -> dict:
    """Settles the first arm against itself: no run depends on how long another took."""
    result = Settling(claim, finished, lambda line: None).settle(null=True)
    [verdict] = result["verdicts"]
    return ({key: verdict[key] for key in ("verdict", "gain", "interval", "p", "seeds")}
            | {"tuned": result["tuned"], "runs": result["runs"]})


def _kill(seconds: float, which: float, over: threading.Event, outcome: Outcome) -> None:
    """One that is there after so many seconds; none where the sweep was quicker."""
    if over.wait(seconds):
        return
    with suppress(psutil.NoSuchProcess):
        there = psutil.Process().children(recursive=True)
        if there:
            there[int(which * len(there))].kill()
            outcome.tried += 1


def _same(result: tuple, whole: tuple, out: Path, trial: str, outcome: Outcome) -> None:
    if result[0] != whole[0]:
        outcome.failed("a run differs", f"{trial}: {result[0]}, unbroken {whole[0]}")
    if result[1] != whole[1] or {path.stem for path in out.glob("*.json")} != whole[1]:
        outcome.failed("a run was lost or done twice", trial)
    if left := [path.name for path in out.iterdir() if path.is_dir() or path.name.endswith(".tmp")]:
        outcome.failed("something was left behind", f"{trial}: {left}")
