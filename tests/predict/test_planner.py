"""The planner: the browser's numbers are the command line's; nothing comes from elsewhere; what an
address holds is data."""

import importlib.util
import json
import math
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest

from lpkit.cli import main
from lpkit.errors import ConfigError
from lpkit.predict import predict
from lpkit.predict.plan import plan
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.time import step_time
from lpkit.presets import PRESETS, preset
from lpkit.techniques import lessons
from lpkit.techniques.machines import CATALOGUE
from tests.attack import patience
from tests.bench import planner as bench
from tests.bench.browser import static
from tests.hosting.served import HERE

DOCS = Path(__file__).parents[2] / "docs"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


answer, make, build = load(DOCS / "planner" / "answer.py"), load(DOCS / "make_planner.py"), load(
    DOCS / "build.py")
USUAL = {control["name"]: control["value"] for group in answer.choices()
         for control in group["controls"]}
RUNS = [
    {},
    {"model": "gpt2-124m", "machine": "rtx-4090", "devices": 1, "micro_batch": 8, "billions": 10},
    {"model": "llama-70b", "machine": "h200", "devices": 256, "tensor": 8, "recompute": "selective",
     "precision": "mxfp8", "billions": 15_000},
    {"model": "llama-405b", "devices": 16_384, "batch": 2048, "tensor": 8, "pipeline": 16,
     "interleave": 8, "zero": 1},
    {"model": "llama-8b", "machine": "b200", "length": 131_072, "context": 16, "devices": 128,
     "batch": 32, "precision": "nvfp4", "price": 4.25},
    {"model": "dense-1t", "machine": "gb200", "devices": 4096, "batch": 2048, "pipeline": 16,
     "tensor": 8, "precision": "bf16-master"},
    {"model": "llama-1b", "machine": "a100-40", "devices": 48, "batch": 768, "data": 6,
     "optimizer": "lion", "recompute": "block", "price": 0},
    {"model": "cpu-3m", "machine": "t4", "devices": 1, "precision": "fp16", "billions": 1,
     "micro_batch": 4, "batch": 16},
    {"model": "llama-8b", "layers": 28, "width": 3072, "heads": 24, "kv_heads": 4,
     "mlp_width": 8192, "vocab": 151_936, "length": 4096},
    {"model": "gpt2-124m", "machine": "a100-40", "devices": 8, "layers": 24, "width": 2048,
     "heads": 16},
]
REFUSED = [
    ({"model": "llama-9b"}, "did you mean 'llama-8b'"),
    ({"machine": "h1000"}, "there is no machine 'h1000'"),
    ({"tensor": 3}, "tensor may be 2 or 4"),
    ({"devices": 100, "tensor": 8}, "devices=100 does not split over tensor=8 x pipeline=1 x "
                                    "context=1 x replicas=1; use 96 or 104 devices"),
    ({"devices": 1, "tensor": 2}, "devices=1 does not split over tensor=2 x pipeline=1 x context=1 "
                                  "x replicas=1; use 2 devices"),
    # NVFP4 on an H100 was refused; a run emulates it, and so does the planner
    ({"machine": "t4", "precision": "bf16"}, "NVIDIA T4 has no bf16"),
    ({"zero": 4}, "there is no ZeRO stage 4"),
    ({"micro_batch": 3}, "do not split into micro-batches of 3; 2 is the nearest below"),
    ({"devices": None}, "devices must be a whole number, got None"),
    ({"devices": 1.5}, "devices must be a whole number, got 1.5"),
    ({"billions": -1}, "billions must be"),
    ({"batch": 513}, "does not split over"),
    ({"layers": 10**15}, "layers must be from 1 to 10,000"),
    ({"vocab": 2**24 + 1}, "vocab must be from 1 to 16,777,216"),
    ({"width": 100, "heads": 33}, "model.width=100 is not a multiple of model.heads=33"),
    ({"kv_heads": 5}, "kv_heads may be"),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.get("model", "usual"))
def test_the_command_beside_an_answer_gives_the_same_numbers(run, capsys):
    answered = json.loads(answer.answer(json.dumps(USUAL | run)))
    assert main([*shlex.split(answered["command"])[1:], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    different = {key for key, value in answered["prediction"].items() if printed[key] != value}
    assert different <= {"assumptions"} and printed["step_seconds"] > 0
    tokens = (printed["assumptions"]["steps"] * printed["tokens_per_second"]
              * printed["step_seconds"])
    assert tokens == pytest.approx(1e9 * (USUAL | run)["billions"], rel=0.01)


@pytest.mark.slow
def test_plan_predict_planner_and_notebook_09_agree_on_pipelines():
    """200 layouts with pipeline stages, drawn from plans: all four have the same bytes and
    seconds."""
    draw, asked, chunked = random.Random(49), 0, 0
    while asked < 200:
        model, machine = draw.choice(list(PRESETS)), draw.choice(list(CATALOGUE))
        devices, batch = 2**draw.randint(2, 12), 2**draw.randint(4, 11)
        precision = draw.choice([name for name in PRECISIONS if name != "fp32"])
        config = preset(model).replace({"global_batch": batch, "grad_accum_steps": 1})
        try:
            options = plan(config, 1e11, machine, devices=devices, precisions=[precision]).options
        except ConfigError:     # the machine cannot multiply this dtype
            continue
        for option in [option for option in options if option.layout.pipeline > 1][:4]:
            at, how = option.layout, {"precision": precision, "recompute": option.recompute}
            base = replace(option.base, parallel=at)
            predicted = predict(base, machine, **how)
            axes = {name: getattr(at, name)
                    for name in ("tensor", "pipeline", "interleave", "context", "data", "zero")}
            page = json.loads(answer.answer(json.dumps(USUAL | axes | how | {
                "model": model, "machine": machine, "devices": at.devices, "batch": batch,
                "length": config.model.context, "micro_batch": batch // base.grad_accum_steps})))
            page, step = page["prediction"], step_time(base, machine, at, **how)
            assert (option.memory.peak_bytes == predicted.peak_bytes == page["bytes"]["peak_bytes"]
                    and option.time.step_seconds == predicted.step_seconds == page["step_seconds"]
                    == step.step_seconds and str(at) == page["assumptions"]["layout"]), (model, at)
            asked, chunked = asked + 1, chunked + (at.interleave > 1)
    assert chunked > 30


@pytest.mark.parametrize("run, sentence", REFUSED,
                         ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_is_a_sentence(run, sentence):
    answered = json.loads(answer.answer(json.dumps(USUAL | run)))
    assert answered.keys() == {"error"} and sentence in answered["error"]


def test_every_control_can_be_set_to_all_that_it_offers():
    for group in answer.choices():
        for control in group["controls"]:
            options = [key for key, _ in control.get("options", [])] or control.get("steps", [None])
            assert control["value"] in options
            fine = [value for value in options
                    if "error" not in json.loads(
                        answer.answer(json.dumps(USUAL | {control["name"]: value})))]
            assert control["value"] in fine


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("planner")
    try:
        bench.make(root)
    except ConfigError as error:
        if re.search("npm, which is not on PATH|npm could not fetch", str(error)):
            pytest.skip(str(error))
        raise
    return root


def test_the_page_takes_the_formulas_and_nothing_else(folder):
    with zipfile.ZipFile(folder / "lpkit.zip") as file:
        names = set(file.namelist())
    rooms = {name.split("/")[1].removesuffix(".py") for name in names if name.startswith("lpkit/")}
    assert {"answer.py", "lpkit/predict/time.py", "lpkit/techniques/machines.py"} <= names
    rows = {f"notebooks/{name.replace('.', '/')}.py" for name in lessons.package().modules()}
    assert {"notebooks/lessons/rows/__init__.py", *rows} <= names
    assert rooms <= {"__init__", "config", "errors", "files", "predict", "presets", "tables",
                     "techniques", "values"}
    assert (folder / "lpkit.zip").stat().st_size < 300_000
    assert {path.name for path in folder.iterdir()} == {"index.html", "planner.css", "planner.js",
        "choices.json", "lpkit.zip", "pyodide"}


@pytest.mark.slow
def test_what_the_page_takes_answers_for_the_rows_of_lessons(tmp_path):
    """As in the browser: only the standard library is there, and only the files that the answers
    opened."""
    alone = [sys.executable, "-I", "-S", "-B", "-c"]
    asked = subprocess.run([*alone, make.SEEN, str(make.PAGE), str(make.ROOT)], check=True,
                           capture_output=True, text=True)
    for path in map(Path, json.loads(asked.stdout)["opened"]):
        if path.is_relative_to(make.ROOT) and path.is_file() and path.suffix != ".pyc":
            inner = path.relative_to(make.PAGE if path.is_relative_to(make.PAGE) else make.ROOT)
            (tmp_path / inner).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / inner)
    assert (tmp_path / "notebooks/lessons/rows/__init__.py").is_file()
    for name in ("adamw", *lessons.having("optimizer")):
        code = (f"import json, sys; sys.path.insert(0, {str(tmp_path)!r}); import answer\n"
                f"print(answer.answer(json.dumps({USUAL | {'optimizer': name}!r})))")
        answers = json.loads(subprocess.run([*alone, code], check=True, capture_output=True,
                                         text=True).stdout)
        module = lessons.having("optimizer").get(name, "")
        assert answers["command"].endswith(f" --import {module}") == bool(module)
        assert answers["prediction"]["assumptions"]["optimizer"] == name


def npm(folder: Path, script: str) -> str:
    """Return a PATH that contains only `script`, under the name npm."""
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("script, sentence", [
    (None, "npm, which is not on PATH; install it"),
    ("echo npm error code ENOTFOUND >&2; exit 1", "npm could not fetch pyodide"),
    (f"echo other > pyodide-{make.VERSION}.tgz", "is not what was pinned")])
def test_without_its_python_there_is_a_site_but_no_planner(script, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", npm(tmp_path / "bin", script) if script else str(tmp_path))
    (tmp_path / "source").mkdir()
    shutil.copy(DOCS / "index.md", tmp_path / "source")
    assert sentence in build.planner(tmp_path / "source")
    assert (tmp_path / "source" / "index.md").read_text() == (DOCS / "index.md").read_text()
    assert (not (tmp_path / "source" / "extra").exists()
            and not list((tmp_path / "cache").rglob("*.tgz")))


def test_the_first_page_leads_to_the_planner(folder, tmp_path):
    shutil.copy(DOCS / "index.md", tmp_path)
    assert build.planner(tmp_path) == ""
    assert (' href="planner/index.html">' in (tmp_path / "index.md").read_text()
            and (tmp_path / "extra" / "planner" / "index.html").exists())


# ---- in the browser

@pytest.fixture(scope="module")
def page(folder, context):
    """The planner's page. `page.noted` has its errors and its requests to other hosts."""
    with static(folder) as address:
        page = context.new_page()
        page.noted = []
        page.on("pageerror", lambda error: page.noted.append(f"page error: {error}"))
        page.on("console", lambda message: page.noted.append(f"console: {message.text}")
                if message.type == "error" else None)
        page.on("request", lambda request: HERE.match(request.url)
                or page.noted.append(f"request: {request.url}"))
        page.on("dialog", lambda dialog: (page.noted.append(f"dialog: {dialog.message}"),
            dialog.dismiss()))
        page.address = address
        page.first = bench.first_seconds(page, address)
        yield page
        page.close()


def ask(page, values: dict) -> None:
    """Open the page with the question in its address, as a link does."""
    words = urlencode({key: "" if value is None else value for key, value in values.items()})
    page.evaluate("""words => new Promise(done => {
        addEventListener('hashchange', done, {once: true});
        if (location.hash === '#' + words) dispatchEvent(new Event('hashchange'));
        location.hash = words;
    })""", words)


def leaves(value, path="") -> dict:
    """Return all numbers and strings of nested JSON by their path."""
    if not isinstance(value, (dict, list)):
        return {path: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: leaf for name, value in pairs
            for key, leaf in leaves(value, f"{path}/{name}").items()}


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("run", RUNS[::-1], ids=lambda run: run.get("model", "usual"))
def test_the_browser_computes_what_cpython_does(page, run):
    ask(page, USUAL | run)
    answered = json.loads(answer.answer(json.dumps(USUAL | run)))
    there, here = leaves(json.loads(page.locator("#json").text_content())), leaves(
        answered["prediction"])
    # sum() of floats compensates from Python 3.12 on, which the browser's is, and rounds the last
    # bit otherwise
    rounding = 0 if sys.version_info >= (3, 12) else 1e-14
    assert there.keys() == here.keys()
    different = {path: (there[path], here[path]) for path in here if there[path] != here[path]}
    assert all(isinstance(a, float) and math.isclose(a, b, rel_tol=rounding)
               for a, b in different.values()), different
    assert page.locator("#command").text_content().strip() == answered["command"]
    shown = dict(zip(page.locator("#facts dt").all_text_contents(),
                     page.locator("#facts dd").all_text_contents()))
    assert (shown == answered["facts"]
            and page.locator("#verdict").text_content() == answered["verdict"])
    assert page.locator("#bytes .row").count() == len(answered["bytes"]["rows"])
    assert page.locator("#status").text_content() == "" and page.noted == []


@pytest.mark.slow
@pytest.mark.browser
def test_a_slider_moves_the_answer_and_the_address(page):
    ask(page, USUAL)
    page.locator(".control:has(#devices) input[type=range]").press("ArrowRight")
    assert (page.locator("#devices").input_value() == "96"
            and "devices=96" in page.evaluate("location.hash"))
    assert "does not split over data=1 x shard=96" in page.locator("#verdict").text_content()
    page.locator("#devices").fill("32")
    assert "on 32 x NVIDIA H100 SXM" in page.locator("#title").text_content()
    page.locator("#seconds .row >> nth=0").click()
    page.locator("#machine").select_option("h200")
    assert page.locator("#seconds .row[open]").count() == 1, "a row that was opened stays open"
    page.reload()
    page.wait_for_function("() => performance.getEntriesByName('first').length")
    assert "on 32 x NVIDIA H200 SXM" in page.locator("#title").text_content() and page.noted == []


@pytest.mark.slow
@pytest.mark.browser
def test_what_cannot_be_is_said_and_the_last_answer_pales(page):
    ask(page, USUAL)
    for run, sentence in REFUSED:
        if (not {"model", "machine"} & run.keys() and None not in run.values()
            and run.get("billions", 0) >= 0):
            ask(page, USUAL | run)
            assert sentence in page.locator("#verdict").text_content()
            assert "stale" in page.locator("#answer").get_attribute("class")
    page.locator("#devices").fill("")
    assert "devices must be a whole number" in page.locator("#verdict").text_content()
    ask(page, USUAL)
    assert page.locator("#answer.stale").count() == 0 and page.noted == []


@pytest.mark.slow
@pytest.mark.browser
def test_an_address_is_data(page):
    ask(page, USUAL | {"model": "<img src=x onerror=alert(1)>", "devices": "1e999",
                       "__proto__": "x", "tensor": "2", "price": "'); alert(1)"})
    status = page.locator("#status").text_content()
    assert "left out" in status and "model=<img src=x onerror=alert(1)>" in status
    assert (page.locator("#model").input_value() == USUAL["model"]
            and page.locator("#tensor").input_value() == "2")
    assert page.locator("img").count() == 0 and page.noted == []


@pytest.mark.slow
@pytest.mark.browser
def test_two_configurations_stand_side_by_side_and_a_link_holds_both(page, context):
    ask(page, USUAL)
    first = page.locator("#facts dd").all_text_contents()
    assert page.locator("#both").is_hidden() and page.locator("#swap").is_hidden()
    page.locator("#hold").click()
    page.locator("#layers").fill("40")
    page.locator("#machine").select_option("h200")
    second = page.locator("#facts dd").all_text_contents()
    rows = {row[0]: row[1:] for row in page.evaluate(ROWS)}
    assert (rows["layers"] == ["32 (left out)", "40", ""]
            and rows["machine"] == ["h100", "h200", ""] and "model" not in rows)
    names = page.locator("#facts dt").all_text_contents()
    assert ([rows[name][0] for name in names] == first
            and [rows[name][1] for name in names] == second)
    a, b = (json.loads(answer.answer(json.dumps(USUAL | run)))["prediction"]["step_seconds"]
            for run in ({}, {"layers": 40, "machine": "h200"}))
    assert float(rows["step"][2].split()[1]) == pytest.approx(b / a, rel=5e-3)
    marked = page.evaluate("[...document.querySelectorAll('.control.other')].map(control => "
                           "control.querySelector('select, input:not([type=range])').id)")
    assert sorted(marked) == ["layers", "machine"]
    assert page.locator("#bytes .stack").count() == 2 and page.locator("#rows .other").count() > 10
    other = context.new_page()
    try:
        other.goto(page.url)
        other.wait_for_function("() => performance.getEntriesByName('first').length",
                                timeout=120_000 * patience())
        assert (other.evaluate(ROWS) == page.evaluate(ROWS)
                and other.locator("#layers").input_value() == "40")
    finally:
        other.close()
    page.locator("#swap").click()
    assert (page.locator("#facts dd").all_text_contents() == first
            and page.locator("#layers").input_value() == "")
    page.locator("#release").click()
    assert page.locator("#both").is_hidden() and "held." not in page.url and page.noted == []


@pytest.mark.slow
@pytest.mark.browser
def test_what_an_address_holds_beside_is_data_too(page):
    bad = {"held.model": "</td><img src=x onerror=alert(1)>", "held.layers": "1e9",
           "held.__proto__": "x", "held.constructor": "x", "held.vocab": "-1"}
    ask(page, USUAL | bad)
    assert (page.locator("#both").is_hidden()
            and "held.model=</td><img" in page.locator("#status").text_content())
    # it is a number, but the formulas refuse it
    ask(page, USUAL | {"held.layers": "9999999999", "held.machine": "h200"})
    assert ("layers must be from 1 to 10,000" in page.locator("#rows").text_content()
            and page.locator("#verdict").text_content().startswith("fits"))
    assert page.locator("img").count() == 0 and page.noted == []
    ask(page, USUAL)
    assert page.locator("#both").is_hidden()


ROWS = ("[...document.querySelectorAll('#rows tbody tr')].filter(row => row.children.length > "
        "1).map(row => [...row.children].map(cell => cell.textContent))")
CONTRAST = """() => {
    const rgb = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = colour => rgb(colour).map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 :
        ((x + 0.055) / 1.055) ** 2.4)
        .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
    const clear = 'rgba(0, 0, 0, 0)';
    const behind = e => {
        while (e && getComputedStyle(e).backgroundColor === clear) e = e.parentElement;
        return getComputedStyle(e ?? document.body).backgroundColor;
    };
    return Object.fromEntries(['h1', 'header p', 'a', 'legend', 'label', 'select', '#devices',
        'dt', 'dd', '#verdict', '#title', 'h2', '.row span', 'pre']
        .map(name => [name, document.querySelector(name)]).map(([name, e]) => {
            const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
            return [name, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
        }));
}"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_in_both_themes(page, scheme):
    ask(page, USUAL)
    page.emulate_media(color_scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    # contrast of level AA in WCAG 2
    faint = {name: ratio for name, ratio in page.evaluate(CONTRAST).items() if ratio < 4.5}
    assert not faint


@pytest.mark.slow
@pytest.mark.browser
def test_on_a_phone_the_answer_stays_in_sight(page):
    try:
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        for control in page.locator("select, input").all():
            box = control.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] >= 28
        for top in (0, 400):
            page.evaluate("top => scrollTo(0, top)", top)
            head = page.locator("#head").bounding_box()
            assert (head["y"] + head["height"] == pytest.approx(844, abs=1)
                    and head["height"] < 844 / 3)
    finally:
        page.set_viewport_size({"width": 1200, "height": 1000})


@pytest.mark.slow
@pytest.mark.browser
def test_it_answers_soon_and_at_once(page):
    """The limits are above those of `lpkit bench planner`, which are for a machine that does
    nothing else."""
    moves = page.evaluate(bench.MOVES)
    assert len(moves) > 100 and statistics.median(moves) < 2 * bench.MOVE_SECONDS
    assert page.first < 5 * bench.FIRST_SECONDS and page.noted == []


def test_the_script_explains_itself():
    done = subprocess.run([sys.executable, DOCS / "make_planner.py", "--help"], capture_output=True,
                          text=True, check=True)
    assert "fetches Pyodide once" in done.stdout
