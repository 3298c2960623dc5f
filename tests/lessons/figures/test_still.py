"""Static pictures of figures: what matplotlib draws is what the plotly spec says, in at most 60 kB,
and every viewer shows it.

The data are read back from matplotlib's artists. Only these tests catch a picture that shows other
numbers than the live figure, one that leaves out a part of it, or a viewer that shows none.
"""

import base64
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

from hosting.runner import without_widgets
from lessons.figures import still, ticks
from lessons.figures.explorer import Explorer
from lessons.figures.figure import PLOTLY_MIME, WIDGET_MIME, Figure, plain
from lpkit.errors import ConfigError
from tests import NOTEBOOKS

MIMES = {"image/svg+xml", "image/png"}
EXECUTED = sorted(path for folder in ("docs/executed", "build/executed")
                  for path in (Path(NOTEBOOKS).parent / folder).glob("*.ipynb"))


def artists(drawing, number: int) -> list:
    return [artist for axes in drawing.axes for artist in (*axes.lines, *axes.collections,
        *axes.patches) if artist.get_label() == f"trace {number}"]


def numbers(values, names=()) -> list[float]:
    """The coordinates of a trace's values: NaN for a gap, the place of a category."""
    return [math.nan if value is None else names.index(value) if isinstance(value, str)
            else float(value) for value in values]


def holds(spec: dict) -> None:
    """Every line, marker and bar of the picture is where the spec has it."""
    drawing, layout = still.draw(spec), spec["layout"]
    named: dict[str, list] = {}
    for trace in spec["data"]:
        for letter in "xy":
            axis = trace.get(f"{letter}axis", letter).removesuffix("1")
            seen = named.setdefault(axis, list(layout.get(still._long(axis),
                {}).get("categoryarray") or []))
            seen += dict.fromkeys(value for value in trace.get(letter) or []
                                  if isinstance(value, str) and value not in seen)
    for number, trace in enumerate(spec["data"]):
        kind = trace.get("type", "scatter")
        x, y = (numbers(trace.get(letter) or [],
                        named[trace.get(f"{letter}axis", letter).removesuffix("1")])
            for letter in "xy")
        log = [layout.get(still._long(trace.get(f"{letter}axis", letter)), {}).get("type") == "log"
               for letter in "xy"]
        x, y = ([math.nan if is_log and value <= 0 else value for value in values]
                for values, is_log in zip((x, y), log))
        trace_artists = artists(drawing, number)
        if kind == "bar" and layout.get("barmode") not in ("stack", "relative"):
            flat = trace.get("orientation") == "h"
            sizes = [value for value in (x if flat else y) if math.isfinite(value)]
            drawn = [patch.get_width() if flat else patch.get_height() for patch in trace_artists]
            assert drawn == pytest.approx(sizes, rel=1e-9), (layout["title"], number)
        if kind == "scatter" and not trace.get("stackgroup"):
            mode, points = trace.get("mode", "lines"), set(zip(x, y)) if x and y else set()
            lines = [artist for artist in trace_artists if hasattr(artist, "get_xydata")]
            if x and y and "lines" in mode and (trace.get("line") or {}).get("width", 2):
                [line] = lines
                np.testing.assert_array_equal(line.get_xydata(), np.array([x, y], dtype=float).T)
            if "markers" in mode and points:
                dots = [tuple(offset) for artist in trace_artists if hasattr(artist, "get_offsets")
                        for offset in np.ma.filled(artist.get_offsets(), math.nan)]
                whole = sorted(point for point in zip(x, y) if all(map(math.isfinite, point)))
                assert sorted(dot for dot in dots if all(map(math.isfinite, dot))) == whole


def sizes(bundle: dict) -> None:
    [mime] = MIMES & bundle.keys()
    content = bundle[mime].encode() if mime == "image/svg+xml" else base64.b64decode(bundle[mime])
    assert len(content) <= still.MOST
    if mime == "image/png":
        pixels = np.asarray(Image.open(io.BytesIO(content)).convert("L"))
    else:
        assert (bundle[mime].count("<svg") == 1 and "http://127" not in bundle[mime]
                and bundle[mime].rstrip().endswith("</svg>"))
        return
    assert pixels.std() > 1, "an empty picture"


SPECS = {
    "lines": {"data": [{"x": [0, 1, 2, 3], "y": [1, None, 4, 2], "name": "a", "mode": "lines"},
                       {"x": [0, 2], "y": [3, 1], "name": "b", "mode": "lines+markers",
                        "line": {"dash": "dot", "shape": "hv"}}],
              "layout": {"title": "Lines", "xaxis": {"title": {"text": "step"}},
                         "yaxis": {"title": {"text": "loss"}}}},
    "logarithms": {"data": [{"x": [1, 10, 1000], "y": [0, 1e-3, 1], "mode": "markers",
                             "marker": {"symbol": ["circle", "line-ns-open", "x"]}}],
                   "layout": {"xaxis": {"type": "log"}, "yaxis": {"type": "log"}}},
    "bars": {"data": [{"type": "bar", "orientation": "h", "y": ["weights", "state"],
                       "x": [2.5, None], "text": ["2.5", ""], "name": "a"},
                      {"type": "bar", "orientation": "h", "y": ["state", "batch"], "x": [5, -1],
                       "base": [1, 0], "name": "b"}],
             "layout": {"yaxis": {"autorange": "reversed"}}},
    "two panels": {"data": [{"x": [1, 2], "y": [1, 2]},
                            {"x": [5, 6], "y": [50_000, 60_000], "xaxis": "x2", "yaxis": "y2"}],
                   "layout": {"xaxis": {"domain": [0, 0.4]},
                              "xaxis2": {"domain": [0.6, 1], "anchor": "y2"},
                              "yaxis2": {"anchor": "x2"}}},
}


@pytest.mark.parametrize("name", SPECS)
def test_a_picture_shows_the_data_of_its_spec(name):
    spec = plain(SPECS[name])
    holds(spec)
    sizes(still.picture(spec))


@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_every_figure_of_an_executed_notebook_can_be_drawn(path):
    for spec in still.pictures_of(json.loads(path.read_text()), PLOTLY_MIME):
        spec = {"data": spec["data"], "layout": spec["layout"]}
        holds(spec)
        sizes(still.picture(spec))


def test_bars_stack_on_one_another_and_stand_beside_one_another():
    bars = [{"type": "bar", "x": ["a", "b"], "y": [1, 2]},
            {"type": "bar", "x": ["a", "b"], "y": [10, -20]},
            {"type": "bar", "x": ["a"], "y": [100]}]
    stacked = still.draw(plain({"data": bars, "layout": {"barmode": "stack"}}))
    feet = [[patch.get_y() for patch in artists(stacked, number)] for number in range(3)]
    assert feet == [[0, 0], [1, 0], [11]], "values below zero stack downwards"
    grouped = still.draw(plain({"data": bars, "layout": {"barmode": "group", "bargap": 0.1}}))
    places = [[round(patch.get_x() + patch.get_width() / 2, 6)
               for patch in artists(grouped, number)] for number in range(3)]
    assert places == [[-0.3, 0.7], [0, 1], [0.3]]
    areas = [{"x": [0, 1, 2], "y": y, "stackgroup": "rows", "fillcolor": "#004488", "mode": "lines"}
             for y in ([1, 2, 3], [10, 10, 0])]
    drawing = still.draw(plain({"data": areas}))
    lower, upper = (line.get_ydata().tolist() for number in range(2)
                    for line in artists(drawing, number) if hasattr(line, "get_xydata"))
    assert lower == [1, 2, 3] and upper == [11, 12, 3], "an area lies on the sum below it"


def test_the_first_axes_may_be_written_with_their_number():
    """plotly takes xaxis1 and x1 for xaxis and x: two panels beside one another, logarithmic."""
    log = {"type": "log", "range": [0, 4]}
    spec = plain({"data": [{"x": [1, 100], "y": [1, 10], "xaxis": f"x{i}", "yaxis": f"y{i}"}
                           for i in (1, 2)],
                  "layout": {f"{letter}axis{i}": {**log, "anchor": f"{other}{i}",
                      **({"domain": domain} if letter == "x" else {})}
                             for letter, other in ("xy", "yx") for i, domain in ((1, [0, 0.45]),
                                 (2, [0.55, 1]))}})
    left, right, _ = still.draw(spec).axes      # the third is the page, for words
    assert ({axes.get_xscale() for axes in (left, right)}
            == {axes.get_yscale() for axes in (left, right)} == {"log"})
    assert left.get_position().x1 < right.get_position().x0


def test_a_heatmap_has_the_colour_of_its_value_at_its_place():
    z = [[0, 30, None], [60, 15, 45]]
    spec = plain({"data": [{"type": "heatmap", "x": ["a", "b", "c"], "y": ["first", "second"],
                            "z": z, "zmin": 0, "zmax": 60}],
                  "layout": {"yaxis": {"autorange": "reversed"}}})
    drawing = still.draw(spec)
    [mesh] = artists(drawing, 0)
    np.testing.assert_array_equal(np.ma.filled(mesh.get_array().astype(float), np.nan),
                                  np.array(z, dtype=float))
    assert mesh.get_clim() == (0, 60) and mesh.axes.get_ylim() == (1.5, -0.5)
    assert [label.get_text() for label in mesh.axes.get_yticklabels()] == ["first", "second"]


@pytest.mark.parametrize(("letter", "axis", "values", "wanted"), [
    ("x", {"type": "log"}, [1, 1000], (1, 1000)),
    ("x", {"range": [2, -1]}, [0, 1], (2, -1)),
    ("x", {"type": "log", "range": [-1, 2]}, [1], (0.1, 100)),
    ("y", {"rangemode": "tozero"}, [9, 18], (0, 19)),
    ("y", {}, [0, 18], (-1, 19)),
])
def test_an_axis_reaches_as_far_as_plotlys(letter, axis, values, wanted):
    other = "y" if letter == "x" else "x"
    spec = plain({"data": [{letter: values, other: list(range(len(values))), "mode": "lines"}],
                  "layout": {f"{letter}axis": axis}})
    axes = still.draw(spec).axes[0]
    assert (axes.get_xlim() if letter == "x" else axes.get_ylim()) == pytest.approx(wanted)


@pytest.mark.parametrize(("axis", "ends", "wanted"), [
    ({}, (0, 10), ["0", "2", "4", "6", "8", "10"]),
    ({}, (0, 60_000), ["0", "10k", "20k", "30k", "40k", "50k", "60k"]),
    ({"exponentformat": "SI", "ticksuffix": "B"}, (0, 2e9), ["0B", "0.5GB", "1GB", "1.5GB", "2GB"]),
    ({"type": "log", "dtick": 1, "exponentformat": "power"}, (1e-4, 10),
     ["10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "1", "10"]),
    ({"type": "log", "dtick": "D2", "exponentformat": "SI"}, (50, 2000),
     ["50", "100", "200", "500", "1000", "2000"]),
    ({"tickformat": ".0%"}, (0, 0.4), ["0%", "10%", "20%", "30%", "40%"]),
    ({"tickvals": [1, 5], "ticktext": ["one", "five"]}, (0, 4), ["one"]),
    ({}, (-0.1, 0.1), ["\N{MINUS SIGN}0.1", "\N{MINUS SIGN}0.05", "0", "0.05", "0.1"]),
])
def test_ticks_are_written_in_full(axis, ends, wanted):
    assert ticks.words(axis, ticks.positions(axis, "y", *ends, 200)) == wanted


@pytest.mark.parametrize(("form", "value", "text"),
                         [(".1f", 2.25, "2.2"), (".0%", 0.256, "26%"), (".2~%", 0.5, "50%"),
                          (",d", 12345.4, "12,345"),
                                                      (".3~s", 1.5e6, "1.5M"),
                          ("~g", -0.5, "\N{MINUS SIGN}0.5")])
def test_numbers_are_written_as_d3_does(form, value, text):
    assert ticks.d3(form, value) == text
    with pytest.raises(ConfigError, match="cannot write numbers"):
        ticks.d3("$" + form, value)


@pytest.mark.parametrize(("spec", "word"), [
    ({"data": [{"type": "pie", "values": [1]}]}, "trace type 'pie'"),
    ({"data": [{"y": [1], "selectedpoints": [0]}]}, "'selectedpoints' of a scatter"),
    ({"data": [{"y": [1]}],
      "layout": {"shapes": [{"type": "path", "path": "M0,0", "x0": 0, "x1": 1, "y0": 0, "y1": 1}]}},
        "'path' of a shape"),
    ({"data": [{"y": [1], "marker": {"color": "no colour"}, "mode": "markers"}]},
     "cannot be drawn"),
])
def test_what_cannot_be_drawn_is_named_and_never_left_out(spec, word):
    with pytest.raises(ConfigError, match=word):
        still.picture(plain(spec))


def test_a_figure_that_has_no_still_says_so_and_is_shown():
    bundle = Figure({"data": [{"type": "pie", "values": [1, 2]}]})._repr_mimebundle_()
    assert not MIMES & bundle.keys() and PLOTLY_MIME in bundle
    assert ("It has no static picture: a static picture cannot draw the trace type 'pie'"
            in bundle["text/plain"])


def test_words_are_inside_the_picture_and_the_legend_is_beside_the_axes():
    lines = [{"x": [0, 1], "y": [i, i], "name": f"a name of some length, number {i}"}
             for i in range(9)]
    spec = plain({"data": lines, "layout": {"title": "A title that is far too long for one line of "
                                                     "this picture, " * 3,
                                            "yaxis": {"tickvals": [0, 1],
                                                      "ticktext": ["a very long name of a "
                                                          "row<br>in two lines", "one"]}}})
    drawing = still.draw(spec)
    renderer = still._Drawing._renderer(type("", (), {"figure": drawing}))
    [legend] = drawing.legends
    boxes = [axes.get_tightbbox(renderer) for axes in drawing.axes if axes.get_label() != "paper"]
    boxes += ([text.get_window_extent(renderer) for text in drawing.texts]
              + [legend.get_window_extent(renderer)])
    for box in boxes:
        assert (box.x0 >= 0 and box.y0 >= 0 and box.x1 <= drawing.bbox.width
                and box.y1 <= drawing.bbox.height)
    for axes in drawing.axes:
        assert legend.get_window_extent(renderer).y0 >= axes.get_window_extent(renderer).y1
    assert drawing.texts[0].get_window_extent(renderer).y0 >= legend.get_window_extent(renderer).y1


def test_nothing_of_matplotlib_is_imported_or_changed_before_a_figure_is_shown():
    code = ("import sys; from lessons.figures.figure import Figure; figure = Figure({'data': "
            "[{'y': [1, 2]}]}); assert 'matplotlib' not in sys.modules; "
            "figure.show({'data': [{'y': [3]}]}); assert 'matplotlib' not in sys.modules; "
            "figure._repr_mimebundle_(); import matplotlib; "
            "assert matplotlib.rcParams['svg.hashsalt'] is None and 'matplotlib.pyplot' not in "
            "sys.modules; import json; print(json.dumps(figure._repr_mimebundle_()))")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True,
                          text=True, cwd=NOTEBOOKS)
    assert done.stderr == ""
    here = Figure({"data": [{"y": [3]}]})._repr_mimebundle_()
    assert json.loads(done.stdout)["image/svg+xml"] == here["image/svg+xml"], "the same bytes"


def test_a_slider_redraws_no_still(monkeypatch):
    drawn = []
    monkeypatch.setattr("lessons.figures.figure.picture",
                        lambda spec: drawn.append(spec["data"][0]["y"]) or {})
    explorer = Explorer(lambda n: {"data": [{"y": [n]}]}, n=[1, 2, 3])
    explorer._repr_mimebundle_()
    for n in (2, 3, 1, 2):
        explorer.controls["n"].value = n
    assert drawn == [[1]], "the still of the state at the start, and no other"
    explorer._ipython_display_()
    explorer.refresh_output()
    assert drawn == [[1], [2], [2]]


def test_nbconvert_shows_the_picture_and_the_site_the_live_figure():
    from nbconvert import HTMLExporter

    bundle = Figure(plain(SPECS["lines"]))._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", bundle)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("figure", outputs=[output])])
    for notebook in (book, nbformat.from_dict(without_widgets(json.loads(json.dumps(book))))):
        page, _ = HTMLExporter().from_notebook_node(notebook)
        pictures = re.findall(r'<img[^>]*src="data:image/svg\+xml;base64,([^"]+)"', page)
        assert [base64.b64decode(picture).decode() for picture in pictures] == [
            bundle["image/svg+xml"]]
    assert WIDGET_MIME in bundle and PLOTLY_MIME in bundle


def test_a_gap_among_marks_warns_of_nothing():
    """Warnings are errors here; in a notebook they are red, below a figure with one guess."""
    marks = {"x": [1, None, 3], "y": [0, 1, 2], "mode": "markers",
             "marker": {"opacity": [1, 1, 0.5]}}
    assert still._png(still.draw(plain({"data": [marks]})), 72, "marks")
