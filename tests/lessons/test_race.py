"""Recipes side by side: the formula of their noise against products that were made, and what is
said about runs.

Only these tests catch: a formula of noise that products contradict, a recipe that is named though
two seeds of one differ as much, a series whose runs are not the run alone, and one that goes on
after a stop.
"""

import json
import math
from types import SimpleNamespace

import plotly.graph_objects as go
import pytest
import torch

import lpkit
from lessons import l06_fp8_training as recipe_race
from lessons.figures.figure import plain
from lessons.judging.questions import Pick
from lessons.l06_fp8_training import LiveRuns, gap_figure, telemetry_of_runs
from lessons.race import race_figure
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.kernels.cast import Noise
from lpkit.measure import telemetry
from lpkit.measure.advice import advise
from lpkit.precision.scaled import quantise
from lpkit.predict.compare import TIED
from lpkit.techniques.recipes import RECIPES
from lpkit.training.background import start_each
from tests.bench.harness import paired

CASTING = [name for name, recipe in RECIPES.items() if recipe.products]
SMALL = Config().replace({"model.layers": 2, "model.width": 128, "model.context": 64,
                          "global_batch": 8, "system.device": "cpu"})


@pytest.fixture
def tiny(corpus, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return SMALL.replace({"data.source": str(corpus / "*.py"), "steps": 6, "eval_every": 2,
                          "eval_batches": 1,
                          "checkpoint_every": 0, "precision.telemetry_every": 3,
                          "system.threads": 1})


# noise

@pytest.mark.parametrize("name", CASTING)
def test_the_formula_is_within_one_decibel_of_products_that_were_made(name):
    """All three products of a Linear of Gaussian operands, in float64, with and without the casts.
    Rotations cancel."""
    recipe, draw = RECIPES[name], torch.Generator().manual_seed(1)
    tokens, width, wide = SMALL.global_batch * SMALL.model.T, SMALL.model.D, SMALL.model.F
    x, w, g = (torch.randn(shape, generator=draw) for shape in ((tokens, width), (wide, width),
        (tokens, wide)))
    sides = {"y": (x, w), "dx": (g, w.T), "dw": (g.T, x.T)}
    shares = []
    for product, operands in sides.items():
        quantised = []
        for i, (operand, cast) in enumerate(zip(operands, getattr(recipe, product))):
            noise = Noise(seed=i + 1) if cast.rounding == "stochastic" else None
            quantised.append(
                quantise(operand.contiguous(), cast, noise=noise).dequantise(torch.float64))
        true, got = operands[0].double() @ operands[1].double().T, quantised[0] @ quantised[1].T
        shares.append(float((got - true).square().sum() / true.square().sum()))
    assert (recipe_race.predicted_db(recipe, SMALL)
            == pytest.approx(-10 * math.log10(sum(shares) / 3), abs=1))


@pytest.mark.parametrize("band, named, unnamed", [
    (None, ["fp8-rowwise", "+0.90%", "without a second seed"], ["mxfp8"]),
    (0.1, ["fp8-rowwise ended farthest", "differ by 0.10%"], ["mxfp8", "within that noise"]),
    (0.5, ["fp8-rowwise ended farthest", "within that noise: mxfp8."], ["nvfp4"]),
    (2.0, ["no recipe can be told", "within 1.20 points", "differ by 2.00%"], ["fp8-rowwise"])])
def test_a_recipe_is_named_as_the_farthest_only_where_the_noise_allows_it(band, named, unnamed):
    last = {"mxfp8": 0.5, "fp8-rowwise": 0.9, "nvfp4": -0.3}
    words = recipe_race.farthest(last, band, 40)
    assert all(word in words for word in named), words
    assert not any(word in words for word in unnamed), words


@pytest.mark.parametrize("highest, right, words", [
    (0.5, TIED, "no recipe can be told from the others"),
    (5.0, "nvfp4", "nvfp4 ended farthest above bf16")])
def test_recipes_closer_than_the_seeds_of_one_are_not_named(highest, right, words):
    by_seed = {"mxfp8": [-0.5, 0.5], "nvfp4": [highest - 0.4, highest + 0.4]}
    question = Pick("which?", [*by_seed, TIED])
    question.value = right
    question.lock()
    text = recipe_race.farthest_of_seeds(by_seed, question)
    assert words in text and f"(your guess: {right})" in text and "by up to 1.00 points" in text


def test_who_runs_on_a_cpu_and_what_is_trained():
    with pytest.raises(ConfigError, match="casts no operand"):
        recipe_race.predicted_db(RECIPES["bf16"], SMALL)
    recipes = recipe_race.contenders(torch.device("cpu"))
    # no fp16: it would be multiplied in float32; and one of those that differ by their scales' rule
    # alone
    assert set(CASTING) - set(recipes) == {"fp8-blockwise-pow2", "nvfp4-published"}
    assert recipes == [name for name in CASTING if name in recipes]
    configs = recipe_race.entries(SMALL, recipes)
    assert list(configs) == ["bf16", *recipes, recipe_race.AGAIN]
    assert [config.precision.recipe.name
            for config in configs.values()] == ["bf16", *recipes, "bf16"]
    assert [config.seed for config in configs.values()] == [0] * (1 + len(recipes)) + [1]


# what runs did

def run(losses, vals, seconds, backend="emulated"):
    metrics = [{"step": i, "loss": loss, "step_seconds": duration}
               | ({"val_loss": vals[i]} if i in vals else {})
               for i, (loss, duration) in enumerate(zip(losses, seconds), 1)]
    return SimpleNamespace(metrics=metrics, path=recipe_race.MEASURED / "nowhere",
                           summary={"status": "complete", "chosen": {"backend": {"used": backend}}})


def test_outcomes_by_hand():
    ours, base = [3.0] * 5, [3.0] * 5
    outcomes = recipe_race.outcomes({
        "bf16": run(base, {2: 4.0, 4: 2.0}, [9, 9, 2.0, 3.0, 2.5], "pytorch"),
        "mxfp8": run(ours, {2: 4.04, 4: 1.99}, [1, 1, 3.0, 2.4, 2.8]),
        "nvfp4": run(ours[:3], {2: 4.4}, [9, 9, 4.0]),
        recipe_race.AGAIN: run(base, {2: 4.4, 4: 2.06}, [9, 9, 1.5, 2.0, 2.0], "pytorch")})
    assert list(outcomes) == ["bf16", "mxfp8", "nvfp4", recipe_race.AGAIN]
    # how sure a clock is
    assert (outcomes["bf16"].gaps == {2: 0, 4: 0} and outcomes["bf16"].step_times
            == pytest.approx(2.0 / 1.5))
    assert (outcomes["mxfp8"].gaps == pytest.approx({2: 1.0, 4: -0.5})
            and outcomes["mxfp8"].last == pytest.approx(-0.5))
    # the first two steps left out; the better bf16
    assert outcomes["mxfp8"].step_times == pytest.approx(2.4 / 1.5)
    assert outcomes["nvfp4"].gaps == pytest.approx({2: 10.0})       # where both were evaluated
    assert recipe_race.band(outcomes) == pytest.approx(3.0)         # of the later half
    assert outcomes["mxfp8"].noise_db is None and outcomes["mxfp8"].backend == "emulated"


def test_a_series_that_was_stopped_early_has_less_to_say():
    assert recipe_race.outcomes({"bf16": run([], {}, [])}) == {}
    assert (recipe_race.outcomes({"bf16": run([3.0], {}, [1.0])})["bf16"].last is None
            and recipe_race.band({}) is None)
    outcomes = recipe_race.outcomes({"bf16": run([3.0], {}, [1.0]), "mxfp8": run([3.0], {}, [2.0])})
    assert (outcomes["mxfp8"].gaps == {} and outcomes["mxfp8"].last is None
            and outcomes["mxfp8"].step_times == 2.0)
    heads, rows = recipe_race.table(outcomes, {"mxfp8": 28.64}, advise(SMALL, "h200"))
    assert (len(rows[1]) == len(heads) and rows[1][:3] == ("mxfp8", "emulated", "28.6 dB")
            and rows[1][-1] == "")
    go.Figure(plain(gap_figure({}, band=None, predicted={"mxfp8": 28.6}, measured={}, base="bf16")),
              skip_invalid=False)


def test_recorded_losses_are_quoted_with_where_they_come_from(tmp_path):
    source, _, rows = recipe_race.recorded(tmp_path)
    assert "lpkit bench recipe-losses" in source and rows == []
    losses = {"bf16": [2.0, 2.5], "mxfp8": [2.01, 2.5], "nvfp4": [2.1, 2.6]}
    facts = {"device": "AMD EPYC", "date": "2026-11-21T00:26:46+00:00",
             "command": "lpkit bench recipe-losses --out data/measured",
             "steps": 300, "losses": losses}
    cases = [paired("recipe-losses", ours=losses[name], peer=losses["bf16"], peer_name="bf16",
                    case=name, better="lower",
                    unit="nats per token", target=target, facts=facts).to_dict()
        for name, target in (("mxfp8", 1.01), ("nvfp4", 1.025))]
    path = tmp_path / "recipe-losses-amd-epyc.json"
    path.write_text(json.dumps(cases[0] | {"cases": cases}))
    source, _, rows = recipe_race.recorded(tmp_path)
    assert all(words in source for words in ("Recorded", "AMD EPYC", "2026-11-21",
        "recipe-losses --out", "300 steps", "2 seeds"))
    assert rows == [("mxfp8", "1.0025", "+0.50% +0.00%", "1.01: met"),
                    ("nvfp4", "1.0450", "+5.00% +4.00%", "1.025: not met")]
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"recipe-losses-amd-epyc.json.*is not a recorded bench"):
        recipe_race.recorded(tmp_path)


# a series of runs

def test_a_series_trains_all_and_each_is_the_run_alone(tiny, tmp_path):
    configs = recipe_race.entries(tiny, ["fp8-tensorwise", "nvfp4"])
    series = start_each(configs, out=tmp_path / "series")
    live = LiveRuns(series, read=telemetry.read)
    runs = series.result()
    assert (list(runs) == list(configs) and {run.summary["status"] for run in runs.values()}
            == {"complete"})
    alone = lpkit.train(configs["nvfp4"], out=tmp_path / "alone")
    assert ([line["loss"] for line in runs["nvfp4"].metrics]
            == [line["loss"] for line in alone.metrics])

    lines, noise = live.figure.spec["data"][:-1], live.figure.spec["data"][-1]
    assert ([line["name"] for line in lines[::2]] == list(configs)
            and all(line["x"] == [1, 2, 3, 4, 5, 6] for line in lines[::2]))
    # another seed has other batches: no difference to draw
    assert lines[1]["y"] == [0] * 6 and lines[-1]["y"] == []
    assert noise["x"] == list(configs) and noise["y"][-1] == "head"
    column = {name: [row[i] for row in noise["z"]] for i, name in enumerate(noise["x"])}
    # E5M2; kept
    assert (all(24 < db < 27 for db in column["fp8-tensorwise"][:-1])
            and column["fp8-tensorwise"][-1] > 40)
    # the last block
    assert column["nvfp4"][0] < 20 and column["nvfp4"][4] > 40
    assert "done" in live.status.value and live.stop_button.disabled

    seen = recipe_race.samples(runs)
    explorer = telemetry_of_runs(seen, start={"role": "dy"})
    # from the first layer to the last, for gradients too
    assert explorer.figure.spec["data"][0]["y"] == noise["y"]
    explorer.figure.clicked = {"curve": 0, "x": "1", "y": "blocks.1.mlp.up"}
    explorer.set(run="nvfp4")
    assert (explorer.choices["layer"] == "blocks.1.mlp.up"
            and "nvfp4" in explorer.figure.spec["layout"]["title"]["text"])

    outcomes = recipe_race.outcomes(runs)
    cast = [sample for sample in seen["fp8-tensorwise"] if sample.layer != "head"]
    assert outcomes["fp8-tensorwise"].noise_db == recipe_race.measured_db(cast) == pytest.approx(
        recipe_race.predicted_db(RECIPES["fp8-tensorwise"], tiny), abs=1)
    assert outcomes[recipe_race.AGAIN].noise_db is None and recipe_race.band(outcomes) > 0


def test_stop_ends_the_run_at_hand_and_begins_no_other(tiny, tmp_path):
    series = start_each(recipe_race.entries(
        tiny.replace({"steps": 40, "precision.telemetry_every": 0}), ["int8"]), out=tmp_path)
    live = LiveRuns(series, read=telemetry.read)
    series.subscribe(lambda record: live.stop_button.click() if series.title == "int8"
                     and record.step == 3 else None)
    runs = series.result()
    assert {name: run.summary["status"] for name, run in runs.items()} == {"bf16": "complete",
        "int8": "stopped"}
    assert "stopped" in live.status.value and "int8" in live.status.value
    # losses and differences of two runs, and no telemetry
    assert len(live.figure.spec["data"]) == 4


def test_a_run_that_fails_does_not_keep_the_next_from_beginning(tiny, tmp_path):
    series = start_each({"bad": tiny.replace({"optimizer.lr": 1e30, "optimizer.clip": 0,
        "schedule.warmup_steps": 0}), "good": tiny},
                        out=tmp_path / "a")
    assert [run.summary["status"] for run in series.result().values()] == ["failed", "complete"]
    series = start_each({"impossible": tiny.replace({"precision.recipe": "fp8-blockwise",
        "model.width": 96}), "good": tiny},
                        out=tmp_path / "b")
    with pytest.raises(ConfigError, match="do not tile"):
        series.result()
    assert list(series.handles) == ["impossible"]
    with pytest.raises(ConfigError, match="at least one config"):
        start_each({})


def test_a_series_that_pauses_waits(tiny, tmp_path):
    series = start_each({"one": tiny, "two": tiny}, out=tmp_path)
    series.pause()
    assert series.title == "one" and all(handle.paused for handle in series.handles.values())
    series.resume()
    assert list(series.result()) == ["one", "two"]


# drawn

def test_plotly_accepts_the_figures():
    gaps = {name: {10: 0.1 * i, 20: -0.1 * i} for i, name in enumerate(CASTING)}
    spec = plain(gap_figure(gaps, band=0.3, predicted=dict.fromkeys(CASTING, 30.0),
                            measured=dict.fromkeys(CASTING, 29.0),
                            base="bf16", title="t"))
    go.Figure(spec, skip_invalid=False)
    most = 1.15 * 0.1 * (len(CASTING) - 1)
    assert (spec["layout"]["yaxis"]["range"] == pytest.approx([-most, most])
            and "two seeds of bf16 differ by 0.3%" in json.dumps(spec))
    go.Figure(plain(race_figure({"bf16": {1: 3.0, 2: 2.0}, "<i>": {1: 3.3}}, planned_steps=9)),
              skip_invalid=False)
    assert (race_figure({"bf16": {1: 3.0, 2: 2.0}, "b": {1: 3.3}})["data"][3]["y"]
            == pytest.approx([10.0]))
    go.Figure(plain(race_figure({})), skip_invalid=False)
