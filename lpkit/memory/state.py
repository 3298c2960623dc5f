"""Where the optimizer's state rests between updates (Ren et al. 2021, ZeRO-Offload, https://arxiv.org/abs/2101.06840).

The update itself runs on the device, on the same float32 numbers, so nothing changes but the time: state comes a parameter
at a time, the next one's under way while one is updated, and goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lpkit.contracts import Place
from lpkit.memory.files import Scratch
from lpkit.memory.row import Row


class Host(Place):
    """Pinned memory of the CPU, copied on a stream of its own, in order: what comes next never overtakes what went."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def rest(self, t: Tensor) -> Tensor:
        return torch.empty_like(t, device="cpu", pin_memory=True).copy_(t)

    def bring(self, resting: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        with torch.cuda.stream(self.stream):
            came = [t.to(device, non_blocking=True) for t in resting]
            there = self.stream.record_event()

        def wait() -> list[Tensor]:
            current = torch.cuda.current_stream(device)
            current.wait_event(there)
            for t in came:
                t.record_stream(current)
            return came

        return wait

    def leave(self, resting: list[Tensor], used: list[Tensor]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(used[0].device))
        with torch.cuda.stream(self.stream):
            for t, new in zip(resting, used, strict=True):
                t.copy_(new, non_blocking=True)
                new.record_stream(self.stream)


class Disk(Place):
    """A memory-mapped file. Its pages are the system's to write and to drop; this process lets go of them at once."""

    in_memory = False

    def __init__(self):
        self.scratch = Scratch()

    def rest(self, t: Tensor) -> Tensor:
        mapped = self.scratch.mapped(t.shape, t.dtype).copy_(t)
        self.scratch.let_go(mapped)
        return mapped

    def bring(self, resting: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        return lambda: [t.to(device, copy=True) for t in resting]

    def leave(self, resting: list[Tensor], used: list[Tensor]) -> None:
        for t, new in zip(resting, used, strict=True):
            t.copy_(new)
            self.scratch.let_go(t)


@dataclass(frozen=True, kw_only=True)
class State(Row):
    """`place(device)`: None where that is the device itself."""

    place: Callable[[torch.device], Place | None]


STATES = {
    "device": State(place=lambda device: None, why="beside the parameters"),
    "cpu": State(
        place=lambda device: Host(device) if device.type == "cuda" else None,
        why="pinned memory, copied beside the computation (Ren et al. 2021, arXiv:2101.06840)",
        here=lambda device: None if device.type == "cuda" else
        ("device", "the device is the CPU: its memory is where the state is anyway")),
    "disk": State(
        place=lambda device: Disk(), why="a memory-mapped file (Rajbhandari et al. 2021, arXiv:2104.07857)",
        here=lambda device: ("disk", f"memory-mapped, in {Scratch.where()} (Rajbhandari et al. 2021, arXiv:2104.07857)")),
}
