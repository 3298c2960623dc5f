"""Causal attention without softmax in time linear in T: chunks of tokens, with a state that is
carried from chunk to chunk (rows of `linear_attention.py`).

    linear attention    S += phi(k) v^T,  z += phi(k),  out = phi(q) S / phi(q) z
    the delta rule      S += beta k (v - k S)^T,        out = q S

The state S of a head, (F, E), is computed for the start of each chunk; within a chunk, the products
run over pairs of its tokens. In a chunk of the delta rule, a triangular system is solved for the
values that the tokens write (the WY form; Yang et al. 2024, https://arxiv.org/abs/2406.06484,
section 3). For backward, q, k, v and the gates are kept, and the states are recomputed.

Shapes: q (B, H, T, E), k and v (B, G, T, E), any T; the H / G heads of a group share keys and
values, and so the state. For 16-bit inputs, all internal arithmetic is float32. FLOPs are counted
for whole chunks and without recomputation in backward, as predictions count them.

A kind (`Linear`, `Performer`, `Delta`) is a module. Called with the block's input (B, T, D), it
returns the fifth argument of its backends. `plain` is the definition, `chunked` the linear-time
form, `after` the state after a prompt, and `step` processes one token with a state:

    state = kind.after(k, v, kind(x))                       # k, v (B, G, T, E), T from 0
    out, state = kind.step(q, k, v, state, kind(x))         # q (B, H, 1, E); k, v (B, G, 1, E)

States are float32 for 16-bit inputs. Documents are not separated: a token sees all earlier tokens.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lessons.rows.linear_attention import chunk_of, delta_pairs, linear_pairs
from lpkit.config import ModelConfig
from lpkit.errors import ConfigError
from lpkit.kernels.kernel import wide
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.nn.kv_cache import Cache
from lpkit.nn.layers import linear
from lpkit.techniques.attention import KINDS
from lpkit.techniques.caches import CacheFormat
from lpkit.techniques.operation import Pairs

EPSILON = 1e-6      # added to FAVOR+'s features and to squared lengths
OVERFLOW = 64.0     # a million times e^64 still fits in float32


def in_full(t: Tensor) -> AbstractContextManager:
    """Return a context without autocast; on meta, which has no autocast, it changes nothing."""
    kind = t.device.type
    return torch.autocast(kind if torch.amp.is_autocast_available(kind) else "cpu", enabled=False)


# Feature maps (..., E) -> (..., F) in the input's dtype, and their gradients by hand.

def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1 (Katharopoulos et al. 2020, equation 7)."""
    return x.clamp(max=0).exp() + x.relu()      # stays positive where elu(x) is rounded to -1


def positive_features(x: Tensor, features: Tensor, *, keys: bool) -> Tensor:
    """FAVOR+: return exp(w x - |x|^2 / 2) for the rows w of `features` (F, E), with x divided by
    E^(1/4), times a constant that the normaliser cancels (Choromanski et al. 2021, lemma 1). For a
    query, the constant comes from its largest feature. All keys share one constant, so that it
    leaks nothing about later keys: 1 unless a key could overflow, as
    exp(w x - |x|^2 / 2) <= exp(|w|^2 / 2)."""
    x, features = x / x.shape[-1]**0.25, features.to(x.dtype)
    projected = x @ features.mT
    if keys:
        most = features.square().sum(-1).amax() / 2
        shift = x.square().sum(-1, keepdim=True) / 2 + (most - OVERFLOW).clamp(min=0)
    else:
        shift = projected.detach().amax(-1, keepdim=True)
    return (projected - shift).exp() + EPSILON


def mapped(x: Tensor, features: Tensor | None, *, keys: bool) -> Tensor:
    """Return phi(x) in the computation's dtype. `features` (F, E): FAVOR+; None: elu + 1."""
    if features is None:
        return elu_features(wide(x))
    return positive_features(wide(x), features, keys=keys)


def _unmapped(dy: Tensor, y: Tensor, x: Tensor, features: Tensor | None, *, keys: bool) -> Tensor:
    """Return the gradient of x from the gradient of y = mapped(x, ...)."""
    if features is None:
        return dy * y.clamp(max=1)
    weights, scale = dy * (y - EPSILON), x.shape[-1]**-0.25
    dx = weights @ features.to(y.dtype)
    if keys:
        dx -= wide(x) * scale * weights.sum(-1, keepdim=True)
    return dx * scale


def unit(x: Tensor) -> Tensor:
    """Return silu(x), normalised to length 1 (Yang et al. 2024, section 3.3)."""
    y = F.silu(x)
    return y * (y.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def _not_unit(du: Tensor, u: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x from the gradient of u = unit(x)."""
    x = wide(x)
    gate = x.sigmoid()
    inverse = ((x * gate).square().sum(-1, keepdim=True) + EPSILON).rsqrt()
    dy = inverse * (du - u * (u * du).sum(-1, keepdim=True))
    return dy * gate * (1 + x * (1 - gate))


# Chunks: (B, H, T, F) <-> (B G, chunks, C tokens of each of H / G heads, F), padded by 0.

def _chunked(t: Tensor, G: int) -> Tensor:
    """Return t (B, H, T, F) as (B G, chunks, C H / G, F): the C tokens of a chunk, for each of the
    H / G heads of a group."""
    B, H, T, width = t.shape
    C, padded = chunk_of(T)
    t = F.pad(t, (0, 0, 0, padded - T)) if padded > T else t
    t = t.reshape(B * G, H // G, padded // C, C, width)
    return t.transpose(1, 2).flatten(2, 3)


def _whole(t: Tensor, like: Tensor) -> Tensor:
    """Undo `_chunked`: return t with the shape (except the last dimension) and dtype of `like`, in
    the memory layout (B, T, H, F), with heads side by side."""
    B, H, T, _ = like.shape
    C, padded = chunk_of(T)
    t = t.view(B, t.shape[0] // B, padded // C, H * B // t.shape[0], C, t.shape[-1])
    t = t.permute(0, 2, 4, 1, 3, 5).reshape(B, padded, H, t.shape[-1])[:, :T]
    return t.to(like.dtype).contiguous().transpose(1, 2)


def _past(queries: Tensor, keys: Tensor, below: int = 0) -> Tensor:
    """Return queries keys^T within each chunk, with 0 for keys after the query; with `below` 1,
    also for the query's own token."""
    C, rows = keys.shape[2], queries.shape[2]
    mask = queries.new_ones(C, C).tril_(-below)
    scores = queries @ keys.mT
    return scores.view(*scores.shape[:2], rows // C, C, C).mul_(mask).view(scores.shape)


def _before(t: Tensor) -> Tensor:
    """Return, for each chunk, the sum of t over the previous chunks (dim 1)."""
    return F.pad(t.cumsum(1), (0, 0, 0, 0, 1, 0))[:, :-1]


def _after(t: Tensor) -> Tensor:
    """Return, for each chunk, the sum of t over the following chunks (dim 1)."""
    return _before(t.flip(1)).flip(1)


# Linear attention. A 1 is appended to each value; its weighted sum is the normaliser.

def _flops(q: torch.Size, k: torch.Size, pairs: Callable[..., tuple[Pairs, ...]],
           *features: int) -> int:
    """Return the FLOPs of forward."""
    B, H, T, E = q
    return sum(2 * product.M * product.N * product.K * product.group
               for product in pairs(B, H, k[1], T, E, *features))


def _linear_flops(q: torch.Size, k: torch.Size, v: torch.Size, features: torch.Size | None,
                  **_: object) -> int:
    return _flops(q, k, linear_pairs, features[0] if features else q[3])


@operator("linear_attention(Tensor q, Tensor k, Tensor v, Tensor? features) -> (Tensor, Tensor)",
          key=EVERY_DEVICE, flops=_linear_flops)
def attend(q: Tensor, k: Tensor, v: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, E) and the normaliser (B, H, T, 1) of linear attention. A query's
    sums are those of its chunk (`_past`) plus the state before its chunk (`_before`)."""
    with in_full(q):
        G, E = k.shape[1], q.shape[-1]
        queries = _chunked(mapped(q, features, keys=False), G)
        keys = _chunked(mapped(k, features, keys=True), G)
        values = _chunked(F.pad(wide(v), (0, 1), value=1.0), G)
        sums = _past(queries, keys) @ values
        sums += queries @ _before(keys.mT @ values)
        z = _whole(sums[..., E:], wide(q[..., :1]))
        return _whole(sums[..., :E] / sums[..., E:], q), z


@operator("linear_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor? features, "
          "Tensor out, Tensor z) -> (Tensor, Tensor, Tensor)", key=EVERY_DEVICE,
          flops=lambda d_out, *given, **_: 2 * _linear_flops(*given[:4]))
def gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, features: Tensor | None,
              out: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. The states are recomputed; `d_states` is the gradient of
    what each chunk adds to the state, summed over the chunks after it."""
    with in_full(q):
        G, E, d_out = k.shape[1], q.shape[-1], wide(d_out)
        phi_q = mapped(q, features, keys=False)
        phi_k = mapped(k, features, keys=True)
        queries, keys = _chunked(phi_q, G), _chunked(phi_k, G)
        values = _chunked(F.pad(wide(v), (0, 1), value=1.0), G)
        # gradient of `sums`, since out = sums[:E] / sums[E]
        d_sums = torch.cat((d_out, -(d_out * out).sum(-1, keepdim=True)), dim=-1) / z
        d_sums = _chunked(d_sums, G)
        states, d_states = _before(keys.mT @ values), _after(queries.mT @ d_sums)
        scores, d_scores = _past(queries, keys), _past(d_sums, values)
        dv = scores.mT @ d_sums + keys @ d_states
        dq = d_scores @ keys + d_sums @ states.mT
        dk = d_scores.mT @ queries + values @ d_states.mT
        dq = _unmapped(_whole(dq, phi_q), phi_q, q, features, keys=False)
        dk = _unmapped(_whole(dk, phi_k), phi_k, k, features, keys=True)
        return dq.type_as(q), dk.type_as(k), _whole(dv[..., :E], v)


class LinearAttention(torch.autograd.Function):
    """`LinearAttention.apply(q, k, v, features)`."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, features: Tensor | None) -> Tensor:
        out, z = attend(q, k, v, features)
        ctx.save_for_backward(q, k, v, out, z)
        ctx.features = features     # a constant of the layer, so it needs no gradient
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, z = ctx.saved_tensors
        return *gradients(d_out, q, k, v, ctx.features, out, z), None


# The delta rule. `gates` (B, T, G): beta before its sigmoid.

class Chunks:
    """The intermediate results of the delta rule that forward and backward share.

    written     the value that each token writes into the state at its key
    states      the state before each chunk
    state       the state after the last chunk
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor):
        G, E = k.shape[1], q.shape[-1]
        self.unit_q, self.unit_k = unit(wide(q)), unit(wide(k))
        self.queries, self.keys = _chunked(self.unit_q, G), _chunked(self.unit_k, G)
        self.values = _chunked(wide(v), G)
        self.gate = wide(gates).sigmoid().transpose(1, 2)[..., None]
        self.beta = _chunked(self.gate, G)
        self.overlaps = _past(self.keys, self.keys, below=1)
        self.system = self.beta * self.overlaps         # the solver adds the diagonal of 1
        self.given = torch.cat((self.keys, self.values), dim=-1)
        self.solved = torch.linalg.solve_triangular(self.system, self.beta * self.given,
                                                    upper=False, unitriangular=True)
        self.reads, writes = self.solved.split(E, dim=-1)
        self.scores = _past(self.queries, self.keys)
        state = self.keys.new_zeros(len(self.keys), E, E)
        states, written = [], []
        # the values that a chunk writes depend on the state before it, so chunks run in order
        for c in range(self.keys.shape[1]):
            states.append(state)
            written.append(torch.baddbmm(writes[:, c], self.reads[:, c], state, alpha=-1))
            state = torch.baddbmm(state, self.keys[:, c].mT, written[c])
        self.state = state
        self.states = torch.stack(states, 1) if states else self.keys.new_zeros(len(state), 0, E, E)
        self.written = torch.stack(written, 1) if written else self.values


@operator("delta_attention(Tensor q, Tensor k, Tensor v, Tensor gates) -> Tensor", key=EVERY_DEVICE,
          flops=lambda q, k, *_, **__: _flops(q, k, delta_pairs))
def delta(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Return the output (B, H, T, E) of the delta rule."""
    with in_full(q):
        d = Chunks(q, k, v, gates)
        return _whole(d.scores @ d.written + d.queries @ d.states, q)


@operator("delta_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor gates) "
          "-> (Tensor, Tensor, Tensor, Tensor)", key=EVERY_DEVICE,
          flops=lambda d_out, q, k, *_, **__: 2 * _flops(q, k, delta_pairs))
def delta_gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor,
                    gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the gates. The intermediate results are recomputed."""
    with in_full(q):
        d, G, E = Chunks(q, k, v, gates), k.shape[1], q.shape[-1]
        dy = _chunked(wide(d_out), G)
        d_scores = _past(dy, d.written)
        dq, dk = d_scores @ d.keys + dy @ d.states.mT, d_scores.mT @ d.queries
        # from last chunk to first: gradients of what was written and of the state after the chunk
        d_written, d_states = d.scores.mT @ dy, d.queries.mT @ dy
        state, after = torch.zeros_like(d.states[:, :1]).squeeze(1), []
        for c in reversed(range(d.keys.shape[1])):
            after.append(state)
            d_written[:, c].baddbmm_(d.keys[:, c], state)
            state = torch.baddbmm(state + d_states[:, c], d.reads[:, c].mT, d_written[:, c],
                                  alpha=-1)
        if after:
            dk += d.written @ torch.stack(after[::-1], 1).mT
        d_solved = torch.cat((d_written @ d.states.mT.neg(), d_written), dim=-1)
        d_right = torch.linalg.solve_triangular(d.system.mT, d_solved, upper=True,
                                                unitriangular=True)
        d_system = -_past(d_right, d.solved, below=1)
        d_beta = ((d_right * d.given).sum(-1, keepdim=True)
                  + (d_system * d.overlaps).sum(-1, keepdim=True))
        d_keys, d_values = (d.beta * d_right).split(E, dim=-1)
        weighted = d.beta * d_system
        dk += d_keys + (weighted + weighted.mT) @ d.keys
        dq = _not_unit(_whole(dq, d.unit_q), d.unit_q, q).type_as(q)
        dk = _not_unit(_whole(dk, d.unit_k), d.unit_k, k).type_as(k)
        d_gate = _whole(d_beta, d.gate) * d.gate * (1 - d.gate)
        return dq, dk, _whole(d_values, v), d_gate.squeeze(-1).transpose(1, 2).to(
            gates.dtype, memory_format=torch.contiguous_format, copy=True)


class DeltaAttention(torch.autograd.Function):
    """`DeltaAttention.apply(q, k, v, gates)`."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, gates)
        return delta(q, k, v, gates)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, ...]:
        return delta_gradients(d_out, *ctx.saved_tensors)


def orthogonal_features(count: int, width: int, seed: int) -> Tensor:
    """Return (count, width) float32 rows that are normal, and orthogonal within blocks of `width`
    (Choromanski et al. 2021, section 2.4): directions from a random orthogonal matrix, lengths from
    normal vectors. The result is the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    blocks = -(-count // width)
    normal = torch.randn(2, blocks, width, width, generator=generator, device="cpu")
    directions, upper = torch.linalg.qr(normal[0])
    # multiplying by the signs of the diagonal makes the rotations uniform (Mezzadri 2007)
    directions = directions * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    rows = directions.mT * normal[1].norm(dim=-1, keepdim=True)
    return rows.flatten(0, 1)[:count].clone()


# Kinds of attention, as modules.

def _repeated(t: Tensor, heads: int) -> Tensor:
    """Return t (B, G, T, E) as (B, heads, T, E): each group's keys or values for each of its
    heads."""
    return t.repeat_interleave(heads // t.shape[1], dim=1)


class Linear(nn.Module):
    """Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236: softmax's exp(q k) is replaced
    by phi(q) phi(k), with phi = elu + 1."""

    def __init__(self, config: ModelConfig):
        super().__init__()

    def forward(self, x: Tensor) -> Tensor | None:
        return None

    @staticmethod
    def plain(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
              features: Tensor | None = None) -> Tensor:
        """sum over the past of phi(q) phi(k) v, over the sum of phi(q) phi(k)."""
        with in_full(q):
            queries = mapped(q, features, keys=False)
            keys = mapped(_repeated(k, q.shape[1]), features, keys=True)
            weights = (queries @ keys.mT).tril()
            out = weights @ wide(_repeated(v, q.shape[1])) / weights.sum(-1, keepdim=True)
            return out.type_as(q)

    @staticmethod
    def chunked(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
                features: Tensor | None = None) -> Tensor:
        return LinearAttention.apply(q, k, v, features)

    @staticmethod
    def after(k: Tensor, v: Tensor, features: Tensor | None = None) -> Tensor:
        """Return (B, G, F, E + 1): sums of phi(k) v^T, with the sum of phi(k) as last column."""
        with in_full(k):
            return mapped(k, features, keys=True).mT @ F.pad(wide(v), (0, 1), value=1.0)

    @classmethod
    def step(cls, q: Tensor, k: Tensor, v: Tensor, state: Tensor,
             features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with in_full(q):
            queries = mapped(q, features, keys=False)
            state = state + cls.after(k, v, features)
            # the heads of a group share one state
            sums = queries.view(*state.shape[:2], -1, state.shape[2]) @ state
            return (sums[..., :-1] / sums[..., -1:]).view(q.shape).type_as(q), state


class Performer(Linear):
    """Choromanski et al. 2021, https://arxiv.org/abs/2009.14794: positive orthogonal random
    features, with which phi(q) phi(k) is exp(q k / sqrt(E)) on average. They are drawn once."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        own = config.attention
        features = orthogonal_features(own.features, config.E, own.seed)
        # not in checkpoints, since the settings determine it
        self.register_buffer("features", features.to(torch.get_default_device()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.features


class Delta(nn.Module):
    """The delta rule: the state's value at a key is replaced, by a learned share beta, instead of
    added to (Schlag et al. 2021, https://arxiv.org/abs/2102.11174). q and k are silu(x) of length
    1, as in DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2406.06484), but without DeltaNet's
    convolution and output norm. There is one beta per token and key/value head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.beta = linear(config, "attention.kind.beta")

    def forward(self, x: Tensor) -> Tensor:
        """Return the gates (B, T, G) before the sigmoid."""
        return self.beta(x)

    @classmethod
    def plain(cls, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
              gates: Tensor | None = None) -> Tensor:
        """Compute token by token."""
        B, G, T, E = k.shape
        state, outs = wide(k.new_zeros(B, G, E, E)), [q[:, :, :0]]
        for t in range(T):
            at = slice(t, t + 1)
            out, state = cls.step(q[:, :, at], k[:, :, at], v[:, :, at], state, gates[:, at])
            outs.append(out)
        return torch.cat(outs, dim=2)

    @staticmethod
    def chunked(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None,
                gates: Tensor | None = None) -> Tensor:
        return DeltaAttention.apply(q, k, v, gates)

    @staticmethod
    def after(k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        """Return the state (B, G, E, E), which maps a key to its value."""
        with in_full(k):
            return Chunks(k, k, v, gates).state.unflatten(0, k.shape[:2])

    @staticmethod
    def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor,
             gates: Tensor) -> tuple[Tensor, Tensor]:
        with in_full(q):
            queries, keys = unit(wide(q)), unit(wide(k))
            beta = wide(gates).sigmoid().mT[..., None]      # (B, G, 1, 1)
            state = state + keys.mT @ (beta * (wide(v) - keys @ state))
            out = queries.view(*state.shape[:2], -1, state.shape[-1]) @ state
            return out.view(q.shape).type_as(q), state


class State(Cache):
    """A cache with one state per layer, independent of the number of tokens."""

    def __init__(self, config: ModelConfig, batch: int, tokens: int, format: CacheFormat, *,
                 dtype: torch.dtype, device: torch.device | str):
        super().__init__(config, batch, device)
        if format.bits is not None:
            raise ConfigError(f"{config.attention.name} attention keeps a state, and no keys and "
                              f"values that {format.bits} bits could hold; choose cache=same")
        kind = KINDS[config.attention.name].load()(config).to(device)
        nothing = torch.zeros(batch, config.G, 0, config.E, dtype=dtype, device=device)
        own = kind(torch.zeros(batch, 0, config.D, device=device))
        self.states = [kind.after(nothing, nothing, own).detach() for _ in range(config.L)]

    def prompt(self, layer: int, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor,
               documents: Tensor | None, own: Tensor | None) -> Tensor:
        self.states[layer].copy_(attention.kind.after(k, v, own))
        return attention.attend(q, k, v, documents, own)

    def step(self, layer: int, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor,
             own: Tensor | None) -> Tensor:
        out, state = attention.kind.step(q, k, v, self.states[layer], own)
        self.states[layer].copy_(state)
        return out

    def row(self, b: int) -> Self:
        only_row = copy.copy(self)
        only_row.lengths, only_row.states = self.lengths[b:b + 1], [s[b:b + 1] for s in self.states]
        return only_row

    def clear(self) -> None:
        super().clear()
        for state in self.states:
            state.zero_()

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)
