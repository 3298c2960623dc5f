"""Ranks that have a part of each matrix compute what one process does, and what PyTorch's own
tensor parallelism does."""

import pytest
import torch

import lessons.rows.linear_attention
import lessons.rows.optimizers  # noqa: F401  ten rules more
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.parallel.cut import Cut, Split, pieces
from lpkit.techniques.layouts import AXES, FASTEST_FIRST, GROUPS, Layout, check, refuse_untrainable
from lpkit.training import build
from tests.parallel import parity

SMALL = Config().replace({
    "model.layers": 2, "model.width": 32, "model.heads": 4, "model.context": 32, "model.vocab": 272,
    "global_batch": 4,
    "grad_accum_steps": 2, "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1})
LLAMA = {"model.norm": "rmsnorm", "model.mlp": "swiglu", "model.position": "rope",
         "model.bias": False, "model.kv_heads": 2,
         "model.qk_norm": True, "model.tied": False, "model.mlp_width": 48}


# ---- places

def test_ranks_count_with_tensor_fastest():
    layout = Layout(pipeline=2, data=3, shard=2, context=2, tensor=4)
    for rank in range(layout.devices):
        at, step, total = layout.coordinates(rank), 1, 0
        for axis in FASTEST_FIRST:
            total, step = total + at[axis] * step, step * getattr(layout, axis)
        assert total == rank and set(at) == set(AXES)
        for axes in GROUPS.values():
            peers = layout.peers(rank, axes)
            due = [one for one in range(layout.devices)
                   if all(layout.coordinates(one)[axis] == at[axis] for axis in AXES
                          if axis not in axes)]
            assert peers == due
    assert [layout.batch_rank(rank) for rank in (0, 8, 16, 48, 95)] == [0, 1, 2, 0, 5]


@pytest.mark.parametrize("dim, parts", [(0, 1), (0, 2), (1, 1), (None, 1)])
@pytest.mark.parametrize("tensor, shard", [(1, 1), (2, 1), (2, 3), (4, 2), (3, 5)])
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

CUTS = {"tensor": {"tensor": 2}, "tensor 4": {"tensor": 4},
        "tensor, data": {"tensor": 2, "data": 2},
        "tensor, ZeRO 1": {"tensor": 2, "shard": 2, "zero": 1},
        "tensor, ZeRO 3": {"tensor": 2, "shard": 2, "zero": 3, "gathered": "float32"}}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LLAMA | {"model.kv_heads": 4},
    {"model.attention.sinks": True, "model.tied": False},
                                     {"memory.recompute": "block", "model.bias": False},
    {"memory.recompute": "selective"},
                                     {"memory.cross_entropy": "chunked",
                                      "memory.cross_entropy.chunk_tokens": 24}], ids=str)
def test_float32_is_that_of_one_process(changes):
    small = {"model.width": 64, "model.context": 64, "model.vocab": 272}
    rows = parity.measure(["fp32"], CUTS, orders=1, changes=small | changes)
    assert len(rows) == len(CUTS) and all(row.same for row in rows), [(row.layout, row.distance)
        for row in rows]


@pytest.mark.dist
@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt", "llama"])
def test_pytorchs_own_tensor_parallelism_has_these_gradients(changes, on_ranks):
    """`parallelize_module`, by DTensors, of the same weights and tokens. It knows no fused gate and
    up, which it is given whole. Sums of 2 ranks in another order: 1e-6 of the largest."""
    config = SMALL.replace({**changes, "grad_accum_steps": 1, "parallel.tensor": 2})
    for apart in on_ranks("beside_parallelize_module", config, 2):
        assert len(apart) > 10 and max(apart.values()) < 1e-6, apart


# ---- what cannot be

@pytest.mark.parametrize("changes, sentence", [
    ({"parallel.tensor": 3}, r"heads=4 does not split over tensor=3 ranks; tensor may be 2 or 4$"),
    ({"parallel.tensor": 4, "model.kv_heads": 2}, r"kv_heads=2 does not split over tensor=4 ranks; "
                                                  r"tensor may be 2$"),
    ({"parallel.tensor": 4, "model.vocab": 270}, r"vocab=270 does not split over tensor=4 ranks; "
                                                 r"tensor may be 2$"),
    ({"parallel.tensor": 2, "model.context": 31}, r"model.context=31 does not split over tensor=2 "
                                                  r"ranks; tensor may be 1$"),
], ids=str)
def test_what_does_not_divide_names_what_does(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config = SMALL.replace(changes)
        check(config, config.parallel)


@pytest.mark.parametrize("changes, sentence", [
    ({"model.attention": "delta"}, "model.attention=delta has gates and states .*; set "
                                   "parallel.tensor=1"),
    ({"model.changes": "lora"}, "model.changes=lora changes whole matrices, and a rank has parts; "
                                "set model.changes="),
])
def test_what_is_not_cut_so_far_is_refused(changes, sentence):
    config = SMALL.replace({"parallel.tensor": 2, **changes})
    with pytest.raises(ConfigError, match=sentence):
        refuse_untrainable(config)


@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb"])
def test_optimizers_of_whole_matrices_are_refused(name):
    with pytest.raises(ConfigError,
                       match=f"optimizer={name} reads a parameter as a whole, and "
                             f"parallel.tensor=2 gives each rank a part"):
        build.decide(SMALL.replace({"parallel.tensor": 2, "optimizer": name}))


def test_labels_are_not_drawn_from_a_part_of_the_logits():
    with pytest.raises(ConfigError, match="sophia may read all logits of a token after an update"):
        build.decide(SMALL.replace({"parallel.tensor": 2, "optimizer": "sophia"}))
