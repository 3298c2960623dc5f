"""A Transformer as a list of operations. Its parameters, FLOPs and bytes are sums over this list.

    one block, pre-norm             saves for backward              D: width, F: MLP width

    norm1       D -> D              its input, 1 or 2 numbers a token
    attention   D -> D              see lpkit.predict.attention
    add1        stream + result     nothing
    norm2       D -> D              its input, 1 or 2 numbers a token
    mlp.up      D -> F  (Linear)    its input
    mlp         F -> F  (gelu)      its input
    mlp.down    F -> D  (Linear)    its input
    add2        stream + result     nothing

An `Op` (`lpkit.techniques.operation`) describes one operation: its parameters, saved bytes, moved
bytes, and `backward`, a tuple of Holds. A Hold (nbytes, frees, grows) is one moment of the backward
of an operation: `nbytes` are allocated; then the share `frees` of the operation's saved bytes is
freed; and the bytes of gradients that wait for the next operation change by `grows`.

Example: gelu with 4 tokens and F = 8 in float32 saves its input, 4 * 8 * 4 = 128 bytes. Its
backward is Hold(nbytes=128, frees=1.0): the gradient of the input is allocated (128 bytes), then
the saved input is freed (128 bytes). Afterwards the gradient of the input waits instead of the
gradient of the output, which has the same size, so `grows` is 0.

`lpkit.predict` sums over the list (`params`, `flops`, `activations`, `walk`). To add a norm, MLP or
block, add a row here, and the module that the row names.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

from lpkit.techniques.adapters import ADAPTERS
from lpkit.techniques.attention import OPERATIONS
from lpkit.techniques.operation import FP32, POSITIONS, TOKEN_ID, Hold, Kind, MicroBatch, Op, linear

# Norms and additions.

def layernorm(name: str, s: MicroBatch, *, residual: bool) -> Op:
    """Return LayerNorm as an operation. It saves its input (B, T, D), and for each token the mean
    and the reciprocal standard deviation."""
    m, stream = s.model, s.stream_bytes
    return _norm(name, s, params=m.D * (1 + m.bias), saved=stream + 2 * s.tokens * s.residual_bytes,
                 backward=(Hold(nbytes=stream, frees=1.0),), residual=residual)


def rmsnorm(name: str, s: MicroBatch, *, residual: bool) -> Op:
    """Return RMSNorm as an operation. On a GPU it is one kernel, which saves its input (B, T, D)
    and a number for each token. On a CPU it is several operations in float32, which save two
    float32 tensors of the input's shape: one for the gradient of the gain (not if the gain is
    frozen), and one for the gradient of the input."""
    stream, wide = s.stream_bytes, s.tokens * s.model.D * FP32
    if s.kind == "gpu" and not s.norms_written_out:
        return _norm(name, s, params=s.model.D, saved=stream + s.tokens * FP32,
                     backward=(Hold(nbytes=stream, frees=1.0),), residual=residual)

    def written_out(gain: bool) -> Op:
        # `wide`: bytes of (B, T, D) in float32. Backward computes the gradient of the gain first
        # (first Hold), then the gradient of the input (second Hold).
        saved = (1 + gain) * wide + s.tokens * FP32
        backward = (Hold(nbytes=(1 + gain) * wide, frees=gain * wide / saved),
                    Hold(nbytes=(3 if residual else 4) * wide, frees=1 - gain * wide / saved))
        return _norm(name, s, params=s.model.D, saved=saved, backward=backward, residual=residual)

    return replace(written_out(True), if_frozen=written_out(False))


def no_norm(name: str, s: MicroBatch, *, residual: bool) -> Op:
    """Return an operation without a norm. In backward, the gradient of the branch is still added to
    the gradient of the residual stream."""
    return replace(_norm(name, s, params=0, saved=0, backward=(), residual=residual), moved_bytes=0)


def _norm(name: str, s: MicroBatch, *, params: int, saved: float, backward: tuple[Hold, ...],
          residual: bool) -> Op:
    """Return a norm as an operation.

    params, saved, backward: as in `Op`, for this kind of norm
    residual: the residual stream bypasses the norm. Then backward ends with an addition: the
              gradient of the norm's input to the gradient of the stream

    It reads its input and writes its result. Under autocast, the result is read once more and
    written in 16 bits."""
    cast = s.residual_bytes + s.compute_bytes if s.mixed else 0
    added = (Hold(nbytes=s.stream_bytes, grows=-s.stream_bytes),) if residual else ()
    return Op(name=name, part="norms", params=params, shape=(s.model.D,), saved_bytes=saved,
              saved_itemsize=s.residual_bytes, backward=(*backward, *added, Hold()), in_stream=True,
              moved_bytes=s.tokens * s.model.D * (2 * s.residual_bytes + cast))


def residual_add(name: str, s: MicroBatch) -> Op:
    """Return the addition of a branch's result to the residual stream. Under autocast, backward
    casts the gradient of the stream to 16 bits, for the Linear whose result was added."""
    numbers = s.tokens * s.model.D
    return Op(name=name, part="", in_stream=True,
              moved_bytes=numbers * (2 * s.residual_bytes + s.compute_bytes),
              backward=(Hold(grows=numbers * s.compute_bytes),) if s.mixed else ())


# MLPs. Each begins and ends with one Linear.

MLP_READS = ("mlp.up", "mlp.gate_up")


def gelu_mlp(s: MicroBatch) -> Iterator[Op]:
    """Yield the operations of down(gelu(up(x))). `wide`: bytes of (B, T, F)."""
    m, wide = s.model, s.tokens * s.model.F * s.compute_bytes
    yield linear("mlp.up", s, m.D, m.F, cut="column", bias=m.bias)
    yield Op(name="mlp", part="mlp", saved_bytes=wide, saved_itemsize=s.compute_bytes,
             moved_bytes=2 * wide, backward=(Hold(nbytes=wide, frees=1.0),))
    yield linear("mlp.down", s, m.F, m.D, cut="row", bias=m.bias)


def swiglu_mlp(s: MicroBatch) -> Iterator[Op]:
    """Yield the operations of down(silu(gate(x)) * up(x)). `wide`: bytes of (B, T, F). It saves
    gate(x) and up(x), which are one tensor (B, T, 2 F), and silu(gate(x))."""
    m, wide = s.model, s.tokens * s.model.F * s.compute_bytes
    # `kept`: saved tensors of `wide` bytes. The fused kernel computes silu(gate(x)) again.
    kept = 2 if s.saves_inputs else 3
    yield linear("mlp.gate_up", s, m.D, 2 * m.F, cut="column", bias=m.bias)
    backward = (
        # gradients of silu(gate(x)) and of up(x); then silu(gate(x)) is freed
        Hold(nbytes=2 * wide, frees=(kept - 2) / kept, grows=wide),
        # gradient of gate(x); then gate(x) and up(x) are freed
        Hold(nbytes=wide, frees=2 / kept),
        # the gradients of gate(x) and up(x) are copied into one tensor (B, T, 2 F)
        Hold(nbytes=2 * wide))
    yield Op(name="mlp", part="mlp", saved_bytes=kept * wide, saved_itemsize=s.compute_bytes,
             moved_bytes=5 * wide, backward=backward)
    yield linear("mlp.down", s, m.F, m.D, cut="row", bias=m.bias)


# Blocks, and the whole model.

def pre_norm(s: MicroBatch) -> Iterator[Op]:
    norm = NORMS[s.model.norm].operations
    yield norm("norm1", s, residual=True)
    yield from resolve_name(OPERATIONS + "attention")(s)
    yield residual_add("add1", s)
    yield norm("norm2", s, residual=True)
    yield from MLPS[s.model.mlp].operations(s)
    yield residual_add("add2", s)


def parallel(s: MicroBatch) -> Iterator[Op]:
    """Yield the operations of a block whose attention and MLP read the result of the same norm."""
    ops = {op.name: op for op in pre_norm(s)}
    yield ops.pop("norm1")
    del ops["norm2"]
    yield from reading_one(s, ops.values())


def reading_one(s: MicroBatch, ops: Iterable[Op]) -> Iterator[Op]:
    """Yield the `ops` of two branches (attention and MLP) that read the same result of a norm. In
    backward, the gradients of both branches are added. If no branch casts the result, both save the
    same tensor, which is counted only for attention."""
    yield Op(name="branches", part="", in_stream=True, backward=(Hold(grows=-s.stream_bytes),))
    once = not s.mixed and s.operand_bytes is None
    for op in ops:
        yield replace(op, saved_bytes=0) if once and op.name in MLP_READS else op


NORMS: dict[str, Kind] = {
    "layernorm": Kind(operations=layernorm, why="(x - mean) / standard deviation of each token",
                      implementation="lpkit.nn.layers:layernorm"),
    "rmsnorm": Kind(operations=rmsnorm, why="x / root mean square of each token",
                    implementation="lpkit.nn.layers:rmsnorm"),
    "none": Kind(operations=no_norm, why="no norm: attention and MLP read the residual stream",
                 implementation="torch.nn:Identity"),
}
MLPS: dict[str, Kind] = {
    "gelu": Kind(operations=gelu_mlp, why="down(gelu(up(x)))",
                 implementation="lpkit.nn.mlps:GeluMLP"),
    "swiglu": Kind(operations=swiglu_mlp, why="down(silu(gate(x)) * up(x))",
                   implementation="lpkit.nn.mlps:SwigluMLP",
                   source="Shazeer 2020, https://arxiv.org/abs/2002.05202"),
}


@dataclass(frozen=True, kw_only=True)
class BlockRow(Kind):
    """A row of BLOCKS.

    refuses: f(model) -> why a model cannot have this block, and the way out; "": it can
    uncut:   why the block cannot be divided over ranks by heads or tokens; "": it can
    """

    refuses: Callable[[Any], str] = lambda m: ""
    uncut: str = ""


BLOCKS: dict[str, Kind] = {
    "pre-norm": BlockRow(operations=pre_norm,
                         why="a norm before attention and before the MLP; their "
                         "results are added to the residual stream",
                         implementation="lpkit.nn.transformer:Block",
                         source="Xiong et al. 2020, https://arxiv.org/abs/2002.04745"),
    "parallel": BlockRow(operations=parallel, implementation="lpkit.nn.transformer:Parallel",
                         why="attention and MLP read the same norm; their results are both added",
                         source="Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, "
                                "section 2"),
}


# The rows of `model.changes`. A config can name several; they are applied in order.
# `operations(ops, s, settings)` returns the changed operations. The implementation is
# f(model, settings), which changes the model in place after the initialisation. Other packages can
# add rows (docs/own_technique.md).
MODEL_CHANGES: dict[str, Kind] = {**ADAPTERS}


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of a model, in the order of forward. `block` is one of L equal blocks."""

    embed: Op
    positions: Op
    block: tuple[Op, ...]
    norm: Op
    head: Op
    loss: Op
    prompt: Op = Op(name="prompt", part="prompt")

    @property
    def outside(self) -> tuple[Op, ...]:
        """The operations outside the blocks that can have parameters."""
        return self.embed, self.prompt, self.positions, self.norm, self.head

    @functools.cached_property
    def stream_share(self) -> float:
        """The length of the residual stream in the blocks, divided by the length of the text."""
        return max(1.0, self.block[0].tokens_share)

    @functools.cached_property
    def linears(self) -> tuple[Op, ...]:
        """The Linears of one block."""
        return tuple(op for op in self.block if op.matmul)

    @functools.cached_property
    def linear_weights(self) -> float:
        """Number of weights in the matrices of one block. A matrix that is shared with another
        block is not counted again, and matrices that are stored as codes are not counted."""
        return sum(op.weights * op.own for op in self.linears if not op.stored_bytes)

    @functools.cached_property
    def trained_weights(self) -> float:
        """Number of trained weights in the matrices of one block. A matrix that is shared with
        another block is not counted again."""
        return sum(op.weights * op.own for op in self.linears if op.trained)

    @functools.cached_property
    def small(self) -> tuple[float, float]:
        """Numbers of trained gains and biases of one block: (those that tensor parallelism cuts, in
        column layers; those that every rank has)."""
        trained = [op for op in self.block if op.trained]
        cut = sum([(op.params - op.weights) * op.own for op in trained if op.cut == "column"])
        return cut, sum([(op.params - op.weights) * op.own for op in trained]) - cut

    @functools.cached_property
    def result_bytes(self) -> int:
        """The bytes of the results of one block's operations."""
        return sum(op.result_bytes for op in self.block)

    @functools.cached_property
    def saved(self) -> Mapping[str, float]:
        """Saved bytes of one block, by operation."""
        return {op.name: op.saved_bytes for op in self.block if op.saved_bytes}


@functools.lru_cache(maxsize=1024)
def operations(s: MicroBatch) -> Operations:
    """Return the operations of the model `s.model` for the micro-batch `s`."""
    m, N = s.model, s.tokens
    # Bytes that the loss moves per logit: float32 logits are read, float32 log-probabilities are
    # written; under autocast, 16-bit logits are first read and cast to float32.
    logits = 2 * FP32 + (s.compute_bytes + FP32 if s.compute_bytes < FP32 else 0)
    ops = Operations(
        # 5 moves of (B, T, D): read rows of the table, write embeddings; read embeddings, read
        # positions, write their sum
        embed=Op(name="embed", part="embedding", params=m.V * m.D, shape=(m.V, m.D),
                 saved_bytes=N * TOKEN_ID, moved_bytes=5 * N * m.D * s.residual_bytes),
        positions=POSITIONS[m.position].operations(s),
        block=tuple(BLOCKS[m.block].formula(s)),
        norm=NORMS[m.norm].operations("norm", s, residual=False),
        head=Op(name="head", part="head", params=0 if m.tied else m.V * m.D, matmul=(m.D, m.V),
                cut="column", reads_residual=True,
                saved_bytes=N * m.D * (s.compute_bytes if s.head_bytes is None else s.head_bytes),
                saved_itemsize=s.compute_bytes),
        # saves: float32 log-probabilities (B, T, V), targets (B, T), number of targets that count
        loss=Op(name="loss", part="", saved_bytes=N * m.V * FP32 + N * TOKEN_ID + FP32,
                moved_bytes=N * m.V * logits))
    for change in m.changes:
        ops = MODEL_CHANGES[change.name].formula(ops, s, change)
    if m.shares:
        # selects the tokens that enter a block, and joins the block's result with the other tokens
        around = Op(name="around", part="", in_stream=True,
                    moved_bytes=4 * s.stream_bytes * (1 - sum(m.shares) / len(m.shares)))
        ops = replace(ops, block=(around, *(op.seeing(*m.shares) for op in ops.block)))
    return ops
