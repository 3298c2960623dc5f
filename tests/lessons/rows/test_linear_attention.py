"""Attention without softmax: chunks against definitions, steps and literal loops; bytes and FLOPs
against PyTorch's counts.

Only these tests catch: chunks or steps that differ from the definition or their gradients, a
Performer that is biased, a later token that is seen, a rounding inside, and bytes or FLOPs of these
kinds counted wrongly.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lpkit
from lessons.activations import kept
from lessons.rows import linear_attention_torch as kernel
from lessons.rows.linear_attention_torch import orthogonal_features
from lessons.saved import saved_bytes
from lpkit import cli, measure
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.execution.compiled import Compile
from lpkit.memory.recompute import CoreAttention, Recompute
from lpkit.nn import attention
from lpkit.nn.kv_cache import new_cache
from lpkit.nn.transformer import Transformer, cross_entropy
from lpkit.predict import memory, predict
from lpkit.predict.flops import forward_flops, training_flops
from lpkit.predict.params import parameter_count
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import ATTENTION, Attending, why_not
from lpkit.training.training import Training
from tests.predict.test_predict import CPU, ODD

NAMES = [name for name, row in KINDS.items() if row.operations]
kinds = pytest.mark.parametrize("name", NAMES)
MODEL = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, vocab=60, context=100)
# one rounding of the result, and of each number given: 2^-8 and 2^-11 of the largest
ROUNDED = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def given(name: str, T: int, *, heads: int = 4, groups: int = 2, E: int = 8, batch: int = 2,
          dtype=torch.float64):
    """The kind, what it has beside q, k and v, and these."""
    config = ModelConfig(width=32, heads=heads, kv_heads=groups, head_dim=E, context=max(T, 1),
                         attention=name)
    torch.manual_seed(T + groups)
    kind, x = KINDS[name].load()(config).to(dtype), torch.randn(batch, T, 32, dtype=dtype)
    own = kind(4 * x)
    own = own.detach().requires_grad_() if own is not None and own.requires_grad else own
    qkv = [torch.randn(batch, count, T, E, dtype=dtype, requires_grad=True)
           for count in (heads, groups, groups)]
    return kind, own, qkv


def gradients(out: torch.Tensor, inputs: list[torch.Tensor], own) -> list[torch.Tensor]:
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(0),
                        dtype=torch.float64).to(out.dtype)
    inputs = [*inputs, own] if own is not None and own.requires_grad else inputs
    return torch.autograd.grad(out, inputs, d_out, retain_graph=True)


@pytest.mark.parametrize("T, groups", [(1, 1), (5, 2), (64, 4), (123, 1), (200, 2)])
@kinds
def test_chunks_steps_and_the_definition_are_one(name, T, groups):
    kind, own, qkv = given(name, T, groups=groups)
    want, chunked = kind.plain(*qkv, None, own), kind.chunked(*qkv, None, own)
    state = kind.after(*(each[:, :, :0] for each in qkv[1:]),
                       own[:, :0] if name == "delta" else own)
    outs = []
    assert not state.any(), "that of no tokens"
    for t in range(T):
        gate = own[:, t:t + 1] if name == "delta" else own
        out, state = kind.step(*(each[:, :, t:t + 1] for each in qkv), state, gate)
        outs.append(out)
    torch.testing.assert_close(kind.after(*qkv[1:], own), state, rtol=1e-10, atol=1e-10)
    for out in (chunked, torch.cat(outs, dim=2)):
        torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
        for got, expected in zip(gradients(out, qkv, own), gradients(want, qkv, own), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@kinds
def test_no_tokens_give_nothing(name):
    kind, own, qkv = given(name, 0)
    assert kind.plain(*qkv, None, own).shape == (2, 4, 0, 8)
    out = kind.chunked(*qkv, None, own)
    assert out.shape == (2, 4, 0, 8) and all(g.numel() == 0 for g in gradients(out, qkv, own)[:3])


def test_linear_attention_by_its_formula():
    _, _, (q, k, v) = given("linear", 70, groups=4)
    out = KINDS["linear"].load().chunked(q, k, v)
    phi = torch.nn.functional.elu
    for t in (0, 1, 63, 64, 69):
        weights = ((phi(q[:, :, t:t + 1]) + 1) * (phi(k[:, :, :t + 1]) + 1)).sum(-1)
        want = (weights[..., None] * v[:, :, :t + 1]).sum(2) / weights.sum(-1, keepdim=True)
        torch.testing.assert_close(out[:, :, t], want, rtol=1e-12, atol=1e-12)


def test_the_delta_rule_by_a_literal_loop():
    """Schlag et al. 2021, equations 22 to 24, a head and a token at a time: read, mix, write the
    difference."""
    kind, gates, (q, k, v) = given("delta", 70, batch=1)
    out, beta = kind.chunked(q, k, v, None, gates), gates.sigmoid()

    def key(x):
        x = x * x.sigmoid()
        return x / (x.square().sum() + 1e-6).sqrt()

    for head in range(4):
        W = torch.zeros(8, 8, dtype=torch.float64)      # from keys to values
        for t in range(70):
            at = key(k[0, head // 2, t])
            old = W @ at
            new = beta[0, t, head // 2] * v[0, head // 2, t] + (1 - beta[0, t, head // 2]) * old
            W = W + torch.outer(new - old, at)
            torch.testing.assert_close(out[0, head, t], W @ key(q[0, head, t]), rtol=1e-10,
                                       atol=1e-10)


def test_features_are_orthogonal_in_blocks_and_as_long_as_normal_vectors():
    rows = orthogonal_features(40, 16, seed=3).double()
    assert torch.equal(rows.float(), orthogonal_features(40, 16, seed=3))
    assert not torch.equal(rows.float(), orthogonal_features(40, 16, seed=4))
    for block in rows.split(16):
        products = block @ block.mT
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-5)
    lengths = orthogonal_features(4096, 16, seed=0).square().sum(-1)
    # chi-squared of 16: mean 16, variance 32; six standard errors of 4,096
    assert lengths.mean().item() == pytest.approx(16, abs=6 * math.sqrt(32 / 4096))


def test_a_performers_error_falls_with_the_root_of_its_features():
    """Over 12 draws, root mean square: 16 times the features, a quarter of the error, within a
    third of that; and with 16,384 below 0.01 of softmax's largest output. For q and k of length
    1.4: the kernel's variance grows as the exponent of both."""
    _, _, (q, k, v) = given("performer", 40, groups=4, batch=1)
    q, k, v = q.detach() / 2, k.detach() / 2, v.detach()
    want, chunked = attention.plain(q, k, v), KINDS["performer"].load().chunked

    def error(count: int) -> float:
        draws = [chunked(q, k, v, None, orthogonal_features(count, 8, seed).double()) - want
                 for seed in range(12)]
        return torch.stack(draws).square().mean().sqrt().item()

    few, more, many = error(64), error(1024), error(16384)
    assert (more / few == pytest.approx(0.25, rel=1 / 3)
            and many / more == pytest.approx(0.25, rel=1 / 3))
    assert many < 0.01 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@kinds
def test_a_later_token_changes_nothing_before(name, dtype):
    """Bit for bit, also inside its own chunk, and by whatever it becomes."""
    kind, own, qkv = given(name, 150, dtype=dtype)
    before = kind.chunked(*qkv, None, own)
    for t in (149, 100, 64, 63, 1):
        changed = [x.detach().clone() for x in qkv]
        for x in changed:
            x[:, :, t:] = 20 * torch.randn_like(x[:, :, t:])
        gates = own
        if own is not None and own.ndim == 3:
            gates = own.detach().clone()
            gates[:, t:] = -gates[:, t:]
        after = kind.chunked(*changed, None, gates)
        assert torch.equal(after[:, :, :t], before[:, :, :t]), t
        assert not torch.equal(after[:, :, t], before[:, :, t])


@pytest.mark.parametrize("dtype", ROUNDED)
@kinds
def test_in_16_bits_only_the_ends_are_rounded(name, dtype):
    """The state and all that is inside stay in float32. Features of FAVOR+ are given in 16 bits to
    both."""
    kind, own, qkv = given(name, 300, E=16, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    wide_own = own.detach().double().requires_grad_(own.requires_grad) if own is not None else None
    out, want = kind.chunked(*qkv, None, own), kind.plain(*wide, None, wide_own)
    assert out.dtype == dtype and kind.after(*qkv[1:], own).dtype == torch.float32
    torch.testing.assert_close(out.double(), want, rtol=0,
                               atol=ROUNDED[dtype] * want.abs().max().item())
    for got, expected in zip(gradients(out, qkv, own), gradients(want, wide, wide_own),
                             strict=True):
        assert got.dtype == dtype
        # d_out and the saved output were rounded too
        torch.testing.assert_close(got.double(), expected, rtol=0,
                                   atol=4 * ROUNDED[dtype] * expected.abs().max().item())


@kinds
def test_autocast_reaches_nothing_inside(name):
    kind, own, qkv = given(name, 90, dtype=torch.float32)
    for call in (kind.plain, kind.chunked):
        alone = call(*qkv, None, own)
        with torch.autocast("cpu", torch.bfloat16):
            inside = call(*qkv, None, own)
        assert torch.equal(inside, alone)
        for got, want in zip(gradients(inside, qkv, own), gradients(alone, qkv, own), strict=True):
            assert torch.equal(got, want)


@kinds
def test_large_numbers_stay_finite(name):
    kind, own, qkv = given(name, 200, E=64, dtype=torch.float32)
    qkv = [(30 * x).detach().requires_grad_() for x in qkv]
    out = kind.chunked(*qkv, None, own)
    assert out.isfinite().all() and all(g.isfinite().all() for g in gradients(out, qkv, own))


@pytest.mark.parametrize("style, precision, batch", [
    ("gpt2", "fp32", 1), ("one group", "bf16", 3), ("qwen3", "bf16-pure", 1),
    ("three blocks of queries", "bf16", 1)])
@kinds
def test_what_chunks_keep_is_the_formula_to_the_byte(name, style, precision, batch):
    model = replace(ODD[style], attention=name)
    for recompute in ("none", "core-attention"):
        built = Transformer(model, attention.backend("chunked", model))
        assert parameter_count(model) == sum(p.numel() for p in built.parameters())
        if recompute == "core-attention":
            CoreAttention()(built)
        if precision == "bf16-pure":
            built.bfloat16()
        x, y = torch.zeros(2, batch, model.T, dtype=torch.long)

        def loss(built=built, x=x, y=y):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = built(x)
            return cross_entropy(logits, y.clone())

        saved = saved_bytes(built, loss, ignore=[x])
        formula = kept(model, batch=batch, compute_bytes=4 if precision == "fp32" else 2,
                       attention="chunked",
                       residual_bytes=2 if precision == "bf16-pure" else 4, recompute=recompute)
        saved.operations["embed"] = formula.operations["embed"]     # x and y share a storage
        assert formula.operations == saved.operations
        assert formula.weight_copy_bytes == saved.weight_copy_bytes


@pytest.mark.parametrize("style", ["gpt2", "three blocks of queries"])
@kinds
def test_flops_are_the_operators(name, style):
    """On the meta device: what the operators say, and PyTorch's counter for the rest."""
    model = replace(ODD[style], attention=name)
    with torch.device("meta"):
        built, tokens = Transformer(model, attention.backend("chunked", model)), torch.zeros(3,
            model.T, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(built(tokens), tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == forward_flops(model, batch=3)
    assert forward.get_total_flops() + backward.get_total_flops() == training_flops(model, batch=3)


@kinds
def test_the_operators_flops_are_their_products(name):
    """Of the definition inside the operator, by PyTorch's counter; a triangular system it does not
    count."""

    _, own, qkv = given(name, 200, groups=2)
    call, inputs = (kernel.delta, (*qkv, own)) if name == "delta" else (kernel.attend, (*qkv, own))
    with FlopCounterMode(display=False) as counter:
        call(*inputs)
    with FlopCounterMode(display=False) as inside, torch.no_grad():
        call.__wrapped__(*inputs)
    aside = 2 * 2 * 256 * 2 * 64 * 2 * 8 if name == "delta" else 0
    if name == "performer":     # the features themselves
        aside = -2 * 2 * (4 + 2) * 200 * 8 * 256
    assert counter.get_total_flops() == inside.get_total_flops() + aside


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@kinds
def test_the_peak_of_a_step(name, recipe):
    """5%: work inside the operators is counted roughly, and FAVOR+'s features are not counted at
    all."""
    config = Config().replace({"model.layers": 2, "model.context": 200, "model.width": 64,
                               "global_batch": 4,
                               "model.attention": name, "precision.recipe": recipe,
                               "system.device": "cpu"})
    measured = measure.memory(config, device="cpu")
    assert measured.chosen["attention"].used == "chunked"
    estimate = memory(config, CPU, attention="chunked")
    assert estimate.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05)
    assert predict(config, "h200").step_seconds > 0


@kinds
def test_what_a_definition_keeps_is_estimated(name):
    """The chunks' formula is exact; the definition's is the order of it."""
    model = replace(MODEL, attention=name)
    built = Transformer(model, attention.backend("plain", model))
    x, y = (torch.zeros(2, model.T, dtype=torch.long) for _ in range(2))
    saved = saved_bytes(built, lambda: cross_entropy(built(x), y)).operations["attention"]
    estimate = kept(model, batch=2, attention="plain").operations["attention"]
    assert 1 / 1.3 < estimate / saved < 1.3


@pytest.mark.parametrize("position", ["learned", "rope"])
@kinds
def test_a_cache_of_states_changes_no_logit(name, position):
    model = replace(MODEL, attention=name, position=position)
    torch.manual_seed(0)
    built, tokens = Transformer(model, attention.backend("chunked", model)).double(), torch.randint(
        0, 60, (2, 90))
    with torch.no_grad():
        whole = built(tokens)
        cache = new_cache(model, 2, dtype=torch.float64, device="cpu")
        parts = [built(tokens[:, :70], cache)] + [built(tokens[:, i:i + 1], cache)
            for i in range(70, 90)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)


@kinds
def test_recomputation_keeps_the_bits_and_a_compiled_graph_the_gradients(name):
    """Compiled by inductor's front: one graph, operators whole."""
    model = replace(MODEL, attention=name)
    tokens = torch.randint(0, 60, (2, 100), generator=torch.Generator().manual_seed(0))
    gradients = []
    for transform in (None, CoreAttention(), Recompute(), Compile(backend="aot_eager")):
        torch.manual_seed(0)
        built = Transformer(model, attention.backend("chunked", model))
        if transform:
            transform(built)
        cross_entropy(built(tokens), tokens).backward()
        gradients.append([p.grad for p in built.parameters()])
    for grads in gradients[1:3]:
        assert all(map(torch.equal, gradients[0], grads))
    torch.testing.assert_close(gradients[3], gradients[0], rtol=1e-4, atol=1e-6)


@kinds
def test_a_tiny_model_trains_predicts_and_samples(name, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    config = Config().replace({
        "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32,
        "data.source": str(corpus / "*.py"),
        "steps": 40, "global_batch": 8, "eval_every": 0, "eval_batches": 1, "checkpoint_every": 0,
        "schedule.warmup_steps": 1,
        "precision.recipe": "fp32", "system.device": "cpu", "model.attention": name,
        "optimizer.lr": 3e-3})
    assert Config.from_yaml(config.to_yaml()) == config
    run = lpkit.train(config, out=tmp_path / "run")
    losses = [line["loss"] for line in run.metrics]
    assert losses[-1] < losses[0] - 1       # nats; at random it is log 256 = 5.5
    assert run.summary["chosen"]["attention"]["used"] == "chunked"
    assert lpkit.predict_trace(config).rows == measure.memory(config, device="cpu").rows
    assert len(lpkit.sample(run, prompt="import ", tokens=8, seed=1)) > len("import ")


def test_who_cannot_says_so(capsys):
    linear, full = ModelConfig(attention="linear"), ModelConfig()
    assert (why_not("sdpa", Attending(model=linear))
            == "computes only softmax attention; plain and chunked can")
    assert [name for name in ATTENTION if not why_not(name, Attending(model=linear))] == ["plain",
        "chunked"]
    with pytest.raises(ConfigError,
                       match=r"system\.attention=chunked computes only kinds without softmax; "
                             r"plain can"):
        attention.backend("chunked", full)
    with pytest.raises(ConfigError,
                       match=r"system\.attention=blocked computes only softmax attention; plain "
                             r"and chunked can"):
        Training.build(Config().replace({"model.attention": "delta", "system.attention": "blocked",
            "system.device": "cpu"}))
    arguments = ["predict", "cpu-3m", "--set", "model.attention=performer", "--set"]
    assert cli.main([*arguments, "model.attention.features=0"]) == 2
    assert "model.attention.features must be positive, got 0" in capsys.readouterr().err
    assert cli.main([*arguments, "model.attention.features=64", "--json"]) == 0
    assert "chunked: 4 products forward" in capsys.readouterr().out
