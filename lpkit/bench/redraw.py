"""From a moved slider to the changed figure: in the kernel, and in the page as its reader sees it.

The notebook is `01_memory_math`, run at the smoke size in a served JupyterLab in Chromium. Its
first Explorer is raced against `plotly.graph_objects.FigureWidget` inside `batch_update`, with the
same function, controls of the same kind, in the same page, taking turns. In the kernel a redraw is
the assignment of a control's value until it returns; in the page it is the time from the key to the
end of plotly's drawing. The budgets are absolute (50 and 150 ms): a row against a budget is the
share of it that is used.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat

from lpkit.bench.browser import Notebook, chromium, chromium_path, served
from lpkit.bench.harness import ROUNDS, Result, paired
from lpkit.course import notebooks
from lpkit.errors import ConfigError

NOTEBOOK, SECONDS = "01_memory_math", "seconds.json"
BUDGETS = {"kernel": 0.050, "page": 0.150}      # seconds
OURS, PEER = "race-ours", "race-peer"           # CSS classes of both sliders
WARM_UP = 2
PACKAGES = ("jupyterlab", "ipykernel", "ipywidgets", "plotly", "anywidget")

CELL = """
from lpkit.bench.redraw import race_in_kernel
from lpkit.ui import Explorer
race_in_kernel(next(value for value in list(globals().values()) if isinstance(value, Explorer)), {})
"""
PLOT = """name => {
    let box = document.querySelector(`.${name}`);
    while (box && !box.querySelector('.js-plotly-plot')) box = box.parentElement;
    return box?.querySelector('.js-plotly-plot') }"""
PRESS = f"([name, key]) => new Promise((done, failed) => {{ const plot = ({PLOT})(name);" + """
    const handle = document.querySelector(`.${name} .noUi-handle`);
    const before = JSON.stringify(plot.data);
    const late = setTimeout(() => failed(new Error(`${name} did not change`)), 10000);
    const started = performance.now();
    const drawn = () => {
        // the last drawing of the previous round
        if (JSON.stringify(plot.data) === before) return;
        clearTimeout(late);
        plot.removeListener('plotly_afterplot', drawn);
        done((performance.now() - started) / 1000);
    };
    plot.on('plotly_afterplot', drawn);
    handle.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
})"""


def run(rounds: int = ROUNDS) -> list[Result]:
    """Errors: ConfigError without a browser or the notebook; RuntimeError when the page reports a
    problem."""
    if chromium_path() is None:
        raise ConfigError("there is no chromium, chromium-browser or google-chrome on PATH; "
                          "install one to measure a page")
    book = notebooks.read(notebooks.find(NOTEBOOK))
    notebook = notebooks.with_parameters(book, {}, "smoke")
    notebook.cells.append(nbformat.v4.new_code_cell(CELL.format(rounds)))
    with tempfile.TemporaryDirectory() as folder:
        course = Path(folder) / "course"
        course.mkdir()
        nbformat.write(notebook, course / "redraw.ipynb")
        with served(course, Path(folder) / "state") as server, chromium() as context:
            opened = Notebook(context, server, "redraw.ipynb")
            opened.run(seconds=300)
            opened.settle()
            if problems := opened.problems():
                raise RuntimeError("; ".join(problems))
            opened.page.wait_for_function(
                f"() => ({PLOT})('{PEER}')?.querySelector('.main-svg')", timeout=60_000)
            opened.page.wait_for_timeout(1000)      # what the kernel's turns have left to draw
            seconds = {"kernel": json.loads((course / SECONDS).read_text()),
                       "page": _page_seconds(opened, rounds)}
            opened.close()
    results = []
    for case, budget in BUDGETS.items():
        ours = seconds[case][OURS]
        how = {"ours": ours, "better": "lower", "case": case, "packages": PACKAGES}
        results += [paired("redraw", peer=[budget] * rounds, target=1.0,
                           peer_name=f"budget of {budget * 1000:.0f} ms", **how),
                    paired("redraw", peer=seconds[case][PEER], peer_name="go.FigureWidget", **how)]
    return results


def race_in_kernel(explorer: Any, rounds: int) -> None:
    """In a notebook's last cell: its `explorer` beside a FigureWidget, which is shown. Leaves the
    seconds of both in a file."""
    import plotly.graph_objects as go
    from IPython.display import display
    from ipywidgets import SelectionSlider, VBox

    from lpkit.ui.figure import plain

    def spec(**moved):
        shown = explorer.show(**{**explorer.choices, **moved})
        return plain(shown[0] if isinstance(shown, tuple) else shown)

    for name, control in explorer.controls.items():     # up to a slider that changes the figure
        if isinstance(control, SelectionSlider):
            values = [value for _, value in control._options_full][:2]
            if spec(**{name: values[0]}) != spec(**{name: values[1]}):
                break
    control.value = values[0]
    peer = go.FigureWidget(spec())
    slider = SelectionSlider(options=values, value=values[0], description=name)

    def redraw(change):
        new = spec(**{name: change["new"]})
        new["layout"].pop("template", None)
        with peer.batch_update():
            for trace, data in zip(peer.data, new["data"]):
                trace.update(data)
            peer.layout.update(new["layout"])

    slider.observe(redraw, names="value")
    control.add_class(OURS)
    slider.add_class(PEER)
    display(VBox([slider, peer]))       # ours is already in the page
    seconds = {OURS: [], PEER: []}
    for i in range(rounds + WARM_UP):
        for who, moved in ((OURS, control), (PEER, slider)):
            started = time.perf_counter()
            moved.value = values[1 - i % 2]
            seconds[who].append(time.perf_counter() - started)
    control.value = slider.value = values[0]
    Path(SECONDS).write_text(json.dumps({who: taken[WARM_UP:] for who, taken in seconds.items()}))


def _page_seconds(opened: Notebook, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {OURS: [], PEER: []}
    for i in range(rounds + WARM_UP):
        key, order = ("ArrowLeft", (OURS, PEER)) if i % 2 else ("ArrowRight", (PEER, OURS))
        for who in order:
            seconds[who].append(opened.page.evaluate(PRESS, [who, key]))
            # what the other still has to draw is not ours to wait for
            opened.page.wait_for_timeout(150)
    return {who: taken[WARM_UP:] for who, taken in seconds.items()}
