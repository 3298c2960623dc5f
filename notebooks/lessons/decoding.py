"""Generation of one token per sequence at a time: bytes of the cache, and seconds.

A step reads every weight once for the whole batch, and the cache of each sequence. It computes
little with each number, so its time is that of the bytes or, for a large batch, that of the FLOPs
(Pope et al. 2022, https://arxiv.org/abs/2211.05102). A cache format of fewer bits is decoded, and
the decoded numbers are written and read in addition. Not included: launching kernels, which
dominates for small models, and sampling.
"""

from dataclasses import dataclass

from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError, pick
from lpkit.predict import evidence, flops
from lpkit.predict.params import parameter_count, parameters
from lpkit.predict.recipes import PRECISIONS, precision_of
from lpkit.predict.roofline import Efficiency
from lpkit.techniques import machines
from lpkit.techniques.adapters import virtual
from lpkit.techniques.attention import KINDS
from lpkit.techniques.caches import CACHES, CacheFormat, refuse_keys_to_come, slots
from lpkit.techniques.machines import Machine

SCALE_BYTES = 2         # of a bfloat16 scale, which has float32's range


def vector_bytes(row: CacheFormat, E: int, itemsize: int) -> int:
    """Returns the bytes of a head's key or value, which has E numbers of `itemsize` bytes."""
    if row.bits is None:
        return E * itemsize
    return -(-E * row.bits // 8) + row.groups(E) * SCALE_BYTES * (1 + row.offset)


def cache_bytes(model: ModelConfig, tokens: int, batch: int = 1, format: str = "same", *,
                itemsize: int = 2) -> int:
    """Returns the bytes of keys and values (or of the state that the kind keeps instead) for
    `batch` sequences after `tokens`; itemsize: bytes of an element in the products. Raises
    ConfigError."""
    row, settings = pick(CACHES, format, "cache"), model.attention
    if tokens < 1 or batch < 1:
        raise ConfigError(f"a cache has 1 token and 1 sequence or more; got {tokens} and {batch}")
    if (state := KINDS[settings.name].state_bytes) is not None:
        return batch * model.L * state(model)
    refuse_keys_to_come(model)
    prompt = virtual(model, in_stream=True)
    held = slots(settings.rule(model.T), min(tokens, model.T), first=prompt).count
    return batch * model.L * 2 * model.G * held * vector_bytes(row, model.E, itemsize)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One token for each of `batch` sequences of `tokens` tokens."""

    tokens: int
    batch: int
    weight_bytes: int           # read once for the whole batch
    cache_bytes: int
    flops: float
    seconds: float
    limit: str                  # "bandwidth" or "arithmetic"
    machine: Machine

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


def decoding(config: Config, machine: str | Machine = "h200", *, tokens: int | None = None,
             batch: int = 1, format: str = "same", precision: str | None = None,
             efficiency: Efficiency | None = None) -> Step:
    """Predict a step. `tokens`: None: a full context. Weights are read in the products' dtype.
    Raises ConfigError for an invalid combination."""
    on, m = machines.find(machine), config.model
    tokens = m.T if tokens is None else tokens
    p = PRECISIONS[precision_of(config, on, precision)]
    efficiency = efficiency or evidence.efficiency(on)
    # one row of the embeddings is read, unless they are the head as well
    read = parameter_count(m) - parameters(m)["positions"]
    read -= 0 if m.tied else parameters(m)["embedding"]
    weights, held = read * p.compute_bytes, cache_bytes(m, tokens, batch, format,
                                                        itemsize=p.compute_bytes)
    work, decoded = batch * flops.forward_flops(m) / m.T, 0
    if CACHES[format].bits is not None:
        decoded = 2 * cache_bytes(m, tokens, batch, itemsize=p.compute_bytes)
    moving = (weights + held + decoded) / (on.bytes_per_second * efficiency.bandwidth)
    computing = work / (on.peak_flops(p.dtype) * efficiency.products[p.dtype])
    return Step(tokens=tokens, batch=batch, weight_bytes=weights, cache_bytes=held, flops=work,
                seconds=max(moving, computing), machine=on,
                limit="bandwidth" if moving >= computing else "arithmetic")
