"""Published claims about losses, each settled by `lpkit claim` on its file in docs/claims: the command
that a user has, with its tuning, seeds and power. Runs that several need are done once.

    lpkit bench protocol --out data/measured        half an hour of one core

A verdict follows from what the command found and from what the sentence promises, by `word`. A
sentence about searches is settled by the same referee on the searches of `lpkit bench tpe-random`.
"""

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lpkit.claims import referee
from lpkit.errors import ConfigError
from lpkit.files import resource
from tests.bench.harness import Result, paired

NAME, EFFECT = "protocol", 0.02
SEARCHES = ("tpe", "random")        # the sentence about the first is settled by searches
FILES = resource("docs") / "claims"
CONFIRMED, SMALLER, REFUTED, NOT_SEEN = "confirmed", "smaller", "refuted", "not seen"


def published() -> dict[str, dict[str, str]]:
    """By name: what is said, where, under which conditions, and what the other arm should be."""
    return tomllib.loads((resource("data/published") / "protocol.toml").read_text(encoding="utf-8"))


def run(rounds: int = 1) -> list[Result]:
    """The loss of each other arm beside the first one's. Nothing is timed, so there are no rounds."""
    found = {name: _settled(FILES / f"{name}.yaml") for name in published() if name not in SEARCHES}
    return [paired(NAME, ours=[1 - one["verdicts"][0]["gain"]], peer=[1.0], better="lower",
                   peer_name=one["verdicts"][0]["against"], case=name, unit="of the loss",
                   facts={"found": found}) for name, one in found.items()]


def searched() -> dict[str, Any]:
    """What the referee says of the newest recorded searches, their best losses in pairs of one
    sampler's seed, at equal trials."""
    records = [json.loads(path.read_text()) for path in resource("data/measured").glob("tpe-random-*.json")]
    losses = max(records, key=lambda one: one["date"])["losses"]
    mine, others = ([min(one) for one in losses[sampler]] for sampler in SEARCHES)
    verdict = referee.look(others, mine, referee.ALPHA)     # once, of all
    return {"effect": EFFECT, "verdicts": [{
        "arm": SEARCHES[0], "against": SEARCHES[1], "verdict": verdict.word, **asdict(verdict),
        "equal_seconds": None, "equal_flops": None}]}


def _settled(path: Path) -> dict[str, Any]:
    """What the command prints, without the runs of its tuning. Raises ConfigError where it breaks off."""
    done = subprocess.run([sys.executable, "-m", "lpkit", "claim", str(path), "--json"],
                          stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(f"lpkit claim {path.name} broke off with exit code {done.returncode}; "
                          f"what it said is above")
    return json.loads(done.stdout)


def word(expects: str, verdict: dict[str, Any], effect: float) -> str:
    """What becomes of a sentence that promises `expects`. To be no worse is confirmed where a loss of
    `effect` is ruled out, to be better where a gain of it was found."""
    if verdict["verdict"] == "worse":
        return REFUTED
    if verdict["verdict"] == "better":
        return CONFIRMED if expects == "no worse" or verdict["gain"] >= effect else SMALLER
    return CONFIRMED if expects == "no worse" and verdict["interval"][0] > -effect else NOT_SEEN
