"""One number, one place: in how many modules each fact of a technique is written. One.

A fact is found by how it must be written in code: its pattern, in lines without comments and
docstrings. Formats and recipes may be *named* anywhere; their numbers stand in their row. Exercises
are a learner's own sums and do not count, nor does what hardware multiplies
(`techniques/hardware.py`), which is a fact of the hardware; nor what a Triton kernel must have as a
literal.

And one question, one answer: whoever is asked what a run takes, a command, Python, the browser's
planner, a view of a notebook, the check before a run, says the same number to the last bit.

Only these tests catch: a fact that is written a second time, and a door that has another number of
bytes, seconds or dollars than the others.
"""

import ast
import importlib.util
import json
import random
import re
from pathlib import Path

import pytest

import lessons.rows.activations
import lessons.rows.disk
import lessons.rows.optimizers  # noqa: F401  ten rules more
from lessons.l01_memory_math import memory_view
from lessons.l08_recompute_and_offload import predicted, with_technique
from lessons.l09_predict_before_you_rent import Candidate, triangle
from lpkit import cli
from lpkit.measure.advice import advise
from lpkit.predict import memory, predict
from lpkit.predict.casts import why_emulated
from lpkit.predict.device import to_search
from lpkit.predict.fit import fit
from lpkit.predict.flops import training_flops, training_flops_per_token
from lpkit.predict.params import parameter_count
from lpkit.predict.plan import Plan, plan
from lpkit.predict.recipes import precision_of
from lpkit.predict.time import bill, step_time
from lpkit.predict.units import duration, quantity
from lpkit.presets import preset
from lpkit.techniques import machines, optimizers
from lpkit.techniques.machines import CATALOGUE
from lpkit.techniques.recipes import RECIPES
from tests.pages import claim_numbers as claims

ROOT = Path(__file__).parents[2] / "lpkit"
ELSEWHERE = {"techniques/hardware.py", "precision/scaled_mm.py", "measure/matrix.py",
             "kernels/amax.py", "kernels/fused_cast.py", "kernels/rounding.py"}
FACTS = {
    # data/published/formats.toml
    "bits of a format": (r"\b(exponent_bits|mantissa_bits)=\d", None),
    "largest value of a format": (r"\b(448|57344|65504)\.0\b", None),
    "blocks that share a scale": (r"\(1, (16|32|128)\)|\((16, 16|128, 128)\)",
                                  "techniques/recipes.py"),
    "bytes of a recipe's scale": (r"\bScale\(bytes=|\bscale_bytes=[1-9]", "techniques/recipes.py"),
    "amaxes that are remembered": (r"\b1024\b.*histor|histor.*\b1024\b", "techniques/recipes.py"),
    "state bytes of an optimizer": (r"\bbytes=(FLOAT32|1 \+ FLOAT32)", "techniques/optimizers.py"),
    "numbers that share a scale of 8-bit state": (r"^BLOCK = 256\b", "techniques/optimizers.py"),
    "sizes of q, k and v": (r"H \+ 2 \* [a-z.]*G\b", "predict/attention.py"),
    "sizes of an MLP": (r"\b2 \* [a-z]+\.F\b", "techniques/blocks.py"),
    "passes over scores": (r"\bscore_passes=\(\d", "predict/attention.py"),
    # data/published/machines.toml
    "memory of a machine": (r"\bmemory_(bytes|mib)=\d", None),
}


def code_of(path: Path) -> str:
    """Without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (isinstance(body, list) and body and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)):
            body[0].value = ast.Constant(value=0)
    return ast.unparse(tree)


@pytest.fixture(scope="module")
def code():
    modules = {str(path.relative_to(ROOT)): code_of(path) for path in sorted(ROOT.rglob("*.py"))}
    return {name: text for name, text in modules.items() if name not in ELSEWHERE
            and "exercises" not in name}


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_is_written_in_one_module(fact, code):
    pattern, home = FACTS[fact]
    assert ([name for name, text in code.items() if re.search(pattern, text, re.MULTILINE)]
            == [home] * bool(home))


# ---- one question, one answer

QUESTIONS = 80
PLANNED = 6         # of them a whole search of `plan` is asked, too


def load_planner():
    path = ROOT.parent / "docs" / "planner" / "answer.py"
    spec = importlib.util.spec_from_file_location("docs_planner_answer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


planner = load_planner()


def question(draw):
    """A Config and a machine."""
    data, shard = draw.choice(((1, 1), (1, 1), (2, 1), (1, 8), (4, 2), (1, 64)))
    pieces = draw.choice((1, 1, 4))
    config = preset(draw.choice(("gpt2-124m", "gpt2-1.5b", "llama-1b", "llama-8b",
                                 "cpu-3m"))).replace({
        "precision.recipe": draw.choice(("auto", *RECIPES)),
        "precision.backend": draw.choice(("auto", "auto", "auto", "emulated")),
        "memory.recompute": draw.choice(to_search()),
        "memory.cross_entropy": draw.choice(("full", "chunked")),
        "memory.activation_offload": draw.choice(("device",) * 4 + ("cpu", "int8")),
        "memory.moment_format": draw.choice(("float32", "int8")),
        "optimizer": draw.choice(sorted(optimizers.OPTIMIZERS)),
        "system.attention": draw.choice(("auto", "sdpa", "plain")),
        "parallel.data": data, "parallel.shard": shard, "parallel.zero": draw.randrange(4),
        "parallel.reduction": draw.choice(("per-parameter", "buckets", "overlapped")),
        "global_batch": 64 * pieces * draw.choice((1, 2)), "grad_accum_steps": pieces,
        "steps": draw.choice((1, 1000, 123_456))})
    return config, draw.choice((*CATALOGUE,))


def refused(config, name):
    """16-bit recipes need 16-bit units; what a recipe casts is emulated where it is not
    multiplied."""
    on = machines.find(name)
    needs = RECIPES.get(config.precision.recipe.name)
    return needs is not None and not needs.products and needs.dtype not in on.flops


def drawn():
    draw, questions = random.Random(23), []
    while len(questions) < QUESTIONS:
        asked = question(draw)
        if not refused(*asked):
            questions.append(asked)
    return questions


def by_command(config, name, path, capsys):
    path.write_text(config.to_yaml())
    assert cli.main(["predict", str(path), "--machine", name, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_door_says_the_same(tmp_path, capsys):
    natives, emulated, fits = 0, 0, 0
    for number, (config, name) in enumerate(drawn()):
        on = machines.find(name)
        held, step = memory(config, name), step_time(config, name)
        bytes_, seconds = held.peak_bytes, step.step_seconds
        paid, count = bill(step, on, config.tokens_per_step * config.steps), parameter_count(
            config.model)
        natives, emulated, fits = natives + (not step.emulated), emulated + bool(
            step.emulated), fits + held.fits
        # lpkit.predict, and `lpkit predict`
        prediction = predict(config, name)
        assert (prediction.memory, prediction.step.rows, prediction.parameters,
                prediction.run.cost) == (held, step.rows, count, paid.cost), number
        printed = by_command(config, name, tmp_path / "asked.yaml", capsys)
        assert (printed["peak_bytes"], printed["step_seconds"], printed["parameters"],
                printed["cost"]) == (bytes_, seconds, count, paid.cost), number
        assert (printed["flops_per_token"] == training_flops_per_token(config.model)
                == prediction.flops_per_token)
        assert step.model_flops == training_flops(config.model, batch=config.global_batch)
        assert (printed["fits"], printed["doubt"], printed["assumptions"]["emulated"]) == (
            held.fits, held.doubt, step.emulated), number
        # the check before a run
        answer = fit(config, on)
        assert (sum(answer.rows.values()), answer.peak_bytes) == pytest.approx((bytes_, bytes_),
            rel=1e-12), number
        # claims, and their frontier
        assert (claims._peak(config, name) == bytes_
                and claims._seconds(config, name) == seconds), number
        if paid.cost is not None:
            (point,) = triangle([Candidate(name="it", config=config, machine=name,
                tokens=paid.tokens)])
            assert ((point.values["days"] * 86_400, point.values["dollars"])
                    == pytest.approx((paid.seconds, paid.cost), rel=1e-12)), number
        # plan prices a layout that it is given
        asked = precision_of(config, on)
        if config.memory.activation_offload.name == "device":
            search = Plan(config, paid.tokens, on, config.optimizer.name, None, budget=1e30,
                          deadline=1e30)
            search.precision = asked
            recompute = config.memory.recompute.name
            option = search.option(config, config.parallel, recompute,
                                   search.held(config, config.parallel, recompute))
            assert (option.memory, option.time.rows, option.bill.cost) == (held, step.rows,
                paid.cost), number
        # advise, where there is something to weigh
        if (RECIPES.get(asked) or RECIPES["fp32"]).products:
            advice = advise(config, name, recipes=[asked])
            cost, base = advice[asked].cost, predict(config, name, precision=advice.base)
            assert (cost.step_seconds, cost.base_step_seconds) == (seconds,
                base.step_seconds), number
            assert cost.more_bytes == pytest.approx(bytes_ - base.memory.peak_bytes, abs=2), number
            assert (advice[asked].status == "emulated") == bool(step.emulated), number
            assert cost.speedup == base.step_seconds / seconds
    assert natives > 24 and emulated > 12 and 8 < fits < 72


def test_the_planner_in_the_browser_says_the_same():
    """Its controls say a layout of shards: those of the questions that it can ask."""
    asked = 0
    usual = {control["name"]: control["value"] for group in planner.choices()
             for control in group["controls"]}
    for config, name in drawn():
        layout = config.parallel
        model = next(key for key in ("gpt2-124m", "gpt2-1.5b", "llama-1b", "llama-8b", "cpu-3m")
                     if preset(key).model == config.model)
        on = machines.find(name)
        # settings that the page has no control for are the preset's
        base = preset(model).replace({"memory.recompute": config.memory.recompute.name,
                                      "optimizer": config.optimizer.name})
        config = base.replace({"global_batch": config.global_batch,
                               "grad_accum_steps": config.grad_accum_steps, "steps": config.steps,
                               "precision.recipe": config.precision.recipe.name,
                               "parallel.data": layout.data, "parallel.shard": layout.shard,
                               "parallel.zero": layout.zero})
        tokens = config.global_batch * config.model.context
        given = {**usual, "model": model, "machine": name, "devices": layout.devices,
                 "data": layout.data, "zero": layout.zero,
                 "precision": precision_of(config, on), "recompute": config.memory.recompute.name,
                 "optimizer": config.optimizer.name,
                 "batch": config.global_batch, "micro_batch": config.global_batch
                 // config.grad_accum_steps,
                 "billions": config.steps * tokens / 1e9}
        out = json.loads(planner.answer(json.dumps(given)))
        assert "error" not in out, out
        prediction = predict(config, name)
        assert (out["prediction"]["peak_bytes"] == out["bytes"]["whole"]
                == prediction.memory.peak_bytes)
        assert (out["prediction"]["step_seconds"] == out["seconds"]["whole"]
                == prediction.step_seconds)
        assert (out["prediction"]["cost"] == prediction.run.cost
                and out["facts"]["step"] == duration(prediction.step_seconds))
        asked += 1
    assert asked == QUESTIONS


def test_what_notebooks_show_is_the_same():
    """Views say digits; the studies' helpers say numbers."""
    for config, name in drawn()[:30]:
        on, recompute = machines.find(name), config.memory.recompute.name
        config = config.replace({"parallel.data": 1, "parallel.shard": 1})
        asked = precision_of(config, on)
        spec, _ = memory_view(config, on, 4, 8, asked, config.optimizer.name, 1, recompute)
        held = predict(config.replace({"global_batch": 32, "grad_accum_steps": 1,
                                       "precision.recipe": asked,
                                       "parallel.shard": 8, "parallel.zero": 1,
                                       "parallel.reduction": "overlapped"}), name).memory
        title = (spec["layout"]["title"]["text"] if isinstance(spec["layout"]["title"], dict)
                 else spec["layout"]["title"])
        assert f"A peak of {quantity(held.peak_bytes, 'bytes')} " in title
        for technique, shown in predicted(config, on).items():
            assert shown.memory == predict(with_technique(config, technique), on).memory, technique


def test_what_plan_finds_is_what_predict_says():
    for config, name in drawn()[:PLANNED]:
        config = config.replace({"memory.activation_offload": "device"})
        plans = plan(config, 1e9, name, devices=8)
        for option in plans.options[:3]:
            prediction = predict(option.config, name)
            assert (prediction.memory, prediction.step.rows) == (option.memory, option.time.rows)
            assert prediction.layout.devices == 8


def test_a_search_says_that_it_is_one():
    """`--devices` searches what fits, and says so; without it a Config is answered as it is."""
    config = preset("llama-8b")
    requested, searched = predict(config, "h200"), predict(config, "h200", 1)
    assert (requested.assumptions["recompute"] == "none"
            and requested.assumptions["layout_why"].startswith("as requested; --devices searches"))
    assert (searched.assumptions["recompute"] != "none"
            and searched.assumptions["layout_why"].startswith("the first that fits"))


def test_what_is_emulated_is_what_backends_say_by_rule():
    """Predictions without torch, and the page of docs/matrix.md, have one rule."""
    from tests.pages import matrix

    for name, on in CATALOGUE.items():
        for recipe, row in RECIPES.items():
            if row.products:
                (cell,) = [c for c in matrix.by_rule(name)
                           if (c.recipe, c.backend) == (recipe, "scaled_mm")]
                native = cell.status == "native" and row.dtype in on.flops
                assert native == (not why_emulated(row, on)), (name, recipe)
