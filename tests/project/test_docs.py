"""The site: built without a warning, figures in it, nothing loaded from another host. With one
small notebook.

Only these tests catch: a page that Sphinx cannot build, that loads from another host or is older
than its numbers, a figure or a formula that is not drawn, and a notebook that is published though
its claim fails.
"""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lpkit.errors import ConfigError
from tests import NOTEBOOKS
from tests.pages import recipes

DOCS = Path(__file__).parents[2] / "docs"
CLAIM = "from lpkit import begin\nbegin()\nfrom lessons.claims import claim\n"
CELLS = {
    "parameters": 'from typing import Literal\n\ntier: Literal["smoke", "cpu", "gpu"] = "cpu"  # '
                 'how large\nsteps: int = 3  # updates',
    "imports": "import ipywidgets\nimport plotly.graph_objects as go\nfrom IPython.display import "
              "HTML\n\nfrom lpkit.tables import html_table\n"
              "from lessons.figures.explorer import Explorer\nfrom lessons.figures.figure import "
              "Figure",
    "kit": "Figure({'data': [{'y': [1, 3, 2], 'name': '</script><b>'}], 'layout': {'title': "
          "{'text': 'the kit draws'}}})",
    "plotly": "Figure(go.Figure(go.Scatter(y=list(range(steps)))))",
    "explorer": "Explorer(lambda width: {'data': [{'y': [width, 2], 'name': f'line {n}'} for n in "
               "range(8)],\n"
               "    'layout': {'title': 'a title that is longer than the page of a phone is wide, "
               "and then some'}}, width=[1, 2])",
    "table": "HTML(html_table(['a head of many words'] * 6, [['unbreakable_' * 3] * 6], "
            "caption='numbers ' * 20))",
    "control": "ipywidgets.IntSlider(description='width')",
    "claim": CLAIM + "with claim('Three steps are three'):\n    "
            "assert steps == 3",
}


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load("build")


def write(path: Path, cells: dict[str, str] = CELLS) -> Path:
    book = new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3",
        "language": "python"}})
    book.cells = [new_markdown_cell("# A small notebook\n\n## Predict\n\nWith `B * T` tokens for "
                                   "$5:\n\n$$\n\\frac{1}{2} B T\n$$\n\nand $6, from "
                                   f"https://elsewhere.example/{'a' * 80}.pdf and "
                                   f"`{'name_' * 20}`.\n\n## `{'heading_' * 6}`"),
                 *(new_code_cell(source, metadata={"tags": [tag]})
                   for tag, source in cells.items())]
    nbformat.write(book, path)
    return path


FETCHED = {"script": ["src"], "img": ["src", "srcset"], "link": ["href"], "iframe": ["src"],
           "source": ["src"],
           "video": ["src"], "audio": ["src"], "object": ["data"], "embed": ["src"],
           "image": ["href"], "use": ["href"]}


class Loads(HTMLParser):
    """What a browser would fetch by itself."""

    def __init__(self, text: str):
        super().__init__()
        self.urls: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "link" and attrs.get("rel") in ("canonical", "author", "license"):
            return
        self.urls += [attrs[key] for key in FETCHED.get(tag, []) if attrs.get(key)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("docs")
    (root / "lessons").symlink_to(Path(NOTEBOOKS, "lessons"))
    build.execute([write(root / "05_small.ipynb")], root / "executed")
    build.assemble(DOCS, [root / "executed" / "05_small.ipynb"], root / "source")
    why = build.planner(root / "source")
    assert not why or "npm" in why      # tests/predict/test_planner.py skips with it
    build.sphinx(root / "source", root / "html")      # with warnings as errors
    return root / "html"


@pytest.mark.slow
def test_every_figure_is_drawn(site):
    text = (site / "notebooks" / "05_small.html").read_text()
    names = re.findall(r'<div class="lpkit-figure" id="(.+?)"', text)
    specs = dict(re.findall(r'<script type="application/json" id="(.+?)-spec">(.+?)</script>', text,
                            re.DOTALL))
    assert len(names) == 3 and list(specs) == names
    assert json.loads(specs[names[0]])["data"][0] == {"y": [1, 3, 2], "name": "</script><b>"}
    notes = [text.index("Controls work in JupyterLab")]
    notes.append(text.index("Controls work in JupyterLab", notes[0] + 1))
    assert text.count("Controls work in JupyterLab") == 2
    assert (text.index(f'id="{names[1]}"') < notes[0] < text.index(f'id="{names[2]}"')
            < notes[1]), "where the sliders were"
    assert re.search(r'<script src="\.\./_static/plotly\.min\.js[^"]*">', text)
    assert "plotly.min.js" not in (site / "notation.html").read_text(), (
        "5 MB only where a figure needs them")
    assert (site / "_static" / "plotly.min.js").stat().st_size > 1e6


@pytest.mark.slow
def test_formulas_are_drawn_and_need_no_script(site):
    text = (site / "notebooks" / "05_small.html").read_text()
    drawing, = re.findall(r'<div class="lpkit-formula"[^>]+>(.+?)</div>', text, re.DOTALL)
    assert (drawing.startswith("<svg") and "currentColor" in drawing and "$$" not in text
            and "mathjax" not in text.lower())
    assert ('aria-label="\\frac{1}{2} B T"' in text and "tokens for $5:" in text
            and "and $6," in text)


FORMULAS = [(path.stem, formula) for path in sorted((DOCS.parent / "notebooks").glob("*.ipynb"))
            for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"
            for formula in build.FORMULA.findall(cell.source)]


KNOWN = {*"underbrace text frac tfrac left right max ge le int sum log ln sqrt sigma".split(),
         *"lfloor rfloor min Phi qquad cdot approx times leftarrow top alpha beta gamma".split(),
         "quad", "varepsilon", "lceil", "rceil", "lambda", "cos", "pi", "Delta", "subseteq"}


def test_every_formula_of_the_course_can_be_typeset():
    """What the library does not know, it would draw as its name."""
    assert len(FORMULAS) > 20
    for stem, latex in FORMULAS:
        drawing = build.typeset(latex)
        assert drawing.count("<path") > 3, (stem, latex)
        assert not re.search(r"<text|NaN|&lt;m", drawing.partition("<svg")[2]), (stem, latex)
        assert set(re.findall(r"\\([a-zA-Z]+)", latex)) <= KNOWN, (
            stem, latex, "look at it on the site, and then name it here")


@pytest.mark.parametrize("shown", ["FigureWidget({'data': []})",
                                   "VBox(children=(IntSlider(), Figure(spec={})))"])
def test_a_figure_that_would_vanish_is_refused(shown):
    output = nbformat.v4.new_output("display_data",
                                    {"text/plain": shown, build.WIDGET: {"model_id": "a"}})
    with pytest.raises(ConfigError, match="stores no picture"):
        build.drawn(output, "figure-1")


def test_a_figure_without_a_static_picture_is_refused():
    """So that the figures of the course, all of which the site draws, have one."""
    from lessons.figures.figure import Figure

    output = nbformat.v4.new_output("display_data",
                                    Figure({"data": [{"type": "pie",
                                                      "values": [1]}]})._repr_mimebundle_())
    with pytest.raises(ConfigError, match=r"figure-1: .* cannot draw the trace type 'pie'"):
        build.drawn(output, "figure-1")


@pytest.mark.slow
def test_nothing_comes_from_another_host(site):
    pages = sorted(site.rglob("*.html"))
    assert {"index.html", "architecture.html", "notation.html",
            "log.html"} <= {page.name for page in pages}
    for page in pages:
        outside = [url for url in Loads(page.read_text()).urls if re.match(r"(https?:)?//", url)]
        assert not outside, f"{page.name} loads {outside}"
    for sheet in site.rglob("*.css"):
        outside = re.findall(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)",
                             sheet.read_text())
        assert not outside, f"{sheet.name} loads {outside}"


@pytest.mark.slow
@pytest.mark.browser
def test_on_a_phone_figures_fit_tables_scroll_and_the_page_does_not(site, context):
    with context.browser.new_context(viewport={"width": 390, "height": 844}) as phone:
        page, errors = phone.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        for name in ("index", "notebooks", "commands", "claims", "techniques", "recipes/nvfp4",
                     "teach/syllabus", "teach/10", "notebooks/05_small"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == 390, name
        page.wait_for_function("[...document.querySelectorAll('.lpkit-figure')].every(f => "
                               "f.querySelector('.main-svg'))")
        assert page.evaluate("document.documentElement.scrollWidth") == 390 and not errors
        box = ("e => [e.clientWidth <= 390, e.scrollWidth > e.clientWidth, "
               "getComputedStyle(e).overflowX]")
        assert page.locator(".output:has(table)").evaluate(box) == [True, True, "auto"]
        fits = """e => { const drawn = e.querySelector('.main-svg').getBoundingClientRect();
            return [Math.abs(drawn.width - e.clientWidth) < 2,
                Math.abs(drawn.height - e.clientHeight) < 2] }"""
        assert ([figure.evaluate(fits) for figure in page.locator(".lpkit-box").all()]
                == [[True, True]] * 3)
        titles = page.locator(".lpkit-title").all()
        assert (titles[-1].inner_text() == "a title that is longer than the page of a phone is "
                                           "wide, and then some")
        assert all(0 <= title.bounding_box()["x"]
                   and title.evaluate("e => e.getBoundingClientRect().right <= 390")
                   for title in titles)
        assert page.locator(".modebar").count() == 0
        legend = page.locator(".lpkit-figure").last.evaluate("""figure => ['.legend',
            '.nsewdrag'].map(part =>
            figure.querySelector(part).getBoundingClientRect()).map(r => [r.left, r.top, r.right,
                r.bottom])""")
        assert legend[0][3] <= legend[1][1], "the legend lies above the axes"


@pytest.mark.slow
def test_the_first_page_shows_the_way(site):
    text = (site / "index.html").read_text()
    assert ('href="notebooks/05_small.html"' in text
            and text.index("planner.png") < text.index("Who it is for")
            < text.index("If you have two hours"))
    assert text.count("films/") == 0 and {"07.gif", "12.gif",
        "planner.png"} <= {path.name for path in (site / "_images").iterdir()}
    assert re.search(r"All of them ran in \d+ minutes", text)
    assert ('href="planner/index.html"' in text) == (site / "planner" / "lpkit.zip").exists()
    rows = build.way([site.parent / "executed" / "05_small.ipynb"])
    assert "| 05 | [05_small](notebooks/05_small.ipynb) |" in rows, (
        "a notebook that the README does not know")


@pytest.mark.slow
def test_pages_describe_themselves_and_notebooks_can_be_downloaded(site):
    text = (site / "gpu.html").read_text()
    assert (re.search(r'<meta name="description" content="\S', text)
            and '<meta property="og:title" content="On a GPU">' in text)
    assert ("og:image" in text) == bool(build.address()), "a preview needs the site's address"
    assert 'href="../download/05_small.ipynb"' in (site / "notebooks" / "05_small.html").read_text()


def test_a_recorded_copy_is_used_until_its_notebook_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path)
    executed = tmp_path / "executed"
    executed.mkdir()
    book = new_notebook(cells=[new_code_cell("steps = 3", metadata={"tags": ["parameters"]}),
                               new_code_cell("print(steps)")])
    nbformat.write(book, tmp_path / "05_small.ipynb")
    book.cells.insert(1, new_code_cell("steps = 5", metadata={"tags": [build.INJECTED]}))
    book.cells[2].outputs = [new_output("display_data",
        {build.PLOTLY: {"data": []}, "image/png": "AAAA", "text/plain": "a figure"})]
    nbformat.write(book, executed / "05_small.ipynb")
    (executed / "05_small.json").write_text('{"status": "done"}')
    build.record(executed, tmp_path / "executed.zip")
    written = (tmp_path / "executed.zip").read_bytes()
    build.record(executed, tmp_path / "executed.zip")
    assert (tmp_path / "executed.zip").read_bytes() == written, "the same bytes for the same copies"
    shutil.rmtree(executed)
    build.unpack(tmp_path / "executed.zip", executed)
    assert not build.changed(tmp_path / "05_small.ipynb", executed / "05_small.ipynb")
    [output] = nbformat.read(executed / "05_small.ipynb", as_version=4).cells[2].outputs
    assert ({*output.data} == {build.PLOTLY, "text/plain"}
            and (executed / "05_small.json").read_text() == '{"status": "done"}')
    book = nbformat.read(tmp_path / "05_small.ipynb", as_version=4)
    book.cells[1].source = "print(steps + 1)"
    nbformat.write(book, tmp_path / "05_small.ipynb")
    assert build.changed(tmp_path / "05_small.ipynb", executed / "05_small.ipynb")


def test_the_workflow_publishes_only_under_the_projects_own_address():
    workflow = yaml.safe_load((DOCS.parent / ".github" / "workflows" / "site.yml").read_text())
    assert (workflow["permissions"] == {"contents": "read"}
            and workflow["jobs"]["publish"]["if"] == "needs.address.outputs.ours == 'true'")
    [script] = [step["run"] for step in workflow["jobs"]["address"]["steps"] if "run" in step]
    for repository, expected in (("https://github.com/somebody/else", "ours=false\n"),
                                 ("https://github.com/a/b",
                                  f"ours={str(address_is('a/b')).lower()}\n")):
        out = subprocess.run(["bash", "-c", script.replace('>>"$GITHUB_OUTPUT"', "")],
                             cwd=DOCS.parent, env=os.environ | {"HERE": repository},
                             capture_output=True, text=True, check=True).stdout
        assert out == expected


def address_is(repository: str) -> bool:
    urls = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"].get("urls", {})
    return urls.get("Repository") == f"https://github.com/{repository}"


def test_links_to_notebooks_are_those_of_the_site():
    text = ("[05_small](../notebooks/05_small.ipynb), Predict; [06](../notebooks/06.ipynb) and "
            "[this](https://a.example)")
    assert (build.linked(text, [Path("executed/05_small.ipynb")])
            == "[05_small](notebooks/05_small.ipynb), Predict; `06` and [this](https://a.example)")
    deeper = build.linked("[05_small](../../notebooks/05_small.ipynb), "
                          "[06](../../notebooks/06.ipynb)", [Path("executed/05_small.ipynb")])
    assert deeper == "[05_small](../notebooks/05_small.ipynb), `06`"


@pytest.mark.slow
def test_claims_are_listed_and_commands_show_their_options(site):
    text = (site / "notebooks.html").read_text()
    assert "Three steps are three" in text and 'href="notebooks/05_small.html"' in text
    text = (site / "commands.html").read_text()
    assert "usage: lpkit notebook" in text and "--on processes=N" in text
    text = (site / "index.html").read_text()
    assert text.count("search-button-field") == 1
    for above, name in build.BELOW.items():     # what the navigation does not show
        assert f'href="{name}.html"' in (site / f"{above}.html").read_text()


def test_the_page_of_commands_names_every_key(tmp_path, capsys):
    from lpkit.cli import main

    cells = {"parameters": CELLS["parameters"],
             "claim": CLAIM + "with claim('Three'):\n    assert "
                      "steps == 3"}
    page = (DOCS / "commands.md").read_text()
    for words in (["predict", "gpt2-124m"], ["notebook", str(write(tmp_path / "05_a.ipynb", cells)),
            "--out",
                                             str(tmp_path / "out")]):
        assert main([*words, "--json"]) == 0
        missing = [key for key in json.loads(capsys.readouterr().out) if f"`{key}`" not in page]
        assert not missing, f"docs/commands.md does not name {missing} of `lpkit {words[0]}`"


def test_no_page_for_a_notebook_that_does_not_hold(tmp_path):
    cells = {"parameters": CELLS["parameters"],
             "claim": CLAIM + "with claim('Four'):\n    assert "
                      "steps == 4, 'not four'"}
    with pytest.raises(ConfigError, match="05_bad, cell 2: not four"):
        build.execute([write(tmp_path / "05_bad.ipynb", cells)], tmp_path / "executed")


def test_a_picture_that_is_shown_is_drawn_from_its_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    picture = load("make_picture")
    picture.draw(json.loads(picture.NUMBERS.read_text()), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == picture.PICTURE.read_bytes()


def test_the_pages_of_recipes_are_up_to_date():
    """`python -m tests.pages recipes`"""
    files = recipes.files()
    for place, content in files.items():
        assert ((DOCS / place).read_text(encoding="utf-8")
                == content), f"docs/{place}: run python -m tests.pages recipes"
    kept = {f"recipes/{path.name}" for path in (DOCS / "recipes").iterdir()}
    assert kept == files.keys() - {"recipes.md"}
    listed = re.findall(r"^recipes/(\S+)$", (DOCS / "recipes.md").read_text(), re.MULTILINE)
    assert listed == list(recipes.RECIPES)


def test_pictures_of_recipes_show_what_was_measured():
    """The dB of a picture is that of lesson 04's own measure; colours keep their order in grey."""
    from lessons import l04_scaling_recipes as outliers
    from lpkit.techniques.recipes import RECIPES

    for name in outliers.NAMES:
        want = outliers.measured_db(recipes.with_outlier(), RECIPES[name].y[0], at=recipes.AT)
        svg = (DOCS / "recipes" / f"{name}.svg").read_text()
        assert (f">{want:.1f} dB for the others<" in svg
                and "http" not in svg.replace("http://www.w3.org/2000/svg", ""))
        assert len(svg) < 60_000
    grey = lambda colour: sum(w * int(colour[k:k + 2], 16)
                              for w, k in ((0.299, 1), (0.587, 3), (0.114, 5)))
    for colours in ([colour for _, colour in recipes.KINDS], recipes.RAMP):
        light = [grey(colour) for colour in colours]
        assert all(a - b > 20 for a, b in pairwise(light)), light


def test_a_recorded_loss_is_quoted_with_where_it_comes_from(tmp_path):
    assert recipes.measured("mxfp8", tmp_path) == []
    case = {"case": "mxfp8", "peer": "bf16", "ratio": 1.0023, "quartiles": [1.001, 1.003],
            "rounds": 3,
            "verdict": "met (at most 1.01)"}
    record = {"device": "AMD EPYC", "versions": {"torch": "2.13.0"}, "commit": "abc",
              "date": "2026-11-21T00:00:00+00:00",
              "steps": 300, "losses": {"bf16": [2.0, 2.1, 2.2], "mxfp8": [2.0, 2.1, 2.2]}, **case,
              "cases": [case]}
    (tmp_path / "recipe-losses-amd-epyc.json").write_text(json.dumps(record))
    (line,) = [line for line in recipes.page("mxfp8", tmp_path).splitlines()
               if "times the loss" in line]
    assert ("1.0023 times the loss of bf16" in line and "3 seeds" in line
            and "AMD EPYC, torch 2.13.0, commit abc" in line)
    assert "2.0000, 2.1000, 2.2000 nats per token with 3 seeds" in recipes.page("bf16", tmp_path)
    assert "measured" not in recipes.page("fp16", tmp_path)


def test_what_a_page_imports_is_there(monkeypatch):
    """What moved in the kit moved on its pages, too."""
    monkeypatch.syspath_prepend(str(DOCS.parent / "notebooks"))
    pages = [*(path for path in DOCS.rglob("*.md") if "_build" not in path.parts),
             DOCS.parent / "README.md"]
    imports = [(page.name, *parts) for page in pages for block in re.findall(r"```python\n(.*?)```",
        page.read_text(), re.S)
               for parts in re.findall(r"^from ((?:lpkit|lessons)[\w.]*) import ([\w, ]+)", block,
                                       re.M)]
    assert len(imports) > 9
    for page, module, names in imports:
        for name in re.findall(r"\w+", names):
            assert (hasattr(importlib.import_module(module), name)
                    or importlib.util.find_spec(f"{module}.{name}")), (page, module, name)
