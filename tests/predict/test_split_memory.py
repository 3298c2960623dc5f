"""Bytes of a rank that splits the model: by formula, by a trace of every tensor, and in real
processes."""

from statistics import median

import pytest

import lessons.rows.pipelines  # noqa: F401  adds rows
from lpkit import predict_trace
from lpkit.config import Config
from lpkit.hardware import room
from lpkit.predict import memory

BASE = Config().replace({
    "model.layers": 8, "model.width": 256, "model.heads": 8, "model.context": 256,
    "model.vocab": 1024, "global_batch": 8, "grad_accum_steps": 8,
    "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1,
    "system.attention": "sdpa"})
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False, "model.tied": False,
         "model.kv_heads": 4}
BF16 = {"precision.recipe": "bf16"}
PIECES = {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 64}
CHUNKS = {"pipeline": 2, "interleave": 2}
CASES = {
    "tensor 2": ({"tensor": 2}, {}), "tensor 4": ({"tensor": 4}, {}), "bf16": ({"tensor": 2}, BF16),
    "llama": ({"tensor": 4}, LLAMA | BF16),
    "fp8": ({"tensor": 4}, {"precision.recipe": "fp8-tensorwise"}),
    "mxfp8": ({"tensor": 2}, LLAMA | {"precision.recipe": "mxfp8"}),
    "block": ({"tensor": 4}, {"memory.recompute": "block"}),
    "block, bf16": ({"tensor": 4}, BF16 | {"memory.recompute": "block"}),
    "pieces": ({"tensor": 4}, PIECES), "tensor, ZeRO 1": ({"tensor": 2, "shard": 2, "zero": 1}, {}),
    "vocabulary": ({"tensor": 2}, BF16 | {"model.vocab": 16_384}),
    "vocabulary in pieces": ({"tensor": 4}, BF16 | PIECES | {"model.vocab": 16_384}),
    "padded": ({"tensor": 4}, {"precision.recipe": "fp8-blockwise", "precision.recipe.pad": True}),
    "casts": (CHUNKS | {"schedule": "interleaved"}, {"precision.recipe": "int8"}),
    "tensor, ZeRO 3": ({"tensor": 2, "shard": 2, "gathered": "float32"}, {}),
    **{name: ({"pipeline": 4, "schedule": name}, {}) for name in ("gpipe", "1f1b", "zero-bubble")},
    **{name: (CHUNKS | {"schedule": name}, {}) for name in ("interleaved", "looped-bfs", "zbv",
        "dualpipev")},
    "pipeline, llama": ({"pipeline": 2}, LLAMA | BF16),
    "tensor, pipeline": ({"tensor": 2, "pipeline": 2}, BF16),
    "pipeline, ZeRO 1": ({"pipeline": 2, "shard": 2, "zero": 1}, {}),
}


def laid_out(layout: dict, changes: dict) -> Config:
    return BASE.replace(changes | {f"parallel.{axis}": size for axis, size in layout.items()})


def trace(config: Config, rank: int):
    return predict_trace(config, config.parallel.devices, layout=config.parallel, rank=rank)


@pytest.mark.slow
def test_the_formula_holds_what_the_trace_does():
    """The rank that holds most is compared, of the first or the last stage. The median error is at
    most 3%, and the largest 8%: the formula does not count the gradients that a zero-bubble
    schedule puts off (6%). If backward did not gather again, `tensor 4` would be 10% off."""
    off = {}
    for name, case in CASES.items():
        config = laid_out(*case)
        ends = {0, config.parallel.devices - 1} if config.parallel.pipeline > 1 else {0}
        most = max(trace(config, rank).peak_bytes for rank in ends)
        off[name] = abs(memory(config, room("cpu"), attention="sdpa").peak_bytes / most - 1)
    assert median(off.values()) < 0.03 and max(off.values()) < 0.08, off


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", ["bf16", "fp8 of 2", "block of 2", "pipeline", "pipeline, llama",
                                  "zbv"])
def test_the_trace_holds_what_processes_do(on_ranks, name):
    """Within 3%. For each chunk, real processes also hold the buffers of a message that arrives and
    of a message that is sent. In the trace, messages take no time, so it does not have these
    buffers."""
    two = {"fp8 of 2": ({"tensor": 2}, {"precision.recipe": "fp8-tensorwise"}),
           "block of 2": ({"tensor": 2}, {"memory.recompute": "block"}),
           "pipeline": ({"pipeline": 2}, {})}
    config = laid_out(*(CASES | two)[name])
    stream = 256 * 256 * 4 * config.parallel.interleave
    for rank, (*_, peak_bytes, _) in enumerate(on_ranks("counted", config)):
        traced = trace(config, rank).peak_bytes
        assert 0.97 * traced < peak_bytes < 1.03 * traced + 2 * stream, rank
