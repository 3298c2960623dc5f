"""Operations of blocks that are not pre-norm, which `lpkit.techniques.blocks` names. Those of
pre-norm are taken, and what is otherwise is changed."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import dropwhile

from lpkit.predict import attention as attending
from lpkit.techniques.adapters import SharedSettings
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.blocks import BLOCKS, NORMS, Operations, pre_norm, residual_add
from lpkit.techniques.operation import Hold, MicroBatch, Op, linear

MLP_READS = ("mlp.up", "mlp.gate_up")


def parallel(s: MicroBatch) -> Iterator[Op]:
    """One norm for both branches."""
    ops = {op.name: op for op in pre_norm(s)}
    yield ops.pop("norm1")
    del ops["norm2"]
    yield from _reading_one(s, ops.values())


def sandwich(s: MicroBatch) -> Iterator[Op]:
    """Each branch ends with a norm of its result."""
    norm, ends = NORMS[s.model.norm].operations, {"add1": "norm3", "add2": "norm4"}
    # a GPU's autocast widens what a norm is given, a CPU's does not
    given = replace(s, residual_bytes=s.compute_bytes) if s.kind == "cpu" else s
    for op in pre_norm(s):
        if op.name in ends:
            yield norm(ends[op.name], given, residual=False)
        yield op


def scaled(s: MicroBatch) -> Iterator[Op]:
    """Each branch times its gain."""
    row, m, ends = BLOCKS[s.model.block], s.model, {"add1": "gain1", "add2": "gain2"}
    for op in pre_norm(s if row.norms else replace(s, model=replace(m, norm="none"))):
        if op.name in ends:
            once = row.one_gain and op.name == "add2"
            yield _gain(ends[op.name], s, 0 if once else m.D if row.channels else 1, last=False)
        yield _gained(op)


def skipless(s: MicroBatch) -> Iterator[Op]:
    """Shaped attention without a skip, then an MLP with one."""
    norm = NORMS[s.model.norm].operations
    yield norm("norm1", s, residual=False)
    yield from map(_gained, _shaped(s))
    yield _gain("gain1", s, 1, last=True)
    for op in dropwhile(lambda op: op.name != "norm2", pre_norm(s)):
        if op.name == "add2":
            yield _gain("gain2", s, 1, last=False)
        yield _gained(op)


def sas_parallel(s: MicroBatch) -> Iterator[Op]:
    """Both branches read one norm, and nothing goes round them."""
    mlp = [_gained(op) for op in pre_norm(s) if op.part == "mlp"]
    yield NORMS[s.model.norm].operations("norm1", s, residual=False)
    yield from _reading_one(s, (*map(_gained, _shaped(s)), _gain("gain1", s, 1, last=True), *mlp,
                                _gain("gain2", s, 1, last=False), _gained(residual_add("add", s))))


def _gain(name: str, s: MicroBatch, numbers: int, *, last: bool) -> Op:
    """Saves what it is given, and widens that for a product with the stream's gradient. `last`:
    nothing else needs this gradient."""
    each, stream = s.tokens * s.model.D, s.stream_bytes
    work = Hold(nbytes=(2 + s.mixed) * stream, frees=1.0,
                grows=each * s.compute_bytes - stream * last)
    return Op(name=name, part="gains", params=numbers, saved_bytes=each * s.compute_bytes,
              saved_itemsize=s.compute_bytes, moved_bytes=each * s.compute_bytes + stream,
              in_stream=True, backward=(work,))


def _gained(op: Op) -> Op:
    """A gain lies between a branch and the stream: no gradient is the stream's own."""
    if op.name.startswith("add"):
        return replace(op, backward=())
    return replace(op, writes_residual=False) if op.writes_residual else op


def _reading_one(s: MicroBatch, ops: Iterable[Op]) -> Iterator[Op]:
    """Two branches that read one result: what neither casts is saved once. Their gradients meet."""
    yield Op(name="branches", part="", in_stream=True, backward=(Hold(grows=-s.stream_bytes),))
    once = not s.mixed and s.operand_bytes is None
    for op in ops:
        yield replace(op, saved_bytes=0) if once and op.name in MLP_READS else op


def _shaped(s: MicroBatch) -> Iterator[Op]:
    """Attention of this block, and its shape behind it. Without matrices of values and projection
    the values are its input, cast for the products, and no part of the product of q and k."""
    m, bare = s.model, BLOCKS[s.model.block].bare
    each = s.tokens * m.H * m.E * s.compute_bytes
    waits = Hold(grows=-each)       # two gradients of v become one
    copies = (ATTENTION[s.attention].formula is attending.plain
              and not (s.heads_are_views and not s.turns))
    besides = 0 if s.norms_save_qkv else copies * each * (s.mixed if bare else 3)   # v lies there
    for op in attending.attention(s):
        if bare and op.name == "attention.qkv":
            yield Op(name="attention.values", part="", backward=(
                Hold(nbytes=s.stream_bytes if s.mixed else 0, grows=-each),))
            yield linear("attention.qk", s, m.D, 2 * m.H * m.E, cut="column", bias=m.biased_qkv)
        elif op.name == "attention.split":
            parts = op.backward[0]
            yield replace(op, backward=(waits, replace(
                parts, nbytes=parts.nbytes * (2 / 3 if bare else 1))))
        elif bare and op.name == "attention.q_norm" and s.norms_save_qkv:
            yield replace(op, saved_bytes=op.saved_bytes - each)
        elif op.name == "attention":
            less = attending.attended_numbers(s) * s.tokens * s.compute_bytes - each * (2 + s.mixed)
            yield replace(op, saved_bytes=op.saved_bytes - less * (bare and not copies),
                          saves_result=False)
            yield Op(name="attention.shape", part="gains", params=3 * m.H, shape=(3, m.H),
                     saved_bytes=each * (2 - op.saves_result) + besides, moved_bytes=8 * each,
                     saved_itemsize=s.compute_bytes,
                     backward=(Hold(nbytes=3 * each, frees=1.0, grows=each),))
        elif op.name != "attention.out":
            yield op
        elif not bare:
            yield linear("attention.out", s, *op.matmul, cut="row", bias=m.bias)


def shared(ops: Operations, s: MicroBatch, settings: SharedSettings) -> Operations:
    """Parameters and gradients are those of `groups` layers, and the work is that of all."""
    part = {"all": "", "attention": "attention", "mlp": "mlp"}[settings.parts]
    own = settings.groups / s.model.L
    return replace(ops, block=tuple(replace(op, own=own) if op.name.startswith(part) else op
                                    for op in ops.block))
