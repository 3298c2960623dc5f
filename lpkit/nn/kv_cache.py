"""Caches of past tokens for generation, so that each new token needs the work of one position only.

Each kind of attention has a class of `Cache`, which its row in `lpkit.techniques.attention` names.
A cache is used in two phases. First `prompt` attends for all tokens of a prompt, by the run's
attention backend, and stores them. Then `step` attends for one new token of each sequence; the
sequences may be at different positions. `KeysValues` is the cache of all softmax kinds. It stores
keys and values in a format of `lpkit.techniques.caches`. Another kind of attention, for example
with a recurrent state, needs only its own `prompt` and `step`.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from pkgutil import resolve_name
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import ModelConfig
from lpkit.errors import ConfigError, pick
from lpkit.nn.attention import capped
from lpkit.techniques.adapters import virtual
from lpkit.techniques.attention import KINDS, Rule
from lpkit.techniques.caches import CACHES, CacheFormat, refuse_keys_to_come, slots
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.operation import POSITIONS


def new_cache(config: ModelConfig, batch: int = 1, *, tokens: int | None = None,
              format: str = "same", dtype: torch.dtype, device: torch.device | str) -> Cache:
    """Return an empty cache for `batch` sequences of up to `tokens` tokens (None: the context).
    dtype: the compute dtype of q, k and v; format: a row of CACHES. Raises ConfigError for an
    unknown format."""
    refuse_keys_to_come(config)
    kind = resolve_name(KINDS[config.attention.name].cache)
    return kind(config, batch, min(tokens or config.T, config.T), pick(CACHES, format, "cache"),
                dtype=dtype, device=device)


class Cache(ABC):
    """The past tokens of B sequences.

    lengths:  (B,) int64, on the CPU: how many tokens each sequence has had
    stepping: whether the tokens that `begin` announced are one per sequence (`step`), not a prompt
    """

    def __init__(self, config: ModelConfig, batch: int, device: torch.device | str):
        self.config, self.device = config, device
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.stepping = False

    @property
    def goes_on(self) -> bool:
        """Whether generation may continue past the context. With rotary positions it may: scores
        depend only on distances, so a stored key stays valid. With learned positions it may not,
        because there are no more positions."""
        return POSITIONS[self.config.position].turns

    def begin(self, T: int) -> int | Tensor:
        """Announce the next T tokens of each sequence: a prompt, or one token. Return the position
        of the first of them: an int, or (B, 1) int64 if sequences differ. Raises ConfigError if the
        tokens do not fit the context. Called once, before the layers."""
        lengths = self.lengths.tolist()
        if T != 1 and any(lengths):
            raise ValueError(f"after the prompt, tokens come one at a time; got {T}")
        if not self.goes_on and max(lengths) + T > self.config.T:
            raise ConfigError(f"{max(lengths) + T} tokens do not fit "
                              f"model.context={self.config.T}")
        self.place(lengths, T)
        self.lengths += T
        if len(set(lengths)) == 1:
            return lengths[0]
        return torch.tensor(lengths, device=self.device)[:, None]

    def place(self, lengths: list[int], T: int) -> None:
        """Prepare for T more tokens of each sequence. `lengths`: tokens so far. Called once for all
        layers."""
        self.stepping = T == 1

    @abstractmethod
    def prompt(self, layer: int, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor,
               documents: Tensor | None, own: Tensor | None) -> Tensor:
        """Store the tokens of a prompt in a layer, and return the attention output, (B, H, T, E).
        attention: the layer's module; q (B, H, T, E), k and v (B, G, T, E); own: the argument
        `sinks` of `contracts.Attend`."""

    @abstractmethod
    def step(self, layer: int, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor,
             own: Tensor | None) -> Tensor:
        """Store one token of each sequence in a layer, and return the attention output, like q.
        q (B, G, H / G, E), k and v (B, G, 1, E)."""

    @abstractmethod
    def row(self, b: int) -> Self:
        """Return a cache of sequence b alone, which shares memory with this cache: to give the
        sequence its prompt, or to clear it."""

    def clear(self) -> None:
        """Forget all tokens."""
        self.lengths.zero_()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the stored tokens."""


class KeysValues(Cache):
    """The keys and the values of each layer, two `Stored` (B, G, slots, E). All tokens of a
    sequence are one document. A slot holds one token; if the rule has a window, slots are reused.

    places: (B, slots) int64: the position of the token in each slot, -1 for an empty slot
    at:     index of the slots that the announced tokens take: (sequences, groups, slots)
    kept:   positions in the prompt of the tokens that are stored
    filled: how many slots a step reads
    mask:   (B, 1, 1, filled) bool: which slots a step reads; None: all
    """

    def __init__(self, config: ModelConfig, batch: int, tokens: int, format: CacheFormat, *,
                 dtype: torch.dtype, device: torch.device | str):
        super().__init__(config, batch, device)
        self.rule = config.attention.rule(config.T)
        self.slots = slots(self.rule, tokens, first=virtual(config, in_stream=True))
        shape, stored = (batch, config.G, self.slots.count, config.E), format.load()
        self.layers = [(stored(format, shape, dtype, device), stored(format, shape, dtype, device))
                       for _ in range(config.L)]
        self.places = torch.full((batch, self.slots.count), -1, device=device)
        self.filled, self.mask = 0, None

    @property
    def goes_on(self) -> bool:
        """Whether generation may continue past the context. Then the oldest token is dropped, so
        that no distance is longer than in training, except distances to global tokens. A rule with
        a table of blocks ends with the context."""
        return super().goes_on and self.rule.blocks is None

    def place(self, lengths: list[int], T: int) -> None:
        super().place(lengths, T)
        whole, self.mask, count = slice(None), None, self.slots.count
        if not self.stepping:
            held = {self.slots.of(place): place for place in range(T)}
            self.at = whole, whole, torch.tensor(list(held), device=self.device)
            self.kept = torch.tensor(list(held.values()), device=self.device)
            self.places[:, self.at[2]] = self.kept
            return
        # A step: `used_slots` has the slot of each sequence's new token, and `ends` the numbers of
        # slots in use.
        used_slots, ends = [self.slots.of(n) for n in lengths], [min(n + 1, count) for n in lengths]
        self.filled = max(ends)
        if len(set(used_slots)) == 1:
            self.at = whole, whole, slice(used_slots[0], used_slots[0] + 1)
            self.places[:, used_slots[0]] = torch.tensor(lengths, device=self.device)
        else:
            rows, groups = torch.arange(len(used_slots)), torch.arange(self.config.G)
            at = torch.tensor(used_slots)
            self.at = tuple(t.to(self.device)
                            for t in (rows[:, None, None], groups[:, None], at[:, None, None]))
            self.places[rows, at] = torch.tensor(lengths, device=self.device)
        if min(ends) < self.filled or self.rule.blocks is not None:
            places = self.places[:, :self.filled]
            now = torch.tensor(lengths, device=self.device)[:, None]
            self.mask = (self.rule.sees(now, places) & (places >= 0))[:, None, None]

    def prompt(self, layer: int, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor,
               documents: Tensor | None, own: Tensor | None) -> Tensor:
        for stored, t in zip(self.layers[layer], (k, v)):
            stored.put(self.at, t[:, :, self.kept])
        return attention.attend(q, k, v, documents, own)

    def step(self, layer: int, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor,
             own: Tensor | None) -> Tensor:
        for stored, t in zip(self.layers[layer], (k, v)):
            stored.put(self.at, t)
        keys, values = (stored.read(self.filled) for stored in self.layers[layer])
        mask, count = self.mask, keys.shape[2]
        # The learned prefix has no slots, because it is the same for all sequences.
        if attention.prefix is not None:
            keys, values = attention.prefix.before(keys, values)
            if mask is not None:
                mask = F.pad(mask, (keys.shape[2] - count, 0), value=True)
        return last_token(q, keys, values, mask, own, self.rule)

    def row(self, b: int) -> Self:
        view = copy.copy(self)
        view.lengths, view.places = self.lengths[b:b + 1], self.places[b:b + 1]
        view.layers = [(k.row(b), v.row(b)) for k, v in self.layers]
        return view

    def clear(self) -> None:
        super().clear()
        self.places.fill_(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values. `places` takes another 8 bytes per slot."""
        return sum(stored.nbytes for pair in self.layers for stored in pair)


def last_token(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None,
               rule: Rule) -> Tensor:
    """Return the attention output of one token for each sequence, like q.

    q (B, G, H / G, E); k and v (B, G, S, E); mask (B, 1, 1, S) bool, or None; sinks (H,), or None.
    The H / G query heads of a group are the rows of one matmul, so keys need not be repeated. On a
    CPU it computes in float32, because 16-bit matmuls are slow on CPUs without instructions for
    them.
    """
    dtype = q.dtype
    if dtype in (torch.float16, torch.bfloat16) and q.device.type == "cpu":
        q, k, v = q.float(), k.float(), v.float()
    # Autocast would cast q, k and v back to 16 bits.
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return _weighted(q, k, v, mask, sinks, rule).to(dtype)
    return _weighted(q, k, v, mask, sinks, rule).to(dtype)


def _weighted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None,
              rule: Rule) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v for one token, with the arguments of `last_token`."""
    if rule.soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask)
    scores = capped(q @ k.mT / math.sqrt(q.shape[-1]), rule)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.type_as(scores).view(1, k.shape[1], -1, 1)
        scores = torch.cat((scores, sink.expand(len(q), -1, -1, -1)), dim=-1)
    weights = scores.softmax(-1)[..., :k.shape[2]]
    if mask is not None:
        # The softmax of a query that sees no slot is NaN. Its weights become 0.
        weights = weights.masked_fill(~mask, 0.0)
    return weights.type_as(v) @ v


class Stored:
    """Keys or values (B, G, S, E) of a layer in S slots, in the compute dtype. A subclass is
    another format: it encodes the E numbers of a head as one or more tensors.

    parts: the tensors, (B, G, S, ...) each, zeros at first
    """

    def __init__(self, format: CacheFormat, shape: tuple[int, ...], dtype: torch.dtype,
                 device: torch.device | str):
        self.format, self.dtype, self.E = format, dtype, shape[-1]
        encoded = self.encode(torch.zeros(self.E, dtype=dtype, device=device))
        self.parts = [t.new_zeros(*shape[:-1], *t.shape) for t in encoded]

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that represent x (..., E)."""
        return (x,)

    def decode(self, x: Tensor) -> Tensor:
        """Return the numbers (..., E) that the tensors of `encode` represent."""
        return x

    def put(self, at: tuple, x: Tensor) -> None:
        """Store x (B, G, n, E) in the slots `at`, an index of the first three dimensions."""
        for part, t in zip(self.parts, self.encode(x)):
            part[at] = t.to(part.dtype)

    def read(self, slots: int) -> Tensor:
        """Return the numbers in the first `slots` slots, (B, G, slots, E)."""
        return self.decode(*(part[:, :, :slots] for part in self.parts))

    def row(self, b: int) -> Self:
        view = copy.copy(self)
        view.parts = [part[b:b + 1] for part in self.parts]
        return view

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def _rounded(x: Tensor, scale: Tensor, least: float, most: float) -> Tensor:
    """Return x / scale, rounded to integers from `least` to `most`; 0 where the scale is 0. x
    (..., n), scale (...)."""
    units = torch.where(scale[..., None] > 0, x / scale[..., None].float(), 0.0)
    return units.round().clamp(least, most)


class Int8(Stored):
    """For each head of a token, E codes in int8 and one scale in bfloat16: E + 2 bytes. (bfloat16
    has the range of float32.) The error of a number is at most half a scale, 1/254 of the largest
    number of the head."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        most, x = FORMATS["int8"].largest, x.float()
        scale = (x.abs().amax(-1) / most).bfloat16()
        return _rounded(x, scale, -most, most).to(torch.int8), scale

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return (codes * scale[..., None].float()).to(self.dtype)


class Int4(Stored):
    """For each head of a token, E codes from 0 to 15, two in a byte, in groups. Each group has a
    scale and its smallest number, in bfloat16: number = smallest + code * scale. So a head takes
    E / 2 bytes and 4 bytes for each group.

    The error of a number is at most half a scale (1/30 of the group's range) plus 2^-7 of the
    group's largest number; the second term comes from rounding the scale and the smallest number.
    """

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of groups, and the numbers in each group except the last."""
        groups = self.format.groups(self.E)
        return groups, -(-self.E // groups)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        groups, size = self.sizes
        last = x[..., -1:].expand(*x.shape[:-1], groups * size - self.E)
        x = torch.cat((x, last), dim=-1).float().unflatten(-1, (groups, size))
        most, least = 2**self.format.bits - 1, x.amin(-1).bfloat16()
        x = x - least[..., None].float()
        scale = (x.amax(-1).clamp_min(0) / most).bfloat16()
        codes = _rounded(x, scale, 0, most).to(torch.uint8).flatten(-2)[..., :self.E]
        low, high = F.pad(codes, (0, self.E % 2)).chunk(2, dim=-1)
        return low | high << 4, scale, least

    def decode(self, codes: Tensor, scale: Tensor, least: Tensor) -> Tensor:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)[..., :self.E]
        scale, least = (t.float().repeat_interleave(self.sizes[1], dim=-1)[..., :self.E]
                        for t in (scale, least))
        return torch.addcmul(least, codes, scale).to(self.dtype)
