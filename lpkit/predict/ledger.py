"""Bytes that one device holds in a training step, by row (the purpose of the bytes) and by moment
of the step (MOMENTS).

Two sources fill a table of rows and moments:

    moment              LOSS    HEAD    LAST    FIRST   EMBED   UPDATE
    weights             -----------------------------------------------     State
    optimizer state     -----------------------------------------------     State
    batch               -----------------------------------------------     State
    activations         ####    ####    ###     #       .                   walk
    logits and loss     ####                                                walk
    gradients                           #       ###     ####    ####        walk, then State

    walk    `lpkit.predict.walk` follows one micro-batch through backward and returns its rows
    State   a row, its bytes, the moment when they are allocated, and the last moment when they are
            alive
    peak    the largest sum of a column, which is less than the sum of the rows' maxima

Sources: Rajbhandari et al. 2020, ZeRO, section 3 (https://arxiv.org/abs/1910.02054) for model
states and their sharding; `lpkit.predict.activations` for the bytes that the forward pass keeps.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError, pick
from lpkit.predict import walk
from lpkit.predict.device import Device, DeviceStep
from lpkit.predict.governed import governed
from lpkit.predict.messages import buckets
from lpkit.predict.params import (
    optimizer_settings,
    optimizer_work,
    parameter_count,
    shapes,
    trained_count,
)
from lpkit.predict.recipes import PRECISIONS, Precision
from lpkit.predict.updates import Work, describe_state, elementwise, whole_update_bytes
from lpkit.predict.walk import EMBED, FIRST, HEAD, LAST, LOSS, UPDATE, Walk
from lpkit.techniques import machines, optimizers
from lpkit.techniques.adapters import AdapterRow
from lpkit.techniques.attention import KINDS
from lpkit.techniques.blocks import MODEL_CHANGES
from lpkit.techniques.layouts import REDUCTIONS, Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.objectives import OBJECTIVES
from lpkit.techniques.operation import FP32, TOKEN_ID, fused
from lpkit.techniques.pipelines import PIPELINES, held
from lpkit.techniques.recipes import at_end
from lpkit.techniques.stages import stage_counts

MOMENTS = {     # in the order of a step
    LOSS: "all activations are kept, and the logits have their gradients",
    HEAD: "the head has its gradient, and the last norm computes its own",
    LAST: "backward is in the last block, with many activations and few gradients",
    FIRST: "backward is in the first block, with few activations and many gradients",
    EMBED: "each embedding table has a dense gradient",
    UPDATE: "no activations are kept any more, and all gradients exist",
}
# An assumption: the driver, NCCL and the allocator need the other 8% of the memory.
USABLE_MEMORY_SHARE = 0.92
IN_BACKWARD = tuple(moment for moment in MOMENTS if moment != UPDATE)
# the moments from `born` to `dies`, both included
BETWEEN = {(born, dies): tuple(MOMENTS)[i:j + 1]
           for i, born in enumerate(MOMENTS) for j, dies in enumerate(MOMENTS)}
ZERO = "Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054"
FSDP = "FSDP2, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
AMP = "https://docs.pytorch.org/docs/stable/amp.html"
LINEAR = "lpkit.precision.linear"
CHECKPOINTS = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
CROSS_ENTROPY = "torch.nn.functional.cross_entropy"
COMPILED = "lpkit.execution.compiled"
ENGINE = "PyTorch's autograd engine, as lpkit.predict.walk follows it"


class MemoryRow(NamedTuple):
    """The bytes of one purpose, with the formula in words and its source."""

    name: str
    at: Mapping[str, float]     # bytes by moment of MOMENTS; a moment without bytes is absent
    formula: str
    source: str

    @property
    def bytes(self) -> float:
        """The most bytes at any moment."""
        return max(self.at.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The predicted bytes of one device in a step. In a pipeline, this is the device that holds
    most."""

    rows: tuple[MemoryRow, ...]
    memory_bytes: int | None    # memory of the device; None: unknown
    # a sentence: what the formula leaves out, its measured error, and a better tool; "": no doubt
    doubt: str = ""
    # on a GPU, the bytes by name that streams other than the main one have in memory pools of their
    # own
    apart: Mapping[str, float] = field(default_factory=dict)
    unused_bytes: float = 0.0   # on a GPU, free bytes that no tensor fits into when backward begins

    def at(self, moment: str) -> dict[str, float]:
        """Return the bytes by row at one moment of MOMENTS."""
        return {row.name: row.at[moment] for row in self.rows if row.at.get(moment)}

    @property
    def peak_moment(self) -> str:
        """The moment when the device holds most."""
        return max(MOMENTS, key=lambda moment: sum(row.at.get(moment, 0) for row in self.rows))

    @property
    def peak_bytes(self) -> float:
        return max(sum(row.at.get(moment, 0) for row in self.rows) for moment in MOMENTS)

    @property
    def reserved_bytes(self) -> float:
        """The bytes that PyTorch's allocator takes from the GPU's driver, if it uses expandable
        segments.

        The allocator does not give memory that one CUDA stream frees to another stream. FSDP
        allocates gathered weights and gradients of shards on streams of its own, so these bytes
        (`apart`) are added to the peak of all other rows. The 16-bit logits are freed before
        backward; their memory (`unused_bytes`) is too small for the float32 gradient of the
        logits, so it stays empty when backward begins."""
        def total(moment: str) -> float:
            return sum(row.at.get(moment, 0) for row in self.rows if row.name not in self.apart)

        peak = max(total(moment) + self.unused_bytes * (moment == LOSS) for moment in MOMENTS)
        return peak + sum(self.apart.values())

    @property
    def fits(self) -> bool:
        """True if the peak fits into the device's memory. Memory that the allocator and the driver
        need for themselves is not counted."""
        return self.memory_bytes is None or self.peak_bytes <= self.memory_bytes

    @property
    def missing_bytes(self) -> float:
        """The bytes by which the peak exceeds the usable memory; 0 or less if it fits."""
        return self.peak_bytes - USABLE_MEMORY_SHARE * self.memory_bytes


def model_states(count: float, *, precision: "str | Precision" = "bf16-master",
                 optimizer: str = "adamw", moment_format: str = "float32", zero: int = 0,
                 devices: int = 1, trained: float = 1.0,
                 work: Work | None = None) -> tuple[MemoryRow, ...]:
    """Return the rows of weights, master weights, optimizer state and gradients of one device, for
    a model of `count` parameters.

    trained     the share of the parameters that is trained
    work        the work of an optimizer whose state depends on the shapes of parameters; None:
                the state has a fixed number of bytes per parameter
    zero        ZeRO stage: 1 shards the optimizer's state and the master weights over `devices`, 2
                also the gradients, 3 also the weights

    For example, bf16-master with AdamW has 2 bytes of weights, 4 of master weights, 8 of moments
    and 2 of gradients per parameter; ZeRO 3 over 8 devices divides all 16 bytes by 8.
    """
    p = pick(PRECISIONS, precision, "precision") if isinstance(precision, str) else precision
    if zero not in (0, 1, 2, 3):
        raise ConfigError(f"there is no ZeRO stage {zero}; choose 0, 1, 2 or 3")
    if devices < 1:
        raise ConfigError(f"devices must be 1 or more, got {devices}")

    def row(name: str, itemsize: float, stage: int, moments: Iterable[str], why: str,
            whole: float = 0.0) -> MemoryRow:
        shards = devices if zero >= stage else 1
        sharded = f", over {devices} devices" if shards > 1 else ""
        sharded += f", and {whole:g} on each" if whole else ""
        numbers = count if stage == 3 else count * trained
        return MemoryRow(name, dict.fromkeys(moments,
                                             itemsize * numbers / shards + whole * numbers),
                   f"{itemsize:g} bytes a parameter{sharded}: {why}", ZERO)

    if moment_format == "float32":
        moment_format = p.moments or moment_format
    work = work or Work(optimizers.find(optimizer).state_bytes(moment_format))

    return (row("weights", p.weights, 3, MOMENTS, p.what),
            row("master weights", p.master, 1, MOMENTS, "a float32 copy for the optimizer"),
            row("optimizer state", work.cut_bytes, 1, MOMENTS,
                describe_state(optimizer, moment_format), work.whole_bytes),
            row("gradients", p.gradients, 2, (UPDATE,), "in the dtype of the weights"))


def memory(config: Config, machine: "str | Machine" = "h200", devices: int | None = None, *,
           layout: Layout | None = None, precision: str | None = None,
           optimizer: str | None = None, zero: int = 0, recompute: str | None = None,
           attention: str | None = None) -> Memory:
    """Return the bytes of one device in a step of `config` on `devices` devices of the `machine`,
    by row and moment. In a pipeline, this is the device that holds most.

    layout     None: data parallel over `devices`, with ZeRO stage `zero`; if `devices` is None,
               too, the config's `parallel`
    precision  a row of PRECISIONS; None: the config's recipe, where "auto" means bf16 if the
               machine has bf16, else fp32
    optimizer, recompute, attention
               names of rows; None: the config's, where "auto" attention means the backend that a
               run on this machine chooses

    Raises ConfigError if the settings do not go together. A call takes less than 200 us in 16 bits,
    and up to 350 us with cast operands or a pipeline.
    """
    if layout is None:
        layout = config.parallel
        if devices is not None:
            layout = Layout(shard=devices, zero=zero) if zero else Layout(data=devices)
    on, config = machines.find(machine), governed(config, most=True)
    step = DeviceStep(config, on, layout, precision=precision, optimizer=optimizer,
                      recompute=recompute,
                attention=attention)
    doubt = _doubt(step)
    # the errors of a Doubt were measured on one device
    if doubt and layout.tensor * layout.pipeline > 1:
        doubt = doubt._replace(low=None) if isinstance(doubt, Doubt) else doubt
    doubt = str(doubt)
    if layout.pipeline == 1:
        whole = Walk(step, True, True)
        return _held(whole, whole, doubt)
    return max((_held(*arguments) for arguments in _ranks(step, doubt)),
               key=lambda rank: rank.peak_bytes)


def _ranks(step: DeviceStep, doubt: str) -> Iterator[tuple]:
    """Yield arguments of `_held` for each rank of a pipeline that may hold most. If a rank has
    several stages, yield once for each stage that can be in backward at the peak."""
    layout, own = step.layout, step.own_pipeline
    cut = layout.schedule, layout.pipeline, layout.interleave
    counts = [*stage_counts(step.m, *cut, step.config.system.stack == "auto")]
    if not own:     # other stacks may cut the layers differently
        counts[0] = max(counts[:-1])
    last, walks = len(counts) - 1, functools.cache(partial(Walk, step))
    for rank, stages in enumerate(PIPELINES[cut[0]].by_rank(*cut[1:])):
        if not {0, 1, last} & {*stages}:    # ranks between these hold less than the second rank
            continue
        device = Device(step, 0 in stages, last in stages, sum(counts[stage] for stage in stages))
        all_of = [partial(walks, stage == 0, stage == last, counts[stage]) for stage in stages]
        for now, held_counts, added in held(rank, *cut, step.pieces):
            waits, there = [], 0.0
            if not own:     # another stack may allocate gradient buffers at the start
                added = (step.pieces > 1,) * len(stages)
            for stage, count, is_added, walk_of in zip(stages, held_counts, added, all_of):
                d = walk_of(step.pieces > 1)
                # `there`: parameters of this rank whose gradients are already allocated
                there += (d.inside + d.tables) * is_added
                kept = d.kept.waiting_bytes + d.heads * d.kept.operations["loss"]
                # another stack keeps each stage's result: pipelining/stage.py, `fwd_cache`
                if not (own or d.heads):
                    kept += d.stream
                # `kept` is alive once for each micro-batch in flight; the walk has one of them
                waits += [State(row, (count - (stage == now)) * nbytes, dies=EMBED)
                          for row, nbytes in ((walk.ACTIVATIONS, kept), *d.casts.items())]
                # autocast keeps its copies until the last micro-batch is done
                waits.append(State(walk.COPIES, own * d.copied, dies=EMBED))
            at = stages.index(now)
            d = all_of[at](added[at])
            # messages: the last one sent, the next one to arrive, and the one from which
            # lpkit.parallel.pipeline takes shapes
            waits.append(State(walk.MESSAGES, own * 3 * d.stream, dies=EMBED))
            yield (device, d, doubt, waits, there / (device.inside + device.tables),
                   sum(held_counts) / layout.interleave)


TRACE = "; lpkit.predict_trace(config) counts every tensor instead"


class Doubt(NamedTuple):
    """A part of the memory that the formula only estimates, because it does not follow its tensors
    one by one. The error was measured in steps of random configs of this kind
    (data/measured/ledger-*.json)."""

    words: str
    low: int | None = None      # percent: how far the peak was too low, as a negative number
    high: int | None = None     # percent: how far the peak was too high; None: not measured

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.words}; the error of this estimate was not measured{TRACE}"
        return (f"{self.words}; in random configs of this kind the peak was {-self.low}% too low "
                f"to {self.high}% too high{TRACE}")


OFFLOADED = Doubt("offloaded tensors in transfer are counted as one tensor of the MLP", -29, 7)
PADDED = Doubt("a rule decides whether a view keeps the padding of a result alive", -7, 1)
ADAPTED = Doubt("short-lived tensors of adapters in low precision are not counted", -15, 5)
LOW_HEAD = Doubt("a head in low precision is counted as a 16-bit head, chunk by chunk", -25, 0)


def _doubt(step: DeviceStep) -> "Doubt | str":
    """Return the part of this step's memory that the formula only estimates; "" if the formula
    follows each tensor."""
    config, p = step.config, step.p
    memory, kind = config.memory, config.model.attention.name
    if changed := [row.name for row in (*config.transforms, *config.governors)]:
        return (f"no formula covers {', '.join(changed)}: parameters, bytes, FLOPs and seconds are "
                f"those of the unchanged model; lpkit.measure.memory(config) counts the bytes of a "
                f"real update")
    if config.model.shares:
        return Doubt("each layer is counted with the average number of tokens", -18, 3)
    if changed := [row.name for row in config.model.changes
                   if not isinstance(MODEL_CHANGES[row.name], AdapterRow)]:
        return Doubt(f"blocks with {', '.join(changed)} are counted by the usual rules")
    if OBJECTIVES[config.objective.name].implementation:
        return Doubt(f"bytes of objective={config.objective.name} are an estimate of its row")
    if REDUCTIONS[step.layout.reduction].sent:
        return f"what parallel.reduction={step.layout.reduction} keeps is not counted"
    if step.s.attention == "plain" and KINDS[kind].state_bytes:
        return Doubt(f"the definition of {kind} attention is counted roughly")
    if (step.on.kind in step.techniques["optimizer_state"].leaves
            and not elementwise(optimizer_settings(config, step.optimizer))):
        return str(Doubt(f"the state that {step.optimizer} fetches for an update is not counted"))
    if memory.activation_offload.name != "device":
        return OFFLOADED
    if step.repeated.keeps_results and step.layout.tensor > 1:
        return Doubt(f"results that recompute={step.recompute} keeps on tensor ranks are counted "
                     f"roughly")
    if PIPELINES[step.layout.schedule].splits and step.layout.pipeline > 1:
        return Doubt(f"gradients of weights that parallel.schedule={step.layout.schedule} puts off "
                     f"are not counted")
    if p.low is None:
        return ""
    if config.model.changes:
        return ADAPTED
    if any(at_end(name, ()) is None for name in p.low.keep if name != "head"):
        return Doubt("Linears that a pattern keeps in 16 bits are counted as cast Linears")
    if memory.cross_entropy.name != "full" and "head" not in p.low.keep:
        return LOW_HEAD
    return PADDED if step.padded else ""


# The rows of a device: first the rows of the walk, then all bytes that are alive outside the walk.

class State(NamedTuple):
    """Bytes that are alive from one moment of a step to another, both included."""

    row: str                # name of the row that counts them
    nbytes: float
    born: str = LOSS        # the first moment when they are alive
    dies: str = UPDATE      # the last moment when they are alive


def _live(at: dict[str, dict[str, float]], states: Iterable[State]) -> None:
    """Add the bytes of `states` to `at`, which has the bytes by row and by moment."""
    for row, nbytes, born, dies in states:
        if nbytes:
            held = at.setdefault(row, {})
            for moment in BETWEEN[born, dies]:
                held[moment] = held.get(moment, 0.0) + nbytes


def _held(device: Device, d: Walk, doubt: str, waits: Sequence[State] = (),
          there: float = 1.0, under_way: float = 1.0) -> Memory:
    """Return the memory of a `device` from the walk `d` of one micro-batch over the device, or over
    one of its pipeline stages.

    waits       bytes of other micro-batches in flight, and of the device's other stages
    there       share of the device's parameters whose gradients are already allocated when the
                walk begins
    under_way   number of micro-batches in flight
    """
    step, config = d.step, d.step.config
    *outlive, gradients = model_states(
        device.inside + device.tables, precision=step.p, optimizer=step.optimizer,
        moment_format=step.moments, zero=3 if d.whole else step.layout.zero,
        devices=step.layout.state_ranks, trained=trained_count(d.m) / parameter_count(d.m),
        work=optimizer_work(config, step.optimizer, step.moments))
    rows = [row for row in outlive
            if row.at[UPDATE] and not (d.resting and row.name == "optimizer state")]
    if coded := [op for op in d.ops.linears if op.stored_bytes]:
        # frozen weights that are stored as codes need fewer bytes than the row "weights" has
        part, in_codes = device.layers / d.tensor, sum(op.weights for op in coded)
        nbytes = sum(op.stored_bytes for op in coded)
        others = 1 - part * in_codes / (device.inside + device.tables)
        rows[0] = rows[0]._replace(
            at={moment: others * weights + part * nbytes for moment, weights in rows[0].at.items()},
            formula=f"{rows[0].formula}; frozen weights {8 * nbytes / in_codes:.3f} bits")
    # at: bytes by row and moment. It begins with the rows of the walk; `_live` adds the others.
    at = d.at
    if step.own_pipeline and not d.widened:
        at[walk.COPIES] = {}        # `waits` counts the copies of weights, once for all stages
    _live(at, waits)
    _live(at, _gradients(d, device, gradients.bytes, there))
    _live(at, _batches(d))
    if d.sharded:
        _live(at, _gathered(device if d.staged else d))
        _live(at, _leaving(d))
    elif step.as_trained and step.layout.devices > 1:
        at[walk.MESSAGES] = _reduced(d, at[walk.GRADIENTS], at[walk.TEMPORARIES].get(EMBED, 0))
    # cached casts of weights outlive the micro-batch of the walk, so `_casts` counts them instead
    if d.low:
        if d.caches_casts:
            at[walk.LOW] = {}
        _live(at, _casts(device, d.layers - len(d.stay)))
    if not d.at_once:
        updating = _update_bytes(device)
        _live(at, [State("optimizer temporaries", updating, UPDATE)])
        # In lpkit's pipeline, gradients are in transfer after the last micro-batch and before the
        # update begins. They raise the moment UPDATE only if they exceed the update's temporaries.
        if step.own_pipeline and step.layout.replicas > 1:
            sent = min(gradients.bytes, 2 * REDUCTIONS[step.layout.reduction].bucket_bytes)
            sent += sum(at[walk.LOW].values()) / len(at[walk.LOW]) if d.caches_casts else 0.0
            _live(at, [State(walk.MESSAGES, max(0.0, sent - updating), UPDATE)])
    rows += [MemoryRow(name, at[name], *words)
             for name, words in _words(d, gradients, under_way).items()
             if any(at.get(name, {}).values())]
    apart, unused = {}, 0.0
    if step.on.kind == "gpu" and d.sharded:     # see `Memory.reserved_bytes`
        apart = {"gathered at once": max(device.tables * d.travels_outside,
                                         d.block_parameters * d.travels),
                 "gradients of shards" if d.staged else "gradients": gradients.bytes}
    if step.on.kind == "gpu" and d.heads and not (
            d.chunk or step.compiles_loss or step.p.compute_bytes == FP32):
        # the 16-bit logits, whose freed memory the float32 gradient of the logits does not fit into
        unused = d.tokens * d.m.V * step.p.compute_bytes
    memory = Memory(rows=tuple(rows), memory_bytes=step.on.memory_bytes, doubt=doubt, apart=apart,
                    unused_bytes=unused)
    # some optimizers do additional work in every n-th update, for which the rows are computed
    every = getattr(optimizer_settings(config, step.optimizer), "every", 1)
    if every > 1 and (d.at_once or memory.peak_moment == UPDATE):
        return replace(memory, doubt=f"the peak is that of each {every}th update, in which "
                                     f"{step.optimizer} does more; lpkit.predict_trace(config) "
                                     f"counts an update that does less")
    return memory


def _gradients(d: Walk, device: Device, nbytes: float, there: float) -> Iterator[State]:
    """Yield the gradients that the update reads, then the gradients of earlier micro-batches that
    are alive during backward.

    `nbytes`: all gradients of the device, or its shards of them. `there`: the share that is already
    allocated. Nothing is yielded if each parameter is updated as soon as its gradient is complete.
    """
    if d.at_once:
        return
    yield State(walk.GRADIENTS, nbytes, UPDATE)
    if d.gathers or d is not device:
        if d.staged and d.step.layout.zero >= 2:
            nbytes = (device.inside + device.tables) * d.step.p.gradients
        yield State(walk.GRADIENTS, nbytes * (there if not d.step.p.buffered else 1), dies=EMBED)


def _batches(d: Walk) -> Iterator[State]:
    """Yield the bytes of the token ids, of the objective's tensors, and of the logits that some
    stacks gather on each tensor rank and keep."""
    step, s = d.step, d.s
    extra = OBJECTIVES[step.config.objective.name].operations(s, step.config.objective)
    yield State("objective", FP32 * sum(op.params for op in extra))
    yield State("objective", sum(op.saved_bytes for op in extra), dies=LOSS)
    read = 2 * TOKEN_ID + FP32 * bool(step.config.data.scores)
    yield State("batch", read * s.tokens * step.pieces / step.layout.context)
    if d.heads and step.stack.keeps_gathered:       # also the logits of the previous micro-batch
        yield State(walk.LOGITS, min(2, step.pieces) * d.logits * s.compute_bytes)


def _gathered(d: Walk) -> Iterator[State]:
    """Yield the bytes of the whole weights that FSDP gathers (ZeRO 2 and 3)."""
    row, ends = "gathered weights", d.tables * d.travels_outside
    inside, block = d.inside * d.travels, d.block_parameters * d.travels
    if d.staged:
        yield State(row, ends + inside, dies=EMBED)
        return
    # the weights outside the blocks (`ends`) are whole during all of backward
    for moment in IN_BACKWARD:
        if moment in d.most or moment == FIRST:
            yield State(row, ends, moment, moment)
    if not d.whole:
        yield State(row, block, LAST, FIRST)
        return
    yield State(row, inside, dies=HEAD)
    # The walk counts the weights of one block in the row of messages, so this row leaves out one
    # block.
    yield State(row, (d.inside - (d.layers > 1) * d.block_parameters) * d.travels, LAST, LAST)
    yield State(row, block, FIRST, FIRST)


def _leaving(d: Walk) -> Iterator[State]:
    """Yield the buffers from which FSDP reduces gradients and into which it gathers weights, except
    for the buffers that the walk counts (`Walk.travel`)."""
    numbers, whole = d.block_parameters, d.tables * FP32
    if d.staged:
        yield State(walk.MESSAGES, numbers * d.made_bytes, LAST, LAST)
        copied = d.made_bytes if d.made_bytes < FP32 else 0
        yield State(walk.MESSAGES, numbers * (FP32 + copied), FIRST, FIRST)
        yield State(walk.MESSAGES, whole, EMBED, EMBED)
        return
    # The gradients outside the blocks are reduced when all of them are complete. By then, the whole
    # weights of the tables other than the embedding, and the temporaries of EMBED, are freed; these
    # bytes are subtracted.
    gone = (d.tables - d.table) * d.travels_outside
    temporaries = d.most[EMBED][walk.TEMPORARIES] if d.embeds else 0
    most = whole * (1 + 1 / d.step.layout.state_ranks) - gone - temporaries
    yield State(walk.MESSAGES, max(numbers * FP32, most), EMBED, EMBED)
    # ZeRO 2: the buffer into which the last block was gathered, and for a moment also the buffer of
    # the block before it
    if d.whole:
        logits, block = d.most[LOSS][walk.TEMPORARIES], numbers * d.travels
        kept = d.kept.block_bytes + d.most[LOSS][walk.LOGITS]
        yield State(walk.MESSAGES, max(0.0, block + max(-logits, block - logits - kept)), dies=LOSS)


def _casts(d: Device, layers: int) -> Iterator[State]:
    """Yield the bytes that casts keep: casts of weights that are cached for a whole update, scales,
    and amax histories. `layers`: the number of blocks whose scales are alive."""
    low, linears = d.low, d.ops.linears
    cast = d.layers - len(d.stay)       # number of blocks whose Linears are cast
    if d.caches_casts:      # shared: 1 if one cast of a weight serves both of its matmuls, else 2
        shared = 1 if low.w[0] == low.w[1] and not d.step.stack.caches_casts else 2
        head = d.table * (d.step.own_pipeline and d.heads and d.head_low is not None)
        numbers = 0 if d.step.eight_bit_weights else d.linear_weights * cast + head
        yield State(walk.LOW, numbers * low.number_bytes * shared, dies=EMBED)
    scales = layers * sum(low.scales(d.tokens * op.tokens_share, *op.matmul) for op in linears)
    yield State("scales", scales, dies=LAST)
    amaxes = 3 * (1 + low.history) if low.history else 0
    yield State("amax histories", cast * len(linears) * amaxes * FP32)


def _words(d: Walk, gradients: MemoryRow, under_way: float) -> dict[str, tuple[str, str]]:
    """Return (formula in words, source) of each row, in the order in which the rows are printed."""
    step, layout, repeated = d.step, d.step.layout, d.step.repeated
    micro = f"micro-batch of {d.s.batch} x {d.m.T:,} tokens, recompute={step.recompute}"
    if repeated.kept_share is not None:
        micro += (f", an estimate: torch.compile keeps at most "
                  f"{repeated.kept_share(step.recompute):g} of what autograd keeps")
    micro += f", attention={d.s.attention}"
    if under_way > 1:
        micro += f", {under_way:g} micro-batches in flight"
    whole = "whole weights in the compute dtype: outside the blocks, and of the current block"
    if d.staged:
        whole = "whole weights of the stage in the compute dtype, during all micro-batches"
    elif d.whole:
        whole = "whole weights of each block, until its backward ends"
    words = {} if d.sharded else {walk.MESSAGES: (
        f"gradients in transfer ({layout.reduction}), and weights that ZeRO 1 gathers",
        "lpkit.parallel.replicas")}
    words |= {
        walk.GRADIENTS: (gradients.formula, gradients.source),
        "objective": ("numbers that the objective keeps, and tensors that it saves for backward",
                      "operations of its row"),
        "batch": ("token ids and targets of one update, int64", "lpkit.datasets"),
        "gathered weights": (whole, FSDP)}
    if d.sharded:
        words[walk.MESSAGES] = ("whole float32 gradients of one block, while they are reduced to "
                                "shards", FSDP)
    return words | {
        walk.COPIES: ("a 16-bit copy of the weight of each matmul, until its backward ends",
                 AMP),
        walk.LOW: (f"a copy of each weight in {step.p.what.split()[-1]}, until its backward ends",
                   LINEAR),
        "scales": ("scales of the operands that are kept", LINEAR),
        "amax histories": ("the largest magnitudes of x, w and dy in earlier micro-batches",
                           LINEAR),
        walk.ACTIVATIONS: (micro, "lpkit.predict.activations"),
        walk.AGAIN: ("all activations of one block", CHECKPOINTS),
        walk.LOGITS: (("logits in the dtype of the head; the compiled loss keeps nothing else",
                       COMPILED) if step.compiles_loss else
                      ("a float32 log-probability per token and vocabulary entry", CROSS_ENTROPY)),
        walk.GRADIENTS_OF_LOGITS: ("float32 gradients of the log-probabilities and of the logits",
                                   CROSS_ENTROPY),
        "optimizer temporaries": ("copies of the moments and the weight of the largest parameter "
                                  "during its update", "lpkit.optim.stepper"),
        walk.TEMPORARIES: ("gradients of activations, and short-lived casts and copies",
                           ENGINE)}


def _reduced(d: Walk, at: dict[str, float], temporaries: float) -> dict[str, float]:
    """Return, by moment, the bytes of buffers for messages between replicas (and of ZeRO 1) in the
    last micro-batch.

    `at` has the bytes of gradients by moment. This function subtracts from `at` the gradients that
    were reduced to shards. `temporaries` are the bytes of temporaries in EMBED.

    A bucket of gradients is sent as soon as backward has filled it, if the reduction `overlaps`,
    else after backward. Up to two buckets are in transfer at the same time. The gradients of a
    bucket are copied to one buffer, unless the bucket has a single parameter."""
    layout, p = d.step.layout, d.step.p
    row, ranks, sharded = REDUCTIONS[layout.reduction], layout.shard, layout.stage == 1
    sizes, copied, so_far, spread = _message_bytes(d.m, row.bucket_bytes // p.weights, p.gradients,
                                                   ranks if sharded else 1)
    messages, total = dict.fromkeys(IN_BACKWARD, 0.0), so_far[-1]
    most = total + (copied[-1] if row.overlaps else max(copied))    # when backward is done
    if row.overlaps and sharded:
        for moment in (LAST, FIRST, EMBED):
            there = total - sizes[-1] if moment == EMBED else at.get(moment, 0)
            if d.step.pieces > 1 and moment != EMBED:
                there = 0.0         # the gradients are added to buffers of earlier micro-batches
            gone = bisect_right(so_far, there) - 1
            # The first `gone` buckets are full. They were reduced, and each rank keeps its shard of
            # them.
            at[moment] = at.get(moment, 0) - so_far[gone] * (1 - 1 / ranks)
            messages[moment] = so_far[gone] - so_far[max(0, gone - 2)]
        most = sizes[-1] + copied[-1] + sum(sizes[-2:-1]) + so_far[-2] / ranks
    messages[EMBED] = max(messages[EMBED], most - at.get(EMBED, 0) - temporaries)
    if sharded:
        at[UPDATE] = total / ranks
        messages[UPDATE] = max(0.0, spread - at[UPDATE])
    return messages


@functools.lru_cache(maxsize=256)
def _message_bytes(m: ModelConfig, most: int, itemsize: int,
                   ranks: int) -> tuple[list[int], list[int], list[int], float]:
    """Return four sizes for the buckets of at most `most` gradients of `itemsize` bytes, which
    `ranks` ranks share: the bytes of each bucket; the bytes of its copy (0 if the bucket is sent
    without a copy, because it has one parameter whose rows divide by `ranks`); the running total,
    from 0 to the bytes of all buckets; and the largest sum of one rank's shard of a bucket and the
    bucket's copy."""
    sent = buckets(m, most)
    sizes = [itemsize * sum(map(math.prod, bucket)) for bucket in sent]
    copied = [nbytes * (len(bucket) > 1 or bucket[0][0] % ranks > 0)
              for nbytes, bucket in zip(sizes, sent)]
    spread = max(nbytes / ranks + copy for nbytes, copy in zip(sizes, copied))
    return sizes, copied, [0, *accumulate(sizes)], spread


def _update_bytes(d: Walk) -> float:
    """Return the temporary bytes of an update.

    Parameters are updated one after another, so the largest parameter decides. A fused kernel needs
    no temporaries. If the optimizer's state is offloaded, the states of two parameters are on the
    device: of the parameter that is updated, and of the next one."""
    step, ops, config = d.step, d.ops, d.step.config
    optimizer = optimizer_settings(config, step.optimizer)
    shards = d.tensor * (step.layout.state_ranks if step.layout.zero else 1)
    if not elementwise(optimizer):
        return max(whole_update_bytes(
            shapes(d.m), optimizer, step.moments, d.weight_itemsize, shards,
            partial(fused, d.m)).values(), default=0.0)
    weights, fetched = [op.weights for op in ops.linears if op.trained], 0
    if d.state_bytes:
        # fetched: the largest sum of two parameters that are adjacent in the order of updates. The
        # first parameter is paired with 0.
        ends = [op.params * op.trained for op in (ops.embed, ops.positions, ops.head)]
        in_order = [*ends[:2], *weights, *weights * (d.layers > 1), ends[2]]
        fetched = max(map(sum, pairwise([0.0, *filter(None, in_order)])), default=0.0)
    largest = max(0, ops.embed.params * ops.embed.trained, *weights)
    return (d.updating_bytes * largest + d.state_bytes * fetched) / shards
