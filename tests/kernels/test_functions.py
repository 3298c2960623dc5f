"""Functions that people call with tensors of their own: cross-entropy, attention, casts and Linears
by sizes.

Only these tests catch a loss whose options, weights, ignored targets or reductions differ from
PyTorch's in float64 (the kinds of case are those of Liger Kernel's tests,
https://github.com/linkedin/Liger-Kernel, test/transformers/test_cross_entropy.py), log-sums and
queries of `functions.attention` that differ from the definition, a vocabulary cut over ranks that
computes another loss, and a recipe that cannot leave one operand as it is.
"""

import contextlib
import functools
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lpkit import functions
from lpkit.config import ModelConfig
from lpkit.contracts import Batch
from lpkit.errors import ConfigError
from lpkit.kernels.cast import mx
from lpkit.kernels.choose import choose
from lpkit.kernels.cross_entropy import cross_entropy
from lpkit.kernels.kernel import Kernel
from lpkit.memory.loss import chunked_cross_entropy, full_cross_entropy
from lpkit.nn.attention import backend, plain
from lpkit.nn.transformer import Transformer
from lpkit.precision.backends import BACKENDS
from lpkit.techniques import recipes
from lpkit.techniques.attention import Rule
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.hardware import multiplied
from lpkit.techniques.machines import CATALOGUE
from tests.kernels.attention_cases import defined, gradients, named, tensors

BLOCKS = {"block": 4, "blocks": tuple(tuple(a - b in (0, 2) for b in range(6)) for a in range(6))}


def test_a_race_without_a_right_version_says_what_was_refused(tmp_path):
    """On a CPU attention is raced between fused versions alone; a version that is wrong at the size
    of a step is not used either."""
    def wrong(q, k, v, documents=None, sinks=None):
        return plain(q, k, v) * (1 if q.shape[2] < 32 else 1.5)

    def broken(*_):
        raise RuntimeError("no kernel for these\nmore")

    kernel = Kernel(definition=plain, gradients=(0, 1, 2), examples=lambda draw, device: ())
    small, large = (tensors(Rule(), Tq=T, Tk=T, dtype=torch.float32) for T in (19, 64))
    for at_hand, offered, words in (
            (large, {"sdpa": wrong, "blocked": broken}, "sdpa: differs from its definition: .*; "
             "blocked: fails: RuntimeError: no kernel for these$"),
            (small, {"sdpa": wrong, "blocked": wrong}, "sdpa: differs from its definition: result "
             "1 of 4, at the run's size: .*; blocked: differs")):
        with pytest.raises(ConfigError, match=f"no version is right on this machine: {words}"):
            choose("attention", kernel, "auto", [at_hand], offered=offered, raced=[large],
                   cache=tmp_path, within_seconds=0.1)


# ---- recipes

def weights_alone(settings):
    """As quantisation-aware training of weights has it: x and g stay in bf16."""
    w = recipes.Cast(format="e4m3fn", block=(1, 32), scale="power-of-two")
    return recipes.Recipe(compute="bfloat16", dtype="fp8", y=(None, w),
                          high_precision_layers=("head",), pad=settings.pad)


def test_a_recipe_may_leave_one_operand_as_it_is(monkeypatch):
    """Against float64 products of the cast weight; gradients are those of the weight as it is."""
    monkeypatch.setattr(recipes, "RECIPES", dict(recipes.RECIPES))
    recipes.add("toy", weights_alone, recipes.CastSettings(), "this file")
    row = recipes.RECIPES["toy"]
    assert row.tile == 32 and row.cast_of["y", "x"] is None and not row.gathers
    assert (recipes.untiled(row, {"K": 48, "N": 64, "M": 5})
            == "48 input features do not tile by 32 (nearest: 32 or 64)")
    device = torch.device("cpu")
    assert BACKENDS["scaled_mm"].why_not("toy", row,
        device) == "y has one operand in bfloat16, and both must be cast"
    assert multiplied(CATALOGUE["h200"], row)[:2] == ("no", "y has one operand in bfloat16")
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 96)
    module = BACKENDS["emulated"].wrap(linear, row, name="toy", seed=0)
    x = torch.randn(5, 64, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    cast = mx(linear.weight.detach(), FORMATS["e4m3fn"], rule="rceil").values.double()
    want = x.double() @ cast.T + linear.bias.detach().double()
    assert (y.double() - want).norm() <= 2**-8 * want.norm()
    g = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, linear.weight), g)
    for got, exact in ((dx, g.double() @ linear.weight.double()), (dw, g.double().T @ x.double())):
        assert (got.double() - exact).norm() <= 2**-7 * exact.norm()


# ---- targets that do not count

Y = torch.tensor([0, 47, -100, 48, 3, -1, 24, 23])


class Together:
    """Ranks of a tensor group as threads, which wait for each other in every message."""

    def __init__(self, count):
        self.barrier, self.given = threading.Barrier(count), []
        self.layout = SimpleNamespace(tensor=count)
        self.groups, self.waits = {"tensor": None}, contextlib.nullcontext()

    def meet(self, t, combine):
        self.given.append(t.clone())
        self.barrier.wait(20)
        result = combine(torch.stack(self.given))
        self.barrier.wait(20)
        self.given = []
        self.barrier.wait(20)
        return t.copy_(result)

    def largest(self, t, group=None):
        return self.meet(t, lambda every: every.amax(0))


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 0.5, 2, 1, 0, 0, 3, 1])],
                         ids=["plain", "weighted"])
def test_a_vocabulary_cut_over_ranks_has_the_loss_of_a_whole_one(weights, monkeypatch):
    """Nats, the gradient left in place, and autograd's: of targets that count, that are ignored,
    that are none, and of weight 0."""
    from lpkit.parallel import tensor

    whole = 3 * torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
    whole[4, 40] = torch.inf        # of weight 0
    ranks, results = Together(2), [None, None]
    monkeypatch.setattr(tensor.dist, "all_reduce",
                        lambda t, group=None: ranks.meet(t, lambda every: every.sum(0)))

    def loss_of_rank(i):
        part = whole[:, 24 * i:24 * i + 24].clone()
        cut = tensor.Vocabulary(first=24 * i, ranks=ranks)
        leaf = part.clone().requires_grad_()
        nats = cut.nats(leaf, Y)
        in_place = cut.cross_entropy_(part, Y, weights)
        g = torch.ones(8) if weights is None else weights
        results[i] = in_place, part, nats.detach(), torch.autograd.grad(nats, leaf, g)[0]

    threads = [threading.Thread(target=loss_of_rank, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    nats, gradient = cross_entropy(whole, Y, weights)
    assert nats[2] == 0 and nats[3].isnan() and nats[5].isnan() and not gradient[2].any()
    for i in (0, 1):
        for k in (0, 2):
            torch.testing.assert_close(results[i][k], nats, equal_nan=True)
    for k in (1, 3):
        torch.testing.assert_close(torch.cat([results[0][k], results[1][k]], 1), gradient,
                                   equal_nan=True)


@pytest.mark.parametrize("by, weighted", [
    (full_cross_entropy, False), (functools.partial(chunked_cross_entropy, chunk=5), True)],
    ids=["full", "chunked, weighted"])
def test_the_losses_of_a_run_ignore_what_pytorch_ignores(by, weighted):
    """Collators of transformers write -100. Where nothing counts the loss is 0, and its gradient;
    PyTorch's mean is NaN there."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(layers=1, width=16, heads=2, context=8, vocab=20),
                        backend("plain", ModelConfig(context=8)))
    tokens, targets = torch.randint(20, (2, 3, 8))
    targets[:, :3], targets[2] = -100, -100
    weights = torch.rand(3, 8) if weighted else None
    for y, w in ((targets, weights), (torch.full_like(targets, -100), weights),
                 (targets.clamp(min=0), torch.zeros(3, 8))):
        # as a run reads it
        loss = by(model, Batch(tokens, y, weights=w).to(torch.device("cpu")),
                  autocast=contextlib.nullcontext())
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        logits = model(tokens).flatten(0, 1).double()
        counts = (y.flatten() != -100).double() * (1 if w is None else w.flatten().double())
        if not counts.any():
            assert loss.item() == 0 and not any(g is not None and g.any() for g in grads)
            continue
        want = ((F.cross_entropy(logits, y.flatten(), reduction="none") * counts).sum()
                / counts.sum())
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        for got, true in zip(grads, torch.autograd.grad(want, list(model.parameters()),
                allow_unused=True), strict=True):
            torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-6)
        if w is None:
            assert loss.item() == pytest.approx(F.cross_entropy(logits, y.flatten()).item(),
                rel=1e-6)


# ---- losses

def wanted(logits, targets, weights=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
           soft_cap=None, reduction="mean"):
    """By PyTorch in float64. PyTorch's smoothed mean divides by the number of targets that count,
    as ours does."""
    z = logits.double()
    z = z if soft_cap is None else soft_cap * torch.tanh(z / soft_cap)
    nats = F.cross_entropy(z, targets, ignore_index=ignore_index, label_smoothing=label_smoothing,
                           reduction="none")
    counts = (targets != ignore_index).double() * (1 if weights is None else weights.double())
    nats = (nats + z_loss * z.logsumexp(-1).square()) * counts
    return (nats if reduction == "none" else nats.sum() if reduction == "sum"
            else nats.sum() / counts.sum())


OPTIONS = [{}, {"ignore_index": 3}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"soft_cap": 5.0},
           {"ignore_index": 0, "label_smoothing": 0.2, "z_loss": 1e-3, "soft_cap": 20.0}]
OFF = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}
CASES = [(options, dtype, ("mean", "sum", "none")[(i + j) % 3], (i + j) % 2 == 0)
         for i, options in enumerate(OPTIONS) for j, dtype in enumerate(OFF)]


@pytest.mark.parametrize("options, dtype, reduction, weighted", CASES, ids=str)
def test_losses_are_pytorchs(options, dtype, reduction, weighted):
    """Values and gradients of logits, hidden states, weight and bias; sizes are odd, pieces do not
    divide them, views are not contiguous."""
    rng = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
               for shape in ((13, 2, 9), (7, 9, 2), (7,)))
    h, w = h.transpose(0, 1), w[:, :, 0]
    targets, weights = torch.randint(7, (13, 2), generator=rng).T, None
    targets = targets.masked_fill(torch.rand(2, 13, generator=rng) < 0.2,
                                  options.get("ignore_index", -100))
    if weighted:
        weights = torch.randint(1, 9, (2, 13), generator=rng) / 8       # sums are exact
        weights[1, 4] = 0
    leaves = [t.detach().requires_grad_() for t in (h, w, b)]
    logits = (2 * h @ w.mT).detach().requires_grad_()
    for got, exact, inputs in (
            (functions.cross_entropy(logits, targets, weights, reduction=reduction, **options),
             lambda z: z.flatten(0, 1), [logits]),
            (functions.linear_cross_entropy(leaves[0], leaves[1], targets, leaves[2], weights,
                                            chunk_tokens=8, reduction=reduction, **options),
             lambda h, w, b: F.linear(h.flatten(0, 1), w, b), leaves)):
        doubles = [t.detach().double().requires_grad_() for t in inputs]
        want = wanted(exact(*doubles), targets.flatten(),
                      None if weights is None else weights.flatten(), reduction=reduction,
                      **options)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert got.shape == (targets.shape if reduction == "none" else ())
        assert (got.double().flatten() - want).norm() <= OFF[dtype] * want.norm()
        upstream = torch.linspace(0.5, 2, got.numel(), dtype=torch.float64).view(got.shape)
        for ours, theirs in zip(torch.autograd.grad(got, inputs, upstream.to(got.dtype)),
                                torch.autograd.grad(want, doubles, upstream.view(want.shape)),
                                strict=True):
            assert ours.dtype == dtype
            assert (ours.double() - theirs).norm() <= 2 * OFF[dtype] * theirs.norm()


def test_a_loss_leaves_its_logits_alone_and_counts_what_counts():
    logits = torch.randn(4, 5, requires_grad=True)
    before = logits.detach().clone()
    y = torch.tensor([1, -100, 2, -100])
    functions.cross_entropy(logits, y).backward()
    assert torch.equal(logits.detach(), before)
    bad = before.clone()
    bad[1], bad[3, 0] = torch.nan, torch.inf
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
        for targets, weights in ((y, None), (y.clamp(min=0), torch.tensor([1.0, 0, 1, 0]))):
            z = bad.clone().requires_grad_()
            functions.cross_entropy(z, targets, weights, **options).backward()
            assert z.grad.isfinite().all() and not z.grad[1::2].any() and z.grad[::2].any()
        nothing = torch.full((4,), -100)
        assert functions.cross_entropy(before, nothing, **options) == 0
    assert functions.cross_entropy(before[:0], y[:0]) == 0
    assert functions.cross_entropy(before[:0], y[:0], reduction="none").shape == (0,)


@pytest.mark.parametrize("targets, options, words", [
    ([0, 5, 1, 1], {}, "from 0 to 4, or -100 to be ignored; got 5"),
    ([0, 1, 1], {}, "must be .4,., one a token"),
    ([1, -100, 2, 3], {"ignore_index": 0}, "got -100"),
    ([0] * 4, {"reduction": "avg"}, "no reduction 'avg'"), ([0] * 4, {"chunk_tokens": 0}, "=0"),
    ([0] * 4, {"label_smoothing": 1.5}, "=1.5"), ([0] * 4, {"soft_cap": 0.0}, "=0.0")])
def test_what_a_loss_does_not_take_is_refused(targets, options, words):
    with pytest.raises(ConfigError, match=words):
        functions.cross_entropy(torch.zeros(4, 5), torch.tensor(targets), **options)


# ---- attention of other lengths

@pytest.mark.parametrize("Tq, Tk", [(1, 19), (7, 19), (19, 7)])
@pytest.mark.parametrize("rule", [
    Rule(), Rule(causal=False, sinks=True, soft_cap=1.5), Rule(window=5, sinks=True),
    Rule(window=5, global_tokens=2), Rule(**BLOCKS, soft_cap=1.5)], ids=named)
def test_queries_are_the_last_places_and_sums_have_gradients(rule, Tq, Tk):
    q, k, v, _, sinks = arguments = tensors(rule, Tq=Tq, Tk=Tk)
    want, total = defined(*arguments, rule=replace(rule, query_start=(Tk - Tq) * rule.causal))
    seen = total.isfinite()

    def with_gradients(out, sums):
        both = torch.cat((out, sums.masked_fill(~seen, 0)[..., None]), -1)
        return out, sums, *gradients(both, arguments)

    exact = with_gradients(want, total)
    for name in ("plain", "tiled"):
        got = functions.attention(q, k, v, rule=rule, sinks=sinks, return_lse=True, backend=name)
        for ours, true in zip(with_gradients(*got), exact, strict=True):
            torch.testing.assert_close(ours, true.nan_to_num(0, neginf=-torch.inf), rtol=1e-9,
                                       atol=1e-9)


def test_attention_of_documents_and_what_is_refused():
    rule = Rule(documents=True)
    q, k, v, documents, _ = arguments = tensors(rule, Tq=5)
    for name in ("plain", "tiled", "auto"):
        got = functions.attention(q, k, v, rule=rule, documents=documents, backend=name)
        torch.testing.assert_close(got, defined(*arguments, rule=replace(rule, query_start=14))[0],
                                   rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(functions.attention(q, k, v), F.scaled_dot_product_attention(
        q, k, v, torch.ones(5, 19, dtype=torch.bool).tril(14), enable_gqa=True))
    for call, words in ((lambda: functions.attention(q, k, v, rule=rule), "the id of each key's"),
                        (lambda: functions.attention(q, k, v, backend="sdpa"),
                         "sdpa gives no gradient of its log-sums"),
                        (lambda: functions.attention(q, q, q, backend="sdp"),
                         "no attention backend 'sdp'")):
        with pytest.raises(ConfigError, match=words):
            call()


# ---- casts and Linears by sizes

def test_a_cast_and_a_linear_by_sizes():
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks = functions.cast(x, "e4m3fn", block=(1, 32), scale="power-of-two")
    assert torch.equal(blocks.dequantise(),
                       mx(x, FORMATS["e4m3fn"], rule="rceil", dtype=torch.float32).values)
    for call, words in ((lambda: functions.cast(x, "e4m3"),
                         "no number format 'e4m3'; did you mean 'e4m3fn'"),
                        (lambda: functions.cast(x, "e4m3fn", scale="mx"), "no scale 'mx'"),
                        (lambda: functions.cast(x, "e4m3fn", block=(1, 48)),
                         "blocks of 48 do not tile the last axis of 64"),
                        (lambda: functions.scaled_linear(48, 64, recipe="mxfp8"),
                         "48 input features do not tile by 32"),
                        (lambda: functions.scaled_linear(64, 64, recipe="mxfp9"),
                         "no precision.recipe 'mxfp9'; did you mean 'mxfp8'")):
        with pytest.raises(ConfigError, match=words):
            call()
    for recipe, tolerance in (("mxfp8", 0.06), ("fp8-rowwise", 0.06), ("int8", 0.03),
                              ("bf16", 1e-6)):
        torch.manual_seed(0)
        linear = functions.scaled_linear(64, 128, recipe=recipe)
        assert (linear.in_features, linear.out_features) == (64, 128)
        assert linear.weight.dtype == torch.float32
        x = torch.randn(3, 32, 64, requires_grad=True)
        y = linear(x)
        assert (y - F.linear(x, linear.weight, linear.bias)).norm() <= tolerance * y.norm()
        y.square().sum().backward()
        assert x.grad.norm() > 0 and linear.weight.grad.norm() > 0 and linear.bias.grad.norm() > 0


def test_functions_load_on_first_use():
    """`import lpkit` brings no torch; the name is there."""
    code = ("import sys, lpkit; assert 'torch' not in sys.modules; "
            "print(lpkit.functions.attention.__name__)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=True).stdout == "attention\n"


def test_the_examples_of_the_page_run():
    page = (Path(__file__).parents[2] / "docs" / "functions.md").read_text()
    lines = [line[4:] for line in page.splitlines() if line.startswith("    ")]
    names = {}
    exec("\n".join(lines), names)
    assert len(lines) > 10 and names["logits"].grad.any() and names["y"].shape == (128, 512)
    assert names["lse"].shape == (1, 4, 5)
