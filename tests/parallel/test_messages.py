"""What ranks send one another: the closed form, the trace and real processes, message by
message."""

import pytest
import torch
import torch.distributed as dist

import lessons.rows.context
import lessons.rows.linear_attention
import lessons.rows.pipelines  # noqa: F401  adds rows
from lessons.ranks.messages import messages, sent_bytes
from lpkit import predict_trace
from lpkit.config import Config
from lpkit.hardware import room
from lpkit.measure.trace import fake_world
from lpkit.measure.tracking import MessageCount
from lpkit.nn.transformer import Transformer
from lpkit.parallel.ranks import all_gather, reduce_scatter
from lpkit.predict import memory
from lpkit.predict.messages import Message, buckets, padded, parameter_shapes
from lpkit.techniques.layouts import Layout

pytestmark = pytest.mark.dist
SMALL = Config().replace({"model.layers": 2, "model.width": 32, "model.heads": 4,
                          "model.context": 16, "global_batch": 64,
                          "grad_accum_steps": 1, "precision.recipe": "fp32", "system.device": "cpu",
                          "system.threads": 1})
# 272 and 264 rows of tables, 96 of q, k and v, 40 or 24 elsewhere: few numbers of ranks split them
UNEVEN = {"model.width": 24, "model.mlp_width": 40, "model.vocab": 272, "model.norm": "rmsnorm",
          "model.mlp": "swiglu",
          "model.position": "rope", "model.head_dim": 8, "model.heads": 3, "model.kv_heads": 1,
          "model.tied": False,
          "model.qk_norm": True}
LAYOUTS = {"replicas": {"data": 2}, "naive": {"data": 3, "reduction": "per-parameter"},
           "ZeRO 1": {"shard": 5, "zero": 1},
           "ZeRO 1, naive": {"shard": 4, "zero": 1, "reduction": "per-parameter"},
           "ZeRO 2": {"shard": 7, "zero": 2}, "ZeRO 3": {"shard": 64},
           "ZeRO 3, float32": {"shard": 6, "gathered": "float32"},
           "hybrid": {"data": 4, "shard": 8}, "hybrid, ZeRO 1": {"data": 2, "shard": 3, "zero": 1,
               "reduction": "buckets"}}
CHANGES = {"uneven": UNEVEN, "bf16, accumulated": {"precision.recipe": "bf16",
    "grad_accum_steps": 2}}
OTHERS = {"fp16": {"precision.recipe": "fp16"}, "fp8-delayed": {"precision.recipe": "fp8-delayed"},
          "recomputed": {"memory.recompute": "block"},
          "nvfp4": {"precision.recipe": "nvfp4", "model.layers": 3},
          "in pieces": {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 8}}


SPLITS = {"tensor": {"tensor": 2}, "tensor, data": {"tensor": 4, "data": 2},
          "tensor, ZeRO 1": {"tensor": 2, "shard": 3, "zero": 1},
          "tensor, ZeRO 2": {"tensor": 2, "shard": 5, "zero": 2},
          "tensor, ZeRO 3": {"tensor": 4, "shard": 8},
          "tensor, hybrid": {"tensor": 2, "data": 2, "shard": 2, "gathered": "float32"}}
SPLITS |= {"context": {"context": 2, "zero": 0}, "context, ZeRO 1": {"context": 4, "zero": 1},
           "context, ZeRO 3": {"context": 2, "shard": 3},
           "all-to-all": {"context": 4, "attention": "all-to-all", "zero": 0},
           "context, tensor": {"context": 2, "tensor": 2, "data": 2, "zero": 1},
           "pipeline": {"pipeline": 2}, "interleaved": {"pipeline": 2, "interleave": 2,
               "schedule": "interleaved"},
           "V": {"pipeline": 2, "interleave": 2, "schedule": "zbv"},
           "pipeline, data": {"pipeline": 4, "data": 2, "schedule": "gpipe"},
           "pipeline, ZeRO 1": {"pipeline": 2, "shard": 3, "zero": 1},
           "pipeline, tensor": {"pipeline": 2, "tensor": 2},
           "all axes": {"pipeline": 2, "tensor": 2, "context": 2, "data": 2, "shard": 2, "zero": 1}}
CUT = {"model.heads": 8, "model.kv_heads": 4, "model.head_dim": 8, "model.mlp": "swiglu",
       "model.norm": "rmsnorm", "model.position": "rope",
       "model.vocab": 320, "model.qk_norm": True}
OF_SPLITS = {"bias": {}, "llama": CUT, "sinks": {"model.attention.sinks": True,
    "model.tied": False}, "bf16": {"precision.recipe": "bf16"},
             "fp16": CUT | {"precision.recipe": "fp16"},
             "fp8": {"precision.recipe": "fp8-tensorwise"},
             "nvfp4": {"precision.recipe": "nvfp4", "model.layers": 3, "model.width": 128},
             "delayed, recomputed": CUT | {"precision.recipe": "fp8-delayed",
             "memory.recompute": "block", "grad_accum_steps": 2},
             "in pieces": OTHERS["in pieces"] | {"grad_accum_steps": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("layout, changes",
                         [(layout, changes) for layout in SPLITS for changes in OF_SPLITS
                                             if layout in ("tensor", "tensor, ZeRO 1",
                                                 "tensor, ZeRO 3") or changes in ("llama", "bf16",
                                                     "delayed, recomputed")])
def test_ranks_that_split_a_model_send_what_the_formula_says(layout, changes):
    # a first, a last, and one between; a trace takes seconds
    layers, pieces = (4, 4) if "pipeline" in SPLITS[layout] else (3, 2)
    config = laid_out(SMALL.replace(OF_SPLITS[changes] | {"model.layers": layers,
        "grad_accum_steps": pieces}), SPLITS[layout])
    traced, said = predict_trace(config).messages, messages(config, room("cpu"))
    assert traced == said and len(said) > 1, (traced - said, said - traced)


def laid_out(config: Config, layout: dict) -> Config:
    """Each rank has as many micro-batches as the config says."""
    pieces = Layout(**layout).batch_ranks * config.grad_accum_steps
    return config.replace({"global_batch": config.global_batch // pieces * pieces or pieces,
                           **{f"parallel.{key}": n for key, n in layout.items()},
                           "grad_accum_steps": pieces if config.grad_accum_steps > 1 else 1})


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("changes", CHANGES)
def test_the_trace_sends_what_the_formula_says(name, changes):
    config = laid_out(SMALL.replace(CHANGES[changes]), LAYOUTS[name])
    traced, said = predict_trace(config), messages(config)
    assert traced.messages == said and said.total() > 1


@pytest.mark.parametrize("name, changes",
                         [*(("ZeRO 3", name) for name in OTHERS), ("replicas", "fp16"),
                          ("replicas", "fp8-delayed")])
def test_techniques_send_what_the_formula_says(name, changes):
    config = laid_out(SMALL.replace(OTHERS[changes]), LAYOUTS[name])
    assert predict_trace(config).messages == messages(config)


def test_the_sum_by_hand():
    """P numbers in float32 on n ranks, all rows even: ZeRO 0 and ZeRO 1 send 2 (n - 1) / n of 4 P
    bytes; ZeRO 3 half of that in gradients a micro-batch, and blocks' weights twice."""
    n, P = 4, sum(p.numel() for p in Transformer(SMALL.model).parameters())
    blocks = sum(p.numel() for p in Transformer(SMALL.model).blocks.parameters())
    total = lambda **layout: sum(sent_bytes(messages(SMALL, layout=Layout(**layout))).values())
    scalar = 2 * 4 * (n - 1) / n
    assert total(data=n) == 2 * 4 * P * (n - 1) / n + scalar
    assert total(shard=n, zero=1) == 2 * 4 * P * (n - 1) / n + 2 * scalar
    assert total(shard=n, zero=2) == total(shard=n, zero=1)
    assert total(shard=n) == total(shard=n, zero=2) + 4 * blocks * (n - 1) / n
    assert not messages(SMALL)


@pytest.mark.parametrize("changes", [
    {}, UNEVEN, {"model.attention": "delta", "model.bias": True},
    {"model.attention.sinks": True, "model.qk_norm": True}], ids=str)
def test_shapes_are_the_models_in_its_order(changes):
    model = SMALL.replace(changes).model
    first, block, last = parameter_shapes(model)
    assert [*first, *model.L * block, *last] == [tuple(p.shape)
        for p in Transformer(model).parameters()]
    assert padded((10, 3), 4) == 36 and padded((2, 3), 4) == 12
    assert sum(map(len, buckets(model, 1000))) == len(list(Transformer(model).parameters()))


def test_a_count_knows_each_kind_and_leaves_control_apart():
    with fake_world(Layout(shard=4), "cpu") as ranks, MessageCount() as count:
        dist.all_reduce(torch.ones(5))
        all_gather(torch.ones(8), torch.ones(2), group=ranks.groups["shard"])
        reduce_scatter(torch.ones(2), torch.ones(8))
        ranks.told(3)
        ranks.agreed({"a": 1})
    assert count.sent == {Message("all-reduce", 20, 4): 1, Message("all-gather", 32, 4): 1,
                          Message("reduce-scatter", 32, 4): 1}
    assert sent_bytes(count.sent) == {"all-reduce": 30.0, "all-gather": 24.0,
        "reduce-scatter": 24.0}
    assert ({message.kind for message in count.control} == {"broadcast_"}
            and count.control.total() == 3)


# ---- memory

WIDE = Config().replace({"model.layers": 4, "model.width": 256, "model.heads": 4,
                         "model.vocab": 4096, "precision.recipe": "fp32",
                         "system.device": "cpu", "system.attention": "sdpa"})
SIZES = {"few tokens": {"model.context": 16, "global_batch": 4},
         "many tokens": {"model.context": 128, "global_batch": 16},
         "tables apart": {"model.context": 32, "global_batch": 4, "model.tied": False}}


STAGES = [{"data": 4}, {"shard": 4, "zero": 1}, {"shard": 4, "zero": 2}, {"shard": 4}]
MIXED = [{"data": 4, "reduction": "buckets"}, {"data": 2, "shard": 2, "zero": 1},
         {"data": 2, "shard": 2}]


@pytest.mark.parametrize("layout, size", [*((layout, size) for layout in STAGES for size in SIZES),
    *((layout, "many tokens") for layout in MIXED)],
                         ids=str)
def test_bytes_of_a_rank(layout, size):
    """3%: what a block's last operations hold while its gradients leave is counted for the block as
    a whole."""
    config = laid_out(WIDE.replace(SIZES[size]), layout)
    said = memory(config, room("cpu"), attention="sdpa")
    assert said.peak_bytes == pytest.approx(predict_trace(config).peak_bytes, rel=0.03)


# ---- real processes

@pytest.mark.parametrize("layout", [
    {"data": 2}, {"data": 2, "reduction": "per-parameter"}, {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 2}, {"shard": 2}], ids=str)
def test_two_processes_send_and_hold_what_was_said(on_ranks, layout):
    """To the byte. Their memory is that of the trace within 3%, and at most one message more: on a
    busy machine a message holds its buffers for longer than one that arrives at once."""
    config = laid_out(SMALL.replace(UNEVEN | {"grad_accum_steps": 2, "global_batch": 8}), layout)
    said, traced = messages(config), predict_trace(config)
    for sent, control, peak_bytes, _ in on_ranks("counted", config):
        assert {Message(*one): count for *one, count in sent} == said and not control
        assert (0.97 * traced.peak_bytes < peak_bytes < 1.03 * traced.peak_bytes
                + max(one.nbytes for one in said))


@pytest.mark.parametrize("zero, changes",
                         [(2, {}), (3, {"model.tied": False, "model.vocab": 2048,
                                        "memory.recompute": "block"})],
                         ids=["tied", "untied"])
def test_bytes_of_ranks_that_gather_casts(on_ranks, zero, changes):
    """Where blocks are most of it: a byte of each of their weights, and no cast that waits for
    backward. 3%, as above."""
    config = WIDE.replace({"model.width": 512, "model.heads": 8, "model.vocab": 256,
                           "model.context": 64, "global_batch": 4, "system.threads": 1,
                           "precision.recipe": "fp8-tensorwise", "parallel.shard": 2,
                           "parallel.zero": zero, "parallel.gathered": "fp8", **changes})
    traced, said = predict_trace(config), memory(config, room("cpu"), attention="sdpa")
    whole = memory(config.replace({"parallel.gathered": "float32"}), room("cpu"), attention="sdpa")
    assert (traced.peak_bytes == pytest.approx(said.peak_bytes, rel=0.03)
            and said.peak_bytes < 0.95 * whole.peak_bytes)
    for *_, peak_bytes, _ in on_ranks("counted", config):
        assert peak_bytes == pytest.approx(said.peak_bytes, rel=0.03)
