"""Generation, one token per sequence at a time: the bytes of the cache, and the seconds of a step.

A step reads every weight once for the whole batch, and the cache of each sequence. It computes
little with each number that it reads, so its time is the time to read these bytes or, for a large
batch, the time of the FLOPs (Pope et al. 2022, https://arxiv.org/abs/2211.05102). If the cache has
a format of fewer bits, its numbers are decoded first: the decoded numbers are written and read in
addition. The prediction leaves out the launching of kernels, which dominates for small models, and
sampling.
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

SCALE_BYTES = 2         # a scale is stored in bfloat16, which has the range of float32


def vector_bytes(row: CacheFormat, E: int, itemsize: int) -> int:
    """Return the bytes of one key or one value of one head in the cache.

    row: the format of the cache; a format of fewer bits has a scale (and with `row.offset` an
        offset) per group of numbers
    E: numbers of the key or value
    itemsize: bytes of a number without such a format
    """
    if row.bits is None:
        return E * itemsize
    return -(-E * row.bits // 8) + row.groups(E) * SCALE_BYTES * (1 + row.offset)


def cache_bytes(model: ModelConfig, tokens: int, batch: int = 1, format: str = "same", *,
                itemsize: int = 2) -> int:
    """Return the bytes of the cache of `batch` sequences after `tokens` tokens: the keys and values
    of all layers, or the state that the model's kind of attention keeps instead.

    format: a row of CACHES
    itemsize: bytes of a number in the matmuls

    Raises ConfigError for less than 1 token or sequence, an unknown format, and attention that is
    not causal."""
    row, settings = pick(CACHES, format, "cache"), model.attention
    if tokens < 1 or batch < 1:
        raise ConfigError(f"a cache needs at least 1 token and 1 sequence; got {tokens} tokens "
                          f"and {batch} sequences")
    if (state := KINDS[settings.name].state_bytes) is not None:
        return batch * model.L * state(model)
    refuse_keys_to_come(model)
    prompt = virtual(model, in_stream=True)
    held = slots(settings.rule(model.T), min(tokens, model.T), first=prompt).count
    return batch * model.L * 2 * model.G * held * vector_bytes(row, model.E, itemsize)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The prediction of a step: one more token for each of `batch` sequences of `tokens` tokens."""

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
        """Generated tokens per second, over all sequences."""
        return self.batch / self.seconds


def decoding(config: Config, machine: str | Machine = "h200", *, tokens: int | None = None,
             batch: int = 1, format: str = "same", precision: str | None = None,
             efficiency: Efficiency | None = None) -> Step:
    """Predict the seconds of one step of generation.

    tokens: tokens in the cache of each sequence; None: a full context
    format: a row of CACHES
    precision: a row of PRECISIONS; the weights are read in the dtype of its matmuls
    efficiency: shares of the machine's peaks that are reached; None: those of `evidence`

    Raises ConfigError for an invalid combination."""
    on, m = machines.find(machine), config.model
    tokens = m.T if tokens is None else tokens
    p = PRECISIONS[precision_of(config, on, precision)]
    efficiency = efficiency or evidence.efficiency(on)
    # A step reads one row per sequence of the embeddings and positions, which is left out here. A
    # tied embedding is also the head's weight, which is read as a whole.
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
