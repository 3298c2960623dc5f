"""Bytes that one device holds in a training step, by what they are for and by when.

A row lives at some moments of the step, and the peak is the largest moment, not the sum of the rows. Sources:
Rajbhandari et al. 2020, ZeRO, section 3 (https://arxiv.org/abs/1910.02054) for model states and their sharding;
`activations` for what the forward pass keeps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from lpkit.config import Config
from lpkit.errors import ConfigError, nearest
from lpkit.predict import walk
from lpkit.predict.activations import FP32, TOKEN_ID, Kept, kept
from lpkit.predict.params import UPS, parameters
from lpkit.predict.recipes import LOW, Low
from lpkit.techniques import machines, optimizers
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine

Item = TypeVar("Item")
MOMENTS = {     # in the order in which they come
    walk.LOSS: "everything is kept, and the logits have their gradients",
    walk.HEAD: "the head has its gradient, the last norm is at work",
    walk.LAST: "the first one that backward meets, where activations are many and gradients few",
    walk.FIRST: "the last one that backward meets, where activations are few and gradients many",
    walk.EMBED: "each table has a dense gradient",
    walk.UPDATE: "nothing is kept any more, and every gradient is there",
}
STORED = {      # what `memory.parameters` makes of the bytes of a Precision
    "fp32": {}, "bf16": {"weights": 2, "gradients": 2, "stream": 2},
}
AT_ONCE = {"after": False, "in-backward": True}
RESTS = {"device": (), "cpu": ("gpu",), "disk": ("cpu", "gpu")}     # kinds of machines whose memory the state leaves
CACHED = {"cast": False, "cached": True}
SAVED = {       # bytes for each number that blocks keep, by the kind of machine; None: as it is
    "device": {}, "cpu": {"gpu": 0.0}, "disk": {"cpu": 0.0, "gpu": 0.0},
    **{f"int{bits}": dict.fromkeys(("cpu", "gpu"), bits / 8 + 8 / 256) for bits in (8, 4, 2)},
}
PACKED = {2: 16, 4: 12}     # bytes a number while its code is found: in float32, padded, from the least, and the noise
CHUNKS = {"whole": lambda tokens: 0, "chunked": lambda tokens: tokens}
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


DTYPES = {"nvfp4": "fp4", "int8": "int8"}
_BF16 = Precision(dtype="bf16", weights=4, gradients=4, master=0, compute=2, stream=4,
                  what="float32 weights, bf16 products by autocast: what lpkit.train does")
PRECISIONS = {
    "fp32": Precision(dtype="fp32", weights=4, gradients=4, master=0, compute=4, stream=4, what="float32 throughout"),
    "bf16": _BF16,
    "fp16": replace(_BF16, dtype="fp16", what="float32 weights, float16 products by autocast"),
    "bf16-master": Precision(dtype="bf16", weights=2, gradients=2, master=4, compute=2, stream=2,
                             what="bf16 weights and gradients, float32 master weights: the ZeRO paper's setting"),
    "bf16-pure": Precision(dtype="bf16", weights=2, gradients=2, master=0, compute=2, stream=2,
                           what="bf16 throughout; small updates are lost, unless rounding is stochastic"),
    **{name: replace(_BF16, dtype=DTYPES.get(name, "fp8"), low=low, what=f"float32 weights, products under {name}")
       for name, low in LOW.items()},
}


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


def model_states(count: float, *, precision: "str | Precision" = "bf16-master", optimizer: str = "adamw",
                 moment_format: str = "float32", zero: int = 0, devices: int = 1) -> tuple[Row, ...]:
    """What outlives a step, for `count` parameters.

    ZeRO stage 1 shards the optimizer's state, master weights with it, over `devices`; 2 the gradients too; 3 the
    weights too.
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
            row("optimizer state", per_parameter, 1, MOMENTS, optimizers.describe_state(optimizer, moment_format)),
            row("gradients", p.gradients, 2, (UPDATE,), "the same dtype as the weights"))


def micro_batch(config: Config, devices: int) -> tuple[int, int]:
    """Sequences per device at a time, and how many times until the update.

    `config.batch` is the whole update's; `config.accumulate` says how large a piece fits one device.
    """
    if config.batch % devices:
        raise ConfigError(f"batch={config.batch} sequences do not split evenly over {devices} devices; "
                          f"set batch to {-(-config.batch // devices) * devices}, or use fewer devices")
    share = config.batch // devices
    piece = min(config.batch // config.accumulate, share)
    while share % piece:
        piece -= 1
    return piece, share // piece


def memory(config: Config, machine: "str | Machine" = "h200", devices: int = 1, *, layout: Layout | None = None,
           precision: str | None = None, optimizer: str | None = None, zero: int = 0, recompute: str | None = None,
           attention: str = "sdpa") -> Memory:
    """Bytes per device of one step of `config` on `devices` machines, where they are most.

    layout     None: data parallel over `devices`, with ZeRO stage `zero`
    precision  a row of PRECISIONS; None: the config's recipe, where "auto" is bf16
    optimizer, recompute: None: the config's
    Raises ConfigError. Under 200 us.
    """
    layout = layout or (Layout(shard=devices, zero=zero) if zero else Layout(data=devices))
    on, recompute = machines.find(machine), recompute or config.memory.recompute
    p = _precision(precision or {"auto": "bf16"}.get(config.precision.recipe, config.precision.recipe))
    if stored := _of(STORED, config.memory.parameters, "memory.parameters"):
        p = replace(p, **stored)
    if _sharded(layout):    # FSDP gathers in the compute dtype, so that the residual stream has it too
        p = replace(p, stream=min(p.stream, p.compute))
    sequences, pieces = micro_batch(config, layout.batch_ranks)
    operand = p.low and p.low.held_bytes(_native(p, on))
    keep = kept(config.model, batch=sequences, compute=p.compute, stream=p.stream, attention=attention,
                recompute=recompute, every=config.memory.recompute_every, kind=on.kind, operand=operand,
                last_operand=None if p.low and "last" in p.low.keep else operand)
    away, fetched = _of(SAVED, config.memory.saved, "memory.saved").get(on.kind), 0.0
    packed = 0.0
    if away is not None:
        if recompute == "none":     # a tensor at a time comes back, from codes by way of float32
            m = config.model
            numbers = max(m.F * p.compute, m.D * p.stream) * sequences * m.T
            fetched = numbers * (1 + (FP32 / p.compute if away else 0))
            packed = numbers * (2 + PACKED[p.compute] / p.compute) if away else 0.0
        keep = keep.away(away, compute=p.compute, stream=p.stream)
    ends = [(True, True)] if layout.pipeline == 1 else [(True, False), (False, True)]
    stages = [_stage(config, on, layout, p, keep, optimizer or config.optimizer.name, sequences=sequences, pieces=pieces,
                     recompute=recompute, attention=attention, fetched=fetched, packed=packed, embeds=first, heads=last)
              for first, last in ends]
    return max((Memory(rows=rows, memory_bytes=on.memory_bytes) for rows in stages), key=lambda held: held.peak_bytes)


def _stage(config: Config, on: Machine, layout: Layout, p: Precision, keep: Kept, optimizer: str, *, sequences: int,
           pieces: int, recompute: str, attention: str, fetched: float, packed: float,
           embeds: bool, heads: bool) -> tuple[Row, ...]:
    """The rows of a device of the first stage of a pipeline (`embeds`), of the last (`heads`), or of all there is."""
    m, cut = config.model, layout.tensor * layout.context
    layers, ranks = -(-m.L // layout.pipeline), layout.state_ranks
    parts = parameters(m)
    inside = (parts["attention"] + parts["mlp"] + parts["norms"]) * layers / m.L / layout.tensor
    tables = embeds * (parts["embedding"] + parts["positions"]) + heads * (
        parts["head"] + (parts["embedding"] if m.tied and not embeds else 0))
    count = inside + tables / layout.tensor
    sharded, native = _sharded(layout), _native(p, on)
    at_once = _of(AT_ONCE, config.memory.update, "memory.update")
    if cut > 1 or layout.pipeline > 1:
        keep = keep.share(cut, layers / m.L)
    z = walk.Sizes(
        model=m, batch=sequences / cut, tokens=sequences * m.T / cut, shards=layout.tensor, layers=layers,
        compute=p.compute, stream=p.stream, gradient=p.gradients / (ranks if sharded else 1), fused_norm=on.kind == "gpu",
        copied=p.compute < p.stream, gathers=pieces > 1 or at_once, sharded=sharded, embeds=embeds, heads=heads, low=p.low,
        last_is_kept=p.low is not None and heads and "last" in p.low.keep, native=native, attention=attention,
        fetched=fetched / cut, packed=packed / cut)
    again = range(0, layers, config.memory.recompute_every) if recompute != "none" else range(0)
    moments = walk.walk(z, keep, again=again, chunk=_of(CHUNKS, config.memory.loss, "memory.loss")(config.memory.loss_chunk)).most

    def at(row: str) -> dict[str, float]:
        return {moment: rows[row] for moment, (_, rows) in moments.items() if rows[row]}

    states = model_states(count, precision=p, optimizer=optimizer, moment_format=config.memory.moment_format,
                          zero=layout.zero, devices=ranks)
    gradients = at(walk.GRADIENTS)
    if not z.gathers:
        gradients |= states[-1].at
    elif not at_once:       # those of earlier micro-batches, or shards
        gradients = {moment: gradients.get(moment, 0) + states[-1].bytes for moment in MOMENTS}
    # The first stage begins that many micro-batches before the first comes back (one forward, one backward), and with
    # chunks a part of one more (Korthikanti et al. 2022, appendix C).
    stages = layout.pipeline
    waiting = min(stages + ((stages - 1) / layout.interleave if layout.interleave > 1 else 0) if embeds else 1, pieces) - 1
    waits = waiting * (keep.total_bytes - keep.loss_bytes - keep.operations["embed"])
    activations = {moment: held + waits for moment, held in at(walk.ACTIVATIONS).items()}
    if waits:
        activations = dict.fromkeys([moment for moment in MOMENTS if moment != UPDATE], waits) | activations
    rows = [*states[:-1], replace(states[-1], at=gradients)]

    def row(name: str, held: Mapping[str, float], formula: str, source: str) -> None:
        rows.append(Row(name=name, at=held, formula=formula, source=source))

    row("batch", dict.fromkeys(MOMENTS, 2 * TOKEN_ID * sequences * pieces * m.T / layout.context),
        "token ids and targets of one update, int64", "lpkit.datasets")
    if sharded:
        block, outside = inside / layers, tables / layout.tensor
        own, reduced = block * p.compute, block * (FP32 + (p.compute if p.compute < FP32 else 0))
        each = keep.again_bytes if layers - 1 in again else keep.block_bytes
        # The first block has its gradients; or they are on their way, in float32 too, while the next one is at work.
        late = layers > 1 and reduced - own > each
        activations[walk.LAST] = activations.get(walk.LAST, 0) - late * each
        row("gathered weights", dict.fromkeys(moments, outside * p.compute) |
            dict.fromkeys((walk.LAST, walk.FIRST), (outside + block) * p.compute),
            "all outside the blocks, and the block at work, whole, in the compute dtype", FSDP)
        row("communication buffers", {walk.LAST: reduced if late else own, walk.FIRST: reduced,
                                       walk.EMBED: outside * FP32},
            "one block's gradients, whole, reduced in float32 on their way to their shards", FSDP)
    row("weight copies", at(walk.COPIES), "each weight of a 16-bit product once more in that dtype, until its backward",
        "https://docs.pytorch.org/docs/stable/amp.html")
    if p.low:
        linears = (layers - z.last_is_kept) * 4
        shapes = ((m.D, (m.H + 2 * m.G) * m.E), (m.D, m.D), (m.D, UPS[m.mlp] * m.F), (m.F, m.D))
        scales = sum(p.low.scales(z.tokens, K, N, native) for K, N in shapes) * linears / 4
        lows = at(walk.LOW)
        if CACHED[config.precision.weights] and (pieces > 1 or again):      # one forward pass would cast each once anyway
            shared = 1 if p.low.w[0] == p.low.w[1] else 2       # casts that serve both products, and those that do not
            held = sum(K * N for K, N in shapes) / layout.tensor * linears / 4 * p.low.held_bytes(native) * shared
            lows = dict.fromkeys([moment for moment in MOMENTS if moment != UPDATE], held)
        row("low-precision weights", lows, f"each weight as {p.what.split()[-1]} casts it, until its backward", LINEAR)
        row("scales", dict.fromkeys((walk.LOSS, walk.HEAD, walk.LAST), scales), "of the operands that are kept", LINEAR)
        row("amax histories", dict.fromkeys(MOMENTS, linears * 3 * (1 + p.low.history) * FP32 if p.low.history else 0),
            "the largest magnitudes of x, w and dy in earlier micro-batches", LINEAR)
    row("activations", activations, f"micro-batch of {sequences}, {m.T:,} tokens each, recompute={recompute}, "
        f"attention={attention}" + f", {waiting + 1:g} micro-batches under way" * (waiting > 0), "lpkit.predict.activations")
    row("recomputed block", at(walk.AGAIN), "one block's activations, all of them",
        "Chen et al. 2016, https://arxiv.org/abs/1604.06174")
    row("logits and loss", at(walk.LOGITS), "a float32 log-probability per token and vocabulary entry",
        "torch.nn.functional.cross_entropy")
    temporaries = at(walk.TEMPORARIES)
    row("logits' gradients", {LOSS: temporaries.pop(LOSS, 0)} if heads else {},
        "of the log-probabilities and of the logits, float32", "torch.nn.functional.cross_entropy")
    resting = on.kind in _of(RESTS, config.memory.optimizer_state, "memory.optimizer_state")
    if resting:
        rows = [one for one in rows if one.name != "optimizer state"]
    row("optimizer temporaries", {UPDATE: _update_bytes(config, optimizer, resting, layout.tensor)},
        "the moments and the weight of the largest parameter, as its update wants them", "lpkit.optim.stepper")
    row("temporaries", temporaries, "gradients of activations, and what is cast or copied on the way", ENGINE)
    return tuple(one for one in rows if one.bytes)


def _sharded(layout: Layout) -> bool:
    return layout.zero == 3 and layout.state_ranks > 1


def _native(p: Precision, on: Machine) -> bool:
    """Whether operands lie in memory in the bits of their format."""
    return p.low is not None and on.kind == "gpu" and p.dtype in on.flops


def _update_bytes(config: Config, optimizer: str, resting: bool, shards: int) -> float:
    """While the largest parameter is updated by itself; a fused step over all of them needs nothing."""
    m, row, moment_format = config.model, optimizers.find(optimizer), config.memory.moment_format
    mlp = [UPS[m.mlp] * m.F * m.D, m.F * m.D]
    largest = max(m.V * m.D, *mlp, (m.H + 2 * m.G) * m.E * m.D) / shards
    weight_bytes = _of(STORED, config.memory.parameters, "memory.parameters").get("weights", FP32)
    held = largest * row.update_bytes(moment_format, weight_bytes)
    if resting:     # fetched: this parameter's state and the next one's
        held += row.state_bytes(moment_format) * max(m.V * m.D, sum(mlp)) / shards
    return held


def _of(table: Mapping[str, Item], name: str, what: str) -> Item:
    if name not in table:
        raise ConfigError(f"there is no {what} {name!r}; {nearest(name, table)}")
    return table[name]


def _precision(name: str) -> Precision:
    return _of(PRECISIONS, name, "precision")
