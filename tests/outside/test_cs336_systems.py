"""Attention in tiles, and training on several ranks, at the sizes of CS336's second assignment,
beside float64 and one process."""

import math

import pytest
import torch

from lpkit.kernels.blocked_attention import blocked
from lpkit.kernels.tiled_attention import tiled, tiled_partial
from lpkit.nn.attention import plain, plain_partial, sdpa
from lpkit.techniques.attention import Rule

BACKENDS = {"plain": plain, "sdpa": sdpa, "tiled": tiled, "blocked": blocked}
RULES = {"causal": Rule(), "every key": Rule(causal=False)}
SIZES = [(1, 2, 100, 24), (3, 2, 1, 16), (1, 1, 257, 32)]


def inputs(B: int, H: int, T: int, E: int, groups: int = 1) -> list[torch.Tensor]:
    return [torch.randn(B, heads, T, E, generator=torch.Generator().manual_seed(i))
            for i, heads in enumerate((H, H // groups, H // groups, H))]


def by_definition(q, k, v, rule):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if rule.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1),
                                    -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def close(found: torch.Tensor, due: torch.Tensor, share: float) -> None:
    assert (found.shape == due.shape and (found.double() - due).abs().max() <= share
            * due.abs().max())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BACKENDS)
def test_attention_forward_and_backward(name, rule, size):
    q, k, v, g = inputs(*size)
    wide, own = [t.double().requires_grad_() for t in (q, k, v)], [t.clone().requires_grad_()
        for t in (q, k, v)]
    due, found = by_definition(*wide, RULES[rule])[0], BACKENDS[name](*own, rule=RULES[rule])
    close(found.detach(), due.detach(), 1e-5)
    for one, of_definition in zip(torch.autograd.grad(found, own, g),
                                  torch.autograd.grad(due, wide, g.double()), strict=True):
        # of one key, q and k have none
        close(one, of_definition, 3e-5) if size[2] > 1 else close(one + 1, of_definition + 1, 1e-6)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("name", BACKENDS)
def test_grouped_heads(name, groups):
    q, k, v, _ = inputs(2, 4, 64, 16, groups)
    close(BACKENDS[name](q, k, v, rule=Rule()),
          by_definition(q.double(), k.double(), v.double(), Rule())[0], 1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("partial", [plain_partial, tiled_partial], ids=["plain", "tiled"])
def test_the_logarithm_of_the_sums(partial, rule, size):
    q, k, v, _ = inputs(*size)
    due, sums = by_definition(q.double(), k.double(), v.double(), RULES[rule])
    out, lse = partial(q, k, v, rule=RULES[rule])
    close(out, due, 1e-5)
    close(lse + 10, sums + 10, 1e-5)
