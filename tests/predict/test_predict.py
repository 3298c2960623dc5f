"""Every formula against an independent count: PyTorch's counters, measured storages, the papers'
worked examples."""

import json
import math
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from inspect import unwrap

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lessons.rows.activations
import lessons.rows.disk  # noqa: F401  adds rows
from lessons.activations import kept
from lessons.roofs import gradients_of, ridge
from lessons.rows import adapters as adapters
from lessons.rows.sparse_attention import BlockSparse
from lessons.saved import saved_bytes
from lpkit import cli, measure, predict_trace
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.kernels import wide_product
from lpkit.memory.recompute import CoreAttention
from lpkit.nn import attention
from lpkit.nn.transformer import Transformer, cross_entropy
from lpkit.predict import CATALOGUE, memory, model_states, predict
from lpkit.predict.compare import Comparison
from lpkit.predict.flops import (
    forward_flops,
    products,
    training_flops,
    training_flops_per_token,
)
from lpkit.predict.ledger import LOSS, UPDATE
from lpkit.predict.params import parameter_count, parameters
from lpkit.predict.walk import EMBED, Walk
from lpkit.presets import PRESETS, preset
from lpkit.techniques.attention import Documents, Softmax, Window
from lpkit.techniques.attention_backends import ATTENTION, Attending, choose_attention
from lpkit.techniques.layouts import Layout, micro_batch
from lpkit.techniques.machines import DTYPES
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.recipes import RECIPES

SMALL = ModelConfig(layers=2, width=24, heads=4, vocab=50, context=20)
LLAMA = dict(norm="rmsnorm", position="rope", mlp="swiglu", bias=False, tied=False)
ODD = {
    "gpt2": SMALL,
    "gpt2, untied, no bias": replace(SMALL, tied=False, bias=False),
    "llama": replace(SMALL, kv_heads=2, mlp_width=40, **LLAMA),
    "one group": replace(SMALL, kv_heads=1, **LLAMA),
    "one head": replace(SMALL, heads=1),
    "mixed": replace(SMALL, kv_heads=2, position="rope", mlp="swiglu", mlp_width=36),
    "rmsnorm and learned": replace(SMALL, norm="rmsnorm", heads=3, kv_heads=3, context=150),
    "three blocks of queries": replace(SMALL, context=300, **LLAMA),
    "gemma": replace(SMALL, head_dim=16, kv_heads=1, **LLAMA | {"tied": True}),
    "qwen2": replace(SMALL, qkv_bias=True, kv_heads=2, **LLAMA),
    "qwen3": replace(SMALL, head_dim=10, qk_norm=True, kv_heads=2, **LLAMA),
    "norms of all heads": replace(SMALL, qk_norm=True, head_dim=5),
}
WINDOW = Window(name="window", size=6, global_tokens=2)
KINDS = {
    "capped": Softmax(name="full", soft_cap=5.0), "sinks": Softmax(name="full", sinks=True),
    "window": WINDOW,
    "window, capped, sinks": replace(WINDOW, size=140, soft_cap=3.0, sinks=True),
    "documents": Documents(name="documents"),
    "block-sparse": BlockSparse(name="block-sparse", block=4)}
MODELS = {**{name: config.model for name, config in PRESETS.items()}, **ODD}
SOFTMAX = [name for name, row in ATTENTION.items() if row.implementation]
CPU = replace(CATALOGUE["h200"], name="this", kind="cpu")


def on_meta(model: ModelConfig, backend: str = "plain") -> Transformer:
    with torch.device("meta"):
        return Transformer(model, attention.backend(backend, model))


def attended(kind: str, backend: str, model: ModelConfig = SMALL) -> ModelConfig:
    """Return the model with this kind of attention. Skip the test if the backend cannot run it on a
    CPU."""
    model = replace(model, attention=KINDS[kind])
    if problem := ATTENTION[backend].why_not(Attending(model=model)):
        pytest.skip(problem)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_pytorchs_count(name):
    built = on_meta(MODELS[name])
    assert parameter_count(MODELS[name]) == sum(p.numel() for p in built.parameters())
    modules_of = {"embedding": built.embed, "attention": [b.attention for b in built.blocks],
             "mlp": [b.mlp for b in built.blocks],
             "norms": [built.norm, *(n for b in built.blocks for n in (b.norm1, b.norm2))]}
    for part, modules in modules_of.items():
        count = sum(p.numel() for m in (modules if isinstance(modules, list) else [modules])
                    for p in m.parameters())
        assert parameters(MODELS[name])[part] == count, part


@pytest.mark.parametrize("backend", ["plain", "sdpa", "blocked"])
@pytest.mark.parametrize("name", [*ODD, "gpt2-124m", "llama-1b", "llama-70b"])
def test_flops_are_pytorchs_count(name, backend):
    """On the meta device, sdpa is composed of matmuls that PyTorch's counter sees. Backward has
    exactly twice the FLOPs of forward; `blocked` also computes the scores once more. Of large
    models, three blocks are counted, since the other blocks are equal to them."""
    model, batch = MODELS[name], 3 if name in ODD else 1
    model = replace(model, layers=min(3, model.layers))
    used, built = backend, on_meta(model, backend)
    tokens = torch.zeros(batch, model.T, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(built(tokens), tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    again = scores_again(model, batch) if used == "blocked" else 0
    assert forward.get_total_flops() == forward_flops(model, batch=batch)
    assert forward.get_total_flops() + backward.get_total_flops() == training_flops(model,
        batch=batch) + again
    gradients = [g.flops for p in products(model, batch=batch) for g in gradients_of(p)]
    assert backward.get_total_flops() == sum(gradients) + again


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_that_a_rule_lets_through_are_counted(kind):
    """Each pair of tokens is checked by itself. Several documents count as one document."""
    for T in (1, 20, 150):
        model = replace(SMALL, context=T, attention=KINDS[kind])
        rule = model.attention.rule(T)
        pairs = sum(bool(rule.sees(i, j)) for i in range(T) for j in range(T))
        square = sum(p.flops for p in products(model, batch=1) if p.pairs)
        assert rule.pairs(T) == pairs
        assert (forward_flops(model) - forward_flops(model, attention="causal") == square - square
                * pairs // T**2)
        assert parameter_count(model) == sum(p.numel() for p in on_meta(model).parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["plain", "sdpa", "blocked"])
def test_the_flops_of_every_kind_are_pytorchs_count(backend, kind):
    """PyTorch counts all T x T pairs. `pairs_share` has the share that a backend computes."""
    model = attended(kind, backend, replace(SMALL, context=150))
    built, tokens = on_meta(model, backend), torch.zeros(2, model.T, dtype=torch.long,
        device="meta")
    documents = tokens if model.attention.name == "documents" else None
    with FlopCounterMode(display=False) as forward:
        built(tokens, documents=documents)
    assert forward.get_total_flops() == forward_flops(model, batch=2)
    op = ATTENTION[backend].formula(MicroBatch(model=model, batch=2, attention=backend))
    seen = model.attention.rule(model.T).pairs(model.T) / model.T**2
    assert seen < op.pairs_share <= 1 and (backend != "blocked" or op.pairs_share < 0.9)


def scores_again(model, batch):
    """Return the FLOPs of the scores, which a flash kernel computes again in backward (Dao et al.
    2022, https://arxiv.org/abs/2205.14135)."""
    return sum(p.flops for p in products(model, batch=batch) if p.name == "scores")


def test_what_flash_computes_again_is_pytorchs_count():
    """PyTorch's formula for a flash kernel counts two matmuls in forward and five in backward."""
    from torch.utils.flop_counter import sdpa_backward_flop_count

    m = PRESETS["gpt2-124m"].model
    shape = (2, m.H, m.T, m.E)
    five = m.L * sdpa_backward_flop_count(shape, shape, shape, shape)
    four = 2 * sum(p.flops for p in products(m, batch=2) if p.pairs)
    assert five - four == scores_again(m, 2)


def test_flops_by_the_rule_of_thumb():
    """6 N + 12 L H E T FLOPs per token, from PaLM's appendix B. N does not count embeddings, which
    are only looked up."""
    m = PRESETS["llama-8b"].model
    matrices = parameter_count(m) - parameters(m)["embedding"] - parameters(m)["norms"]
    assert training_flops_per_token(m) == 6 * matrices + 12 * m.L * m.H * m.E * m.T


def test_causal_attention_counts_the_pairs_that_are_left():
    pairs = sum(1 for i in range(SMALL.T) for j in range(SMALL.T) if j <= i)
    square = sum(p.flops for p in products(SMALL, batch=1) if p.pairs)
    assert (forward_flops(SMALL) - forward_flops(SMALL, attention="causal") == square - square
            * pairs // SMALL.T**2)


HERE = sorted(name for name, row in ATTENTION.items()
              if not row.why_not(Attending(model=SMALL, interpreter=True)))
# Every model with every backend and precision, and every backend and precision with both kinds of
# recomputation; batches, which multiply, by pairs.
KEPT = [pytest.param(model, backend, (1, 3)[(i // 2 + j + k) % 2], precision,
                     ("none", "core-attention")[(i + k) % 2], id=f"{name}-{backend}-{precision}")
        for i, (name, model) in enumerate(ODD.items()) for j, backend in enumerate(HERE)
        for k, precision in enumerate(("fp32", "bf16", "bf16-pure"))]


@pytest.mark.parametrize("model, backend, batch, precision, recompute", KEPT)
def test_activations_are_what_autograd_keeps_to_the_byte(model, backend, batch, precision,
        recompute, monkeypatch):
    # the saved bytes do not depend on the numbers, which Triton's interpreter would take minutes to
    # compute
    monkeypatch.setattr("lpkit.kernels.flash_attention._forward",
                        defaultdict(lambda: lambda **_: None))
    _same_bytes(model, backend, batch, precision, recompute)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "core-attention"])
@pytest.mark.parametrize("backend", ["plain", "sdpa", "blocked"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "documents"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "three blocks of queries"])
def test_activations_of_every_kind(name, kind, backend, precision, recompute):
    _same_bytes(attended(kind, backend, ODD[name]), backend, 3, precision, recompute)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["plain", "sdpa"])
def test_activations_of_documents(backend, precision):
    """Each sequence has a mask of its own. Document ids that a backend keeps are part of the batch,
    not of the activations."""
    _same_bytes(attended("documents", backend), backend, 3, precision, "none")


def _same_bytes(model, backend, batch, precision, recompute):
    built = Transformer(model, attention.backend(backend, model))
    if recompute == "core-attention":
        CoreAttention()(built)
    if precision == "bf16-pure":
        built.bfloat16()
    x, y = torch.zeros(batch, model.T, dtype=torch.long), torch.zeros(batch, model.T,
        dtype=torch.long)

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = built(x, documents=x + 1 if model.attention.name == "documents" else None)
        return cross_entropy(logits, y)

    traced = saved_bytes(built, loss)
    formula = kept(model, batch=batch, compute_bytes=4 if precision == "fp32" else 2,
                   residual_bytes=2 if precision == "bf16-pure" else 4, attention=backend,
                   recompute=recompute)
    assert formula.operations == traced.operations
    assert formula.weight_copy_bytes == traced.weight_copy_bytes


def test_korthikanti_s_formula():
    """Bytes that a layer keeps in 16 bits, equation 1 of https://arxiv.org/abs/2205.05198: s b h
    (34 + 5 a s / h); and 34 s b h if attention is recomputed, which the paper calls selective
    recomputation. The formula counts dropout masks and results, and lpkit has no dropout. lpkit
    keeps statistics of norms and the causal mask, which the formula leaves out. PyTorch's selective
    recomputation keeps results of matmuls: 20 s b h, or 22 s b h with fused attention."""
    s, b, h, a = 64, 2, 96, 6
    model = ModelConfig(layers=3, width=h, heads=a, vocab=100, context=s, mlp_width=4 * h)
    masks, scores_dropped, norms, causal, sums = (2 * s * b * h, 3 * a * s * s * b, 8 * s * b,
        s * s, 4 * a * s * b)

    def layer(recompute, attention="plain"):
        saved = kept(model, batch=b, compute_bytes=2, residual_bytes=2, attention=attention,
                     recompute=recompute)
        return sum(size for name, size in saved.operations.items()
                   if name not in ("embed", "norm", "head", "loss")) / 3

    assert (layer("none") == s * b * h * (34 + 5 * a * s / h) - masks - scores_dropped + norms
            + causal)
    assert (layer("core-attention") == layer("core-attention", "sdpa") == 34 * s * b * h - masks
            + norms)
    assert layer("selective") == 20 * s * b * h
    assert layer("selective", "sdpa") == 22 * s * b * h + sums
    assert layer("block") == 2 * s * b * h


def test_every_attention_backend_has_its_formula():
    """Each row of ATTENTION names its formula."""
    for name in SOFTMAX:
        row = ATTENTION[name]
        assert (unwrap(attention.backend(name, replace(SMALL, head_dim=16))) is unwrap(row.load())
                and row.formula(MicroBatch(model=SMALL)).saved_bytes)


def test_recomputed_blocks_keep_their_inputs():
    from torch.utils.checkpoint import checkpoint

    model = ODD["gpt2"]
    built = Transformer(model)
    for block in built.blocks:
        block.forward = lambda *args, run=block.forward: checkpoint(run, *args, use_reentrant=True)
    x, y = torch.zeros(3, model.T, dtype=torch.long), torch.zeros(3, model.T, dtype=torch.long)
    traced = saved_bytes(built, lambda: cross_entropy(built(x), y))
    assert kept(model, batch=3, recompute="block").total_bytes == traced.total_bytes
    whole = kept(model, batch=3)
    assert whole.block_bytes * model.L == sum(whole.operations[name] for name in whole.operations
                                              if name not in ("embed", "norm", "head", "loss"))


@pytest.mark.parametrize("used", ["plain", "sdpa", "blocked"])
@pytest.mark.parametrize("kind", [{"name": "window", "size": 40, "global_tokens": 3},
                                  {"name": "block-sparse", "block": 32}],
                         ids=lambda kind: kind["name"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_memory_of_a_step_of_every_kind(recipe, kind, used):
    """Within 2%. If the peak is inside attention's backward, the formula adds up tensors that are
    not all alive at once; and a CPU without fast bf16 casts copies of some heads to float32 in
    `blocked`."""
    config = preset("cpu-3m").replace({"model.layers": 2, "global_batch": 4, "model.context": 300,
        "model.width": 64,
                                       "precision.recipe": recipe, "system.attention": used,
        "model.attention": kind})
    measured, predicted = measure.memory(config, device="cpu"), memory(config, CPU)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


@pytest.mark.parametrize("changes", [
    {}, {"grad_accum_steps": 2}, {"model.vocab": 3000},
    {"model.position": "rope", "model.mlp": "swiglu"},
    {"model.head_dim": 48, "model.kv_heads": 1},
    {"model.qk_norm": True, "model.head_dim": 20, "model.kv_heads": 2},
], ids=["preset", "accumulation", "a large vocabulary", "llama style", "wide heads",
        "norms of q and k"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_memory_of_a_real_step(recipe, changes):
    """Each row at the peak is exact to the byte, except for single numbers: the optimizer's step
    counters and the loss."""
    config = preset("cpu-3m").replace({"model.layers": 2, "global_batch": 8, "model.context": 160,
        "model.width": 64,
                                       "precision.recipe": recipe, **changes})
    measured = measure.memory(config, device="cpu")
    predicted = memory(config, CPU, attention=measured.chosen["attention"].used)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=1e-4)
    assert predicted.peak_moment == LOSS
    rows = predicted.at(LOSS)
    assert set(rows) == {name for name, nbytes in measured.rows.items() if nbytes > 100}
    for name, nbytes in rows.items():
        assert nbytes == pytest.approx(measured.rows[name], abs=400), name


def test_zero_by_the_papers_example():
    """Figure 1 of the ZeRO paper: 7.5B parameters on 64 devices with 2 + 2 + 12 bytes per parameter
    need 120, 31.4, 16.6 and 1.9 GB for stages 0 to 3."""
    totals = [sum(row.bytes for row in model_states(7_500_000_000, zero=stage, devices=64)) / 1e9
              for stage in range(4)]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]


def test_the_peak_is_a_moment_and_not_the_sum():
    predicted = memory(preset("cpu-3m"), "h200")
    assert (predicted.peak_moment == LOSS and "gradients" not in predicted.at(LOSS)
            and "activations" not in predicted.at(UPDATE))
    assert (predicted.peak_bytes == sum(predicted.at(LOSS).values())
            < sum(row.bytes for row in predicted.rows))
    accumulated = memory(preset("cpu-3m").replace({"grad_accum_steps": 4}), "h200")
    assert "gradients" in accumulated.at(LOSS)
    short = preset("llama-8b").replace({"global_batch": 1, "grad_accum_steps": 1,
        "model.context": 64})
    # dense gradients of two tables of 128,256 rows
    assert memory(short, "h200").peak_moment == EMBED


@pytest.mark.parametrize("name", PRESETS)
def test_everything_is_predicted_for_every_preset_and_machine(name):
    for machine in CATALOGUE:
        answer = json.loads(json.dumps(predict(preset(name), machine, devices=4).to_dict(),
                                       allow_nan=False))
        assert {"parameters", "flops_per_token", "bytes", "tokens_per_second", "step_seconds",
                "cost"} <= set(answer)
        assert (answer["bytes"]["peak_bytes"] > 0 and answer["step_seconds"] > 0
                and (answer["cost"] or CATALOGUE[machine].price_per_hour is None))


def test_time_energy_and_cost_by_hand():
    config = preset("gpt2-124m").replace({"steps": 1000})
    predicted = predict(config, "h200", devices=8, mfu=0.5, price_per_hour=2.0)
    seconds = training_flops(config.model, batch=512) / (8 * 989.4e12 * 0.5)
    assert (predicted.step_seconds == pytest.approx(seconds)
            and predicted.step.tokens_per_second == pytest.approx(512 * 1024 / seconds))
    hours = 8 * 1000 * seconds / 3600
    assert (predicted.run.cost == pytest.approx(2 * hours)
            and predicted.run.energy_wh == pytest.approx(700 * hours))
    again = predict(config, "h200", devices=8, mfu=0.5, recompute="block")
    # recomputation adds a forward pass of all blocks, without the head
    assert 1.2 < again.step_seconds / predicted.step_seconds < 4 / 3


def test_the_layout_is_the_first_that_fits():
    assert predict(preset("llama-1b"), "h200", devices=64).assumptions["zero"] == 0
    large = predict(preset("llama-70b"), "h200", devices=64)
    assert (large.memory.fits and large.assumptions["zero"] == 3
            and large.assumptions["recompute"] == "block")
    assert not predict(preset("llama-405b"), "t4").memory.fits


def test_a_machine_without_bf16_computes_in_float32():
    assert predict(preset("cpu-3m"), "t4").assumptions["dtype"] == "fp32"
    with pytest.raises(ConfigError, match="NVIDIA T4 has no bf16; it has fp32, fp16, int8"):
        predict(preset("cpu-3m"), "t4", precision="bf16")


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("context", [1024, 1025])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_attention_is_assumed_as_the_trainer_chooses_it(kind, context, recipe):
    config = Config().replace({"model.context": context, "precision.recipe": recipe})
    on = replace(CATALOGUE["h100"], kind=kind, flops={"fp32": 1e12, "bf16": 2e12})
    used, _ = choose_attention("auto", device="cuda" if kind == "gpu" else kind,
                               low_precision=recipe == "bf16", model=config.model)
    assert predict(config, on).assumptions["attention"] == used


@pytest.mark.parametrize("used", ["plain", "tiled", "sdpa", "blocked"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_memory_follows_the_configs_attention(kind, used):
    config = preset("llama-8b").replace({"global_batch": 1, "grad_accum_steps": 1,
        "model.context": 4096})
    asked, on = config.replace({"system.attention": used}), replace(CATALOGUE["h200"], kind=kind)
    assert memory(asked, on) == memory(config, on, attention=used)
    if used == "plain":
        scores = config.model.L * config.model.H * config.model.T**2 * 2
        assert (memory(asked, on).peak_bytes > memory(config, on, attention="sdpa").peak_bytes
                + scores)
    chosen, _ = choose_attention("auto", device="cuda" if kind == "gpu" else kind,
                                 low_precision=True, model=config.model)
    assert memory(config, on) == memory(config, on, attention=chosen)
    assert f"attention={used}" in next(row.formula for row in memory(asked, on).rows
        if row.name == "activations")


def test_a_budget_is_an_estimate_between_keeping_all_and_one_input():
    config = preset("gpt2-124m").replace({"memory.recompute": "budget"})
    none, block = (memory(config, "h200", recompute=mode) for mode in ("none", "block"))
    peaks = [memory(config.replace({"memory.recompute.budget": share}), "h200")
             for share in (0.0, 0.3, 0.5, 1.0)]
    kept_bytes = [peak.at(LOSS)["activations"] for peak in peaks]
    outside = none.at(LOSS)["activations"] - kept(config.model, batch=16, compute_bytes=2,
        kind="gpu").block_bytes * 12
    assert kept_bytes == sorted(kept_bytes) and kept_bytes[0] == block.at(LOSS)["activations"]
    assert kept_bytes[2] - outside == pytest.approx((none.at(LOSS)["activations"] - outside) / 2)
    assert kept_bytes[3] == none.at(LOSS)["activations"]
    assert "an estimate" in next(row.formula for row in peaks[0].rows if row.name == "activations")
    predicted = predict(config, "h200")
    assert (predicted.assumptions["recompute"] == "budget"
            and predicted.memory.peak_bytes == peaks[2].peak_bytes)


def test_tensor_ranks_divide_every_activation_once(monkeypatch):
    """The temporaries of a block's backward are freed again: the last and the first block leave
    equal bytes, and no row falls below 0. tests/predict/test_memory_layouts.py tests the bytes that
    ranks gather."""
    monkeypatch.setattr(Walk, "whole_input", lambda self, op: 0.0)
    config = preset("llama-8b").replace({"global_batch": 8, "grad_accum_steps": 1,
                                          "system.stack": "eager"})
    alone, eight = (memory(config, "h200", layout=Layout(tensor=n)) for n in (1, 8))
    for moment in eight.rows[-1].at:
        assert (eight.at(moment)["temporaries"]
                == pytest.approx(alone.at(moment)["temporaries"] / 8)), moment
    assert eight.at(LOSS)["logits' gradients"] == alone.at(LOSS)["logits' gradients"] / 8


def test_the_catalogue_is_dense_and_sourced():
    for name, row in CATALOGUE.items():
        assert row.name == name and "https://" in row.source
        assert set(row.flops) <= set(DTYPES) and row.memory_bytes > 1e10
        assert (row.bytes_per_second < row.memory_bytes * 100
                and row.link_bytes_per_second < row.bytes_per_second)
        if "bf16" in row.flops:   # a step in width at most doubles: a sparse figure would stand out
            assert (row.flops["bf16"] <= row.flops.get("fp8", row.flops["bf16"]) <= 2.03
                    * row.flops["bf16"])
            assert row.flops["bf16"] == row.flops.get("fp16", row.flops["bf16"])
    assert 200 < ridge(CATALOGUE["h200"], "bf16") < 210


def test_micro_batches():
    config = preset("gpt2-124m")     # 512 sequences in 32 micro-batches
    assert ([micro_batch(config.global_batch, config.grad_accum_steps, n) for n in (1, 8, 64, 512)]
            == [
        (16, 32), (16, 4), (8, 1), (1, 1)])
    assert micro_batch(12, 2, 3) == (4, 1)
    # 6 times a prime: a search that counts down to a divisor would take minutes
    assert micro_batch(6 * 357_913_931, 3, 2) == (357_913_931, 3)


def test_a_table_of_blocks_has_a_size_that_python_holds():
    import lessons.rows.sparse_attention  # noqa: F401  adds the row

    with pytest.raises(ConfigError, match=r"at most 1024; set model\.attention\.block=1024"):
        preset("cpu-3m").replace({"model.context": 2**20, "model.attention": "block-sparse"})


def test_ten_thousand_layers_are_cut_at_once():
    config = preset("cpu-3m").replace({"model.layers": 10_000, "global_batch": 5000,
                                       "grad_accum_steps": 5000, "parallel.pipeline": 5000})
    assert predict(config, "h200").step_seconds > 0


@pytest.mark.parametrize("arguments, message", [
    (["gpt3-175b"], "there is no preset 'gpt3-175b'"),
    (["llama-70b", "--machine", "h2000"], "did you mean 'h200'?"),
    (["llama-70b", "--devices", "7"], "global_batch=512 sequences does not split over data=7 x "
                                      "shard=1 = 7 ranks; set global_batch to 3584"),
    (["llama-70b", "--devices", "0"], "devices must be positive, got 0"),
    (["llama-70b", "--devices", "-8"], "got -8"),
    (["cpu-3m", "--mfu", "40"], "mfu is a fraction"),
    (["cpu-3m", "--mfu", "nan"], "mfu is a fraction"),
    (["cpu-3m", "--zero", "4"], "there is no ZeRO stage 4; choose 0, 1, 2 or 3"),
    (["cpu-3m", "--precision", "bf15"], "did you mean 'bf16'?"),
    (["cpu-3m", "--optimizer", "adamm"], "did you mean 'adam'?"),
    (["cpu-3m", "--recompute", "blocks"], "did you mean 'block'?"),
    (["cpu-3m", "--price-per-hour", "-1"], "price_per_hour must be 0 or more"),
    (["cpu-3m", "--set", "model.layes=6"], "did you mean 'model.layers'?"),
])
def test_wrong_input_is_one_sentence(arguments, message, capsys):
    assert cli.main(["predict", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and len(err.strip().splitlines()) == 1


def test_the_command_prints_one_object_or_a_table(capsys):
    assert cli.main(["predict", "llama-70b", "--machine", "h200", "--devices", "64", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == 70_553_706_496       # the size in Llama 3.1's index file
    assert (answer["devices"] == 64 and answer["machine"]["name"] == "h200"
            and len(answer["sources"]) >= 4)
    assert cli.main(["predict", "llama-70b", "--devices", "64"]) == 0
    table = capsys.readouterr().out
    assert "70.6B" in table and "ZeRO stage 3" in table and "datasheet" in table
    assert all(ord(c) < 128 for c in table) and max(map(len, table.splitlines())) < 160


def test_a_comparison_says_how_far_off_the_formula_is():
    comparison = Comparison.of(guess=50, formula=110, measured=100, unit="bytes", where="here",
                          name="peak")
    assert comparison["peak"].error == pytest.approx(0.1)
    assert comparison.worst_error == pytest.approx(0.1)
    html = comparison._repr_html_()
    assert "+10.0%" in html and "110 B" in html and "your guess" in html
    rows = Comparison.of_rows({"a": 1.0, "b": 2.0}, {"b": 2.0, "c": 1.0}, unit="bytes",
                              where="<here>")
    assert [(r.name, r.error) for r in rows] == [("a", math.inf), ("b", 0.0), ("c", -1.0)]
    assert "&lt;here&gt;" in rows._repr_html_() and "your guess" not in rows._repr_html_()
    recorded = Comparison.of(formula=1, measured=None, unit="s", where="recorded: x.json")
    assert recorded.to_dict()[0]["error"] is None
    with pytest.raises(ValueError, match="nothing was measured"):
        recorded.worst_error  # noqa: B018


def test_predicting_needs_only_the_standard_library():
    program = ("import sys; before = set(sys.modules); import lpkit.predict, lpkit.presets; "
               "lpkit.predict.predict(lpkit.presets.preset('llama-8b'), 'h100', 8); "
               "print(sorted({m.partition('.')[0] for m in set(sys.modules) - before} - "
               "set(sys.stdlib_module_names)))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                           check=True)
    assert done.stdout.strip() == "['lpkit']"


@pytest.mark.parametrize("recipe", [name for name, row in RECIPES.items() if row.products])
@pytest.mark.parametrize("changes",
                         [{}, {"model.context": 64, "model.mlp": "swiglu",
                               "model.norm": "rmsnorm"}],
                         ids=["many tokens", "few"])
def test_the_peak_of_a_low_precision_step(recipe, changes):
    """Within 2%: the formula does not know how long the workspace of a cast kernel lives."""
    config = preset("cpu-3m").replace({"model.layers": 3, "global_batch": 2,
        "precision.recipe": recipe, **changes})
    measured = measure.memory(config, device="cpu")
    predicted = memory(config, CPU, attention=measured.chosen["attention"].used)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


@pytest.mark.parametrize("changes", [
    {"memory.recompute": "block"}, {"memory.recompute": "block", "memory.recompute.every": 2},
    {"memory.recompute": "core-attention"}, {"memory.recompute": "selective"},
    {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 64,
     "model.vocab": 2048},
    {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 256,
     "memory.recompute": "block", "grad_accum_steps": 2},
    {"memory.optimizer_step": "in-backward", "optimizer.clip": 0, "model.context": 32},
    {"memory.moment_format": "int8", "model.context": 32}, {"memory.param_dtype": "bf16"},
    {"memory.param_dtype": "bf16", "model.context": 32},
], ids=lambda changes: " ".join(map(str, changes.values())))
@pytest.mark.parametrize("recipe", ["bf16", "fp8-tensorwise"])
def test_the_peak_under_a_memory_technique(recipe, changes, monkeypatch):
    """PyTorch's own matmuls run. A float32 copy of a weight is freed with its block; autocast's
    copy lives until forward ends."""
    config = preset("cpu-3m").replace({"model.layers": 3, "global_batch": 4, "model.context": 128,
        "precision.recipe": recipe,
                                       **changes})
    here = measure.memory(config, device="cpu")
    monkeypatch.setattr(wide_product, "wins", lambda a, b: False)
    measured = measure.memory(config, device="cpu")
    predicted = memory(config, CPU, attention=measured.chosen["attention"].used)
    # copies of queries in blocked attention are not counted; where sdpa attends, as auto has it on
    # AMX, the peak of what is made again
    # is in the last block's forward, which is no moment of the formula: 1.7%
    inside = "selective" in changes.values() and measured.chosen["attention"].used == "sdpa"
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02 if inside else 0.015)
    # a copy of a bias
    assert 0.97 * measured.peak_bytes < here.peak_bytes < 1.001 * measured.peak_bytes


@pytest.mark.parametrize("recipe", ["fp8-tensorwise", "mxfp8", "nvfp4"])
def test_the_bytes_of_cached_weights(recipe):
    config = preset("cpu-3m").replace({"model.layers": 3, "global_batch": 4, "model.context": 64,
        "grad_accum_steps": 2,
                                       "precision.recipe": recipe,
        "precision.cache_weight_casts": True})
    measured = measure.memory(config, device="cpu")
    predicted = memory(config, CPU, attention=measured.chosen["attention"].used)
    row = "low-precision weights"
    assert predicted.at(predicted.peak_moment)[row] == measured.rows[row]
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.005)


@pytest.mark.parametrize("saved", ["cpu", "disk", "int8", "int4"])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_the_peak_with_activations_away(recipe, saved):
    """Within 10%: the formula takes every tensor that is fetched, or packed to codes, for a tensor
    of the MLP."""
    config = preset("cpu-3m").replace({"model.layers": 4, "global_batch": 4, "model.context": 128,
        "model.width": 128,
                                       "precision.recipe": recipe,
        "memory.activation_offload": saved})
    measured = measure.memory(config, device="cpu")
    predicted = memory(config, CPU, attention=measured.chosen["attention"].used)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.1)
    elsewhere = memory(config.replace({"memory.activation_offload": "device"}), CPU,
                       attention="blocked").at(LOSS)["activations"]
    assert measured.offloaded_bytes == pytest.approx(elsewhere if saved == "disk" else 0, rel=0.1)


@pytest.mark.parametrize("changes", [
    {}, {"precision.recipe": "fp32"}, {"global_batch": 8, "model.context": 32},
    {"grad_accum_steps": 2, "global_batch": 32},
    {"memory.recompute": "block"}, {"model.vocab": 8192}, LLAMA,
], ids=["16 bits", "fp32", "few tokens", "accumulated", "recomputed", "a large vocabulary",
        "llama style"])
def test_the_peak_of_a_shard(changes):
    """Within 4% of a trace of FSDP2 over 8 ranks: the formula counts all gradients of a block as in
    transfer when its last operations run."""
    models = ({f"model.{key}": value for key, value in changes.items()} if changes is LLAMA
              else changes)
    config = preset("cpu-3m").replace({"precision.recipe": "bf16", "model.layers": 6,
        "model.context": 128, **models})
    traced = predict_trace(config, 8)
    predicted = memory(config, CPU, layout=Layout(shard=8),
                       attention=traced.chosen["attention"].used)
    assert predicted.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.04)


def test_a_model_of_which_no_matrix_is_trained_has_a_ledger():
    """Only a prefix is trained, so no optimizer state is fetched for an update. This once raised a
    ValueError."""
    config = preset("llama-8b").replace({"model.changes": "prefix",
        "memory.optimizer_state": "disk"})
    assert memory(config, "b200").peak_bytes < memory(config.replace({"model.changes": []}),
        "b200").peak_bytes


@pytest.mark.parametrize(("changes", "layout", "why"), [
    ({"model.layers": 1}, Layout(pipeline=2), "does not split over pipeline=2"),
    ({"model.heads": 4, "model.width": 128}, Layout(tensor=8), "does not split over tensor=8"),
    ({"global_batch": 6, "grad_accum_steps": 1}, Layout(data=4), "global_batch=6"),
])
def test_a_layout_that_the_model_cannot_have_is_refused(changes, layout, why):
    with pytest.raises(ConfigError, match=why):
        predict(Config().replace(changes), "h100", layout=layout)


def test_offload_with_some_recomputed_blocks_on_ranks_has_a_prediction():
    """The walk once reached the embeddings with fewer than 0 bytes, and found no peak there."""
    config = Config().replace({
        "model.layers": 4, "model.width": 128, "model.heads": 4, "global_batch": 40,
        "grad_accum_steps": 5, "memory.recompute": "block", "memory.recompute.every": 3,
        "memory.activation_offload": "cpu"})
    whole = predict(config.replace({"memory.activation_offload": "device"}), "h100",
                    layout=Layout(shard=4, zero=3))
    less = predict(config, "h100", layout=Layout(shard=4, zero=3))
    assert 0 < less.peak_bytes < whole.peak_bytes
