"""A trace against the step it stands for, byte by byte, and against arithmetic where no such step
can run.

Only these tests catch: a byte, a row or a phase that a trace has and a step has not, a wrong shard
of a rank, a process group or a fake tensor that stays, and a trace of a GPU that begins to use one.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

import lessons.rows.activations
import lessons.rows.disk  # noqa: F401  adds rows
from lpkit import hardware, measure, preset
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure.trace import _Chunks, fake_step, fake_world, predict_trace, reconcile
from lpkit.predict import memory, parameter_count
from lpkit.techniques.layouts import Layout
from lpkit.techniques.memory import RECOMPUTE, RecomputeRow
from tests.bench import ledger

SMALL = Config().replace({"model.layers": 2, "model.width": 64, "model.heads": 4,
                          "model.context": 64, "global_batch": 4,
                          "precision.recipe": "fp32", "system.device": "cpu"})
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False,
         "model.tied": False, "model.kv_heads": 2}
CONFIGS = {
    "gpt2": {}, "plain attention": {"system.attention": "plain"},
    "a large vocabulary": LLAMA | {"model.vocab": 8192},
    "selective": {"precision.recipe": "bf16", "memory.recompute": "selective"},
    **{recipe: {"precision.recipe": recipe} for recipe in ("fp16", "fp8-rowwise", "int8")},
    "llama nvfp4": LLAMA | {"precision.recipe": "nvfp4"},
    "fp8-blockwise": {"precision.recipe": "fp8-blockwise", "model.width": 128},
    "fp8-delayed, accumulated": {"precision.recipe": "fp8-delayed", "grad_accum_steps": 2},
    "cached weights": {"precision.recipe": "fp8-tensorwise", "grad_accum_steps": 2,
                       "precision.cache_weight_casts": True},
    "8-bit moments, bf16 weights, in backward": {
        "precision.recipe": "bf16", "memory.moment_format": "int8", "memory.param_dtype": "bf16",
        "optimizer.clip": 0,
        "memory.optimizer_step": "in-backward"},
    "state in a file": {"memory.optimizer_state": "disk"},
    **{f"saved {where}": {"precision.recipe": "bf16", "memory.activation_offload": where}
       for where in ("cpu", "int4")},
    "mxfp8, recomputed, chunked": LLAMA | {"precision.recipe": "mxfp8", "memory.recompute": "block",
                                           "memory.cross_entropy": "chunked",
                                           "memory.cross_entropy.chunk_tokens": 64},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trace_is_the_measured_step_to_the_byte(name):
    config = SMALL.replace(CONFIGS[name])
    traced, measured = predict_trace(config), measure.memory(config)
    assert traced.rows == measured.rows and traced.most == measured.most
    assert (traced.phase, traced.module) == (measured.phase, measured.module)
    assert (traced.operations == measured.operations
            and traced.offloaded_bytes == measured.offloaded_bytes)


def test_the_last_block_in_16_bits_hides_the_one_before():
    """nvfp4 keeps the last block in 16 bits. With recomputation, the block before it is the first
    block in 4 bits that backward reaches, and the peak is there."""
    config = Config().replace(ledger.LLAMA | {"precision.recipe": "nvfp4",
        "memory.recompute": "selective", "system.attention": "sdpa"})
    traced, closed = predict_trace(config, device="cpu"), memory(config, hardware.machine())
    # without amaxes the peak would be 2% lower, without the block 5%
    assert abs(closed.peak_bytes / traced.peak_bytes - 1) < 0.005


def test_shards_by_arithmetic():
    """FSDP2 over 8 ranks holds in bf16 one gathered block, all parameters outside the blocks, and
    the next block's weights in transfer; and in float32 the gradients of one block in transfer."""
    config = SMALL.replace({"precision.recipe": "bf16", "model.layers": 4, "global_batch": 8,
                            "system.attention": "sdpa"})
    m, count = config.model, parameter_count(config.model)
    outside = (m.V + m.T) * m.D + 2 * m.D
    block = (count - outside) // m.L
    footprint = predict_trace(config, 8)
    assert footprint.most["weights"] == footprint.most["gradients"] == 4 * count // 8
    assert footprint.most["optimizer state"] == 8 * count // 8 + 4 * (12 * m.L + 4)
    assert footprint.most["gathered weights"] == 2 * (outside + block)
    assert footprint.most["communication buffers"] == (2 + 4) * block
    assert footprint.most["batch"] == 2 * 8 * m.T
    whole = predict_trace(config, 8, layout=Layout(shard=8, zero=2))
    assert (whole.most["gathered weights"] == 2 * count
            and whole.most["weights"] == footprint.most["weights"])
    # each rank has two micro-batches of one sequence
    pieces = predict_trace(config.replace({"global_batch": 16, "grad_accum_steps": 16}), 8)
    assert (pieces.rows["gradients"] > footprint.rows["gradients"]
            and pieces.most["batch"] == 2 * footprint.most["batch"])
    assert pieces.most["activations"] == footprint.most["activations"]
    hybrid = predict_trace(config, 8, layout=Layout(data=2, shard=4))
    assert hybrid.most["weights"] == 2 * footprint.most["weights"]


@pytest.mark.parametrize("changes", [
    {"precision.recipe": "mxfp8", "memory.recompute": "block"},
    {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 64}])
def test_techniques_shard_too(changes):
    footprint, alone = (predict_trace(SMALL.replace(changes), ranks) for ranks in (2, 1))
    assert (2 * footprint.most["weights"] == alone.most["weights"]
            and footprint.most["gathered weights"] > 0)
    assert footprint.most["activations"] <= 0.75 * alone.most["activations"]


def test_a_world_of_1024_ranks():
    """Two blocks of Llama 8B. FSDP cuts parameters by rows, so rank 0 has the first ceil(n / 1024)
    of n rows."""
    config = preset("llama-8b").replace({"model.layers": 2, "global_batch": 1024,
        "grad_accum_steps": 1})
    m = config.model
    footprint = predict_trace(config, 1024)
    rows = lambda n: -(-n // 1024)
    matrices = (m.L * (rows((m.H + 2 * m.G) * m.E) + rows(m.D) + rows(2 * m.F)) * m.D + m.L
                * rows(m.D) * m.F)
    norms, tables = (2 * m.L + 1) * rows(m.D), 2 * rows(m.V) * m.D
    assert footprint.most["weights"] == 4 * (matrices + norms + tables)
    assert footprint.rows["logits' gradients"] == 2 * m.T * m.V * 4


def test_nothing_is_left_behind():
    predict_trace(SMALL.replace({"precision.recipe": "nvfp4"}), 2)
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), fake_world(Layout(shard=4), "cpu"), fake_step("cpu"):
        1 / 0  # noqa: B018
    assert not dist.is_initialized() and not isinstance(torch.ones(1), FakeTensor)


@pytest.mark.parametrize("rows, count", [(1, 4), (3, 1), (8, 2), (10, 7), (10, 16), (64, 16)])
def test_shards_are_cut_as_chunk_cuts(rows, count):
    x = torch.arange(rows * 2.0).view(rows, 2)
    want = [*torch.chunk(x, count), *[torch.empty(0)] * count][:count]
    assert all(map(torch.equal, want, map(_Chunks(x, count, 0).__getitem__, range(count))))


def test_what_cannot_be_traced_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"global_batch=4 sequences does not split over"):
        predict_trace(SMALL, 3)
    with pytest.raises(ConfigError, match="is 2 devices, not 4"):
        predict_trace(SMALL, 4, layout=Layout(shard=2))
    with pytest.raises(ConfigError, match="device cannot be 'tpu'; did you mean 'cpu'"):
        predict_trace(SMALL, device="tpu")
    monkeypatch.setitem(RECOMPUTE, "budget",
                        RecomputeRow(settings=RECOMPUTE["budget"].settings,
                                     needs_compile="whose graph it divides"))
    for watch in (predict_trace, measure.memory):
        with pytest.raises(ConfigError,
                           match=r"memory\.recompute=budget needs torch\.compile, and a "
                                 r"compiled update cannot be"):
            watch(SMALL.replace({"memory.recompute": "budget"}))
    with pytest.raises(ConfigError,
                       match=r"memory\.moment_format=int8 has blocks that would cross .*, or "
                             r"parallel\.zero=0"):
        predict_trace(SMALL.replace({"memory.moment_format": "int8"}), 2)
    with fake_world(Layout(shard=2), "cpu"), pytest.raises(ConfigError,
            match="has a process group already"):
        predict_trace(SMALL, 2)


@pytest.mark.parametrize("built", [False, True])
def test_without_a_gpu_a_trace_of_one_says_so(built, monkeypatch):
    """PyTorch's autograd asks the GPU for a stream, even with fake tensors. So a trace of CUDA
    operations is refused in every build of PyTorch, without initialising CUDA."""
    def begins(*_):
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", begins)
    with pytest.raises(ConfigError,
                       match=r"^PyTorch sees no GPU here, .*; use device=cpu, which keeps the same "
                             r"tensors, except those of RMSNorm$"):
        predict_trace(SMALL, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch sees")
def test_operations_of_a_gpu_are_traced_with_its_blocks_of_512_bytes():
    footprint = predict_trace(SMALL.replace(LLAMA | {"precision.recipe": "bf16"}), device="cuda")
    assert footprint.rows["allocator"] > 0 and footprint.peak_bytes % 512 == 0
    assert 4 * parameter_count(SMALL.replace(LLAMA).model) == footprint.rows["weights"]


def test_what_a_race_decides_is_assumed_and_said():
    footprint = predict_trace(SMALL.replace({"precision.recipe": "auto"}))
    assert (footprint.chosen["precision"].used == "bf16"
            and "assumed" in footprint.chosen["precision"].why)


def test_three_answers_side_by_side():
    reconciled = reconcile(SMALL)
    assert reconciled.traced.rows == reconciled.measured.rows
    assert reconciled.sentences[1] == "The trace's peak equals the measured peak to the byte."
    assert reconciled.comparison()["peak"].measured == reconciled.measured.peak_bytes
    assert abs(reconciled.comparison()["peak"].error) < 0.05
    assert reconciled._repr_html_().count("<tr>") >= len(reconciled.measured.rows) + 1
    sharded = reconcile(SMALL, 2)
    assert (sharded.measured is None and len(sharded.sentences) == 1
            and "measured" not in sharded._repr_html_())
    assert sharded.comparison()["weights"].error == 0
