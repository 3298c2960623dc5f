"""The kit's own GPU branches, executed without a GPU (tests/gpu/fake_gpus.py): the CPU's numbers,
in float32 to the bit, and no use of memory that a stream did not wait for.

Only these tests catch a wait, a pinned copy or a device index that is missing in a branch that only
a GPU takes. A wait that is taken away on purpose must be noticed.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

import lessons.rows.activations
import lessons.rows.disk  # noqa: F401  adds rows
from lpkit import hardware, measure
from lpkit.config import Config
from lpkit.kernels import choose
from lpkit.measure import doctor
from lpkit.measure.probes import UnavailableError
from lpkit.memory.state import Host
from lpkit.parallel.meeting import joined
from lpkit.training import checkpoint, loop
from lpkit.training.build import choose_device, environment
from lpkit.training.loop import fit
from lpkit.training.runs import RunFailedError
from lpkit.training.training import Training
from tests.gpu.fake_gpus import Autocast, RaceError, gpus, nccl

CUDA = torch.device("cuda")
HOST = {"memory.optimizer_state": "cpu"}


@pytest.fixture
def tiny(corpus, monkeypatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return Config().replace({
        "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 16, "steps": 3,
        "data.source": str(corpus / "*.py"), "global_batch": 4, "eval_every": 2, "eval_batches": 1,
        "checkpoint_every": 2, "schedule.warmup_steps": 2, "precision.recipe": "fp32",
        "system.compile": False, "system.attention": "plain", "system.kernels": "reference",
        "system.threads": 1})


# ---- moments, numbers on their way, batches

def test_a_moment_is_reached_once_it_was_waited_for():
    with gpus():
        first = loop.moment(CUDA)
        torch.ones(3, device="cuda").mul_(2).add_(1)
        then = loop.moment(CUDA)
        assert not isinstance(then, loop.HostMoment) and not then.query()
        with pytest.raises(RuntimeError, match="completed before"):
            first.elapsed_time(then)
        then.synchronize()
        # an operation is a millisecond here
        assert then.query() and first.query() and first.elapsed_time(then) == 3


def test_numbers_arrive_when_they_are_waited_for():
    with gpus() as fake:
        sent = loop.Arriving({"loss": torch.full((), 1.5, device="cuda"), "lr": 0.25}, CUDA)
        assert sent.sent[1].is_pinned()
        with pytest.raises(RaceError):
            float(sent.sent[1][0])
        fake.races.clear()
        assert sent.values() == {"loss": 1.5, "lr": 0.25}


def test_batches_come_by_a_stream_of_their_own_to_the_gpu_of_their_run(tiny):
    """The thread that makes them sets its GPU: the current GPU of a new thread is the first."""
    with gpus(2) as fake:
        training = Training.build(tiny.replace({"system.device": "cuda:1"}))
        batch = training.batch(0)
        assert batch.tokens.device == torch.device("cuda:1") and batch.tokens.is_contiguous()
        assert {("MainThread", 1), ("lpkit-batches_0", 1)} <= {*fake.current_devices}
        stream = fake.of(batch.tokens).born
        assert stream.index == 1 and stream is not fake.default[1]
        assert {p.device for p in training.model.parameters()} == {torch.device("cuda:1")}
        there = batch.tokens.tolist()
    assert there == Training.build(tiny.replace({"system.device": "cpu"})).batch(0).tokens.tolist()


# ---- whole runs

WAYS = {
    "plain": {}, "fp16": {"precision.recipe": "fp16"},
    "bf16 weights in two pieces": HOST | {"precision.recipe": "bf16", "memory.param_dtype": "bf16",
                                          "grad_accum_steps": 2},
    "fp8, emulated": {"precision.recipe": "fp8-delayed", "precision.backend": "emulated"},
    "state on the host, 8 bits": HOST | {"memory.moment_format": "int8"},
    "on disk": {"memory.optimizer_state": "disk", "memory.activation_offload": "disk"},
    "in backward": HOST | {"memory.optimizer_step": "in-backward", "optimizer.clip": 0},
    "saved in 8 bits": {"memory.activation_offload": "int8"},
    "all": HOST | {"memory.recompute": "block", "memory.activation_offload": "cpu",
                   "memory.cross_entropy": "chunked", "grad_accum_steps": 2}}


def lines_of(run) -> list[dict]:
    return [{key: value for key, value in line.items()
             if key not in ("step_seconds", "peak_bytes", "sha256")} for line in run.metrics]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_on_a_gpu_is_the_cpus_and_waits_for_what_it_uses(tiny, tmp_path, way):
    """Stopped and resumed, too."""
    config, runs = tiny.replace(WAYS[way]), {}
    for device in ("cpu", "cuda"):
        with gpus() if device == "cuda" else pytest.MonkeyPatch.context():
            there = config.replace({"system.device": device})
            fit(Training.build(there), tmp_path / device)
            runs[device] = fit(Training.build(there.replace({"steps": 5})), tmp_path / device,
                               resume=True)
    assert len(runs["cuda"].metrics) == 5
    assert all(line["step_seconds"] > 0 < line["peak_bytes"] for line in runs["cuda"].metrics)
    # a GPU's products of 16 bits are rounded once, in float32
    if config.precision.recipe.name != "fp32":
        gpu, cpu = ([line["loss"] for line in runs[device].metrics] for device in ("cuda", "cpu"))
        assert gpu == pytest.approx(cpu, rel=1e-3)
        return
    assert lines_of(runs["cpu"]) == lines_of(runs["cuda"])
    ours, theirs = (checkpoint.load_latest(runs[device].checkpoints)[0].tensors
                    for device in ("cuda", "cpu"))
    of_model = [{name for name in tensors if name.startswith("model/")}
                for tensors in (ours, theirs)]
    assert "rng/cuda" in ours and of_model[0] == of_model[1]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs.keys() & ours.keys())


TAKEN_AWAY = {
    "what is fetched is used before it has arrived": ("Stream.wait_event", {}),
    "state is written back while it is updated": ("Stream.wait_stream", HOST),
    "activations leave while they are made": ("Stream.wait_stream",
                                              {"memory.activation_offload": "cpu"}),
    "memory is used again while a copy reads it": ("Tensor.record_stream",
                                                   {"memory.activation_offload": "cpu"}),
    "numbers are read on their way": ("Event.synchronize", {}),
    "a checkpoint is written while state travels": ("cuda.synchronize", HOST)}


@pytest.mark.parametrize("what", TAKEN_AWAY)
def test_a_wait_that_is_taken_away_is_noticed(tiny, tmp_path, monkeypatch, what):
    name, changes = TAKEN_AWAY[what]
    owner, method = name.split(".")
    with pytest.raises((RaceError, RunFailedError),
                       match=r"has not waited for it|still reads|may still use it"), gpus() as fake:
        with monkeypatch.context() as patch:
            patch.setattr(getattr(torch if owner in ("cuda", "Tensor") else fake, owner), method,
                          lambda *_: None)
            fit(Training.build(tiny.replace({"system.device": "cuda", **changes})),
                tmp_path / "run")


def test_state_goes_in_order_and_comes_back_as_it_was():
    """No fetch overtakes a write-back: they are of one stream."""
    with gpus() as fake:
        host = Host(CUDA)
        stored = host.store(torch.arange(4.0, device="cuda"))
        assert stored.is_pinned() and stored.device.type == "cpu"
        [used] = host.prefetch([stored], CUDA)()
        host.write_back([stored], [used.add_(1)])
        with pytest.raises(RaceError, match="the host uses what stream 1"):
            stored.tolist()
        [again] = host.prefetch([stored], CUDA)()
        assert again.tolist() == [1, 2, 3, 4] and again.is_cuda
        fake.races.clear()
        torch.cuda.synchronize()
        assert stored.tolist() == [1, 2, 3, 4]


# ---- what a GPU says of itself

def test_a_gpus_facts_are_its_own(tiny):
    with gpus(2, name="NVIDIA A100-SXM4-40GB", major=8, total_memory=40 * 2**30):
        x = torch.ones(2**20, device="cuda:1")
        assert hardware.memory_bytes("cuda") == 40 * 2**30
        assert hardware.available_bytes("cuda:1") == 40 * 2**30 - x.nbytes
        assert hardware.peak_bytes("cuda:1") == hardware.held_bytes("cuda:1") == x.nbytes
        assert hardware.held_bytes("cuda:0") == 0
        assert hardware.reset_peak("cuda") and hardware.room("cuda:1").kind == "gpu"
        assert hardware.low_formats(CUDA) == (() if torch.version.hip else ("int8",))
        assert choose_device("auto").why == "PyTorch sees NVIDIA A100-SXM4-40GB"
        assert choose_device("cuda", 1, 2).used == "cuda:1"
        training = Training.build(tiny.replace({"system.device": "cuda",
                                                "precision.recipe": "auto"}))
        choice = training.decisions.choices["precision"]
        assert choice.why == "compute capability 8.0 has bf16 tensor cores"
        assert environment(training.decisions)["device"] == "NVIDIA A100-SXM4-40GB"
        assert isinstance(training.decisions.autocast, Autocast)
        assert {p.device for p in training.model.parameters()} == {torch.device("cuda:0")}


def test_energy_is_the_counter_of_this_gpu(monkeypatch):
    asked = []
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=asked.append,
                           nvmlDeviceGetTotalEnergyConsumption=lambda handle: 5000)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with gpus():
        assert hardware.energy_joules("cuda") == (5.0, "NVML's counter, this GPU alone")
    assert asked == ["GPU-fake"]


def test_the_doctor_lists_what_is_there():
    with gpus(2):
        assert [gpu["capability"] for gpu in doctor.machine()["gpus"]] == ["9.0", "9.0"]
        there = choose._machine()
        assert doctor._tf32(CUDA) and torch.get_float32_matmul_precision() == "highest"
    with gpus(major=7, minor=5):
        with pytest.raises(UnavailableError, match=r"came with compute capability 8\.0"):
            doctor._tf32(CUDA)
    assert there != choose._machine(), "what was raced on one machine is not taken on another"


# ---- ranks, each with a GPU

@pytest.mark.dist
def test_each_rank_trains_on_the_gpu_of_its_number_as_on_a_cpu(on_ranks, tiny):
    tiny = tiny.replace({"grad_accum_steps": 2})
    layout = {"parallel.shard": 2, "parallel.zero": 1, "system.device": "cuda"}
    ranks = on_ranks("on_gpus", tiny.replace(layout), gpus=2)
    alone = Training.build(tiny.replace({"system.device": "cpu"}))
    losses = [alone.update(step).loss.item() for step in range(3)]
    for rank, result in enumerate(ranks):
        assert result["backends"] == ["cpu:gloo,cuda:nccl"] and result["mesh"] == "cuda"
        assert result["first"] == rank and set(result["set"]) == {rank} and result["races"] == []
        assert result["devices"] == [f"cuda:{rank}"]
        assert result["losses"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.dist
def test_the_doctor_tries_nccl_on_a_gpu_for_each_rank(on_ranks, tiny):
    answers = on_ranks("doctors", tiny, program="all-reduce")
    assert answers == [[rank, "cpu:gloo,cuda:nccl"] for rank in (0, 1)]


def test_a_rank_takes_its_gpu_before_it_meets_the_others(tiny, tmp_path):
    config, store = tiny.replace({"system.device": "cuda"}), f"file://{tmp_path}/store"
    with gpus(2) as fake, nccl() as backends, joined(config, rank=0, world=1, local_rank=1,
                                                     local_world=1, init_method=store) as ranks:
        assert fake.current_devices[0] == ("MainThread", 1) and backends == ["cpu:gloo,cuda:nccl"]
        assert ranks.device == "cuda"
        assert ranks.mean(torch.ones(2, device="cuda")).device == torch.device("cuda:1")


def test_a_step_is_measured_when_the_gpu_is_done(tiny):
    with gpus():
        bench = measure.Bench(tiny.replace({"system.device": "cuda"}))
        assert bench.seconds() > 0 and bench.where.startswith("NVIDIA H100")
        footprint = bench.footprint()
        assert footprint.counted_bytes > 0
        assert footprint.most["weights"] == sum(p.nbytes for p in bench.model.parameters())
        assert footprint.most["allocator"] > 0, "CUDA's rounds each tensor up"
