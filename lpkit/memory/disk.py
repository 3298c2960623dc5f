"""The optimizer's state on a disk between updates (Rajbhandari et al. 2021, ZeRO-Infinity,
https://arxiv.org/abs/2104.07857). What is updated is fetched as `lpkit.memory.state` has it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpkit.contracts import StatePlacement
from lpkit.memory.files import Scratch


class Disk(StatePlacement):
    """A memory-mapped file. The system writes its pages; this process drops them at once."""

    name = "disk"
    in_memory = False

    def __init__(self):
        super().__init__(f"memory-mapped, in {Scratch.where()} (Rajbhandari et al. 2021, "
                         f"arXiv:2104.07857)")
        self.scratch = Scratch()

    def store(self, t: Tensor) -> Tensor:
        mapped = self.scratch.mapped(t.shape, t.dtype).copy_(t)
        self.scratch.let_go(mapped)
        return mapped

    def prefetch(self, stored: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        return lambda: [t.to(device, copy=True) for t in stored]

    def write_back(self, stored: list[Tensor], used: list[Tensor]) -> None:
        for t, new in zip(stored, used, strict=True):
            t.copy_(new)
            self.scratch.let_go(t)


def on_disk(device: torch.device) -> StatePlacement:
    return Disk()
