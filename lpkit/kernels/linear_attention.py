"""Causal attention without softmax in time linear in T: chunks of tokens, and a state between them.

    linear attention    S += phi(k) v^T,  z += phi(k),  out = phi(q) S / phi(q) z
    the delta rule      S += beta k (v - k S)^T,        out = q S

The state S of a head, (F, E), is known at the start of each chunk; inside it the products are over
pairs of its tokens. The delta rule's chunk is a triangular system, solved for what each token
writes (the WY form; Yang et al. 2024, https://arxiv.org/abs/2406.06484, section 3). Backward
keeps q, k, v and the gates, and makes the states again.

Shapes: q (B, H, T, E), k and v (B, G, T, E), any T; the H / G heads of a group share keys and
values, and so the state. In 16 bits everything inside is float32. FLOPs are counted for whole
chunks and without what backward does again, as `attention_backends` does.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from lpkit.kernels.kernel import wide
from lpkit.kernels.operator import EVERY_DEVICE, operator
from lpkit.techniques.attention_backends import chunk_of, delta_pairs, linear_pairs
from lpkit.techniques.operation import Pairs

EPSILON = 1e-6      # of FAVOR+'s features, and of squared lengths
OVERFLOW = 64.0     # e^64 times a million tokens is a float32 still


def in_full(t: Tensor) -> AbstractContextManager:
    """A context without autocast, which the meta device has none of."""
    kind = t.device.type
    return torch.autocast(kind if torch.amp.is_autocast_available(kind) else "cpu", enabled=False)


# Feature maps (..., E) -> (..., F) in the input's dtype, and their gradients by hand.

def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1 (Katharopoulos et al. 2020, equation 7)."""
    return x.clamp(max=0).exp() + x.relu()      # small where elu(x) is rounded to -1


def positive_features(x: Tensor, features: Tensor, *, keys: bool) -> Tensor:
    """FAVOR+: exp(w x - |x|^2 / 2) for the rows w of `features` (F, E), x divided by E^(1/4); times
    any constant, which the normaliser cancels (Choromanski et al. 2021, lemma 1). A query's is by
    its own largest feature. The keys' is the same for all, so that none looks at a later one: 1,
    unless some key could overflow, as exp(w x - |x|^2 / 2) <= exp(|w|^2 / 2)."""
    x, features = x / x.shape[-1]**0.25, features.to(x.dtype)
    projected = x @ features.mT
    if keys:
        most = features.square().sum(-1).amax() / 2
        shift = x.square().sum(-1, keepdim=True) / 2 + (most - OVERFLOW).clamp(min=0)
    else:
        shift = projected.detach().amax(-1, keepdim=True)
    return (projected - shift).exp() + EPSILON


def mapped(x: Tensor, features: Tensor | None, *, keys: bool) -> Tensor:
    """phi(x), in the dtype of the computation. `features` (F, E): FAVOR+; None: elu + 1."""
    if features is None:
        return elu_features(wide(x))
    return positive_features(wide(x), features, keys=keys)


def _unmapped(dy: Tensor, y: Tensor, x: Tensor, features: Tensor | None, *, keys: bool) -> Tensor:
    """The gradient of x, from that of y = mapped(x, ...)."""
    if features is None:
        return dy * y.clamp(max=1)
    weights, scale = dy * (y - EPSILON), x.shape[-1]**-0.25
    dx = weights @ features.to(y.dtype)
    if keys:
        dx -= wide(x) * scale * weights.sum(-1, keepdim=True)
    return dx * scale


def unit(x: Tensor) -> Tensor:
    """silu(x), of length 1 (Yang et al. 2024, section 3.3)."""
    y = F.silu(x)
    return y * (y.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def _not_unit(du: Tensor, u: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, from that of u = unit(x)."""
    x = wide(x)
    gate = x.sigmoid()
    inverse = ((x * gate).square().sum(-1, keepdim=True) + EPSILON).rsqrt()
    dy = inverse * (du - u * (u * du).sum(-1, keepdim=True))
    return dy * gate * (1 + x * (1 - gate))


# Chunks: (B, H, T, F) <-> (B G, chunks, H / G of them C tokens each, F); the last is padded by 0.

def _chunked(t: Tensor, G: int) -> Tensor:
    B, H, T, width = t.shape
    C, padded = chunk_of(T)
    t = F.pad(t, (0, 0, 0, padded - T)) if padded > T else t
    t = t.reshape(B * G, H // G, padded // C, C, width)
    return t.transpose(1, 2).flatten(2, 3)


def _whole(t: Tensor, like: Tensor) -> Tensor:
    """t in the shape and dtype of `like` but for the last dimension, and laid out as (B, T, H, F):
    heads side by side."""
    B, H, T, _ = like.shape
    C, padded = chunk_of(T)
    t = t.view(B, t.shape[0] // B, padded // C, H * B // t.shape[0], C, t.shape[-1])
    t = t.permute(0, 2, 4, 1, 3, 5).reshape(B, padded, H, t.shape[-1])[:, :T]
    return t.to(like.dtype).contiguous().transpose(1, 2)


def _past(queries: Tensor, keys: Tensor, below: int = 0) -> Tensor:
    """queries keys^T without the future; with `below` 1, without the token itself too."""
    C, rows = keys.shape[2], queries.shape[2]
    mask = queries.new_ones(C, C).tril_(-below)
    scores = queries @ keys.mT
    return scores.view(*scores.shape[:2], rows // C, C, C).mul_(mask).view(scores.shape)


def _before(t: Tensor) -> Tensor:
    """The sum over the chunks before."""
    return F.pad(t.cumsum(1), (0, 0, 0, 0, 1, 0))[:, :-1]


def _after(t: Tensor) -> Tensor:
    return _before(t.flip(1)).flip(1)


# Linear attention. Each value has a 1 beside it, whose sum is the normaliser.

def _flops(q: torch.Size, k: torch.Size, pairs: Callable[..., tuple[Pairs, ...]],
           *features: int) -> int:
    """FLOPs of forward."""
    B, H, T, E = q
    products = pairs(B, H, k[1], T, E, *features)
    return sum(2 * one.M * one.N * one.K * one.group for one in products)


def _linear_flops(q: torch.Size, k: torch.Size, v: torch.Size, features: torch.Size | None,
                  **_: object) -> int:
    return _flops(q, k, linear_pairs, features[0] if features else q[3])


@operator("linear_attention(Tensor q, Tensor k, Tensor v, Tensor? features) -> (Tensor, Tensor)",
          key=EVERY_DEVICE, flops=_linear_flops)
def attend(q: Tensor, k: Tensor, v: Tensor, features: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output, and the normaliser (B, H, T, 1)."""
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
    with in_full(q):
        G, E, d_out = k.shape[1], q.shape[-1], wide(d_out)
        phi_q = mapped(q, features, keys=False)
        phi_k = mapped(k, features, keys=True)
        queries, keys = _chunked(phi_q, G), _chunked(phi_k, G)
        values = _chunked(F.pad(wide(v), (0, 1), value=1.0), G)
        # of sums: out = sums[:E] / sums[E]
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
        ctx.features = features     # of a layer, and not of this call
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, z = ctx.saved_tensors
        return *gradients(d_out, q, k, v, ctx.features, out, z), None


# The delta rule. `gates` (B, T, G): beta before its sigmoid.

class Chunks:
    """The parts that forward and backward share. `written` is what each token writes into the state
    at its key, `states` the state before each chunk, `state` that after all."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor):
        G, E = k.shape[1], q.shape[-1]
        self.unit_q, self.unit_k = unit(wide(q)), unit(wide(k))
        self.queries, self.keys = _chunked(self.unit_q, G), _chunked(self.unit_k, G)
        self.values = _chunked(wide(v), G)
        self.gate = wide(gates).sigmoid().transpose(1, 2)[..., None]
        self.beta = _chunked(self.gate, G)
        self.overlaps = _past(self.keys, self.keys, below=1)
        self.system = self.beta * self.overlaps         # and 1 on the diagonal
        self.given = torch.cat((self.keys, self.values), dim=-1)
        self.solved = torch.linalg.solve_triangular(self.system, self.beta * self.given,
                                                    upper=False, unitriangular=True)
        self.reads, writes = self.solved.split(E, dim=-1)
        self.scores = _past(self.queries, self.keys)
        state = self.keys.new_zeros(len(self.keys), E, E)
        states, written = [], []
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
    with in_full(q):
        d = Chunks(q, k, v, gates)
        return _whole(d.scores @ d.written + d.queries @ d.states, q)


@operator("delta_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor gates) "
          "-> (Tensor, Tensor, Tensor, Tensor)", key=EVERY_DEVICE,
          flops=lambda d_out, q, k, *_, **__: 2 * _flops(q, k, delta_pairs))
def delta_gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor,
                    gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with in_full(q):
        d, G, E = Chunks(q, k, v, gates), k.shape[1], q.shape[-1]
        dy = _chunked(wide(d_out), G)
        d_scores = _past(dy, d.written)
        dq, dk = d_scores @ d.keys + dy @ d.states.mT, d_scores.mT @ d.queries
        # from the last chunk to the first: of what was written, and of the state after the chunk
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
    """(count, width) float32: rows normal, orthogonal in blocks of `width` (Choromanski et al.
    2021, section 2.4): directions of a random orthogonal matrix, lengths of normal vectors. The
    same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    blocks = -(-count // width)
    normal = torch.randn(2, blocks, width, width, generator=generator, device="cpu")
    directions, upper = torch.linalg.qr(normal[0])
    # uniform over the rotations, where the signs are those of the diagonal (Mezzadri 2007)
    directions = directions * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    rows = directions.mT * normal[1].norm(dim=-1, keepdim=True)
    return rows.flatten(0, 1)[:count].clone()
