"""Tiled attention against its definition in float64, forward and backward; what it keeps and how it
is priced are in tests/predict/test_predict.py and tests/lessons/test_terms.py."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lessons.rows.sparse_attention import BlockSparse
from lpkit import measure
from lpkit.config import ModelConfig
from lpkit.errors import ConfigError
from lpkit.kernels.tiled_attention import tiled
from lpkit.nn.attention import backend, partial_of
from lpkit.predict import memory
from lpkit.predict.flops import products
from lpkit.presets import preset
from lpkit.techniques.attention import Rule, Window
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.operation import MicroBatch
from tests.predict.test_predict import CPU

RULES = {
    "full": Rule(),
    "window": Rule(window=40),
    "window, global": Rule(window=7, global_tokens=3),
    "block-sparse": BlockSparse(block=16, local=2, stride=3).rule(300),
    # queries of every other block see nothing at all
    "blocks that see nothing": BlockSparse(block=16,
        table=tuple(["1" * 19, "0" * 19] * 10)[:19]).rule(300),
    "documents": Rule(documents=True),
    "soft cap": Rule(soft_cap=1.5),
    "sinks": Rule(sinks=True),
    "keys to come": Rule(causal=False),
    "documents both ways": Rule(causal=False, documents=True),
    "all": Rule(window=50, global_tokens=2, documents=True, soft_cap=2.0, sinks=True),
}
# Of the largest number. A result is a sum in float32 of weights that add up to 1, and is rounded
# once; in 16 bits that rounding is
# half of a last place, 2^-9 of bf16 and 2^-12 of fp16. Gradients have the rounding of the answer in
# them besides: backward
# subtracts sum(do o), over E numbers that are each off by as much.
TOLERANCE = {torch.float64: (1e-13, 1e-12), torch.float32: (1e-6, 4e-6),
             torch.bfloat16: (2**-8, 2**-7),
             torch.float16: (2**-11, 2**-10)}


def definition(q, k, v, documents, sinks, rule):
    """In the inputs' dtype, which is float64: scores of every pair. A query that sees nothing gets
    zeros."""
    H, T, E = q.shape[1:]
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(E)
    if rule.soft_cap:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    places = torch.arange(T)
    seen = rule.sees(places[:, None], places[None])
    if rule.documents:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    weights = torch.where(seen, scores.exp(), 0.0)      # scores are small here
    total = weights.sum(-1, keepdim=True)
    if rule.sinks:
        total = total + sinks.exp()[:, None, None]
    return weights / total.masked_fill(total == 0, 1) @ v


def drawn(rule, T, dtype, kv_heads=2, B=2, H=4, E=16):
    rng = torch.Generator().manual_seed(T)
    q, k, v, d_out = (torch.randn(B, heads, T, E, generator=rng).to(dtype)
                      for heads in (H, kv_heads, kv_heads, H))
    documents = (torch.randint(0, 2, (B, T), generator=rng).cumsum(1) // 20 if rule.documents
                 else None)
    sinks = (torch.randn(H, generator=rng).to(torch.promote_types(dtype, torch.float32))
             if rule.sinks else None)
    return [q, k, v, documents, sinks], d_out


def both(attend, inputs, d_out, rule):
    """The answer and its gradients."""
    leaves = [t.requires_grad_() for t in inputs if t is not None and t.is_floating_point()]
    out = attend(*inputs, rule=rule)
    return out, *torch.autograd.grad(out, leaves, d_out)


@pytest.mark.parametrize("T", [1, 5, 123, 300])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_tiled_is_the_definition_in_float64(name, dtype, T):
    rule = RULES[name]
    inputs, d_out = drawn(rule, T, dtype)
    wide = [t if t is None or not t.is_floating_point() else t.detach().double() for t in inputs]
    ours, want = both(tiled, inputs, d_out, rule), both(definition, wide, d_out.double(), rule)
    for i, (got, exact) in enumerate(zip(ours, want, strict=True)):
        off, size = (got.double() - exact).abs().max().item(), exact.abs().max().item()
        assert off <= TOLERANCE[dtype][i > 0] * max(size, 1), (i, off, size)
        # of sinks as they are
        assert got.dtype == ([dtype] * 4 + [torch.promote_types(dtype, torch.float32)])[i]


def ring(part, q, k, v, rule):
    """Causal attention as two ranks compute it, of which each has half of the keys: the second half
    of the queries meets both."""
    (early, late), keys, values = (t.chunk(2, dim=2) for t in (q, k, v))
    parts = [part(late, keys[0], values[0], rule=replace(rule, causal=False)),
             part(late, keys[1], values[1], rule=rule)]
    outs, sums = zip(*parts)
    shares = torch.stack(sums).softmax(0)
    merged = sum(share[..., None].type_as(out) * out for share, out in zip(shares, outs))
    return torch.cat((part(early, keys[0], values[0], rule=rule)[0], merged), dim=2)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name, row in ATTENTION.items() if row.partial])
def test_parts_of_the_keys_are_merged_by_their_log_sums(name, dtype, cap):
    """Answer and gradients, which go through the log-sums too, are those of all keys in float64."""
    rule = Rule(soft_cap=cap)
    inputs, d_out = drawn(rule, 310, dtype)
    wide = [t if t is None else t.detach().double() for t in inputs]
    got = both(lambda q, k, v, documents, sinks, rule: ring(partial_of(name), q, k, v, rule),
               inputs, d_out, rule)
    for i, (ours, exact) in enumerate(zip(got, both(definition, wide, d_out.double(), rule),
            strict=True)):
        assert ((ours.double() - exact).abs().max() <= TOLERANCE[dtype][i > 0]
                * max(exact.abs().max().item(), 1)), i


def test_who_has_no_gradient_of_log_sums_is_refused():
    with pytest.raises(ConfigError,
                       match=r"system\.attention=sdpa gives no gradient of its log-sums, .*; "
                             r"choose one of plain, tiled"):
        partial_of("sdpa")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_of_a_group_share_keys(kv_heads):
    inputs, d_out = drawn(Rule(), 150, torch.float64, kv_heads)
    for got, exact in zip(both(tiled, inputs, d_out, Rule()),
                          both(definition, inputs, d_out, Rule()), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)


def test_large_scores_neither_overflow_nor_vanish():
    """exp(1000) is beyond every format; the second tile has the larger scores, so that the first
    one shrinks to nothing."""
    q = torch.full((1, 1, 200, 4), 40.0)
    k = torch.cat((torch.full((1, 1, 150, 4), -30.0), torch.full((1, 1, 50, 4), 30.0)), dim=2)
    v = torch.randn(1, 1, 200, 4)
    out = tiled(q, k, v)
    torch.testing.assert_close(out[:, :, :150],
                               v[:, :, :150].cumsum(2) / torch.arange(1, 151)[:, None], rtol=0,
                               atol=1e-5)
    torch.testing.assert_close(out[:, :, 150:],
                               v[:, :, 150:].cumsum(2) / torch.arange(1, 51)[:, None], rtol=0,
                               atol=1e-5)


def test_no_tokens_and_no_tile_that_nobody_sees():
    assert tiled(*torch.zeros(3, 2, 4, 0, 8)).shape == (2, 4, 0, 8)
    q = torch.randn(3, 1, 1, 1000, 8)
    with FlopCounterMode(display=False) as full:
        tiled(*q)
    with FlopCounterMode(display=False) as window:
        tiled(*q, rule=Rule(window=100))
    assert window.get_total_flops() < 0.4 * full.get_total_flops()


@pytest.mark.parametrize("kind", [{}, {"attention": Window(name="window", size=100)},
                                  {"attention": BlockSparse(name="block-sparse", block=32)}],
    ids=["full", "window", "block-sparse"])
@pytest.mark.parametrize("T", [96, 128, 300])
def test_flops_are_those_of_the_tiles_that_are_visited(T, kind):
    """By PyTorch's counter: two products over these pairs forward, five backward."""
    model = replace(ModelConfig(layers=1, width=32, heads=4, vocab=50, context=T), **kind)
    op = ATTENTION["tiled"].formula(MicroBatch(model=model, batch=2))
    square = sum(one.flops for one in products(model, batch=2) if one.pairs)
    q = torch.randn(3, 2, 4, T, 8, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = backend("tiled", model)(*q)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == pytest.approx(square * op.pairs_share)
    assert backward.get_total_flops() == pytest.approx(square * op.pairs_share * op.backward_pairs)


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("context", [160, 256, 1024])
def test_the_peak_of_a_step_that_ends_in_tiles(context, recipe):
    """Its last block is the peak here. What a tile works on is counted in whole tiles, which is up
    to 4% off in a model this small."""
    config = preset("cpu-3m").replace({
        "model.layers": 2, "model.width": 64, "model.vocab": 64, "model.mlp_width": 64,
        "model.context": context, "global_batch": 2,
        "grad_accum_steps": 1, "precision.recipe": recipe, "system.attention": "tiled"})
    said = memory(config, CPU, attention="tiled")
    assert said.peak_bytes == pytest.approx(measure.memory(config, device="cpu").peak_bytes,
        rel=0.04)
