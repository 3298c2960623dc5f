"""The error table: its configs, one row of each kind against arithmetic, and the page that is made
from the measured files."""

from dataclasses import fields
from pathlib import Path

import pytest
from accelerate.commands.estimate import estimate_training_usage

import lessons.rows.activations
import lessons.rows.disk  # noqa: F401  adds rows
from lpkit import cli, hardware, measure, predict_trace
from lpkit.config import Config, MemoryConfig
from lpkit.hardware import room
from lpkit.predict import memory, parameter_count
from lpkit.techniques.attention import KINDS
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.techniques.recipes import RECIPES
from tests.bench import ledger
from tests.bench.drawn import configs

CONFIGS = dict(ledger.configs())


def test_sixty_configs_and_every_kind_of_them():
    assert len(CONFIGS) >= 60 and len(set(CONFIGS.values())) == len(CONFIGS)
    assert {c.model.vocab for c in CONFIGS.values()} >= {256, 128_256}
    assert {c.model.mlp for c in CONFIGS.values()} == {"gelu", "swiglu"}


@pytest.mark.parametrize("name", ["gpt2, fp32, as it is", "llama, mxfp8, accumulated",
                                  "llama, bf16, recompute selective"])
def test_a_row(name):
    config = CONFIGS[name].replace({"system.device": "cpu"})
    row = ledger._case(name, config, hardware.machine("cpu"))
    count = parameter_count(config.model)
    assert row["formula_bytes"] == pytest.approx(row["measured_bytes"], rel=0.01)
    assert row["traced_bytes"] == pytest.approx(row["measured_bytes"], rel=0.001)
    assert row["deepspeed_bytes"] == 20 * count and row["classic_bytes"] > 16 * count
    wide = estimate_training_usage(4 * count, "float32")["step"]
    assert row["accelerate_bytes"] <= wide == 16 * count


def test_the_page_is_that_of_the_measured_files():
    page = Path(__file__).parents[2] / "docs" / "ledger.md"
    assert page.read_text() == ledger.page()


SMALL = Config().replace({"model.layers": 3, "model.width": 128, "model.heads": 4,
                          "model.context": 128, "model.mlp_width": 384,
                          "model.vocab": 900, "global_batch": 3, "system.device": "cpu"})
CHUNKED = {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 300}


@pytest.mark.parametrize("changes", [
    {"precision.recipe": "fp16"}, {"precision.recipe": "fp16", "memory.recompute": "block",
                                   "model.mlp": "swiglu"},
    {"precision.recipe": "fp16", "memory.recompute": "selective"},
    {"precision.recipe": "bf16", "memory.param_dtype": "bf16", "memory.cross_entropy": "chunked",
     "memory.cross_entropy.chunk_tokens": 7,
     "model.vocab": 3000},
    {"precision.recipe": "bf16", **CHUNKED},
    {"precision.recipe": "bf16", **CHUNKED, "memory.param_dtype": "bf16"},
    {"precision.recipe": "fp8-tensorwise", "precision.recipe.transform": "hadamard",
     "model.mlp": "swiglu", "model.vocab": 80},
    {"precision.recipe": "fp8-rowwise", "precision.recipe.high_precision_layers": ()},
    {"precision.recipe": "mxfp8", "precision.recipe.high_precision_layers": ("head", "first"),
     "model.vocab": 100},
    {"precision.recipe": "bf16", "optimizer": "lion", "memory.moment_format": "int8",
     "model.context": 16, "model.vocab": 4000},
    {"precision.recipe": "bf16", "optimizer": "lion", "memory.moment_format": "int8",
     "model.context": 16, "model.vocab": 4000,
     "memory.optimizer_step": "in-backward", "optimizer.clip": 0},
    {"precision.recipe": "bf16", "global_batch": 15, "grad_accum_steps": 5,
     "memory.optimizer_state": "disk"},
    {"precision.recipe": "fp8-tensorwise", "precision.recipe.high_precision_layers": ("head",
        "first"), "memory.recompute": "block",
     "memory.recompute.every": 2, **CHUNKED},
    {"precision.recipe": "nvfp4", "precision.recipe.high_precision_layers": ("head", "first:2",
        "last:3"), "model.layers": 9},
    {"precision.recipe": "mxfp8", "precision.recipe.high_precision_layers": ("head", "first:1",
        "last:3"), "model.layers": 6, "memory.recompute": "block"},
], ids=str)
def test_unusual_settings_are_counted_too(changes):
    config = SMALL.replace(changes)
    measured = measure.memory(config)
    predicted = memory(config, hardware.machine("cpu"), attention=measured.chosen["attention"].used)
    # 2.4%: the formula does not count copies of queries and of masks in blocked attention
    assert (not predicted.doubt
            and predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.025))


@pytest.mark.parametrize("changes", [
    {"memory.activation_offload": "int2", "memory.moment_format": "int8", **CHUNKED},
    {"precision.recipe": "fp8-blockwise", "precision.recipe.pad": True, "model.width": 96,
     "model.heads": 3},
    {"precision.recipe": "mxfp8", "precision.recipe.high_precision_layers": ("blocks.1.mlp.*",
        "head")},
    {"precision.recipe": "fp8-tensorwise", "precision.recipe.high_precision_layers": (), **CHUNKED},
], ids=str)
def test_what_the_formula_does_not_follow_names_the_trace(changes):
    config = SMALL.replace({"precision.recipe": "bf16", **changes})
    predicted = memory(config, hardware.machine("cpu"))
    assert "predict_trace" in predicted.doubt
    assert predict_trace(config).peak_bytes == measure.memory(config).peak_bytes


@pytest.mark.parametrize("changes",
                         [{"model.vocab": 8192, "memory.cross_entropy.chunk_tokens": 300},
                          {"model.vocab": 2048},
                                     {"model.vocab": 3000, "grad_accum_steps": 3,
                                      "memory.recompute": "block", "model.mlp": "swiglu"},
                                     {"model.vocab": 257, "model.tied": False},
                          {"model.vocab": 4096, "memory.cross_entropy.chunk_tokens": 2048}],
                         ids=str)
def test_chunks_under_fp16_are_what_the_trace_says(changes):
    """A CPU multiplies float16 in float32. The float32 tensors of a chunk of the loss were once not
    counted, and the peak was 46% too low."""
    config = SMALL.replace({"precision.recipe": "fp16", **CHUNKED, **changes})
    traced = predict_trace(config)
    predicted = memory(config, room("cpu"), attention=traced.chosen["attention"].used)
    assert (not predicted.doubt
            and predicted.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.001))
    assert predicted.peak_bytes == pytest.approx(measure.memory(config).peak_bytes, rel=0.001)


@pytest.mark.parametrize("layers, width, heads, batch, recipe, held_gb", [
    (26, 1664, 13, 8, "bf16", 26.64), (26, 1664, 13, 8, "fp8-delayed", 23.97),
    (12, 768, 12, 16, "bf16", 8.84), (12, 768, 12, 16, "fp8-tensorwise", 8.00)])
def test_a_compiled_loss_holds_no_float32_logits(layers, width, heads, batch, recipe, held_gb):
    """The formula is compared with the measured bytes of an H200 (docs/ledger.md). The formula for
    an eager loss would be 17% to 104% too high."""
    config = Config().replace({
        "model.layers": layers, "model.width": width, "model.heads": heads, "model.vocab": 50_304,
        "model.context": 1024,
        "global_batch": batch, "precision.recipe": recipe, "system.attention": "sdpa"})
    assert (memory(config.replace({"system.compile": True}), "h200").peak_bytes
            == pytest.approx(held_gb * 1e9, rel=0.03))
    assert memory(config, "h200").peak_bytes > 1.15 * held_gb * 1e9


@pytest.mark.parametrize("recompute", ["block", "selective"])
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("offload", ["disk", "int8"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_activations_that_are_offloaded_between_blocks_that_run_again(recipe, offload, every,
                                                                      recompute):
    """Blocks that are not recomputed once freed more bytes than they had kept: rows fell below 0,
    and the peak was up to 38% too low."""
    config = SMALL.replace({
        "model.layers": 5, "precision.recipe": recipe, "memory.activation_offload": offload,
        "memory.recompute": recompute, "memory.recompute.every": every})
    predicted = memory(config, room("cpu"))
    assert min(nbytes for row in predicted.rows for nbytes in row.at.values()) >= 0
    assert predicted.peak_bytes == pytest.approx(predict_trace(config).peak_bytes, rel=0.07)


def test_a_doubt_is_printed(capsys):
    assert cli.main(["predict", "cpu-3m", "--set", "memory.activation_offload=int2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("predict_trace(config) counts every tensor instead." in out
            and "the peak was 29% too low to 7% too high" in out and "within 10%" not in out)
    assert cli.main(["predict", "cpu-3m"]) == 0
    out = capsys.readouterr().out
    assert "predict_trace" not in out and "reserved" in out


def test_fewer_configs_are_spread_over_all():
    all_of_them = list(ledger.configs(ledger.LARGER))
    some = ledger.spread(all_of_them, ledger.ON_A_GPU)
    assert (len(some) == len({name for name, _ in some}) == 24
            and (some[0], some[-1]) == (all_of_them[0], all_of_them[-1]))
    assert {config.precision.recipe.name for _, config in some} >= {"fp32", "bf16",
        "fp8-tensorwise"}
    assert {name.partition(",")[0] for name, _ in some} == {"gpt2", "llama"}
    assert ledger.spread(all_of_them, None) == ledger.spread(all_of_them, 10**6) == all_of_them


def test_drawn_configs_are_over_all_settings_and_always_the_same():
    drawn = dict(configs(120))
    assert drawn == dict(configs(120)) and len(set(drawn.values())) == 120
    assert {c.precision.recipe.name for c in drawn.values()} == set(RECIPES)
    # the measured batch has no document ids and no weights of targets
    assert ({c.model.attention.name for c in drawn.values()}
            == {name for name, row in KINDS.items() if not row.reads_ids} - {"bidirectional"})
    assert ({c.optimizer.name for c in drawn.values()} == set(OPTIMIZERS)
            and {c.grad_accum_steps for c in drawn.values()} == {1, 2, 3, 5})
    for f in fields(MemoryConfig):
        rows = {name for name, row in f.metadata["table"].items()
                if not getattr(row, "needs_compile", "")}
        assert {getattr(c.memory, f.name).name for c in drawn.values()} == rows, f.name


@pytest.mark.slow
def test_drawn_configs_are_where_the_bench_has_them():
    """These configs are drawn with another seed than the bench's. The bench claims that 99 of 100
    configs are within 2%. For so few configs, the test is that all are within 7% and the median is
    within 0.5%."""
    cases = [ledger._drawn_case(name, config, hardware.machine("cpu"))
             for name, config in configs(30, seed=5)]
    off = sorted(abs(case["formula_bytes"] / case["measured_bytes"] - 1) for case in cases
                 if not case["doubt"])
    assert len(off) >= 7 and off[-1] <= 0.07 and off[len(off) // 2] <= 0.005
    claims = list(ledger.drawn_claims(cases))
    assert claims[1][1] == [off[-1]] and claims[0][0].startswith(f"closed form, {len(off)} drawn "
        f"configs, 99")


@pytest.mark.parametrize("layers", ["first:2,last:3", "last:2", "first:2"])
def test_blocks_at_either_end_that_stay_are_counted_on_ranks(layers):
    """A block in FP4 keeps a quarter of the bytes of a block in 16 bits. The formula once took all
    inner blocks for equal, so that more bytes were freed than kept, and `nvfp4-published` under
    ZeRO 3 had no prediction."""
    config = SMALL.replace({"model.layers": 9, "precision.recipe": "nvfp4",
                            "precision.recipe.high_precision_layers": f"head,{layers}",
                            "parallel.shard": 4, "grad_accum_steps": 2, "global_batch": 16})
    traced = predict_trace(config, 4, layout=config.parallel)
    predicted = memory(config, room("cpu"), attention=traced.chosen["attention"].used)
    assert (not predicted.doubt
            and predicted.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.001))


@pytest.mark.parametrize("name", ["shampoo", "soap", "galore"])
def test_an_update_in_backward_takes_what_the_shapes_of_parameters_say(name):
    """Peaks were once up to 71% too low, because a rule that works on whole matrices was counted by
    elements."""
    config = SMALL.replace({"model.context": 8, "global_batch": 1, "optimizer": name,
                            "optimizer.clip": 0, "memory.optimizer_step": "in-backward"})
    predicted = memory(config, room("cpu"))
    assert (f"each {config.optimizer.every}th update" in predicted.doubt
            and "too low" not in predicted.doubt)
    config = config.replace({"optimizer.every": 1})
    predicted = memory(config, room("cpu"))
    assert not predicted.doubt
    assert predicted.peak_bytes == pytest.approx(predict_trace(config).peak_bytes, rel=0.005)


def test_a_rule_over_matrices_whose_state_rests_elsewhere_is_doubted():
    """Shampoo with its state on disk: the trace is 20% above the formula (config 32 that
    tests.bench.drawn draws), so the prediction has a doubt."""
    config = Config().replace({"imports": ["lessons.rows.optimizers", "lessons.rows.disk"],
                               "optimizer": "shampoo", "memory.optimizer_state": "disk",
                               "system.device": "cpu"})
    assert "shampoo fetches" in memory(config, "h200").doubt
    assert "fetches" not in memory(config.replace({"memory.optimizer_state": "device"}),
                                   "h200").doubt
