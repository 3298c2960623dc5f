"""Only these tests catch weights that travel as other casts than those of whole weights, histories
and draws on which ranks differ, and an update that some ranks drop and others do not."""

from dataclasses import replace

import pytest
import torch

import lessons.rows.cast_gather  # noqa: F401  adds a row
from lessons.ranks.messages import messages
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.kernels.scales import Scaled
from lpkit.parallel.meeting import joined
from lpkit.precision.backends import BACKENDS
from lpkit.precision.scaled import quantise
from lpkit.techniques.layouts import refuse_ungatherable
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import Training
from tests.parallel.parity import OneRank

pytestmark = pytest.mark.dist
SMALL = Config().replace({
    "model.layers": 2, "model.width": 64, "model.heads": 4, "model.context": 32, "global_batch": 6,
    "grad_accum_steps": 3, "system.device": "cpu", "system.threads": 1, "schedule": "constant",
    "eval_batches": 1, "steps": 4})
BLOCKS = {"model.width": 256, "model.layers": 1, "model.context": 128, "global_batch": 2,
          "grad_accum_steps": 1}
FP8 = {"parallel.shard": 2, "parallel.gathered": "fp8"}
DATA = {"parallel.data": 2}
ZERO_1, ZERO_3 = ({"parallel.shard": 2, "parallel.zero": zero} for zero in (1, 3))


@pytest.fixture
def each(on_ranks):
    """By config: what each rank returned of the function, in one start of processes."""
    def run(function, changes, world=2, **job):
        configs = [SMALL.replace(change).to_dict() for change in changes]
        return list(zip(*on_ranks("each", SMALL, world, of=function, configs=configs, **job)))

    return run


@pytest.mark.parametrize("world, changes", [
    (2, [{"precision.recipe": "fp8-tensorwise", "parallel.zero": 3},
         {"precision.recipe": "fp8-delayed", "parallel.zero": 2},
         {"precision.recipe": "fp8-blockwise", **BLOCKS},
         {"precision.recipe": "fp8-blockwise-pow2", **BLOCKS}]),
    # 64 rows on 3 ranks: the last has fewer
    (3, [{"precision.recipe": "fp8-tensorwise", "memory.recompute": "block"}])],
    ids=["2 ranks", "3 ranks"])
def test_casts_that_travel_are_those_of_whole_weights(each, world, changes):
    """The same bits: losses, gradient norms and weights, also after a resume; in float32 but for
    what is cast."""
    changes = [{"parallel.shard": world, **change} for change in changes]
    results = each("gathers", changes, world, gathered=["float32", "fp8"])
    for change, by_rank in zip(changes, results, strict=True):
        for gathered in ("float32", "fp8"):
            sent = messages(SMALL.replace(change | {"parallel.gathered": gathered}))
            due = sorted([*message, times] for message, times in sent.items())
            assert all(rank[gathered][4] == due for rank in by_rank)
        for rank in by_rank:
            assert rank["fp8"][:4] == rank["float32"][:4] == by_rank[0]["fp8"][:4]


def test_blocks_that_are_compiled_are_gathered_too(each):
    """In whole graphs. A graph rounds some results less often than 16-bit operations do, one by
    one: bf16's 2^-8, and 8 bits of a norm. And gradients are not in the 8 bits of what was
    gathered, which would leave 200 values a tensor."""
    [by_rank] = each("compiled", [FP8 | {"precision.recipe": "fp8-delayed", "model.layers": 1,
                                         "global_batch": 4, "grad_accum_steps": 2}])
    for traced, traced_grads, plain, plain_grads, breaks in by_rank:
        assert traced[::2] == pytest.approx(plain[::2], rel=2e-3)
        assert traced[1::2] == pytest.approx(plain[1::2], rel=2e-2)
        assert breaks == 0 and len(set(traced_grads)) > 0.95 * len(set(plain_grads))


def test_ranks_agree_on_what_is_to_agree(each):
    """Histories of amaxes, and what was drawn so far, are the same; noise of stochastic rounding is
    not; weights are."""
    cases = [("fp8-delayed", DATA), ("fp8-delayed", {"parallel.shard": 2}), ("nvfp4", DATA)]
    digests = each("agreed", [{"precision.recipe": recipe, **layout} for recipe, layout in cases])
    for (recipe, _), (first, second) in zip(cases, digests, strict=True):
        assert first[:2] == second[:2] and (first[2] != second[2]) == RECIPES[recipe].stochastic


def test_an_overflow_on_one_rank_is_one_on_all(each):
    """The loss of rank 1 times 1e30: its gradients overflow float16, the update is dropped by all,
    the scale is halved by all, and the next one is done by all."""
    for first, second in each("overflows", [layout | {"precision.recipe": "fp16"}
                                            for layout in (DATA, ZERO_1, ZERO_3)], factor=1e30):
        moved, scale, _, _, moved_then, scale_then, *finite_then = first
        assert first == second and not moved and moved_then and finite_then == [True, True]
        assert scale == scale_then == 2.0**15


def test_an_infinity_in_the_rows_of_one_rank(each):
    assert each("inf_in_a_row", [ZERO_1 | {"precision.recipe": "fp16"}]) == [
        ([True, 2.0**15],) * 2]


def test_a_nan_on_one_rank_is_seen_by_all(each):
    for first, second in each("overflows", [layout | {"precision.recipe": "bf16"}
                                            for layout in (DATA, ZERO_3)], factor=float("nan")):
        assert first == second and first[2:4] == [False, False]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_without_one_cast_are_refused(recipe):
    config, row = SMALL.replace({"precision.recipe": recipe, **FP8}), RECIPES[recipe]
    sentence = (f"precision.recipe={recipe} has none; .* or use fp8-tensorwise, fp8-delayed, "
                "fp8-blockwise or fp8-blockwise-pow2")
    if row.gathers:
        refuse_ungatherable(config, row)
        config = config.replace({"parallel.zero": 1})
        sentence = r"of ZeRO 2 and 3, and parallel.zero=1 keeps whole weights; set"
    with pytest.raises(ConfigError, match=sentence):
        refuse_ungatherable(config, row)


def test_blocks_that_cross_two_ranks_are_refused(on_ranks):
    changes = {"precision.recipe": "fp8-blockwise", **BLOCKS, "model.width": 128,
               "parallel.shard": 2}
    with pytest.raises(ConfigError, match=r"whole blocks of 128 rows, and a rank has 192 of the "
                                          r"384 of blocks.0.attention.qkv"):
        on_ranks("gathers", SMALL.replace(changes), gathered=["fp8"])


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.gathers])
@pytest.mark.parametrize("backend", ["emulated", "scaled_mm"])
def test_a_cast_that_is_taken_is_the_cast(recipe, backend):
    """Both ways, and the products of it: the same bits, from values and scales alone."""
    arithmetic, cast, w = BACKENDS[backend], RECIPES[recipe].y[1], torch.randn(256, 384)
    due = arithmetic.cast(w, cast, torch.bfloat16, amax=None, noise=None, both=True)
    plain = quantise(w, cast)
    values = plain.data.to(torch.float8_e4m3fn)
    assert torch.equal(values.float(), plain.data)
    travelled = Scaled(data=values, scale=plain.scale, amax=plain.amax, nonfinite=plain.nonfinite)
    taken = arithmetic.taken(travelled, cast, torch.bfloat16, both=True)
    for a, b in ((taken, due), (taken.T, due.T)):
        assert torch.equal(a.data.float(), b.data.float()) and a.data.dtype == b.data.dtype
        assert torch.equal(a.scale.float(), b.scale.float())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")])])
@pytest.mark.parametrize("recipe, gathered", [("fp32", "float32"), ("fp8-tensorwise", "fp8")])
def test_one_rank_that_shards_has_the_numbers_of_none(device, recipe, gathered, tmp_path):
    """FSDP2 and its messages on one device, to the bit; but for a root of a square in the norm, so
    nothing is clipped. What is compiled adds embeddings' gradients in any order."""
    config = SMALL.replace({"precision.recipe": recipe, "system.device": device,
                            "optimizer.clip": 0, "system.compile": False,
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
