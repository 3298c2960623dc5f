"""All-to-all attention of a context group: each rank computes some heads over whole sequences.

In a group of c ranks, one all-to-all gives each rank whole sequences of H / c heads, and a second
all-to-all returns the output. A rank sends (c - 1) / c of its q, k, v and out in forward, and the
same number of bytes of gradients in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lpkit.parallel import context
from lpkit.parallel.context import Over
from lpkit.techniques.attention import Rule


class AllToAll(Over):
    """Attention of a context group; each rank computes its heads by any other backend."""

    def over(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor | None, sinks: Tensor | None,
             rule: Rule) -> Tensor:
        by_rank = [t.unflatten(1, (self.ranks, -1)) for t in (q, k, v)]
        parts = _Exchange.apply(torch.cat(by_rank, 2).movedim(1, 0), self)
        heads = context.joined(parts.unbind(), 2).split([t.shape[2] for t in by_rank], 1)
        own = None if sinks is None else sinks.chunk(self.ranks)[self.rank]
        out = self.attend(*heads, ids, own, rule=rule)
        parts = torch.stack([context.part(out, rank, self.ranks, 2) for rank in range(self.ranks)])
        return _Exchange.apply(parts, self).movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """An all-to-all that is its own backward: gradients return to the rank that sent the values."""

    @staticmethod
    def forward(ctx: Any, to: Tensor, over: Over) -> Tensor:
        ctx.over = over
        return over.exchanged(to.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return ctx.over.exchanged(d.contiguous()), None
