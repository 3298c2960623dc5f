"""Bytes that one device holds in a training step, by what they are for and by when.

A row lives at some moments of the step, and the peak is the largest moment, not the sum of the rows. Sources:
Rajbhandari et al. 2020, ZeRO, section 3 (https://arxiv.org/abs/1910.02054) for model states and their sharding;
`activations` for what the forward pass keeps.
"""

from dataclasses import dataclass

from lpkit.config import Config, ConfigError, ModelConfig, nearest
from lpkit.predict import machines
from lpkit.predict.activations import FP32, kept
from lpkit.predict.machines import Machine
from lpkit.predict.params import parameter_count, parameters

LOSS, AGAIN, UPDATE = "backward begins", "a block runs again", "optimizer works"
MOMENTS = {
    LOSS: "everything is kept, and the logits have their gradients",
    AGAIN: "the last block has been run once more, and its own backward pass begins",
    UPDATE: "nothing is kept any more, and every gradient is there",
}
ALWAYS = frozenset(MOMENTS)
ZERO = "Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054"


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


PRECISIONS = {
    "fp32": Precision(dtype="fp32", weights=4, gradients=4, master=0, compute=4, stream=4, what="float32 throughout"),
    "bf16": Precision(dtype="bf16", weights=4, gradients=4, master=0, compute=2, stream=4,
                      what="float32 weights, bf16 products by autocast: what lpkit.train does"),
    "bf16-master": Precision(dtype="bf16", weights=2, gradients=2, master=4, compute=2, stream=2,
                             what="bf16 weights and gradients, float32 master weights: the ZeRO paper's setting"),
    "bf16-pure": Precision(dtype="bf16", weights=2, gradients=2, master=0, compute=2, stream=2,
                           what="bf16 throughout; small updates are lost to rounding"),
}
OPTIMIZER_STATE = {   # bytes per parameter
    "adamw": (8.0, "two float32 moments"),
    "adamw-8bit": (2 * (1 + 4 / 256), "two 8-bit moments, a float32 scale per 256 (arXiv:2110.02861)"),
    "momentum": (4.0, "one float32 moment: SGD with momentum, Lion"),
    "sgd": (0.0, "nothing"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    bytes: float
    moments: frozenset[str]     # when in the step it is there
    formula: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Per device."""

    rows: tuple[Row, ...]
    memory_bytes: int | None    # of the device, to compare with

    def at(self, moment: str) -> dict[str, float]:
        """Bytes by row at one moment of MOMENTS."""
        return {row.name: row.bytes for row in self.rows if moment in row.moments}

    @property
    def peak_moment(self) -> str:
        return max(MOMENTS, key=lambda moment: sum(self.at(moment).values()))

    @property
    def peak_bytes(self) -> float:
        return sum(self.at(self.peak_moment).values())

    @property
    def fits(self) -> bool:
        """Without the 5 to 10% that an allocator and the driver take for themselves."""
        return self.memory_bytes is None or self.peak_bytes <= self.memory_bytes


def model_states(count: int, *, precision: str = "bf16-master", optimizer: str = "adamw", zero: int = 0,
                 devices: int = 1) -> tuple[Row, ...]:
    """What outlives a step, for `count` parameters.

    ZeRO stage 1 shards the optimizer's state, master weights with it, over `devices`; 2 the gradients too; 3 the
    weights too.
    """
    p, per_parameter = _precision(precision), _optimizer(optimizer)
    if zero not in (0, 1, 2, 3):
        raise ConfigError(f"there is no ZeRO stage {zero}; choose 0, 1, 2 or 3")
    if devices < 1:
        raise ConfigError(f"devices must be 1 or more, got {devices}")

    def row(name: str, itemsize: float, stage: int, moments: frozenset[str], why: str) -> Row:
        shards = devices if zero >= stage else 1
        sharded = f", over {devices} devices" if shards > 1 else ""
        return Row(name=name, bytes=itemsize * count / shards, moments=moments, source=ZERO,
                   formula=f"{itemsize:g} bytes a parameter{sharded}: {why}")

    return (row("weights", p.weights, 3, ALWAYS, p.what),
            row("master weights", p.master, 1, ALWAYS, "a float32 copy for the optimizer"),
            row("optimizer state", per_parameter, 1, ALWAYS, OPTIMIZER_STATE[optimizer][1]),
            row("gradients", p.gradients, 2, frozenset({UPDATE}), "the same dtype as the weights"))


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


def memory(config: Config, machine: "str | Machine" = "h200", devices: int = 1, *, precision: str = "bf16",
           optimizer: str = "adamw", zero: int = 0, recompute: str = "none", attention: str = "sdpa") -> Memory:
    """Bytes per device of one step of `config` on `devices` machines, data-parallel."""
    m, p, on = config.model, _precision(precision), machines.find(machine)
    sequences, pieces = micro_batch(config, devices)
    keep = kept(m, batch=sequences, compute=p.compute, stream=p.stream, attention=attention,
                recompute=recompute, kind=on.kind)
    tokens = sequences * m.T
    states = model_states(parameter_count(m), precision=precision, optimizer=optimizer, zero=zero, devices=devices)
    if pieces > 1:   # the next piece's activations meet the last one's gradients
        states = tuple(row if row.name != "gradients" else
                       Row(name=row.name, bytes=row.bytes, moments=ALWAYS, formula=row.formula, source=row.source)
                       for row in states)
    before_update = frozenset({LOSS, AGAIN})
    sharded = zero == 3 and devices > 1
    rows = (
        *states,
        Row(name="gathered weights", bytes=_gathered_bytes(m, p.compute) if sharded else 0, moments=ALWAYS,
            formula="this block's and the next one's, and all outside the blocks, whole, in the compute dtype",
            source="FSDP2, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"),
        Row(name="weight copies", bytes=0 if sharded else keep.weight_copy_bytes, moments=before_update,
            formula="each weight of a product once more in the compute dtype, until its backward",
            source="https://docs.pytorch.org/docs/stable/amp.html"),
        Row(name="activations", bytes=keep.total_bytes - keep.loss_bytes, moments=before_update,
            formula=f"micro-batch of {sequences}, {m.T:,} tokens each, recompute={recompute}, attention={attention}",
            source="lpkit.predict.activations"),
        Row(name="recomputed block", bytes=keep.block_bytes if recompute == "block" else 0,
            moments=frozenset({AGAIN}), formula="one block's activations, all of them",
            source="Chen et al. 2016, https://arxiv.org/abs/1604.06174"),
        Row(name="logits and loss", bytes=keep.loss_bytes, moments=frozenset({LOSS}),
            formula="a float32 log-probability per token and vocabulary entry",
            source="torch.nn.functional.cross_entropy"),
        Row(name="logits' gradients", bytes=2 * tokens * m.V * FP32, moments=frozenset({LOSS}),
            formula="of the log-probabilities and of the logits, float32", source="torch.nn.functional.cross_entropy"),
    )
    return Memory(rows=tuple(row for row in rows if row.bytes), memory_bytes=on.memory_bytes)


def _gathered_bytes(model: ModelConfig, itemsize: int) -> int:
    parts = parameters(model)
    block = (parts["attention"] + parts["mlp"] + parts["norms"]) // model.L
    outside = parts["embedding"] + parts["positions"] + parts["head"]
    return (outside + min(2, model.L) * block) * itemsize


def _precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ConfigError(f"there is no precision {name!r}; {nearest(name, PRECISIONS)}")
    return PRECISIONS[name]


def _optimizer(name: str) -> float:
    if name not in OPTIMIZER_STATE:
        raise ConfigError(f"there is no optimizer {name!r}; {nearest(name, OPTIMIZER_STATE)}")
    return OPTIMIZER_STATE[name][0]

