"""The course as its reader meets it: a served JupyterLab in Chromium. Keys are pressed, figures
must change.

Every test also demands that nothing went wrong on the way: no page error, no request to another
host, nothing on standard error, no failed cell.

Only these tests catch: a figure, a slider, a button or a guess that does nothing in a browser, and
a text that cannot be read in one of the themes or on a narrow page.
"""

import io
import json
import shutil
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

from lessons.judging import learner
from tests.attack import patience


def write_notebook(path: Path, cells: list[str]) -> Path:
    """A notebook of code cells (markdown where a cell starts with '# md')."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3",
                                    "language": "python"}
    notebook.cells = [nbformat.v4.new_markdown_cell(cell.removeprefix("# md").strip())
                      if cell.startswith("# md")
                      else nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(notebook, path)
    return path


pytestmark = pytest.mark.browser
COURSE = Path(__file__).parents[2] / "notebooks"
DATA = ("() => [...document.querySelectorAll('.lpkit-figure')].map(figure => "
        "JSON.stringify(figure.data))")

EXPLORER = ["""
from lpkit.errors import ConfigError
from lessons.judging.questions import Guess
from lessons.figures.explorer import Explorer
from lessons.figures.figure import Figure
from lpkit.tables import html_table

def show(devices, optimizer):
    if devices == 4:
        raise ConfigError("devices=4 does not divide the batch of 6")
    bars = [{"type": "bar", "orientation": "h", "y": ["weights", "state"], "x": [1 / devices,
        len(optimizer) / devices]}]
    return ({"data": bars, "layout": {"title": f"devices={devices}", "xaxis": {"title": {"text":
        "GB"}}}},
            html_table(("what", "GB"), [("weights", 1 / devices)]))

explorer = Explorer(show, devices=[1, 2, 3, 4, 5], optimizer=["AdamW", "Lion"])
explorer
""", """
guess = Guess("How many bytes?", unit="GB", low=0.1, high=10)
guess
""", "figures = [Figure({'data': [{'y': [i, 2, 3]}]}) for i in range(5)]\n"
     "for figure in figures: display(figure)"]

LIVE = ["""
import asyncio, threading, time
from lpkit.contracts import StepRecord
from lessons.figures.live import LiveRun

class Run:
    title, planned_steps, error = "a run", 100_000, None

    def __init__(self):
        self.records, self.observers, self.callbacks, self.done = [], [], [], False
        self.stopped, self.going = threading.Event(), threading.Event()
        self.going.set()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        for step in range(1, self.planned_steps + 1):
            self.going.wait()
            if self.stopped.is_set():
                break
            time.sleep(0.005)
            record = StepRecord(step=step, loss=2 + 3 / step, grad_norm=1, lr=1e-3, tokens=step,
                step_seconds=0.005,
                                peak_bytes=1, val_loss=2 + 4 / step if step % 50 == 0 else None)
            self.records.append(record)
            for observe in self.observers:
                observe(record)
        self.done = True
        for callback in self.callbacks:
            callback()

    def subscribe(self, observer): self.observers.append(observer)
    def on_done(self, callback): self.callbacks.append(callback)
    def stop(self): self.stopped.set()
    def pause(self): self.going.clear()
    def resume(self): self.going.set()
""", "runs = [Run() for _ in range(3)]\nfor run in runs: display(LiveRun(run))"]


@pytest.fixture
def notebook(lab):
    """notebook(name, cells or a Path, theme) -> the notebook, open; at the end nothing may have
    gone wrong in it."""
    opening, folder = lab
    opened = []

    def open_it(name, cells, theme="Light"):
        if isinstance(cells, Path):
            shutil.copy(cells, folder / name)
        else:
            write_notebook(folder / name, cells)
        opened.append(opening(name))
        opened[-1].theme(theme)
        return opened[-1]

    yield open_it
    for each in opened:
        problems = each.problems()
        each.close()
        assert not problems


def press_until(page, handle, key, changed, seconds=10):
    handle.focus()
    handle.press(key)
    page.wait_for_function(changed, timeout=seconds * 1000 * patience())


def printed(page, code):
    """What `code` prints in the notebook's kernel."""
    return page.evaluate("""code => new Promise(resolve => {
        const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
        kernel.requestExecute({code}).onIOPub = message => {
            if (message.header.msg_type === 'stream') resolve(message.content.text.trim());
        };
    })""", code)


def test_a_slider_moves_the_figure_and_plotly_is_loaded_once(notebook):
    opened = notebook("explorer.ipynb", EXPLORER)
    opened.run()
    opened.settle()
    page = opened.page
    assert page.locator(".lpkit-figure .main-svg").count() >= 6
    assert page.evaluate("() => window.lpkitPlotly.size") == 1
    slider = page.locator(".widget-slider .noUi-handle").first
    title = page.locator(".lpkit-figure .gtitle").first
    for devices in (2, 3):
        press_until(page, slider, "ArrowRight",
                   f"() => document.querySelector('.lpkit-figure .gtitle').textContent === "
                   f"'devices={devices}'")
    assert json.loads(page.evaluate(DATA)[0])[0]["x"] == [1 / 3, 5 / 3]

    slider.press("ArrowRight")    # the impossible choice: a sentence, and the last good figure
    page.get_by_role("alert").filter(has_text="devices=4 does not divide the batch of 6").wait_for()
    assert title.text_content() == "devices=3"
    slider.press("ArrowRight")
    page.get_by_role("alert").wait_for(state="hidden")

    menu = page.locator(".widget-dropdown select").first
    menu.select_option("Lion")
    page.wait_for_function("() => document.querySelector('.lpkit-figure')?.data?.[0]?.x?.[1] === 4 "
                           "/ 5")

    field = page.locator(".widget-text input[type=number]").first
    field.fill("3.5")
    field.press("Enter")
    page.wait_for_timeout(200)
    assert (printed(page, "print(guess.value, explorer.choices)")
            == "3.5 {'devices': 5, 'optimizer': 'Lion'}")

    # many specs at once: the last is shown, and the page is not kept busy with each
    printed(page, "for i in range(300): explorer.figure.show({'data': [{'y': [i, 2, "
                  "3]}]})\nprint('sent')")
    first = "document.querySelector('.lpkit-figure')"
    page.wait_for_function(f"() => {first}?.data?.[0]?.y?.[0] === 299")
    assert page.evaluate(f"() => Number({first}.dataset.drawn)") < 150


def test_pause_and_stop_are_heard_and_the_figure_is_live(notebook):
    opened = notebook("live.ipynb", LIVE)
    opened.run()
    opened.settle()
    page = opened.page
    # it grows by itself
    page.wait_for_function(
        "() => document.querySelector('.lpkit-figure')?.data?.[0]?.y.length > 60")
    pause = page.get_by_role("button", name="Pause").first
    pause.click()
    page.get_by_text("paused", exact=True).first.wait_for()
    page.get_by_role("button", name="Resume").first.click()
    page.get_by_text("paused", exact=True).first.wait_for(state="hidden")
    for i in range(3):
        page.get_by_role("button", name="Stop").nth(i).click()
        page.wait_for_function("i => document.querySelectorAll('b').length && "
                               "[...document.querySelectorAll('b')]"
                               ".filter(b => b.textContent === 'stopped').length === i + 1", arg=i)


def test_stop_is_heard_while_a_cell_awaits(notebook):
    opened = notebook("await.ipynb", [*LIVE[:1], "run = Run()\nLiveRun(run)",
                                     "print('awaits')\nwhile not run.done:\n    await "
                                     "asyncio.sleep(0.05)\nprint('ended')"])
    opened.command("notebook:run-all-cells")
    # the run grows from the cell before on: its points say nothing of this one
    opened.page.get_by_text("awaits", exact=True).wait_for()
    opened.page.wait_for_function(
        "() => document.querySelector('.lpkit-figure')?.data?.[0]?.y.length > 20")
    opened.page.wait_for_function(
       "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status == 'busy'")
    opened.page.get_by_role("button", name="Stop").click()
    opened.page.wait_for_function("() => window.lpkitDone", timeout=20_000 * patience())
    assert ([output["text"] for output in opened.outputs() if "text" in output]
            == ["awaits\nended\n"])


def test_the_memory_notebook_redraws_when_its_slider_moves(notebook):
    course = COURSE / "01_memory_math.ipynb"
    opened = notebook(course.name, course)
    opened.run(seconds=200)
    opened.settle()
    hidden = len(opened.page.evaluate(DATA))
    # Run All ran past the guess
    opened.page.get_by_role("button", name="Show it without a guess").click()
    opened.page.wait_for_function(f"n => ({DATA})().length > n", arg=hidden)
    opened.settle()
    before = opened.page.evaluate(DATA)
    slider = opened.page.locator(".widget-slider .noUi-handle").nth(1)
    slider.focus()
    slider.press("ArrowRight")
    opened.page.wait_for_function(
        f"before => JSON.stringify(({DATA})()) !== JSON.stringify(before)", arg=before,
        timeout=10_000 * patience())


GUESSED = ["""
from lessons.judging.learner import keep
from lpkit.predict.compare import Comparison, Row
from lessons.judging.questions import Guess

guess = keep("01.browser", Guess("How many bytes?", unit="MB", low=1, high=1000))
guess
""", "guess.reveal('the formula says 110 MB')", """
Comparison((guess.scored(Row(name="peak", formula=110e6, measured=100e6, unit="bytes",
    where="here"), scale=1e6),))"""]


def output_finder(opened):
    return opened.page.locator(".jp-OutputArea-output").get_by_text


def test_a_guess_is_locked_revealed_scored_and_kept(notebook):
    learner.file().unlink(missing_ok=True)      # of other files' tests
    opened = notebook("guessed.ipynb", GUESSED)
    page, text = opened.page, output_finder(opened)
    page.locator(".jp-Cell").first.click()
    opened.command("notebook:run-cell-and-select-next")
    opened.command("notebook:run-cell-and-select-next")
    text("Lock in your guess first").wait_for()
    assert not text("the formula says").count() and not learner.file().exists()
    field = page.locator(".widget-text input[type=number]")
    field.fill("80")
    field.press("Enter")
    page.locator(".widget-dropdown select").select_option("1.25")
    page.get_by_role("button", name="Lock in").click()
    text("the formula says 110 MB").wait_for()
    text("You said 80 MB, 90% sure of 64 MB to 100 MB.").wait_for()
    assert field.is_disabled() and not text("Lock in your guess first").count()
    page.locator(".jp-Cell .jp-InputPrompt").last.click()
    opened.command("notebook:run-cell-and-select-next")
    text("-20.0%, inside your 90%").wait_for()
    text("It is 100 MB (your guess: -20.0%), and your 90% interval held.").wait_for()
    (kept,) = learner.read().guesses
    assert (kept.name, kept.value, kept.factor, kept.measured, kept.held) == ("01.browser", 80.0,
        1.25, 100.0, True)

    opened.command("docmanager:save")
    page.wait_for_function("() => window.lpkitDone")
    page.reload()       # the page again, and the same kernel
    text("and your 90% interval held.").wait_for(timeout=90_000 * patience())
    again = notebook("again.ipynb", GUESSED)        # another kernel, Run All
    again.run()
    for words in ("Locked on", "-20.0%, inside your 90%", "the formula says 110 MB"):
        output_finder(again)(words).wait_for()


def test_run_all_goes_past_a_guess_which_counts_no_more(notebook):
    cells = [GUESSED[0].replace("How many bytes?", "How many seconds?"), *GUESSED[1:],
             "print('the end')"]
    opened = notebook("past.ipynb", cells)
    opened.run()
    text = output_finder(opened)
    text("the end").wait_for()
    text("this guess does not count").wait_for()
    assert text("Lock in your guess first").count() and "your guess" not in str(opened.outputs()[2])
    opened.page.get_by_role("button", name="Lock in").click()
    text("the formula says 110 MB").wait_for()
    assert printed(opened.page, "print(guess.answer)") == "None" and len(learner.read().guesses) < 2


def test_run_all_goes_on_after_a_claim_that_fails(lab):
    opening, folder = lab
    path = write_notebook(folder / "claim.ipynb",
                         ["from lpkit import begin\nbegin()\nfrom lessons.claims import claim\n"
                           "with claim('two is more than "
                          "three'):\n"
                                                  "    assert 2 > 3, 'it is less'", "print('went "
                                                      "on')"])
    book = nbformat.read(path, as_version=4)
    book.cells[0].metadata["tags"] = ["claim", "raises-exception"]
    nbformat.write(book, path)
    opened = opening(path.name)
    opened.command("notebook:run-all-cells")
    for words in ("went on", "Because: it is less", "two is more than three"):
        output_finder(opened)(words).wait_for()
    (problem,) = opened.problems()
    assert problem == "cell 0 failed: AssertionError: it is less"
    assert not output_finder(opened)("Traceback").count()
    opened.close()


THEMED = ["""
import lpkit
from lessons.claims import claim
from lessons.judging.learner import check
from lessons.judging.index import exercises
from lpkit.errors import ConfigError
from lpkit.predict import Comparison
from lpkit.predict.compare import Row
from lpkit.predict.plan import plan
from lessons.l09_predict_before_you_rent import layouts_view
from lessons.figures.explorer import Explorer
from lessons.judging.questions import Guess
from IPython.display import HTML

EXERCISES = exercises()

def refuses(size):
    raise ConfigError("no size will do")

Explorer(refuses, size=[1, 2])
""", "guess = Guess('How many bytes?', unit='GB', low=0.1, high=10)\nguess", "guess.reveal('text')",
    "locked = Guess('How many?', unit='GB', low=0.1, high=10)\nlocked.lock()\nlocked",
    "locked.reveal('what was hidden')",
    "with claim('it is so'):\n    assert True",
    "Comparison((Row(name='peak', formula=1.0, measured=1.1, unit='GB', where='here'),))",
    "check(EXERCISES['03.cast'], lambda *_: None)",
    "check(EXERCISES['00.uniform_loss'], EXERCISES['00.uniform_loss'].spec)",
    "show, controls = layouts_view(plan(lpkit.preset('llama-8b'), 1e12, 'h200', "
    "devices=64))\nExplorer(show, **controls)", *LIVE]

PROSE = """# md <details><summary>Answers</summary>

1. Under the <abbr title="from which on">ridge</abbr>, see [02 Where](02_where.ipynb).

</details>"""


def test_answers_fold_and_terms_have_their_words(notebook):
    """The lab cleans markdown before it shows it: a folded answer, a term's explanation and a link
    stay."""
    page = notebook("prose.ipynb", [PROSE]).page
    term = page.locator(".jp-RenderedMarkdown abbr")
    assert term.get_attribute("title") == "from which on" and not term.is_visible()
    page.get_by_text("Answers", exact=True).click()
    assert (term.is_visible() and page.locator(".jp-RenderedMarkdown li a").inner_text()
            == "02 Where")


DRAWN = ["""
import lpkit
from lpkit.predict import CATALOGUE, memory
from lpkit.predict.compare import Row
from lessons.l03_number_formats import landings, listed
from lessons.figures.figure import Figure
from lpkit.tables import html_table
from lessons.figures.comparison import comparison_figure
from lessons.l01_memory_math import memory_figure
from lessons.l03_number_formats import landing_figure, ranges_figure, value_figure
from lpkit.techniques.formats import FORMATS

rows = [Row(name="peak", formula=1.0, measured=1.1, guess=2.0, unit="GB", where="here"),
    Row(name="MFU", formula=40, measured=30, unit="%", where="")]
Figure(comparison_figure(rows, title="Off"))
""", "Figure(memory_figure(memory(lpkit.preset('llama-8b'), CATALOGUE['h200'])))",
    "Figure(ranges_figure(FORMATS.values()))",
    "Figure(landing_figure(landings(0.3).values())[0])",
    "Figure(value_figure(listed()['e4m3fn'], 75))"]

# The least contrast of any text outside the figures, by the formula of WCAG 2.
CONTRAST = """() => {
    const parts = colour => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
        return [r, g, b, a] };
    const over = (top, under) => top.slice(0, 3).map((c, i) =>
        c * top[3] + under[i] * (1 - top[3]));
    const light = rgb => rgb.slice(0, 3).map(c => (c /= 255) <= 0.03928 ? c / 12.92 :
        ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = node => { const c = parts(getComputedStyle(node).backgroundColor);
        return c[3] === 1 || !node.parentElement ? c : over(c,
            ground(node.parentElement)).concat(1) };
    const texts = [];
    for (const node of document.querySelectorAll('.jp-OutputArea-output *')) {
        const text = [...node.childNodes].filter(n => n.nodeType === 3 &&
            n.textContent.trim()).map(n => n.textContent.trim()).join(' ');
        if (!text || node.closest('.lpkit-figure, button, select, style, script') ||
            !node.getClientRects().length) continue;
        const under = ground(node), [a, b] = [over(parts(getComputedStyle(node).color), under),
            under].map(light).sort((x, y) => y - x);
        texts.push([(a + 0.05) / (b + 0.05), text.slice(0, 60)]);
    }
    return texts.sort((x, y) => x[0] - y[0]);
}"""


def contrast(crop):
    """Of the pixels of a text: the commonest is the ground; of the others the farthest from it, by
    the formula of WCAG 2."""
    values = np.asarray(crop.convert("RGB"), dtype=float) / 255
    light = (np.where(values <= 0.03928, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
             @ (0.2126, 0.7152, 0.0722))
    levels, counts = np.unique(light.round(4), return_counts=True)
    under = levels[counts.argmax()]
    return max((max(level, under) + 0.05) / (min(level, under) + 0.05) for level in levels)


def texts_of_figures(page):
    """(contrast, text) of what is written in figures, as painted; three device pixels to one, so
    that strokes have a core."""
    device = {**page.viewport_size, "deviceScaleFactor": 3, "mobile": False}
    page.context.new_cdp_session(page).send("Emulation.setDeviceMetricsOverride", device)
    texts = []
    for figure in page.locator(".lpkit-figure").all():
        figure.scroll_into_view_if_needed()
        image = Image.open(io.BytesIO(figure.screenshot()))
        boxes = figure.evaluate("""figure => { const home = figure.getBoundingClientRect();
            return [...figure.querySelectorAll('text')].filter(text =>
                text.textContent.trim()).map(text => {
                const box = text.getBoundingClientRect();
                return [text.textContent, box.left - home.left, box.top - home.top,
                    box.right - home.left, box.bottom - home.top] }) }""")
        scale = image.width / figure.bounding_box()["width"]
        texts += [(contrast(image.crop([round(scale * edge) for edge in box])), text)
                  for text, *box in boxes if box[2] - box[0] > 3]
    return sorted(texts)


THEMES = pytest.mark.parametrize("theme", ["Light", "Dark"])


@THEMES
def test_figures_can_be_read_in_either_theme(notebook, theme):
    opened = notebook("drawn.ipynb", DRAWN, theme)
    opened.run()
    opened.settle()
    texts = texts_of_figures(opened.page)
    assert len(texts) > 80 and any("error against the measurement" in text for _, text in texts)
    assert texts[0][0] >= 4.5, texts[:5]
    ground = opened.page.locator(".lpkit-figure").first.screenshot()
    level = sum(Image.open(io.BytesIO(ground)).convert("RGB").getpixel((3, 3))) / 3
    assert (level < 40) if theme == "Dark" else (level > 250)


@THEMES
def test_everything_can_be_read_in_either_theme(notebook, theme):
    opened = notebook("themed.ipynb", THEMED, theme)
    opened.run()
    opened.settle()
    texts = opened.page.evaluate(CONTRAST)
    assert (len(texts) > 40 and any("no size will do" in text for _, text in texts)
            and any(text == "wrong" for _, text in texts))
    assert texts[0][0] >= 4.5, texts[:5]


def test_the_lab_shows_the_live_figure_and_the_pictures_of_a_folder(notebook, lab):
    """The output holds a still as well, for viewers without a kernel: the lab must not show it."""
    folder = lab[1] / "pictures"
    folder.mkdir(exist_ok=True)
    shutil.copy(COURSE / "pictures" / "03.svg", folder)
    opened = notebook("both.ipynb", ["# md\n# A title\n\n![what it shows](pictures/03.svg)",
                                    "from lessons.figures.explorer import Explorer\n"
                                    "Explorer(lambda n: {'data': [{'y': [n, 2]}], 'layout': "
                                    "{'title': 'live'}}, n=[1, 2])"])
    opened.run()
    opened.settle()
    [output] = opened.outputs()
    assert {"image/svg+xml", "application/vnd.jupyter.widget-view+json"} <= output["data"].keys()
    page = opened.page
    assert (page.locator(".jp-OutputArea .lpkit-figure .main-svg").count()
            and not page.locator(".jp-OutputArea .jp-RenderedSVG").count())
    assert page.locator(".jp-RenderedMarkdown img").evaluate("image => image.decode().then(() => "
        "[image.naturalWidth, image.alt])") == [800, "what it shows"]


def test_on_a_narrow_page_a_figure_fits_under_a_title_that_wraps_and_a_table_scrolls(notebook):
    words = "a title that is longer than the page of a phone is wide, and &lt; 760 pixels"
    opened = notebook("narrow.ipynb",
                     [f"from lessons.judging.questions import Guess\nfrom lessons.figures.figure "
                      f"import Figure\nfrom lpkit.tables import html_table\nfigure = "
                      f"Figure({{'data': [{{'y': [1, 3, 2], 'mode': 'markers', 'marker': "
                      f"{{'size': 40}}}}], 'layout': {{'title': '{words}'}}}})\nfigure",
                                      "from IPython.display import HTML\nguess = Guess('How "
                                      "many?', unit='s', low=1, high=9)\n"
                                      "guess.reveal(HTML(html_table(('a', 'b'), [('x' * 15, '1' * "
                                      "50)])))"])
    opened.run()
    opened.settle()
    page, title = opened.page, opened.page.locator(".lpkit-title")
    assert not title.is_visible() and page.locator(".gtitle").is_visible()
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("""() => {
        const box = document.querySelector('.lpkit-box'),
            figure = document.querySelector('.lpkit-figure .main-svg').getBoundingClientRect();
        return box.clientWidth < 390 && Math.abs(figure.width - box.clientWidth) < 2 &&
            Math.abs(figure.height - box.clientHeight) < 2 }""")
    assert (title.inner_text() == words.replace("&lt;", "<")
            and not page.locator(".gtitle").is_visible())
    assert title.evaluate("e => e.getBoundingClientRect().right <= 390 && e.scrollWidth === "
                          "e.clientWidth")
    middle = page.locator(".lpkit-figure .point").nth(1).bounding_box()
    page.mouse.move(middle["x"] + middle["width"] / 2, middle["y"] + middle["height"] / 2, steps=4)
    page.locator(".lpkit-figure .hovertext").wait_for()
    page.mouse.click(middle["x"] + middle["width"] / 2, middle["y"] + middle["height"] / 2)
    page.wait_for_timeout(300)
    assert (printed(page, "print(figure.clicked)")
            == "{'curve': 0, 'x': 1, 'y': 3}"), "a scaled figure hears clicks where its points are"
    page.set_viewport_size({"width": 1200, "height": 900})
    page.wait_for_function("() => document.querySelector('.lpkit-figure').style.transform === ''")
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("() => document.querySelector('.lpkit-figure').style.transform !== ''")
    page.get_by_role("button", name="Show it without a guess").click()
    assert page.locator("table").evaluate("""e => { const box = e.closest('.widget-vbox');
        return box.clientWidth < 390 && box.scrollWidth >= e.clientWidth &&
            getComputedStyle(box).overflowX === 'auto' }""")


PANELS = ["""
from lessons.figures.drawing import axis, bars, figure, note, scatter
from lessons.figures.figure import Figure
notes = [note("words that say what the panel on the left shows", 0, 1.02, xref="x domain",
              yref="paper"),
         note("the panel on the right", 0, 1.02, xref="x2 domain", yref="paper")]
Figure(figure([bars(["one", "two"], [1, 2], hover=""),
               bars(["one", "two"], [3, 4], hover="", xaxis="x2", showlegend=False)],
              "an axis of names for two panels", annotations=notes,
              xaxis=axis("a title that is as long as its panel", domain=[0, 0.44]),
              xaxis2=axis("another title that is as long", domain=[0.54, 1], anchor="y"),
              yaxis=axis("names")))
""", """
right = dict(domain=[0.7, 1], matches="x")
Figure(figure([scatter([1, 2], [3, 4], "one"),
               scatter([1, 2], [3, 4], "two", xaxis="x2", yaxis="y2"),
               scatter([1, 2], [3, 4], "three", xaxis="x3", yaxis="y3")], "three panels",
              xaxis=axis("updates of the model", domain=[0, 0.6]), yaxis=axis("loss"),
              xaxis2=dict(**right, anchor="y2", showticklabels=False),
              yaxis2=axis("norm of the gradient", domain=[0.56, 1], anchor="x2"),
              xaxis3=axis("updates of the model", **right, anchor="y3"),
              yaxis3=axis("tokens a second", domain=[0, 0.44], anchor="x3")))
"""]
TOPS = """() => [...document.querySelectorAll('.lpkit-figure')].map(figure =>
    [...figure.querySelectorAll('.nsewdrag')].map(plot =>
        Math.round(plot.getBoundingClientRect().top)))"""
TOUCHING = """() => [...document.querySelectorAll('.lpkit-figure')].flatMap(figure => {
    const texts = [...figure.querySelectorAll('text')].filter(text => text.textContent.trim())
        .map(text => ({text: text.textContent, r: text.getBoundingClientRect()}))
        .filter(({r}) => r.width);
    const touch = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
        Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
    return texts.flatMap((a, i) => texts.slice(i + 1).filter(b => touch(a.r, b.r))
        .map(b => [a.text, b.text])) })"""


def test_on_a_narrow_page_panels_stand_below_one_another(notebook):
    opened = notebook("panels.ipynb", PANELS)
    opened.run()
    opened.settle()
    page = opened.page
    shared, three = page.evaluate(TOPS)
    assert len(set(shared)) == 1 and len(set(three)) == 2 and not page.evaluate(TOUCHING)
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function(f"() => ({TOPS})().every(tops => new Set(tops).size === tops.length)")
    assert [len(tops) for tops in page.evaluate(TOPS)] == [2, 3] and not page.evaluate(TOUCHING)
    page.set_viewport_size({"width": 1200, "height": 900})
    page.wait_for_function(f"() => new Set(({TOPS})()[0]).size === 1")


SLOW = """() => { AbortSignal.timeout = () => {
    // as on a page that is busy for longer than anywidget waits
    const late = new AbortController();
    setTimeout(() => late.abort());
    return late.signal } }"""


def test_a_figure_follows_on_a_page_that_is_slow_to_load_it(lab):
    """anywidget's own model loses every update there: the figure stayed empty, and no slider moved
    it."""
    open_notebook, folder = lab
    write_notebook(folder / "slow.ipynb",
                   [EXPLORER[0], "explorer.set(devices=5, optimizer='Lion')"])
    opened = open_notebook("slow.ipynb")
    opened.page.evaluate(SLOW)
    opened.run()
    opened.settle()
    opened.page.wait_for_function(f"() => ({DATA})()[0]?.includes('0.2')",
                                  timeout=20_000 * patience())
    opened.page.locator(".noUi-handle").first.press("ArrowLeft")        # refused
    opened.page.locator(".noUi-handle").first.press("ArrowLeft")
    opened.page.wait_for_function(f"() => ({DATA})()[0]?.includes('0.333')",
                                  timeout=20_000 * patience())
    opened.close()
