"""Live bytes by row against arithmetic, and against counters of PyTorch's own.

Only these tests catch: a storage that counts twice, too long or not at all, a byte in a wrong row
or phase, a peak that the allocator has not, and a hook that stays.
"""

import warnings
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import lessons.rows.disk  # noqa: F401  adds rows
from lessons.saved import live
from lpkit import measure
from lpkit.config import Config
from lpkit.measure.tracking import ROWS, Tracker
from lpkit.techniques.recipes import resolve

SMALL = Config().replace({"model.layers": 2, "model.width": 64, "model.heads": 4,
                          "model.context": 64, "global_batch": 4,
                          "precision.recipe": "fp32"})
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False,
         "model.tied": False, "model.kv_heads": 2}


def test_a_linear_and_a_relu_by_hand():
    """All moments of one step of sum(relu(x W^T)), with (32, 8) x (8, 16)."""
    model = nn.Linear(8, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    x, W, Y = torch.ones(32, 8), 8 * 16 * 4, 32 * 16 * 4
    with Tracker(model, optimizer) as tracker:
        tracker.hold([x], "batch")
        loss = torch.relu(model(x)).sum()
        loss.backward()
        with tracker.optimizing():
            optimizer.step()
            optimizer.zero_grad()
        del loss
    held = {"weights": W, "optimizer state": W, "batch": x.nbytes}
    points = [(point.phase, point.rows) for point in tracker.footprint(points=1000).timeline]
    rows_with = lambda **rows: {**held, **{name.replace("_", " "): n for name, n in rows.items()}}
    # Forward: y is alive until relu has its result, which is saved. The sum has 4 bytes.
    assert ("forward", rows_with(temporaries=Y)) in points
    assert ("forward", rows_with(temporaries=Y, logits_and_loss=Y)) in points
    assert ("forward", rows_with(logits_and_loss=Y + 4)) in points
    # Backward begins with the number 1.0 (4 bytes). relu's gradient has Y bytes, the weight's
    # gradient W bytes.
    assert ("backward", {**rows_with(logits_and_loss=Y + 8), "logits' gradients": Y}) in points
    assert any(phase == "backward" and rows.get("gradients") == W for phase, rows in points)
    assert points[-1][1] == held
    assert (max(sum(rows.values()) for _, rows in points) == tracker.footprint().peak_bytes == 2 * W
            + x.nbytes + 2 * Y + 8)


def test_a_storage_counts_once_from_its_making_to_its_end():
    tracker = Tracker(nn.Identity())
    with tracker:
        a = torch.ones(1000)                                    # 4,000
        b = a * 2                                               # 8,000
        b.view(10, 100).add_(1)                                 # it has no storage of its own
        pair = torch._foreach_add([a, b], 1.0)                  # 16,000: in a list
        out = torch.mul(a, b, out=torch.empty(1000))            # 20,000: the empty one, once
        first, second = torch.ones(2, 500).unbind()             # 24,000: one storage, two views
        assert sum(live(tracker).values()) == 24_000
        del a, pair, first
        assert sum(live(tracker).values()) == 12_000
        b.untyped_storage().resize_(8_000)                      # as FSDP does
        assert sum(live(tracker).values()) == 16_000
        del b, out, second
        assert not live(tracker)
    assert tracker.footprint().peak_bytes == 24_000
    assert (torch.UntypedStorage.resize_.__name__ == "resize_"
            and torch.autograd.grad.__name__ == "grad")


CONFIGS = {
    "gpt2": {},
    "gpt2 bf16, accumulated": {"precision.recipe": "bf16", "grad_accum_steps": 2},
    "fp8-delayed, accumulated": {"precision.recipe": "fp8-delayed", "grad_accum_steps": 2},
    "mxfp8, recomputed": LLAMA | {"precision.recipe": "mxfp8", "memory.recompute": "block"},
    "fp16": {"precision.recipe": "fp16"},
    "chunked": {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 64,
                "model.vocab": 2048},
    "a large vocabulary": LLAMA | {"model.vocab": 8192},
}


def counted_peak(update: Callable[[], object]) -> int:
    """Return the most bytes that the CPU's allocator gave out in an update, by PyTorch's profiler,
    which also sees the memory that kernels allocate."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        update()
    events = [event for event in profiler.profiler.kineto_results.events()
              if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events), default=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_peak_is_the_allocators(name):
    """PyTorch's profiler counts the bytes that the CPU's allocator gives out in a step without a
    Tracker. It also sees the memory that kernels allocate: at most 6% of these peaks (buffers of
    attention, softmax and casts; 5.1% if PyTorch packs bf16 operands for the CPU)."""
    config = SMALL.replace(CONFIGS[name])
    if resolve(config.precision.recipe).compute == "bfloat16":
        # with wide operands, kernels use float32 copies
        config = config.replace({"system.products": "bf16"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # allocated by the profiler itself
        bench = measure.Bench(config, "cpu")
        tracker, _ = bench.watched()
        counted = sum(live(tracker).values()) + counted_peak(bench.train)
    footprint = tracker.footprint()
    assert footprint.peak_bytes <= counted <= 1.06 * footprint.peak_bytes
    assert set(footprint.most) <= set(ROWS) and footprint.rows == max(footprint.timeline,
        key=lambda point: point.bytes).rows
    assert all(n <= footprint.most[row] for point in footprint.timeline
               for row, n in point.rows.items())


@pytest.mark.parametrize("changes", [{}, LLAMA | {"precision.recipe": "bf16"}],
                         ids=["gpt2", "llama bf16"])
def test_pytorchs_tracker_finds_the_same_peak(changes):
    """PyTorch's torch.distributed._tools.mem_tracker in the third update."""
    from torch.distributed._tools.mem_tracker import MemTracker

    bench = measure.Bench(SMALL.replace(changes), "cpu")
    ours = measure.memory(SMALL.replace(changes), device="cpu")
    bench.train()
    theirs = MemTracker()
    theirs.track_external(bench.model, bench.training.optimizer, *bench.batch.tensors)
    with theirs:
        bench.train()
    assert (theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
            == pytest.approx(ours.peak_bytes, rel=0.01))


def test_rows_of_a_step_by_arithmetic():
    config = SMALL.replace({"precision.recipe": "bf16", "optimizer": "adamw"})
    m, tokens = config.model, config.global_batch * config.model.context
    footprint = measure.memory(config, device="cpu")
    blocks = m.L * (2 * m.D * (m.H + 2 * m.G) * m.E // 2 + m.D * m.D + 2 * m.D * m.F)
    biases = m.L * ((m.H + 2 * m.G) * m.E + m.D + m.F + m.D) + (2 * m.L + 1) * m.D
    count = blocks + biases + (2 * m.L + 1) * m.D + (m.V + m.T) * m.D
    tensors = 12 * m.L + 4
    assert footprint.most["weights"] == footprint.most["gradients"] == 4 * count
    assert footprint.most["optimizer state"] == 8 * count + 4 * tensors
    assert footprint.most["batch"] == 2 * 8 * tokens
    assert footprint.rows["logits' gradients"] == 2 * tokens * m.V * 4
    assert footprint.rows["weight copies"] == 2 * (blocks + m.V * m.D)


def test_low_precision_rows_by_arithmetic():
    footprint = measure.memory(SMALL.replace({"precision.recipe": "fp8-delayed",
        "precision.recipe.history": 16}), device="cpu")
    m = SMALL.model
    weights = m.L * (m.D * 3 * m.D + m.D * m.D + 2 * m.D * m.F)
    assert footprint.rows["low-precision weights"] == 2 * weights           # in bf16: emulated
    # (3, 1 + history) float32 of 4 Linears a block
    assert footprint.rows["amax histories"] == 4 * 3 * 17 * 4 * m.L


def test_recomputed_blocks_have_their_row():
    footprint = measure.memory(SMALL.replace({"precision.recipe": "bf16",
                                              "memory.recompute": "block"}),
                           device="cpu")
    kept = measure.memory(SMALL.replace({"precision.recipe": "bf16"}), device="cpu")
    assert footprint.most["recomputed block"] > 0 and "recomputed block" not in kept.most
    assert footprint.most["activations"] < 0.35 * kept.most["activations"]


def test_what_lies_in_a_file_is_counted_apart():
    footprint = measure.memory(SMALL.replace({"memory.optimizer_state": "disk"}), device="cpu")
    held = measure.memory(SMALL, device="cpu")
    steps = held.most["optimizer state"] - 2 * held.most["weights"]
    assert ("optimizer state" not in footprint.most
            and footprint.offloaded_bytes == 2 * held.most["weights"])
    assert steps == 4 * len(list(measure.Bench(SMALL, "cpu").model.parameters()))


def test_nothing_is_left_behind():
    bench = measure.Bench(SMALL, "cpu")
    bench.train()
    for _ in range(2):
        with Tracker(bench.model, bench.training.optimizer, "cpu") as tracker:
            tracker.hold(bench.batch.tensors, "batch")
            bench.train(tracker)
        assert live(tracker).keys() == {"weights", "optimizer state", "batch"}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bench.model.modules())
    assert not any(p._backward_hooks for p in bench.model.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_allocator_holds_what_is_tracked():
    """The allocator's snapshot lists blocks by address. Each live storage has one block, rounded up
    to 512 bytes."""
    config = SMALL.replace(LLAMA | {"precision.recipe": "bf16"})
    footprint = measure.memory(config, device="cuda")
    assert footprint.rows["allocator"] > 0 and footprint.reserved_bytes >= footprint.counted_bytes
    # cuBLAS's workspace
    assert (footprint.peak_bytes <= footprint.counted_bytes
            <= 1.1 * footprint.peak_bytes + 64 * 2**20)
    bench = measure.Bench(config, "cuda")
    bench.train()
    with bench.tracker() as tracker:
        tracker.hold(bench.batch.tensors, "batch")
        bench.train(tracker)
    blocks = {block["address"]: block for segment in torch.cuda.memory._snapshot()["segments"]
              for block in segment["blocks"] if block["state"] == "active_allocated"}
    for p in bench.model.parameters():
        held = blocks[p.untyped_storage().data_ptr()]
        assert held["requested_size"] == p.nbytes and held["size"] == -(-p.nbytes // 512) * 512
