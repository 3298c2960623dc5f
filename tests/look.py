"""Look at a notebook as a reader sees it: `python -m tests.look NOTEBOOK.ipynb OUT.png [--seconds 300] [--width 1200]`.

Opens it in a served lab, runs all cells, waits for the end, writes a screenshot of its full length, and prints what
should not have happened (exit code 1). The notebook itself stays as it is: a copy is run, beside it in the same tree.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from lpkit.bench.browser import Notebook, chromium, chromium_path, served


def look(notebook: Path, picture: Path, *, seconds: float = 300, width: int = 1200) -> list[str]:
    copy = notebook.with_name(f"look-{os.getpid()}-{notebook.name}")   # its relative paths keep working
    copy.write_bytes(notebook.read_bytes())
    try:
        with (tempfile.TemporaryDirectory() as state, served(notebook.parent, Path(state)) as server,
              chromium(width=width) as context):
            opened = Notebook(context, server, copy.name)
            started = time.monotonic()
            opened.run(seconds=seconds)
            opened.settle()
            print(f"{notebook.name}: ran in {time.monotonic() - started:.1f} s", file=sys.stderr)
            opened.screenshot(picture)
            return opened.problems()
    finally:
        copy.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--width", type=int, default=1200)
    args = parser.parse_args()
    if chromium_path() is None:
        parser.error("there is no chromium, chromium-browser or google-chrome on PATH")
    problems = look(args.notebook.resolve(), args.picture, seconds=args.seconds, width=args.width)
    print("\n".join(problems) or "no problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
