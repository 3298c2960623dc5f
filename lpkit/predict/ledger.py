"""Bytes that one device holds in a training step, by what they are for and by when.

A row lives at some moments of the step, and the peak is the largest moment, not the sum of the
rows. Sources: Rajbhandari et al. 2020, ZeRO, section 3 (https://arxiv.org/abs/1910.02054) for model
states and their sharding; `activations` for what the forward pass keeps.
"""

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError, pick
from lpkit.predict import walk
from lpkit.predict.activations import Kept, saved
from lpkit.predict.messages import buckets, gathered_itemsizes
from lpkit.predict.params import optimizer_work, parameter_count, parameters, shapes, trained_count
from lpkit.predict.recipes import PRECISIONS, Precision, precision_of, row_of, stored
from lpkit.techniques import layouts, machines, optimizers
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import choose_attention
from lpkit.techniques.blocks import Operations, operations
from lpkit.techniques.hardware import why_emulated
from lpkit.techniques.layouts import GATHERED, REDUCTIONS, Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.memory import PARAM_DTYPE, RECOMPUTE, Recompute, recompute_of, rows_of
from lpkit.techniques.objectives import OBJECTIVES
from lpkit.techniques.operation import FP32, TOKEN_ID, MicroBatch
from lpkit.techniques.recipes import resolve, untiled
from lpkit.techniques.row import Settings

MOMENTS = {     # in the order in which they come
    walk.LOSS: "everything is kept, and the logits have their gradients",
    walk.HEAD: "the head has its gradient, the last norm is at work",
    walk.LAST: "the first one that backward meets, where activations are many and gradients few",
    walk.FIRST: "the last one that backward meets, where activations are few and gradients many",
    walk.EMBED: "each table has a dense gradient",
    walk.UPDATE: "nothing is kept any more, and every gradient is there",
}
LOSS, UPDATE = walk.LOSS, walk.UPDATE
USABLE_MEMORY_SHARE = 0.92  # of memory, assumed: the rest is the driver's, NCCL's, the allocator's
# of allocated bytes: the median of ten runs of Megatron-LM and Megatron-DeepSpeed, 1.08 to 1.27,
# whose logs have both peaks; with expandable segments it is less (docs/ledger.md)
RESERVED_SHARE = 1.20
IN_BACKWARD = tuple(moment for moment in MOMENTS if moment != UPDATE)
# bytes a number while its code is found: in float32, padded, from the least, and the noise
PACKED = {2: 16, 4: 12}
ZERO = "Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054"
FSDP = "FSDP2, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
AMP = "https://docs.pytorch.org/docs/stable/amp.html"
LINEAR = "lpkit.precision.linear"
CHECKPOINTS = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
CROSS_ENTROPY = "torch.nn.functional.cross_entropy"
ENGINE = "PyTorch's autograd engine, as lpkit.predict.walk follows it"


class Row(NamedTuple):
    name: str
    at: Mapping[str, float]     # bytes by moment, those of MOMENTS when it is there
    formula: str
    source: str

    @property
    def bytes(self) -> float:
        """At most."""
        return max(self.at.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Per device. Where a device of a pipeline holds more than another, the one that holds most."""

    rows: tuple[Row, ...]
    memory_bytes: int | None    # of the device, to compare with
    doubt: str = ""             # what it leaves out, how far that is off, what says it better
    apart: Mapping[str, float] = field(default_factory=dict)    # on a GPU, in pools of their own
    unused_bytes: float = 0.0   # on a GPU, of what is free where backward begins

    def at(self, moment: str) -> dict[str, float]:
        """Bytes by row at one moment of MOMENTS."""
        return {row.name: row.at[moment] for row in self.rows if row.at.get(moment)}

    @property
    def peak_moment(self) -> str:
        return max(MOMENTS, key=lambda moment: sum(row.at.get(moment, 0) for row in self.rows))

    @property
    def peak_bytes(self) -> float:
        return max(sum(row.at.get(moment, 0) for row in self.rows) for moment in MOMENTS)

    @property
    def reserved_bytes(self) -> float:
        """What PyTorch's allocator takes from a GPU's driver with expandable segments. What one
        stream has freed, another does not get: so gradients of shards and what is gathered have
        their memory beside the peak of the rest. And logits of 16 bits leave a place behind that
        one gradient of 32 does not fit into."""
        def total(moment: str) -> float:
            return sum(row.at.get(moment, 0) for row in self.rows if row.name not in self.apart)

        peak = max(total(moment) + self.unused_bytes * (moment == LOSS) for moment in MOMENTS)
        return peak + sum(self.apart.values())

    @property
    def fragmented_bytes(self) -> float:
        """The same without expandable segments: RESERVED_SHARE of the peak, as others measured."""
        return max(self.reserved_bytes, RESERVED_SHARE * self.peak_bytes)

    @property
    def fits(self) -> bool:
        """Without what an allocator and the driver take for themselves."""
        return self.memory_bytes is None or self.peak_bytes <= self.memory_bytes

    @property
    def missing_bytes(self) -> float:
        """By which the peak is above the usable share of memory; 0 or less where it has room."""
        return self.peak_bytes - USABLE_MEMORY_SHARE * self.memory_bytes


def model_states(count: float, *, precision: "str | Precision" = "bf16-master",
                 optimizer: str = "adamw", moment_format: str = "float32", zero: int = 0,
                 devices: int = 1, trained: float = 1.0,
                 work: optimizers.Work | None = None) -> tuple[Row, ...]:
    """What outlives a step, for `count` parameters, of which the share `trained` is. `work`: of an
    optimizer whose state depends on the shapes of parameters.

    ZeRO stage 1 shards the optimizer's state, master weights with it, over `devices`; 2 the
    gradients too; 3 the weights too.
    """
    p = pick(PRECISIONS, precision, "precision") if isinstance(precision, str) else precision
    if zero not in (0, 1, 2, 3):
        raise ConfigError(f"there is no ZeRO stage {zero}; choose 0, 1, 2 or 3")
    if devices < 1:
        raise ConfigError(f"devices must be 1 or more, got {devices}")

    def row(name: str, itemsize: float, stage: int, moments: Iterable[str], why: str,
            whole: float = 0.0) -> Row:
        shards = devices if zero >= stage else 1
        sharded = f", over {devices} devices" if shards > 1 else ""
        sharded += f", and {whole:g} on each" if whole else ""
        numbers = count if stage == 3 else count * trained
        return Row(name, dict.fromkeys(moments, itemsize * numbers / shards + whole * numbers),
                   f"{itemsize:g} bytes a parameter{sharded}: {why}", ZERO)

    work = work or optimizers.Work(optimizers.find(optimizer).state_bytes(moment_format))

    return (row("weights", p.weights, 3, MOMENTS, p.what),
            row("master weights", p.master, 1, MOMENTS, "a float32 copy for the optimizer"),
            row("optimizer state", work.cut_bytes, 1, MOMENTS,
                optimizers.describe_state(optimizer, moment_format), work.whole_bytes),
            row("gradients", p.gradients, 2, (UPDATE,), "the same dtype as the weights"))


def on_device(config: Config, on: Machine, layout: Layout, p: Precision,
              attention: str | None = None, **sizes: Any) -> tuple[MicroBatch, int]:
    """A micro-batch of a run on this machine, and how many there are. `sizes` are other fields of
    a MicroBatch. Raises ConfigError for an unknown attention."""
    chosen, _ = choose_attention(attention or config.system.attention, device=on.kind,
                                 low_precision=p.compute_bytes < FP32, model=config.model,
                                 tiles=on.multiplies_tiles)
    sequences, pieces = layouts.micro_batch(config.global_batch, config.grad_accum_steps,
                                             layout.batch_ranks)
    return MicroBatch(model=config.model, batch=sequences, kind=on.kind, attention=chosen,
                      compute_bytes=p.compute_bytes, residual_bytes=p.residual_bytes,
                      **sizes), pieces


def memory(config: Config, machine: "str | Machine" = "h200", devices: int | None = None, *,
           layout: Layout | None = None, precision: str | None = None,
           optimizer: str | None = None, zero: int = 0, recompute: str | None = None,
           attention: str | None = None, sequence_parallel: bool = True) -> Memory:
    """Bytes per device of one step of `config` on `devices` machines, where they are most.

    layout     None: data parallel over `devices`, with ZeRO stage `zero`; without `devices`, the
               config's `parallel`
    precision  a row of PRECISIONS; None: the config's recipe, where "auto" is bf16 if the machine
               has it
    optimizer, recompute, attention
               None: the config's, where "auto" attention is what a run on this machine chooses
    sequence_parallel
               tensor ranks have a part of each sequence between the matrices; without, all of it
    Raises ConfigError. Under 200 us in 16 bits, and up to 350 where operands are cast or there is
    a pipeline.
    """
    if layout is None:
        layout = config.parallel
        if devices is not None:
            layout = Layout(shard=devices, zero=zero) if zero else Layout(data=devices)
    on = machines.find(machine)
    row, settings = recompute_of(config, recompute)
    name = precision_of(config, on, precision)
    p = stored(config, name)
    # FSDP gathers in the compute dtype, so that the residual stream has it too
    if (_fsdp(layout, p) and GATHERED[layout.gathered].mixed
            and p.compute_bytes < p.residual_bytes):
        p = replace(p, residual_bytes=p.compute_bytes)
    operand_bytes = None
    if p.low:
        emulated = why_emulated(row_of(config, name), on, config.precision.backend)
        p = replace(p, low=replace(p.low, native=not emulated))
        operand_bytes = p.low.number_bytes
    plain = frozenset(p.low.keep) if p.low else frozenset()
    widened = FP32 if p.dtype == "fp16" and on.kind == "cpu" else 0     # few multiply float16
    operand_bytes = widened or operand_bytes
    s, pieces = on_device(config, on, layout, p, attention, operand_bytes=operand_bytes,
                          head_bytes=None if "head" in plain else operand_bytes,
                          attends_again=row.attention_alone)
    ops = as_it_is = operations(s)
    padded = _padded(config, p, s, ops)
    if padded:
        ops = _with_padding(ops, padded, s)
    stay = p.low.stay(config.model.L) if p.low else ()
    if stay:
        as_it_is = operations(replace(s, operand_bytes=None))
    keep = saved(s, ops, settings, plain=as_it_is, stay=stay)
    stages = [(True, True)] if layout.pipeline == 1 else [(True, False), (False, True)]
    doubt = _doubt(config, p, padded, s.attention)
    gathered = gathered_itemsizes(config, layout, name)
    found = [_stage(config, on, layout, p, s, ops, keep, settings, pieces, widened, padded,
                    optimizer or config.optimizer.name, embeds, heads, sequence_parallel, doubt,
                    gathered)
             for embeds, heads in stages]
    return found[0] if len(found) == 1 else max(found, key=lambda held: held.peak_bytes)


def _as_trained(layout: Layout, p: Precision) -> bool:
    """Whether lpkit.train has these axes and what rests in these dtypes; else others have."""
    return layout.devices == layout.batch_ranks and not p.master and not p.buffered


def _fsdp(layout: Layout, p: Precision) -> bool:
    """Whether weights rest in shards, and whole ones are gathered: lpkit.train's ZeRO 2 is FSDP
    that gathers once; others' keeps whole weights."""
    return layout.state_ranks > 1 and (layout.zero == 3 or (layout.zero == 2
                                                            and _as_trained(layout, p)))


TRACE = "; lpkit.predict_trace(config) counts every tensor instead"
WORDS = frozenset(("head", "first", "last"))


class Doubt(NamedTuple):
    """What the formula does not follow tensor by tensor; and by how much its peak was off those of
    measured steps in drawn configs of this kind, in percent (data/measured/ledger-*.json)."""

    words: str
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.words}, and nobody has measured how far that is off{TRACE}"
        return (f"{self.words}, and the peak was from {-self.low}% too low to {self.high}% too "
                f"high in drawn configs{TRACE}")


OFFLOADED = Doubt("what comes back, and what goes, is taken to be one tensor of the MLP", -29, 7)
PADDED = Doubt("whether a view keeps the padding of a result alive is taken by a rule", -7, 1)
LOW_HEAD = Doubt("a head in low precision is taken for one in 16 bits, a chunk at a time", -25, 0)


def _doubt(config: Config, p: Precision, padded: Mapping[str, Any], attention: str) -> str:
    """What the formula does not follow tensor by tensor, and what does."""
    memory, kind = config.memory, config.model.attention.name
    if changed := [row.name for row in (*config.transforms, *config.governors)]:
        return (f"what {', '.join(changed)} makes of the model is in no formula: parameters, bytes, "
                f"FLOPs and seconds are those of the model without; lpkit.measure.memory(config) "
                f"counts an update here")
    if changed := [row.name for row in config.model.changes]:
        return str(Doubt(f"what {', '.join(changed)} makes of a block is taken by the same rules"))
    if OBJECTIVES[config.objective.name].implementation:
        return str(Doubt(f"what objective={config.objective.name} holds is as its row says"))
    if attention == "plain" and KINDS[kind].state_bytes:
        return str(Doubt(f"the definition of {kind} attention is counted roughly"))
    if memory.activation_offload.name != "device":
        return str(OFFLOADED)
    if p.low is None:
        return ""
    if not WORDS.issuperset(p.low.keep):
        return str(Doubt("Linears that stay in 16 bits by a pattern are counted as the others"))
    if memory.cross_entropy.name != "full" and "head" not in p.low.keep:
        return str(LOW_HEAD)
    return str(PADDED) if padded else ""


def _padded(config: Config, p: Precision, s: MicroBatch,
            ops: Operations) -> dict[str, tuple[int, int, int]]:
    """Tokens, inputs and outputs of the Linears that are padded to tiles."""
    if p.low is None or not getattr(config.precision.recipe, "pad", False):
        return {}
    recipe, found = resolve(config.precision.recipe), {}
    head = () if "head" in p.low.keep else (ops.head,)
    for op in (*ops.linears, *head):
        size = (round(s.tokens * op.tokens_share), *op.matmul)
        if untiled(recipe, dict(zip("MKN", size))):
            found[op.name] = tuple(-(-side // recipe.tile) * recipe.tile for side in size)
    return found


def _with_padding(ops: Operations, padded: Mapping[str, tuple[int, int, int]],
                  s: MicroBatch) -> Operations:
    """Of what is padded: a Linear's saved input, and its result where the next operation saves a
    view of it."""
    block, more = [], 0.0
    for op in ops.block:
        if op.name in padded:
            M, K, N = padded[op.name]
            more = (M * N - s.tokens * op.tokens_share * op.matmul[1]) * s.compute_bytes
            op = replace(op, saved_bytes=M * K * s.operand_bytes)
        elif op.name == "mlp" or (op.name == "attention" and not any(op.score_passes)
                                  and not s.norms_save_qkv):
            op = replace(op, saved_bytes=op.saved_bytes + more)
        block.append(op)
    head = ops.head
    if head.name in padded:
        M, K, _ = padded[head.name]
        head = replace(head, saved_bytes=M * K * s.operand_bytes)
    return replace(ops, block=tuple(block), head=head)


def _stage(config: Config, on: Machine, layout: Layout, p: Precision, s: MicroBatch,
           ops: Operations, keep: Kept, recompute: Settings, pieces: int, widened: float,
           padded: Mapping[str, tuple[int, int, int]],
           optimizer: str, embeds: bool, heads: bool,
           sequence_parallel: bool, doubt: str,
           gathered_itemsizes: tuple[float, float, float]) -> Memory:
    """Of a device of a pipeline's first stage (`embeds`), of the last (`heads`), or of both."""
    m, techniques = s.model, rows_of(config)
    repeated, ranks = RECOMPUTE[recompute.name], layout.state_ranks
    cut, layers = layout.tensor * layout.context, -(-m.L // layout.pipeline)
    number_bytes = techniques["activation_offload"].number_bytes.get(on.kind)
    fetched = packed = 0.0
    if number_bytes is not None:
        keep = _offloaded(keep, s, ops, number_bytes)
        if not repeated.repeats_blocks:
            fetched, packed = _one_tensor(s, ops, bool(number_bytes))
    stream_cut = cut if sequence_parallel else layout.context
    if stream_cut < cut:
        keep = keep.sharded(cut, layers / m.L, *_whole_in_stream(keep, s, ops, repeated, cut,
                                                                 stream_cut))
    elif cut > 1 or layout.pipeline > 1:
        keep = keep.sharded(cut, layers / m.L)
    if not heads:
        keep = replace(keep, operations=keep.operations | {"norm": 0.0, "head": 0.0})
    parts = parameters(m)
    outside = parts["embedding"] + parts["positions"] + parts["head"]
    inside = (sum(parts.values()) - outside) * layers / m.L / layout.tensor
    tables = embeds * (parts["embedding"] + parts["positions"]) + heads * parts["head"]
    if m.tied and not embeds:
        tables += parts["embedding"]
    tables /= layout.tensor
    sharded, as_trained = _fsdp(layout, p), _as_trained(layout, p)
    whole = sharded and layout.zero == 2    # from forward until a block's backward
    at_once = not techniques["optimizer_step"].gradients_held
    again = range(0, layers, repeated.every(recompute)) if repeated.repeats_blocks else range(0)
    plain = set()
    if p.low:
        stay = p.low.stay(m.L)
        here = {"first": embeds and 0 in stay, "last": heads and m.L - 1 in stay,
                "head": "head" in p.low.keep}
        plain = {name for name, is_plain in here.items() if is_plain}
        if layers == 1 and "first" in plain:
            plain.add("last")
    # inside a pipeline nothing is resharded, and added up whole, until the last micro-batch
    staged = layout.pipeline > 1 and pieces > 1
    resting = on.kind in techniques["optimizer_state"].leaves
    row_of_optimizer, moment_format = optimizers.find(optimizer), config.memory.moment_format.name
    weight_bytes = PARAM_DTYPE[config.memory.param_dtype.name].param_bytes
    each = row_of_optimizer.update_bytes(moment_format, weight_bytes)
    state_bytes = row_of_optimizer.state_bytes(moment_format) if resting else 0.0
    # of a number: a block's as it is gathered, one outside of blocks, and gradients of them
    row_of_gathered, block = GATHERED[layout.gathered], inside / layers
    travels, travels_outside, _ = gathered_itemsizes
    made = p.compute_bytes if row_of_gathered.mixed else p.weights
    leave = sharded and not staged      # FSDP reduces in float32, a block at a time
    gradient_bytes = (p.weights if p.buffered else p.gradients) / (ranks if sharded else 1)
    z = walk.Walk(
        s, ops, keep, cut=cut, tensor=layout.tensor, layers=layers, sharded=sharded, embeds=embeds,
        heads=heads, low=p.low, again=again, gathers=pieces > 1 or at_once or p.buffered,
        plain=plain, stream_cut=stream_cut, widened=widened, padded=padded,
        update_bytes=each + state_bytes if at_once else 0.0,
        gradient_bytes=made if leave else gradient_bytes, shard_bytes=gradient_bytes,
        ahead_bytes=travels * leave, reduced_bytes=FP32 * leave,
        whole_bytes=travels * whole, gathers_casts=sharded and row_of_gathered.cast,
        chunk=techniques["cross_entropy"].chunk_tokens(config.memory.cross_entropy),
        fetched=fetched / cut, packed=packed / cut)
    *rows, gradients = model_states(inside + tables, precision=p, optimizer=optimizer,
                                    moment_format=moment_format, zero=3 if whole else layout.zero,
                                    devices=ranks, trained=trained_count(m) / parameter_count(m),
                                    work=optimizer_work(config, optimizer))
    rows = [one for one in rows
            if one.at[UPDATE] and not (resting and one.name == "optimizer state")]

    def row(name: str, at: Mapping[str, float], formula: str, source: str) -> None:
        if any(at.values()):
            rows.append(Row(name, at, formula, source))

    walked = {name: {moment: held[name] for moment, held in z.most.items() if held[name]}
              for name in z.now}
    at = walked[walk.GRADIENTS]
    if not z.gathers:
        at |= gradients.at
    elif not at_once:       # those of earlier micro-batches, or shards
        held = gradients.bytes
        if staged and layout.zero >= 2:
            held = (inside + tables) * p.gradients
        at = {moment: at.get(moment, 0) + held for moment in MOMENTS} | gradients.at
    if as_trained and layout.devices > 1 and not sharded:
        at, messages = _reduced(m, layout, p, at, pieces, walked[walk.TEMPORARIES])
        row("communication buffers", messages, f"gradients on their way, {layout.reduction}, and "
            f"what ZeRO 1 gathers weights into", "lpkit.parallel.replicas")
    row("gradients", at, gradients.formula, gradients.source)
    extra = OBJECTIVES[config.objective.name].operations(s, config.objective)
    rests = FP32 * sum(op.params for op in extra)
    row("objective", dict.fromkeys(MOMENTS, rests)
        | {LOSS: rests + sum(op.saved_bytes for op in extra)},
        "what rests of it, and what it saves beside next-token's loss", "operations of its row")
    read = 2 * TOKEN_ID + FP32 * bool(config.data.scores)
    row("batch", dict.fromkeys(MOMENTS, read * s.tokens * pieces / layout.context),
        "token ids and targets of one update, int64", "lpkit.datasets")
    # The first stage begins that many micro-batches before the first comes back (one forward, one
    # backward), and with chunks a part of one more (Korthikanti et al. 2022, appendix C).
    chunks, stages = layout.interleave, layout.pipeline
    under_way = min(pieces, stages * (1 - 1 / chunks) + 1 / chunks)
    if embeds:
        under_way = min(pieces, stages + (stages - 1) / chunks * (chunks > 1))
    waits = (under_way - 1) * keep.waiting_bytes
    activations = walked[walk.ACTIVATIONS]
    if waits:
        if not heads:   # and its result, which the next stage has: pipelining/stage.py, `fwd_cache`
            waits += (under_way - 1) * z.stream
        activations = dict.fromkeys(IN_BACKWARD, waits) | {
            moment: held + waits for moment, held in activations.items()}
    if sharded:
        ends = tables * travels_outside
        gathered = (dict.fromkeys(z.most, ends) |
                    dict.fromkeys((walk.LAST, walk.FIRST), ends + block * travels))
        what = "all outside the blocks, and the block at work, whole, in the compute dtype"
        if whole:
            gathered |= dict.fromkeys((LOSS, walk.HEAD), ends + inside * travels)
            # of which one is counted as on its way
            gathered[walk.LAST] = ends + (inside - (layers > 1) * block) * travels
            what = "whole weights, until a block's backward is done"
        if staged:
            gathered = dict.fromkeys(IN_BACKWARD, ends + inside * travels)
            what = "the whole stage in the compute dtype, from the first micro-batch to the last"
        row("gathered weights", gathered, what, FSDP)
        temporaries = walked[walk.TEMPORARIES]
        # those outside of blocks leave when all are there, and whole weights and gradients are gone
        # but for the embedding's
        leaving = max(block * FP32, tables * FP32 * (1 + 1 / ranks)
                      - (tables - z.table) * travels_outside - temporaries.get(walk.EMBED, 0))
        held = walked[walk.MESSAGES] | {walk.EMBED: leaving}
        if staged:
            copied = made if made < FP32 else 0
            held = {walk.LAST: block * made, walk.FIRST: block * (FP32 + copied),
                    walk.EMBED: tables * FP32}
        if whole:       # what the last block was gathered into, and for a moment the one before
            logits = temporaries.get(LOSS, 0)
            kept = keep.block_bytes + walked[walk.LOGITS].get(LOSS, 0)
            held[LOSS] = max(0.0, block * travels + max(-logits, block * travels - logits - kept))
        row("communication buffers", held,
            "one block's gradients, whole, reduced in float32 on their way to their shards", FSDP)
    row("weight copies", walked[walk.COPIES],
        "each weight of a 16-bit product once more in that dtype, until its backward", AMP)
    if p.low:
        cast = layers - len(plain & {"first", "last"})      # blocks whose Linears are
        lows = walked[walk.LOW]
        # one forward pass would cast each once anyway
        if config.precision.cache_weight_casts and (pieces > 1 or again):
            # casts that serve both products, and those that do not
            shared = 1 if p.low.w[0] == p.low.w[1] else 2
            held = z.linear_weights * cast * p.low.number_bytes * shared
            lows = dict.fromkeys(IN_BACKWARD, held)
        row("low-precision weights", lows,
            f"each weight as {p.what.split()[-1]} casts it, until its backward", LINEAR)
        scales = cast * sum(p.low.scales(z.tokens * op.tokens_share, *op.matmul)
                            for op in ops.linears)
        row("scales", dict.fromkeys((walk.LOSS, walk.HEAD, walk.LAST), scales),
            "of the operands that are kept", LINEAR)
        amaxes = 3 * (1 + p.low.history) if p.low.history else 0
        row("amax histories", dict.fromkeys(MOMENTS, cast * len(ops.linears) * amaxes * FP32),
            "the largest magnitudes of x, w and dy in earlier micro-batches", LINEAR)
    words = f"micro-batch of {s.batch}, {m.T:,} tokens each, recompute={recompute}"
    if repeated.kept_share is not None:
        words += (f", an estimate: at most {repeated.kept_share(recompute):g} of what autograd "
                  f"keeps, as torch.compile chooses")
    words += f", attention={s.attention}"
    if under_way > 1:
        words += f", {under_way:g} micro-batches under way"
    row("activations", activations, words, "lpkit.predict.activations")
    row("recomputed block", walked[walk.AGAIN], "one block's activations, all of them", CHECKPOINTS)
    row("logits and loss", walked[walk.LOGITS],
        "a float32 log-probability per token and vocabulary entry", CROSS_ENTROPY)
    temporaries = walked[walk.TEMPORARIES]
    row("logits' gradients", {LOSS: temporaries.pop(LOSS, 0)} if heads else {},
        "of the log-probabilities and of the logits, float32", CROSS_ENTROPY)
    shards = layout.tensor * (ranks if layout.zero else 1)
    updating = _update_bytes(ops, each, state_bytes, shards, layers > 1)
    if not optimizers.elementwise(config.optimizer) and optimizer == config.optimizer.name:
        updating = optimizers.whole_update_bytes(shapes(m), config.optimizer, moment_format,
                                                 weight_bytes, shards)
    row("optimizer temporaries", {} if at_once else {UPDATE: updating},
        "the moments and the weight of the largest parameter, as its update wants them",
        "lpkit.optim.stepper")
    row("temporaries", temporaries,
        "gradients of activations, and what is cast or copied on the way", ENGINE)
    apart, unused = {}, 0.0
    if on.kind == "gpu" and sharded:    # FSDP2 reduces and gathers on streams of their own
        apart = {"gathered at once": max(tables * travels_outside, block * travels),
                 "gradients of shards" if staged else "gradients": gradients.bytes}
    if on.kind == "gpu" and heads and not z.chunk and p.compute_bytes < FP32:
        unused = z.tokens * m.V * p.compute_bytes
    return Memory(rows=tuple(rows), memory_bytes=on.memory_bytes, doubt=doubt, apart=apart,
                  unused_bytes=unused)


def _reduced(m: ModelConfig, layout: Layout, p: Precision, whole: Mapping[str, float], pieces: int,
             temporaries: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Gradients of replicas and of ZeRO 1 in the last micro-batch, and what messages hold besides,
    by moment. `whole`: gradients that nobody sends. Messages leave as backward has their gradients,
    or after it; two are under way. A parameter alone travels as it lies."""
    row, ranks, sharded = REDUCTIONS[layout.reduction], layout.shard, layout.stage == 1
    sizes, copied, so_far, spread = _message_bytes(m, row.bucket_bytes // p.weights, p.gradients,
                                                   ranks if sharded else 1)
    at, messages, total = dict(whole), dict.fromkeys(IN_BACKWARD, 0.0), so_far[-1]
    most = total + max(copied)      # once backward is done
    if row.overlaps:
        most = total + copied[-1]
    if row.overlaps and sharded:
        for moment in (walk.LAST, walk.FIRST, walk.EMBED):
            there = total - sizes[-1] if moment == walk.EMBED else whole.get(moment, 0)
            if pieces > 1 and moment != walk.EMBED:
                there = 0.0         # gradients of earlier micro-batches, the last one's are added
            gone = bisect_right(so_far, there) - 1
            at[moment] = whole.get(moment, 0) - so_far[gone] * (1 - 1 / ranks)
            messages[moment] = so_far[gone] - so_far[max(0, gone - 2)]
        most = sizes[-1] + copied[-1] + sum(sizes[-2:-1]) + so_far[-2] / ranks
    held = at.get(walk.EMBED, 0) + temporaries.get(walk.EMBED, 0)
    messages[walk.EMBED] = max(messages[walk.EMBED], most - held)
    if sharded:
        at[UPDATE] = total / ranks
        messages[UPDATE] = max(0.0, spread - at[UPDATE])
    return at, messages


@functools.lru_cache(maxsize=256)
def _message_bytes(m: ModelConfig, most: int, itemsize: int,
                   ranks: int) -> tuple[list[int], list[int], list[int], float]:
    """Of each bucket of gradients, and of its copy: 0 where it travels as it lies; those of all
    before it, and at last of all; and the most of one's part beside its copy."""
    sent = buckets(m, most)
    sizes = [itemsize * sum(map(math.prod, bucket)) for bucket in sent]
    copied = [nbytes * (len(bucket) > 1 or bucket[0][0] % ranks > 0)
              for nbytes, bucket in zip(sizes, sent)]
    spread = max(nbytes / ranks + copy for nbytes, copy in zip(sizes, copied))
    return sizes, copied, [0, *accumulate(sizes)], spread


def _whole_in_stream(keep: Kept, s: MicroBatch, ops: Operations, repeated: Recompute, cut: int,
                     stream_cut: int) -> tuple[dict[str, float], float]:
    """Operations on the residual stream, which tensor ranks without sequence parallelism have
    whole, with what cuts them; and what a block keeps that runs again."""
    whole = {op.name: stream_cut for op in (*ops.block, ops.norm, ops.head)
             if op.in_stream or op.cut == "column"}
    if not keep.again_bytes:
        return whole, 0.0
    wide = s.stream_bytes
    if repeated.keeps_results:
        wide += sum(op.result_bytes for op in ops.linears if op.cut == "row")
    return whole, (keep.again_bytes - wide) / cut + wide / stream_cut


def _offloaded(keep: Kept, s: MicroBatch, ops: Operations, number_bytes: float) -> Kept:
    """With `number_bytes` on the device for each number that blocks keep."""
    shares = {op.name: number_bytes / op.saved_itemsize for op in ops.block}
    return keep.offloaded(shares, s.stream_bytes, number_bytes / s.residual_bytes)


def _one_tensor(s: MicroBatch, ops: Operations, quantized: bool) -> tuple[float, float]:
    """One comes back, from codes by way of float32; and what is at work while codes are made."""
    widest = max(op.matmul[0] for op in ops.linears)
    nbytes = max(widest * s.compute_bytes, s.model.D * s.residual_bytes) * s.tokens
    if not quantized:
        return nbytes, 0.0
    return (nbytes * (1 + FP32 / s.compute_bytes),
            nbytes * (2 + PACKED[s.compute_bytes] / s.compute_bytes))


def _update_bytes(ops: Operations, each: float, state_bytes: float, shards: int,
                  more: bool) -> float:
    """While the largest parameter is updated by itself, with `each` bytes a number; a fused step
    over all needs nothing. `state_bytes` of a number are fetched, for it and for the next one.
    `more`: there is more than one block."""
    weights, fetched = [op.weights for op in ops.linears if op.trained], 0
    if state_bytes:
        ends = [op.params * op.trained for op in (ops.embed, ops.positions, ops.head)]
        in_order = [*ends[:2], *weights, *weights * more, ends[2]]
        fetched = max(map(sum, pairwise(filter(None, in_order))))
    largest = max(0, ops.embed.params * ops.embed.trained, *weights)
    return (each * largest + state_bytes * fetched) / shards
