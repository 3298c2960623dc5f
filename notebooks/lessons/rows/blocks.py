"""Blocks of notebook 22, initialisations of notebooks 22 and 27, and layers that share parameters.

    import lessons.rows.blocks          or --import lessons.rows.blocks behind a command

The operations of a block are pre-norm's with changes; `lessons.rows.blocks_torch` has the modules
and the functions that initialise a model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any, Literal

from lpkit.predict import attention as attending
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.blocks import (
    BLOCKS,
    MODEL_CHANGES,
    NORMS,
    BlockRow,
    Operations,
    pre_norm,
    reading_one,
    residual_add,
)
from lpkit.techniques.inits import INITS, Init
from lpkit.techniques.operation import Hold, Kind, MicroBatch, Op, linear
from lpkit.techniques.row import Settings
from lpkit.values import Count

TORCH = "lessons.rows.blocks_torch:"

# ---- Blocks


@dataclass(frozen=True, kw_only=True)
class BranchesRow(BlockRow):
    """A block as a variation of pre-norm.

    gain        initial factor of each branch's output; None: no factor
    skip        False: attention has no skip, and its gain starts at 1
    norms       whether the block has norms (of model.norm)
    parallel    both branches read the output of one norm
    behind      each branch ends with a norm
    channels    the gain has one number per channel, else one number
    one_gain    both branches share one gain
    bare        attention has no matrices for values and projection"""

    implementation: str = TORCH + "Branches"
    gain: float | None = None
    skip: bool = True
    norms: bool = True
    parallel: bool = False
    behind: bool = False
    channels: bool = False
    one_gain: bool = False
    bare: bool = False


def sandwich(s: MicroBatch) -> Iterator[Op]:
    """Each branch ends with a norm of its result."""
    norm, ends = NORMS[s.model.norm].operations, {"add1": "norm3", "add2": "norm4"}
    # a GPU's autocast widens the input of a norm, a CPU's does not
    given = replace(s, residual_bytes=s.compute_bytes) if s.kind == "cpu" else s
    for op in pre_norm(s):
        if op.name in ends:
            yield norm(ends[op.name], given, residual=False)
        yield op


def scaled(s: MicroBatch) -> Iterator[Op]:
    """Each branch is multiplied by its gain."""
    row, m, ends = BLOCKS[s.model.block], s.model, {"add1": "gain1", "add2": "gain2"}
    for op in pre_norm(s if row.norms else replace(s, model=replace(m, norm="none"))):
        if op.name in ends:
            once = row.one_gain and op.name == "add2"
            yield _gain(ends[op.name], s, 0 if once else m.D if row.channels else 1, last=False)
        yield _gained(op)


def skipless(s: MicroBatch) -> Iterator[Op]:
    """Shaped attention without a skip, then an MLP with a skip."""
    norm = NORMS[s.model.norm].operations
    yield norm("norm1", s, residual=False)
    yield from map(_gained, _shaped(s))
    yield _gain("gain1", s, 1, last=True)
    for op in dropwhile(lambda op: op.name != "norm2", pre_norm(s)):
        if op.name == "add2":
            yield _gain("gain2", s, 1, last=False)
        yield _gained(op)


def sas_parallel(s: MicroBatch) -> Iterator[Op]:
    """Both branches read one norm, and there is no skip."""
    mlp = [_gained(op) for op in pre_norm(s) if op.part == "mlp"]
    yield NORMS[s.model.norm].operations("norm1", s, residual=False)
    yield from reading_one(s, (*map(_gained, _shaped(s)), _gain("gain1", s, 1, last=True), *mlp,
                                _gain("gain2", s, 1, last=False), _gained(residual_add("add", s))))


def _gain(name: str, s: MicroBatch, numbers: int, *, last: bool) -> Op:
    """Return the operation that multiplies a branch by its gain of `numbers` parameters. It saves
    its input; backward casts the input to the stream's dtype for a product with the stream's
    gradient. `last`: the stream's gradient is not needed afterwards."""
    each, stream = s.tokens * s.model.D, s.stream_bytes
    work = Hold(nbytes=(2 + s.mixed) * stream, frees=1.0,
                grows=each * s.compute_bytes - stream * last)
    return Op(name=name, part="gains", params=numbers, saved_bytes=each * s.compute_bytes,
              saved_itemsize=s.compute_bytes, moved_bytes=each * s.compute_bytes + stream,
              in_stream=True, backward=(work,))


def _gained(op: Op) -> Op:
    """Return an operation as it is when a gain is between its branch and the stream: the branch and
    the stream have separate gradients."""
    if op.name.startswith("add"):
        return replace(op, backward=())
    return replace(op, writes_residual=False) if op.writes_residual else op


def _shaped(s: MicroBatch) -> Iterator[Op]:
    """Yield the operations of shaped attention: attention, then alpha v + beta out - gamma mean(v).
    In a `bare` block, the values are the attention's input in the dtype of its matmuls, and the
    fused matmul computes only q and k."""
    m, bare = s.model, BLOCKS[s.model.block].bare
    each = s.tokens * m.H * m.E * s.compute_bytes
    waits = Hold(grows=-each)       # in backward, two gradients of v are added into one
    copies = (ATTENTION[s.attention].formula is attending.plain
              and not (s.heads_are_views and not s.turns))
    besides = 0 if s.norms_save_qkv else copies * each * (s.mixed if bare else 3)   # v is kept here
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


def _whole_heads(m: Any) -> str:
    """Return why this model cannot have shaped attention, and the way out."""
    if m.G != m.H:
        return f"has a value for each head; set model.kv_heads={m.H}"
    if m.attention.rule(m.T) != Rule():
        return "subtracts the mean over the whole past from each token; set model.attention=full"
    if any(change.name == "prefix" for change in m.changes):
        return "does not support model.changes=prefix; leave it out"
    return ""


def _whole_width(m: Any) -> str:
    if m.H * m.E != m.D:
        return (f"uses its input as values, so heads times head_dim must be model.width={m.D}, got "
                f"{m.H} times {m.E}; leave model.head_dim out")
    return _whole_heads(m)


ADDED = "adds up gains of a stream that ranks have in parts"
SHAPED = "sums over whole sequences and over all heads"
BLOCKS |= {
    "sandwich": BranchesRow(
        operations=sandwich, behind=True, why="a norm before each branch and one behind it",
        source="Ding et al. 2021, https://arxiv.org/abs/2105.13290, section 2.4"),
    "rezero": BranchesRow(
        operations=scaled, gain=0.0, norms=False, one_gain=True, uncut=ADDED,
        why="no norm; both branches of a layer times one number that begins as 0",
        source="Bachlechner et al. 2020, https://arxiv.org/abs/2003.04887"),
    "skipinit": BranchesRow(
        operations=scaled, gain=0.0, norms=False, uncut=ADDED,
        why="no norm; each branch times a number that begins as 0",
        source="De and Smith 2020, https://arxiv.org/abs/2002.10444"),
    "layerscale": BranchesRow(
        operations=scaled, gain=1e-4, channels=True, uncut=ADDED,
        why="pre-norm; each channel of a branch times a number that begins as 1e-4",
        source="Touvron et al. 2021, https://arxiv.org/abs/2103.17239, section 2"),
    "skipless": BranchesRow(
        operations=skipless, gain=0.1, skip=False, uncut=SHAPED, refuses=_whole_heads,
        why="attention without a skip, in the shape of an identity",
        source="He et al. 2023, https://arxiv.org/abs/2302.10322"),
    "sas": BranchesRow(
        operations=skipless, gain=0.1, skip=False, bare=True, uncut=SHAPED, refuses=_whole_width,
        why="skipless, and without matrices of values and projection",
        source="He and Hofmann 2023, https://arxiv.org/abs/2311.01906, figure 9"),
    "sas-p": BranchesRow(
        operations=sas_parallel, gain=0.1, skip=False, parallel=True, bare=True, uncut=SHAPED,
        refuses=_whole_width, why="sas with attention and MLP side by side, and no skip at all",
        source="He and Hofmann 2023, https://arxiv.org/abs/2311.01906, figure 10"),
}

# ---- Initialisations


@dataclass(frozen=True, kw_only=True)
class ShapedInit(Init):
    """`shape`: initial alpha, beta and gamma of shaped attention (`blocks_torch.Shape`);
    `zero_queries`: its queries are 0, so softmax is the mean over the past."""

    shape: tuple[float, float, float] = (1.0, 1.0, 1.0)
    zero_queries: bool = True


INITS |= {
    "fixup": Init(
        again=True, why="fan-in; each branch ends with 0, and its other matrices are smaller by "
        "1/sqrt(2 layers), so that model.norm=none trains; without Fixup's added biases",
        source="Zhang et al. 2019, https://arxiv.org/abs/1901.09321",
        implementation=TORCH + "fixup"),
    "t-fixup": Init(
        again=True, why="Xavier's; values, projections and MLPs times 0.67 layers^-1/4, embeddings "
        "N(0, 1 / width), so that model.norm=none trains without warm-up",
        source="Huang et al. 2020, Improving Transformer Optimization Through Better "
               "Initialization, section 3.2: of encoders, whose block this is",
        implementation=TORCH + "t_fixup"),
    "mup": Init(why="fan-in; embeddings of one size at every width, and a head of 0; its rates are "
                "those of optimizer.groups (notebook 27)",
                source="Yang et al. 2022, https://arxiv.org/abs/2203.03466, table 3",
                implementation=TORCH + "mup"),
    "value-skipinit": ShapedInit(
        again=True, why="fan-in with orthogonal values and projections; shaped attention begins as "
        "v alone", shape=(1.0, 0.0, 0.0), zero_queries=False,
        source="He et al. 2023, https://arxiv.org/abs/2302.10322, section 3",
        implementation=TORCH + "orthogonal_values"),
    "shaped": ShapedInit(
        again=True, why="fan-in with the identity as values and projections; shaped attention "
        "begins as v, with softmax and mean that cancel",
        source="He and Hofmann 2023, https://arxiv.org/abs/2311.01906, section 4",
        implementation=TORCH + "identity_values"),
}

# ---- Layers that share parameters


@dataclass(frozen=True, kw_only=True)
class SharedSettings(Settings):
    """Layer i uses the parameters of layer i modulo `groups`. `parts`: whether it shares all
    parameters or only those of attention or of the MLP."""

    groups: Count = 1
    parts: Literal["all", "attention", "mlp"] = "all"

    def problem(self, m: Any) -> str:
        if self.groups < m.L:
            return ""
        return (f"model.changes={self.name} has groups={self.groups} of model.layers={m.L}, so "
                f"that no layer shares; set groups to {max(1, m.L - 1)} or fewer")


def _alone(config: Any, recipe: Any) -> str:
    if config.parallel.devices == 1:
        return ""
    return "has parameters that several layers read, and no ranks so far; train it on one device"


def shared(ops: Operations, s: MicroBatch, settings: SharedSettings) -> Operations:
    """Return the operations of layers that share parameters: there are parameters and gradients of
    `groups` layers, and all layers compute."""
    part = {"all": "", "attention": "attention", "mlp": "mlp"}[settings.parts]
    own = settings.groups / s.model.L
    return replace(ops, block=tuple(replace(op, own=own) if op.name.startswith(part) else op
                                    for op in ops.block))


MODEL_CHANGES["shared-layers"] = Kind(
    operations=shared, why="layers that have the same parameters", problem=_alone,
    settings=SharedSettings(), implementation=TORCH + "share_layers",
    source="Lan et al. 2019, https://arxiv.org/abs/1909.11942; Dehghani et al. 2018, "
           "https://arxiv.org/abs/1807.03819, without its halting")
