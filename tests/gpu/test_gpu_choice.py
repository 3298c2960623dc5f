"""Which GPU a run takes, and which sentence a GPU ends in that is too old, broken or absent.

Only these tests catch ranks that share a GPU, a GPU that PyTorch or Triton was not built for and
that a run takes anyway, a count of GPUs that is not CUDA's, and a refusal that names no way out.
"""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lpkit import cli, hardware, machine_facts
from lpkit.commands import doctor as doctor_command
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure import doctor
from lpkit.nn import library_attention as library_attention_torch
from lpkit.parallel.ranks import Ranks
from lpkit.precision.backends import BACKENDS
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import Attending, why_not
from lpkit.techniques.recipes import RECIPES
from lpkit.training import build, formulas
from tests.gpu.fake_gpus import gpus


@pytest.fixture
def four(monkeypatch):
    """PyTorch sees four GPUs; the list has which was made the current one."""
    devices = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(hardware, "why_no_gpu", lambda index=None: "")
    return devices


def decided(device: str, monkeypatch, ranks: Ranks | None = None) -> None:
    def stop(*_, **__):
        raise InterruptedError

    # the next thing after the device
    monkeypatch.setattr(build.hardware, "threads_choice", stop)
    with pytest.raises(InterruptedError):
        build._decide(Config().replace({"system.device": device}), None, ranks or Ranks())


def test_the_gpu_that_was_asked_for_is_the_current_one(four, monkeypatch):
    """Triton launches on the current GPU, whatever its tensors' is."""
    decided("cuda:3", monkeypatch)
    assert four == [torch.device("cuda:3")]
    decided("cpu", monkeypatch)
    assert len(four) == 1


def test_ranks_do_not_share_one_gpu(four, monkeypatch):
    with pytest.raises(ConfigError, match=r"^system\.device=cuda:0 names one GPU, and 2 processes "
                                          "take a GPU each; use system.device=cuda, "):
        decided("cuda:0", monkeypatch, SimpleNamespace(local_rank=1, local_world=2))
    decided("cuda", monkeypatch, SimpleNamespace(local_rank=2, local_world=4))
    assert four == [torch.device("cuda:2")]


# ---- a GPU that no run can use: one sentence, the way out, exit code 2

P100 = {"name": "Tesla P100-PCIE-16GB", "major": 6, "minor": 0}
BUILT = ["sm_75", "sm_80", "sm_90", "sm_100", "compute_120"]
TOO_OLD = ("The NVIDIA driver on your system is too old (found version 11040). Please update your "
           "GPU driver by downloading and installing a new version from the URL: "
           "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to "
           "install a PyTorch version that has been compiled with your version of the CUDA driver.")
BUSY = ("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be "
        "asynchronously reported")
TRAIN = ["train", "cpu-3m", "--set", "steps=1", "--set"]


def raising(words):
    def call(*_):
        raise RuntimeError(words)

    return call


def refused(device, capsys, tmp_path):
    assert cli.main([*TRAIN, f"system.device={device}", "--out", str(tmp_path / "run")]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and not (tmp_path / "run").exists()
    assert error.endswith("; use system.device=cpu, and see `lpkit doctor` and nvidia-smi for the "
                          "reason\n"), error
    return error


CAPABILITY = " has compute capability "


@pytest.mark.parametrize("device, broken, about, words", [
    ("auto", {"get_arch_list": lambda: BUILT}, P100,
     f"Tesla P100-PCIE-16GB{CAPABILITY}6.0, and PyTorch .* is built for sm_75, sm_80, .*; install"),
    ("cuda", {"get_arch_list": lambda: ["sm_50", "sm_60"]}, P100,
     f"Tesla P100-PCIE-16GB{CAPABILITY}6.0, and Triton needs 7.0;"),
    ("auto", {"get_arch_list": lambda: BUILT[:4]}, {"name": "RTX 5090", "major": 12, "minor": 0},
     f"RTX 5090{CAPABILITY}12.0, and PyTorch"),
    ("cuda", {"init": raising(TOO_OLD)}, {},
     r"The NVIDIA driver on your system is too old \(found version 11040\). .*CUDA driver;"),
    ("auto", {"mem_get_info": raising(BUSY)}, {},
     "CUDA error: all CUDA-capable devices are busy or unavailable;"),
], ids=["older than PyTorch", "older than Triton", "newer than PyTorch", "driver", "busy"])
def test_a_gpu_that_no_run_can_use(device, broken, about, words, monkeypatch, capsys, tmp_path):
    with gpus(**about):
        for name, broken_function in broken.items():
            monkeypatch.setattr(torch.cuda, name, broken_function)
        error = refused(device, capsys, tmp_path)
        assert re.match(f"lpkit: system.device={device}: {words}", error), error
        assert hardware.usable() == "cpu"
        machine = doctor.machine()
        assert re.match(words.rstrip(";"), machine["gpu_problem"]) and len(machine["gpus"]) == 1
        shown = "\n".join(doctor_command.Page().lines({"machine": machine, "device": "cpu"}))
        assert machine["gpu_problem"][:40] in shown
        monkeypatch.undo()


def test_a_driver_that_shows_pytorch_no_gpu_is_no_reason_to_take_the_cpu(monkeypatch, capsys,
        tmp_path):
    """After an update of the driver, before the machine began again, PyTorch counts none; CUDA's
    files are there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init",
                       raising("CUDA driver initialization failed, you might not have a CUDA gpu."))
    monkeypatch.setattr(build, "gpus", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert build.choose_device("auto").used == "cpu", "a build for CPUs was installed on purpose"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "PyTorch sees 0 GPUs (CUDA driver initialization failed, " in refused("auto", capsys,
                                                                                 tmp_path)
    monkeypatch.setattr(build, "gpus", lambda: 0)
    assert build.choose_device("auto").used == "cpu" and build.choose_device("cpu").used == "cpu"


@pytest.mark.parametrize("device, count", [("cuda:2", 2), ("cuda:0", 0)])
def test_a_gpu_that_is_not_there(device, count, monkeypatch, capsys, tmp_path):
    with gpus(2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        assert (f"system.device={device}: it was asked for, but PyTorch sees {count} GPUs"
                in refused(device, capsys, tmp_path))
        monkeypatch.undo()


def test_memory_of_other_processes_is_named(monkeypatch):
    """Beside what this run takes, and what would fit."""
    with gpus(total_memory=80 * 2**30):
        config = Config().replace({"system.device": "cuda", "precision.recipe": "bf16",
                                   "system.compile": False, "global_batch": 256})
        for free, message in ((2**28, r"and cuda has 268 MB left of 85\.9 GB, of which 85\.6 GB "
                                      r"are used by other processes \(nvidia-smi names them\); "
                                      r"the"),
                              (80 * 2**30, None)):
            monkeypatch.setattr(torch.cuda, "mem_get_info",
                                lambda device=None, free=free: (free, 80 * 2**30))
            used = {"precision": "bf16", "attention": "sdpa", "compile": "off"}
            choices = {key: SimpleNamespace(used=value) for key, value in used.items()}
            decisions = SimpleNamespace(device=torch.device("cuda"), choices=choices)
            with pytest.raises(ConfigError, match=message) if message else nullcontext():
                formulas.refuse_what_cannot_fit(config, decisions)
        monkeypatch.undo()


@pytest.mark.parametrize("architecture, has, runs", [
    ("sm_80", 86, True), ("sm_80", 90, False), ("sm_86", 80, False), ("compute_80", 120, True),
    ("sm_90a", 90, True), ("sm_100a", 103, False), ("sm_100f", 103, True), ("sm_120", 121, True),
    ("compute_120", 100, False)])
def test_what_machine_code_runs_on(architecture, has, runs):
    assert hardware._made_for(architecture, has) is runs


@pytest.mark.parametrize("visible, count", [
    (None, 4), ("", 0), ("2, 3", 2), ("0,-1,2", 1), ("9,1", 0), ("GPU-8a,GPU-9b", 2),
    ("NoDevFiles", 1)])
def test_gpus_are_counted_as_cuda_counts_them(visible, count, monkeypatch, tmp_path):
    """Up to the first that is none."""
    for n in range(4):
        (tmp_path / f"nvidia{n}").touch()
    (tmp_path / "nvidiactl").touch()
    real = machine_facts.Path
    monkeypatch.setattr(machine_facts, "Path", lambda name: tmp_path if name == "/dev"
                        else real(name))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_facts.gpus() == count


@pytest.mark.parametrize("capability, reason", [
    ((7, 5), "needs compute capability 8.0, and here is 7.5; plain can"), ((8, 0), ""),
    ((9, 0), ""), (None, "")])
def test_the_flash_kernel_is_not_offered_where_it_has_no_room(capability, reason):
    """A T4 gives a program 64 KB of shared memory; it takes 96."""
    given = Attending(model=Config().model, dtype="float16", device="gpu", capability=capability)
    assert why_not("triton", given) == reason


@pytest.mark.parametrize("major, minor, recipe, message", [
    (8, 0, "fp8-tensorwise", r"one scale a tensor need compute capability 8\.9, and this GPU has "
                             r"8\.0"),
    (8, 9, "fp8-blockwise", r".* need compute capability 9\.0, and this GPU has 8\.9"),
    (10, 0, "fp8-blockwise", r"PyTorch has .* on Hopper alone \(9\.0\), and this GPU has 10\.0; "
                             r"mxfp8 is its successor")])
def test_a_product_that_this_gpu_has_not_is_named(major, minor, recipe, message, monkeypatch):
    with gpus(major=major, minor=minor):
        assert re.match(message, reason := BACKENDS["scaled_mm"].why_not(recipe, RECIPES[recipe],
            torch.device("cuda"))), reason
        monkeypatch.undo()


def test_flex_attention_is_compiled_for_each_shape(monkeypatch):
    """One function for all would run eagerly, with all scores, after eight shapes."""
    from lpkit.kernels import jit

    graphs = []
    monkeypatch.setattr(jit, "compiled", lambda f, **how: graphs.append(f.__code__) or f)
    library_attention_torch._compiled.cache_clear()
    for T in range(12):
        library_attention_torch._compiled("flex_attention", (Rule(), T))
        library_attention_torch._compiled("flex_attention", (Rule(), T))
    assert len(graphs) == 12 == len({id(code) for code in graphs})
    library_attention_torch._compiled.cache_clear()
