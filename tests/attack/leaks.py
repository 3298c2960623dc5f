"""Many updates, watched in every way there is: what lives after the second lives after the last, to
the byte."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lessons import l07_when_fp8_fails as faults
from lpkit.config import Config
from lpkit.measure import telemetry
from lpkit.measure.tracking import Tracker
from lpkit.training.loop import fit
from lpkit.training.training import Training
from tests.attack import Outcome

COUNT, FEW = 200, 8     # steps
TINY = {"model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 32,
        "global_batch": 4,
        "schedule.warmup_steps": 1, "eval_every": 3, "eval_batches": 1, "checkpoint_every": 5,
        "precision.recipe": "bf16", "system.device": "cpu", "system.threads": 1,
        "system.compile": False}


class Live(TorchDispatchMode):
    """Bytes of the storages that operations have made in here and that somebody still holds."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        new = {key: storage for key, storage in _storages(out) if key not in self.storages}
        if new:
            was_there = {key for key, _ in _storages((args, *(kwargs or {}).values()))}
            for key in new.keys() - was_there:
                self.storages[key] = ref(new[key], lambda _, key=key: self.storages.pop(key))
        return out

    @property
    def bytes(self) -> int:
        return sum(storage().nbytes() for storage in list(self.storages.values()))


def _storages(value: object) -> Iterator[tuple[int, torch.UntypedStorage]]:
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        yield storage._cdata, storage
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _storages(element)


def config(folder: Path) -> Config:
    (folder / "corpus.txt").write_text("".join(f"{i} bottles of beer on the wall\n"
        for i in range(2000)))
    return Config().replace(TINY | {"data.source": str(folder / "corpus.txt"),
                                    "data.val_fraction": 0.5})


# ---- those who look: each may be attached to a Training

SAMPLED = partial(telemetry.attach, every=2, counterfactuals=("fp8-delayed", "mxfp8"))


def tracked(training: Training) -> None:
    @contextmanager
    def watch(step: int) -> Iterator[None]:
        with Tracker(training.model, training.optimizer, training.device):
            yield

    training.watchers.append(watch)


def hooked(training: Training) -> None:
    """As the failure lab plants a fault, and takes low-precision products to 16 bits."""
    faults.inject(training.model, faults.Injection(fault="stale-amax",
        layers=("blocks.0.attention.qkv",)))
    faults.run_in_high_precision(training.model, faults.low_precision_products(training.model)[:2])


WATCHERS: dict[str, tuple[dict, Callable[[Training], object]]] = {
    "nobody": ({}, lambda training: None),
    "telemetry": ({}, SAMPLED),
    "telemetry of a history": ({"precision.recipe": "fp8-delayed"}, SAMPLED),
    "the tracker": ({}, tracked),
    "a fault": ({"precision.recipe": "fp8-delayed"}, hooked),
}


def growth(training: Training, folder: Path) -> dict[int, int]:
    """Bytes that live after a step beyond those after the second, by step, where there are any."""
    live_bytes = []
    with Live() as live:
        fit(training, folder, observers=[lambda record: live_bytes.append(live.bytes)])
    return {step: held - live_bytes[1] for step, held in enumerate(live_bytes[1:], 2)
            if held != live_bytes[1]}


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, settings = Outcome(), config(folder).replace({"steps": count, "seed": seed})
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")):
        for i, (name, (changes, attach)) in enumerate(WATCHERS.items()):
            training = Training.build(settings.replace(changes))
            attach(training)
            (folder / str(i)).mkdir()
            grown = growth(training, folder / str(i))
            outcome.tried += count
            for step, nbytes in grown.items():
                outcome.failed(f"watched by {name}", f"seed {seed}, step {step}: {nbytes:+,} bytes")
    return outcome
