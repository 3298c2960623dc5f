"""Only these tests catch a place of a rank that is wrong, pieces that do not make up the whole, and
tensor ranks whose numbers are not those of one process and of PyTorch's own tensor parallelism."""

from contextlib import nullcontext

import pytest
import torch

import lessons.rows.linear_attention
import lessons.rows.optimizers  # noqa: F401  ten rules more
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.parallel.cut import Cut, Split, pieces
from lpkit.techniques.layouts import AXES, FASTEST_FIRST, GROUPS, Layout
from lpkit.training import build
from tests.parallel import parity

SMALL = Config().replace({
    "model.layers": 2, "model.width": 32, "model.heads": 4, "model.context": 32, "model.vocab": 272,
    "global_batch": 4, "grad_accum_steps": 2, "precision.recipe": "fp32", "system.device": "cpu",
    "system.threads": 1})
LLAMA = {"model.norm": "rmsnorm", "model.mlp": "swiglu", "model.position": "rope",
         "model.bias": False, "model.kv_heads": 2, "model.qk_norm": True, "model.tied": False,
         "model.mlp_width": 48}


# ---- places

def test_ranks_count_with_tensor_fastest():
    layout = Layout(pipeline=2, data=3, shard=2, context=2, tensor=4)
    for rank in range(layout.devices):
        at, step, total = layout.coordinates(rank), 1, 0
        for axis in FASTEST_FIRST:
            total, step = total + at[axis] * step, step * getattr(layout, axis)
        assert total == rank and set(at) == set(AXES)
        for axes in GROUPS.values():
            assert layout.peers(rank, axes) == [
                peer for peer in range(layout.devices)
                if all(layout.coordinates(peer)[axis] == at[axis] for axis in AXES
                       if axis not in axes)]
    assert [layout.batch_rank(rank) for rank in (0, 8, 16, 48, 95)] == [0, 1, 2, 0, 5]


@pytest.mark.parametrize("dim, parts", [(0, 1), (0, 2), (1, 1), (None, 1)])
@pytest.mark.parametrize("tensor, shard", [(1, 1), (2, 3), (3, 5)])
def test_pieces_make_up_the_whole(dim, parts, tensor, shard):
    """Each number is in one piece, with its place, whatever the cut; and a cut is read from the
    whole as it was made."""
    whole = torch.arange(24.0 * 12).view(24, 12)
    seen = torch.zeros_like(whole)
    for index in range(tensor):
        split = Split(dim, index, tensor, parts) if tensor > 1 else None
        part = whole if split is None else split.part(whole)
        assert split is None or split.shape(part.shape) == whole.shape
        each = -(-len(part) // shard)
        for first in (min(i * each, len(part)) for i in range(shard)):
            rows = part[first:first + each]
            cut = Cut(whole.shape, whole.dtype, pieces(rows, first, part.shape, split), (0,))
            for offsets, piece in cut.pieces:
                where = tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape))
                assert torch.equal(whole[where], piece)
                seen[where] += 1
            again = cut.empty(whole.dtype)
            again.copy_(whole)
            assert all(torch.equal(a.data, b.data) for a, b in zip(cut.pieces, again.pieces))
    assert torch.equal(seen, torch.ones_like(seen))


# ---- the same numbers

# Every layout with some model, and every model with some layout
CUTS = [
    ({"tensor": 2}, {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 24}),
    ({"tensor": 4}, LLAMA | {"model.kv_heads": 4}),
    ({"tensor": 2, "data": 2}, {"memory.recompute": "selective"}),
    ({"tensor": 2, "shard": 2, "zero": 1}, {"model.attention.sinks": True, "model.tied": False}),
    ({"tensor": 2, "shard": 2, "zero": 3, "gathered": "float32"},
     {"memory.recompute": "block", "model.bias": False})]


@pytest.mark.slow
@pytest.mark.parametrize("layout, changes", CUTS, ids=str)
def test_float32_is_that_of_one_process(layout, changes, parent, monkeypatch):
    monkeypatch.setattr(parity, "WarmParent", lambda: nullcontext(parent))
    small = {"model.width": 64, "model.context": 64, "model.vocab": 272}
    [row] = parity.measure(["fp32"], {"tensor": layout}, updates=5, orders=1,
                           changes=small | changes)
    assert row.same, row


@pytest.mark.dist
def test_pytorchs_own_tensor_parallelism_has_these_gradients(on_ranks):
    """`parallelize_module`, by DTensors, of the same weights and tokens. It knows no fused gate and
    up, which it is given whole. Sums of 2 ranks in another order: 1e-6 of the largest."""
    configs = [SMALL.replace({**changes, "grad_accum_steps": 1, "parallel.tensor": 2}).to_dict()
               for changes in ({}, LLAMA)]
    for by_model in on_ranks("each", SMALL, of="beside_parallelize_module", configs=configs):
        for apart in by_model:
            assert len(apart) > 10 and max(apart.values()) < 1e-6, apart


# ---- what cannot be

@pytest.mark.parametrize("changes, sentence", [
    ({"parallel.tensor": 3}, "heads=4 does not split over tensor=3 ranks; tensor may be 2 or 4$"),
    ({"parallel.tensor": 4, "model.kv_heads": 2}, "kv_heads=2 does not split .*; tensor may be 2$"),
    ({"parallel.tensor": 4, "model.vocab": 270}, "vocab=270 does not split .*; tensor may be 2$"),
    ({"model.context": 31}, "context=31 does not split over tensor=2 ranks; tensor may be 1$"),
    ({"model.attention": "delta"}, "delta has gates and states, .*; set parallel.tensor=1"),
    ({"model.changes": "lora"}, "lora changes whole matrices, and a rank has only parts; set mod"),
    ({"optimizer": "muon"}, "optimizer=muon needs whole parameters, .*; parallel.tensor=2"),
    ({"optimizer": "sophia"}, "sophia may read all logits of a token after an update"),
], ids=str)
def test_what_cannot_be_cut_is_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build.decide(SMALL.replace({"parallel.tensor": 2, **changes}))
