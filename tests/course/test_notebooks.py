"""What every notebook must look like, and that the numbers of its text are those of its code or
record. (That they run is `make test`: nbval over copies at the smoke size.)

Only these tests catch: a notebook with outputs, without its parameters, its claim or a part of its
form; a number of the text that the explorer, the formula or the record contradicts; and a guess
that is right where it starts.
"""

import ast
import functools
import html
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import nbformat
import pytest
import torch
from papermill.inspection import inspect_notebook

import lpkit
from hosting import notebooks
from hosting.parameters import parameters
from lessons import goals
from lessons import l04_scaling_recipes as outliers
from lessons import l14_data_parallel_and_zero as ranks
from lessons import l17_pipelines as pipelines
from lessons import l19_is_it_progress as chance
from lessons import l20_optimizers as optimizers
from lessons import l21_noise_scale_and_schedules as batches
from lessons import l23_less_of_the_model as less
from lessons import l24_start_from_a_run as begun_from
from lessons import l26_muon as muons
from lessons import l27_width_and_mup as widths
from lessons import l28_search as search
from lessons import l29_fewer_bits as fewer
from lessons import l30_silicon as silicon
from lessons import l31_whole_stack as stack
from lessons.figures import drawing
from lessons.l03_number_formats import listed
from lessons.rows.depth import Progressive, progressive
from lpkit.config import Config
from lpkit.optim import muon
from lpkit.predict import CATALOGUE, memory, quantity
from lpkit.predict.plan import plan
from lpkit.predict.time import step_time
from lpkit.techniques.machines import find
from tests.lessons.judging.course import EXERCISES, PUZZLES

BOOKS = sorted(Path(__file__).parents[2].glob("notebooks/*.ipynb"))
HEADINGS = ["Predict", "Run", "Reconcile", "By hand", "Exercise", "Further reading"]
MAX_CELL_LINES, MAX_LINES_BY_HAND = 15, 25
# what a notebook's page on the web shows folded nowhere, and a cell's width
MAX_IMPORT_LINES, MAX_COLUMNS = 8, 100
MAX_BYTES = 100_000
# docs/notation.md: letters and terms, and what they mean
GLOSSARY = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|",
                           (BOOKS[0].parents[1] / "docs" / "notation.md").read_text(),
                           re.MULTILINE))


READ = {path: nbformat.read(path, as_version=4) for path in BOOKS}


@pytest.fixture(params=BOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def book(path):
    return READ[path]


def numbered(number):
    return next(book for path, book in READ.items() if path.stem.startswith(number))


def code_of(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def text_of_code(book):
    return "\n".join(cell.source for cell in code_of(book))


def text_of(book):
    return "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")


def said_in(number):
    """All text of a notebook, in one line."""
    return " ".join(text_of(numbered(number)).split())


def test_small_named_stripped_and_titled(path, book):
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem)
    assert [path.stem[:2] for path in BOOKS].count(path.stem[:2]) == 1
    assert path.stat().st_size < MAX_BYTES
    nbformat.validate(book)
    dirty = [cell.source for cell in code_of(book) if cell.execution_count is not None
             or cell.outputs]
    assert not dirty, "run: nbstripout notebooks/*.ipynb"
    assert set(book.metadata) <= {"kernelspec",
                                  "language_info"}, "widget state or a tool's own metadata"
    assert book.metadata.kernelspec.name == "python3"
    assert book.cells[0].cell_type == "markdown" and book.cells[0].source.startswith("# ")


def test_parameters_first_and_commented(book):
    first = code_of(book)[0]
    assert (first.metadata.get("tags") == ["parameters"]
            and notebooks.tagged(book, "parameters") == [first])
    by_name = parameters(book)
    assert (by_name["tier"].annotation == "Literal['smoke', 'cpu', 'gpu']"
            and by_name["tier"].default == "cpu")
    assert all(parameter.comment for parameter in by_name.values()), (
        "say after each parameter what it is, and its unit")


def test_papermill_reads_the_parameters_as_the_kit_does(path):
    """`papermill --help-notebook` splits lines by a pattern, the kit walks the syntax tree."""
    theirs = {name: (ast.unparse(ast.parse(p["inferred_type_name"])),
                     ast.literal_eval(p["default"]), p["help"])
              for name, p in inspect_notebook(path).items()}
    ours = {name: (p.annotation, p.default, p.comment)
            for name, p in parameters(notebooks.read(path)).items()}
    assert theirs == ours and list(theirs) == list(ours)


def test_imports_second(book):
    """One cell of imports right after the parameters, and begin(), which checks these; later cells
    import nothing."""
    second, *rest = code_of(book)[1:]
    assert any(isinstance(node, (ast.Import, ast.ImportFrom))
               for node in ast.parse(second.source).body)
    late = [node for cell in rest for node in ast.walk(ast.parse(cell.source))
            if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not late, f"move it to the cell of imports: {ast.unparse(late[0])}"
    assert second.metadata.jupyter.source_hidden, "fold the imports"
    others = [node for node in ast.parse(second.source).body
              if not isinstance(node, (ast.Import, ast.ImportFrom))]
    assert ([ast.unparse(node) for node in others]
            == ["begin()"]), "what is folded hides nothing that counts"


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_page_opens_with_few_imports_and_no_code_is_cut(path):
    code = code_of(nbformat.read(path, as_version=4))
    assert len(code[1].source.splitlines()) <= MAX_IMPORT_LINES, (
        "let the lesson import it too, and write lesson.name")
    wide = [(cell.id, line) for cell in code for line in cell.source.splitlines()
            if len(line) > MAX_COLUMNS]
    assert not wide, "break it at its arguments, or name a part of it"


def test_headings_in_order(book):
    """`## Predict` ... `## Further reading`, each once; an exercise heading may be plural or
    numbered."""
    titles = re.findall(r"^## +(.+?)\s*$", text_of(book), flags=re.MULTILINE)
    known = [next(heading for heading in HEADINGS if title.startswith(heading)) for title in titles
             if title.startswith(tuple(HEADINGS))]
    assert list(dict.fromkeys(known)) == HEADINGS, titles
    assert known == sorted(known, key=HEADINGS.index), titles


def test_thin(book):
    for cell in code_of(book):
        lines = [line for line in cell.source.splitlines()
                 if not line.startswith(("import ", "from "))]
        by_hand = "by-hand" in cell.metadata.get("tags", [])
        most = MAX_LINES_BY_HAND if by_hand else MAX_CELL_LINES
        assert len(lines) <= most, f"{len(lines)} lines; move it to lpkit:\n{cell.source[:200]}"
        defines = [node for node in ast.walk(ast.parse(cell.source))
                   if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
        assert not defines or by_hand or "exercise" in cell.metadata.get("tags",
            []), f"define it in lpkit: {defines[0].name}"


def test_the_mechanism_is_built_by_hand_and_held_against_the_kit(book):
    cells = [cell for cell in code_of(book) if "by-hand" in cell.metadata.get("tags", [])]
    assert (any("assert " in cell.source for cell in cells)
            and any("torch." in cell.source for cell in cells))
    assert "source(" in text_of_code(book), "the kit's own code, beside it"


def test_claims_are_said_and_asserted(book):
    cells = notebooks.tagged(book, "claim")
    assert cells, "tag the cell whose assert is what this notebook claims"
    for cell in cells:
        assert ("with claim(" not in cell.source
                or "raises-exception" in cell.metadata.tags), "a claim that fails stops Run All"
    assert notebooks.claim(book), "say what is claimed"
    assert len(notebooks.claim(book)) <= 160, "a claim is one line of a table"


def test_exercises_are_stubs_and_checked(book):
    cells = notebooks.tagged(book, "exercise")
    assert cells and any("check(" in cell.source for cell in code_of(book))
    for cell in cells:
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef):
                assert "raise NotImplementedError" in ast.unparse(node), (
                    f"{node.name} gives the answer away")


def test_nothing_of_a_machine_and_no_other_host(book):
    for cell in book.cells:
        assert not re.search(r"(?<![\w.:/])/(home|root|tmp|work|Users|mnt|content)/",
                             cell.source), cell.source
        assert "http://" not in cell.source and not re.search(r"^\s*(!(?!\[)|%)", cell.source,
            re.MULTILINE), cell.source
        if cell.cell_type == "markdown":
            assert not re.search(
                r"!\[(?![^]]*\]\(pictures/\d\d\.(svg|png)\))|<img|<script|<iframe",
                                cell.source), ("one picture, of its own folder; others are drawn "
                                                 "by cells")
            prose = re.sub(r"^\$\$\n[^$]+\n\$\$$", "", cell.source, flags=re.MULTILINE)
            assert not re.search(r"\$[^$\n]+\$|\$\$",
                                prose), ("a formula stands between two lines of $$; inside a "
                                           "sentence, write code")
    assert "https://" in text_of(book).split("## Further reading")[-1]


# prose

def test_notebooks_are_mentioned_by_links(book):
    """In every notebook of the course, whoever is meant is one click away. (The site's builder
    fails for a link without a target.)"""
    names = {path.name for path in BOOKS}
    assert set(re.findall(r"\]\(([^)\s]+\.ipynb)", text_of(book))) <= names
    bare = re.findall(r"Next: `(\d\d_\w+)", text_of(book))
    assert not bare, f"write [{bare[0][:2]} Title]({bare[0]}.ipynb)"


def marks(text):
    return re.findall(r'<abbr title="([^"]*)">(.+?)</abbr>', text)


def test_terms_are_explained_once_and_as_the_glossary_has_them(book):
    seen = set()
    for cell in book.cells:
        if cell.cell_type != "markdown":
            continue
        for what, words in marks(cell.source):
            term = next((term for term in GLOSSARY if words.lower() in (term.lower(),
                f"{term.lower()}s")), None)
            assert term, f"{words!r} is not in docs/notation.md"
            assert html.unescape(what) == GLOSSARY[term], (
                f"docs/notation.md explains {term} otherwise")
            assert term not in seen, f"{term} is explained twice"
            seen.add(term)
            before = re.sub(r"`[^`]*`|<abbr.*?</abbr>", "",
                            cell.source[:cell.source.index(f">{words}</abbr>")])
            if len(term) > 1:
                assert not re.search(rf"(?<!\w){re.escape(words)}(?!\w)",
                        before.rsplit("<abbr", 1)[0]), f"explain {term} where it is mentioned first"


def test_the_glossary_names_the_first_notebook_that_explains_a_term():
    explained = {}
    for path in BOOKS:
        for _, words in marks(text_of(READ[path])):
            explained.setdefault(words.lower().removesuffix("s"), path.stem[:2])
    page = (BOOKS[0].parents[1] / "docs" / "notation.md").read_text().partition("## Terms")[2]
    named = dict(re.findall(r"^\| ([^|]+?) \| [^|]+? \| (\d\d) \|$", page, re.MULTILINE))
    assert len(named) > 15
    assert named == {term: explained[key] for term in GLOSSARY
                     if len(term) > 1 and (key := term.lower().removesuffix("s")) in explained}


def test_what_to_look_for_has_its_answers(book):
    """As many as questions, folded, before the next heading."""
    for i, cell in enumerate(book.cells):
        if cell.cell_type != "markdown" or "Things to look for:" not in cell.source:
            continue
        asked = len(re.findall(r"^- ", cell.source.split("Things to look for:")[1], re.MULTILINE))
        section = itertools.takewhile(lambda after: not re.match("## |.*Things to look for:",
            after.source, re.DOTALL), book.cells[i + 1:])
        answers = [after.source for after in section
                   if "<summary>Answers</summary>" in after.source]
        assert len(answers) == 1 and len(re.findall(r"^\d+\. ", answers[0], re.MULTILINE)) == asked


def answers_of(number):
    [cell] = [cell for cell in numbered(number).cells if "<summary>Answers</summary>"
              in cell.source]
    return " ".join(cell.source.split())


def test_answers_about_memory_are_those_of_the_explorer():
    def held(model, **changes):
        config = lpkit.preset(model).replace({"global_batch": 8 * changes.pop("sequences", 1),
            "grad_accum_steps": 1})
        return memory(config, CATALOGUE["h200"], 8,
                      **{"precision": "bf16", "optimizer": "adamw", "zero": 0, "recompute": "none",
                         **changes})

    def row(estimate, name):
        return quantity(estimate.at(estimate.peak_moment)[name], "bytes")

    text, plain, fp8 = answers_of("01"), held("llama-8b"), held("llama-8b",
        precision="fp8-tensorwise")
    for words in (row(plain, "optimizer state"), row(plain, "activations"),
                  row(fp8, "activations").removesuffix(" GB"), row(fp8, "low-precision weights"),
                  quantity(fp8.peak_bytes, "bytes"),
                  quantity(held("llama-8b", precision="fp8-tensorwise", zero=3).peak_bytes,
                           "bytes"),
                  row(held("llama-1b", recompute="block"), "logits' gradients"),
                  row(held("llama-1b", recompute="block"), "activations")):
        assert words in text, words
    for zero in (1, 2):
        assert (f"{quantity(held('llama-8b', zero=zero).peak_bytes, 'bytes')} with stage {zero}"
                in text)
    for sequences in (2, 8):
        estimate = held("llama-1b", recompute="block", sequences=sequences)
        assert (max(estimate.at(estimate.peak_moment).items(), key=lambda item: item[1])[0]
                == "logits' gradients")


def test_answers_about_outliers_are_those_of_the_explorer():
    def zeroed(recipe, size):
        return sum(kind == 2 for line in outliers.look(recipe, float(size), 9, 40, 0)["kinds"]
                   for kind in line)

    def in_row(size):
        return outliers.look("int8", float(size), 9, 40, 0)["kinds"][9].count(2)

    text = answers_of("04")
    assert ((in_row(300), in_row(708), in_row(709), in_row(1000)) == (87, 126, 127, 127)
            and "87 of the 127" in text and "709" in text)
    assert zeroed("fp8-tensorwise", 1000) == 11 and "11 become zero" in text
    assert (zeroed("nvfp4", 1e6) == 3537 and "3,537" in text and zeroed("mxfp8", 1e6) == 31
            and "31 others" in text)
    assert zeroed("nvfp4-published", 1e6) == 2752 and "2,752" in text
    for recipe, size, words in (("fp8-tensorwise", 1000, "32.0 dB"),
                                ("fp8-tensorwise", 3, "31.2 with"), ("mxfp8", 300, "31.5"),
                                ("nvfp4-published", 3e5, "16.6 dB and"), ("nvfp4", 3e5, "11.7"),
                                ("nvfp4-published", 1e6, "2.9 dB"),
                                ("nvfp4", 1e6, "2.1")):
        assert (words in text and f"{outliers.look(recipe, float(size), 9, 40, 0)['sqnr_db']:.1f}"
                in words)


def test_answers_about_a_plan_are_the_plan():
    text = answers_of("09")

    def soonest(devices, machine="h200", **limits):
        return plan(lpkit.preset("llama-70b"), 1e12, machine, devices=devices, **limits)

    eight, some, many, old = soonest(8), soonest(64), soonest(4096), soonest(512, "a100-40")
    assert "need 9.53 GB more each" in eight.refusals["memory"].nearest and "9.53 GB" in text
    assert (some.refusals["memory"].layouts == 3 and some.counted == 22 and len(some.options) == 16
            and "other 16" in text)
    shares = {row.name: row.seconds / many.options[0].time.step_seconds
              for row in many.options[0].time.rows}
    for name in ("tensor: gathers and scatters", "pipeline: bubble"):
        assert f"{shares[name]:.1%}" in text
    assert (f"{many.options[0].time.mfu:.0%}" == "30%" and "47% to 30%" in text
            and f"{many.options[0].bill.seconds / 86_400:.2f} days" in text)
    assert ("$1,155,776" in soonest(512, budget=250_000.0).refusals["budget"].nearest
            and "1,155,776 dollars" in text)
    cheap, whole = old.options[:2]
    again = next(row for row in whole.time.rows if row.name == "recomputation")
    assert ((cheap.recompute, whole.recompute) == ("selective", "block")
            and f"{cheap.bill.seconds / 86_400:.1f} days" in text)
    assert (f"{again.seconds / whole.time.step_seconds:.1%}" in text
            and f"takes {whole.bill.seconds / 86_400:.1f}." in text)


def test_answers_about_formats_are_their_values():
    text, formats = answers_of("03"), listed()
    for name in ("e5m2", "e4m3fn"):
        odd = [code for code, value in enumerate(formats[name].values) if not math.isfinite(value)]
        assert (f"{odd[0]}" in text and f"{odd[-1]}" in text
                and len(odd) == {"e5m2": 8, "e4m3fn": 2}[name])
    sizes = sorted({abs(value) for value in formats["e2m1"].values})
    assert "{}, {}, {}, {}, {}, {}, {} and {},".format(*(f"{size:g}" for size in sizes)) in text
    e4m3 = sorted({abs(value) for value in formats["e4m3fn"].values if math.isfinite(value)
                   and value})
    gaps = {value: above / value - 1 for value, above in itertools.pairwise(e4m3)}
    low = [f"{gap:.0%}" for value, gap in gaps.items() if value < 2.0**-6]
    assert (low[::-1][:3] == ["14%", "17%", "20%"] and low[0] == "100%"
            and "14%, 17%, 20%, up to 100%" in text)


def test_answers_about_chance_are_those_of_the_record():
    text, (_, losses) = answers_of("19"), chance.pool()
    sigma = chance.sigma_of(losses)
    for seeds, bar, share in ((20, 0.005, 0.07), (30, 0.005, 0.04), (3, 0.015, 0.05),
                              (1, 0.0, 0.5)):
        assert chance.share_kept(chance.gains_of_nothing(losses, seeds=seeds),
                                 bar) == pytest.approx(share, abs=0.006)
    assert (2 * (1.645 * sigma / 0.005) ** 2 == pytest.approx(25.6, abs=0.05)
            and "25.6, so 26" in text and "At 20 it is 7%, at 30 it is 4%" in text)


def test_answers_about_optimizers_are_those_of_the_explorer():
    text = answers_of("20")
    show = optimizers.rules_view({name: lpkit.preset(name)
                                  for name in ("cpu-3m", "gpt2-124m", "llama-8b")})

    def drawn(model, tokens, rule, panel):
        bars = show(model, tokens)["data"][panel]
        return dict(zip(bars["y"], bars["x"]))[rule]

    assert (f"{drawn('cpu-3m', 4096, 'muon', 0):.2f} and {drawn('cpu-3m', 4096, 'normuon', 0):.2f} "
            f"in `cpu-3m`" in text)
    assert (f"{drawn('gpt2-124m', 4096, 'soap', 0):.1f} and "
            f"{drawn('llama-8b', 4096, 'soap', 0):.1f}." in text)
    for tokens in (65_536, 131_072):
        assert f"{tokens:,} it is {drawn('cpu-3m', tokens, 'muon', 1):.2f}%" in text
    assert (drawn("cpu-3m", 90_000, "muon", 1) == pytest.approx(1, abs=0.01)
            and "from 90,000 tokens on" in text)
    config = lpkit.preset("cpu-3m").replace({"optimizer": "muon"})
    assert muons.published(config) == 0.3125


def test_what_is_said_of_a_step_of_lora_is_the_formula():
    text = said_in("24")
    config = lpkit.preset("cpu-3m").replace({"global_batch": 4, "grad_accum_steps": 1,
        "model.context": 128, "precision.recipe": "fp32", "system.device": "cpu",
                                             "system.compile": False})
    three = begun_from.three(config, rank=2)
    full, lora, qkv = (lpkit.predict_trace(arm) for arm in three.values())
    assert (f"{begun_from.trained_share(three[begun_from.ALL]):.2%} of the model's" in text
            and f"{lora.peak_bytes / full.peak_bytes:.0%} of the peak is left" in text)
    few = [lpkit.predict_trace(arm.replace({"global_batch": 2, "model.context": 64})).peak_bytes
           for arm in list(three.values())[:2]]
    assert f"it is {few[1] / few[0]:.0%} with 2 sequences of 64 tokens instead of 4 of 128" in text
    kept = [trace.operations for trace in (full, lora, qkv)]
    below = kept[0]["head"] + kept[0]["norm1"] - kept[1]["norm1"]
    between = sum(size for name, size in kept[1].items() if ".B" in name)
    inputs = sum(kept[1][f"{name}.A"] for name in ("mlp.up", "mlp.down"))
    assert (all(f"{size:,}" in text for size in (below, between, inputs))
            and f"{below / sum(kept[0].values()):.0%} of all saved bytes" in text)
    times = [full.peak_bytes / lora.peak_bytes for model in (begun_from.seven_billion(),
        begun_from.gpt3())
             for full, lora in begun_from.rented(model, 4, "h100").values()]
    assert f"in this table it is from {min(times):.1f} to {max(times):.1f}" in text


def test_what_is_said_of_schedules_is_their_picture():
    text = said_in("23")
    config = lpkit.preset("cpu-3m").replace(less.SMALL | {"steps": 8})
    left_out = fmean(1 - p for t in (10**6,) for p in progressive(Progressive(gamma=1.0), less.BERT,
        2, t))
    assert (left_out == pytest.approx(1 - less.progressive(0.5, 1.0, less.BERT, 10**6))
            and f"{left_out:.1%} for BERT's 12 layers" in text)
    assert (sum(less.TOKENS) / less.BERT == 0.75
            and "25% of token dropping is exactly the area that it leaves out" in text)
    updates = {steps: less.arms(steps)[less.STACKED].steps for steps in (100, 8)}
    stacked = less.picture(less.arms(8)[less.STACKED].replace({"steps": 8}))
    assert f"{100 * fmean(itertools.chain(*stacked)):.0f}%" == "69%" and "x 4) / 4`, 69%" in text
    dropping = less.scheduled(config, "progressive-layer-drop")
    drawn = [1 - less.flops(dropping.replace({"seed": seed})) / less.flops(config)
             for seed in range(300)]
    assert fmean(drawn) == pytest.approx(less.expected(config),
        abs=0.01), "the mean over draws, by Monte Carlo"
    assert (f"{less.expected(config):.1%} is the mean, and 64 draws scatter by "
            f"{100 * stdev(drawn):.0f} points" in text)
    assert (f"a factor of {1 / 0.76:.2f} is cost per sample" in text
            and updates == {100: 137, 8: 11}
            and f"{100 * drawn[0]:.0f}" == f"{RIGHT['23.area']}")


def test_flops_of_a_schedule_are_those_that_are_counted():
    for name in ("progressive-layer-drop", "stack", "token-drop"):
        config = less.scheduled(less.study_config(4, 4).replace({"global_batch": 2}), name)
        assert (less.counted(config) == less.flops(config)
                < less.flops(config.replace({"governors": []}))), name


def test_a_model_alone_has_the_flops_of_the_whole():
    arms = less.arms(150)
    budget = less.flops(arms[less.WHOLE])
    for name, config in arms.items():
        assert less.flops(config) == pytest.approx(budget, rel=0.005), name


def test_what_is_said_of_pipelines_is_the_clock():
    text = said_in("17")
    answers = answers_of("17")

    def at(schedule, chunks=1, message=0.0, dw=1.0, m=8):
        path = pipelines.path(schedule, 4, m, chunks)
        timing = pipelines.timed(path, 1.0, 1.0, dw, message)
        return timing.step_seconds, timing.bubble_share, pipelines.held(path, timing)

    gpipe, plain = at("gpipe"), at("1f1b")
    assert (gpipe[:2] == plain[:2] and f"The update ({plain[0]:g}) and its bubble ({plain[1]:.1%})"
            in answers)
    assert (gpipe[2][0], plain[2][0], gpipe[2][-1], plain[2][-1]) == (8, 4, 8, 1)
    thin = [at("interleaved", 2), at("interleaved", 2, 0.25), at("interleaved", 4),
            at("interleaved", 4, 0.25)]
    assert (f"{thin[0][0]:g} and {plain[0]:g} become {thin[1][0]:g} and {at('1f1b', 1, 0.25)[0]:g}"
            in answers and f"{thin[2][0]:g} becomes {thin[3][0]:g}" in answers)
    assert thin[3][0] > thin[1][0] and f"rank 0 holds {thin[0][2][0]:g} micro-batches" in answers
    short, *long = [at("zero-bubble", dw=dw) for dw in (0.25, 1.0, 1.5, 3.0)]
    assert (f"{short[0] * short[1]:g} of {short[0]:g}." in answers
            and [round(step * share, 6) for step, share, _ in long] == [3, 3, 3]
            and "stays at 3" in answers)
    v = at("zbv")
    assert (v[0] * v[1] == pytest.approx(long[0][0] * long[0][1] / 2)
            and v[2] == long[0][2] == [4] * 4)
    assert f"with 32 micro-batches its bubble is {at('1f1b', m=32)[1]:.0%}" in text
    counts = {pipelines.WHOLE: (4, 8, 0), pipelines.LATER: (4, 4, 4), pipelines.TWICE: (4, 8, 8)}
    counted = {how: SimpleNamespace(products=dict(zip(pipelines.PARTS, parts)))
               for how, parts in counts.items()}
    whole, later, twice = (clocked for _, clocked in pipelines.by_products(counted, 4, 8).values())
    assert f"{twice.bubble_share:.0%} instead of {whole.bubble_share:.0%}" in text
    assert (f"{1 - later.step_seconds / whole.step_seconds:.0%} less than 1F1B if the backward "
            f"runs in two parts, and {twice.step_seconds / whole.step_seconds - 1:.0%} more"
            in text)


def test_exercises_on_pipelines_are_the_kits():
    for p, m in ((1, 1), (2, 5), (4, 4), (4, 9), (6, 7)):
        path = pipelines.path("1f1b", p, m)
        orders = [pipelines.one_f_one_b(rank, p, m) for rank in range(p)]
        assert orders == [[f"{kind}{micro}" for _, kind, micro in path.order[rank]]
                          for rank in range(p)]
        timing = pipelines.timed(path, 1.0, 1.5, 0.5)
        assert (pipelines.step_seconds(orders, 1.0, 2.0) == timing.step_seconds
                and pipelines.bubble(p, m, 1) == pytest.approx(timing.bubble_share))
        assert timing.rank_peaks == {rank: min(p - rank, m) for rank in range(p)}


def test_newton_schulz_of_singular_values_is_muons():
    m, v = torch.randn(48, 20), torch.rand(48, 20)
    steps = muon.orthogonalised(m.double().clone())
    torch.testing.assert_close(muons.newton_schulz(muons.spectra(m, v)["momentum"],
        muon.NEWTON_SCHULZ),
                               muons.over_rms(torch.linalg.svdvals(steps)))


def test_singular_values_end_near_1_from_the_least_on():
    """By the polynomial, on a fine grid in float64."""
    values = torch.cat([torch.logspace(-6, 0, 200_001, dtype=torch.float64),
                        torch.linspace(0, 1, 200_001, dtype=torch.float64)]).unique()
    after = values
    for _ in range(5):
        after = 3.4445 * after - 4.7750 * after**3 + 2.0315 * after**5
    within = (after > 0.5) & (after < 1.5)
    edge = (values / muons.LEAST - 1).abs() < 1e-3
    assert (torch.equal(within[~edge], values[~edge] > muons.LEAST)
            and after[values > 0.01].min() > 0.68)
    m = torch.diag(torch.tensor([1.0, 0.5, 2 * muons.LEAST, 0.5 * muons.LEAST]))
    assert muons.near(m) == muons.Near(0.75, 0.75)


def test_what_is_said_of_batches_is_in_the_record():
    record, text = batches.Record.read(), said_in("21")
    steps = {(name, batch): record.best(name, batch, 2.4).steps for name in batches.RATES
             for batch in (*batches.BATCHES, batches.ANCHOR)}
    for name, saved in (("adamw", (45, 18)), ("sgd", (28, 6))):
        for (small, large), percent in zip(((4, 8), (64, 128)), saved):
            assert 100 * (1 - steps[name, large] / steps[name, small]) == pytest.approx(percent,
                abs=0.6)
    assert (steps["adamw", 4] == pytest.approx(468, abs=0.5)
            and record.predicted("adamw", 4, 2.4).value == pytest.approx(683, abs=0.5))
    assert (batches.law_error(record, "adamw", 2.4) == pytest.approx(0.07, abs=0.002)
            and "within 7%" in text)
    assert (record.law("adamw", 2.4)[1] == pytest.approx(22.3, abs=0.1)
            and record.on_the_way("adamw", 2.4)[0] == pytest.approx(38.6, abs=0.1))
    assert (batches.rate_exponent(record, "adamw") == pytest.approx(0.42, abs=0.005)
            and "power of 0.42" in text)
    assert [batches.held_cells(record, name) for name in batches.RATES] == [5, 5]


def test_ticks_between_powers_of_ten_are_whole_numbers():
    """plotly writes those of "D1" and "D2" as 2 and 5, unless they have a format."""
    record = batches.Record.read()
    moved = {how: {width: {"mlp": 1.0} for width in widths.WIDTHS}
             for how in widths.PARAMETRISATIONS}
    for spec in (batches.steps_figure(record, "adamw"), widths.check_figure(moved)):
        assert (spec["layout"]["yaxis"]["dtick"], spec["layout"]["yaxis"]["tickformat"]) == ("D2",
            ",~r")
    assert drawing.axis("bytes", type="log", dtick="D1", exponentformat="SI")["tickformat"] == "~s"
    assert drawing.axis("gap", type="log", dtick="D2", tickformat=".0%")["tickformat"] == ".0%"
    assert ("tickformat" not in drawing.axis("x", type="log", dtick=1)
            and "tickformat" not in drawing.axis("x"))


def test_what_is_said_of_widths_is_in_the_record():
    transfers, text = {how: widths.transfer(widths.width_runs(), how)
                       for how in widths.PARAMETRISATIONS}, said_in("27")
    standard, mup = transfers["standard"], transfers["muP"]
    assert ((standard.best[32], standard.best[256]) == (0.032, 0.002)
            and "falls from 0.032 to 0.002" in text)
    assert (standard.best[32] / standard.best[256] == RIGHT["27.rate"]
            and max(mup.best.values()) == 2 * min(mup.best.values()))
    assert (f"{standard.cost:.0%}" == "14%" and f"{mup.cost:.0%}" == "3%"
            and "costs the wide one 14% of its loss" in text and "costs 3%" in text)
    assert (f"({mup.own:.2f} nats) is worse than the wide standard model at its best rate "
            f"({standard.own:.2f})" in text)


def test_what_is_said_of_searches_is_in_the_record():
    searches, text = search.searches(), said_in("28")
    pairs = [(min(tpe), min(other)) for tpe, other in zip(searches["tpe"], searches["random"])]
    ahead, behind = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    assert ((ahead, behind) == (RIGHT["28.ahead"], 5)
            and f"ahead in {ahead} pairs, behind in {behind} and level in {20 - ahead - behind}"
            in text)
    assert f"with a probability of {search.coin(ahead, behind):.2f}" in text
    gains = [math.log(b / a) for a, b in pairs]
    drawn = torch.tensor(gains, dtype=torch.float64)[torch.randint(20, (100_000, 20),
        generator=torch.Generator().manual_seed(0))].mean(1)
    gain = search.gain(searches, 20)
    assert (gain.mean == pytest.approx(fmean(gains))
            and f"by {gain.mean:.1%} ({gain.low * 100:.1f} to {gain.high:.1%})" in text
            and f"p = {gain.p:.3f}" in text)
    assert (drawn.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
            == pytest.approx([gain.low, gain.high], abs=0.001)), "by the bootstrap"
    signs = (torch.randint(0, 2, (100_000, 20), generator=torch.Generator().manual_seed(1)).double()
             * 2 - 1)
    flipped = (signs * torch.tensor(gains, dtype=torch.float64)).mean(1).abs()
    assert gain.p == pytest.approx((flipped >= gain.mean).double().mean().item(),
                                   abs=0.01), "by random signs"


def test_what_is_said_of_fewer_bits_is_in_the_record():
    seeds, text = fewer.recorded("fewer-bits"), said_in("29")
    mean = {(name, part): fmean(row["parts"][name][part] for row in seeds)
            for name in fewer.SPLIT for part in ("added", "slope", "curvature", "diagonal")}
    pruning, rounding, other = ("magnitude 50%", "RTN int3", "SparseGPT 50%")
    assert f"adds {mean[pruning, 'added']:.4f} nats" in text
    assert (f"along its change is {mean[pruning, 'curvature']:.4f}, and its slope is "
            f"{mean[pruning, 'slope']:.4f}" in text)
    assert f"the diagonal predicts {mean[pruning, 'diagonal']:.4f}, because" in text
    assert (f"(diagonal {mean[rounding, 'diagonal']:.4f}, curvature "
            f"{mean[rounding, 'curvature']:.4f})" in text)
    assert (f"the diagonal predicts {mean[other, 'diagonal']:.4f}, and the curvature is "
            f"{mean[other, 'curvature']:.4f}" in text)
    assert f"predicts {fewer.seen(seeds, rounding):.0%} of what 3-bit" in text
    assert f"and {fewer.seen(seeds, pruning):.0%} of what pruning" in text
    assert round(100 * fewer.seen(seeds, pruning)) == RIGHT["29.seen"]
    peak = find("h100").flops["bf16"] / 1e12
    assert f"{peak:,.0f} TFLOP/s in bf16, and {2 * peak:,.0f} with 2:4 sparsity" in text
    added = fmean(row["effects"][rounding]["added"] / row["loss"] for row in seeds)
    assert round(100 * added, 2) == RIGHT["29.int3"]
    assert len(seeds) == fewer.wins(seeds, "SparseGPT", "50%") == fewer.wins(
        seeds, "SparseGPT", "2:4") == 5


def test_what_is_said_of_training_with_fewer_bits_is_in_the_record():
    seeds, text = fewer.recorded("fewer-trained"), said_in("29")

    def mean(*keys):
        return fmean(functools.reduce(lambda row, key: row[key], keys, row) for row in seeds)

    qat, after = (mean("rounding", "int3", way) for way in ("QAT", "trained on, rounded"))
    assert f"gains nothing: {qat:.3f} nats, and {after:.3f} for the model" in text
    gain = mean("rounding", "int2", "trained on, rounded") - mean("rounding", "int2", "QAT")
    assert f"At 2 bits QAT gains {gain:.3f} nats" in text
    assert (f"({mean('distillation', 'distilled'):.3f} nats with the teacher, "
            f"{mean('distillation', 'alone'):.3f} without)" in text)
    ticket, other = mean("lottery", "ticket"), mean("lottery", "reshuffled")
    assert f"at random places by {other - ticket:.3f} nats" in text
    assert all(row["lottery"]["ticket"] < row["lottery"]["reshuffled"] for row in seeds)
    assert f"from another start they give {mean('lottery', 'another start'):.3f}" in text
    assert f"below the dense model ({mean('lottery', 'dense'):.3f})" in text


def test_what_is_said_of_silicon_is_the_formula():
    text, answers = said_in("30"), answers_of("30")

    def shares(dataflow, tokens, rows=128, columns=128):
        array = silicon.Array(rows, columns, dataflow)
        listed = silicon.products(lpkit.preset("gpt2-124m").replace(
            {"model.context": tokens}).model, batch=1)
        return {"all": silicon.model_utilization(array, listed)} | {
            product.name: array.utilization(product.M, product.N, product.K) for product in listed}

    long, flat = shares("weight", 1024), shares("weight", 1024, 32, 512)
    assert (len({f"{long[name]:.1%}" for name in long if name not in ("all", "scores", "values")})
            == 1 and f"{long['scores']:.1%}" == f"{long['values']:.1%}" == "36.4%"
            and f"Both use 36.4%, and the other products use {long['mlp.up']:.1%}" in answers)
    few = {dataflow: f"{shares(dataflow, 16)['all']:.1%}" for dataflow in silicon.DATAFLOWS}
    assert (f"with {few['weight']} (output-stationary {few['output']}, input-stationary "
            f"{few['input']})" in answers)
    assert (max(flat, key=lambda name: flat[name] / long[name]) == "scores"
            and min(flat, key=lambda name: flat[name] / long[name]) == "values"
            and f"{flat['scores']:.1%} instead of {long['scores']:.1%}" in answers
            and f"`values` falls to {flat['values']:.1%}" in answers
            and f"fall from {long['all']:.1%} to {flat['all']:.1%}" in answers)
    for name in ("cpu-3m", "gpt2-124m", "llama-8b"):
        listed = silicon.products(lpkit.preset(name).model, batch=1)
        one_token = silicon.decoding(listed)
        for dataflow in silicon.DATAFLOWS:
            square = silicon.model_utilization(silicon.Array(128, 128, dataflow), listed)
            best = silicon.model_utilization(
                silicon.best_aspect(128 * 128, dataflow, listed), listed)
            assert best / square < 1.08 and "gain more than 8%" in text
        best = silicon.best_aspect(128 * 128, "weight", one_token)
        assert silicon.model_utilization(best, one_token) < 0.003
        flat, tall = (silicon.best_aspect(128 * 128, dataflow, one_token)
                      for dataflow in ("output", "input"))
        assert flat.rows < flat.columns and tall.rows > tall.columns


def test_energies_and_powers_in_30_are_those_of_its_tables():
    text = said_in("30")
    joules = {(fmt, density): 1e3 * sum(silicon.energy(
        silicon.Array(128, 128), (1024, 3072, 768), fmt, density).values())
        for fmt in silicon.PJ for density in (1.0, 0.1)}
    assert (f"takes {joules['fp32', 0.1]:.1f} instead of {joules['fp32', 1.0]:.1f} mJ: "
            f"{joules['fp32', 1.0] / joules['fp32', 0.1]:.1f} times less" in text
            and f"FP16 without any zero takes {joules['fp16', 1.0]:.1f} mJ" in text
            and f"the gain is {joules['int8', 1.0] / joules['int8', 0.1]:.1f}" in text)
    for column in (0, 1):
        row = [f"{silicon.PJ[fmt][column]:g}" for fmt in ("int8", "fp16", "fp32")]
        assert f"| {('multiply', 'add')[column]}, pJ | {' | '.join(row)} |" in text
    assert f"| pJ | {' | '.join(f'{pj:,}' for pj in silicon.READ_PJ.values())} or more |" in text
    ends = [spec["y"][-1] for spec in silicon.power_figure()["data"]]
    assert (f"takes {ends[0]:.0%} of the energy" in text
            and f"it takes {ends[2] - 1:.0%} *more* than the fastest" in text)
    # by the page of the first, whose author fitted a line, and by the Wikipedia's factor of 6.4
    assert silicon.power_line(silicon.ATHLON)[0] == pytest.approx(71, abs=0.5)
    (fast, high), *_, (slow, low) = silicon.PENTIUM
    assert fast * high**2 / (slow * low**2) == pytest.approx(6.4, abs=0.05)


def test_what_is_said_of_the_whole_stack_is_in_the_record():
    record, text = stack.Record.read(), said_in("31")
    whole, ahead = (record.factor(stack.WHOLE, unit) for unit in ("seconds", "H100 seconds"))
    assert ((round(whole.value, 2), round(ahead.value, 2))
            == (RIGHT["31.whole"], RIGHT["31.h100"]) and whole.low < 5 < whole.high)
    assert (f"need {whole.value:.2f} times fewer seconds ({whole.low:.2f} to {whole.high:.2f}, "
            f"{len(record.updates['baseline'])} seeds)" in text)
    best = max(stack.subsets(stack.ARMS), key=lambda arms: record.factor(arms, "seconds").value)
    assert best == stack.WHOLE - {"small batches first"} and (
        f"reach {record.factor(best, 'seconds')!s}" in text)
    pairs = [1 / record.gap("seconds", 1, frozenset(pair)).value
             for pair in itertools.combinations(stack.ARMS, 2)]
    assert f"they range from {min(pairs):.2f} to {max(pairs):.2f}" in text
    assert f"Effects up to pairs give {str(record.gap('seconds', 2)).split()[0]} of" in text
    kernels = frozenset(("fused attention", "larger micro-batches"))
    left = [record.factor(stack.WHOLE, unit, kernels).value for unit in ("seconds", "H100 seconds")]
    assert f"leaves {left[0]:.2f} here and {left[1]:.2f} on an H100" in text


def test_a_goal_that_fails_has_a_card_that_says_so():
    """The card of a claim is green where it holds: also the claim that the goal was missed."""
    failed = {path.stem[:2] for path in BOOKS if re.search(
        r"\b[Tt]he goal fails (?!if|in any)|half of the goal fails", said_in(path.stem[:2]))}
    cards = {path.stem[:2] for path, book in READ.items() if "goal(" in text_of_code(book)}
    assert {"20", "21", "25", "26", "28", "29", "30", "31"} <= failed <= cards, failed - cards


@pytest.mark.parametrize("met, word, sign",
                         [({"a": True, "b": True}, "The goal is reached", "✓ b"),
                          ({"a": True, "b": False}, "The goal failed", "✗ b"),
                                             ({"a": None, "b": True}, "This machine cannot tell "
                                                 "whether the goal is reached", "? a"),
                                             ({"a": None, "b": False}, "The goal failed", "? a")])
def test_the_card_of_a_goal(monkeypatch, met, word, sign):
    shown = []
    monkeypatch.setattr(goals, "display", lambda data, raw, **more: shown.append((data, more)))
    goals.goal("Lion is <faster>.", met)
    [(data, more)] = shown
    assert (data["text/plain"].splitlines()[0] == f"{word}: Lion is <faster>."
            and sign in data["text/plain"].splitlines())
    assert (f"<b>{word}</b>: Lion is &lt;faster&gt;." in data["text/html"]
            and f">{sign}<" in data["text/html"])
    assert more == {}, "no claim, so no failure of the notebook"


def test_minutes_stand_below_the_title(book):
    """Those of the exercises are the exercises' own, without what is for another day; the whole
    leaves time to read."""
    later = "\n".join(cell.source
                      for cell in itertools.dropwhile(
                          lambda cell: not cell.source.startswith("## More, for another day"),
                          book.cells))
    main = [exercise for name, exercise in EXERCISES.items()
            if name.startswith(book.cells[0].source[2:4] + ".") and f'"{name}"' not in later]
    assert sum(exercise.name in PUZZLES for exercise in main) <= 5, "more is for another day"
    tasks = sum(exercise.minutes for exercise in main)
    whole, *of = map(int, re.search(r"^\*About (\d+) minutes(?:, (\d+) of them for the "
                                    r"exercises)?\.\*$",
                                    book.cells[0].source, re.MULTILINE).groups(default=0))
    words = sum(len(cell.source.split()) for cell in book.cells if cell.cell_type == "markdown")
    assert of == [tasks] and whole >= tasks + words / 250


# What is right, at tier cpu on one machine. A start within a factor of 3 of it would hold by itself
# on some machine.
RIGHT = {"00.loss": 2.6, "00.step": 0.18, "01.peak": 131, "02.mfu": 23, "03.zero": 96,
         "04.int8": 21, "05.lost": 57, "05.zero": 4.2, "06.step": 1.0,
         "09.days": 24, "09.dollars": 1.19e6, "10.bytes": 35, "11.off": 7.1, "11.won": 109,
         "12.scores": 3.75, "12.tiles_hold": 1.86, "12.moved": 10.8,
         "12.late": 0.98, "13.window": 1120, "13.kind": 564, "14.zero_one": 1.77,
         "14.zero_two": 2.67, "14.sent_one": 1.0, "14.sent_three": 1.45,
         "14.accumulated": 4.0, "15.sent": 0.78, "15.speed": 1.25, "16.sent": 10.67,
         "16.order": 1.738, "17.bubble_share": 27, "17.products": 1.67, "18.overtakes": 75,
         "18.bits": 3.87, "18.top_k": 40, "18.tenth": 8, "19.coin": 37,
         "19.fifty": 2.35, "20.soap": 38.0, "20.update": 101,
         "21.updates": 183, "21.rate": 4.04, "22.depth": 4, "22.speed": 1.18, "23.area": 18,
         "23.updates": 138, "24.peak": 67, "24.time": 75, "25.peak": 11.7,
         "25.step": 0.036, "26.muon": 140, "26.near": 34, "27.rate": 16, "28.ahead": 11,
         "28.saved": 49, "29.int3": 0.33, "29.seen": 34, "30.token": 0.26, "30.skip": 7.79,
         "30.dram": 141, "31.whole": 4.78, "31.h100": 4.31}


def test_no_guess_is_right_where_it_starts():
    ends = {}
    for book in READ.values():
        for cell in code_of(book):
            for node in ast.walk(ast.parse(cell.source)):
                match node:
                    case ast.Call(func=ast.Name(id="keep"),
                                  args=[ast.Constant(value=key),
                                        ast.Call(func=ast.Name(id="Guess"), keywords=given)]):
                        ends[key] = {keyword.arg: ast.literal_eval(keyword.value)
                                     for keyword in given if keyword.arg != "unit"}
    assert ends.keys() == RIGHT.keys()
    for key, scale in ends.items():
        assert (scale.keys() == {"low", "high"} and 3 * scale["low"] < RIGHT[key]
                < scale["high"]), key


# what draws seconds of this machine
TIMED = {"bought_figure", "cost_figure", "overlap_figure", "roofline_figure", "training_figure",
         "LiveRun"}


def test_seconds_know_what_others_took(book):
    """So that they are drawn pale where other processes took the cores."""
    for cell in code_of(book):
        for node in ast.walk(ast.parse(cell.source)):
            match node:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), keywords=given):
                    arguments = {keyword.arg: keyword.value for keyword in given}
                    seconds = name == "Row" and getattr(arguments.get("unit"), "value", "") in ("s",
                        "seconds")
                    assert ("others" in arguments
                            or not (seconds or name in TIMED)), ast.unparse(node)


def test_the_start_page_has_every_notebook_on_a_way_and_its_minutes():
    [page] = [cell.source for cell in READ[BOOKS[0]].cells if cell.id == "start-ways"]
    assert "Shift+Enter" in page
    minutes = {path.name: int(re.search(r"About (\d+) minutes", book.cells[0].source)[1])
               for path, book in READ.items()}
    ways = [(re.findall(r"\]\((\S+?\.ipynb)\)", line), int(line.rsplit("|", 2)[1]))
            for line in page.splitlines() if ".ipynb)" in line]
    assert {name for names, _ in ways for name in names} == minutes.keys()
    for names, total in ways:
        assert total == sum(minutes[name] for name in names), names
    assert f"about {sum(minutes.values()) / 60:.0f} hours" in page
    record = json.loads(next((BOOKS[0].parents[1] / "data/measured").glob(
        "course-*.json")).read_text())
    quiet = [case["ours_median"] for case in record["cases"]
             if case["case"] in [path.stem for path in BOOKS]]
    assert "between ten seconds and two minutes" in page and 10 <= min(quiet) and max(quiet) <= 120


def test_the_kernel_that_10_shows_is_one(tmp_path):
    """The notebook runs it with a `tl` of its own; here Triton's interpreter does."""
    pytest.importorskip("triton")
    cells = {cell.id: cell.source for cell in numbered("10").cells}
    kernel = cells["kernels-first-0"].partition("\n\n")[0]
    assert kernel.startswith("def double")
    code = (f"import torch, triton, triton.language as "
            f"tl\n\n@triton.jit\n{kernel.replace('BLOCK):', 'BLOCK: tl.constexpr):')}\n\n" + (
        "x, y = torch.randn(21), torch.full((40,), torch.nan)\ndouble[(3,)](x, y, 21, 8)\n"
        "assert torch.equal(y[:21], 2 * x) and y[21:].isnan().all()"))
    (tmp_path / "kernel.py").write_text(code)
    done = subprocess.run([sys.executable, "kernel.py"], cwd=tmp_path,
                          env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr


def test_a_recomputed_forward_casts_again():
    """08 says so. If casts were made once, recomputation in 8 bits would save half of what the
    first products of Linears take."""
    text = said_in("08")
    assert ("A block that runs again also casts again" in text
            and "In a narrow model it saves no time there" in text)
    saved = {}
    for name in ("gpt2-350m", "llama-8b"):
        config = lpkit.preset(name).replace({"global_batch": 4, "grad_accum_steps": 1,
            "memory.recompute": "block"})
        plain, fp8 = ({row.name: row.seconds for row in step_time(config, CATALOGUE["h100"],
            precision=recipe).rows} for recipe in ("bf16", "fp8-tensorwise"))
        products = sum(seconds for row, seconds in plain.items()
                       if row.startswith(("attention.", "mlp."))) / 3
        saved[name] = (plain["recomputation"] - fp8["recomputation"]) / products
    assert saved["gpt2-350m"] < 0.02 and 0.02 < saved["llama-8b"] < 0.5, saved


def begun(number, *words, **parameters):
    """(what a notebook's first cells leave, those cells): its parameters and imports, and the cells
    with these words, in order."""
    first, imports, *others = code_of(numbered(number))
    cells = [first, imports, *(cell for cell in others
                               if any(word in cell.source for word in words))]
    there: dict = {}
    for cell in cells:
        exec(cell.source.replace("\nbegin()", ""), there)
        there |= parameters
    return there, cells


def test_00_begins_without_a_red_line(capsys, monkeypatch, tmp_path):
    """What a kernel hears on standard error is red: also where the corpus is not prepared yet,
    which shows how far it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, cells = begun("00", "taste =", "alone = ", "keep(", "prepared(config)", tier="smoke")
    out, err = capsys.readouterr()
    assert err == "" and "tokens of python-stdlib" in out and len(cells) == 7


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_01_says_to_the_byte_above_rows_that_are_equal(recipe):
    there, cells = begun("01", "size =", "lpkit.reconcile(", "here = hardware.machine()",
                         "by_operation = kept(", tier="smoke", recipe=recipe)
    measured = {"batch": there["measured"].most["batch"], **there["measured"].operations}
    off = {name: measured.get(name, 0) - size for name, size in there["formulas"].items()
           if measured.get(name, 0) != size}
    assert (off == {"loss": 8} and measured.keys() <= there["formulas"].keys()
            and len(cells) == 6), "two single numbers"
    book = numbered("01")
    above = book.cells[[cell.source for cell in book.cells].index(cells[-1].source) - 1]
    assert ("On a CPU, in 32 or 16 bits, they agree to the byte, except for two single numbers "
            "that the loss\nkeeps" in above.source)


def test_14_names_what_trains_in_place_of_the_papers_zero_2():
    """In every figure and table of real ranks, here of stand-ins for them."""
    names, shown = [f"ZeRO {stage}" for stage in range(4)], []
    states = dict.fromkeys(ranks.STATES, 1.0)
    rank = SimpleNamespace(most=states, losses=[1.0] * 4, sent_bytes={"all-gather": 1.0},
                           messages={})
    stand_ins = dict(vars(ranks), spread=lambda *_, **options: dict.fromkeys(names, Config()),
                     states=lambda _: states, losses=lambda *_: [1.0] * 4,
                     steps=lambda configs, **_: dict.fromkeys(configs, rank), sent=lambda _: {},
                     counted=lambda _: {"all-gather": 1.0})
    begun("14", "called", tier="smoke", tiny=Config(), device="cpu", sequences=2,
          lesson=SimpleNamespace(**stand_ins), Figure=shown.append,
          HTML=shown.append, lpkit=SimpleNamespace(predict_trace=lambda *_, **__: rank),
          large={1: dict.fromkeys(names, Config())},
          least=dict.fromkeys(names, 1.0), Comparison=shown.append,
          **{f"guess_{name}": SimpleNamespace(scored=lambda row: row)
             for name in ("one", "two", "sent", "three", "more")})
    assert len(shown) >= 3
    for output in shown:
        assert "FSDP2, gathered once" in repr(output) and "ZeRO 2" not in repr(output), output
