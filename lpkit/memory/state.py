"""Where the optimizer's state is stored between updates (Ren et al. 2021, ZeRO-Offload, https://arxiv.org/abs/2101.06840).

The update itself runs on the device, on the same float32 numbers, so only the time changes: state is fetched a parameter
at a time, the next one's while one is updated, and written back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lpkit.contracts import StatePlacement
from lpkit.memory.files import Scratch
from lpkit.memory.row import Row
from lpkit.techniques.optimizers import MOMENT_FORMATS


class Host(StatePlacement):
    """Pinned memory of the CPU, copied on a stream of its own, in order: no fetch overtakes a write-back."""

    name = "cpu"

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def store(self, t: Tensor) -> Tensor:
        return torch.empty_like(t, device="cpu", pin_memory=True).copy_(t)

    def prefetch(self, stored: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        with torch.cuda.stream(self.stream):
            copies = [t.to(device, non_blocking=True) for t in stored]
            arrived = self.stream.record_event()

        def wait() -> list[Tensor]:
            current = torch.cuda.current_stream(device)
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


class Disk(StatePlacement):
    """A memory-mapped file. Its pages are the system's to write and to drop; this process drops them at once."""

    name = "disk"
    in_memory = False

    def __init__(self):
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


@dataclass(frozen=True, kw_only=True)
class State(Row):
    """`placement(device)`: None for the device itself."""

    placement: Callable[[torch.device], StatePlacement | None]


@dataclass(frozen=True, kw_only=True)
class Moments(Row):
    """A format of `lpkit.techniques.optimizers`."""


MOMENTS = {name: Moments(why=f"{row.what}: {row.source}") for name, row in MOMENT_FORMATS.items()}
STATES = {
    "device": State(placement=lambda device: None, why="beside the parameters"),
    "cpu": State(
        placement=lambda device: Host(device) if device.type == "cuda" else None,
        why="pinned memory, copied beside the computation (Ren et al. 2021, arXiv:2101.06840)",
        here=lambda device: None if device.type == "cuda" else
        ("device", "the device is the CPU: its memory is where the state is anyway")),
    "disk": State(
        placement=lambda device: Disk(), why="a memory-mapped file (Rajbhandari et al. 2021, arXiv:2104.07857)",
        here=lambda device: ("disk", f"memory-mapped, in {Scratch.where()} (Rajbhandari et al. 2021, arXiv:2104.07857)")),
}
