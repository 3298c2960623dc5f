"""Softmax attention in float64, pair by pair from the words of `Rule`, and inputs for it."""

import math

import torch

from lpkit.techniques.attention import Rule


def named(rule):
    return "-".join(f"{key}={str(value)[:4]}" for key, value in vars(rule).items()
                    if value != getattr(Rule(), key) and key not in ("bits", "words")) or "full"


def tensors(rule, B=2, H=4, G=2, Tq=19, Tk=19, E=8, dtype=torch.float64):
    """q, k, v, ids of documents and scores of sinks, the last two where the rule has them."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, heads, E, generator=rng, dtype=torch.float64).to(dtype)
               .transpose(1, 2).requires_grad_() for heads, T in ((H, Tq), (G, Tk), (G, Tk)))
    documents = torch.stack([(torch.arange(Tk) >= Tk // 3).long(), 5 + torch.arange(Tk) // 16])[:B]
    sinks = torch.randn(H, generator=rng, dtype=torch.float64)
    sinks = sinks.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    return q, k, v, documents if rule.documents else None, sinks if rule.sinks else None


def pairs(rule, Tq, Tk):
    """(Tq, Tk): whether the query sees the key."""
    i, j = torch.arange(Tq)[:, None] + rule.query_start, torch.arange(Tk) + rule.key_start
    seen = (j <= i) if rule.causal else torch.ones(Tq, Tk, dtype=torch.bool)
    if rule.window is not None:
        seen = seen & ((i - j < rule.window) | (j < rule.global_tokens))
    if rule.blocks is not None:
        table = torch.tensor(rule.blocks)
        seen = seen & ((i < 0) | table[i.clamp(min=0) // rule.block, j // rule.block])
    return seen


def defined(q, k, v, documents=None, sinks=None, *, rule):
    """(result, log-sums) in float64. A query that sees nothing gets zeros."""
    (_, H, Tq, E), Tk = q.shape, k.shape[2]
    seen = pairs(rule, Tq, Tk).to(q.device)
    if documents is not None:
        seen = seen & (documents[:, Tk - Tq:, None] == documents[:, None])[:, None]
    q, k, v = (t.double().repeat_interleave(H // t.shape[1], 1) for t in (q, k, v))
    scores = q @ k.mT / math.sqrt(E)
    scores = scores if rule.soft_cap is None else rule.soft_cap * (scores / rule.soft_cap).tanh()
    weights = torch.where(seen, scores.exp(), 0.0)      # scores are small here
    total = weights.sum(-1)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None]
    return (weights @ v) / total.masked_fill(total == 0, 1)[..., None], total.log()


def gradients(out, arguments):
    leaves = [t for t in arguments if t is not None and t.requires_grad]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(out, leaves, weights.to(out))
