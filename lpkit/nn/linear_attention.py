"""Attention without softmax: kinds whose past is a state of constant size.

A kind is a module with what it has beside q, k and v: called with the block's input (B, T, D), it
gives the fifth argument of its backends. `plain` is the definition, `chunked` its linear-time form
(`lpkit.kernels.linear_attention`), `after` the state that a prompt leaves, `step` one token of it:

    state = kind.after(k, v, kind(x))                       # k, v (B, G, T, E), T from 0
    out, state = kind.step(q, k, v, state, kind(x))         # q (B, H, 1, E); k, v (B, G, 1, E)

States are float32 for inputs in 16 bits. Documents are not told apart: a token sees all before it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.kernels import linear_attention as kernel
from lpkit.kernels.kernel import wide
from lpkit.kernels.linear_attention import in_full
from lpkit.nn.layers import linear


def _repeated(t: Tensor, heads: int) -> Tensor:
    """Repeats each group's part for its heads."""
    return t.repeat_interleave(heads // t.shape[1], dim=1)


class Linear(nn.Module):
    """Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236: softmax's exp(q k) becomes
    phi(q) phi(k), phi = elu + 1."""

    def __init__(self, config: ModelConfig):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor | None:
        return None

    @staticmethod
    def plain(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
              features: Tensor | None = None) -> Tensor:
        """sum over the past of phi(q) phi(k) v, over the sum of phi(q) phi(k)."""
        with in_full(q):
            queries = kernel.mapped(q, features, keys=False)
            keys = kernel.mapped(_repeated(k, q.shape[1]), features, keys=True)
            weights = (queries @ keys.mT).tril()
            out = weights @ wide(_repeated(v, q.shape[1])) / weights.sum(-1, keepdim=True)
            return out.type_as(q)

    @staticmethod
    def chunked(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
                features: Tensor | None = None) -> Tensor:
        return kernel.LinearAttention.apply(q, k, v, features)

    @staticmethod
    def after(k: Tensor, v: Tensor, features: Tensor | None = None) -> Tensor:
        """(B, G, F, E + 1): sums of phi(k) v^T and, beside them, of phi(k)."""
        with in_full(k):
            return kernel.mapped(k, features, keys=True).mT @ F.pad(wide(v), (0, 1), value=1.0)

    @classmethod
    def step(cls, q: Tensor, k: Tensor, v: Tensor, state: Tensor,
             features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with in_full(q):
            queries = kernel.mapped(q, features, keys=False)
            state = state + cls.after(k, v, features)
            # the heads of a group read one state
            sums = queries.view(*state.shape[:2], -1, state.shape[2]) @ state
            return (sums[..., :-1] / sums[..., -1:]).view(q.shape).type_as(q), state


class Performer(Linear):
    """Choromanski et al. 2021, https://arxiv.org/abs/2009.14794: positive orthogonal random
    features, by which phi(q) phi(k) is exp(q k / sqrt(E)) in the mean. Drawn once."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        own = config.attention
        features = kernel.orthogonal_features(own.features, config.E, own.seed)
        # settings have all of it: not in a checkpoint
        self.register_buffer("features", features.to(torch.get_default_device()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.features


class Delta(nn.Module):
    """The delta rule: what the state has at a key is replaced, by a learned share beta, instead of
    added to (Schlag et al. 2021, https://arxiv.org/abs/2102.11174). q and k are silu(x) of length
    1, as in DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2406.06484), without its convolution
    and its norm of the output. One beta for each token and key/value head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.beta = linear(config, "attention.kind.beta")

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, G), before the sigmoid."""
        return self.beta(x)

    @classmethod
    def plain(cls, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
              gates: Tensor | None = None) -> Tensor:
        """Token after token."""
        B, G, T, E = k.shape
        state, outs = wide(k.new_zeros(B, G, E, E)), [q[:, :, :0]]
        for t in range(T):
            one = slice(t, t + 1)
            out, state = cls.step(q[:, :, one], k[:, :, one], v[:, :, one], state, gates[:, one])
            outs.append(out)
        return torch.cat(outs, dim=2)

    @staticmethod
    def chunked(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
                gates: Tensor | None = None) -> Tensor:
        return kernel.DeltaAttention.apply(q, k, v, gates)

    @staticmethod
    def after(k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        """(B, G, E, E): from a key to its value."""
        with in_full(k):
            return kernel.Chunks(k, k, v, gates).state.unflatten(0, k.shape[:2])

    @staticmethod
    def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor,
             gates: Tensor) -> tuple[Tensor, Tensor]:
        with in_full(q):
            queries, keys = kernel.unit(wide(q)), kernel.unit(wide(k))
            beta = wide(gates).sigmoid().mT[..., None]      # (B, G, 1, 1)
            state = state + keys.mT @ (beta * (wide(v) - keys @ state))
            out = queries.view(*state.shape[:2], -1, state.shape[-1]) @ state
            return out.view(q.shape).type_as(q), state
