"""Make the films of the site and the picture of its planner, from screenshots of a browser.

    python docs/make_films.py               all, into docs/films and docs/planner.png; takes minutes on two cores
    python docs/make_films.py 12 planner    only these

JupyterLab serves a copy of the notebook, as `lpkit lab` does, Chromium opens it, and its cells run one after another at tier "cpu".
When the cell of a scene has ended, the scene takes one or more screenshots, for example after each key press on a slider. Playwright
controls the browser, and Pillow makes the GIF. The strip below a screenshot has the words of the scene; nothing else is added. The
films need Chromium; the planner also needs npm (see make_planner.py).
"""

import argparse
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
FILMS, PICTURE = ROOT / "docs" / "films", ROOT / "docs" / "planner.png"
WIDTH, HEIGHT, STRIP = 900, 600, 44     # pixels of the browser, and of the strip below it
BROKEN = "blocks.1.mlp.gate_up"          # the layer of notebook 07 that has the fault of seed 0
STILL = 10                              # the index of the frame that is also saved as a picture
COLOURS = 48                            # in the palette of a film
COMING = (240, 70)                 # pixels that the scene still has to scroll, in each frame before it
ARRIVES = 0.08 * len(COMING)            # seconds of all frames of COMING together
MOST_BYTES, LEAST_SECONDS, MOST_SECONDS = 1_500_000, 10, 20
BESIDE = ("model=llama-8b&layers=40&batch=512&billions=300&machine=h200&devices=64&zero=3&precision=fp8-tensorwise"
          "&held.model=llama-8b&held.machine=h100")      # the part of the planner's address behind #


@dataclass(frozen=True)
class Scene:
    """A part of a film. `words` are in the strip, `cell` is a part of the text of the cell at the top, `seconds` is the length, and
    `does` is a generator that acts on the cell and yields when a screenshot is to be taken."""

    words: str
    cell: str
    seconds: float
    does: Callable[[Any], Iterator[None]] | None = None
    output: bool = True     # scroll to the output of the cell, not to its code


def keys(*pressed: str) -> Callable[[Any], Iterator[None]]:
    """Return a generator function that presses these keys on the cell's slider, one after another."""
    def press(cell: Any) -> Iterator[None]:
        for key in pressed:
            cell.locator(".noUi-handle").first.press(key)
            yield
    return press


def guessed(cell: Any) -> Iterator[None]:
    """Enter a guess and lock it in; only then does the notebook show the answer."""
    for text in ("2", "4"):
        cell.locator("input[type=number]").first.fill(text)
        cell.locator("input[type=number]").first.press("Enter")
        yield
    cell.locator("button", has_text="Lock in").click()
    yield


def clicked(cell: Any) -> Iterator[None]:
    """Show the underflow of each layer and click the faulty layer, so that the histogram shows its tensor."""
    cell.locator("select").first.select_option("underflow")
    yield
    x, y = cell.locator(".js-plotly-plot").first.evaluate("""(plot, [step, layer]) => {
        const {xaxis, yaxis} = plot._fullLayout, box = plot.getBoundingClientRect();
        return [box.left + xaxis._offset + xaxis.d2p(step), box.top + yaxis._offset + yaxis.d2p(layer)] }""", [3, BROKEN])
    for left in (160, 60, 0):       # move the pointer to the layer in three steps
        cell.page.mouse.move(x + left, y + left)
        cell.page.wait_for_timeout(150)
        yield
    cell.page.mouse.click(x, y)
    cell.page.wait_for_timeout(700)
    yield


def accused(cell: Any) -> Iterator[None]:
    """Select the faulty layer and a fault, and lock the answer in."""
    layer, fault = (cell.locator("select").nth(i) for i in (3, 4))
    layer.select_option(BROKEN)
    fault.select_option("outlier-channel")
    button = cell.locator("button", has_text="Lock in")
    button.scroll_into_view_if_needed()
    yield
    button.click()
    yield


NOTEBOOKS = {
    "07": [
        Scene("07  One FP8 training run, with and without a hidden fault. Which layer broke?", "case = Case.open(", 2),
        Scene("Click the layer that stands out: the histogram shows its activations", "accusation = keep(", 5.8, clicked),
        Scene("Name the layer and the fault, and lock the answer in", "accusation = keep(", 2, accused),
        Scene("Bisection returns layers to bf16 until the loss recovers", "layers = list(dict.fromkeys(", 2.5),
        Scene("You, the telemetry and bisection name the same layer", "culprit = layers_of(", 2, output=False),
        Scene("The cure for this layer alone brings the loss back", "cured = case.run(", 2.5),
        Scene("The notebook asserts its claim, on your machine", "with claim(\"Telemetry", 2, output=False)],
    "12": [
        Scene("12  FlashAttention computes attention in tiles. First guess its memory", "guess_scores = keep(", 3, guessed, output=False),
        Scene("The softmax is computed tile by tile, step by step", "steps = lesson.online(", 6,
              keys("Home", *["ArrowRight"] * 9)),
        Scene("Bytes that it keeps: formulas are lines, measurements are marks", "measured = {name: {T: lesson.measured(", 3),
        Scene("Bytes that it moves between slow and fast memory", "sizes = {side: lesson.fast_bytes(", 3),
        Scene("The notebook asserts its claim, on your machine", "with claim(\"Kept bytes", 2.5, output=False)],
}


# ---- a film

def shot(target: Any) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(target.screenshot())).convert("RGB")


def with_words(picture: Any, words: str) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    whole = Image.new("RGB", (WIDTH, HEIGHT + STRIP), "#24292f")
    whole.paste(picture.crop((0, 0, WIDTH, HEIGHT)), (0, 0))
    font = ImageFont.load_default(size=21)
    ImageDraw.Draw(whole).text((16, HEIGHT + STRIP / 2), words, fill="#ffffff", font=font, anchor="lm")
    return whole


def played(opened: Any, scene: Scene, ran: int) -> tuple[list[tuple[Any, float]], int]:
    """Run the cells up to the scene's cell; the first `ran` have run already. Return the frames of the scene, each with its seconds,
    and the number of cells that have run."""
    page = opened.page
    at = page.evaluate("""words => window.jupyterapp.shell.currentWidget.content.widgets.findIndex(
        cell => cell.model.type === 'code' && cell.model.sharedModel.getSource().includes(words))""", scene.cell)
    if at < 0:
        raise SystemExit(f"no cell contains {scene.cell!r}; the notebook has changed, so change the scene in docs/make_films.py")
    for index in range(ran, at + 1):
        page.evaluate("index => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = index }", index)
        opened.command("notebook:run-cell")
        page.wait_for_function("() => window.lpkitDone", timeout=300_000)
    opened.settle()
    cell, room = page.locator(".jp-Notebook .jp-Cell").nth(at), page.locator(".jp-WindowedPanel-outer").first
    top = cell.locator(".jp-Cell-outputWrapper").first if scene.output else cell
    page.wait_for_timeout(800)
    top.evaluate("e => e.scrollIntoView({block: 'start'})")
    end, frames = room.evaluate("e => e.scrollTop"), []
    for left in COMING:
        room.evaluate("(e, top) => { e.scrollTop = top }", end - left)
        page.wait_for_timeout(60)
        frames.append((with_words(shot(page), scene.words), ARRIVES / len(COMING)))
    top.evaluate("e => e.scrollIntoView({block: 'start'})")
    page.wait_for_timeout(400)
    pictures = [shot(page)]
    for _ in scene.does(cell) if scene.does else ():
        page.wait_for_timeout(500)
        pictures.append(shot(page))
    return frames + [(with_words(one, scene.words), scene.seconds / len(pictures)) for one in pictures], at + 1


def film(number: str, out: Path) -> None:
    from tests.bench.browser import chromium
    from tests.hosting.served import Notebook, served

    [notebook] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    with tempfile.TemporaryDirectory() as temporary:
        course = Path(temporary) / "course" / "notebooks"
        course.mkdir(parents=True)
        shutil.copy(notebook, course)
        shutil.copytree(notebook.parent / "lessons", course / "lessons")
        (course.parent / "data").symlink_to(ROOT / "data")
        own = {"XDG_DATA_HOME": f"{temporary}/data"}        # the film's guesses must not enter anybody's data directory
        with mock.patch.dict(os.environ, own), served(course, Path(temporary) / "state") as server, chromium(width=WIDTH, height=HEIGHT) as context:
            opened = Notebook(context, server, notebook.name)
            # show only the notebook, without menus and bars
            opened.page.evaluate("""() => { const {shell} = window.jupyterapp; shell.mode = 'single-document';
                                            shell.collapseLeft(); shell.collapseRight() }""")
            opened.page.add_style_tag(content="""#jp-top-panel, #jp-menu-panel, #jp-bottom-panel, .jp-NotebookPanel-toolbar,
                .jp-SideBar, #jp-title-panel-title { display: none !important }
                #jp-main-content-panel, .jp-NotebookPanel, .jp-NotebookPanel-notebook, .jp-WindowedPanel, #jp-main-dock-panel,
                #jp-main-split-panel, #jp-main-vsplit-panel { position: fixed !important; inset: 0 !important;
                width: 100vw !important; height: 100vh !important }""")
            opened.page.wait_for_timeout(1500)
            frames, ran = [], 0     # `ran`: number of cells that have run
            for scene in NOTEBOOKS[number]:
                taken, ran = played(opened, scene, ran)
                frames += taken
            if problems := opened.problems():
                raise SystemExit(f"{notebook.name}: {problems}")
    write(frames, out)


def write(frames: list[tuple[Any, float]], out: Path) -> None:
    """Write the frames as a GIF that repeats, and one frame as a PNG. Exits if the film is too large or too long."""
    first, *others = [picture.quantize(COLOURS, dither=0) for picture, _ in frames]
    out.parent.mkdir(exist_ok=True)
    first.save(out, save_all=True, append_images=others, duration=[round(1000 * seconds) for _, seconds in frames], loop=0, optimize=True)
    seconds, size = sum(seconds for _, seconds in frames), out.stat().st_size
    frames[STILL][0].quantize(128, dither=0).save(out.with_suffix(".png"), optimize=True)     # the PNG is for readers who prefer no motion
    print(f"{out.relative_to(ROOT)}: {len(frames)} frames, {seconds:.1f} s, {size:,} bytes")
    if size > MOST_BYTES or not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise SystemExit(f"{out.name} has {size:,} bytes and {seconds:.1f} s; at most {MOST_BYTES:,} bytes and {LEAST_SECONDS} to {MOST_SECONDS} s are allowed: use fewer colours or frames")


def planner(out: Path) -> None:
    """Write a picture of the planner's page, opened from a link with two configurations."""
    from tests.bench import planner as page_of
    from tests.bench.browser import chromium, static

    with tempfile.TemporaryDirectory() as temporary:
        page_of.make(Path(temporary))
        with static(Path(temporary)) as address, chromium(width=1180, height=820) as context:
            page = context.new_page()
            page_of.first_seconds(page, f"{address}#{BESIDE}")
            shot(page).quantize(128, dither=0).save(out, optimize=True)
    print(f"{out.relative_to(ROOT)}: {out.stat().st_size:,} bytes")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help="07, 12 or planner")
    sys.path.append(str(ROOT))      # tests/ has the code that starts the browser and the lab
    known = [*NOTEBOOKS, "planner"]
    asked = parser.parse_args(argv).what or known
    if unknown := set(asked) - set(known):
        parser.error(f"there is no {min(unknown)!r}; choose among {', '.join(known)}")
    for what in dict.fromkeys(asked):
        planner(PICTURE) if what == "planner" else film(what, FILMS / f"{what}.gif")
    return 0


if __name__ == "__main__":
    sys.exit(main())
