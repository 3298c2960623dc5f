"""A GPU never waits for the host: an update's numbers are read when they have arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

AHEAD = 2       # updates in the device's queue at most, whose numbers the host has not read


class HostMoment:
    """Now, by the host's clock: what was computed before is there."""

    def __init__(self, device: torch.device):
        self.at = time.perf_counter()

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: HostMoment) -> float:
        return self.at - earlier.at


class DeviceMoment:
    """The moment when the device is done with its work so far, by its own clock."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def reached(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: DeviceMoment) -> float:
        return earlier.event.elapsed_time(self.event) / 1e3


MOMENTS = {"cuda": DeviceMoment}


def moment(device: torch.device) -> HostMoment | DeviceMoment:
    return MOMENTS.get(device.type, HostMoment)(device)


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
        self.at.wait()
        names, sent = self.sent
        return {name: float(one) for name, one in (self.numbers | dict(zip(names, sent))).items()}
