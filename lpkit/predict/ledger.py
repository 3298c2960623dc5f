"""Bytes that one device holds in a training step, by what they are for and by when.

A row lives at some moments of the step, and the peak is the largest moment, not the sum of the
rows. Sources: Rajbhandari et al. 2020, ZeRO, section 3 (https://arxiv.org/abs/1910.02054) for model
states and their sharding; `activations` for what the forward pass keeps.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from lpkit.config import Config
from lpkit.errors import ConfigError, pick
from lpkit.predict import walk
from lpkit.predict.activations import Kept, saved
from lpkit.predict.params import of, parameters
from lpkit.predict.recipes import Low, low_of
from lpkit.techniques import machines, optimizers
from lpkit.techniques.blocks import (
    ATTENTION,
    FP32,
    TOKEN_ID,
    MicroBatch,
    Operations,
    choose_attention,
    operations,
)
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.memory import PARAM_DTYPE, RECOMPUTE, recompute_of, rows_of
from lpkit.techniques.recipes import RECIPES, Recipe, resolve
from lpkit.techniques.row import Settings

MOMENTS = {     # in the order in which they come
    walk.LOSS: "everything is kept, and the logits have their gradients",
    walk.HEAD: "the head has its gradient, the last norm is at work",
    walk.LAST: "the first one that backward meets, where activations are many and gradients few",
    walk.FIRST: "the last one that backward meets, where activations are few and gradients many",
    walk.EMBED: "each table has a dense gradient",
    walk.UPDATE: "nothing is kept any more, and every gradient is there",
}
# bytes a number while its code is found: in float32, padded, from the least, and the noise
PACKED = {2: 16, 4: 12}
LOSS, UPDATE = walk.LOSS, walk.UPDATE
ZERO = "Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054"
FSDP = "FSDP2, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
LINEAR = "lpkit.precision.linear"
ENGINE = "PyTorch's autograd engine, as lpkit.predict.walk follows it"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of one number. `dtype` is what the products compute in."""

    dtype: str
    weights: int
    gradients: int
    master: int          # a float32 copy that the optimizer updates
    compute: int
    stream: int          # the residual stream
    what: str
    low: Low | None = None      # how the Linears are cast


_BF16 = Precision(dtype="bf16", weights=4, gradients=4, master=0, compute=2, stream=4,
                  what="float32 weights, bf16 products by autocast: what lpkit.train does")
_NAMED = {
    "fp32": Precision(dtype="fp32", weights=4, gradients=4, master=0, compute=4, stream=4,
                      what="float32 throughout"),
    "bf16": _BF16,
    "fp16": replace(_BF16, dtype="fp16", what="float32 weights, float16 products by autocast"),
    "bf16-master": Precision(dtype="bf16", weights=2, gradients=2, master=4, compute=2, stream=2,
                             what="bf16 weights and gradients, float32 master weights: the ZeRO "
                             "paper's setting"),
    "bf16-pure": Precision(dtype="bf16", weights=2, gradients=2, master=0, compute=2, stream=2,
                           what="bf16 throughout; small updates are lost, unless rounding is "
                           "stochastic"),
}


class _Precisions(Mapping):
    """The named ones, and one for each recipe that casts."""

    def __getitem__(self, name: str) -> Precision:
        return _NAMED[name] if name in _NAMED else precision_of_recipe(name, RECIPES[name])

    def __iter__(self) -> Iterator[str]:
        return iter((*_NAMED, *(name for name in RECIPES if name not in _NAMED)))

    def __len__(self) -> int:
        return len(list(iter(self)))


PRECISIONS = _Precisions()


@functools.cache
def precision_of_recipe(name: str, recipe: Recipe) -> Precision:
    """As a run under `recipe`, the row `name` or a change of it, has it."""
    if name in _NAMED:
        return _NAMED[name]
    return replace(_BF16, dtype=recipe.dtype, compute=2 if recipe.compute else 4,
                   low=low_of(recipe), what=f"float32 weights, products under {name}")


def stored(config: Config, precision: str) -> Precision:
    """A row of PRECISIONS as `config` stores its parameters and as its settings change the
    recipe."""
    asked = config.precision.recipe
    if asked.name == precision:
        p = precision_of_recipe(precision, resolve(asked))
    else:
        p = _precision(precision)
    row = PARAM_DTYPE[config.memory.param_dtype.name]
    if row.residual_bytes is None:
        return p
    return replace(p, weights=row.param_bytes, gradients=row.param_bytes, stream=row.residual_bytes)


@dataclass(frozen=True, kw_only=True)
class Row:
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
    def fits(self) -> bool:
        """Without the 5 to 10% that an allocator and the driver take for themselves."""
        return self.memory_bytes is None or self.peak_bytes <= self.memory_bytes


def model_states(count: float, *, precision: "str | Precision" = "bf16-master",
                 optimizer: str = "adamw", moment_format: str = "float32", zero: int = 0,
                 devices: int = 1) -> tuple[Row, ...]:
    """What outlives a step, for `count` parameters.

    ZeRO stage 1 shards the optimizer's state, master weights with it, over `devices`; 2 the
    gradients too; 3 the weights too.
    """
    p = precision if isinstance(precision, Precision) else _precision(precision)
    per_parameter = optimizers.find(optimizer).state_bytes(moment_format)
    if zero not in (0, 1, 2, 3):
        raise ConfigError(f"there is no ZeRO stage {zero}; choose 0, 1, 2 or 3")
    if devices < 1:
        raise ConfigError(f"devices must be 1 or more, got {devices}")

    def row(name: str, itemsize: float, stage: int, moments: Iterable[str], why: str) -> Row:
        shards = devices if zero >= stage else 1
        sharded = f", over {devices} devices" if shards > 1 else ""
        return Row(name=name, at=dict.fromkeys(moments, itemsize * count / shards), source=ZERO,
                   formula=f"{itemsize:g} bytes a parameter{sharded}: {why}")

    return (row("weights", p.weights, 3, MOMENTS, p.what),
            row("master weights", p.master, 1, MOMENTS, "a float32 copy for the optimizer"),
            row("optimizer state", per_parameter, 1, MOMENTS,
                optimizers.describe_state(optimizer, moment_format)),
            row("gradients", p.gradients, 2, (UPDATE,), "the same dtype as the weights"))


def micro_batch(config: Config, devices: int) -> tuple[int, int]:
    """Sequences per device at a time, and how many times until the update.

    `config.global_batch` is the whole update's; `config.grad_accum_steps` says how large a piece
    fits one device.
    """
    if config.global_batch % devices:
        raise ConfigError(f"global_batch={config.global_batch} sequences do not split evenly over "
                          f"{devices} devices; set global_batch to "
                          f"{-(-config.global_batch // devices) * devices}, or use fewer devices")
    share = config.global_batch // devices
    piece = min(config.global_batch // config.grad_accum_steps, share)
    while share % piece:
        piece -= 1
    return piece, share // piece


def memory(config: Config, machine: "str | Machine" = "h200", devices: int | None = None, *,
           layout: Layout | None = None,
           precision: str | None = None, optimizer: str | None = None, zero: int = 0,
           recompute: str | None = None, attention: str | None = None) -> Memory:
    """Bytes per device of one step of `config` on `devices` machines, where they are most.

    layout     None: data parallel over `devices`, with ZeRO stage `zero`; without `devices`, the
               config's `parallel`
    precision  a row of PRECISIONS; None: the config's recipe, where "auto" is bf16
    optimizer, recompute, attention: None: the config's, where "auto" attention is what a run on
    this machine chooses Raises ConfigError. Under 200 us.
    """
    if layout is None:
        layout = config.parallel
        if devices is not None:
            layout = Layout(shard=devices, zero=zero) if zero else Layout(data=devices)
    on, m = machines.find(machine), config.model
    row, settings = recompute_of(config, recompute)
    p = stored(config, precision or {"auto": "bf16"}.get(config.precision.recipe.name,
                                                         config.precision.recipe.name))
    # FSDP gathers in the compute dtype, so that the residual stream has it too
    if _sharded(layout):
        p = replace(p, stream=min(p.stream, p.compute))
    attention = attention_of(config, on, p, attention)
    sequences, pieces = micro_batch(config, layout.batch_ranks)
    s = last = MicroBatch(model=m, batch=sequences, compute_bytes=p.compute,
                          residual_bytes=p.stream, kind=on.kind, attention=attention,
                          operand_bytes=p.low.held_bytes(_native(p, on)) if p.low else None)
    if p.low and "last" in p.low.keep:
        last = replace(s, operand_bytes=None)
    ops = operations(s)
    keep = saved(s, settings, last=last)
    number_bytes, fetched, packed = (rows_of(config)["activation_offload"].number_bytes.get(
        on.kind), 0.0, 0.0)
    if number_bytes is not None:
        if not row.repeats:     # a tensor at a time comes back, from codes by way of float32
            widest = max(op.matmul[0] for op in ops.linears)
            numbers = max(widest * p.compute, m.D * p.stream) * s.tokens
            fetched = numbers * (1 + (FP32 / p.compute if number_bytes else 0))
            packed = numbers * (2 + PACKED[p.compute] / p.compute) if number_bytes else 0.0
        keep = keep.offloaded(number_bytes, ops, p.stream)
    ends = [(True, True)] if layout.pipeline == 1 else [(True, False), (False, True)]
    stages = [_stage(config, on, layout, p, s, ops, keep, optimizer or config.optimizer.name,
                     pieces=pieces, recompute=settings, fetched=fetched, packed=packed,
                     embeds=embeds, heads=heads)
              for embeds, heads in ends]
    return max((Memory(rows=rows, memory_bytes=on.memory_bytes) for rows in stages),
               key=lambda held: held.peak_bytes)


def attention_of(config: Config, on: Machine, p: Precision, asked: str | None = None) -> str:
    """The attention backend of a run of `config` on a machine. Raises ConfigError for an unknown
    name."""
    chosen, _ = choose_attention(asked or config.model.attention, device=on.kind,
                                 low_precision=p.compute < FP32, context=config.model.T)
    pick(ATTENTION, chosen, "model.attention")
    return chosen


def _stage(config: Config, on: Machine, layout: Layout, p: Precision, s: MicroBatch,
           ops: Operations, keep: Kept, optimizer: str, *, pieces: int, recompute: Settings,
           fetched: float, packed: float,
           embeds: bool, heads: bool) -> tuple[Row, ...]:
    """The rows of a device of the first stage of a pipeline (`embeds`), of the last (`heads`), or
    of all there is."""
    m, cut = config.model, layout.tensor * layout.context
    layers, ranks = -(-m.L // layout.pipeline), layout.state_ranks
    parts = parameters(m)
    outside = parts["embedding"] + parts["positions"] + parts["head"]
    inside = (sum(parts.values()) - outside) * layers / m.L / layout.tensor
    tables = embeds * (parts["embedding"] + parts["positions"]) + heads * (
        parts["head"] + (parts["embedding"] if m.tied and not embeds else 0))
    count = inside + tables / layout.tensor
    sharded, native = _sharded(layout), _native(p, on)
    techniques, repeated = rows_of(config), RECOMPUTE[recompute.name]
    at_once = not techniques["optimizer_step"].gradients_held
    if cut > 1 or layout.pipeline > 1:
        keep = keep.sharded(cut, layers / m.L)
    z = walk.Share(
        micro_batch=s, ops=ops, cut=cut, tensor=layout.tensor, layers=layers,
        gradient_bytes=p.gradients / (ranks if sharded else 1), gathers=pieces > 1 or at_once,
        sharded=sharded, embeds=embeds, heads=heads, low=p.low,
        last_is_kept=p.low is not None and heads and "last" in p.low.keep, native=native,
        fetched=fetched / cut, packed=packed / cut)
    again = range(0, layers, repeated.every(recompute)) if repeated.repeats else range(0)
    chunk = techniques["cross_entropy"].chunk_tokens(config.memory.cross_entropy)
    moments = walk.walk(z, keep, again=again, chunk=chunk).most

    def at(row: str) -> dict[str, float]:
        return {moment: rows[row] for moment, (_, rows) in moments.items() if rows[row]}

    states = model_states(count, precision=p, optimizer=optimizer,
                          moment_format=config.memory.moment_format.name, zero=layout.zero,
                          devices=ranks)
    gradients = at(walk.GRADIENTS)
    if not z.gathers:
        gradients |= states[-1].at
    elif not at_once:       # those of earlier micro-batches, or shards
        gradients = {moment: gradients.get(moment, 0) + states[-1].bytes for moment in MOMENTS}
    # The first stage begins that many micro-batches before the first comes back (one forward, one
    # backward), and with
    # chunks a part of one more (Korthikanti et al. 2022, appendix C).
    stages = layout.pipeline
    waiting = (min(stages + ((stages - 1) / layout.interleave if layout.interleave > 1 else 0)
                   if embeds else 1, pieces) - 1)
    waits = waiting * (keep.total_bytes - keep.loss_bytes - keep.operations["embed"])
    activations = {moment: held + waits for moment, held in at(walk.ACTIVATIONS).items()}
    if waits:
        activations = dict.fromkeys([moment for moment in MOMENTS if moment != UPDATE],
                                    waits) | activations
    rows = [*states[:-1], replace(states[-1], at=gradients)]

    def row(name: str, held: Mapping[str, float], formula: str, source: str) -> None:
        rows.append(Row(name=name, at=held, formula=formula, source=source))

    row("batch", dict.fromkeys(MOMENTS, 2 * TOKEN_ID * s.tokens * pieces / layout.context),
        "token ids and targets of one update, int64", "lpkit.datasets")
    if sharded:
        block, outside = inside / layers, tables / layout.tensor
        own, reduced = block * p.compute, block * (FP32 + (p.compute if p.compute < FP32 else 0))
        each = keep.again_bytes if layers - 1 in again else keep.block_bytes
        # The first block has its gradients; or they are on their way, in float32 too, while the
        # next one is at work.
        late = layers > 1 and reduced - own > each
        activations[walk.LAST] = activations.get(walk.LAST, 0) - late * each
        row("gathered weights", dict.fromkeys(moments, outside * p.compute) |
            dict.fromkeys((walk.LAST, walk.FIRST), (outside + block) * p.compute),
            "all outside the blocks, and the block at work, whole, in the compute dtype", FSDP)
        row("communication buffers", {walk.LAST: reduced if late else own, walk.FIRST: reduced,
                                       walk.EMBED: outside * FP32},
            "one block's gradients, whole, reduced in float32 on their way to their shards", FSDP)
    row("weight copies", at(walk.COPIES),
        "each weight of a 16-bit product once more in that dtype, until its backward",
        "https://docs.pytorch.org/docs/stable/amp.html")
    if p.low:
        cast = layers - z.last_is_kept      # blocks whose Linears are
        scales = sum(p.low.scales(z.tokens, *op.matmul, native) for op in ops.linears) * cast
        lows = at(walk.LOW)
        # one forward pass would cast each once anyway
        if config.precision.cache_weight_casts and (pieces > 1 or again):
            # casts that serve both products, and those that do not
            shared = (1 if p.low.w[0] == p.low.w[1] else 2)
            weights = sum(op.weights for op in ops.linears) / layout.tensor * cast
            held = weights * p.low.held_bytes(native) * shared
            lows = dict.fromkeys([moment for moment in MOMENTS if moment != UPDATE], held)
        row("low-precision weights", lows,
            f"each weight as {p.what.split()[-1]} casts it, until its backward", LINEAR)
        row("scales", dict.fromkeys((walk.LOSS, walk.HEAD, walk.LAST), scales),
            "of the operands that are kept", LINEAR)
        histories = cast * len(ops.linears) * 3 * (1 + p.low.history) * FP32 if p.low.history else 0
        row("amax histories", dict.fromkeys(MOMENTS, histories),
            "the largest magnitudes of x, w and dy in earlier micro-batches", LINEAR)
    words = f"micro-batch of {s.batch}, {m.T:,} tokens each, recompute={recompute}"
    if repeated.kept_share is not None:
        words += (f", an estimate: at most {repeated.kept_share(recompute):g} of what autograd "
                  f"keeps, as torch.compile chooses")
    words += f", attention={s.attention}"
    if waiting:
        words += f", {waiting + 1:g} micro-batches under way"
    row("activations", activations, words, "lpkit.predict.activations")
    row("recomputed block", at(walk.AGAIN), "one block's activations, all of them",
        "Chen et al. 2016, https://arxiv.org/abs/1604.06174")
    row("logits and loss", at(walk.LOGITS),
        "a float32 log-probability per token and vocabulary entry",
        "torch.nn.functional.cross_entropy")
    temporaries = at(walk.TEMPORARIES)
    row("logits' gradients", {LOSS: temporaries.pop(LOSS, 0)} if heads else {},
        "of the log-probabilities and of the logits, float32", "torch.nn.functional.cross_entropy")
    resting = on.kind in techniques["optimizer_state"].leaves
    if resting:
        rows = [one for one in rows if one.name != "optimizer state"]
    row("optimizer temporaries", {UPDATE: _update_bytes(config, optimizer, resting, layout.tensor)},
        "the moments and the weight of the largest parameter, as its update wants them",
        "lpkit.optim.stepper")
    row("temporaries", temporaries,
        "gradients of activations, and what is cast or copied on the way", ENGINE)
    return tuple(one for one in rows if one.bytes)


def _sharded(layout: Layout) -> bool:
    return layout.zero == 3 and layout.state_ranks > 1


def _native(p: Precision, on: Machine) -> bool:
    """Whether operands lie in memory in the bits of their format."""
    return p.low is not None and on.kind == "gpu" and p.dtype in on.flops


def _update_bytes(config: Config, optimizer: str, resting: bool, shards: int) -> float:
    """While the largest parameter is updated by itself; a fused step over all of them needs
    nothing."""
    ops = of(config.model)
    weights = [op.weights for op in ops.linears]
    largest = max(ops.embed.params, *weights) / shards
    row, stored_as = optimizers.find(optimizer), config.memory.moment_format.name
    held = (largest * row.update_bytes(stored_as,
                                       PARAM_DTYPE[config.memory.param_dtype.name].param_bytes))
    if resting:     # fetched: this parameter's state and the next one's
        neighbours = max(map(sum, pairwise(weights)))
        held += row.state_bytes(stored_as) * max(ops.embed.params, neighbours) / shards
    return held


def _precision(name: str) -> Precision:
    return pick(PRECISIONS, name, "precision")
