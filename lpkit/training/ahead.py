"""A GPU never waits for the host: an update's numbers are read when they have arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

AHEAD = 2       # updates in the device's queue at most, whose numbers the host has not read


class HostMoment:
    """Now, by the host's clock: what was computed before is there. As an event of a device."""

    def __init__(self):
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: HostMoment) -> float:
        """In milliseconds."""
        return 1e3 * (later.at - self.at)


def moment(device: torch.device) -> HostMoment | torch.cuda.Event:
    """The moment when the device is done with its work so far, by its own clock."""
    if device.type != "cuda":
        return HostMoment()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Arriving:
    """Numbers by name, on their way to the host: from a GPU into pinned memory, without waiting."""

    def __init__(self, numbers: Mapping[str, Tensor | float], device: torch.device):
        self.numbers = dict(numbers)
        there = [name for name, one in numbers.items()
                 if torch.is_tensor(one) and one.device.type == device.type]
        sent = torch.stack([numbers[name].detach().double() for name in there])
        self.sent = there, sent.to("cpu", non_blocking=True)
        self.at = moment(device)

    def values(self) -> dict[str, float]:
        """Waits until they are there."""
        self.at.synchronize()
        names, sent = self.sent
        return {name: float(one) for name, one in (self.numbers | dict(zip(names, sent))).items()}
