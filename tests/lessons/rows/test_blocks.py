"""Rows of model.block, model.norm=none and model.init: what they compute, cost and begin as, beside
formulas written out here.

Only these tests catch: a block, a shape of attention or a start that its paper does not describe,
its parameters, FLOPs or bytes counted wrongly, a cache that changes its logits, and gradients of
shared layers that are not the sum over those that read them.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import lpkit
from lessons.rows import adapters as adapters
from lessons.rows.blocks_torch import Shape, running_mean
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.nn.attention import plain
from lpkit.nn.init import initialise
from lpkit.nn.kv_cache import new_cache
from lpkit.nn.transformer import Transformer
from lpkit.predict.flops import training_flops
from lpkit.predict.ledger import memory
from lpkit.predict.params import parameter_count, shapes
from lpkit.techniques import layouts
from lpkit.techniques.blocks import BLOCKS
from lpkit.techniques.inits import INITS
from lpkit.training import seams
from lpkit.training.runs import Run
from lpkit.training.training import RandomTokens, Training
from tests.training.resuming import in_parts

OWN = tuple(name for name, row in BLOCKS.items()
            if row.implementation.startswith(("lpkit.", "lessons.rows.")))
SMALL = Config().replace({
    "model.layers": 3, "model.width": 32, "model.heads": 4, "model.context": 32, "global_batch": 4,
    "eval_every": 3, "eval_batches": 1,
    "checkpoint_every": 3, "steps": 6, "schedule.warmup_steps": 1, "system.device": "cpu",
    "precision.recipe": "bf16", "system.attention": "plain"})


def model(block, seed=0, **settings):
    torch.manual_seed(seed)
    config = ModelConfig(**{"layers": 2, "width": 24, "heads": 3, "vocab": 13, "context": 16,
                            "block": block, "init": "fan-in"} | settings)
    network = Transformer(config, plain).double()
    initialise(network, config.init)
    for p in network.parameters():       # no gain is 0 or 1, no bias 0
        p.data += 0.3 * torch.randn_like(p)
    return network


# ---- what each computes

def shaped(attention, h, bare):
    """By the (T, T) matrices of the published code, head after head."""
    B, T, _ = h.shape
    H, E = attention.G, attention.E
    product = (attention.qk if bare else attention.qkv)(h).view(B, T, H, 2 if bare else 3, E)
    v = h.view(B, T, H, E) if bare else product[:, :, :, 2]
    heads = []
    for i in range(H):
        q, k = product[:, :, i, 0], product[:, :, i, 1]
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        A = (q @ k.mT / math.sqrt(E)).masked_fill(~seen, -torch.inf).softmax(-1)
        C = seen.double() / torch.arange(1, T + 1)[:, None]
        alpha, beta, gamma = attention.shape.weight[:, i]
        heads.append((alpha * torch.eye(T, dtype=torch.float64) + beta * A - gamma * C) @ v[:, :,
            i])
    return torch.cat(heads, dim=-1)


FORMULAS = {
    "pre-norm": lambda b, x: (y := x + b.attention(b.norm1(x), None, None, 0)) + b.mlp(b.norm2(y)),
    "parallel": lambda b, x: x + b.attention(b.norm1(x), None, None, 0) + b.mlp(b.norm1(x)),
    "sandwich": lambda b, x: (y := x + b.norm3(b.attention(b.norm1(x), None, None, 0)))
    + b.norm4(b.mlp(b.norm2(y))),
    "rezero": lambda b, x: (y := x + b.gain1.weight * b.attention(x, None, None, 0))
    + b.gain1.weight * b.mlp(y),
    "skipinit": lambda b, x: (y := x + b.gain1.weight * b.attention(x, None, None, 0))
    + b.gain2.weight * b.mlp(y),
    "layerscale": lambda b, x:
    ((y := x + torch.diag(b.gain1.weight).matmul(b.attention(b.norm1(x), None, None, 0)[...,
        None])[..., 0])
                                + torch.diag(b.gain2.weight).matmul(b.mlp(b.norm2(y))[...,
                                    None])[..., 0]),
    "skipless": lambda b, x: (y := b.gain1.weight
                              * b.attention.out(shaped(b.attention, b.norm1(x), False)))
    + b.gain2.weight * b.mlp(b.norm2(y)),
    "sas": lambda b, x: (y := b.gain1.weight * shaped(b.attention, b.norm1(x), True))
    + b.gain2.weight * b.mlp(b.norm2(y)),
    "sas-p": lambda b, x: b.gain1.weight * shaped(b.attention, b.norm1(x), True) + b.gain2.weight
    * b.mlp(b.norm1(x)),
}


@pytest.mark.parametrize("block", OWN)
def test_a_block_computes_its_formula(block):
    network = model(block)
    x = torch.randn(2, 16, 24, dtype=torch.float64)
    for layer in network.blocks:
        assert torch.allclose(layer(x), FORMULAS[block](layer, x), rtol=1e-12, atol=1e-12)


def test_no_norm_is_the_stream_as_it_is():
    network = model("pre-norm", norm="none")
    x = torch.randn(2, 16, 24, dtype=torch.float64)
    block = network.blocks[0]
    y = x + block.attention(x, None, None, 0)
    assert torch.equal(block(x), y + block.mlp(y)) and not list(network.norm.parameters())


def test_shape_has_the_gradients_of_the_matrix():
    B, H, T, E = 2, 3, 40, 8
    config = ModelConfig(width=H * E, heads=H, context=T)
    q, k, v = (torch.randn(B, H, T, E, dtype=torch.float64, requires_grad=True) for _ in range(3))
    shape = Shape(config).double()
    shape.weight.data.normal_()
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    A = (q @ k.mT / math.sqrt(E)).masked_fill(~seen, -torch.inf).softmax(-1)
    alpha, beta, gamma = shape.weight[:, :, None, None]
    dense = (alpha * torch.eye(T) + beta * A - gamma * seen / torch.arange(1, T + 1)[:, None]) @ v
    ours, g = shape(v, plain(q, k, v)), torch.randn(B, H, T, E, dtype=torch.float64)
    for gradient, expected in zip(torch.autograd.grad(ours, (q, k, v, shape.weight), g),
                                  torch.autograd.grad(dense, (q, k, v, shape.weight), g)):
        assert torch.allclose(gradient, expected, rtol=1e-11, atol=1e-12)


def test_the_mean_of_many_16_bit_numbers_is_summed_in_float32():
    v = 100 + torch.randn(1, 4096, 4)
    exact = v.bfloat16().double().cumsum(1) / torch.arange(1, 4097)[:, None]
    # one rounding
    assert ((running_mean(v.bfloat16()).double() - exact).abs() / exact).max() <= 2**-8


@pytest.mark.parametrize("block", OWN)
def test_token_by_token_is_the_whole_text(block):
    position = "rope" if OWN.index(block) % 2 else "learned"
    network = model(block, position=position, qk_norm=True).eval()
    tokens = torch.randint(13, (2, 16))
    whole = network(tokens)
    cache = new_cache(network.config, 2, dtype=torch.float64, device="cpu")
    logits = [network(tokens[:, :5], cache),
              *(network(tokens[:, i:i + 1], cache) for i in range(5, 16))]
    assert torch.allclose(torch.cat(logits, 1), whole, rtol=1e-9, atol=1e-9)


# ---- what each costs

@pytest.mark.parametrize("block, norm", [*((block, "layernorm") for block in OWN),
                                         ("pre-norm", "none"), ("sas", "none")])
def test_parameters_and_flops_are_pytorchs(block, norm):
    config = SMALL.replace({"model.block": block, "model.norm": norm, "model.qk_norm": True,
                            "precision.recipe": "fp32"})
    training = Training.build(config, data=RandomTokens(config))
    there = {name: tuple(p.shape) for name, p in training.model.named_parameters()}
    assert parameter_count(config.model) == sum(map(math.prod, there.values()))
    inside = {name: shape for name, shape in shapes(config.model).items()
              if name.startswith("blocks.")}
    assert inside == {name: shape for name, shape in there.items() if name.startswith("blocks.")}
    with FlopCounterMode(display=False) as counted:
        training.update(0)
    assert training_flops(config.model, batch=4) == counted.get_total_flops()


def drawn(block, draw):
    heads, width = draw.choice([2, 4, 8]), draw.choice([16, 32])
    return SMALL.replace({
        "model.block": block, "model.layers": draw.choice([2, 3, 5, 8]), "model.heads": heads,
        "model.width": heads * width,
        "model.context": draw.choice([64, 128, 256]),
        "model.norm": draw.choice(["layernorm", "rmsnorm", "none"]),
        "model.position": draw.choice(["learned", "rope"]),
        "model.mlp": draw.choice(["gelu", "swiglu"]), "model.bias": draw.choice([True, False]),
        "model.qk_norm": draw.choice([False, True]), "model.tied": draw.choice([True, False]),
        "global_batch": draw.choice([1, 4, 8]),
        "precision.recipe": draw.choice(["fp32", "bf16", "bf16", "fp8-tensorwise"]),
        "memory.recompute": draw.choice(["none", "none", "block"]),
        "system.attention": draw.choice(["sdpa", "sdpa", "tiled", "blocked", "plain"])})


@pytest.mark.slow
@pytest.mark.parametrize("block", OWN)
def test_memory_is_that_of_the_trace_on_drawn_configs(block):
    """4% at the worst, which is what pre-norm's own recomputation costs; half of them within
    0.5%."""
    from lpkit.hardware import room

    draw, off = random.Random(block), []
    for _ in range(8):
        config = drawn(block, draw)
        off.append(abs(memory(config, room("cpu")).peak_bytes
                       / lpkit.predict_trace(config).peak_bytes - 1))
    assert max(off) < 0.04 and sorted(off)[4] < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sdpa", "tiled", "blocked"])
def test_shaped_attention_takes_linear_memory(backend):
    """Twice the tokens take twice the memory, up to 4,096 of them: no (T, T) matrix is made."""
    def held(T):
        config = SMALL.replace({"model.block": "sas-p", "model.layers": 1, "model.vocab": 16,
                                "model.context": T, "global_batch": 1,
                                "system.attention": backend})
        traced = lpkit.predict_trace(config)
        rows = dict(traced.rows)
        return rows["activations"] + rows.get("temporaries", 0)

    short, long = held(2048), held(4096)
    assert 1.9 < long / short < 2.1 and long < 4096 * 4096 * 2


# ---- what each begins as

def begun(block, init, layers=4, **settings):
    torch.manual_seed(1)
    config = ModelConfig(**{"layers": layers, "width": 64, "heads": 4, "vocab": 50, "context": 24,
                            "block": block, "init": init} | settings)
    network = Transformer(config, plain).double()
    initialise(network, config.init)
    return network


def test_gains_begin_as_their_row_says_and_rezero_has_one_a_layer():
    for block, start in {"rezero": 0.0, "skipinit": 0.0, "layerscale": 1e-4}.items():
        layer = begun(block, "gpt2").blocks[0]
        assert (layer.gain1.weight.unique().tolist() == pytest.approx([start])
                and (layer.gain1 is layer.gain2) == (block == "rezero"))
    x = torch.randn(1, 24, 64, dtype=torch.float64)
    assert torch.equal(begun("skipinit", "gpt2").blocks[0](x), x)


@pytest.mark.parametrize("block, init",
                         [("sas", "gpt2"), ("sas-p", "fan-in"), ("skipless", "shaped"),
                          ("sas", "value-skipinit")])
def test_shaped_attention_begins_as_the_identity(block, init):
    layer = begun(block, init).blocks[0].attention
    h = torch.randn(2, 24, 64, dtype=torch.float64)
    assert torch.allclose(layer(h, None, None, 0), h, atol=1e-12)


def test_value_skipinit_turns_and_keeps_lengths():
    attention = begun("skipless", "value-skipinit").blocks[0].attention
    h = torch.randn(2, 24, 64, dtype=torch.float64)
    out = attention(h, None, None, 0)
    assert (torch.allclose(out.norm(dim=-1), h.norm(dim=-1), rtol=1e-5)
            and not torch.allclose(out, h))
    assert attention.qkv.weight.unflatten(0, (4, 3, 16))[:, 0].std() > 0        # queries are not 0
    seams.refuse_overwritten(SMALL.replace({"model.block": "sas", "model.init": "value-skipinit"}))


def test_a_block_from_outside_may_be_shared_by_layers(monkeypatch):
    monkeypatch.setitem(BLOCKS, "own", replace(BLOCKS["pre-norm"],
        implementation="lessons.l22_blocks:Unshaped"))
    seams.refuse_overwritten(SMALL.replace({"model.block": "own",
        "model.changes": "shared-layers"}))


def test_fixup_ends_branches_with_zeros_and_scales_the_rest():
    plainly, fixed = begun("pre-norm", "fan-in", norm="none"), begun("pre-norm", "fixup",
        norm="none")
    x = torch.randn(1, 24, 64, dtype=torch.float64)
    assert torch.equal(fixed.blocks[0](x), x)
    # 8 branches
    assert torch.allclose(fixed.blocks[1].mlp.up.weight * 8**0.5, plainly.blocks[1].mlp.up.weight)
    ours, theirs = (network.blocks[1].attention.qkv.weight.unflatten(0, (4, 3, 16))
                    for network in (fixed, plainly))
    assert (torch.equal(ours[:, :2], theirs[:, :2])
            and torch.allclose(ours[:, 2] * 8**0.5, theirs[:, 2]))
    gated = [begun("pre-norm", init, norm="none", mlp="swiglu").blocks[0].mlp.gate_up.weight
             for init in ("fixup", "fan-in")]
    assert torch.allclose(gated[0] * 8**0.25, gated[1])     # gate and up multiply each other


def test_t_fixup_has_the_published_deviations():
    network, L = begun("pre-norm", "t-fixup", layers=6, norm="none"), 6
    scale, block = 0.67 * L**-0.25, network.blocks[2]
    v = block.attention.qkv.weight.unflatten(0, (4, 3, 16))
    expected = {"v": (v[:, 2], scale / 8), "q": (v[:, 0], 1 / 8),
                "out": (block.attention.out.weight, scale / 8),
                "up": (block.mlp.up.weight, scale * math.sqrt(2 / 320)),
                "embed": (network.embed.weight, (9 * L) ** -0.25 / 8)}
    for name, (weight, std) in expected.items():
        assert weight.std().item() == pytest.approx(std, rel=0.06), name


def test_an_init_from_outside_begins_shaped():
    from lpkit.techniques.row import TechniqueRow

    INITS["own"] = TechniqueRow(implementation="lpkit.nn.init:fan_in")
    try:
        h = torch.randn(1, 24, 64, dtype=torch.float64)
        assert torch.allclose(begun("sas", "own").blocks[0].attention(h, None, None, 0), h,
                              atol=1e-12)
    finally:
        del INITS["own"]


# ---- layers that share

@pytest.mark.parametrize("groups, parts", [(1, "all"), (2, "attention"), (2, "mlp")])
def test_shared_layers_have_the_gradients_of_all_that_read_them(groups, parts):
    """Of one model and of one whose layers are equal copies: parameters once, gradients added
    up."""
    shared = {"model.layers": 4,
              "model.changes": [{"name": "shared-layers", "groups": groups, "parts": parts}],
              "precision.recipe": "fp32"}
    config = SMALL.replace(shared)
    training = Training.build(config, data=RandomTokens(config))
    tied, batch = training.model.double(), RandomTokens(config).batch(0)
    there = {name: p for name, p in tied.named_parameters() if name.startswith("blocks.")}
    assert {name: tuple(p.shape) for name, p in there.items()} == {
        name: shape for name, shape in shapes(config.model).items() if name.startswith("blocks.")}
    assert parameter_count(config.model) == sum(p.numel() for p in tied.parameters())
    copies = Transformer(SMALL.replace({"model.layers": 4}).model, plain).double()
    copies.load_state_dict(tied.state_dict())
    for network in (tied, copies):
        F.cross_entropy(network(batch.tokens).flatten(0, 1), batch.targets.flatten()).backward()
    for name, p in there.items():
        number, rest = name.removeprefix("blocks.").split(".", 1)
        alike = (range(int(number), 4, groups) if parts == "all" or rest.startswith(parts)
                 else [int(number)])
        assert torch.allclose(p.grad, sum(copies.blocks[i].get_parameter(rest).grad for i in alike),
                              rtol=1e-9, atol=1e-12), name
    with FlopCounterMode(display=False) as counted:
        Training.build(config, data=RandomTokens(config)).update(0)
    assert training_flops(config.model, batch=4) == counted.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("parts, recipe", [("all", "fp32"), ("all", "fp8-tensorwise"),
                                           ("attention", "bf16"), ("mlp", "fp8-tensorwise")])
def test_memory_of_shared_layers(parts, recipe):
    from lpkit.hardware import room

    config = SMALL.replace({"model.layers": 6, "model.width": 64, "model.context": 64,
                            "precision.recipe": recipe, "system.attention": "sdpa",
                            "model.changes": [{"name": "shared-layers", "groups": 2,
                                               "parts": parts}]})
    assert (memory(config, room("cpu")).peak_bytes
            == pytest.approx(lpkit.predict_trace(config).peak_bytes, rel=0.02))


def test_shared_layers_resume_and_sample(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    config = SMALL.replace({"model.changes": "shared-layers", "data.source": str(corpus / "*.py")})
    whole = lpkit.train(config, out=tmp_path / "whole")
    parts = in_parts(config, tmp_path / "stopped", 3)
    assert [line["loss"] for line in whole.metrics] == [line["loss"] for line in parts.metrics]
    assert lpkit.sample(Run(tmp_path / "whole"), tokens=5, seed=1).startswith("\n")


def test_sharing_by_all_or_by_ranks_is_refused():
    with pytest.raises(ConfigError,
                       match=r"shared-layers has groups=3 of model\.layers=3, so that no layer "
                             r"shares; set groups to 2 or fewer"):
        SMALL.replace({"model.changes": [{"name": "shared-layers", "groups": 3}]})
    config = SMALL.replace({"model.changes": "shared-layers", "parallel.data": 2})
    with pytest.raises(ConfigError,
                       match="shared-layers has parameters that several layers read, and no ranks "
                             "so far; train it on one device"):
        Training.build(config, data=RandomTokens(config))


# ---- what becomes of each

@pytest.mark.parametrize("block", [name for name in OWN if name != "pre-norm"])
def test_it_trains_resumes_and_samples(block, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    config = SMALL.replace({"model.block": block, "data.source": str(corpus / "*.py"),
                            "system.attention": "auto", "optimizer.lr": 3e-3})
    whole = lpkit.train(config, out=tmp_path / "whole")
    parts = in_parts(config, tmp_path / "parts", 3)
    losses = [line["loss"] for line in whole.metrics]
    assert losses == [line["loss"] for line in parts.metrics] and losses[-1] < losses[0]
    assert lpkit.sample(Run(tmp_path / "whole"), tokens=5, seed=1).startswith("\n")
    if block not in ("rezero", "skipinit", "sas-p"):        # whose Linears the others have, too
        cast = lpkit.train(config.replace({"precision.recipe": "fp8-tensorwise"}),
                           out=tmp_path / "cast")
        assert cast.summary["val_loss"] == pytest.approx(whole.summary["val_loss"], rel=0.02)


@pytest.mark.parametrize("settings, why", [
    ({"model.kv_heads": 2}, "model.block=sas-p has a value for each head; set model.kv_heads=4"),
    ({"model.head_dim": 16}, "model.block=sas-p uses its input as values, so heads times "
                             "head_dim must be model.width=32, got 4 times 16; leave "
                             "model.head_dim out"),
    ({"model.attention": "window"}, "model.block=sas-p subtracts the mean over the whole past "
                                    "from each token; set model.attention=full"),
    ({"model.changes": "prefix", "model.position": "rope"}, "does not support "
                                                            "model.changes=prefix; leave it out")])
def test_what_it_cannot_be_of_is_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        SMALL.replace({"model.block": "sas-p", **settings})


@pytest.mark.parametrize("layout", [{"parallel.tensor": 2}, {"parallel.context": 2}])
@pytest.mark.parametrize("block", [name for name in OWN if getattr(BLOCKS[name], "uncut", "")])
def test_what_no_rank_can_have_a_part_of_is_refused(block, layout):
    with pytest.raises(ConfigError,
                       match=f"model.block={block} .*; set .*parallel.tensor=1 parallel.context=1"):
        layouts.refuse_untrainable(SMALL.replace({"model.block": block, "model.bias": False,
            **layout}))


def test_a_silent_signal_is_kept_alive_by_its_start():
    """72 blocks without norm: fan-in explodes, Fixup stays as it began; without a skip tokens
    become one, shaped ones do not."""
    tokens = torch.randint(50, (2, 24))

    def cosine(network):
        x = F.normalize(network.hidden(tokens), dim=-1)
        return ((x @ x.mT).mean() - 1 / 24).item()

    def size(network):
        return network.hidden(tokens).std().item()

    assert size(begun("pre-norm", "fan-in", layers=72, norm="none")) > 1e6
    assert size(begun("pre-norm", "fixup", layers=72, norm="none")) < 3
    assert cosine(begun("sas-p", "fan-in", layers=72)) < 0.5
