"""Apply the formulas of `lpkit.predict` to a run on this machine.

Before anything is allocated, `refuse_what_cannot_fit` checks that the run fits in memory. At the
end of the run, an `Account` computes its MFU. If the run was out of memory, the account reports
which bytes were allocated, which were predicted, and which settings would fit. The loop
(`lpkit.training.loop`) also trains without an account, and contains no formulas.
"""

import gc
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lpkit import hardware
from lpkit.config import Config
from lpkit.contracts import RunAccount
from lpkit.errors import ConfigError, RunFailedError, out_of_memory
from lpkit.execution.compiled import OFF
from lpkit.parallel.sharding import local
from lpkit.precision.compute import CACHED
from lpkit.predict.fit import Fit, fit, largest
from lpkit.predict.flops import training_flops_per_token
from lpkit.predict.governed import governed
from lpkit.predict.units import quantity
from lpkit.training.build import Decisions, choose_device
from lpkit.training.training import Training

REST = "activations and the rest"
RESERVE_BYTES = 4 << 20     # host memory that `report` frees first, so that it can work


def fit_here(config: Config, decisions: Decisions, processes: int = 1) -> Fit:
    """Predict whether an update with `decisions` fits in the free memory of the device. On a CPU,
    `processes` share this memory. Takes less than 2 ms."""
    used = {key: choice.used for key, choice in decisions.choices.items()}
    config = config.replace({
        "precision.recipe": used["precision"], "system.attention": used["attention"],
        "precision.cache_weight_casts": used.get("weight_casts") == CACHED})
    return fit(config, hardware.room(decisions.device, processes), compiled=used["compile"] != OFF)


def refuse_what_cannot_fit(config: Config, decisions: Decisions, processes: int = 1) -> None:
    """Raise ConfigError if the formulas predict that the run does not fit in memory. The error has
    settings that would fit. Call it before anything is allocated."""
    if not fit_here(config, decisions, processes).refused:
        return
    # A reference cycle may still hold an earlier model of this process: free it, and check again.
    gc.collect()
    asked = fit_here(config, decisions, processes)
    if asked.refused:
        on = decisions.device
        raise ConfigError(asked.sentence(hardware.memory_bytes(on), hardware.others_bytes(on)))


class Account(RunAccount):
    """The bytes that a training holds on its device, by row (weights, gradients, ...), and its MFU.
    Bytes that belong to no row are counted from the creation of the account on: what the process
    had allocated before is not part of the run."""

    def __init__(self, training: Training):
        self.training = training
        self.reserve: bytearray | None = bytearray(RESERVE_BYTES)
        self.unnamed_bytes = self._all_bytes() - sum(self._named().values())

    def held(self) -> dict[str, int]:
        """Return the allocated bytes by row. The last row, REST, is all that no other row names."""
        rows = self._named()
        rest = self._all_bytes() - sum(rows.values()) - self.unnamed_bytes
        return {name: nbytes for name, nbytes in {**rows, REST: max(0, rest)}.items() if nbytes}

    def _all_bytes(self) -> int:
        """Return all bytes that this process has allocated on the device; 0 if not known."""
        return hardware.held_bytes(self.training.device) or 0

    def _named(self) -> dict[str, int]:
        """Return the bytes of weights, gradients and optimizer state, as they are now."""
        training, states = self.training, []
        if training.state_placement.in_memory:
            states = [t for state in training.optimizer.state.values() for t in state.values()
                      if isinstance(t, Tensor)]
        weights = list(training.model.parameters())
        return {"weights": self._bytes(weights), "optimizer state": self._bytes(states),
                "gradients": self._bytes(p.grad for p in weights if p.grad is not None)}

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of those `tensors` that are on the device. Tensors that share a storage
        are counted once."""
        here = [local(t).untyped_storage() for t in tensors
                if t.device.type == self.training.device.type]
        return sum({storage.data_ptr(): storage.nbytes() for storage in here}.values())

    def mfu(self, tokens_per_second: float) -> float:
        """Return the MFU of the run: FLOP/s that the model needs, divided by the peak of all ranks.
        The peak is the bf16 (without autocast: float32) matmul speed measured on this machine, for
        every recipe. So an FP8 recipe that is faster has a higher MFU."""
        training = self.training
        dtype = "fp32" if training.decisions.recipe.compute is None else "bf16"
        peak = hardware.peak_flops(dtype, str(training.device), torch.get_num_threads())
        flops = tokens_per_second * training_flops_per_token(governed(training.config).model)
        return flops / (peak * training.ranks.world)

    def report(self, error: BaseException, last_checkpoint: str | None) -> dict[str, Any]:
        """Return what the summary records of an out-of-memory error, as values for JSON. Free the
        local variables in the traceback of `error`, and with them the activations."""
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
    """Return the prediction `asked` with less memory on the device: the free bytes plus the
    `held_bytes` of the run, but at most the predicted peak. The settings that are then proposed
    need less memory than the settings that failed."""
    there = min(asked.on.memory_bytes + held_bytes, asked.peak_bytes)
    return replace(asked, on=replace(asked.on, memory_bytes=there))


def _sentence(asked: Fit, held: dict[str, int]) -> str:
    """Return the sentence of the error: bytes held, bytes predicted, and settings that would fit.
    """
    words = ""
    if held:
        words = f"held were {quantity(sum(held.values()), 'bytes')} ({largest(held)}), and "
    return (f"{words}predicted {quantity(asked.peak_bytes, 'bytes')} at the peak "
            f"({largest(asked.rows)}; {asked.moment}){asked.left_out}; {asked.way_out}")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0].rstrip(": ")


@contextmanager
def raise_out_of_memory_as_run_failure(config: Config, what: str,
                                       processes: int = 1) -> Iterator[None]:
    """Turn an out-of-memory error of this block into a RunFailedError with settings that would fit.
    Errors in the training loop are RunFailedErrors already (`loop.fit`), and pass unchanged.

    what:      the subject of the error's sentence, for example "this run"
    processes: number of processes that share the memory of a CPU
    """
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
        raise RunFailedError(f"{what} ran out of memory on {device} "
                             f"({_first_line(error)}); {_sentence(asked, {})}") from error
