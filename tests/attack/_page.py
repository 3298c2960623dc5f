"""docs/reliability.md, from what `lpkit bench reliability --out data/measured` recorded, and how old it is."""

import json
import re
import subprocess
from pathlib import Path

from lpkit.files import resource
from lpkit.tables import markdown_table
from tests.attack import NAMES
from tests.bench.harness import recorded

ROOT = Path(__file__).parents[2]
PAGE = """# Reliability

What a run, a command and a folder stand up to, tried with `lpkit bench reliability --out
data/measured`; this page is made from its files by `python -m tests.pages reliability`. Each attack
is a script of `tests/attack`, which says what counts as harm, and the test suite runs a few trials
of each at every change. A trial that fails is named so that it can be done again.
"""


def page() -> str:
    lines, found = [PAGE], sorted(resource("data/measured").glob("reliability-*.json"))
    if not found:
        lines += ["No whole run is recorded yet.", ""]
    for path in found:
        result = json.loads(path.read_text())
        lines += [*recorded(result),
                  markdown_table(("attack", "trials", "did harm", "seconds", "at commit", "seen"),
                                 [_row({**result, **case}) for case in result["cases"]]), ""]
    return "\n".join(lines)


def _row(case: dict) -> tuple[str, ...]:
    harm = ", ".join(f"{what}: {len(trials)}" for what, trials in case["failures"].items())
    seen = ", ".join(f"{what}: {value}" for what, value in case["facts"].items())
    return (case["case"], f"{case['peer_median']:,.0f}", harm or "none", f"{case['seconds']:,.0f}",
            case.get("at", case["commit"]), seen)


def age(text: str, root: Path = ROOT) -> str:
    """What is to be said of a page that is older than the code; nothing where git cannot tell (no checkout, a shallow one)."""
    whole = _git(root, "rev-parse", "--is-shallow-repository") == "false"
    sections = [re.findall(r"(?: at commit |\| )([0-9a-f]{12})(?: with | \|)", section) for section in text.split("\n## ")]
    counts = [[_commits_since(commit, root) for commit in set(commits)] for commits in sections]
    since = min((max(some) for some in counts if some and None not in some), default=0)
    gone = whole and any(None in some for some in counts)
    absent = [name for name in NAMES if f"| {name} |" not in text]
    said = [f"lpkit/ has changed in {since} commits since it was measured"] * (since > 0)
    said += ["a commit that it was measured at is not in this history"] * gone
    said += [f"it has no row for {', '.join(absent)}"] * bool(absent)
    renew = "`lpkit bench reliability --out data/measured` and `python -m tests.pages reliability` renew it"
    return f"docs/reliability.md is old: {'; '.join(said)}. {renew}" if said else ""


def _commits_since(commit: str, root: Path) -> int | None:
    said = _git(root, "rev-list", "--count", f"{commit}..HEAD", "--", "lpkit")
    return int(said) if said else None


def _git(root: Path, *words: str) -> str:
    """What it says; nothing where it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
