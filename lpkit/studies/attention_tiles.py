"""What attention holds and what it moves, measured beside closed forms; and its online softmax,
tile by tile.

Held are q, k and v as one product gives them, what a backend keeps for backward, and what backward
works on: storages, as `measure.tracking` sees them. Moved is what is read from slow memory and
written to it, which is where q, k, v and the results lie. What is made and dropped in between, a
tile at a time, stays in fast memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lpkit.config import ModelConfig
from lpkit.contracts import Attend
from lpkit.kernels.tiled_attention import attend, tiles
from lpkit.measure.tracking import Tracker
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.operation import FP32, MicroBatch

OVERWRITES = ("copy_", "fill_", "zero_")            # in place, without a look at what was there
MOVES_NOTHING = ("new_empty", "_unsafe_view")       # though no alias in its schema says so


# Held.

@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of attention alone: kept for backward, and at the most, forward or backward."""

    kept_bytes: float
    peak_bytes: float


class Alone(nn.Module):
    """Attention without the products around it: its result is as the next one reads it."""

    def __init__(self, call: Attend):
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(q, k, v, None, None).transpose(1, 2).flatten(2)


def model_of(T: int, *, heads: int, head_width: int) -> ModelConfig:
    """One whose attention has these sizes."""
    return ModelConfig(layers=1, width=heads * head_width, heads=heads, context=T, vocab=2)


def formula(name: str, model: ModelConfig, *, batch: int = 1, kind: str = "cpu") -> Held:
    """As the backend's row says, in float32."""
    op = ATTENTION[name].operations(MicroBatch(model=model, batch=batch, attention=name, kind=kind))
    now = op.saved_bytes + FP32 * batch * model.T * model.H * model.E   # a gradient arrives
    peak = now
    for moment in op.backward:
        peak = max(peak, now + moment.nbytes)
        now += moment.grows - moment.frees * op.saved_bytes
    return Held(kept_bytes=op.saved_bytes, peak_bytes=max(peak, now))


def measured(name: str, model: ModelConfig, *, batch: int = 1, device: str = "cpu") -> Held:
    """One forward and one backward pass of the backend, on random numbers in float32."""
    alone, m = Alone(ATTENTION[name].load()), model
    with Tracker(alone, device=device) as tracker:
        product = torch.randn(batch, m.T, 3, m.H, m.E, device=device)
        q, k, v = (t.requires_grad_() for t in product.transpose(1, 3).unbind(2))
        out = alone(q, k, v)
        kept = sum(tracker.kept().values())
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return Held(kept_bytes=kept, peak_bytes=tracker.footprint().peak_bytes)


def fit(xs: Sequence[float], ys: Sequence[float], degree: int) -> float:
    """R^2 of the polynomial of this degree that fits best."""
    ys = np.asarray(ys, dtype=float)
    rest = ys - np.polyval(np.polyfit(xs, ys, degree), xs)
    return 1 - float((rest**2).sum() / ((ys - ys.mean())**2).sum())


# Moved.

class SlowMemory(TorchDispatchMode):
    """`with SlowMemory() as slow:`, then `slow.moved(tensors)`: bytes that operations read from the
    storages of these and wrote to them; of None, all that they read and wrote. A view moves none.
    """

    def __init__(self):
        super().__init__()
        self.bytes: Counter[int] = Counter()    # by address

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        name, schema = func.overloadpacket.__name__, func._schema
        views = any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
        result = func(*args, **(kwargs or {}))
        if views or name in MOVES_NOTHING:
            return result
        for given, argument in zip(args, schema.arguments):
            if isinstance(given, Tensor):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                reads = not (writes and name in OVERWRITES)
                self.bytes[_storage(given)] += given.nbytes * (reads + writes)
        if isinstance(result, Tensor) and not schema.returns[0].alias_info:
            self.bytes[_storage(result)] += result.nbytes
        return result

    def moved(self, tensors: Sequence[Tensor] | None = None) -> int:
        if tensors is None:
            return self.bytes.total()
        return sum(self.bytes[one] for one in {_storage(t) for t in tensors})


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def counted(T: int, E: int, tile: int, *, heads: int = 1) -> int:
    """Bytes that the kit's tiled attention reads from slow memory and writes to it, forward, in
    float32, operation by operation."""
    q, k, v = torch.randn(3, 1, heads, T, E)
    with SlowMemory() as slow:
        out, lse = attend(q, k, v, None, None, Rule(), tile)
    return slow.moved((q, k, v, out, lse))


def counted_one_by_one(T: int, E: int, *, heads: int = 1) -> int:
    """Of the definition, where each operation is a kernel of its own: all that it reads and
    writes."""
    q, k, v = torch.randn(3, 1, heads, T, E)
    with SlowMemory() as slow:
        ATTENTION["plain"].load()(q, k, v)
    return slow.moved()


def moved(T: int, E: int, tile: int, *, heads: int = 1) -> int:
    """As `counted`, by formula: q is read once, the answer and a number for each query are written
    once, and each tile of queries reads the keys and values up to its own end."""
    met = sum(min(first + tile, T) for first in range(0, T, tile))
    return FP32 * heads * (2 * T * E + T + 2 * E * met)


def moved_one_by_one(T: int, E: int, *, heads: int = 1) -> int:
    """As `counted_one_by_one`, by formula. Scores pass eight times: written, divided, masked, put
    through the softmax, read. The mask, a byte for each pair, passes four times: made, turned into
    its opposite, read. k and v are copied for the heads of their group."""
    return FP32 * heads * (8 * T * E + 8 * T * T) + 4 * T * T


def fast_bytes(tile: int, E: int) -> int:
    """That a program needs for its tile: q, the sum so far, k, v, and the scores, in float32."""
    return FP32 * (4 * tile * E + tile * tile)


# Online.

@dataclass(frozen=True, kw_only=True)
class Step:
    """A tile of queries after one tile of keys. m, l (queries,), answer (queries, E): of the keys
    so far; `there`, the share of the final sum that is in l."""

    queries: slice
    keys: slice
    m: Tensor
    l: Tensor
    shrink: Tensor          # what was there before was multiplied by it
    answer: Tensor
    there: Tensor


def online(q: Tensor, k: Tensor, v: Tensor, tile: int) -> list[Step]:
    """Every step of causal attention over q, k and v (T, E), in the order of the kit's tiles."""
    steps: list[Step] = []
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(
        torch.ones(len(q), len(q)).triu(1) > 0, -torch.inf)
    total = scores.logsumexp(1)
    for queries, seen in tiles(Rule(), len(q), tile):
        m = torch.full((queries.stop - queries.start,), -torch.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(q[queries])
        for keys in seen:
            now = scores[queries, keys]
            m_new = torch.maximum(m, now.amax(1))
            shrink, p = (m - m_new).exp(), (now - m_new[:, None]).exp()
            l, acc, m = l * shrink + p.sum(1), acc * shrink[:, None] + p @ v[keys], m_new
            steps.append(Step(queries=queries, keys=keys, m=m, l=l, shrink=shrink,
                              answer=acc / l[:, None], there=l * (m - total[queries]).exp()))
    return steps
