"""Look at a notebook as a reader sees it:
`python -m tests.hosting.look NOTEBOOK.ipynb OUT.png [--seconds 300] [--width 1400 390] [--theme
light dark]`.

Opens it in a served lab, runs all cells, waits for the end, shows what waits for a guess, writes a
screenshot of its full length in every theme and width (of several, OUT-dark-390.png and so on), and
prints what should not have happened (exit code 1). A copy is run, in a folder of its own where
../data is the project's: the notebook and its folder stay as they are.
"""

import argparse
import io
import itertools
import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.bench.browser import chromium, chromium_path
from tests.hosting.served import Notebook, served

HIGH = 8000     # of the window: Chromium paints 16,384 pixels at most


def look(notebook: Path, picture: Path, *, seconds: float = 300, widths=(1200,),
         themes=("Light",)) -> list[str]:
    with tempfile.TemporaryDirectory() as temporary:
        course = Path(temporary) / "course" / "notebooks"
        course.mkdir(parents=True)
        shutil.copy(notebook, course)
        for beside in ("lessons", "pictures"):
            if (notebook.parent / beside).is_dir():
                shutil.copytree(notebook.parent / beside, course / beside)
        if (data := notebook.parent.parent / "data").is_dir():
            (course.parent / "data").symlink_to(data)
        with served(course, Path(temporary) / "state") as server, chromium(
                width=widths[0]) as context:
            opened = Notebook(context, server, notebook.name)
            started = time.monotonic()
            opened.run(seconds=seconds)
            opened.settle()
            opened.page.evaluate(
               "() => document.querySelectorAll('button:has(.fa-eye)').forEach(hides => "
               "hides.click())")
            opened.settle()
            print(f"{notebook.name}: ran in {time.monotonic() - started:.1f} s", file=sys.stderr)
            looks = list(itertools.product(themes, widths))
            for theme, width in looks:
                opened.theme(theme)
                name = picture.stem + (len(looks) > 1) * f"-{theme.lower()}-{width}"
                screenshot(opened.page, width, picture.with_stem(name))
            return opened.problems()


def screenshot(page, width: int, path: Path) -> None:
    """The notebook alone, in full length."""
    page.evaluate("""() => { const {shell} = window.jupyterapp; shell.mode = 'single-document';
                             shell.collapseLeft(); shell.collapseRight() }""")
    page.set_viewport_size({"width": width, "height": HIGH})
    page.wait_for_timeout(3000)
    room = page.locator(".jp-WindowedPanel-outer")
    high = room.evaluate("""room => { room.scrollTop = 0;
        const cells = [...room.querySelectorAll('.jp-Cell')];
        return cells.at(-1).getBoundingClientRect().bottom + 60 }""")
    whole = Image.new("RGB", (int(room.bounding_box()["width"]), int(high)))
    for top in range(0, int(high), HIGH // 2):
        at = room.evaluate("(room, top) => { room.scrollTop = top; return room.scrollTop }", top)
        page.wait_for_timeout(300)
        whole.paste(Image.open(io.BytesIO(room.screenshot())), (0, int(at)))
    whole.save(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--width", type=int, nargs="+", default=[1200])
    parser.add_argument("--theme", type=str.capitalize, nargs="+", choices=["Light", "Dark"],
                        default=["Light"])
    args = parser.parse_args()
    if chromium_path() is None:
        parser.error("there is no chromium, chromium-browser or google-chrome on PATH")
    problems = look(args.notebook.resolve(), args.picture, seconds=args.seconds, widths=args.width,
                    themes=args.theme)
    print("\n".join(problems) or "no problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
