"""Bytes of a device among others, by hand: what tensor ranks gather, what a pipeline holds, what an
allocator cannot use; and published peaks."""

from dataclasses import replace
from statistics import median

import pytest
import torch

import lessons.rows.pipelines  # noqa: F401  adds rows
from lessons.published import runs
from lpkit.errors import ConfigError
from lpkit.predict import evidence, memory, model_states, parameter_count, predict
from lpkit.predict.device import Device, DeviceStep
from lpkit.predict.ledger import IN_BACKWARD, LOSS, UPDATE
from lpkit.predict.params import parameters
from lpkit.predict.time import step_time
from lpkit.predict.walk import FIRST, LAST
from lpkit.presets import preset
from lpkit.techniques.blocks import operations
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import CATALOGUE
from lpkit.techniques.operation import MicroBatch
from tests.bench.peaks import by_layout, held, kind, memory_row, peaks, unsaid

GIB = 2**30
LLAMA = preset("llama-8b").replace({"global_batch": 2, "grad_accum_steps": 1,
                                    "model.context": 8192})
GIANT = preset("llama-405b").replace({"model.context": 8192})


def test_logits_are_divided_by_the_tensor_size_once():
    """Two float32 gradients of 16,384 tokens times 128,256 words over 8 ranks are 1.96 GiB.
    PyTorch's loss over parts of the vocabulary keeps the log-probabilities and, in its backward,
    the probabilities. `lpkit.parallel.tensor` keeps 16-bit logits, their gradient, and two float32
    tensors of the same size."""
    logits = 2 * 8192 * 128_256 / 8
    rows = memory(LLAMA, "h200", layout=Layout(tensor=8)).at(LOSS)
    assert rows["logits and loss"] == pytest.approx((2 + 2 + 4 + 4) * logits)
    eager = LLAMA.replace({"system.stack": "eager"})
    rows = memory(eager, "h200", layout=Layout(tensor=8)).at(LOSS)
    assert rows["logits' gradients"] == 2 * 4 * logits == pytest.approx(1.957 * GIB, rel=1e-3)
    assert rows["logits and loss"] == pytest.approx(2 * 4 * logits)


@pytest.mark.parametrize("layout, message", [
    (Layout(pipeline=100), "does not split over pipeline=100 stages"),
    (Layout(tensor=3), "does not split over tensor=3 ranks"),
    (Layout(context=300), "does not split into 2 x context=300 pieces"),
    (Layout(interleave=3), "interleave=3 chunks of layers need pipeline stages"),
    (Layout(data=3), "global_batch=2 sequences does not split over data=3"),
    # the first rank would have the first stage and the last, which have no layer
    (Layout(pipeline=17, interleave=2, schedule="zbv"), "not even with one layer fewer"),
])
def test_an_impossible_layout_is_refused_by_each_formula(layout, message):
    """`memory` and `step_time` once divided by zero for a layout that `predict` refuses."""
    for formula in (predict, memory, step_time):
        with pytest.raises(ConfigError, match=message):
            formula(LLAMA, "h200", layout=layout)


def test_stages_of_other_stacks_have_any_number_of_layers():
    """In lpkit, all stages have the same number of layers, or one fewer at the ends. Other stacks
    allow any numbers."""
    layout = Layout(pipeline=9)
    with pytest.raises(ConfigError, match="does not split over pipeline=9 stages"):
        memory(LLAMA, "h200", layout=layout)
    assert memory(LLAMA.replace({"system.stack": "megatron"}), "h200", layout=layout).peak_bytes
    with pytest.raises(ConfigError, match="does not split over pipeline=40 stages"):
        memory(LLAMA.replace({"system.stack": "megatron"}), "h200", layout=Layout(pipeline=40))


def test_a_tensor_parallel_block_gathers_its_stream():
    """The largest moment of a block's backward is in its MLP. By hand for Llama 8B in bf16 with
    16,384 tokens over 8 ranks: the gradient of gate and up (28,672 wide) is alive; their input is
    gathered for the weight's gradient; and the gradient of their input is whole until the ranks add
    up their parts and keep an eighth. The gradients of the residual stream and of the weight are
    alive, too."""
    tokens, D, wide, t = 2 * 8192, 4096, 2 * 14_336, 8
    block = {"memory.recompute": "block", "model.layers": 2}
    eight = memory(LLAMA.replace(block), "h200", layout=Layout(tensor=t), precision="bf16-pure")
    stream, gathered = tokens * D * 2 / t, tokens * D * 2
    assert (eight.at(FIRST)["temporaries"] == stream + tokens * wide * 2 / t + 2 * gathered + stream
            + D * wide * 2 / t)


def test_without_sequence_parallelism_the_stream_is_whole_and_nothing_is_gathered():
    """A recomputed block keeps its input. Each rank keeps all of it, 16,384 x 4,096 x 2 bytes, and
    not an eighth."""
    blocks = [LLAMA.replace({"memory.recompute": "block", "system.stack": stack})
              for stack in ("nanotron", "megatron-2021")]
    parts, whole = (memory(block, "h200", layout=Layout(tensor=8), precision="bf16-pure").at(LOSS)
                    for block in blocks)
    stream = 2 * 8192 * 4096 * 2
    # 32 inputs, what the last norm keeps and what the head does; the norm's deviations, 4 bytes a
    # token
    assert whole["activations"] - parts["activations"] == pytest.approx((32 + 2) * stream * 7 / 8,
        rel=1e-3)
    split, plain = (memory(block, "h200", layout=Layout(tensor=1), precision="bf16-pure")
                  for block in blocks)
    assert split == plain


def test_a_pipeline_keeps_what_it_gathered_and_adds_up_whole_gradients():
    """torchtitan sets `reshard_after_forward = False` with a pipeline. Llama 405B over 8 tensor
    ranks and 8 stages: the first stage has 16 of 126 blocks and the embedding, with 2 bytes of
    gathered weight and 4 bytes of gradient per number from the first micro-batch to the last."""
    m = GIANT.model
    parts = parameters(m)
    # each rank has whole norms
    stage = ((parts["attention"] + parts["mlp"]) * 16 / 126 + parts["embedding"]) / 8 + 16 * 2 * m.D
    config = GIANT.replace({"global_batch": 256, "grad_accum_steps": 64,
                            "memory.recompute": "block"})
    predicted = memory(config, "h100", layout=Layout(shard=8, tensor=8, pipeline=8))
    for moment in IN_BACKWARD:
        if moment == LAST:
            assert predicted.at(moment)["gathered weights"] == pytest.approx(2 * stage)
            assert predicted.at(moment)["gradients"] == pytest.approx(4 * stage)
    # 8 micro-batches of 4 sequences have begun: each keeps the inputs of 16 blocks, and the 7 that
    # wait what they sent on
    assert predicted.at(LOSS)["activations"] == pytest.approx(
        (8 * 16 + 7) * 4 * 8192 * 16_384 * 2 / 8,
        rel=0.01)
    assert (predicted.at(UPDATE)["gradients"] == pytest.approx(4 * stage / 8)
            and "gathered weights" not in predicted.at(UPDATE))
    alone = memory(config, "h100", layout=Layout(shard=64, tensor=8))       # no pipeline: shards
    assert max(row.bytes for row in alone.rows if row.name == "gathered weights") < stage
    published = next(run for run in runs("torchtitan-h100") if run.at == "line 59")
    assert memory_row(published).measured == 82.5 * GIB and abs(memory_row(published).error) < 0.2


def test_a_pipeline_of_chunks_begins_more_before_the_first_comes_back():
    """Megatron-LM, schedules.py: 2 (stages - rank - 1) + (chunks - 1) stages forward passes of a
    chunk run before the first backward, plus one that is at work."""
    config = GIANT.replace({"global_batch": 512, "grad_accum_steps": 512,
                            "memory.recompute": "block", "model.vocab": 1024,
                            "model.layers": 128})
    for stages, chunks in ((8, 1), (8, 2), (4, 4)):
        layout = Layout(tensor=8, pipeline=stages, interleave=chunks,
                        schedule="interleaved" if chunks > 1 else "1f1b")
        words = next(row.formula for row in memory(config, "h200", layout=layout).rows
                     if row.name == "activations")
        first = 2 * (stages - 1) + (chunks - 1) * stages + 1 if chunks > 1 else stages
        assert words.endswith(f"{first / chunks:g} micro-batches in flight"), words


def test_bf16_weights_with_float32_gradients():
    """Megatron-LM's distributed optimizer (docs/user-guide/features/dist_optimizer.md) has 18 bytes
    per parameter on one device, and 6 + 12 / d on d devices. The buffer of gradients exists before
    backward."""
    for d, each in ((1, 18), (8, 6 + 12 / 8), (64, 6 + 12 / 64)):
        rows = model_states(1_000_000, precision="bf16-fp32-grads", zero=1, devices=d)
        assert sum(row.bytes for row in rows) == pytest.approx(each * 1_000_000)
    predicted = memory(LLAMA, "h200", precision="bf16-fp32-grads")
    assert (predicted.at(LOSS)["gradients"] == predicted.at(UPDATE)["gradients"] == 4
            * parameter_count(LLAMA.model))


def test_copies_of_weights_are_not_called_gradients_of_logits():
    """Few tokens, many weights, and all blocks recomputed: when forward ends, autocast's copies of
    the weights are the largest row."""
    config = LLAMA.replace({"model.context": 16, "global_batch": 1, "memory.recompute": "block"})
    rows = memory(config, "h200").at(LOSS)
    blocks = 32 * (6144 * 4096 + 4096 * 4096 + 28_672 * 4096 + 4096 * 14_336)
    assert rows["weight copies"] == 2 * (blocks + 128_256 * 4096)
    assert rows["logits' gradients"] <= 3 * 4 * 16 * 128_256


def test_reserved_is_what_streams_and_holes_keep():
    """Llama 8B over 8 shards reserves the peak, the gradients of shards (4 bytes per parameter over
    8), the embeddings that are gathered at once, and the freed memory of the 16-bit logits. A
    single device reserves the peak and the memory of the logits."""
    layout = Layout(shard=8)
    predicted = memory(LLAMA.replace({"global_batch": 16}), "h200", layout=layout)
    logits, tables = 2 * 8192 * 128_256 * 2, 2 * 128_256 * 4096 * 2
    assert (predicted.reserved_bytes - predicted.peak_bytes
            == pytest.approx(4 * parameter_count(LLAMA.model) / 8 + tables + logits))
    alone, compiled = memory(LLAMA, "h200"), memory(LLAMA.replace({"system.compile": True}), "h200")
    assert compiled.reserved_bytes == compiled.peak_bytes
    assert alone.peak_moment == LOSS and alone.reserved_bytes - alone.peak_bytes == logits
    assert memory(LLAMA, replace(CATALOGUE["h200"], kind="cpu")).reserved_bytes == memory(
        LLAMA, replace(CATALOGUE["h200"], kind="cpu")).peak_bytes


# ---- stacks

def stacked(stack: str, tensor: int = 8, **changes):
    """Return the bytes by row that are alive when backward begins, for 16,384 tokens and 32 blocks
    of width 4,096 in 16 bits."""
    config = LLAMA.replace({"system.stack": stack, **changes})
    return memory(config, "a100-80", layout=Layout(tensor=tensor), precision="bf16-master").at(LOSS)


def test_what_stacks_hold_by_hand():
    stream, logits = 2 * 8192 * 4096, 2 * 8192 * 128_256
    assert stacked("eager") == stacked("nanotron")
    # a fused loss keeps only the logits, in the dtype of the head
    assert stacked("megatron")["logits and loss"] == pytest.approx(2 * logits / 8, rel=0.01)
    # Korthikanti et al. 2022, section 4.1: inputs of norms and of column-parallel Linears, 8 s b h
    # of a block without dropouts; and
    # those of the last norm and of the head
    before, now = stacked("megatron-2021"), stacked("eager")
    assert (before["activations"] - now["activations"]
            == pytest.approx((8 * 32 + 4) * stream * (1 - 1 / 8), rel=1e-3))
    # logits of each rank: log-probabilities in 32 bits; in 16, as no micro-batch was before
    kernel = stacked("scaling-kernel")
    assert kernel["logits' gradients"] == 8 * now["logits' gradients"] == 2 * 4 * logits
    assert (kernel["logits and loss"] == pytest.approx((4 + 2) * logits)
            and kernel["activations"] == before["activations"])
    two = stacked("scaling-kernel", global_batch=4, grad_accum_steps=2)
    assert two["logits and loss"] == pytest.approx((4 + 2 * 2) * logits)
    # two norms of a block and the last one: float32 twice instead of 16 bits once
    assert (stacked("scaling")["activations"] - kernel["activations"]
            == pytest.approx((2 * 32 + 1) * 6 * stream))
    # with sequence parallelism, inputs of column-parallel Linears and of the head stay whole
    kept = stacked("scaling-sequence")["activations"] - now["activations"]
    assert kept == pytest.approx((4 * 32 + 2) * stream * (1 - 1 / 8))


def test_a_norm_that_is_written_out_saves_two_float32_tensors():
    """Measured: the storages that PyTorch saves for a norm of separate operations: a float32 copy,
    its square, the mean, their product, and the product with the gain."""
    x, gain = (torch.randn(64, 128, dtype=torch.bfloat16).requires_grad_(),
               torch.ones(128, dtype=torch.bfloat16).requires_grad_())
    seen: dict[int, int] = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        result = (wide * gain.float()).to(x.dtype)
    model = LLAMA.replace({"model.width": 128, "model.heads": 2, "model.kv_heads": 2,
                           "model.context": 64}).model
    op = operations(MicroBatch(model=model, kind="gpu", compute_bytes=2, residual_bytes=2,
                               norms_written_out=True)).norm
    assert (result.dtype == x.dtype and sum(seen.values()) - 4 * 128 == op.saved_bytes == 2 * 4 * 64
            * 128 + 4 * 64)


def test_stages_by_work_are_dealt_as_nanotron_deals_them():
    """nanotron at commit e24d248, src/nanotron/models/base.py, lines 216 to 232, assigns blocks one
    by one. The first and the last stage are compared."""
    def dealt(layers: int, head: float, stages: int) -> list[int]:
        blocks, cost, total = [0] * stages, 0.0, layers + head
        stage = 0
        for _number in range(layers):
            blocks[stage] += 1
            cost += 1.0
            stage += cost > total * (stage + 1) / stages
        return blocks

    for name in ("llama-8b", "llama-1b", "llama-405b"):
        m = preset(name).model
        head = m.V * m.D / sum(op.weights for op in operations(MicroBatch(model=m)).linears)
        for stages in (2, 3, 4, 8):
            config = preset(name).replace({"system.stack": "nanotron", "global_batch": 16,
                "grad_accum_steps": 16})
            step = DeviceStep(config, CATALOGUE["h100"], Layout(pipeline=stages), precision=None,
                              optimizer=None, recompute=None,
                              attention=None)
            first, *_, last = dealt(m.L, head, stages)
            assert (Device(step, True, False).layers == first
                    and Device(step, False, True).layers == max(1, last)), (name, stages)


def test_every_stack_has_fitted_numbers():
    for stack in evidence.STACKS:
        assert evidence.reached("a100", stack, evidence.fitted()["numbers"]).fused > 0


# ---- published peaks

def test_published_peaks_by_layout():
    """The median error over the published peaks: FSDP within 10%, tensor and pipeline ranks within
    15%, also for the runs of the Ultra-Scale Playbook."""
    by_kind = by_layout()
    assert len(peaks().rows) >= 70 and by_kind["FSDP"][0] >= 20 and by_kind["TP + PP"][0] >= 40
    for name, (_, _, error) in by_kind.items():
        assert error < (0.15 if "TP" in name or "PP" in name else 0.1), name
    off = [abs(row.error) for run, row in unsaid() if run.tensor > 1 or run.pipeline > 1]
    assert len(off) == 675 and median(off) < 0.15


def test_what_a_peak_is_taken_from():
    run = next(run for run in runs("torchtitan-h100") if run.at == "line 28")
    assert kind(run) == "FSDP" and memory_row(run).measured == 77 * GIB
    # activations of selective op, by hand: a block keeps its input, wq, wv, attention, w1 and w2
    # for 16,384 tokens
    block = 16_384 * (2 * (4096 + 4096 + 1024 + 4096 + 14_336 + 4096) + 4 * 32)
    assert held(run).at(LOSS)["activations"] == pytest.approx(32 * block, rel=0.01)
    with pytest.raises(ConfigError, match="not stated: the peak of memory"):
        memory_row(replace(run, memory=None, memory_unit=None))
    with pytest.raises(ConfigError, match="not stated: the layout"):
        held(replace(run, shard=None))
