"""Functions that people call with tensors of their own: cross-entropy, attention by every backend,
casts and Linears by sizes.

Against definitions of their own in float64, PyTorch's functions and, for the kinds of case, Liger
Kernel's tests (https://github.com/linkedin/Liger-Kernel, test/transformers/test_cross_entropy.py
and test_fused_linear_cross_entropy.py).
"""

import contextlib
import functools
import itertools
import math
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import lessons.rows.masked  # noqa: F401  adds rows
from lpkit import functions
from lpkit.config import Config, ModelConfig
from lpkit.contracts import Batch
from lpkit.errors import ConfigError
from lpkit.kernels.cast import mx
from lpkit.kernels.choose import choose
from lpkit.kernels.cross_entropy import cross_entropy
from lpkit.kernels.jit import INTERPRETED, tl
from lpkit.kernels.kernel import Kernel
from lpkit.memory.loss import chunked_cross_entropy, full_cross_entropy
from lpkit.nn.attention import backend
from lpkit.nn.transformer import Transformer
from lpkit.precision.backends import BACKENDS
from lpkit.techniques import recipes
from lpkit.techniques.attention import EVERY_KEY, Rule
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.hardware import multiplied
from lpkit.techniques.machines import CATALOGUE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

# ---- attention: a rule is computed, or refused by the field

BLOCKS = {"block": 4, "blocks": tuple(tuple(a - b in (0, 2) for b in range(6)) for a in range(6))}
# the second block sees none
NOTHING = {"block": 8, "blocks": ((True, False, False), (False, False, False), (True, False, True))}
KINDS = ({}, {"causal": False}, {"window": 5}, {"window": 5, "global_tokens": 2}, BLOCKS)
RULES = [Rule(**kind, documents=documents, soft_cap=cap, sinks=sinks)
         for kind, documents, cap, sinks in itertools.product(KINDS, (False, True), (None, 1.5),
             (False, True))]
RULES += [Rule(**kind, query_start=a, key_start=b) for kind in KINDS
          for a, b in ((3, 0), (3, 3), (0, 2))] + [Rule(**NOTHING)]
FUNCTIONS = {name: row.load() for name, row in ATTENTION.items() if row.implementation
             and name not in (
    "sdpa-cudnn", "flash-attn")}      # those need a GPU to compute anything
LIBRARIES = {name: row.load() for name, row in ATTENTION.items() if row.implementation
             and name not in FUNCTIONS}


def named(rule):
    return "-".join(f"{k}={str(v)[:4]}" for k, v in vars(rule).items() if v != getattr(Rule(), k)
                    and k not in ("bits", "words")) or "full"


def tensors(rule, B=2, H=4, G=2, Tq=19, Tk=19, E=8, dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, T, E, generator=rng,
                           dtype=torch.float64).to(dtype).requires_grad_()
               for heads, T in ((H, Tq), (G, Tk), (G, Tk)))
    documents = (torch.tensor([[0] * 7 + [1] * (Tk - 7), [5] * (Tk - 3) + [6] * 3])
                 if rule.documents else None)
    sinks = (torch.randn(H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
             if rule.sinks else None)
    return q, k, v, documents, sinks


@functools.cache
def pairs(rule, Tq, Tk):
    seen = torch.zeros(Tq, Tk, dtype=torch.bool)
    for n, m in itertools.product(range(Tq), range(Tk)):
        i, j = n + rule.query_start, m + rule.key_start
        one = j <= i or not rule.causal
        one = one and (rule.window is None or i - j < rule.window or j < rule.global_tokens)
        seen[n, m] = one and (rule.blocks is None or i < 0
                              or rule.blocks[i // rule.block][j // rule.block])
    return seen


def defined(q, k, v, documents=None, sinks=None, *, rule):
    """(result, log-sums), pair by pair from the words of `Rule`, in float64."""
    (_, H, Tq, E), Tk = q.shape, k.shape[2]
    seen = pairs(rule, Tq, Tk)
    if documents is not None:
        seen = seen & (documents[:, Tk - Tq:, None] == documents[:, None])[:, None]
    q, k, v = (t.double().repeat_interleave(H // t.shape[1], 1) for t in (q, k, v))
    scores = q @ k.mT / math.sqrt(E)
    scores = scores if rule.soft_cap is None else rule.soft_cap * (scores / rule.soft_cap).tanh()
    e = torch.where(seen, scores.exp(), 0.0)
    total = e.sum(-1) if sinks is None else e.sum(-1) + sinks.double().exp()[:, None]
    return (e @ v) / total.masked_fill(total == 0, 1)[..., None], total.log()


def gradients(out, arguments):
    leaves = [t for t in arguments if t is not None and t.requires_grad]
    return torch.autograd.grad(out, leaves,
                               torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_every_backend_computes_the_rule_or_names_its_field(rule):
    """In float64 to the rounding of sums in another order; Triton and FlexAttention in float32; FP8
    to the steps of E4M3."""
    refused = set()
    for name, attend in FUNCTIONS.items():
        if name == "triton" and (tl is None or not INTERPRETED):
            continue
        low = name in ("triton", "flex")
        arguments = tensors(rule, dtype=torch.float32 if low else torch.float64)
        # which has no backward on a CPU
        arguments = [t if t is None or name != "flex" else t.detach() for t in arguments]
        want, _ = defined(*arguments, rule=rule)
        try:
            got = attend(*arguments, rule=rule)
        except ConfigError as error:
            assert (name in ("sdpa", "flex", "triton")
                    and str(error).startswith(f"system.attention={name} has no ")), (name, error)
            field, value = str(error).partition("(its ")[2].partition("); ")[0].split("=")
            assert str(getattr(rule, field)) == value != str(getattr(Rule(), field)), error
            refused.add(name)
            continue
        off = {"rtol": 1e-5, "atol": 1e-5} if low else {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(got.double(), want, **off, msg=lambda text: f"{name}: {text}")      # noqa: B023
        if not low:
            for ours, theirs in zip(gradients(got, arguments), gradients(want, arguments),
                                    strict=True):
                torch.testing.assert_close(ours, theirs, **off, msg=lambda text: f"{name}: {text}")    # noqa: B023
    if rule.soft_cap or rule.sinks:
        assert "sdpa" in refused
    assert not {"plain", "tiled", "blocked", "blocked-wide"} & refused


def test_two_tokens_without_a_mask():
    """By hand: of equal scores the mean, 0.5; a causal kernel gives the first value to the first
    query."""
    q = k = torch.zeros(1, 1, 2, 16)
    v = torch.tensor([[0.0], [1.0]]).expand(2, 16)[None, None].contiguous()
    for name, attend in FUNCTIONS.items():
        if name == "triton":
            with pytest.raises(ConfigError,
                               match=r"triton has no attention to keys to come .its causal=False.; "
                                     r"plain can"):
                attend(q, k, v, rule=EVERY_KEY)
        else:
            assert attend(q, k, v, rule=EVERY_KEY).unique().tolist() == [0.5], name


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_a_library_does_not_compute_is_refused_before_it_is_called(name):
    for rule in RULES:
        if all(getattr(rule, field) == getattr(Rule(), field) or field in ("block",)
               or field in ATTENTION[name].why_not.rule
               for field in Rule.__dataclass_fields__):
            continue
        with pytest.raises(ConfigError, match=f"system.attention={name} has no "):
            LIBRARIES[name](*tensors(rule, dtype=torch.bfloat16, E=16), rule=rule)


@pytest.mark.parametrize("name", [*FUNCTIONS, *LIBRARIES])
def test_what_does_not_fit_the_rule_is_refused(name):
    attend = (FUNCTIONS | LIBRARIES)[name]
    q, k, v, *_ = tensors(Rule(), dtype=torch.float32, E=16)
    with pytest.raises(ConfigError,
                       match=f"{name.replace('-wide', '')} takes as many queries as keys, not 1 "
                             f"and 19"):
        attend(q[:, :, :1], k, v)
    if name in ("plain", "tiled", "blocked", "flex"):
        with pytest.raises(ConfigError, match="needs an id of each token's document"):
            attend(q, k, v, rule=Rule(documents=True))
        with pytest.raises(ConfigError, match="needs a score for each head"):
            attend(q, k, v, rule=Rule(sinks=True))
        with pytest.raises(ConfigError, match="needs blocks for 19 tokens, and has them for 4"):
            attend(q, k, v, rule=Rule(block=4, blocks=((True,),)))
    # scores that nobody asked for count, too
    for rule, word in ((Rule(sinks=True), "sinks"), (Rule(), "sinks")):
        if name not in ("plain", "tiled", "blocked", "blocked-wide", "flex", "triton"):
            with pytest.raises(ConfigError, match=f"{name} has no {word}"):
                attend(q, k, v, None, torch.zeros(4), rule=rule)


@pytest.mark.parametrize("field, value", [("window", 0), ("window", -1), ("soft_cap", 0.0),
    ("soft_cap", -1.0)])
def test_a_rule_that_means_nothing_is_refused(field, value):
    with pytest.raises(ConfigError,
                       match=f"{field} of a rule must be above 0 or None, got {value}"):
        Rule(**{field: value})


def test_a_model_gets_no_backend_that_computes_another_rule():
    capped, both = (Config().replace({"model.attention": kind, "data.policy": policy,
                                      "model.vocab": 257}).model for kind, policy in (
        ({"name": "full", "soft_cap": 20.0, "sinks": True}, "random-windows"),
        ({"name": "bidirectional"}, "masked")))
    for name, model in (("sdpa", capped), ("triton", both), ("sdpa-cudnn", capped)):
        with pytest.raises(ConfigError, match=f"system.attention={name} has no "):
            backend(name, model)
    assert backend("triton", capped) and backend("sdpa", both)


def test_a_graph_of_a_user_refuses_too():
    """torch.compile traces the check, and what it says reaches the caller."""
    compiled = torch.compile(lambda *qkv: FUNCTIONS["sdpa"](*qkv, rule=Rule(soft_cap=2.0)),
                             backend="eager")
    with pytest.raises(Exception, match="has no cap on scores"):
        compiled(*tensors(Rule())[:3])
    window = torch.compile(lambda *qkv: FUNCTIONS["sdpa"](*qkv, rule=Rule(window=3)),
                           backend="eager", fullgraph=True)
    q = tensors(Rule())[:3]
    torch.testing.assert_close(window(*q), FUNCTIONS["plain"](*q, rule=Rule(window=3)))


def test_a_race_without_a_right_version_says_what_was_refused(tmp_path):
    """On a CPU attention is raced between fused versions alone; a version that is wrong at the size
    of a step is not used either."""
    def wrong(q, k, v, documents=None, sinks=None):
        return FUNCTIONS["plain"](q, k, v) * (1 if q.shape[2] < 32 else 1.5)

    def broken(*_):
        raise RuntimeError("no kernel for these\nmore")

    kernel = Kernel(definition=FUNCTIONS["plain"], gradients=(0, 1, 2),
                    examples=lambda draw, device: ())
    small, large = tensors(Rule(), dtype=torch.float32), tensors(Rule(), Tq=64, Tk=64,
        dtype=torch.float32)
    for at_hand, offered, words in ((
            (large, {"sdpa": wrong, "blocked": broken},
             "sdpa: differs from its definition: .*; blocked: fails: RuntimeError: no kernel for "
             "these$"),
            (small, {"sdpa": wrong, "blocked": wrong}, "sdpa: differs from its definition: result "
                                                       "1 of 4, at the run's size: .*; blocked: "
                                                       "differs"))):
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
    """Ranks of a tensor group as threads, which meet in every message."""

    def __init__(self, count):
        self.barrier, self.given, self.layout = threading.Barrier(count), [], SimpleNamespace(
            tensor=count)
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
def test_a_vocabulary_cut_over_ranks_ignores_and_refuses_what_a_whole_one_does(weights,
        monkeypatch):
    """Nats, the gradient left in place, and autograd's: of targets that count, that are ignored,
    that are none, and of weight 0."""
    from lpkit.parallel import tensor

    whole = 3 * torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
    whole[4, 40] = torch.inf        # of weight 0
    ranks, results = Together(2), [None, None]
    monkeypatch.setattr(tensor.dist, "all_reduce",
                        lambda t, group=None: ranks.meet(t, lambda every: every.sum(0)))

    def one(i):
        part, cut = whole[:, 24 * i:24 * i + 24].clone(), tensor.Vocabulary(first=24 * i,
            ranks=ranks)
        leaf = part.clone().requires_grad_()
        nats = cut.nats(leaf, Y)
        in_place = cut.cross_entropy_(part, Y, weights)
        g = torch.ones(8) if weights is None else weights
        results[i] = in_place, part, nats.detach(), torch.autograd.grad(nats, leaf, g)[0]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    nats, gradient = cross_entropy(whole, Y, weights)
    assert nats[2] == 0 and nats[3].isnan() and nats[5].isnan() and not gradient[2].any()
    for k, want in ((0, nats), (2, nats)):
        torch.testing.assert_close(results[0][k], want, equal_nan=True)
        torch.testing.assert_close(results[1][k], want, equal_nan=True)
    for k in (1, 3):
        torch.testing.assert_close(torch.cat([results[0][k], results[1][k]], 1), gradient,
                                   equal_nan=True)


@pytest.mark.parametrize("by", [full_cross_entropy,
                                functools.partial(chunked_cross_entropy, chunk=5)],
    ids=["full", "chunked"])
@pytest.mark.parametrize("weighted", [False, True])
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
           {"ignore_index": 0, "label_smoothing": 0.2,
           "z_loss": 1e-3, "soft_cap": 20.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_are_pytorchs(options, reduction, dtype, weighted):
    """Values and gradients of logits, hidden states, weight and bias; sizes are odd, pieces do not
    divide them, views are not contiguous."""
    rng = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
               for shape in ((13, 2, 9), (7, 9, 2), (7,)))
    h, w = h.transpose(0, 1), w[:, :, 0]
    # sums are exact
    targets, weights = torch.randint(7, (13, 2), generator=rng).T, torch.randint(1, 9, (2, 13),
        generator=rng) / 8 if weighted else None
    targets = targets.masked_fill(torch.rand(2, 13, generator=rng) < 0.2,
                                  options.get("ignore_index", -100))
    if weighted:
        weights[1, 4] = 0
    leaves = [t.requires_grad_() for t in (h.detach().clone().transpose(0,
        1).contiguous().transpose(0, 1), w.detach(), b)]
    logits = (2 * h @ w.mT).detach().requires_grad_()
    off = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
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
        assert (got.double().flatten() - want).norm() <= off * want.norm()
        upstream = torch.linspace(0.5, 2, got.numel(), dtype=torch.float64).view(got.shape)
        for ours, theirs in zip(torch.autograd.grad(got, inputs, upstream.to(got.dtype)),
                                torch.autograd.grad(want, doubles, upstream.view(want.shape)),
                                strict=True):
            assert (ours.dtype == inputs[0].dtype and (ours.double() - theirs).norm() <= 2 * off
                    * theirs.norm())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses_pass_gradcheck(options):
    rng = torch.Generator().manual_seed(1)
    h, w, b = (torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)
               for shape in ((5, 4), (6, 4), (6,)))
    y = torch.tensor([0, 3, 5, 1, options.get("ignore_index", -100)])
    # the others run backward once, in place, and are PyTorch's to 1e-12
    how = {"reduction": "none", **options}
    assert torch.autograd.gradcheck(lambda z: functions.cross_entropy(z, y, **how),
                                    (h @ w.T).detach().requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w, b: functions.linear_cross_entropy(h, w, y, b,
        **how), (h, w, b))


def test_a_loss_leaves_its_logits_alone_and_counts_what_counts():
    logits = torch.randn(4, 5, requires_grad=True)
    before = logits.detach().clone()
    y = torch.tensor([1, -100, 2, -100])
    loss = functions.cross_entropy(logits, y)
    loss.backward()
    assert (torch.equal(logits.detach(), before) and not logits.grad[1::2].any()
            and logits.grad[::2].any())
    assert torch.allclose(loss, F.cross_entropy(before, y))
    bad = before.clone()
    bad[1], bad[3, 0] = torch.nan, torch.inf
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
        for targets, weights in ((y, None), (y.clamp(min=0), torch.tensor([1.0, 0, 1, 0]))):
            for reduction in ("mean", "sum", "none"):
                z = bad.clone().requires_grad_()
                functions.cross_entropy(z, targets, weights, reduction=reduction,
                                        **options).sum().backward()
                assert z.grad.isfinite().all() and not z.grad[1::2].any()
        assert functions.cross_entropy(before, torch.full((4,), -100),
                                       **options) == 0, "nothing counts"
    for targets, words in ((torch.tensor([0, 5, 1, 1]),
                            "from 0 to 4, or -100 to be ignored; got 5"),
        (y[:3], "must be .4,., one a token")):
        with pytest.raises(ConfigError, match=words):
            functions.cross_entropy(before, targets)
    with pytest.raises(ConfigError, match="got -100"):
        functions.cross_entropy(before, y, ignore_index=0)
    with pytest.raises(ConfigError, match="no reduction 'avg'"):
        functions.cross_entropy(before, y, reduction="avg")
    for options in ({"chunk_tokens": 0}, {"label_smoothing": 1.5}, {"soft_cap": 0.0}):
        with pytest.raises(ConfigError,
                           match=f"{next(iter(options))}={next(iter(options.values()))}"):
            functions.cross_entropy(before, y, **options)
    assert (functions.cross_entropy(before[:0], y[:0]) == 0
            and functions.cross_entropy(before[:0], y[:0], reduction="none").shape == (0,))


# ---- attention of other lengths

@pytest.mark.parametrize("rule", [Rule(**kind, sinks=sinks, soft_cap=cap) for kind in KINDS
                                  for sinks, cap in ((False, None), (True, 1.5))], ids=named)
@pytest.mark.parametrize("name", ["plain", "tiled"])
@pytest.mark.parametrize("Tq, Tk", [(1, 19), (7, 19), (19, 19), (19, 7)])
def test_queries_are_the_last_places_and_sums_have_gradients(rule, name, Tq, Tk):
    q, k, v, _, sinks = arguments = tensors(rule, Tq=Tq, Tk=Tk)
    out, lse = functions.attention(q, k, v, rule=rule, sinks=sinks, return_lse=True, backend=name)
    want, total = defined(*arguments, rule=replace(rule, query_start=(Tk - Tq) * rule.causal))
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, total, rtol=1e-9, atol=1e-9)
    seen = total.isfinite()
    for ours, theirs in zip(gradients(torch.cat((out, lse.masked_fill(~seen, 0)[..., None]), -1),
                                      arguments),
                            gradients(torch.cat((want, total.masked_fill(~seen, 0)[..., None]), -1),
                                      arguments), strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num(0), rtol=1e-9, atol=1e-9)
    if Tq == Tk:
        torch.testing.assert_close(functions.attention(q, k, v, rule=rule, sinks=sinks), want,
                                   rtol=1e-9, atol=1e-9)


def test_attention_of_documents_and_what_is_refused():
    rule = Rule(documents=True)
    q, k, v, documents, _ = arguments = tensors(rule, Tq=5)
    for name in ("plain", "tiled", "auto"):
        got = functions.attention(q, k, v, rule=rule, documents=documents, backend=name)
        torch.testing.assert_close(got, defined(*arguments, rule=replace(rule, query_start=14))[0],
                                   rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(functions.attention(q, k, v), F.scaled_dot_product_attention(
        q, k, v, torch.ones(5, 19, dtype=torch.bool).tril(14), enable_gqa=True))
    for call, words in ((lambda: functions.attention(q, k, v, rule=rule), "needs the id"),
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
        assert ((linear.in_features, linear.out_features) == (64, 128)
                and linear.weight.dtype == torch.float32)
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
    found = {}
    exec("\n".join(lines), found)
    assert (len(lines) > 10 and found["logits"].grad.any() and found["y"].shape == (128, 512)
            and found["lse"].shape == (1, 4, 5))
