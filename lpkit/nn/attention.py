"""Attention by softmax. A kind of attention defines which keys a query sees (its `Rule`), and a
backend computes it.

`lpkit.techniques.attention` has the rows of kinds, and `lpkit.techniques.attention_backends` has
the rows of backends. A backend is any `contracts.Attend` that computes the same as `plain`, the
definition.

Shapes: q (B, H, T, E), k and v (B, G, T, E), documents (B, T) int64 ids or None, sinks (H,) scores
or None; the result is like q.
"""

import math
from functools import partial
from pkgutil import resolve_name

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.contracts import Attend, Partial
from lpkit.errors import ConfigError, pick
from lpkit.techniques.attention import EVERY_KEY, KINDS, Rule
from lpkit.techniques.attention_backends import ATTENTION, FULL, Attending, limited, why_not

CAUSAL = FULL       # the same object, so that its cached properties are computed once


def sees(rule: Rule, queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """Return whether each query sees each key, bool (Tq, Tk), for positions `queries` (Tq,) and
    `keys` (Tk,). If the rule has documents, the result is (B, 1, Tq, Tk)."""
    seen = rule.sees(queries[:, None], keys[None])
    if not rule.documents:
        return seen
    same = documents[:, queries, None] == documents[:, None, keys]
    return (seen & same)[:, None]


@limited("plain")
def plain(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
          sinks: Tensor | None = None, *, rule: Rule = CAUSAL, dropout: float = 0.0) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v over the keys that the rule allows: the definition. Stores
    the scores (B, H, T, T). A query that sees no key gets zeros. `dropout`: the share of
    probabilities that are set to 0."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)    # H / G query heads share k and v
    return F.dropout(probabilities(q, k, documents, sinks, rule=rule), dropout) @ v


def probabilities(q: Tensor, k: Tensor, documents: Tensor | None = None,
                  sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    """Return softmax(q k^T / sqrt(E)), (B, H, T, T), over the keys that the rule allows."""
    T, E = q.shape[-2:]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    places = torch.arange(T, device=q.device)
    hidden = ~sees(rule, places, places, documents)
    scores = capped(q @ k.mT / math.sqrt(E), rule).masked_fill(hidden, -torch.inf)
    if sinks is None and rule.every_query_sees:
        return scores.softmax(-1)
    if sinks is None:
        return scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    # A sink is one more score of each query. It takes a share of the softmax and has no value.
    sink = sinks.type_as(scores)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]


def capped(scores: Tensor, rule: Rule) -> Tensor:
    """Return the scores, limited by the rule's soft cap c if it has one: c tanh(scores / c)."""
    return scores if rule.soft_cap is None else rule.soft_cap * torch.tanh(scores / rule.soft_cap)


def plain_partial(q: Tensor, k: Tensor, v: Tensor, documents: tuple[Tensor, Tensor] | None = None,
                  *, rule: Rule = CAUSAL) -> tuple[Tensor, Tensor]:
    """Return the attention output for a part of the keys, like q, and the log-sums (B, H, Tq) of
    the exponentials of each query's scores: the definition of a `contracts.Partial`. documents: ids
    of the queries (B, Tq), and ids of the keys (B, Tk)."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    queries, keys = (torch.arange(t.shape[2], device=q.device) for t in (q, k))
    seen = rule.sees(queries[:, None], keys[None])
    if documents is not None:
        seen = seen & (documents[0][:, None, :, None] == documents[1][:, None, None])
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).to(torch.promote_types(q.dtype, torch.float32))
    # Hidden scores become the lowest finite number, because a row of -inf has a NaN softmax and a
    # NaN gradient.
    scores = capped(scores, rule).masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = (scores.softmax(-1) * seen).type_as(v)
    return weights @ v, scores.logsumexp(-1).masked_fill(~seen.any(-1), -torch.inf)


@limited("sdpa")
def sdpa(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
         sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    """Return the attention output by PyTorch's scaled_dot_product_attention, which chooses a kernel
    (flash, memory-efficient, cuDNN or its formula)."""
    grouped = q.shape[1] != k.shape[1]
    if rule in (CAUSAL, EVERY_KEY):
        return F.scaled_dot_product_attention(q, k, v, is_causal=rule.causal, enable_gqa=grouped)
    places = torch.arange(q.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, sees(rule, places, places, documents),
                                          enable_gqa=grouped)


class SoftmaxAttention(nn.Module):
    """The parameters of a softmax kind of attention. Calling it returns the scores of the sinks
    (H,), or None if the kind has no sinks."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        sinks = getattr(config.attention, "sinks", False)
        self.sinks = nn.Parameter(torch.zeros(config.H)) if sinks else None

    def forward(self, x: Tensor) -> Tensor | None:
        return self.sinks


def backend(name: str, model: ModelConfig) -> Attend:
    """Return the backend `name` for `model`. Raises ConfigError if it is unknown or cannot run."""
    row, rule = pick(ATTENTION, name, "system.attention"), model.attention.rule(model.T)
    if problem := why_not(name, Attending(model=model, dtype="bfloat16", device="gpu")):
        raise ConfigError(f"system.attention={name} {problem}")
    if rule is None:
        return getattr(KINDS[model.attention.name].load(), name)
    for used_rule in (rule, CAUSAL, EVERY_KEY):
        # Compute this cached property now, because a compiled graph cannot.
        _ = used_rule.words
    # For full causal attention, skip the check of `limited`, since every backend supports it.
    call = row.load()
    return getattr(call, "__wrapped__", call) if rule == CAUSAL else partial(call, rule=rule)


def able_backend(model: ModelConfig) -> Attend:
    """Return the backend `sdpa` for `model`, or the first other backend that supports `model`."""
    asked = Attending(model=model)
    return backend(next(name for name in ("sdpa", *ATTENTION) if not why_not(name, asked)), model)


def partial_of(name: str) -> Partial:
    """Return the `contracts.Partial` of the backend `name`: a function that attends to a part of
    the keys. Raises ConfigError if the backend has none."""
    row = pick(ATTENTION, name, "system.attention")
    if not row.partial:
        able = ", ".join(key for key, other in ATTENTION.items() if other.partial)
        raise ConfigError(f"system.attention={name} gives no gradient of its log-sums, by which "
                          f"parts of the keys are combined; choose one of {able}")
    return resolve_name(row.partial)
