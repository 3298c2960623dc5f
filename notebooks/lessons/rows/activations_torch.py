"""What the rows of `activations` do.

A tensor in few bits comes back as another one that has it as its mean: groups of 256 numbers are
spread between their least and their largest, and rounded stochastically (ActNN, Chen et al. 2021,
https://arxiv.org/abs/2104.14129). What is linear in it, so the gradient of a weight whose input it
is, is right on average. What is not, the derivatives of norms, softmax and gelu, is off by a
second-order term; docs/memory.md says how much.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

from lessons.rows.activations import GROUP, Budget
from lpkit.memory.recompute import Recomputation
from lpkit.memory.saved import Away, Place, SavedTensorOffloader


class Quantized(Away):
    """`bits` of 8, 4 or 2 a number, and 8 bytes for each group."""

    rounds = True

    def __init__(self, t: Tensor, bits: int, draws: torch.Generator | None = None):
        self.bits, self.dtype, self.shape = bits, t.dtype, t.shape
        flat, top = t.detach().reshape(-1).float(), 2**bits - 1
        groups = F.pad(flat[None], (0, -len(flat) % GROUP), mode="replicate").view(-1, GROUP)
        self.least, most = groups.aminmax(dim=1, keepdim=True)
        self.scale = (most - self.least) / top      # of one step, float32 (groups, 1)
        steps = (groups - self.least).div_(self.scale.clamp(min=torch.finfo(torch.float32).tiny))
        steps += torch.rand(steps.shape, device=t.device, generator=draws)
        codes = steps.floor_().clamp_(max=top).to(torch.uint8)
        parts = codes.view(len(codes), 8 // bits, -1)
        self.codes = parts[:, 0].clone()            # 8 / bits to a byte
        for i in range(1, parts.shape[1]):
            self.codes |= parts[:, i] << (i * bits)

    @staticmethod
    def takes(t: Tensor) -> bool:
        return t.is_floating_point() and t.element_size() > 1

    def get(self) -> Tensor:
        top = 2**self.bits - 1
        parts = [self.codes >> shift & top for shift in range(0, 8, self.bits)]
        values = torch.cat(parts, dim=1).float().mul_(self.scale).add_(self.least)
        return values.view(-1)[:self.shape.numel()].to(self.dtype).view(self.shape)


def place(bits: int, device: torch.device) -> Place:
    return Place(transforms=(SavedTensorOffloader(Quantized, bits=bits),))


int8, int4, int2 = partial(place, 8), partial(place, 4), partial(place, 2)


def within(budget: float, graph: Any, inputs: Any, *, compiler: str = "inductor",
           **settings: Any) -> Callable[..., Any]:
    """A backend for torch.compile: `compiler`, that keeps at most about this share of what it would
    for backward and makes the rest again, the cheapest first. The setting is PyTorch's own, and
    holds while this graph is compiled."""
    from torch._dynamo.backends.registry import lookup_backend  # takes a second

    with torch._functorch.config.patch(activation_memory_budget=budget):
        return lookup_backend(compiler)(graph, inputs, **settings)


def within_budget(settings: Budget) -> Recomputation:
    return Recomputation(compiler=partial(within, settings.budget))
