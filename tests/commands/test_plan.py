"""Layouts that cannot exist, each with its message; the search compared with an exhaustive search;
the command.

Only these tests catch: a plan that misses the fastest layout, or that lists a layout that does
not fit, does not train or breaks a limit. (tests/techniques/test_one_fact.py tests that plans
have the numbers of `lpkit predict`.)
"""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import lessons.rows.activations  # noqa: F401  adds rows
from lpkit import cli
from lpkit.commands import machine
from lpkit.commands.plan import amount, span
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.predict.device import to_search
from lpkit.predict.ledger import memory
from lpkit.predict.links import stride
from lpkit.predict.params import parameter_count
from lpkit.predict.plan import MICRO_BATCH_SIZES, USABLE_MEMORY_SHARE, largest_model, plan
from lpkit.predict.time import bill, step_time
from lpkit.presets import preset
from lpkit.techniques import machines
from lpkit.techniques.layouts import Layout, check, stages_fit
from lpkit.techniques.stages import rank_layers
from lpkit.training.runs import sealed_yaml
from lpkit.training.training import Training

LLAMA = preset("llama-70b")
H200 = machines.CATALOGUE["h200"]
SMALL = Config(global_batch=16, model=ModelConfig(layers=8, width=512, heads=8, kv_heads=4,
    mlp_width=1536, vocab=1000,
                                           context=1024))
# limits within which a small model hardly fits
CARD = replace(machines.CATALOGUE["h100"], name="card", memory_bytes=10**9)


@pytest.mark.parametrize("config, layout, devices, message", [
    (LLAMA, Layout(tensor=3), None, "model.heads=64 does not split over tensor=3 ranks; tensor may "
                                    "be 2 or 4"),
    (LLAMA, Layout(tensor=16), None, "model.kv_heads=8 does not split over tensor=16 ranks; tensor "
                                     "may be 8"),
    (LLAMA.replace({"model.mlp_width": 28_671}), Layout(tensor=2), None,
     "model.mlp_width=28671 does not split over tensor=2 ranks; tensor may be 1"),
    (LLAMA.replace({"model.vocab": 128_257}), Layout(tensor=4), None,
     "model.vocab=128257 does not split over tensor=4 ranks; tensor may be 1"),
    (LLAMA.replace({"model.context": 4}), Layout(tensor=8), None,
     "a context rank's share of model.context=4 does not split over tensor=8 ranks; tensor may be "
     "4"),
    (LLAMA, Layout(pipeline=3), None, "model.layers=80 does not split over pipeline=3 stages, not "
                                      "even with one layer "
     "fewer in the first and the last; pipeline may be 2 or 4"),
    (LLAMA, Layout(pipeline=4, interleave=3, schedule="interleaved"), None,
     "pipeline=4 x interleave=3 stages"),
    (LLAMA, Layout(pipeline=4, interleave=4), None,
     "parallel.schedule=1f1b has 1 chunk of layers a stage, got parallel.interleave=4; set "
     "parallel.interleave=1 or parallel.schedule=interleaved"),
    (LLAMA, Layout(pipeline=4, interleave=3), None, "got parallel.interleave=3; set "
                                                    "parallel.interleave=1"),
    (LLAMA, Layout(pipeline=4, schedule="interleaved"), None,
     "parallel.schedule=interleaved has 2 to 64 chunks of layers a stage, got "
     "parallel.interleave=1; set parallel.interleave=2 or parallel.schedule=1f1b"),
    (LLAMA, Layout(interleave=2), None, "interleave=2 chunks of layers need pipeline stages; set "
                                        "parallel.interleave=1"),
    (LLAMA, Layout(context=3), None, "model.context=8192 does not split into 2 x context=3 pieces "
                                     "(zig-zag deals each rank "
     "an early and a late one); context may be 2 or 4"),
    # the message once named 510 and 516, which do not split into this config's 512 micro-batches
    # either
    (LLAMA, Layout(data=3, shard=2), None, "global_batch=512 sequences does not split over data=3 "
                                           "x shard=2 = 6 ranks; set global_batch "
     "to 1536, or data x shard may be 4 or 8"),
    (LLAMA, Layout(shard=1024), None, "set global_batch to 1024, or data x shard may be 512"),
    (LLAMA, Layout(shard=8, tensor=8), 128, "data=1 x shard=8 x tensor=8 x pipeline=1 x context=1 "
                                            "is 64 devices, not 128; "
     "set parallel.data=2 or parallel.shard=16"),
    (LLAMA, Layout(shard=8, tensor=8), 100, "is 64 devices, not 100; use 64 devices"),
])
def test_a_layout_that_cannot_exist_says_why_and_what_can(config, layout, devices, message):
    with pytest.raises(ConfigError) as error:
        check(config, layout, devices)
    assert message in str(error.value)


def test_what_a_sentence_proposes_can_exist():
    for layout in (Layout(tensor=2), Layout(pipeline=4), Layout(context=4), Layout(shard=8),
                   Layout(data=2, shard=4)):
        check(LLAMA, layout)
    check(LLAMA, Layout(shard=16, tensor=8), 128)


def test_llama_3s_stages_exist():
    """126 layers on 16 stages: 8 layers per stage, 7 in the first and the last stage; in chunks,
    two of 128 slots are empty."""
    assert rank_layers(preset("llama-405b").model, Layout(pipeline=16)) == (7, *[8] * 14, 7)
    assert (stages_fit(126, 16, 1) and stages_fit(126, 16, 8) and not stages_fit(126, 15, 1)
            and not stages_fit(2, 4, 1))
    layout = Layout(tensor=8, pipeline=16, interleave=8, schedule="interleaved")
    check(preset("llama-405b"), layout)
    assert str(layout) == "tensor 8, pipeline 16, interleaved with 8 chunks a stage"


def test_ranks_that_talk_most_are_neighbours():
    layout = Layout(data=2, shard=3, tensor=5, pipeline=7, context=11)
    assert ([stride(layout, axis) for axis in ("tensor", "context", "shard", "data", "pipeline")]
            == [1, 5, 55, 165, 330])
    assert layout.devices == 2310 and layout.batch_ranks == 6 and layout.state_ranks == 33
    assert str(Layout()) == "one device" and str(Layout(shard=2, zero=1)) == "shard 2, ZeRO 1"


def exhaustive(config: Config, on: machines.Machine, devices: int, tokens: float) -> float:
    """Return the least seconds over all layouts that the plan's page says it searches, without
    its shortcuts."""
    seconds = []
    for tensor, pipeline, shard, data in itertools.product((1, 2, 4, 8), repeat=4):
        if tensor * pipeline * shard * data != devices or (pipeline > 1 and data > 1):
            continue
        for zero, chunks, micro, recompute in itertools.product((1, 3), (1, 2, 4, 8),
                MICRO_BATCH_SIZES, to_search()):
            share = config.global_batch // (data * shard)
            if ((pipeline > 1 and zero == 3) or (zero == 1 and data > 1)
                or (pipeline == 1 and chunks > 1)):
                continue
            if not stages_fit(config.model.L, pipeline, chunks) or share % micro:
                continue
            if share // micro < pipeline:
                continue
            if (chunks > 1 and (share // micro % pipeline
                                or stages_fit(config.model.L, pipeline, 2 * chunks))):
                continue
            layout = Layout(data=data, shard=shard, tensor=tensor, pipeline=pipeline, zero=zero,
                            interleave=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
            try:
                check(config, layout)
            except ConfigError:
                continue
            now = replace(config, grad_accum_steps=config.global_batch // micro)
            how = {"precision": "bf16-master", "recompute": recompute}
            if (memory(now, on, layout=layout, **how).peak_bytes <= USABLE_MEMORY_SHARE
                * on.memory_bytes):
                seconds.append(bill(step_time(now, on, layout, **how), on, tokens).seconds)
    return min(seconds)


@pytest.mark.parametrize("memory_bytes", [10**9, 80 * 10**9])
def test_the_search_finds_what_trying_everything_finds(memory_bytes):
    on = replace(CARD, memory_bytes=memory_bytes)
    planned = plan(SMALL, 1e9, on, devices=8, precisions=["bf16-master"])
    assert planned.options[0].bill.seconds == pytest.approx(exhaustive(SMALL, on, 8, 1e9), rel=1e-9)


def ranked(planned, values):
    """The layouts are in order, and the sentence counts those that the formula cannot
    distinguish from the first."""
    near = sum(value <= 1.08 * values[0] for value in values)
    assert (f"; {near} are within 8% of the first, too close" in planned.order) == (near > 1)
    return values == sorted(values)


def test_options_fit_are_ranked_and_within_the_limits():
    planned = plan(LLAMA, 1e12, "h200", budget=1.3e6, deadline_seconds=30 * 86_400)
    assert len(planned.options) > 10
    times = [option.bill.seconds for option in planned.options]
    assert ranked(planned, times) and max(times) <= 30 * 86_400
    for option in planned.options:
        assert (option.bill.cost <= 1.3e6 and option.memory.peak_bytes <= USABLE_MEMORY_SHARE
                * H200.memory_bytes)
        assert option.layout.devices == math.prod(getattr(option.layout, axis) for axis in
                                                 ("data", "shard", "tensor", "pipeline",
                                                  "context"))
        check(LLAMA, option.layout)
        config = option.config
        assert config.parallel == option.layout and Config.from_yaml(config.to_yaml()) == config
        assert config.grad_accum_steps == config.global_batch // option.time.sequences
    splits = [(o.layout.devices, o.layout.tensor, o.layout.pipeline, o.layout.context)
              for o in planned.options]
    assert len(set(splits)) == len(splits)
    assert {name for name, refusal in planned.refusals.items()
            if refusal.layouts} >= {"layout", "deadline",
        "budget"}


def test_the_commands_show_the_same_step(tmp_path, capsys):
    best = plan(preset("llama-8b"), 1e12, "h200", devices=64).options[0]
    path = tmp_path / "best.yaml"
    path.write_text(best.config.to_yaml())
    assert cli.main(["predict", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (cli.main(["plan", "--model", "llama-8b", "--tokens", "1T", "--devices", "64", "--json"])
            == 0)
    first = json.loads(capsys.readouterr().out)["plans"][0]
    for key in ("step_seconds", "peak_bytes", "tokens_per_second", "mfu", "time_rows"):
        assert printed[key] == first[key], key


def test_the_default_precision_is_one_that_lpkit_trains():
    config = preset("gpt2-124m")
    option = plan(config, 1e9, "h200", devices=8).options[0]
    assert option.precision == "bf16" and option.config.precision.recipe.name == "bf16"
    assert plan(config, 1e9, "t4", devices=8).options[0].precision == "fp32"
    paper = plan(config, 1e9, "h200", devices=8, precisions=["bf16-master"]).options[0]
    with pytest.raises(ConfigError,
                       match="lpkit does not train bf16-master, the ZeRO paper's setting"):
        paper.config  # noqa: B018


def test_a_plan_keeps_the_settings_that_it_is_given(capsys):
    def first(*more):
        assert cli.main(["plan", "--model", "gpt2-350m", "--tokens", "1e9", "--devices", "8",
                         "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["plans"][0]

    plain = first()
    for setting, changed in (
            ("optimizer=sgd", "optimizer"), ("precision.recipe=fp8-tensorwise", "precision"),
            ("memory.recompute=block", "recompute"), ("memory.param_dtype=bf16", "peak_bytes"),
            ("memory.cross_entropy=chunked", "peak_bytes"),
            ("system.attention=plain", "step_seconds")):
        other = first("--set", setting)
        assert other[changed] != plain[changed], setting
        if changed in ("optimizer", "precision", "recompute"):
            assert other[changed] == setting.partition("=")[2]


def test_flags_win_over_the_config(capsys, tmp_path):
    config = preset("gpt2-350m").replace({"precision.recipe": "fp32", "optimizer": "sgd"})
    (tmp_path / "mine.yaml").write_text(config.to_yaml())
    assert cli.main(["plan", "--model", str(tmp_path / "mine.yaml"), "--tokens", "1e9",
                     "--devices", "8", "--json",
                    "--precision", "bf16", "--optimizer", "adamw"]) == 0
    first = json.loads(capsys.readouterr().out)["plans"][0]
    assert (first["precision"], first["optimizer"]) == ("bf16", "adamw")


def test_with_a_deadline_alone_the_cheapest_comes_first():
    planned = plan(LLAMA, 1e12, "h200", deadline_seconds=30 * 86_400)
    costs = [option.bill.cost for option in planned.options]
    assert planned.first == "cheapest" and ranked(planned, costs)
    assert planned.options[0].layout.devices < max(option.layout.devices
                                                   for option in planned.options)


def test_1t_parameters_on_4096_gpus_takes_few_evaluations():
    """One core evaluates about 3,000 layouts per second."""
    config = replace(preset("dense-1t"), global_batch=2048, grad_accum_steps=1)
    assert 0.99e12 < parameter_count(config.model) < 1.02e12
    assert plan(config, 1e13, "h200", devices=4096).evaluations < 1000
    assert (plan(config, 1e13, "h200", budget=1e9, deadline_seconds=2 * 365 * 86_400).evaluations
            < 4000)
    assert plan(LLAMA, 1e12, "h200", budget=1e6, deadline_seconds=30 * 86_400).evaluations < 4000


def test_what_is_not_feasible_says_by_how_much():
    planned = plan(LLAMA, 1e12, "h200", budget=250_000, deadline_seconds=30 * 86_400)
    assert not planned.options
    cheapest = min((o for o in plan(LLAMA, 1e12, "h200", deadline_seconds=30 * 86_400).options),
                   key=lambda o: o.bill.cost)
    assert (f"${cheapest.bill.cost:,.0f}" in planned.sentence and " more each" in planned.sentence
            and "too long" in planned.sentence)
    enough = plan(LLAMA, 1e12, "h200", budget=cheapest.bill.cost + 1, deadline_seconds=30 * 86_400)
    assert enough.options[0].layout == cheapest.layout
    few = plan(LLAMA, 1e12, "h200", devices=2)
    assert not few.options and few.refusals["memory"].layouts and " more each" in few.sentence


def test_the_formula_of_the_largest_model():
    # ZeRO's 2 + 2 + 12 bytes
    assert largest_model("h200", 64) == pytest.approx(USABLE_MEMORY_SHARE * H200.memory_bytes * 64
        / 16)
    assert (largest_model("h200", 1, optimizer="sgd")
            == pytest.approx(USABLE_MEMORY_SHARE * H200.memory_bytes / 8))


@pytest.mark.parametrize("text, value", [
    ("250000", 250_000), ("250k", 250_000), ("$250,000", 250_000), ("1.5M", 1.5e6), ("1e12", 1e12),
    ("1T", 1e12),
    ("300B", 3e11), (" 2_000 ", 2000)])
def test_amounts(text, value):
    assert amount("--budget", text, 1e16) == value


@pytest.mark.parametrize("text, seconds",
                         [("30d", 30 * 86_400), ("12h", 43_200), ("2w", 14 * 86_400),
                          ("90min", 5400),
                                           ("1.5 d", 129_600)])
def test_spans(text, seconds):
    assert span("--deadline", text) == seconds


FIRST = ["plan", "--model", "llama-8b", "--tokens", "1e11"]


@pytest.mark.parametrize("arguments, message", [
    (["--budget", "-5"], "--budget must be above 0 and at most 1e+12 dollars, got '-5'"),
    (["--budget", "nan"], "--budget 'nan' is not a number of dollars; write it as 250000, 250k"),
    (["--deadline", "30"], "--deadline '30' is not a time; write it as 90min, 12h, 30d or 2w"),
    (["--deadline=-3d"], "--deadline must be above 0 and at most 100 years"),
    (["--deadline", "9999w"], "at most 100 years"),
    (["--machine", "nowhere.yaml"], "cannot read nowhere.yaml: No such file or directory; a "
                                    "machine of your own"),
    (["--devices", "0"], "devices must be from 1 to 1,000,000, got 0"),
    (["--devices", "7"], "none of"),
    (["--batch-tokens", "10000"], "--batch-tokens 10,000 is not a whole number of sequences of "
                                  "8,192 tokens; nearest: 8,192 "
     "or 16,384"),
    (["--context", "0"], "model.context must be from 1 to 16,777,216, got 0"),
    (["--price-per-hour", "-1"], "price_per_hour must be positive, got -1.0"),
    (["--top", "0"], "--top must be positive"),
    (["--show", "999", "--devices", "64"], "--show must be from 1 to "),
    (["--factor", "0"], "--factor must be from 0.1 to 10"),
    (["--set", "optimizer.lr=1"], "plan does not use optimizer.lr: it searches layouts and "
                                  "micro-batches"),
    (["--set", "parallel.tensor=8"], "plan does not use parallel.tensor"),
    (["--set", "precision.recipe=fp8-delayed", "--set",
      "precision.recipe.high_precision_layers=head"],
     "plan does not use precision.recipe.high_precision_layers"),
    (["--set", "memory.activation_offload=cpu"], "plan has no seconds for "
                                                 "memory.activation_offload=cpu"),
    (["--machine", "t4", "--precision", "bf16"], "NVIDIA T4 has no bf16; it has fp32, fp16, int8"),
])
def test_wrong_input_is_one_sentence(arguments, message, capsys):
    limit = [] if "--budget" in arguments else ["--budget", "1M"]
    assert cli.main([*FIRST, *limit, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and len(err.strip().splitlines()) == 1


def test_missing_figures_are_asked_for(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--model", "llama-8b"])
    assert stopped.value.code == 2 and "--tokens" in capsys.readouterr().err
    assert cli.main(["plan", "--model", "llama-8b", "--tokens", "1T"]) == 2
    assert "a plan needs a limit: give --budget, --deadline or --devices" in capsys.readouterr().err


def test_every_row_of_a_plan_opens_to_its_formula_and_source(capsys):
    command = [*FIRST, "--machine", "h100", "--devices", "64", "--budget", "100k", "--deadline",
               "30d"]
    assert cli.main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    assert [key for key in answer if f"`{key}`" not in page] == []
    first = answer["plans"][0]
    assert first["devices"] == 64 and first["peak_bytes"] <= answer["machine"]["usable_bytes"]
    assert sum(row["seconds"] for row in first["time_rows"]) == pytest.approx(first["step_seconds"])
    for row in (*first["memory_rows"], *first["time_rows"]):
        assert row["name"] and row["formula"] and row["source"]
    assert first["cost"] == pytest.approx(first["device_hours"]
        * machines.CATALOGUE["h100"].price_per_hour)
    assert (first["energy_wh"] == pytest.approx(first["device_hours"] * 700)
            and "rated" in first["energy_how"])
    assert {estimate["law"]
            for estimate in answer["compute_optimal"]} == {"hoffmann", "besiroglu", "kaplan"}
    assert cli.main([*command, "--show", "2", "--top", "3"]) == 0
    shown = capsys.readouterr().out
    assert ("layout 2: bytes per device" in shown and "layout 2: seconds of a step" in shown
            and "arxiv.org" in shown)
    for row in answer["plans"][1]["time_rows"]:
        assert row["name"] in shown and row["formula"] in shown
    assert all(ord(c) < 128 or c == "µ" for c in shown)


def test_a_run_is_planned_as_its_config_is(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(sealed_yaml(preset("gpt2-124m"), ""))
    answers = []
    for model in (str(tmp_path), "gpt2-124m"):
        words = ["--model", model, "--tokens", "10M", "--devices", "1", "model.changes=lora:rank=8",
                 "global_batch=6", "--json"]
        assert cli.main(["plan", *words]) == 0
        answers.append(json.loads(capsys.readouterr().out)["plans"][0])
    assert answers[0] == answers[1] and answers[0]["sequences"] * answers[0]["micro_batches"] == 6
    assert (cli.main(["predict", str(tmp_path), "--json"])
            == cli.main(["predict", "gpt2-124m", "--json"]) == 0)


def test_calibrated_plans_take_longer(capsys):
    times = []
    for factor in ("1", "1.25"):
        assert cli.main([*FIRST, "--devices", "64", "--factor", factor, "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out)["plans"][0]["run_seconds"])
    assert times[1] == pytest.approx(1.25 * times[0])


def test_a_machine_of_ones_own(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("memory_bytes: 80e9\nbytes_per_second: 3.35e12\nflops: {bf16: 989.4e12, fp32: "
                   "67e12}\n"
                   "link_bytes_per_second: 900e9\ndevices_per_node: 8\nnetwork_bytes_per_second: "
                   "50e9\nwatts: 700\n"
                   "price_per_hour: 2\n")
    mine = machine(str(path))
    h100 = machines.CATALOGUE["h100"]
    assert (mine.name == "mine" and mine.flops["bf16"] == h100.flops["bf16"]
            and mine.memory_bytes == 80_000_000_000)
    step, theirs = (step_time(LLAMA, on, Layout(shard=64, tensor=8), precision="bf16-master")
                    for on in (mine, h100))
    assert step.step_seconds == pytest.approx(theirs.step_seconds,
        rel=0.05), "nothing is known of what it reaches: as an H100"
    assert ("no published run is of this kind" in step.spread.words
            and step.spread.high > theirs.spread.high)
    assert cli.main([*FIRST, "--machine", str(path), "--devices", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["cost"] > 0
    assert cli.main(["predict", "gpt2-124m", "--machine", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["name"] == "mine"


@pytest.mark.parametrize("values, message", [
    ({}, "the machine lacks memory_bytes, bytes_per_second, flops; it needs memory_bytes"),
    ([1], "a machine is a table of settings"),
    ({"memory": 1}, "a machine has no 'memory'; did you mean 'memory_bytes'?"),
    ({"flops": {"bf15": 1}}, "flops has no dtype 'bf15'; did you mean 'bf16'?"),
])
def test_a_machine_that_is_none(values, message):
    whole = ({"memory_bytes": 80e9, "bytes_per_second": 3e12, "flops": {"bf16": 1e15}, **values}
             if values and \
        isinstance(values, dict) else values)
    with pytest.raises(ConfigError) as error:
        machines.from_dict(whole)
    assert message in str(error.value)


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["fp32", "fp8-tensorwise"])
def test_every_layout_that_a_plan_lists_for_four_devices_trains(precision, on_ranks):
    """Two updates of each layout on four processes. The first loss is that of one process: to
    1e-6 in float32; to 2% if a part of a matrix has a scale of its own."""
    config = Config().replace({"model.layers": 4, "model.width": 64, "model.heads": 4,
                               "model.context": 64, "model.vocab": 272, "global_batch": 16,
                               "grad_accum_steps": 1, "system.device": "cpu", "system.threads": 1,
                               "precision.recipe": precision})
    planned = plan(config, 1e6, "h100", devices=4, precisions=[precision])
    assert len(planned.options) > 4 and not any(option.why_untrained for option in planned.options)
    layouts = [{**{f"parallel.{key}": value for key, value in vars(option.layout).items()},
                "grad_accum_steps": option.config.grad_accum_steps} for option in planned.options]
    due = Training.build(config).update(0).loss.item()
    for losses in on_ranks("losses", config, 4, layouts=layouts):
        assert losses == pytest.approx([due] * len(layouts),
                                       rel=1e-6 if precision == "fp32" else 2e-2)
