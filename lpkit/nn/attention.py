"""Attention: kinds (which keys a query sees) by backends (who computes it).

`lpkit.techniques.attention` has the rows of the kinds, `lpkit.techniques.attention_backends` those
of the backends. A backend is any `contracts.Attend`: it computes what `plain`, the definition, does.
Here are the softmax kinds; `lpkit.nn.linear_attention` has those without.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.contracts import Attend
from lpkit.errors import ConfigError, pick
from lpkit.techniques.attention import KINDS, Rule
from lpkit.techniques.attention_backends import ATTENTION, FULL, Attending, why_not

CAUSAL = FULL       # the same object: what is kept of a rule is made for each


def sees(rule: Rule, queries: Tensor, keys: Tensor, documents: Tensor | None) -> Tensor:
    """Which of the keys at these places each of the queries sees: bool, (Tq, Tk), or with documents
    (B, T) int64 (B, 1, Tq, Tk)."""
    seen = rule.sees(queries[:, None], keys[None])
    if not rule.documents:
        return seen
    if documents is None:
        raise ConfigError("model.attention=documents needs an id of each token's document with "
                          "each batch, Batch.document_ids; full attention needs none")
    same = documents[:, queries, None] == documents[:, None, keys]
    return (seen & same)[:, None]


def plain(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
          sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    """softmax(q k^T / sqrt(E)) v over the tokens that the rule lets through. Holds the (B, H, T, T)
    scores. A query that sees none gets zeros."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)    # grouped heads share k and v
    return probabilities(q, k, documents, sinks, rule=rule) @ v


def probabilities(q: Tensor, k: Tensor, documents: Tensor | None = None,
                  sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    """softmax(q k^T / sqrt(E)), (B, H, T, T), over the tokens that the rule lets through."""
    T, E = q.shape[-2:]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    places = torch.arange(T, device=q.device)
    hidden = ~sees(rule, places, places, documents)
    scores = q @ k.mT / math.sqrt(E)
    if rule.soft_cap is not None:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None and rule.every_query_sees:
        return scores.softmax(-1)
    if sinks is None:
        return scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    sink = sinks.type_as(scores)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]


def sdpa(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
         sinks: Tensor | None = None, *, rule: Rule = CAUSAL) -> Tensor:
    """PyTorch's own choice of kernel (flash, memory-efficient, cuDNN or plain)."""
    grouped = q.shape[1] != k.shape[1]
    if rule == CAUSAL:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    places = torch.arange(q.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, sees(rule, places, places, documents),
                                          enable_gqa=grouped)


class Softmax(nn.Module):
    """A softmax kind has the sinks' scores (H,) beside q, k and v, where it has sinks."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        sinks = getattr(config.attention, "sinks", False)
        self.sinks = nn.Parameter(torch.zeros(config.H)) if sinks else None

    def forward(self, x: Tensor) -> Tensor | None:
        return self.sinks


def backend(name: str, model: ModelConfig) -> Attend:
    """The backend that `model` attends by. Raises ConfigError where it cannot, or is unknown."""
    row, rule = pick(ATTENTION, name, "system.attention"), model.attention.rule(model.T)
    if rule is None or not row.implementation:
        if problem := why_not(name, Attending(model=model)):
            raise ConfigError(f"system.attention={name} {problem}")
        return getattr(KINDS[model.attention.name].load(), name)
    for one in (rule, CAUSAL):
        _ = one.bits, one.words     # a graph finds them made: it cannot make them
    return row.load() if rule == CAUSAL else partial(row.load(), rule=rule)
