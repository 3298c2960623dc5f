"""Time the way of a new user from `lpkit new experiment` to a first verdict: run each command that
it prints, in an empty folder with empty caches.

    python -m tests.claims.first_verdict [--family recipe] [--tier cpu]

The notebook runs at the tier smoke by default. The time in which a user reads and writes is not
counted.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lpkit.commands.new import FAMILIES
from lpkit.tables import text_table

ROOT = Path(__file__).parents[2]


def timed(folder: Path, line: str, env: dict[str, str]) -> tuple[str, float, str]:
    """A command that was typed, its seconds, and its output."""
    words = shlex.split(line.removeprefix("PYTHONPATH=. "))
    words = [sys.executable, *(["-m"] if words[0] == "lpkit" else []),
             *words[words[0] == "python":]]
    begun = time.monotonic()
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    seconds = time.monotonic() - begun
    if done.returncode:
        sys.exit(f"{line}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"{seconds:6.1f} s  {line}", file=sys.stderr)
    return line, seconds, done.stdout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=tuple(FAMILIES), default="optimizer")
    parser.add_argument("--tier", choices=("smoke", "cpu"), default="smoke")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "empty")
        folder.mkdir()
        env = os.environ | {"PYTHONPATH": f".{os.pathsep}{ROOT}",
                            "XDG_CACHE_HOME": f"{temporary}/cache",
                            "XDG_DATA_HOME": f"{temporary}/data"}
        steps = [timed(folder, f"lpkit new experiment own_row --family {args.family} --json", env)]
        for line in json.loads(steps[0][2])["commands"]:
            steps.append(timed(folder, line.replace("--tier smoke", f"--tier {args.tier}"), env))
    rows = [(line, f"{seconds:.0f} s") for line, seconds, _ in steps]
    print(text_table([*rows, ("together", f"{sum(seconds for _, seconds, _ in steps):.0f} s")]))
    print(steps[-1][2].strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
