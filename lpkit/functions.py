"""Functions on your own tensors: losses, attention, casts and Linears. All functions except `cast`
are differentiable.

    cross_entropy(logits, targets)                  linear_cross_entropy(hidden, weight, targets)
    attention(q, k, v, rule=Rule(window=256))       cast(x, "e4m3fn", block=(1, 32))
    scaled_linear(1024, 4096, recipe="mxfp8")

They check their arguments and raise ConfigError. docs/functions.md has an example of each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.contracts import IGNORED
from lpkit.errors import ConfigError, pick
from lpkit.kernels.cross_entropy import cross_entropy_
from lpkit.kernels.kernel import wide
from lpkit.kernels.scales import Scaled
from lpkit.memory import loss
from lpkit.nn.attention import CAUSAL, Rule, partial_of
from lpkit.precision.backends import BACKENDS, choose, tiles
from lpkit.precision.scaled import quantise
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.recipes import SCALES, Cast, resolve


class _Head(NamedTuple):
    """The head in the form that `lpkit.memory.loss` takes: it maps hidden states (N, D) to logits
    (N, V). Without a weight, its input is already the logits."""

    weight: Tensor | None
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        # a clone, because the loss overwrites the logits with their gradient
        return x.clone() if self.weight is None else F.linear(x, self.weight, self.bias)

    def parameters(self) -> list[Tensor]:
        return [t for t in self if t is not None]


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None,
                  **options: Any) -> Tensor:
    """Returns the cross-entropy of `logits` (..., V). targets, weights and `options` are those of
    `linear_cross_entropy`."""
    return linear_cross_entropy(logits, None, targets, None, weights, **options)


def linear_cross_entropy(
        hidden: Tensor, weight: Tensor | None, targets: Tensor, bias: Tensor | None = None,
        weights: Tensor | None = None, *, chunk_tokens: int = 1024, ignore_index: int = IGNORED,
        label_smoothing: float = 0.0, z_loss: float = 0.0, soft_cap: float | None = None,
        reduction: str = "mean") -> Tensor:
    """Returns the cross-entropy of the logits hidden @ weight.T + bias, in float32 or float64.

    hidden           (..., D)
    weight           (V, D)
    targets          (...), 0 to V - 1, or ignore_index
    weights          (...), weight of each target
    chunk_tokens     number of tokens whose logits are in memory at the same time; if reduction is
                     none, the logits of all tokens are in memory
    reduction        mean: sum(weights x nats) / sum(weights) over the targets that are not
                     ignored, 0 if there are none; sum; none: weights x nats, (...)
    label_smoothing  as in PyTorch
    z_loss           factor of logsumexp(logits)^2 (Chowdhery et al. 2022,
                     https://arxiv.org/abs/2204.02311)
    soft_cap         if given, soft_cap x tanh(logits / soft_cap) replaces the logits

    A target outside the vocabulary raises ConfigError on a CPU and gives NaN on a GPU. The backward
    pass of mean and sum overwrites its inputs, so it can run only once.
    """
    pick({"mean": 0, "sum": 0, "none": 0}, reduction, "reduction")
    if (chunk_tokens < 1 or not 0 <= label_smoothing <= 1
            or (soft_cap is not None and soft_cap <= 0)):
        raise ConfigError(f"chunk_tokens={chunk_tokens} must be 1 or more, label_smoothing="
                          f"{label_smoothing} from 0 to 1, soft_cap={soft_cap} above 0 or None")
    V = hidden.shape[-1] if weight is None else len(weight)
    if any(t is not None and t.shape != hidden.shape[:-1] for t in (targets, weights)):
        raise ConfigError(f"targets and weights must be {tuple(hidden.shape[:-1])}, one a token")
    h, y = hidden.flatten(0, -2), targets.flatten()
    w = None if weights is None else weights.flatten()
    bad = ((y < 0) | (y >= V)) & (y != ignore_index)
    if y.device.type == "cpu" and bad.any():
        raise ConfigError(f"targets must be from 0 to {V - 1}, or {ignore_index} to be ignored; "
                          f"got {y[bad][0]}")
    ignored = y == ignore_index if w is None else (y == ignore_index) | (w == 0)
    y, head = y.where(~bad, -1).where(~ignored, IGNORED), _Head(weight, bias)
    nats_of = partial(_nats, label_smoothing=label_smoothing, z_loss=z_loss, soft_cap=soft_cap)
    if reduction == "none":
        return (nats_of(head(h), y) * (1 if w is None else w)).view(targets.shape)
    plain = not (label_smoothing or z_loss or soft_cap)
    mean = loss.linear_cross_entropy(h, head, y, chunk_tokens, w,
                                     cross_entropy_ if plain else partial(_in_place, nats_of))
    return mean if reduction == "mean" else mean * loss.counted(y, w)[1]


def _nats(logits: Tensor, targets: Tensor, *, label_smoothing: float, z_loss: float,
          soft_cap: float | None) -> Tensor:
    """Returns the loss of each target (N,) in nats, computed by PyTorch's operations as defined in
    `linear_cross_entropy`. logits (N, V); targets (N,). An IGNORED target gets 0, and a target
    outside the vocabulary NaN."""
    ignored, known = targets == IGNORED, (targets >= 0) & (targets < logits.shape[1])
    z = wide(logits).masked_fill(ignored[:, None], 0)
    z = z if soft_cap is None else soft_cap * torch.tanh(z / soft_cap)
    total = z.logsumexp(-1)
    of_target = z.gather(1, torch.where(known, targets, 0)[:, None])[:, 0]
    nats = total - (1 - label_smoothing) * of_target + z_loss * total.square()
    if label_smoothing:
        nats = nats - label_smoothing * z.mean(-1)
    return nats.masked_fill(~known, torch.nan).masked_fill(ignored, 0)


def _in_place(nats_of: Any, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the loss of each target (N,) in nats, and overwrites `logits` (N, V) with the
    gradient of the sum, weighted by `weights` (N,). This is the interface of
    `kernels.cross_entropy.cross_entropy_`, for losses that this kernel does not have."""
    with torch.enable_grad():
        nats = nats_of(z := logits.detach().requires_grad_(), targets)
        (g,) = torch.autograd.grad(nats, z, torch.ones_like(nats) if weights is None else
                                   weights.type_as(nats))
    logits.copy_(g)
    return nats.detach()


def attention(q: Tensor, k: Tensor, v: Tensor, *, rule: Rule = CAUSAL,
              documents: Tensor | None = None, sinks: Tensor | None = None,
              return_lse: bool = False, backend: str = "auto") -> Any:
    """Returns softmax(q k^T / sqrt(E)) v over the keys that `rule` lets each query see.

    q           (B, H, Tq, E)
    k, v        (B, G, Tk, E); G divides H
    documents   (B, Tk), id of each key's document
    sinks       (H,), score of each head's sink
    return_lse  also return the logarithm of each query's sum of exponentials, (B, H, Tq), with its
                gradient; -inf for a query that sees no key
    backend     a row of ATTENTION; if Tq is not Tk, or with return_lse, only plain or tiled

    If Tq is not Tk, the queries belong to the last Tq of the Tk positions, as in FlashAttention.
    The result of a query that sees no key is 0.
    """
    Tq, Tk = q.shape[2], k.shape[2]
    if Tq == Tk and not return_lse:
        required = replace(rule, sinks=sinks is not None)
        auto = "plain" if ATTENTION["sdpa"].why_not.lacks(required) else "sdpa"
        row = pick(ATTENTION, auto if backend == "auto" else backend, "attention backend")
        return row.load()(q, k, v, documents, sinks, rule=rule)
    if (rule.documents and (documents is None or Tq > Tk)) or (rule.sinks and sinks is None):
        raise ConfigError("a rule with documents needs documents (B, Tk), the id of each key's "
                          "document, and Tq <= Tk; a rule with sinks needs sinks (H,)")
    last = replace(rule, query_start=rule.query_start + rule.causal * (Tk - Tq), sinks=False)
    ids = (documents[:, Tk - Tq:], documents) if rule.documents else None
    out, lse = partial_of("tiled" if backend == "auto" else backend)(q, k, v, ids, rule=last)
    if sinks is not None:       # a sink is a key without a value
        out = out * torch.sigmoid(lse - sinks[:, None])[..., None].type_as(out)
        lse = torch.logaddexp(lse, sinks[:, None].type_as(lse))
    return (out, lse) if return_lse else out


def cast(x: Tensor, format: str, *, block: tuple[int, int] = (0, 0),
         scale: str = "float32") -> Scaled:
    """Returns `x` (M, K), cast to a format of FORMATS; call `.dequantise()` on the result for the
    rounded values. block: (rows, columns) of the elements that share a scale; 0 means the whole
    axis. scale: the row of SCALES that computes the scales. Not differentiable."""
    pick(SCALES, scale, "scale")
    return quantise(x, Cast(format=format, block=block, scale=scale))


def scaled_linear(in_features: int, out_features: int, *, recipe: str, bias: bool = True,
                  backend: str = "auto", device: Any = None, seed: int = 0) -> nn.Module:
    """Returns an nn.Linear whose matmuls run under a row of RECIPES, on a row of BACKENDS. Call its
    `advance()` after each backward pass if the recipe has a history or rounds stochastically."""
    row, linear = resolve(recipe), nn.Linear(in_features, out_features, bias, device=device)
    by = BACKENDS[choose(backend, recipe, row, linear.weight.device).used]
    tiles(recipe, row, {"K": in_features, "N": out_features}, by.alignment)
    return by.wrap(linear, row, name=recipe, seed=seed)
