"""`Figure` shows a plotly spec as a live figure; plotly.js is sent to the browser once per kernel.

Plotly's `go.FigureWidget` sends 5 MB of JavaScript with every figure. Here one `Library` widget
holds plotly's packaged plotly.min.js, gzipped, and every `Figure` is a widget of 2 kB that refers
to the `Library`. Nothing is loaded from another host.

For viewers without a kernel (an executed notebook, a published page), the output also has plotly's
mime type, which JupyterLab and plotly draw; a static picture (`lessons.figures.still`), which
GitHub, nbconvert and other viewers show; and a sentence of plain text. An output is stored when it
is displayed; after updates, `refresh_output` stores the current figure. No picture is drawn between
these two moments.
"""

import gzip
import itertools
import json
import math
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files
from typing import Any, ClassVar

import anywidget
import ipywidgets as widgets
import numpy as np
import traitlets
from IPython.display import display

from lessons.figures import PLOTLY_MIME, WIDGET_MIME
from lessons.figures.still import picture
from lessons.figures.style import TEMPLATE
from lpkit.errors import ConfigError
from lpkit.files import resource

MAX_POINTS = 5000   # per trace; twenty quick redraws of 20,000 points take a browser 8 s
# folder of figure.js, figure.css and panels.js; a learner's copy of the lessons lacks these files
BESIDE = resource("notebooks") / "lessons" / "figures"
CONFIG = {"displaylogo": False, "displayModeBar": "hover", "scrollZoom": False,
          "modeBarButtons": [["zoom2d", "pan2d", "resetScale2d", "toImage"]]}


class Library(anywidget.AnyWidget):
    """A widget that is never displayed. It holds the scripts that all figures of this kernel share:
    plotly.js and panels.js."""

    _esm = "export default { render() {} }"
    version = traitlets.Unicode().tag(sync=True)
    packed = traitlets.Bytes(help="plotly.min.js, gzipped").tag(sync=True)
    panels = traitlets.Unicode(help="panels.js").tag(sync=True)
    current: ClassVar["Library | None"] = None


def library() -> Library:
    """Return the `Library` of this kernel. Create it on first use, and again if its widget has been
    closed (ipywidgets' `Widget.close_all` closes all widgets)."""
    if Library.current is None or Library.current.comm is None:
        source = files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
        # Level 4 takes a third of level 9's time, for a tenth more bytes.
        packed = gzip.compress(source, compresslevel=4, mtime=0)
        Library.current = Library(version=version("plotly"), packed=packed,
                                  panels=(BESIDE / "panels.js").read_text(encoding="utf-8"))
    return Library.current


class Shown(widgets.Widget):
    """Holds the spec of a figure in a plain ipywidgets model. An anywidget model loads its
    JavaScript first, and updates that arrive while a busy browser needs more than two seconds for
    that are lost."""

    spec = traitlets.Dict().tag(sync=True)


class Stored:
    """Mixin for widgets that show `figure`. Their stored output contains the widget, the plotly
    spec, a static picture and a sentence, so a viewer without a kernel can draw it. The output has
    a display id, so `refresh_output` can replace it."""

    figure: "Figure"
    _display_id: str | None = None

    def _repr_mimebundle_(self, **kwargs) -> dict:
        """Return the output by mime type: a sentence, the widget, the picture, the plotly spec."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        spec = self.figure.spec
        sentence, still = describe(spec, type(self).__name__), {}
        try:
            still = picture(spec)
        except ConfigError as error:        # the live figure can still show it
            sentence += f". It has no static picture: {error}"
        return {"text/plain": sentence, WIDGET_MIME: view, **still,
                PLOTLY_MIME: {**spec, "config": CONFIG}}

    def _ipython_display_(self, update: bool = False) -> None:
        """Display the widget, or with `update` replace its stored output. IPython calls this."""
        self._display_id = self._display_id or uuid.uuid4().hex
        display(self._repr_mimebundle_(), raw=True, display_id=self._display_id, update=update)

    def refresh_output(self) -> None:
        """Store the current state in the output, if there is one. Call it in the cell that waits
        for the last change, so that a headless run stores the final figure."""
        if self._display_id is not None:
            self._ipython_display_(update=True)


class Figure(Stored, anywidget.AnyWidget):
    """A live plotly figure. `Figure(spec)` takes {"data": [...], "layout": {...}} or a
    `plotly.graph_objects.Figure`.

    figure.show(spec)   replace the figure, in one message, from any thread
    figure.clicked      {"curve", "x", "y"} of the last clicked point; observe it
    figure.spec         the shown spec: plain lists and numbers, in the house style, at most 5000
                        points per trace (a longer line keeps its ends and the extremes of every
                        stretch between)
    """

    _esm = BESIDE / "figure.js"
    _css = BESIDE / "figure.css"
    shown = traitlets.Instance(Shown).tag(sync=True, **widgets.widget_serialization)
    config = traitlets.Dict(CONFIG).tag(sync=True)
    clicked = traitlets.Dict().tag(sync=True)
    library = traitlets.Instance(Library).tag(sync=True, **widgets.widget_serialization)

    def __init__(self, spec: Any = None):
        super().__init__(shown=Shown(spec=plain(spec or {})), library=library(),
                         layout={"width": "100%"})

    @property
    def figure(self) -> "Figure":
        return self

    @property
    def spec(self) -> dict:
        return self.shown.spec

    def show(self, spec: Any) -> None:
        """Replace the shown figure by `spec`, in one message to the browser."""
        self.shown.spec = plain(spec)


def plain(spec: Any) -> dict:
    """Return `spec` as JSON-ready {"data", "layout"} in the house style. Errors: ConfigError if it
    is not a plotly spec."""
    # Convert trace by trace: `to_plotly_json` of a whole figure packs its arrays into base64 text,
    # which `thin` cannot shorten.
    if hasattr(spec, "to_plotly_json"):
        spec = {"data": [trace.to_plotly_json() for trace in spec.data],
                "layout": spec.layout.to_plotly_json()}
    if not isinstance(spec, Mapping) or not set(spec) <= {"data", "layout", "config", "frames"}:
        raise ConfigError(f"a figure is {{'data': [...], 'layout': {{...}}}} or a plotly Figure, "
                          f"got {spec!r:.80}")
    data = [_plain(thin(trace)) for trace in spec.get("data") or []]
    layout = _plain({**(spec.get("layout") or {}), "template": None}) | {"template": TEMPLATE}
    layout.setdefault("height", TEMPLATE["layout"]["height"])
    if isinstance(layout.get("title"), str):
        layout["title"] = {"text": layout["title"]}
    margin = {"t": _headroom(data, layout), **layout.get("margin", {})}
    margin["t"] += 26 * bool((layout.get("title") or {}).get("subtitle"))
    layout["margin"] = margin
    return {"data": data, "layout": layout}


def _headroom(data: list[dict], layout: Mapping[str, Any]) -> int:
    """Return the pixels that the title and the rows of the legend need above the axes. Plotly does
    not reserve this space, so title and legend would overlap."""
    rows, title = 0, (layout.get("title") or {}).get("text")
    names = [len(trace.get("name") or "") for trace in data if trace.get("showlegend", True)]
    if names and "legend" not in layout and layout.get("showlegend", len(data) > 1):
        columns = max(1, int(640 / (48 + 7.5 * max(names))))    # plotly's columns have equal widths
        rows = math.ceil(len(names) / columns)
    return 16 + 28 * bool(title) + 21 * rows


def _plain(value: Any) -> Any:
    """Return `value` with numpy arrays as lists, dates as text, and values that JSON lacks (NaN,
    infinities) as None, which plotly draws as a gap."""
    def listed(item: Any) -> Any:
        if hasattr(item, "isoformat"):
            return item.isoformat()
        return item.tolist() if hasattr(item, "tolist") else list(item)

    return json.loads(json.dumps(value, default=listed), parse_constant=lambda _: None)


def thin(trace: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `trace` with at most MAX_POINTS points if it is a scatter trace; other traces are
    returned unchanged. The kept points are both ends, and the lowest and the highest y in each of
    MAX_POINTS / 2 - 1 stretches between the ends. Every list that is as long as y (x, text,
    customdata, marker sizes) keeps the same points."""
    y = trace.get("y")
    count = 0 if y is None else len(y)
    if trace.get("type", "scatter") not in ("scatter", "scattergl") or count <= MAX_POINTS:
        return trace
    values = np.asarray(y, dtype=float)
    low, high = (np.where(np.isnan(values), gap, values) for gap in (np.inf, -np.inf))
    indices = {0, count - 1}
    edges = np.linspace(1, count - 1, MAX_POINTS // 2).astype(int)
    for start, end in itertools.pairwise(edges):
        indices |= {start + low[start:end].argmin(), start + high[start:end].argmax()}
    index = sorted(indices)

    def pick(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: pick(item) for key, item in value.items()}
        if isinstance(value, (np.ndarray, list, tuple, range)) and len(value) == count:
            return [value[i] for i in index]
        return value

    return pick(trace)


def describe(spec: Mapping[str, Any], kind: str = "Figure") -> str:
    """Return a sentence for viewers that cannot draw: "Figure: TITLE (TRACES); Y over X". `kind` is
    the class of the widget; the published site recognises an Explorer by this first word."""
    layout = spec["layout"]
    words = f"{kind}: {layout.get('title', {}).get('text') or 'untitled'}"
    if names := [trace["name"] for trace in spec["data"] if trace.get("name")]:
        words += f" ({', '.join(names)})"
    titles = [layout.get(axis, {}).get("title") for axis in ("xaxis", "yaxis")]
    x, y = (title.get("text") if isinstance(title, Mapping) else title for title in titles)
    return f"{words}; {y or 'y'} over {x or 'x'}" if x or y else words
