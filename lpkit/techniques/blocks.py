"""A transformer as a list of operations, written once: everything about its size is a sum over it.

`lpkit.predict` folds the list (`params`, `flops`, `activations`, `walk`). A new norm, MLP or block
is one more row here, and a module that its row names; nothing else changes.
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
    """Saves its input, and a mean and a deviation of each token."""
    m, stream = s.model, s.stream_bytes
    return _norm(name, s, params=m.D * (1 + m.bias), saved=stream + 2 * s.tokens * s.residual_bytes,
                 backward=(Hold(nbytes=stream, frees=1.0),), residual=residual)


def rmsnorm(name: str, s: MicroBatch, *, residual: bool) -> Op:
    """One kernel on a GPU; written out, as on a CPU, several in float32 that save two of its size,
    one of them for the gradient of its gain."""
    stream, wide = s.stream_bytes, s.tokens * s.model.D * FP32
    if s.kind == "gpu" and not s.norms_written_out:
        return _norm(name, s, params=s.model.D, saved=stream + s.tokens * FP32,
                     backward=(Hold(nbytes=stream, frees=1.0),), residual=residual)

    def written_out(gain: bool) -> Op:
        saved = (1 + gain) * wide + s.tokens * FP32
        backward = (Hold(nbytes=(1 + gain) * wide, frees=gain * wide / saved),
                    Hold(nbytes=(3 if residual else 4) * wide, frees=1 - gain * wide / saved))
        return _norm(name, s, params=s.model.D, saved=saved, backward=backward, residual=residual)

    return replace(written_out(True), if_frozen=written_out(False))


def no_norm(name: str, s: MicroBatch, *, residual: bool) -> Op:
    """The gradients of who reads the stream are added all the same."""
    return replace(_norm(name, s, params=0, saved=0, backward=(), residual=residual), moved_bytes=0)


def _norm(name: str, s: MicroBatch, *, params: int, saved: float, backward: tuple[Hold, ...],
          residual: bool) -> Op:
    """Reads and writes, once more for the cast of its result. At the end of backward, the gradient
    of its input is added to that of the residual stream, which went round the norm."""
    cast = s.residual_bytes + s.compute_bytes if s.mixed else 0
    added = (Hold(nbytes=s.stream_bytes, grows=-s.stream_bytes),) if residual else ()
    return Op(name=name, part="norms", params=params, shape=(s.model.D,), saved_bytes=saved,
              saved_itemsize=s.residual_bytes, backward=(*backward, *added, Hold()), in_stream=True,
              moved_bytes=s.tokens * s.model.D * (2 * s.residual_bytes + cast))


def residual_add(name: str, s: MicroBatch) -> Op:
    """Backward: the gradient is cast for the product that gave the addend."""
    numbers = s.tokens * s.model.D
    return Op(name=name, part="", in_stream=True,
              moved_bytes=numbers * (2 * s.residual_bytes + s.compute_bytes),
              backward=(Hold(grows=numbers * s.compute_bytes),) if s.mixed else ())


# MLPs. Each begins with one product and ends with one.

MLP_READS = ("mlp.up", "mlp.gate_up")


def gelu_mlp(s: MicroBatch) -> Iterator[Op]:
    m, wide = s.model, s.tokens * s.model.F * s.compute_bytes
    yield linear("mlp.up", s, m.D, m.F, cut="column", bias=m.bias)
    yield Op(name="mlp", part="mlp", saved_bytes=wide, saved_itemsize=s.compute_bytes,
             moved_bytes=2 * wide, backward=(Hold(nbytes=wide, frees=1.0),))
    yield linear("mlp.down", s, m.F, m.D, cut="row", bias=m.bias)


def swiglu_mlp(s: MicroBatch) -> Iterator[Op]:
    """down(silu(gate(x)) * up(x)): saves gate and up side by side, and silu(gate)."""
    m, wide = s.model, s.tokens * s.model.F * s.compute_bytes
    kept = 2 if s.saves_inputs else 3       # one kernel computes silu(gate) again in backward
    yield linear("mlp.gate_up", s, m.D, 2 * m.F, cut="column", bias=m.bias)
    backward = (
        Hold(nbytes=2 * wide, frees=(kept - 2) / kept, grows=wide),     # of silu(gate) and of up
        Hold(nbytes=wide, frees=2 / kept),
        Hold(nbytes=2 * wide))                              # side by side again
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
    """Attention and MLP read one norm."""
    ops = {op.name: op for op in pre_norm(s)}
    yield ops.pop("norm1")
    del ops["norm2"]
    yield from reading_one(s, ops.values())


def reading_one(s: MicroBatch, ops: Iterable[Op]) -> Iterator[Op]:
    """Two branches that read one result: what neither casts is saved once. Their gradients meet."""
    yield Op(name="branches", part="", in_stream=True, backward=(Hold(grows=-s.stream_bytes),))
    once = not s.mixed and s.operand_bytes is None
    for op in ops:
        yield replace(op, saved_bytes=0) if once and op.name in MLP_READS else op


NORMS: dict[str, Kind] = {
    "layernorm": Kind(operations=layernorm, why="a token less its mean, over its deviation",
                      implementation="lpkit.nn.layers:layernorm"),
    "rmsnorm": Kind(operations=rmsnorm, why="a token over the root of its mean square",
                    implementation="lpkit.nn.layers:rmsnorm"),
    "none": Kind(operations=no_norm, why="the stream as it is",
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
class Block(Kind):
    """A row of BLOCKS. `refuses(model)`: why it cannot be of it, and the way out. `uncut`: why a
    rank cannot have a part of its heads or tokens."""

    refuses: Callable[[Any], str] = lambda m: ""
    uncut: str = ""


BLOCKS: dict[str, Kind] = {
    "pre-norm": Block(operations=pre_norm, why="a norm before attention and before the MLP, whose "
                      "results are added", implementation="lpkit.nn.transformer:Block",
                      source="Xiong et al. 2020, https://arxiv.org/abs/2002.04745"),
    "parallel": Block(operations=parallel, implementation="lpkit.nn.transformer:Parallel",
                      why="attention and MLP read one norm, and both are added",
                      source="Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 2"),
}


# Changes of the model, in the order named by `model.changes`: `operations(ops, s, settings) -> ops`
# folds the description, and the implementation is f(model, settings), in place, once the model is
# initialised. Other rows come from outside (docs/own_technique.md).
MODEL_CHANGES: dict[str, Kind] = {**ADAPTERS}


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of a model, in the order of forward. `block` is one of L alike."""

    embed: Op
    positions: Op
    block: tuple[Op, ...]
    norm: Op
    head: Op
    loss: Op
    prompt: Op = Op(name="prompt", part="prompt")

    @property
    def outside(self) -> tuple[Op, ...]:
        """Those outside of blocks that have parameters."""
        return self.embed, self.prompt, self.positions, self.norm, self.head

    @functools.cached_property
    def stream_share(self) -> float:
        """The residual stream's length in blocks, over that of the text."""
        return max(1.0, self.block[0].tokens_share)

    @functools.cached_property
    def linears(self) -> tuple[Op, ...]:
        """The Linears of one block."""
        return tuple(op for op in self.block if op.matmul)

    @functools.cached_property
    def linear_weights(self) -> float:
        """Numbers of a block's own matrices on average, but for those that codes stand for."""
        return sum(op.weights * op.own for op in self.linears if not op.stored_bytes)

    @functools.cached_property
    def trained_weights(self) -> float:
        """Numbers of those matrices that have gradients."""
        return sum(op.weights * op.own for op in self.linears if op.trained)

    @functools.cached_property
    def small(self) -> tuple[float, float]:
        """Trained gains and biases of one block: those cut with a matrix's columns, and others."""
        trained = [op for op in self.block if op.trained]
        cut = sum([(op.params - op.weights) * op.own for op in trained if op.cut == "column"])
        return cut, sum([(op.params - op.weights) * op.own for op in trained]) - cut

    @functools.cached_property
    def result_bytes(self) -> int:
        """The bytes of one block's results."""
        return sum(op.result_bytes for op in self.block)

    @functools.cached_property
    def saved(self) -> Mapping[str, float]:
        """Bytes by operation of one block."""
        return {op.name: op.saved_bytes for op in self.block if op.saved_bytes}


@functools.lru_cache(maxsize=1024)
def operations(s: MicroBatch) -> Operations:
    """The model of `s`, as its settings name the rows of the tables above."""
    m, N = s.model, s.tokens
    # logits in float32 and their log-probabilities; before them, logits of autocast, and their cast
    logits = 2 * FP32 + (s.compute_bytes + FP32 if s.compute_bytes < FP32 else 0)
    ops = Operations(
        # read, written; and with the positions added, read, read and written
        embed=Op(name="embed", part="embedding", params=m.V * m.D, shape=(m.V, m.D),
                 saved_bytes=N * TOKEN_ID, moved_bytes=5 * N * m.D * s.residual_bytes),
        positions=POSITIONS[m.position].operations(s),
        block=tuple(BLOCKS[m.block].formula(s)),
        norm=NORMS[m.norm].operations("norm", s, residual=False),
        head=Op(name="head", part="head", params=0 if m.tied else m.V * m.D, matmul=(m.D, m.V),
                cut="column", reads_residual=True,
                saved_bytes=N * m.D * (s.compute_bytes if s.head_bytes is None else s.head_bytes),
                saved_itemsize=s.compute_bytes),
        # log-probabilities, targets, how many targets count
        loss=Op(name="loss", part="", saved_bytes=N * m.V * FP32 + N * TOKEN_ID + FP32,
                moved_bytes=N * m.V * logits))
    for change in m.changes:
        ops = MODEL_CHANGES[change.name].formula(ops, s, change)
    if m.shares:
        # tokens are picked and put back, beside those that pass the block by
        around = Op(name="around", part="", in_stream=True,
                    moved_bytes=4 * s.stream_bytes * (1 - sum(m.shares) / len(m.shares)))
        ops = replace(ops, block=(around, *(op.seeing(*m.shares) for op in ops.block)))
    return ops
