"""Weights that travel as their casts, scales that all ranks agree on, and ranks that drop an update
together."""

from dataclasses import replace

import pytest
import torch

from lessons.ranks.messages import messages
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.kernels.scales import Scaled
from lpkit.parallel.meeting import joined
from lpkit.precision.backends import BACKENDS
from lpkit.precision.scaled import quantise
from lpkit.presets import preset
from lpkit.techniques.layouts import refuse_ungatherable
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import Training
from tests.parallel.parity import OneRank

pytestmark = pytest.mark.dist
SMALL = Config().replace({
    "model.layers": 2, "model.width": 64, "model.heads": 4, "model.context": 32, "global_batch": 6,
    "grad_accum_steps": 3,
    "system.device": "cpu", "system.threads": 1, "schedule": "constant", "eval_batches": 1,
    "steps": 4})
BLOCKS = {"model.width": 256, "model.layers": 1, "model.context": 128, "global_batch": 2,
          "grad_accum_steps": 1}
FP8 = {"parallel.shard": 2, "parallel.gathered": "fp8"}


@pytest.mark.parametrize("recipe, world, changes", [
    ("fp8-tensorwise", 2, {"parallel.zero": 3}), ("fp8-delayed", 2, {"parallel.zero": 2}),
    # 64 rows on 3 ranks: the last has fewer
    ("fp8-tensorwise", 3, {"memory.recompute": "block"}),
    ("fp8-blockwise", 2, BLOCKS), ("fp8-blockwise-pow2", 2, BLOCKS)])
def test_casts_that_travel_are_those_of_whole_weights(on_ranks, recipe, world, changes):
    """The same bits: losses, gradient norms and weights, also after a resume; in float32 but for
    what is cast."""
    changes = {"precision.recipe": recipe, "parallel.shard": world, **changes}
    found = on_ranks("gathers", SMALL.replace(changes), world, gathered=["float32", "fp8"])
    due = {gathered: messages(SMALL.replace(changes | {"parallel.gathered": gathered}))
           for gathered in ("float32", "fp8")}
    for rank in found:
        assert rank["fp8"][:4] == rank["float32"][:4] == found[0]["fp8"][:4]
        for gathered, sent in due.items():
            assert rank[gathered][4] == sorted([*message, times] for message, times in sent.items())


def test_a_weight_that_is_cast_travels_in_half_of_16_bits():
    """Of a large model, where little else travels: predicted, and above what is predicted is what
    is counted."""
    gathered = {}
    for key in ("compute", "fp8"):
        sent = messages(preset("llama-8b").replace({"parallel.shard": 8, "parallel.gathered": key,
            "precision.recipe": "fp8-tensorwise"}))
        gathered[key] = sorted((message.nbytes for message in sent if message.kind == "all-gather"),
                               reverse=True)
    # of a block
    assert gathered["fp8"][1] / gathered["compute"][1] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("gathered", ["fp8", "compute"])
def test_blocks_that_are_compiled_are_gathered_too(on_ranks, gathered):
    """In whole graphs. A graph rounds some results less often than 16-bit operations do, one by
    one: bf16's 2^-8, and 8 bits of a norm.
    And gradients are not in the 8 bits of what was gathered, which would leave 200 values a
    tensor."""
    changes = {"precision.recipe": "fp8-delayed", **FP8, "parallel.gathered": gathered,
               "model.layers": 1, "global_batch": 4,
               "grad_accum_steps": 2}
    for traced, traced_grads, plain, plain_grads, breaks in on_ranks("compiled",
            SMALL.replace(changes)):
        assert (traced[::2] == pytest.approx(plain[::2], rel=2e-3)
                and traced[1::2] == pytest.approx(plain[1::2], rel=2e-2))
        assert breaks == 0
        assert len(set(traced_grads)) > 0.95 * len(set(plain_grads))


@pytest.mark.parametrize("recipe, layout",
                         [("fp8-delayed", "parallel.data"), ("fp8-delayed", "parallel.shard"),
                                            ("nvfp4", "parallel.data")])
def test_ranks_agree_on_what_is_to_agree(on_ranks, recipe, layout):
    """Histories of amaxes, and what was drawn so far, are the same; noise of stochastic rounding is
    not; weights are."""
    one, two = on_ranks("agreed", SMALL.replace({"precision.recipe": recipe, layout: 2}))
    assert one[:2] == two[:2] and (one[2] != two[2]) == RECIPES[recipe].stochastic


@pytest.mark.parametrize("layout", [{"data": 2}, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 3}])
def test_an_overflow_on_one_rank_is_one_on_all(on_ranks, layout):
    """The loss of rank 1 times 1e30: its gradients overflow float16, the update is dropped by all,
    the scale is halved by all, and the next one is done by all."""
    changes = {"precision.recipe": "fp16",
               **{f"parallel.{key}": value for key, value in layout.items()}}
    found = on_ranks("overflows", SMALL.replace(changes), factor=1e30)
    assert found[0] == found[1]
    moved, scale, _, _, moved_then, scale_then, loss_then, norm_then = found[0]
    assert (not moved and scale == 2.0**15 and moved_then and scale_then == 2.0**15 and loss_then
            and norm_then)


def test_an_infinity_in_the_rows_of_one_rank(on_ranks):
    changes = {"precision.recipe": "fp16", "parallel.shard": 2, "parallel.zero": 1}
    assert on_ranks("inf_in_a_row", SMALL.replace(changes)) == [[True, 2.0**15]] * 2


@pytest.mark.parametrize("layout", [{"data": 2}, {"shard": 2, "zero": 3}])
def test_a_nan_on_one_rank_is_seen_by_all(on_ranks, layout):
    changes = {"precision.recipe": "bf16",
               **{f"parallel.{key}": value for key, value in layout.items()}}
    found = on_ranks("overflows", SMALL.replace(changes), factor=float("nan"))
    assert found[0] == found[1] and found[0][2:4] == [False, False]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_without_one_cast_are_refused(recipe):
    config = SMALL.replace({"precision.recipe": recipe, **FP8})
    if RECIPES[recipe].gathers:
        refuse_ungatherable(config, RECIPES[recipe])
        with pytest.raises(ConfigError,
                           match=r"of ZeRO 2 and 3, and parallel.zero=1 keeps whole weights; set"):
            refuse_ungatherable(config.replace({"parallel.zero": 1}), RECIPES[recipe])
    else:
        with pytest.raises(ConfigError,
                           match=f"precision.recipe={recipe} has none; .* or use fp8-tensorwise, "
                                 f"fp8-delayed, "
                                              "fp8-blockwise or fp8-blockwise-pow2"):
            refuse_ungatherable(config, RECIPES[recipe])


def test_blocks_that_cross_two_ranks_are_refused(on_ranks):
    changes = {"precision.recipe": "fp8-blockwise", **BLOCKS, "model.width": 128,
               "parallel.shard": 2}
    with pytest.raises(ConfigError,
                       match=r"whole blocks of 128 rows, and a rank has 192 of the 384 of "
                             r"blocks.0.attention.qkv"):
        on_ranks("gathers", SMALL.replace(changes), gathered=["fp8"])


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.gathers])
@pytest.mark.parametrize("backend", ["emulated", "scaled_mm"])
def test_a_cast_that_is_taken_is_the_cast(recipe, backend):
    """Both ways, and the products of it: the same bits, from values and scales alone."""
    row, w = RECIPES[recipe], torch.randn(256, 384)
    arithmetic, cast = BACKENDS[backend], row.y[1]
    due = arithmetic.cast(w, cast, torch.bfloat16, amax=None, noise=None, both=True)
    plain = quantise(w, cast)
    values = plain.data.to(torch.float8_e4m3fn)
    assert torch.equal(values.float(), plain.data)
    made = Scaled(data=values, scale=plain.scale, amax=plain.amax, nonfinite=plain.nonfinite)
    taken = arithmetic.taken(made, cast, torch.bfloat16, both=True)
    for a, b in ((taken, due), (taken.T, due.T)):
        assert torch.equal(a.data.float(), b.data.float()) and a.data.dtype == b.data.dtype
        assert torch.equal(a.scale.float(), b.scale.float())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU")])])
@pytest.mark.parametrize("recipe, gathered",
                         [("fp32", "float32"), ("fp8-tensorwise", "float32"),
                          ("fp8-tensorwise", "fp8")])
def test_one_rank_that_shards_has_the_numbers_of_none(device, recipe, gathered, tmp_path):
    """FSDP2 and its messages on one device, to the bit; but for a root of a square in the norm, so
    nothing is clipped."""
    config = SMALL.replace({"precision.recipe": recipe, "system.device": device,
                            "optimizer.clip": 0, "system.compile": False,
                             # what is compiled adds embeddings' gradients in any order
                             "system.attention": "plain"})
    shards = replace(config, parallel=OneRank(zero=3, gathered=gathered))
    with joined(shards, rank=0, world=1, local_rank=0, local_world=1,
                init_method=f"file://{tmp_path}/store") as ranks:
        runs = Training.build(config), Training.build(shards, ranks=ranks)
        losses = [[run.update(step).loss.item() for step in range(3)] for run in runs]
        weights = [{name: p.detach() for name, p in run.sharding.owned.items()} for run in runs]
    assert losses[0] == losses[1] and runs[1].sharding.layout.stage == 3
    for name, p in weights[0].items():
        assert torch.equal(p, weights[1][name]), name
