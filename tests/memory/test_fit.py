"""Whether a step fits and what would make it, before and after: by formula against what is
measured, and runs whose memory ends in spite of it.

Only these tests catch: a named way that does not make a step fit, a refusal of a step that fits or
none of one that does not, a limit of the container that is not read, and a run that loses its
checkpoint, its report or its sentence when memory ends.
"""

import json
import math
import resource
from dataclasses import replace

import pytest
import torch

import lessons.rows.activations
import lessons.rows.disk  # noqa: F401  adds rows
from lessons.timing import in_turns
from lpkit import cli, hardware, machine_facts, measure
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.predict import fit as fits
from lpkit.predict import memory, parameter_count
from lpkit.predict.fit import ERROR, fit
from lpkit.predict.ledger import USABLE_MEMORY_SHARE
from lpkit.presets import preset
from lpkit.techniques.changes import GOVERNORS
from lpkit.techniques.memory import rows_of
from lpkit.techniques.row import TechniqueRow
from lpkit.training import checkpoint
from lpkit.training.background import train
from lpkit.training.build import decide
from lpkit.training.formulas import fit_here
from lpkit.training.runs import Run, RunFailedError, described
from lpkit.training.training import Training
from tests.attack import leaks

SMALL = Config().replace({
    "model.layers": 3, "model.width": 32, "model.heads": 2, "model.context": 64, "global_batch": 4,
    "precision.recipe": "bf16", "system.attention": "sdpa", "system.device": "cpu",
    "system.compile": False})


def room(nbytes: float):
    return replace(hardware.room("cpu"), memory_bytes=nbytes)


def peak(config: Config) -> float:
    return memory(config, room(1e12)).peak_bytes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def left(monkeypatch):
    """Sets what this machine has left."""
    return lambda nbytes: monkeypatch.setattr(hardware, "available_bytes", lambda device: nbytes)


# ---- before

def test_every_way_that_is_named_is_one_when_it_is_measured():
    whole = measure.memory(SMALL, device="cpu").peak_bytes
    asked = fit(SMALL, room(0.7 * whole))
    assert asked.refused and len(asked.ways) >= 3
    for way in asked.ways:
        assert (measure.memory(SMALL.replace(way.settings), device="cpu").peak_bytes <= 0.7
                * whole), str(way)
    slowdowns = [way.slowdown for way in asked.ways]
    assert slowdowns == sorted(slowdowns)
    named = [set(way.settings) for way in asked.ways]
    assert (all(len(keys) == 1 for keys in named) and {"memory.recompute"} in named
            and {"grad_accum_steps"} in named)


def test_where_no_single_setting_does_several_are_named_and_each_is_needed():
    config = preset("llama-1b").replace({"precision.recipe": "bf16"})
    on = room(peak(config) / 3)
    (way,) = fit(config, on).ways
    assert len(way.settings) > 1 and memory(config.replace(way.settings), on).missing_bytes <= 0
    for key in way.settings:
        fewer = {name: value for name, value in way.settings.items() if name != key}
        assert memory(config.replace(fewer), on).missing_bytes > 0


def test_what_moves_is_named_only_where_nothing_else_does():
    config = preset("llama-8b").replace({"precision.recipe": "bf16"})
    half, quarter = (fit(config, room(peak(config) / share)).ways[0] for share in (1.7, 4))
    assert math.isfinite(half.slowdown) and "memory.optimizer_state" not in half.settings
    assert quarter.slowdown == math.inf and quarter.to_dict()["slowdown"] is None


def test_where_nothing_makes_it_fit_it_is_said():
    asked = fit(SMALL, room(1e5))
    assert (asked.ways == () and "no technique of memory makes it fit; choose a smaller preset"
            in asked.sentence(1e5))


def test_the_margin_is_the_error_of_the_formula():
    whole = peak(SMALL)
    assert (not fit(SMALL, room((1 - ERROR + 0.001) * whole)).refused
            and fit(SMALL, room((1 - ERROR - 0.001) * whole)).refused)
    away = SMALL.replace({"memory.activation_offload": "int8"})
    assert (not fit(away, room(0.91 * peak(away))).refused
            and fit(away, room(0.89 * peak(away))).refused)


def test_a_way_has_the_room_that_a_plan_wants():
    asked = fit(SMALL, room(0.7 * peak(SMALL)))
    assert all(way.peak_bytes <= USABLE_MEMORY_SHARE * asked.on.memory_bytes for way in asked.ways)
    held = memory(SMALL, room(1e9))
    assert held.missing_bytes == held.peak_bytes - USABLE_MEMORY_SHARE * 1e9


@pytest.mark.parametrize("device", ["t4", "h200"])
def test_auto_is_one_precision_for_bytes_and_for_seconds(device):
    """A T4 has no bf16: what is computed in float32 there is also stored so."""
    name = {"t4": "fp32", "h200": "bf16"}[device]
    auto, named = (memory(SMALL.replace({"precision.recipe": recipe}), device)
                   for recipe in ("auto", name))
    assert (auto == named
            != memory(SMALL.replace({"precision.recipe": {"fp32": "bf16", "bf16": "fp32"}[name]}),
                      device))


def test_what_the_ledger_does_not_know_counts_as_nothing(monkeypatch):
    count = parameter_count(SMALL.model)
    compiled = fit(SMALL, room(1), compiled=True)
    assert compiled.rows == {"weights": 4 * count, "gradients": 4 * count,
                             "optimizer state": 8 * count}
    assert ("at least" in compiled.sentence(1)
            and "not counting activations, which torch.compile fuses" in compiled.sentence(1))
    monkeypatch.setitem(GOVERNORS, "toy", TechniqueRow())
    governed = fit(SMALL.replace({"governors": "toy"}), room(1))
    assert (governed.rows == {"weights": 4 * count}
            and "what its transforms and governors make of it" in governed.sentence(1))
    monkeypatch.setitem(fits.fit.__globals__, "memory",
                        lambda *_, **__: (_ for _ in ()).throw(ConfigError("no row")))
    asked = fit(SMALL, room(1))
    assert asked.rows == compiled.rows and "there is no formula (no row)" in asked.sentence(1)


@pytest.mark.parametrize("changes, each", [
    ({}, 16),
    ({"memory.param_dtype": "bf16", "precision.recipe": "bf16", "memory.moment_format": "int8",
      "optimizer.clip": 0, "memory.optimizer_step": "in-backward"}, 2 + 2 + 8 / 256)], ids=str)
def test_states_of_a_compiled_run_by_arithmetic(changes, each):
    config = SMALL.replace(changes)
    assert (fit(config, room(1), compiled=True).peak_bytes
            == pytest.approx(each * parameter_count(config.model)))


def test_a_run_of_its_own_is_not_refused_for_what_another_stack_holds():
    config = SMALL.replace({"model.norm": "rmsnorm"})
    gpu = replace(room(1e9), kind="gpu")
    other = config.replace({"system.stack": "scaling"})
    assert memory(other, gpu).peak_bytes > memory(config, gpu).peak_bytes
    assert fit(other, gpu).peak_bytes == fit(config, gpu).peak_bytes


def test_it_is_asked_of_what_a_run_uses_here():
    """Not of what "auto" might be: casts that are asked for and not kept, attention, precision."""
    config = SMALL.replace({"precision.recipe": "mxfp8", "precision.cache_weight_casts": True,
                            "system.attention": "auto"})
    decisions = decide(config)
    used = {key: choice.used for key, choice in decisions.choices.items()}
    asked = fit_here(config, decisions).config
    assert used["weight_casts"] == "cast" and not asked.precision.cache_weight_casts
    assert asked.system.attention == used["attention"] != "auto"


REFUSED = (r"takes .* at its peak \(.*\), by a formula that was 1\.5% too high at worst in "
           r"measured steps, and cpu has .* left of .*; the largest of it: " \
          r".*; it would fit with --set .*=.* \(.*B\)")


def test_train_and_measure_refuse_by_the_ledger_and_not_by_states_alone(left, tmp_path,
        monkeypatch):
    left(0.8 * peak(SMALL))
    assert 16 * parameter_count(SMALL.model) < 0.8 * peak(SMALL)
    config = SMALL.replace({"data.source": leaks.config(tmp_path).data.source})
    with pytest.raises(ConfigError, match=REFUSED):
        train(config, out=tmp_path / "run")
    for look in (measure.memory, lambda config: in_turns([config])):
        with pytest.raises(ConfigError, match=REFUSED):
            look(SMALL)
    assert not (tmp_path / "run").exists()
    amounts = iter([1e3, peak(SMALL)])      # an old model, in a cycle, was in the way
    monkeypatch.setattr(hardware, "available_bytes", lambda device: next(amounts))
    measure.Bench(SMALL)


def test_predict_measure_refuses_in_one_sentence(left, capsys):
    left(1e5)
    assert cli.main(["predict", "cpu-3m", "--measure", "--set", "system.device=cpu", "--set",
                     "precision.recipe=fp32"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "at its peak" in printed.err


def test_a_trace_takes_no_memory_and_sampling_no_step(left, tmp_path):
    from lpkit import predict_trace, sample

    run = train(leaks.config(tmp_path).replace({"steps": 1}), out=tmp_path / "run")
    left(1e3)
    assert predict_trace(SMALL).peak_bytes > 1e5 and sample(run, tokens=2)


def test_what_is_left_is_the_least_of_machine_container_and_process(tmp_path, monkeypatch):
    import psutil

    free = machine_facts.available_bytes()
    assert 0 < free <= psutil.virtual_memory().total + psutil.swap_memory().total
    files = {"memory.max": 3 * 10**8, "memory.current": 2 * 10**8,
             "memory.stat": "anon 1\ninactive_file 30000000\nactive_file 5\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(machine_facts, "CONTAINER_LIMITS", (tmp_path / "memory.max",))
    monkeypatch.setattr(machine_facts, "CONTAINER_USE", (tmp_path / "memory.current",))
    assert machine_facts.available_bytes() == 130_000_005 + psutil.swap_memory().free
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_facts.available_bytes() > 2 * 10**8
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS,
                           (machine_facts.status_bytes("VmSize") + 10**8, before[1]))
        assert 0 < machine_facts.available_bytes() <= 10**8
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---- when it happens anyway

ENDS = {
    "forward": ("lpkit.nn.mlps.GeluMLP.forward",
                torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nMore")),
    "optimizer": ("torch.optim.AdamW.step", RuntimeError("[enforce fail] DefaultCPUAllocator: "
                                                         "can't allocate memory: you tried")),
    "evaluation": ("lpkit.training.training.Training.evaluate", MemoryError()),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that no memory ends."""
    folder = tmp_path_factory.mktemp("whole")
    config = leaks.config(folder).replace({"steps": 8, "checkpoint_every": 2, "eval_every": 5,
        "grad_accum_steps": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield train(config, out=folder / "run")


@pytest.mark.parametrize("where", ENDS)
def test_a_run_whose_memory_ends_says_what_it_held_and_goes_on(tmp_path, monkeypatch, where, whole):
    config = whole.config
    (target, error), step = ENDS[where], [0]

    def at_step_5(record):
        step[0] = record.step
        if record.step == 4:
            monkeypatch.setattr(target, fail)

    def fail(*args, **kwargs):
        raise error

    with pytest.raises(RunFailedError) as raised:
        train(config, out=tmp_path / "run", observers=[at_step_5])
    monkeypatch.undo()
    run, count = Run.open(tmp_path / "run"), parameter_count(config.model)
    summary, report = run.summary, run.summary["out_of_memory"]
    assert (summary["status"] == "failed" and summary["error"] == str(raised.value)
            and "\n" not in summary["error"])
    assert (summary["steps"] == 4 and report["last_checkpoint"] == summary["last_checkpoint"]
            == "step-00000004")
    assert report["error"].startswith(type(error).__name__) and report["peak_bytes"] > 0
    held = report["held"]
    assert held["weights"] == 4 * count and held["optimizer state"] >= 8 * count
    assert held.get("gradients", 0) == (4 * count if where == "optimizer" else 0)
    assert report["held_bytes"] == sum(held.values())
    predicted = memory(config, room(1e12), attention=summary["chosen"]["attention"]["used"])
    assert (report["predicted"]["rows"] == predicted.at(predicted.peak_moment)
            and report["predicted"]["peak_bytes"] == predicted.peak_bytes)
    assert report["ways"]
    assert all(way["peak_bytes"] < predicted.peak_bytes for way in report["ways"])
    for words in ("out of memory after step 4", "held were", "predicted", "it would fit with --set",
                  "kept: step-00000004", "--resume"):
        assert words in summary["error"]
    assert dict(described(summary))["error"].startswith("out of memory after step 4")
    again = train(config, out=tmp_path / "run", resume=True)
    assert (again.summary["out_of_memory"] is None
            and [line["loss"] for line in again.metrics]
            == [line["loss"] for line in whole.metrics])


def test_a_process_that_may_have_no_more_memory(tmp_path):
    """The allocator's own error: no more address space than there is, from the third step on."""
    config = leaks.config(tmp_path).replace({
        "model.vocab": 4096, "model.context": 256, "global_batch": 16, "grad_accum_steps": 1,
        "steps": 3, "checkpoint_every": 1,
        "eval_every": 0, "model.layers": 1, "precision.recipe": "fp32"})
    before = resource.getrlimit(resource.RLIMIT_AS)
    logits = 16 * 256 * 4096 * 4

    def no_more(record):
        if record.step == 2:
            resource.setrlimit(resource.RLIMIT_AS,
                               (machine_facts.status_bytes("VmSize") + logits // 2, before[1]))

    try:
        with pytest.raises(RunFailedError,
                           match=r"out of memory after step 2.*DefaultCPUAllocator"):
            train(config, out=tmp_path / "run", observers=[no_more])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    run = Run.open(tmp_path / "run")
    assert run.summary["out_of_memory"]["held"]["weights"] == 4 * parameter_count(config.model)
    assert checkpoint.verify(checkpoint.folders(run.checkpoints)[0])
    assert json.loads((run.path / "summary.json").read_text())["last_checkpoint"] == "step-00000002"


def test_memory_that_ends_before_a_run_has_begun_is_a_sentence(tmp_path, monkeypatch):

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("lpkit.training.build.initial_model", fail)
    with pytest.raises(RunFailedError,
                       match=r"this run ran out of memory on cpu \(OutOfMemoryError: CUDA out of "
                             r"memory\); "
                                           r"predicted .* at the peak .*; it would fit with --set"):
        train(leaks.config(tmp_path), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_complete_stays_so_where_its_mfu_cannot_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "peak_flops", lambda *_: torch.full((2**60,), 0.0))
    summary = train(leaks.config(tmp_path).replace({"steps": 1}), out=tmp_path / "run").summary
    assert (summary["status"], summary["mfu"]) == ("complete", None)
    assert summary["observer_errors"][0].startswith(
        "the peak FLOP/s for the MFU: RuntimeError: [enforce fail")


def test_what_is_held_on_the_device_counts_once():
    config = SMALL.replace({"memory.optimizer_state": "disk"})
    from lpkit.training.formulas import Account
    from lpkit.training.training import RandomTokens

    training = Training.build(config, data=RandomTokens(config))
    training.update(0)
    held = Account(training).held()
    assert held == {"weights": 4 * parameter_count(config.model)}
    assert rows_of(config)["optimizer_state"].leaves
