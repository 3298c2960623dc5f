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
from pathlib import Path
from typing import Any

from lpkit.bench.browser import Notebook, chromium, chromium_path, served
from lpkit.bench.harness import ROUNDS, Result, paired, provenance
from lpkit.errors import ConfigError

NOTEBOOK = "01_memory_math"
KERNEL_SECONDS, PAGE_SECONDS = 0.050, 0.150

RACE = """
import json as _json, time as _time
import ipywidgets as _widgets, plotly.graph_objects as _go
from lpkit.ui import Explorer as _Explorer
from lpkit.ui.figure import plain as _plain

_mine = next(value for value in list(globals().values()) if isinstance(value, _Explorer))

def _spec(**moved):
    shown = _mine.show(**{**_mine.choices, **moved})
    return _plain(shown[0] if isinstance(shown, tuple) else shown)

def _two(control):
    if isinstance(control, _widgets.SelectionSlider):
        return [value for _, value in control._options_full][:2]
    return [control.min, control.min + control.step]

_name, _control = next((name, control) for name, control in _mine.controls.items()
                       if isinstance(control, (_widgets.SelectionSlider, _widgets.IntSlider))
                       and _spec(**{name: _two(control)[0]}) != _spec(**{name: _two(control)[1]}))
_values = _two(_control)
_control.value = _values[0]
_peer = _go.FigureWidget(_spec())
_slider = _widgets.SelectionSlider(options=_values, value=_values[0], description=_name)

def _redraw(change):
    spec = _spec(**{_name: change["new"]})
    with _peer.batch_update():
        for trace, new in zip(_peer.data, spec["data"]):
            trace.update(new)
        _peer.layout.update({key: value for key, value in spec["layout"].items()
                             if key != "template"})

_slider.observe(_redraw, names="value")
_control.add_class("race-ours")
_slider.add_class("race-peer")
display(_widgets.VBox([_slider, _peer]))   # ours is already in the page

def _seconds(control, value):
    started = _time.perf_counter()
    control.value = value
    return _time.perf_counter() - started

_ours, _theirs = [], []
for _i in range(ROUNDS + 2):                       # the first two warm up
    _ours.append(_seconds(_control, _values[1 - _i % 2]))
    _theirs.append(_seconds(_slider, _values[1 - _i % 2]))
_control.value = _slider.value = _values[0]
print("RACE " + _json.dumps({"ours": _ours[2:], "theirs": _theirs[2:]}))
"""

PLOT = """name => {
    let box = document.querySelector(`.${name}`);
    while (box && !box.querySelector('.js-plotly-plot')) box = box.parentElement;
    return box?.querySelector('.js-plotly-plot') }"""

PRESS = f"([name, key]) => new Promise((done, failed) => {{ const plotOf = {PLOT};" + """
    const handle = document.querySelector(`.${name} .noUi-handle`);
    const plot = plotOf(name);
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
    from lpkit.course import notebooks

    return race(notebooks.with_tier(notebooks.find(NOTEBOOK), "smoke"), rounds)


def race(notebook: Any, rounds: int) -> list[Result]:
    """`notebook` (nbformat) makes at least one Explorer with a slider."""
    import nbformat

    if chromium_path() is None:
        raise ConfigError("there is no chromium, chromium-browser or google-chrome on PATH; "
                          "install one to measure a page")
    notebook.cells.append(nbformat.v4.new_code_cell(f"ROUNDS = {rounds}\n{RACE}"))
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
            kernel = next(json.loads(line.removeprefix("RACE ")) for output in opened.outputs()
                          for line in "".join(output.get("text", "")).splitlines()
                          if line.startswith("RACE "))
            opened.page.wait_for_function(
                f"() => ({PLOT})('race-peer')?.querySelector('.main-svg')", timeout=60_000)
            page = _page_seconds(opened, rounds)
            opened.close()
    facts = provenance(("jupyterlab", "ipykernel", "ipywidgets", "plotly", "anywidget"))
    results = []
    for case, seconds, budget in (("kernel", kernel, KERNEL_SECONDS), ("page", page, PAGE_SECONDS)):
        results.append(paired("redraw", ours=seconds["ours"], peer=[budget] * rounds, facts=facts,
                              better="lower", peer_name=f"budget of {budget * 1000:.0f} ms",
                              case=case, target=1.0))
        results.append(paired("redraw", ours=seconds["ours"], peer=seconds["theirs"], facts=facts,
                              better="lower", peer_name="go.FigureWidget", case=case))
    return results


def _page_seconds(opened: Notebook, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for i in range(rounds + 2):            # the first two warm up
        key = "ArrowLeft" if i % 2 else "ArrowRight"
        for who, name in (("ours", "race-ours"), ("theirs", "race-peer"))[::1 if i % 2 else -1]:
            seconds[who].append(opened.page.evaluate(PRESS, [name, key]))
            # what the other still has to draw is not ours to wait for
            opened.page.wait_for_timeout(150)
    return {who: taken[2:] for who, taken in seconds.items()}
