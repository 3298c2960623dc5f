"""Attacks on runs, commands and folders, and how many of them did harm: none may.

The attacks are scripts of the checkout, tests/attack; `--rounds 9` does each as often as it says.

    python -m lpkit.bench.reliability > docs/reliability.md
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lpkit.bench.harness import ROUNDS, Result, paired, recorded
from lpkit.errors import ConfigError
from lpkit.files import PACKAGE, resource
from lpkit.machine_facts import cores
from lpkit.tables import markdown_table

PAGE = """# Reliability

What a run, a command and a folder stand up to, tried with `lpkit bench reliability --out
data/measured`; this page is made from its files by `python -m lpkit.bench.reliability`. Each attack
is a script of `tests/attack`, which says what counts as harm, and the test suite runs a few trials
of each at every change. A trial that fails is named so that it can be done again.
"""


def run(rounds: int = ROUNDS) -> list[Result]:
    root = PACKAGE.parent
    if not (root / "tests" / "attack").is_dir():
        raise ConfigError("the attacks lie in tests/attack of a checkout, and this lpkit is "
                          "installed without them; run this in a clone of the repository")
    results, share = [], f"--share={rounds / ROUNDS}"
    names = json.loads(_attack("--list"))
    with ThreadPoolExecutor(cores()) as pool:
        done = list(pool.map(partial(_told, share), names))
    for name, said in zip(names, done, strict=True):
        harm = [one for trials in said["failures"].values() for one in trials]
        facts = {key: said[key] for key in ("seconds", "failures", "facts")}
        results.append(paired("reliability", ours=[len(harm)], peer=[said["tried"]],
                              peer_name="attacks", case=name, target=0, better="lower",
                              unit="times", facts=facts))
    return results


def _told(share: str, name: str) -> dict:
    said = _attack(name, share)
    print(said.strip(), file=sys.stderr, flush=True)    # an hour of others may still come
    return json.loads(said)


def _attack(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tests.attack", *words], cwd=PACKAGE.parent,
                          stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise ConfigError(f"tests.attack {' '.join(words)} broke off with exit code "
                          f"{done.returncode}; what it said is above")
    return done.stdout


def page() -> str:
    """docs/reliability.md, from data/measured."""
    lines, found = [PAGE], sorted(resource("data/measured").glob("reliability-*.json"))
    if not found:
        lines += ["No whole run is recorded yet.", ""]
    for path in found:
        result = json.loads(path.read_text())
        lines += [*recorded(result),
                  markdown_table(("attack", "trials", "did harm", "seconds", "seen"),
                                 [_row({**result, **case}) for case in result["cases"]]), ""]
    return "\n".join(lines)


def _row(case: dict) -> tuple[str, ...]:
    harm = ", ".join(f"{what}: {len(trials)}" for what, trials in case["failures"].items())
    seen = ", ".join(f"{what}: {value}" for what, value in case["facts"].items())
    return (case["case"], f"{case['peer_median']:,.0f}", harm or "none", f"{case['seconds']:,.0f}",
            seen)


if __name__ == "__main__":
    print(page(), end="")
