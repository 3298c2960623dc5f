"""Parts of notebooks 21 and 28: a sweep that is drawn while it goes on, laws of warm-up, and sizes
that grow.

Only these tests catch: a sweep that is drawn late, twice or without its lost trials, a law of
warm-up that its authors do not state, and batches of other sizes than were predicted.
"""

import asyncio
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from lessons import l21_noise_scale_and_schedules as schedules
from lessons import l28_search as lesson
from lpkit.claims import sweep
from lpkit.errors import ConfigError
from lpkit.predict import predict
from lpkit.training.training import Training

pytest.importorskip("optuna")


def made_up(what, configs, judges):
    results = []
    for config, judge in zip(configs, judges):
        loss = (None if config.optimizer.lr > 0.05
                else 2 + (math.log10(config.optimizer.lr) + 2) ** 2)
        curve = [(step, loss and loss + 10 / step) for step in range(5, 41, 5)]
        judge(curve)
        results.append({"val_loss": loss, "seconds": 1.0, "error": None if loss else "inf",
                        "name": "x", "evaluations": curve})
    return results


def test_a_sweep_is_drawn_again_as_trials_end(tmp_path):
    out, drawn = tmp_path / "few", []
    live = lesson.LiveSweep(lesson.SEARCHED, out)
    assert (live.spec["layout"]["title"]["text"].startswith("0 of 16 trials")
            and live.spec["data"][0]["dimensions"][0]["values"] == [])

    def ended(trials):
        live.look()
        shown = live.spec
        live.look()
        assert live.spec is shown, "no other trial, no other figure"
        drawn.append(len(shown["data"][0]["line"]["color"]))

    settled = sweep.settle(lesson.SEARCHED, out, made_up, ended)
    lost = [lesson.last_loss(trial) is None for trial in settled["trials"]]
    assert (drawn == list(itertools.accumulate(not gone for gone in lost))
            and any(lost)), "each with a number has a line"
    spec = live.spec
    # plotly knows every key
    go.Figure({"data": spec["data"], "layout": {"title": spec["layout"]["title"]}})
    pruned = [trial for trial in settled["trials"] if trial["pruned"]]
    assert spec["layout"]["title"]["text"] == f"16 of 16 trials, {len(pruned)} pruned" and pruned
    rate, beta1, schedule, ended, losses = spec["data"][0]["dimensions"]
    there = [trial for trial, gone in zip(settled["trials"], lost) if not gone]
    assert rate["values"] == pytest.approx([math.log10(trial["settings"]["optimizer.lr"])
        for trial in there]) and rate["range"] == [-4, -1]
    assert rate["ticktext"] == ["0.0001", "0.001", "0.01", "0.1"] and beta1["range"] == [0.5, 0.99]
    assert ([schedule["ticktext"][i] for i in schedule["values"]]
            == [trial["settings"]["schedule"] for trial in there])
    assert ended["values"] == [trial["pruned"]["step"] if trial["pruned"] else 40
                               for trial in there]
    assert (losses["values"] == spec["data"][0]["line"]["color"]
            == [lesson.last_loss(trial) for trial in there])
    ends = [trial["pruned"]["step"] if trial["pruned"] else 40 for trial in settled["trials"]]
    assert lesson.saved_steps(settled["trials"], 40) == pytest.approx(1 - sum(ends) / 16 / 40)


def test_a_search_runs_in_a_thread_and_may_be_watched(tmp_path):
    searched = replace(lesson.SEARCHED, trials=7,
                       settings={**lesson.SEARCHED.settings, "steps": 10})
    search = lesson.Search(searched, tmp_path / "few").begin()
    live = lesson.LiveSweep(searched, search.out)
    with ThreadPoolExecutor(1) as pool:     # a test with a browser has left a loop of its own here
        result = pool.submit(lambda: asyncio.run(live.until(search))).result()
    assert (len(result["trials"]) == 7 == live.drawn
            and live.spec["layout"]["title"]["text"].startswith("7 of 7 trials"))
    assert not [path for path in tmp_path.iterdir() if path.is_dir() or path.suffix == ".stop"]


def test_laws_of_warm_up_say_what_their_authors_say():
    config = schedules.config("adamw", 16, 0.01)
    assert [schedules.untuned(config.replace({"optimizer.beta2": beta2}))
            for beta2 in (0.9, 0.95, 0.98, 0.999)] == [20, 40, 100, 2000]
    for sizes in ({}, {"sizes": "batch-ramp", "grad_accum_steps": 4}, {"sizes": "length-ramp"}):
        config = schedules.config("adamw", 16, 0.01).replace({"steps": 200, **sizes})
        for tokens in (1, 128, 129, 512, 513, 6_400, 70_000, 10**9):
            read, steps = 0, 0
            while read < tokens and steps < 200:    # by counting
                read, steps = read + math.prod(config.sizes_at(steps)), steps + 1
            assert schedules.steps_of(config, tokens) == steps, (sizes, tokens)
    # 300 billion tokens
    whole = schedules.config("adamw", 1500, 0.01).replace({"model.context": 1000, "steps": 200_000})
    assert schedules.WARMUPS["as GPT-3: 1/800 of the tokens"](whole) == 250


@pytest.mark.parametrize("name, shapes",
                         [("batch-ramp", [(4, 32), (8, 32), (16, 32)]),
                          ("length-ramp", [(16, 8), (16, 16), (16, 32)])])
def test_updates_that_grow_have_the_sizes_that_are_predicted(name, shapes):
    config = schedules.config("adamw", 16, 0.01).replace({"sizes": name, "grad_accum_steps": 4,
        "steps": 200})
    training = Training.build(config)
    assert ([tuple(training.batch(step).tokens.shape) for step in (0, 49, 50, 99, 100, 199)]
            == [shape for shape in shapes for _ in (0, 1)])
    assert math.isfinite(training.update(0).loss.item())
    tokens = sum(training.batch(step).tokens.numel() for step in range(200))
    assert config.tokens_after(200) == tokens
    whole = config.replace({"sizes": "constant"})
    assert (predict(config, "h200").run.seconds / predict(whole, "h200").run.seconds
            == pytest.approx(tokens / whole.tokens_after(200)))
    assert predict(config, "h200").memory == predict(whole,
        "h200").memory, "that of the largest update"
    if name == "batch-ramp":
        with pytest.raises(ConfigError, match="let it give a multiple of 16"):
            Training.build(config.replace({"grad_accum_steps": 1}))
