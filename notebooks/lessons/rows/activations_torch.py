"""Implementations of the rows of `activations`.

A tensor is stored in groups of 256 elements. The levels of a group are spaced evenly between its
minimum and maximum, and elements are rounded stochastically, so the restored tensor is random and
its mean is the original (ActNN, Chen et al. 2021, https://arxiv.org/abs/2104.14129). Results that
are linear in the tensor, such as the gradient of a weight whose input it is, are exact on average.
Nonlinear results (derivatives of norms, softmax and gelu) have a second-order error; docs/memory.md
states how large it is.
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
from lpkit.memory.saved import ActivationStorage, Away, SavedTensorOffloader


class Quantized(Away):
    """A tensor in `bits` (8, 4 or 2) bits per element, plus 8 bytes per group: its minimum and the
    step between levels, both float32 (groups, 1)."""

    rounds = True

    def __init__(self, t: Tensor, bits: int, draws: torch.Generator | None = None):
        self.bits, self.dtype, self.shape = bits, t.dtype, t.shape
        flat, top = t.detach().reshape(-1).float(), 2**bits - 1
        groups = F.pad(flat[None], (0, -len(flat) % GROUP), mode="replicate").view(-1, GROUP)
        self.least, most = groups.aminmax(dim=1, keepdim=True)
        self.scale = (most - self.least) / top
        steps = (groups - self.least).div_(self.scale.clamp(min=torch.finfo(torch.float32).tiny))
        # stochastic rounding: a uniform number is added before rounding down
        steps += torch.rand(steps.shape, device=t.device, generator=draws)
        codes = steps.floor_().clamp_(max=top).to(torch.uint8)
        parts = codes.view(len(codes), 8 // bits, -1)
        self.codes = parts[:, 0].clone()            # 8 / bits codes per byte
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


def place(bits: int, device: torch.device) -> ActivationStorage:
    return ActivationStorage(transforms=(SavedTensorOffloader(Quantized, bits=bits),))


int8, int4, int2 = partial(place, 8), partial(place, 4), partial(place, 2)


def within(budget: float, graph: Any, inputs: Any, *, compiler: str = "inductor",
           **settings: Any) -> Callable[..., Any]:
    """Compile a graph with `compiler`, as a backend of torch.compile, within a memory budget. The
    compiled graph saves about the share `budget` of the activations that it would save without a
    budget, and recomputes the others, the cheapest first. PyTorch's setting
    `activation_memory_budget` is changed only while this graph is compiled."""
    from torch._dynamo.backends.registry import lookup_backend  # takes a second

    with torch._functorch.config.patch(activation_memory_budget=budget):
        return lookup_backend(compiler)(graph, inputs, **settings)


def within_budget(settings: Budget) -> Recomputation:
    return Recomputation(compiler=partial(within, settings.budget))
