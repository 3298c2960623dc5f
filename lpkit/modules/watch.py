"""Measure the training steps of any model: memory, seconds and the errors of low precision. Hooks
on the optimizer tell when an update ends, so the training loop need not change.

    with lpkit.watch(model, optimizer, telemetry_every=100) as seen:
        ...                                 # your training loop
    print(seen.reconcile(predicted))        # predicted: a result of lpkit.predict

The call of the optimizer's `step` ends an update. The first update allocates the optimizer's state,
and is not measured. The second update runs under `Tracker`, which records all allocations; it takes
several times as long. Later updates are timed, from the end of the previous update to their own
end. In every `telemetry_every`-th update, `Telemetry` measures the operands of Linears; this update
is not timed.
"""

from __future__ import annotations

import statistics
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lpkit import hardware
from lpkit.errors import ConfigError, shown
from lpkit.measure.telemetry import Sample, Telemetry
from lpkit.measure.tracking import Footprint, Tracker, allocator_counts
from lpkit.modules.convert import Converted, head_names
from lpkit.modules.predict import ModelPrediction
from lpkit.modules.step import blocks_of
from lpkit.predict import cards
from lpkit.predict.compare import Comparison
from lpkit.predict.units import duration, quantity

TRACKED = 2         # number of the update whose bytes are counted, from 1


class Watch:
    """The measurements so far of the model and optimizer that `watch` got."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer,
                 telemetry_every: int | None, **telemetry: Any):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"watch needs the optimizer whose step ends an update, got "
                              f"{shown(optimizer)}")
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner       # accelerate wraps the optimizer; hooks need the inner optimizer
        self.model, self.optimizer = model, optimizer
        parameter = next((p for p in model.parameters() if p.requires_grad), None)
        if parameter is None:
            raise ConfigError("every parameter of this model is frozen, so no step trains it")
        updated = {p for group in optimizer.param_groups for p in group["params"]}
        if updated.isdisjoint(model.parameters()):
            raise ConfigError("this optimizer updates no parameter of this model; watch takes the "
                              "optimizer of the model")
        self.device = parameter.device
        self.updates, self.seconds = 0, []
        self.footprint: Footprint | None = None
        self.telemetry = None if telemetry_every is None else Telemetry(
            model=model, every=telemetry_every, **telemetry)
        self.calls: Counter[str] = Counter()
        self.exits, self.around = ExitStack(), ExitStack()

    # ---- hooks

    def __enter__(self) -> Watch:
        self.exits.callback(self.optimizer.register_step_pre_hook(self._before).remove)
        self.exits.callback(self.optimizer.register_step_post_hook(self._after).remove)
        for name, module in self.model.named_modules():
            if isinstance(module, Converted):
                self.exits.callback(module.register_forward_pre_hook(
                    lambda *_, name=name: self.calls.update((name,))).remove)
        self._begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.around.close()
        self.exits.close()

    def _begin(self) -> None:
        """Start to measure the next update: its allocations, its operands, or its seconds."""
        looks = self.telemetry and self.updates % self.telemetry.every == 0
        self.timed, self.tracker = self.updates >= TRACKED and not looks, None
        if self.updates == TRACKED - 1:
            hardware.reset_peak(self.device)
            self.tracker = self.around.enter_context(
                Tracker(self.model, self.optimizer, self.device, heads=head_names(self.model),
                        hooked=False))
            # the tensors that the model gets are the row "batch" of the footprint
            self.around.callback(self.model.register_forward_pre_hook(
                lambda _, *given: self.tracker.hold(tree_leaves(given), "batch"),
                with_kwargs=True).remove)
        elif looks:
            self.around.enter_context(self.telemetry.watch(self.updates))
        self.begun = hardware.now(self.device)

    def _before(self, *_: Any) -> None:
        """Hook before the optimizer's step: the forward and backward passes are done."""
        if self.tracker is not None:
            self.tracker.at_update(1)
        else:
            self.around.close()         # ends telemetry

    def _after(self, *_: Any) -> None:
        """Hook after the optimizer's step: store the measurements, and begin the next update."""
        if self.timed:
            self.seconds.append(hardware.now(self.device) - self.begun)
        if self.tracker is not None:
            self.tracker.at_update(-1)
        self.around.close()
        if self.tracker is not None:
            self.footprint = self.tracker.footprint(where=self.where,
                                                    **allocator_counts(self.device))
        self.updates += 1
        self._begin()

    # ---- results

    @property
    def where(self) -> str:
        """The name of the device."""
        return hardware.device_name(self.device)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of the second update in bytes; None before its end."""
        return self.footprint and self.footprint.peak_bytes

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of the timed updates; None if no update was timed yet."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def samples(self) -> list[Sample]:
        """The telemetry so far; empty without `telemetry_every`."""
        return self.telemetry.samples if self.telemetry else []

    @property
    def uncalled(self) -> list[str]:
        """Names of converted modules whose forward was never called. Other code reads their weights
        directly, so their matmuls do not run under the recipe."""
        return [name for name, module in self.model.named_modules()
                if isinstance(module, Converted) and not self.calls[name]]

    def _seen(self) -> Footprint:
        """Return the footprint. Raises ConfigError before the second update has ended."""
        if self.footprint is None:
            raise ConfigError(f"bytes are counted in update {TRACKED}, and {self.updates} have "
                              f"ended; train on")
        return self.footprint

    def reconcile(self, predicted: ModelPrediction) -> Comparison:
        """Return a comparison of the predicted and the measured bytes at the peak, row by row.
        Raises ConfigError before the second update has ended."""
        rows = [{**footprint.rows, "peak": footprint.peak_bytes}
                for footprint in (predicted.footprint, self._seen())]
        return Comparison.of_rows(*rows, unit="bytes", where=self.where)

    def card(self, path: str, predicted: ModelPrediction | None = None) -> list[str]:
        """Write the measurements, and the prediction if given, to PATH.json, and as a picture to
        PATH.svg (`lpkit.predict.cards`). Return both paths. Raises ConfigError before the second
        update has ended, and for a prediction of another model."""
        count = sum(p.numel() for p in self.model.parameters())
        if predicted is not None and predicted.parameters != count:
            raise ConfigError(f"the prediction is of a model of {predicted.parameters:,} "
                              f"parameters, and the watched model has {count:,}; predict the "
                              f"watched model")
        write = predicted.card if predicted is not None else partial(cards.write, model={
            "name": type(self.model).__name__, "parameters": count,
            "layers": blocks_of(self.model)})
        return write(path, device=self.where, peak_bytes=self._seen().peak_bytes,
                     step_seconds=self.step_seconds, updates=self.updates, timed=len(self.seconds))

    def __str__(self) -> str:
        if self.footprint is None:
            return f"{self.updates} updates so far, on {self.where}"
        words = [f"{self.updates} updates on {self.where}",
                 f"peak {quantity(self.peak_bytes, 'bytes')} in {self.footprint.phase}, "
                 f"{self.footprint.module or 'the model'}"]
        if self.seconds:
            words.append(f"a step took {duration(self.step_seconds)} "
                         f"(median of {len(self.seconds)})")
        if self.uncalled:
            words.append(f"NOT CALLED, so not under the recipe: {', '.join(self.uncalled)}")
        return "; ".join(words)


def watch(model: nn.Module, optimizer: torch.optim.Optimizer, *, telemetry_every: int | None = None,
          **telemetry: Any) -> Watch:
    """Return a context manager that measures the steps of `optimizer` on `model`. Its value in the
    `with` statement is the Watch.

    telemetry_every: measure the operands of Linears in every n-th update; None: never
    telemetry:       `layers`, `roles`, `counterfactuals` and `rows` of
                     `lpkit.measure.telemetry.Telemetry`

    Raises ConfigError.
    """
    return Watch(model, optimizer, telemetry_every, **telemetry)
