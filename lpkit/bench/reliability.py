"""Attacks on runs, commands and folders, and how many of them did harm: none may.

The attacks are scripts of the checkout, tests/attack; `--rounds 9` does each as often as it says.
"""

import json
import subprocess
import sys

from lpkit.bench.harness import ROUNDS, Result, paired
from lpkit.errors import ConfigError
from lpkit.files import PACKAGE


def run(rounds: int = ROUNDS) -> list[Result]:
    root = PACKAGE.parent
    if not (root / "tests" / "attack").is_dir():
        raise ConfigError("the attacks lie in tests/attack of a checkout, and this lpkit is "
                          "installed without them; run this in a clone of the repository")
    results = []
    for name in json.loads(_attack("--list")):
        said = json.loads(_attack(name, f"--share={rounds / ROUNDS}"))
        harm = [one for trials in said["failures"].values() for one in trials]
        facts = {key: said[key] for key in ("seconds", "failures", "facts")}
        results.append(paired("reliability", ours=[len(harm)], peer=[said["tried"]],
                              peer_name="attacks", case=name, target=0, better="lower",
                              unit="times", facts=facts))
    return results


def _attack(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tests.attack", *words], cwd=PACKAGE.parent,
                          stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise ConfigError(f"tests.attack {' '.join(words)} broke off with exit code "
                          f"{done.returncode}; what it said is above")
    return done.stdout
