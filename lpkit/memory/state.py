"""Stores the optimizer's state between updates on the device or on the host (Ren et al. 2021,
ZeRO-Offload, https://arxiv.org/abs/2101.06840).

The update itself runs on the device with the same float32 numbers, so results are the same bit for
bit. State is fetched for one parameter at a time. While a parameter is updated, the state of the
next parameter is fetched, and the state of the previous parameter is written back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lpkit.contracts import StatePlacement


class Host(StatePlacement):
    """Stores state in pinned memory of the CPU, and copies it by a separate CUDA stream. The stream
    copies in order, so no fetch can overtake a write-back."""

    name = "cpu"

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.stream = device, torch.cuda.Stream(device)

    def store(self, t: Tensor) -> Tensor:
        return torch.empty_like(t, device="cpu", pin_memory=True).copy_(t)

    def prefetch(self, stored: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        with torch.cuda.stream(self.stream):
            copies = [t.to(device, non_blocking=True) for t in stored]
            arrived = self.stream.record_event()

        def wait() -> list[Tensor]:
            current = torch.cuda.current_stream(device)
            # wait_event: the current stream must not read the copies before they have arrived.
            # record_stream: the allocator must not reuse their memory before the current stream has
            # used them.
            current.wait_event(arrived)
            for t in copies:
                t.record_stream(current)
            return copies

        return wait

    def write_back(self, stored: list[Tensor], used: list[Tensor]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for t, new in zip(stored, used, strict=True):
                t.copy_(new, non_blocking=True)
                new.record_stream(self.stream)


# Functions f(device) -> StatePlacement. The rows of `lpkit.techniques.memory.OPTIMIZER_STATE` name
# them.

def on_device(device: torch.device) -> StatePlacement:
    return StatePlacement()


def on_host(device: torch.device) -> StatePlacement:
    if device.type == "cuda":
        return Host(device)
    return StatePlacement(why="the device is the CPU: its memory is where the state is anyway")
