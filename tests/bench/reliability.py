"""Attacks on runs, commands and folders, and how many of them did harm: none may.

The attacks are scripts of the checkout, tests/attack, which also makes docs/reliability.md of what
is recorded; `--rounds 9` does each as often as it says. `--pieces processes,signals` does these
alone; the other rows stay what data/measured has of this machine, if anything, each with its
commit.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lpkit.errors import ConfigError, pick
from lpkit.files import PACKAGE
from lpkit.machine_facts import cores, cpu_name
from lpkit.predict.evidence import MEASURED
from tests.bench.harness import ROUNDS, Result, paired, provenance


def run(rounds: int = ROUNDS, *, pieces: str = "") -> list[Result]:
    known, share = json.loads(_attack("--list")), f"--share={rounds / ROUNDS}"
    names = [pick(dict.fromkeys(known, name), name, "attack") for name in pieces.split(",")
             if name] or known
    before = {} if names == known else _recorded()
    with ThreadPoolExecutor(cores()) as pool:
        done = dict(zip(names, pool.map(partial(_told, share), names), strict=True))
    commit = provenance(())["commit"]
    rows = before | {name: (sum(map(len, report["failures"].values())), report["tried"],
                            report | {"at": commit})
                    for name, report in done.items()}
    return [paired("reliability", ours=[harm], peer=[tried], peer_name="attacks", case=name,
                   target=0, better="lower", unit="times",
                   facts={key: report[key] for key in ("seconds", "failures", "facts", "at")})
            for name, (harm, tried, report) in sorted(rows.items())]


def _recorded() -> dict[str, tuple[float, float, dict]]:
    """By attack: harms, trials and facts of what is recorded of this machine."""
    for path in MEASURED.glob("reliability-*.json"):
        record = json.loads(path.read_text())
        if record["device"] == cpu_name():
            return {case["case"]: (case["ours_median"], case["peer_median"],
                                   {"at": record["commit"], **record, **case})
                    for case in record["cases"]}
    return {}


def _told(share: str, name: str) -> dict:
    output = _attack(name, share)
    print(output.strip(), file=sys.stderr, flush=True)    # an hour of others may still come
    return json.loads(output)


def _attack(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tests.attack", *words], cwd=PACKAGE.parent,
                          stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise ConfigError(f"tests.attack {' '.join(words)} broke off with exit code "
                          f"{done.returncode}; what it said is above")
    return done.stdout
