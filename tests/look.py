"""Look at a notebook as a reader sees it:
`python -m tests.look NOTEBOOK.ipynb OUT.png [--seconds 300] [--width 1200] [--theme Dark]`.

Opens it in a served lab, runs all cells, waits for the end, writes a screenshot of its full length, and prints what
should not have happened (exit code 1). A copy is run, in a folder of its own where ../data is the
project's: the notebook and its folder stay as they are.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from lpkit.bench.browser import Notebook, chromium, chromium_path, served


def look(notebook: Path, picture: Path, *, seconds: float = 300, width: int = 1200, theme: str = "Light") -> list[str]:
    with tempfile.TemporaryDirectory() as temporary:
        course = Path(temporary) / "course" / "notebooks"
        course.mkdir(parents=True)
        shutil.copy(notebook, course)
        if (data := notebook.parent.parent / "data").is_dir():
            (course.parent / "data").symlink_to(data)
        with served(course, Path(temporary) / "state") as server, chromium(width=width) as context:
            opened = Notebook(context, server, notebook.name)
            opened.theme(theme)
            started = time.monotonic()
            opened.run(seconds=seconds)
            opened.settle()
            print(f"{notebook.name}: ran in {time.monotonic() - started:.1f} s", file=sys.stderr)
            screenshot(opened.page, picture)
            return opened.problems()


def screenshot(page, path: Path) -> None:
    """The notebook alone, in full length."""
    page.evaluate("""() => { const {shell} = window.jupyterapp; shell.mode = 'single-document';
                             shell.collapseLeft(); shell.collapseRight() }""")
    page.wait_for_timeout(300)
    for _ in range(2):   # the width decides the height, and a scroll bar that goes gives width
        height = page.evaluate("""() => {
            const cells = [...document.querySelectorAll('.jp-Notebook .jp-Cell')];
            cells[0].scrollIntoView({block: 'start'});
            return cells.at(-1).getBoundingClientRect().bottom + 60 }""")
        page.set_viewport_size({"width": page.viewport_size["width"], "height": min(int(height), 16_000)})
        page.wait_for_timeout(700)
    page.screenshot(path=str(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--theme", type=str.capitalize, choices=["Light", "Dark"], default="Light")
    args = parser.parse_args()
    if chromium_path() is None:
        parser.error("there is no chromium, chromium-browser or google-chrome on PATH")
    problems = look(args.notebook.resolve(), args.picture, seconds=args.seconds, width=args.width, theme=args.theme)
    print("\n".join(problems) or "no problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
