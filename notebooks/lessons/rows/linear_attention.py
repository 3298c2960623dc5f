"""Attention without softmax: kinds that store the past in a state of constant size.

    lpkit train cpu-3m model.attention=linear --import lessons.rows.linear_attention

`linear_attention_torch.py` has the modules and their kernels, which work in chunks of tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lpkit.predict.attention import attention_op, qkv_bytes, qkv_numbers
from lpkit.techniques.attention import KINDS, AttentionKind
from lpkit.techniques.attention_backends import ATTENTION, AttentionBackend
from lpkit.techniques.operation import FP32, Hold, MicroBatch, Op, Pairs, linear
from lpkit.techniques.row import Settings
from lpkit.values import Count, Seed

CHUNK = 64      # tokens between two states
HERE, TORCH = "lessons.rows.linear_attention:", "lessons.rows.linear_attention_torch:"


@dataclass(frozen=True, kw_only=True)
class WithoutSoftmax(Settings):
    def rule(self, T: int) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class RandomFeatures(WithoutSoftmax):
    features: Count = 256
    seed: Seed = 0


def _sums(m: Any) -> int:
    """Return the bytes of the state of one layer for one sequence: two float32 sums over the past,
    of features times values and of features."""
    return 4 * m.G * getattr(m.attention, "features", m.E) * (m.E + 1)


# Matmuls. Pairs of tokens are pairs within a chunk. For the state (F, E), each token adds two
# matmuls of F x E multiplications: one to write the state, one to read it.

def chunk_of(T: int) -> tuple[int, int]:
    """Return the number of tokens in a chunk, and in all chunks together. The last chunk is
    padded."""
    C = max(1, min(CHUNK, T))
    rest = T % C
    return C, T - rest + C if rest else T


def linear_pairs(B: int, H: int, G: int, T: int, E: int, features: int) -> tuple[Pairs, ...]:
    """Return the matmuls of linear attention in chunks. The values have an additional column of
    ones."""
    C = chunk_of(T)[0]
    return _in_each_chunk(B, T, ("scores", H, C, C, features), ("values", H, C, E + 1, C),
                          ("states", G, features, E + 1, C), ("read", H, C, E + 1, features))


def delta_pairs(B: int, H: int, G: int, T: int, E: int) -> tuple[Pairs, ...]:
    """Return the matmuls of the delta rule in chunks. Solving a triangular system counts as a
    matmul."""
    C = chunk_of(T)[0]
    return _in_each_chunk(B, T, ("scores", H, C, C, E), ("values", H, C, E, C),
                          ("overlaps", G, C, C, E), ("system", G, C, 2 * E, C),
                          ("read", H, C, E, E), ("replaced", G, C, E, E), ("states", G, E, E, C))


def _in_each_chunk(B: int, T: int, *products: tuple[str, int, int, int, int]) -> tuple[Pairs, ...]:
    """Return the Pairs of matmuls that run once per chunk. Each is given as (name, heads, M, N,
    K)."""
    C, padded = chunk_of(T)
    return tuple(Pairs(name=name, M=M, N=N, K=K, group=B * padded // C * heads)
                 for name, heads, M, N, K in products)


# Saved bytes, moved bytes and FLOPs of a micro-batch

def _in_chunks(s: MicroBatch, *, pairs: tuple[Pairs, ...], moves: int, work: float,
               **facts: Any) -> Op:
    """Return an operation that saves its inputs for backward and computes in float32. Forward moves
    `moves` elements per token; backward holds at most `work` elements at once, including the
    gradients."""
    padded = chunk_of(s.model.T)[1]
    op = attention_op(s, work=FP32 * work, pairs=pairs, score_passes=(4, 8), **facts)
    return replace(op, moved_bytes=op.moved_bytes + qkv_bytes(s) + s.batch * padded * moves * FP32)


def linear_chunks(s: MicroBatch) -> Op:
    """Return the operation of linear attention in chunks. It saves q, k, v, the output, and a
    float32 normaliser per query, which is the weighted sum of a column of ones appended to the
    values. Backward's peak is at the moment when the gradient of q or of k passes through its
    feature map."""
    m, T, (C, padded) = s.model, s.model.T, chunk_of(s.model.T)
    F, drawn = getattr(m.attention, "features", m.E), hasattr(m.attention, "features")
    keys = padded * (T != padded or (s.batch > 1 and not drawn))    # else a view; same for q
    queries = padded if m.G < m.H else keys
    last = [max(F, drawn * wide * m.E) for wide in (2, 3)]      # FAVOR+'s backward has a product
    # `common`: elements per sequence that are alive at both moments: features of q and k, values,
    # gradients of the sums, keys and values, scores and states with their gradients
    common = m.H * queries * F + m.G * keys * F + padded * (m.G * F + (m.H + 2 * m.G) * (m.E + 1))
    common += 2 * m.H * padded * C + m.G * (2 * padded / C + 1) * F * (m.E + 1)
    common += (s.compute_bytes < FP32) * m.H * T * m.E
    through_q = m.H * (padded * F + T * (3 * F + last[0])) + m.G * T * F
    through_k = m.H * T * (F + m.E) + m.G * T * (3 * F + last[1])
    return _in_chunks(s, pairs=linear_pairs(s.batch, m.H, m.G, T, m.E, F),
                      moves=(m.H + m.G) * (4 * F + m.E),
                      work=s.batch * (common + max(through_q, through_k)),
                      numbers=m.H * m.E, saved=s.tokens * m.H * FP32,
                      saves_result=True, backward_pairs=2.5)


def delta_chunks(s: MicroBatch) -> Op:
    """Return the operation of the delta rule in chunks: a triangular system in each chunk, then one
    state after the other. It saves q, k, v and the gates. Backward's peak is at the moment when the
    gradient of q passes through its normalisation, or earlier, when the gradient of k is summed."""
    m, T, (C, padded) = s.model, s.model.T, chunk_of(s.model.T)
    narrow = s.compute_bytes < FP32
    shared = (s.batch == 1 and T == padded) * (2 - narrow) * (m.G + m.H * (m.G == m.H))    # views
    common = T * (m.H + m.G) * m.E + padded * (3 * m.H + 15 * m.G - shared) * m.E
    common += padded * (2 * m.H + 4 * m.G) * C + m.G * m.E**2 * (3 * padded / C + 1)
    common += padded * 5 * m.G                                  # gates
    most = max(T * (6 + narrow) * m.H * m.E, padded * m.G * (m.E + C))
    return _in_chunks(s, pairs=delta_pairs(s.batch, m.H, m.G, T, m.E),
                      moves=(4 * m.H + 11 * m.G) * m.E, work=s.batch * (common + most),
                      saved=0, gates=m.G, backward_pairs=2.75)


def quadratic(s: MicroBatch) -> Op:
    """Return the operation of linear attention by its definition: the features, and the weights of
    all pairs of tokens, in float32."""
    m = s.model
    features = getattr(m.attention, "features", m.E)
    pairs = s.batch * m.H * m.T * m.T * FP32
    mapped = 4 * s.tokens * m.H * (features + m.E) * FP32
    given = s.tokens * m.H * m.E * s.compute_bytes
    return attention_op(s, saved=pairs + mapped, out=3 * given, work=2 * pairs + mapped,
                        score_passes=(6, 8), features=features)


def delta_steps(s: MicroBatch) -> Op:
    """Return the operation of the delta rule, token by token. Each token's new state is saved in
    float32."""
    m = s.model
    states = s.tokens * m.G * m.E * m.E * FP32
    mapped = 2 * s.tokens * qkv_numbers(m) * FP32
    return attention_op(s, saved=states + mapped, gates=m.G, work=qkv_bytes(s), score_passes=(5, 8),
                        pairs=(
                            Pairs(name="states", M=m.T * m.E, N=m.E, K=1, group=s.batch * m.G),
                            Pairs(name="replaced", M=m.T, N=m.E, K=m.E, group=s.batch * m.G),
                            Pairs(name="read", M=m.T, N=m.E, K=m.E, group=s.batch * m.H)))


def delta_gates(s: MicroBatch) -> Iterator[Op]:
    """Yield the operations of the gates: one gate per token and key/value head, computed by a
    Linear from the input of q, k and v."""
    m, wide = s.model, s.tokens * s.model.D * s.residual_bytes
    # backward adds the gradient of the input that comes from the gates to the gradient that comes
    # from q, k and v
    yield Op(name="attention.kind", part="", backward=(Hold(grows=-wide),))
    yield linear("attention.kind.beta", s, m.D, m.G, cut="column", bias=m.bias,
                 input_is_saved=not s.mixed)

SUMS = {"cache": TORCH + "State", "state_bytes": _sums, "operations": {
    "plain": HERE + "quadratic", "chunked": HERE + "linear_chunks"}}
KINDS["linear"] = AttentionKind(
    why="exp(q k) becomes phi(q) phi(k), phi = elu + 1: the past is a sum",
    settings=WithoutSoftmax(), implementation=TORCH + "Linear",
    **SUMS, source="Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236")
KINDS["performer"] = AttentionKind(
    why="as linear, with random features whose products are softmax's weights in the mean",
    settings=RandomFeatures(), implementation=TORCH + "Performer",
    **SUMS, source="Choromanski et al. 2021, https://arxiv.org/abs/2009.14794")
KINDS["delta"] = AttentionKind(
    why="a state from keys to values, where each token replaces a learned share of its key's",
    settings=WithoutSoftmax(), implementation=TORCH + "Delta",
    cache=TORCH + "State", state_bytes=lambda m: 4 * m.G * m.E * m.E,
    operations={"plain": HERE + "delta_steps", "chunked": HERE + "delta_chunks"},
    products=HERE + "delta_gates",
    source="Schlag et al. 2021, https://arxiv.org/abs/2102.11174; Yang et al. 2024, "
           "https://arxiv.org/abs/2406.06484")
ATTENTION["chunked"] = AttentionBackend(
    why="chunks of tokens and a state between them, for kinds without softmax",
    operations=HERE + "linear_chunks",
    why_not=lambda asked: "computes only kinds without softmax; plain can")
