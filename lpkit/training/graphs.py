"""`system.cuda_graphs`: forward and backward of an update as one CUDA graph, so that the GPU does
not wait for kernel launches.

An FP8 update launches about 6,000 kernels, and the GPU finishes many of them before the host has
launched the next kernel. A CUDA graph records all launches once, and one call repeats them. The
first WARM_UP updates run without a graph. The next update is captured as a graph. Every later batch
is copied into the tensors of the captured batch, and the graph is replayed: the same kernels
compute the same numbers. Gradients are written to the same memory in every update. The optimizer's
step is not part of the graph.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpkit.config import Config
from lpkit.contracts import Batch, Choice
from lpkit.errors import ConfigError
from lpkit.kernels.capture import captured
from lpkit.memory.rows import asked as asked_memory
from lpkit.techniques.data import POLICIES, SIZES
from lpkit.techniques.optimizers import acting
from lpkit.techniques.recipes import Recipe
from lpkit.training.steps import Executor, Phases

ON, OFF = "on", "off"
NOT_CAPTURED = "no CUDA graph could be captured ({})"
WARM_UP = 2         # updates before the capture, which compile kernels and allocate memory
# fields of `config.memory` whose other rows move saved tensors, or update weights, during backward
MOVING = ("activation_offload", "optimizer_step")


def choose(config: Config, recipe: Recipe, device: torch.device, world: int) -> Choice:
    """Choose whether the run uses a CUDA graph. Raise ConfigError if `system.cuda_graphs` is true
    and the run cannot use a graph."""
    asked, why = config.system.cuda_graphs, why_not(config, recipe, device, world)
    if asked is True and why:
        raise ConfigError(f"system.cuda_graphs=true: {why}; set system.cuda_graphs=auto, which "
                          f"runs kernel by kernel here")
    used = ON if asked and not why else OFF
    return Choice(asked=str(asked).lower(), used=used, why=why or (
        f"one call starts forward and backward of an update, except in the first {WARM_UP} updates "
        f"and in updates that are observed" if used == ON else "requested"))


def why_not(config: Config, recipe: Recipe, device: torch.device, world: int) -> str:
    """Return why the run cannot use a CUDA graph, in one clause; "": it can."""
    moving = [key for key in asked_memory(config) if key in MOVING]
    return next((why for applies, why in (
        (device.type != "cuda", f"a {device.type.upper()} has none"),
        (world > 1, f"messages of {world} ranks are no part of a graph"),
        (recipe.loss_scaling, "the loss's scale is decided by the host, within an update"),
        (moving, f"memory.{next(iter(moving), '')} lets the host act within an update"),
        (config.governors, "a governor changes what an update runs"),
        (acting(config.optimizer), "the optimizer runs forward and backward once more"),
        (config.objective.name != "next-token", "an objective may ask the GPU for numbers"),
        (POLICIES[config.data.policy.name].gives_ids, "where documents end differs by batch"),
        (SIZES[config.sizes.name].at, "updates have several sizes"),
        (config.precision.telemetry_every, "telemetry watches updates, kernel by kernel"),
    ) if applies), "")


class _Recorded(NamedTuple):
    """A captured update. The graph reads and writes exactly these tensors."""

    run: Callable[[], None]     # replays the graph
    batch: Batch
    loss: Tensor
    gradients: list[tuple[nn.Parameter, Tensor]]


class Graphs(Executor):
    """Runs forward and backward of an update as a CUDA graph, after WARM_UP updates without it."""

    in_parts = False        # a replay cannot end between two micro-batches

    def __init__(self):
        self.seen: float = 0
        self.recorded: _Recorded | None = None

    def fresh(self) -> Graphs:
        return Graphs()

    def forward_backward(self, training: Any, batch: Batch, *, phases: Phases) -> Tensor:
        """As `Executor.forward_backward`, by replaying the graph. With `phases` or a watcher, which
        must be called between kernels, the update runs without the graph."""
        if training.watchers or phases is not nullcontext or self.seen < WARM_UP:
            self.seen += 1
            return super().forward_backward(training, batch, phases=phases)
        if self.recorded is None:
            try:
                self.recorded = self._recorded(training, batch)
            # capture fails if memory is full, or if an operation waits for the GPU
            except RuntimeError as error:
                why = NOT_CAPTURED.format(str(error).partition("\n")[0])
                if training.config.system.cuda_graphs is True:
                    raise ConfigError(f"system.cuda_graphs=true: {why}; set it to auto") from error
                print(f"lpkit: {why}; this run's kernels are started one by one", file=sys.stderr,
                      flush=True)
                self.seen = -math.inf       # never try again
                training.optimizer.zero_grad()
                return super().forward_backward(training, batch, phases=phases)
        # A graph reads and writes fixed addresses, so the batch is copied to the captured tensors.
        for name, t in self.recorded.batch.present.items():
            t.copy_(batch.present[name])
        self.recorded.run()
        for p, gradient in self.recorded.gradients:
            p.grad = gradient
        # a copy, because the next replay overwrites the captured loss
        return self.recorded.loss.clone()

    def _recorded(self, training: Any, batch: Batch) -> _Recorded:
        """Capture forward and backward of an update as a graph."""
        kept = Batch.of({name: t.clone() for name, t in batch.present.items()})
        run, loss = captured(partial(super().forward_backward, training, kept, phases=nullcontext))
        gradients = [(p, p.grad) for p in training.model.parameters() if p.grad is not None]
        return _Recorded(run, kept, loss, gradients)
