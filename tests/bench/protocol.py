"""Published claims about losses, each settled by `lpkit claim` on its file in docs/claims: the
command that a user has, with its tuning, seeds and power. Runs that several need are done once.

    lpkit bench protocol --out data/measured        half an hour of one core

A verdict follows from what the command found and from what the sentence promises, by `word`. A
sentence about searches is settled by the same referee on the searches of `lpkit bench tpe-random`.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lessons.rows.optimizers
import lessons.rows.schedules  # noqa: F401  rows that files name
from lpkit import records
from lpkit.claims import referee
from lpkit.claims.protocol import read, step_flops
from lpkit.claims.settle import SAME
from lpkit.errors import ConfigError
from lpkit.files import resource
from tests.bench.harness import Result, paired

NAME, EFFECT = "protocol", 0.02
ROWS = {"gelu-table": ("lessons.gelu_by_table",),       # of one's own, that a file names
        "sas-p": ("lessons.rows.blocks",), "shared-layers": ("lessons.rows.blocks",)}
BEGINS = {"lora": (     # what its file begins from, as the head of it says
    ("train", "cpu-3m", "model.layers=2", "model.width=192", "model.heads=4", "model.context=64",
     "global_batch=8", "eval_every=0",
     "checkpoint_every=0", "optimizer.lr=3e-3", "steps=1000", "system.threads=1", "--out",
     "runs/code"),
    ("data", "prepare", str(Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"),
     "--out", "runs/manual"))}
SEARCHES = ("tpe", "random")        # the sentence about the first is settled by searches
FILES = resource("docs") / "claims"
CONFIRMED, SMALLER, REFUTED, NOT_SEEN = "confirmed", "smaller", "refuted", "not seen"


def published() -> dict[str, dict[str, str]]:
    """By name: what is said, where, under which conditions, and what the other arm should be."""
    return tomllib.loads((resource("data/published") / "protocol.toml").read_text(encoding="utf-8"))


def run(rounds: int = 1) -> list[Result]:
    """The loss of each other arm beside the first one's. Nothing is timed, so there are no
    rounds."""
    claims = {name: _settled(FILES / f"{name}.yaml") for name in published()
              if name not in SEARCHES}
    return [paired(NAME, ours=[1 - claim["verdicts"][0]["gain"]], peer=[1.0], better="lower",
                   peer_name=claim["verdicts"][0]["against"], case=name, unit="of the loss",
                   facts={"found": claims}) for name, claim in claims.items()]


def recorded() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the newest record, and what was found, by name: its own, or that of a verdict file of
    its own that `lpkit claim` wrote, or of searches."""
    folder = resource("data/measured")
    record = max((json.loads(path.read_text()) for path in folder.glob("protocol-*.json")),
                 key=lambda record: record["date"])
    files = {path.stem.removeprefix("claim-"): records.read(path)
             for path in folder.glob("claim-*.verdict")}
    return record, record["found"] | files | {SEARCHES[0]: searched()}


def at_equal_flops(name: str, verdict: dict[str, Any], tuned: dict[str, Any]) -> bool | None:
    """Whether the better arm stays so; None where nothing was seen. What was recorded before it was
    asked is counted here: every better arm of it had no more FLOPs, so that nothing had to run."""
    if "equal_flops" in verdict or verdict["verdict"] == "no difference":
        return (verdict.get("equal_flops") or {}).get("survives")
    claim, better = read(FILES / f"{name}.yaml"), verdict["gain"] > 0
    other, arm = ((verdict["arm"], verdict["against"])[place] for place in (better, not better))
    configs = {side: claim.config(side, tuned[side]) for side in (arm, other)}
    flops = {side: config.steps * step_flops(config) for side, config in configs.items()}
    return flops[arm] <= SAME * flops[other] or None


def searched() -> dict[str, Any]:
    """What the referee says of the newest recorded searches, their best losses in pairs of one
    sampler's seed, at equal trials."""
    recordings = [json.loads(path.read_text())
                  for path in resource("data/measured").glob("tpe-random-*.json")]
    losses = max(recordings, key=lambda recording: recording["date"])["losses"]
    mine, others = ([min(search) for search in losses[sampler]] for sampler in SEARCHES)
    verdict = referee.look(others, mine, referee.ALPHA)     # once, of all
    return {"effect": EFFECT, "verdicts": [{
        "arm": SEARCHES[0], "against": SEARCHES[1], "verdict": verdict.word, **asdict(verdict),
        "equal_seconds": None, "equal_flops": None}]}


def _settled(path: Path) -> dict[str, Any]:
    """What the command prints, without the runs of its tuning. Raises ConfigError where it breaks
    off."""
    rows = [f"--import={name}" for name in ROWS.get(path.stem, ())]
    for words in BEGINS.get(path.stem, ()):
        if not Path(words[-1]).exists():
            _said(*words)
    return json.loads(_said("claim", str(path), "--json", *rows))


def _said(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "lpkit", *words],
                          stdout=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    if done.returncode:
        raise ConfigError(f"lpkit {' '.join(words)} broke off with exit code {done.returncode}; "
                          f"what it said is above")
    return done.stdout


def word(expects: str, verdict: dict[str, Any], effect: float) -> str:
    """What becomes of a sentence that promises `expects`. To be no worse is confirmed where a loss
    of `effect` is ruled out, to be better where a gain of it was found."""
    if verdict["verdict"] == "worse":
        return REFUTED
    if verdict["verdict"] == "better":
        return CONFIRMED if expects == "no worse" or verdict["gain"] >= effect else SMALLER
    return CONFIRMED if expects == "no worse" and verdict["interval"][0] > -effect else NOT_SEEN
