"""Measurements against counts made another way.

Only these tests catch: a choice of threads or of bf16 without its reason, load of a neighbour that
is not seen, a peak or a ceiling that is not one, seconds that do not add up, and facts of a GPU or
of its energy that are guessed.
"""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from lessons.l02_where_the_time_goes import roofline
from lessons.saved import saved_bytes
from lessons.timing import by_phase, in_turns
from lpkit import hardware, machine_facts, measure
from lpkit.config import Config
from lpkit.hardware import SMALL_FLOPS, bf16_choice, machine, peak_bytes, reset_peak, threads_choice
from lpkit.measure.advice import advise
from lpkit.measure.updates import memory
from lpkit.predict import parameter_count, predict
from lpkit.predict.flops import products
from lpkit.presets import preset
from lpkit.techniques.machines import Machine
from lpkit.timing import interleaved_seconds
from lpkit.training import loop


def test_saved_bytes_counts_each_storage_once_and_leaves_parameters_out():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
    x = torch.ones(32, 8)
    saved = saved_bytes(model, lambda: model(x).sum())
    # the first product's input; tanh's output, which is also the second product's input
    assert saved.total_bytes == 32 * (8 + 16) * 4
    assert saved_bytes(model, lambda: model(x).sum(), ignore=[x]).total_bytes == 32 * 16 * 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_saved_bytes_tells_the_weights_16_bit_copies_apart():
    model = nn.Linear(8, 16, bias=False)
    x = torch.ones(32, 8, requires_grad=True)     # so that backward also needs the weight

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).sum()

    saved = saved_bytes(model, loss)
    assert saved.weight_copy_bytes == 8 * 16 * 2 and saved.operations == {"": 32 * 8 * 2}


def test_a_step_that_cannot_be_differentiated_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="backward cannot start from"):
        saved_bytes(model, lambda: model(torch.ones(1, 2)).detach().sum())


def test_race_alternates_and_drops_the_first_round():
    order = []
    seconds = interleaved_seconds([lambda: order.append("a"), lambda: order.append("b")], rounds=3)
    assert order == ["a", "b"] * 4 and [len(times) for times in seconds] == [3, 3]
    assert [len(times) for times in interleaved_seconds([lambda: None], rounds=100,
        within_seconds=0)] == [1]


def test_bf16_is_chosen_with_its_reason(this_machine):
    choice = bf16_choice("cpu", size=256)
    assert (choice.asked == "auto" and choice.used in ("bf16", "fp32")
            and "the speed of fp32" in choice.why)


@pytest.mark.parametrize("capability, used", [((7, 5), "fp32"), ((8, 0), "bf16")])
def test_a_gpu_is_chosen_by_its_capability(monkeypatch, capability, used):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choice = bf16_choice("cuda")
    assert (choice.used == used and f"compute capability {capability[0]}.{capability[1]}"
            in choice.why)


LARGE, CPU = 10 * SMALL_FLOPS, torch.device("cpu")


@pytest.mark.parametrize("asked, flops, before, busy, used, why", [
    (3, 1.0, "2", 0.9, "3", "requested"),                       # first what somebody wants
    # else a resumed run would sum in another order
    (None, LARGE, "1", 0.0, "1", "as when this run began"),
    (None, 0.9 * SMALL_FLOPS, None, 0.0, "1", "MFLOP"),
    (None, LARGE, None, 0.0, "4", "other processes use 0%"),
    (None, LARGE, None, 0.6, "1", "other processes use 60%"),
])
def test_threads_by_size_and_load(monkeypatch, asked, flops, before, busy, used, why):
    monkeypatch.setattr(hardware.machine_facts, "cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(hardware, "others", lambda: lambda: busy)
    choice = threads_choice(asked, CPU, flops=flops, before=before)
    assert choice.used == used and why in choice.why, choice


@pytest.mark.parametrize("allowed, used",
                         [("2", "2"), ("16", "4"), ("3,2", "3"), ("", "4"), ("many", "4")])
def test_threads_are_never_more_than_allowed(monkeypatch, allowed, used):
    monkeypatch.setattr(hardware.machine_facts, "cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    monkeypatch.setattr(hardware, "others", lambda: lambda: 0.0)
    assert threads_choice(None, CPU, flops=LARGE).used == used


def test_a_gpu_asks_nobody_for_threads(monkeypatch):
    monkeypatch.setattr(hardware, "others", lambda: pytest.fail("a GPU run waited for the load"))
    choice = threads_choice(None, torch.device("cuda"), flops=LARGE)
    assert choice.used == str(torch.get_num_threads()) and "cuda" in choice.why


@pytest.mark.skipif(sys.platform != "linux", reason="an affinity is Linux's")
def test_a_busy_neighbour_is_seen_and_oneself_is_not(tmp_path, this_machine):
    """Both processes share one core, so each gets half of it."""
    allowed, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    (busy := tmp_path / "busy").touch()
    try:
        # a daemon is nobody's child, as another user's process is
        spin = f"import os\nos.fork() and os._exit(0)\nwhile os.path.exists({str(busy)!r}): pass"
        subprocess.run([sys.executable, "-c", spin], check=True)
        share, end = hardware.others(), time.perf_counter() + 1.5
        while time.perf_counter() < end:
            pass
        with_it, again = share(), share()
        busy.unlink()
        # a child is one's own, as the ranks of a launch are
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
            share, began = hardware.others(), time.perf_counter()
            time.sleep(1)
            its, beside = sum(psutil.Process(child.pid).cpu_times()[:2]), share()
            taken = its / (time.perf_counter() - began)
            child.kill()
    finally:
        busy.unlink(missing_ok=True)
        os.sched_setaffinity(0, allowed)
    assert 0.25 < with_it < 1.01 and abs(again - with_it) < 0.1, (with_it, again)
    assert beside <= 1.1 - taken, (beside, taken)
    psutil_says = hardware.others()
    time.sleep(0.05)
    assert 0 <= psutil_says() <= 1.01


def test_what_takes_turns_can_be_watched(capsys):
    from lessons.figures.waiting import progress

    seen = []
    interleaved_seconds([lambda: seen.append(1)], rounds=3, watch=progress)
    assert len(seen) == 4 and list(progress("abc")) == list("abc") and list(progress([])) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the resident peak can be reset on Linux only")
def test_the_resident_peak_rises_with_an_allocation_and_can_be_reset():
    if not reset_peak("cpu"):
        pytest.skip("this system does not let a process reset its peak")
    before = peak_bytes("cpu")
    held = torch.ones(2**26)      # 256 MiB
    assert peak_bytes("cpu") - before >= 0.9 * held.nbytes
    del held
    assert peak_bytes("cpu") - before >= 0.9 * 2**28      # it does not shrink by itself
    reset_peak("cpu")
    assert peak_bytes("cpu") - before < 0.5 * 2**28


def test_this_machine_is_a_row_of_the_catalogue():
    here = machine("cpu")
    assert here.kind == "cpu" and here.memory_bytes > 1e9 and here.bytes_per_second > 1e8
    assert set(here.flops) == {"fp32", "bf16"} and all(rate > 1e8 for rate in here.flops.values())
    assert here.details["threads"] == torch.get_num_threads()
    predicted = predict(Config(), here)
    assert (predicted.run.cost is None and predicted.run.energy_wh is None
            and predicted.step_seconds > 0)


@pytest.mark.parametrize("dtype, error",
                         [("fp32", 1e-6), ("bf16", 1e-2), ("fp8", 0.06), ("int8", 0.02)])
def test_ceilings_are_products_of_random_numbers(dtype, error):
    """Matrices of zeros and ones would need less power, so that a device might run faster. The
    operands are normal random numbers, independent of earlier draws, in the format's precision; for
    INT8, normal numbers times 32."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    y = hardware.product((64, 128), (128, 32), dtype, torch.device("cpu"))().double()
    a, b = (hardware._drawn(shape, torch.device("cpu")) for shape in ((64, 128), (128, 32)))
    want = a.double() @ b.double() * (32**2 if dtype == "int8" else 1)
    assert (y - want).norm() / want.norm() < error and abs(a.std().item() - 1) < 0.05
    assert torch.equal(torch.get_rng_state(), before), "a measurement changed what a run draws"
    sweep, moved = hardware.triad(torch.device("cpu"))
    assert sweep().std() > 1 and moved == 3 * 4 * 2**24


@pytest.mark.parametrize("capability, low",
                         [((7, 0), ()), ((8, 0), ("int8",)), ((8, 9), ("fp8", "int8"))])
def test_formats_of_a_gpu_have_a_ceiling(monkeypatch, capability, low):
    """The low-precision formats that a GPU's hardware multiplies are measured, and `advise` then
    takes their recipes for native."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (hardware.low_formats(torch.device("cuda")) == low
            and hardware.low_formats(torch.device("cpu")) == ())
    peaks = {"fp32": 5e13, "bf16": 7e14, "fp8": 1.3e15, "int8": 1.3e15}
    here = Machine(name="this", title="a GPU", memory_bytes=80 * 2**30, bytes_per_second=3e12,
                   source="measured",
                   flops={name: peaks[name] for name in ("fp32", "bf16", *low)},
                   details={"capability": capability})
    advice = advise(preset("llama-8b"), here, base="bf16")
    native = {plan.recipe for plan in advice.plans if plan.status == "native"}
    assert ("fp8-tensorwise" in native) == ("fp8" in low) and ("int8" in native) == ("int8" in low)
    assert ("no matmul for these formats" in advice.sentence) == (not low)


def test_provenance_of_a_gpu(monkeypatch, tmp_path):
    """The driver's facts come from nvidia-smi; without it there are none."""
    want = {"driver": "580.1", "power_limit_watts": 700.0, "sm_clock_mhz": 1755.0,
            "most_sm_clock_mhz": 1980.0, "memory_clock_mhz": 1756.0}
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$1" = --id=GPU-1 ] && echo "580.1, 700.00, 1755, 1980, 1756"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine_facts.gpu_facts("GPU-1") == want
    assert machine_facts.gpu_facts("GPU-2") == {}
    smi.write_text('#!/bin/sh\necho "580.1, [N/A], [N/A], 1980, 1756"\n')
    assert machine_facts.gpu_facts("GPU-1") == {"driver": "580.1", "most_sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 1756.0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=1))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert hardware.provenance("cuda") == {"cuda": "13.0", "cudnn": 91002, "driver": "580.1",
        "most_sm_clock_mhz": 1980.0,
                                          "memory_clock_mhz": 1756.0}
    assert hardware.provenance("cpu") == {}


def test_a_step_beside_the_ceilings():
    config = Config().replace({"model.layers": 1, "model.context": 32, "global_batch": 2})
    measured = roofline(config, device="cpu", rounds=3)
    names = [p.name for p in measured.product_rates]
    assert len(names) == len(set(names)) == 3 * len(products(config.model, batch=2))
    assert len(measured.floors) == len(measured.phases) == 3 and min(measured.ratio_to_floor) > 0
    assert (measured.seconds["step"] >= measured.seconds["forward"] > 0
            and measured.floor_seconds["step"] > 0)
    assert 0 <= measured.other_cpu_share < 1.1
    assert measured.machine.flops.keys() == {measured.precision.used}


def test_a_step_is_measured_with_its_choices(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    config = Config().replace({"model.layers": 1, "model.context": 32, "global_batch": 2,
                               "precision.recipe": "bf16"})
    bench = measure.Bench(config, "cpu")
    assert (bench.precision.used == "bf16" and bench.attention.used == "blocked"
            and min(by_phase(bench)) > 0)
    held = memory(config, device="cpu")
    assert held.chosen["precision"].used == "bf16" and held.most["batch"] == 2 * 8 * 64
    assert (held.most["gradients"] == held.most["weights"]
            and held.peak_bytes > held.most["weights"] * 3)


def test_models_take_turns():
    small = Config().replace({"model.layers": 1, "model.context": 32, "global_batch": 1,
                              "precision.recipe": "fp32"})
    measured = in_turns([small, small.replace({"model.layers": 6, "global_batch": 16})],
                        device="cpu",
                     rounds=2)
    # 96 times the work
    assert 0 < measured.seconds[0] < measured.seconds[1] and 0 <= measured.other_cpu_share < 1.1
    assert measured.precision.used == "fp32" and measured.where.endswith("the best of 2 turns")


def test_seconds_by_row_add_up_and_products_are_told_by_their_sizes():
    config = Config().replace({"model.layers": 2, "model.width": 96, "model.mlp_width": 320,
                               "model.vocab": 512, "global_batch": 4,
                               "model.context": 64, "precision.recipe": "fp32",
                               "system.device": "cpu"})
    measured = measure.seconds(config, rounds=1)
    assert sum(measured.rows.values()) == pytest.approx(measured.step_seconds)
    assert {"attention.qkv", "attention.out", "mlp.up, mlp.down", "head", "attention", "optimizer",
            measure.OTHER} <= set(measured.rows)
    names = [row.name for row in measure.reconcile_seconds(config, rounds=1)]
    assert set(names) - {measure.REST} == set(measured.rows) - {measure.REST}


def test_a_counter_of_energy_is_read_and_its_source_said(tmp_path, monkeypatch):
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (package / "energy_uj").write_text("5000000\n")
    monkeypatch.setattr(hardware, "RAPL", tmp_path)
    joules, source = hardware.energy_joules("cpu")
    assert joules == 5.0 and "RAPL" in source
    assert loop._energy((5.0, source), (3605.0, source)) == {"energy_wh": 1.0,
        "energy_source": source}
    assert loop._energy((5.0, source), (3.0, source))["energy_wh"] is None      # it went round
    monkeypatch.setattr(hardware, "RAPL", tmp_path / "nothing")
    assert hardware.energy_joules("cpu") is None


@pytest.mark.parametrize("changes", [{"memory.optimizer_step": "in-backward", "optimizer.clip": 0},
    {"memory.moment_format": "int8"}],
                         ids=["in-backward", "8-bit moments"])
def test_a_step_is_timed_under_any_optimizer(changes):
    """Gradients may be freed when backward ends, and an optimizer's state may have more than
    tensors."""
    config = Config().replace({"model.layers": 1, "model.width": 32, "global_batch": 2,
                               "model.context": 16, "precision.recipe": "fp32",
                               "system.device": "cpu", **changes})
    assert min(by_phase(measure.Bench(config))) > 0
    held = memory(config)
    assert held.most["weights"] == 4 * parameter_count(config.model)
    assert ((held.most["gradients"] == held.most["weights"])
            == (config.memory.optimizer_step.name == "after"))
