"""Losses and attention on tensors of one's own, at Liger-Kernel's and CS336's kinds of case, beside
PyTorch in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from lpkit import functions
from lpkit.errors import ConfigError
from lpkit.techniques.attention import Rule

SHARE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7}
DTYPES = list(SHARE)
SHAPES = [(3, 47, 31), (9, 7, 41)]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def targets(B: int, T: int, V: int, ignored: int | None = None) -> torch.Tensor:
    y = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))
    if ignored is not None:
        y.view(-1)[::3] = ignored
        y.view(-1)[-1] = 1      # one counts
    return y


def close(found: torch.Tensor, due: torch.Tensor, share: float) -> None:
    assert found.shape == due.shape and found.isfinite().all()
    assert (found.double() - due).abs().max() <= share * max(due.abs().max().item(), 1e-30)


def by_definition(logits, y, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, soft_cap=None,
                  reduction="mean"):
    """By PyTorch's own, in float64; the z-loss is of the tokens that count."""
    z = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    nats = F.cross_entropy(z.flatten(0, -2), y.flatten(), ignore_index=ignore_index,
                           label_smoothing=label_smoothing, reduction="none")
    counts = y.flatten() != ignore_index
    nats = nats + z_loss * z.flatten(0, -2).logsumexp(-1).square() * counts
    return {"mean": nats.sum() / counts.sum(), "sum": nats.sum(),
            "none": nats.view(y.shape)}[reduction]


OPTIONS = {
    "plain": {}, "ignored by another index": {"ignore_index": 1},
    "smoothed": {"label_smoothing": 0.1}, "smoothed wholly": {"label_smoothing": 1.0},
    "with a z-loss": {"z_loss": 1e-4}, "capped": {"soft_cap": 30.0},
    "all at once": {"label_smoothing": 0.2, "z_loss": 1e-3, "soft_cap": 40.0},
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape, dtype", [(SHAPES[0], DTYPES[0]), (SHAPES[1], DTYPES[1])], ids=str)
def test_cross_entropy(shape, dtype, name, reduction):
    """A third of the targets is ignored. The gradient from above is 0.5 for all, or another for
    each token."""
    options = OPTIONS[name] | {"reduction": reduction}
    x, y = (drawn(*shape) * 3).to(dtype), targets(*shape, options.get("ignore_index", -100))
    if name.startswith("ignored"):
        y.view(-1)[-1] = 0
    own, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    found, due = functions.cross_entropy(own, y, **options), by_definition(wide, y, **options)
    g = (torch.rand(due.shape, generator=torch.Generator().manual_seed(3)) if reduction == "none"
         else torch.tensor(0.5))
    found.backward(g.to(found.dtype))
    due.backward(g.double())
    close(found.detach(), due.detach(), 2e-6 if reduction != "none" else 5e-6)
    close(own.grad, wide.grad, SHARE[dtype])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("B, T, H, V", [(4, 47, 31, 123)])
def test_linear_cross_entropy(B, T, H, V, name, bias):
    h, y, options = drawn(B, T, H), targets(B, T, V,
        OPTIONS[name].get("ignore_index", -100)), OPTIONS[name]
    if name.startswith("ignored"):
        y.view(-1)[-1] = 0
    weight, b = drawn(V, H, seed=4) / math.sqrt(H), drawn(V, seed=5) if bias else None
    own = [t.clone().requires_grad_() for t in (h, weight, b) if t is not None]
    wide = [t.double().requires_grad_() for t in (h, weight, b) if t is not None]
    found = functions.linear_cross_entropy(own[0], own[1], y, *own[2:], chunk_tokens=16, **options)
    due = by_definition(F.linear(wide[0], wide[1], *wide[2:]), y, **options)
    found.backward()
    due.backward()
    close(found.detach(), due.detach(), 5e-6)
    for one, of_definition in zip(own, wide, strict=True):
        close(one.grad, of_definition.grad, 3e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_when_no_token_counts(reduction):
    x = drawn(2, 3, 8).requires_grad_()
    found = functions.cross_entropy(x, torch.full((2, 3), -100), reduction=reduction)
    found.sum().backward()
    assert (found == 0).all() and (x.grad == 0).all()


@pytest.mark.parametrize("y", [-1, 8, 10**9])
def test_a_target_outside_the_vocabulary_is_refused(y):
    with pytest.raises(ConfigError, match="targets must be from 0 to 7"):
        functions.cross_entropy(drawn(1, 2, 8), torch.tensor([[0, y]]))


@pytest.mark.parametrize("options", [{"label_smoothing": 1.5}, {"soft_cap": 0.0},
    {"reduction": "median"}], ids=str)
def test_what_a_loss_cannot_take_is_refused(options):
    with pytest.raises(ConfigError):
        functions.cross_entropy(drawn(1, 2, 8), torch.tensor([[0, 1]]), **options)


# ---- attention

LENGTHS = [(1, 64), (64, 65), (33, 100), (1, 1)]
RULES = {"causal": Rule(), "every key": Rule(causal=False), "a window": Rule(window=8),
         "a cap": Rule(soft_cap=5.0)}


def attended(q, k, v, rule):
    """Queries are the last of the keys' places."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if rule.soft_cap:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    i, j = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])
    if rule.causal:
        hidden = (j > i) | (j <= i - rule.window if rule.window
                            else torch.zeros(1, dtype=torch.bool))
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("groups, lse", [(1, True), (2, False)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("Tq, Tk", LENGTHS)
def test_attention_of_other_lengths_with_its_sums(Tq, Tk, rule, lse, groups):
    shapes = ((2, 4, Tq, 16), (2, 4 // groups, Tk, 16), (2, 4 // groups, Tk, 16))
    inputs = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    own, wide = [t.clone().requires_grad_() for t in inputs], [t.double().requires_grad_()
        for t in inputs]
    found, due = functions.attention(*own, rule=RULES[rule], return_lse=lse), attended(*wide,
        RULES[rule])
    found, due = (found if lse else (found,)), (due if lse else due[:1])
    grads = [drawn(*t.shape, seed=9 + i) for i, t in enumerate(due)]
    for one, of_definition in zip(found, due, strict=True):
        close(one.detach() + 4, of_definition.detach() + 4, 1e-5)
    mine = torch.autograd.grad(found, own, grads)
    theirs = torch.autograd.grad(due, wide, [g.double() for g in grads])
    for one, of_definition in zip(mine, theirs, strict=True):
        close(one + 4, of_definition + 4, 3e-5)     # of one key, q has none
