"""Make docs/reliability.md from the records of `lpkit bench reliability --out data/measured`, and
warn if the records are old."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lpkit.files import resource
from tests.attack import NAMES
from tests.bench.harness import recorded
from tests.pages import markdown_table

ROOT = Path(__file__).parents[2]
PAGE = """# Reliability

`lpkit bench reliability --out data/measured` attacks runs, commands and folders and records the
results; `python -m tests.pages reliability` makes this page from these files. Each attack is a
script of `tests/attack` that defines what counts as harm. The test suite runs a few trials of
each attack at every change. A failed trial is named, so that you can repeat it.
"""


def page() -> str:
    lines, paths = [PAGE], sorted(resource("data/measured").glob("reliability-*.json"))
    if not paths:
        lines += ["No whole run is recorded yet.", ""]
    for path in paths:
        result = json.loads(path.read_text())
        lines += [*recorded(result),
                  markdown_table(("attack", "trials", "did harm", "seconds", "at commit", "seen"),
                                 [_row({**result, **case}) for case in result["cases"]]), ""]
        for case in ({**result, **case} for case in result["cases"]):
            if kinds := {kind: counts for kind, counts in case["facts"].items()
                         if isinstance(counts, dict)}:
                heads = next(iter(kinds.values()))
                lines += [markdown_table((case["case"], *heads),
                                         [(kind, *map(str, counts.values()))
                                          for kind, counts in kinds.items()]), ""]
    return "\n".join(lines)


def _row(case: dict) -> tuple[str, ...]:
    harm = ", ".join(f"{what}: {len(trials)}" for what, trials in case["failures"].items())
    seen = ", ".join(f"{what}: {value}" for what, value in case["facts"].items()
                     if not isinstance(value, dict))
    return (case["case"], f"{case['peer_median']:,.0f}", harm or "none", f"{case['seconds']:,.0f}",
            case.get("at", case["commit"]), seen)


def age(text: str, root: Path = ROOT) -> str:
    """Return a warning if the page is older than lpkit/, or lacks an attack; otherwise an empty
    string, also if git cannot tell (no checkout, or a shallow one)."""
    by_attack: dict[str, list[tuple[int, str]]] = {}
    for section in text.split("\n## ")[1:]:
        for name, changes in _changes(section, root):
            by_attack.setdefault(name, []).append(changes)
    # for each attack, only its newest record counts
    count, words = max(map(min, by_attack.values()), default=(0, ""))
    sentences = [words] * (count > 0)
    absent = [name for name in NAMES if f"| {name} |" not in text]
    sentences += [f"it has no row for {', '.join(absent)}"] * bool(absent)
    renew = ("`lpkit bench reliability --out data/measured` and `python -m tests.pages "
             "reliability` renew it")
    return f"docs/reliability.md is old: {'; '.join(sentences)}. {renew}" if sentences else ""


def _changes(section: str, root: Path) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield, for each attack in a section, the number of commits to lpkit/ since its record, and
    this number in words. If the record's commit is not in the history (its branch was squashed),
    commits since the day of the record are counted."""
    day = re.search(r"^Measured (\S+)", section, re.M)
    for name, commit in re.findall(r"^\| (\w+) \|.* \| ([0-9a-f]{12})\+? \|", section, re.M):
        if count := _git(root, "rev-list", "--count", f"{commit}..HEAD", "--", "lpkit"):
            yield name, (int(count), f"lpkit/ has changed in {count} commits since it was measured")
        elif day and _git(root, "rev-parse", "--is-shallow-repository") == "false":
            count = _git(root, "rev-list", "--count", f"--since={day[1]}T00:00:00Z", "HEAD", "--",
                         "lpkit") or "0"
            yield name, (int(count), f"{count} commits to lpkit/ since {day[1]}")


def _git(root: Path, *words: str) -> str:
    """Return the output of git; an empty string if git fails."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
