"""When memory ends in spite of the formula: what was held, what was predicted, what would fit, and
what was kept."""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from lpkit import hardware
from lpkit.config import Config
from lpkit.errors import RunFailedError, out_of_memory
from lpkit.parallel.sharding import local
from lpkit.predict.fit import Fit, fit, largest
from lpkit.predict.units import quantity
from lpkit.training.build import choose_device, fit_here
from lpkit.training.training import Training

REST = "activations and the rest"
RESERVE_BYTES = 4 << 20     # for the report, when nothing else is left


class Account:
    """What a training holds, by row: of what has no name, what the device says has come since."""

    def __init__(self, training: Training):
        self.training = training
        self.reserve: bytearray | None = bytearray(RESERVE_BYTES)
        self.unnamed_bytes = self._all_bytes() - sum(self._named().values())

    def held(self) -> dict[str, int]:
        rows = self._named()
        rest = self._all_bytes() - sum(rows.values()) - self.unnamed_bytes
        return {name: nbytes for name, nbytes in {**rows, REST: max(0, rest)}.items() if nbytes}

    def _all_bytes(self) -> int:
        return hardware.held_bytes(self.training.device) or 0

    def _named(self) -> dict[str, int]:
        training, states = self.training, []
        if training.state_placement.in_memory:
            states = [t for state in training.optimizer.state.values() for t in state.values()
                      if isinstance(t, Tensor)]
        weights = list(training.model.parameters())
        return {"weights": self._bytes(weights), "optimizer state": self._bytes(states),
                "gradients": self._bytes(p.grad for p in weights if p.grad is not None)}

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        """On the device, of a storage once."""
        here = [local(t).untyped_storage() for t in tensors
                if t.device.type == self.training.device.type]
        return sum({storage.data_ptr(): storage.nbytes() for storage in here}.values())

    def report(self, error: BaseException, last_checkpoint: str | None) -> dict[str, Any]:
        """JSON-ready; then the variables of the traceback are let go of, and activations with
        them."""
        training, self.reserve = self.training, None
        held, peak = self.held(), hardware.peak_bytes(training.device)
        traceback.clear_frames(error.__traceback__)
        processes = training.ranks.local_world
        asked = _tighter(fit_here(training.config, training.decisions, processes),
                         sum(held.values()))
        return {"error": _first_line(error), "held": held, "held_bytes": sum(held.values()),
                "peak_bytes": peak, "predicted": asked.to_dict(),
                "ways": [way.to_dict() for way in asked.ways], "last_checkpoint": last_checkpoint,
                "sentence": _sentence(asked, held)}


def _tighter(asked: Fit, held_bytes: int) -> Fit:
    """In the memory that there was: what would fit there, and takes less than what did not."""
    there = min(asked.on.memory_bytes + held_bytes, asked.peak_bytes)
    return replace(asked, on=replace(asked.on, memory_bytes=there))


def _sentence(asked: Fit, held: dict[str, int]) -> str:
    words = ""
    if held:
        words = f"held were {quantity(sum(held.values()), 'bytes')} ({largest(held)}), and "
    return (f"{words}predicted {quantity(asked.peak_bytes, 'bytes')} at the peak ({asked.largest}; "
            f"{asked.moment}){asked.left_out}; {asked.way_out}")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0].rstrip(": ")


@contextmanager
def said(config: Config, what: str, processes: int = 1) -> Iterator[None]:
    """Memory that ends in here, but not in the loop of a run, ends in a RunFailedError. A CPU's is
    shared by `processes`."""
    try:
        yield
    except RunFailedError:
        raise
    except Exception as error:
        if not out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        device = choose_device(config.system.device).used
        asked = _tighter(fit(config, hardware.room(device, processes)), 0)
        raise RunFailedError(f"{what} met the end of the memory of {device} "
                             f"({_first_line(error)}); {_sentence(asked, {})}") from error
