"""Which layer and product lose the loss: `lpkit.studies.faults.search` over short runs of a Config.

    print(bisect(config, "nvfp4"))                                              # a recipe
    print(bisect(config, Injection(fault="stale-amax", layers=("blocks.1.mlp.up",))))

A fresh model's loss hardly depends on its layers, so each seed is first trained for `warm_steps` in
16 bits. All runs continue from there, on the same batches, and differ in what is promoted to 16
bits alone. Deterministic.
"""

import functools
import math
import statistics
from collections.abc import Sequence

import torch

from lpkit.config import Config
from lpkit.errors import ConfigError, nearest, pick
from lpkit.measure import telemetry
from lpkit.measure.telemetry import Sample
from lpkit.precision.linear import scaled_linears
from lpkit.studies.faults import (
    FAULTS,
    NUDGES,
    Finding,
    Injection,
    Unit,
    inject,
    low_precision_products,
    random_injection,
    run_in_high_precision,
    search,
)
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import Training


def bisect(config: Config, suspect: str | Injection, *, seeds: int = 3, warm_steps: int = 120,
           steps: int = 8) -> Finding:
    """`suspect`: a recipe, a fault (in every layer), or a Plant; a fault brings its own recipe.
    `steps` of each run.

    Raises ConfigError for an unknown suspect, and for a recipe without low-precision products.
    """
    planted = (suspect if isinstance(suspect, Injection) else Injection(fault=suspect)
               if suspect in FAULTS else None)
    if planted is None and suspect not in RECIPES:
        raise ConfigError(f"there is no recipe or fault {suspect!r}; "
                          f"{nearest(suspect, [*RECIPES, *FAULTS])}")
    recipe = suspect if planted is None else pick(FAULTS, planted.fault, "fault").recipe
    config = config.replace({"precision.recipe": recipe, "precision.backend": "auto",
                             "steps": warm_steps + steps, "schedule": "constant",
                             "system.compile": False,
                             # a copy of a training has no hooks, streams and files of its own
                             "memory.activation_offload": "device",
                             "memory.optimizer_state": "device",
                             "memory.optimizer_step": "after"})

    @functools.cache
    def start(seed: int) -> Training:
        return warmed(config.replace({"seed": config.seed + seed}), warm_steps)

    candidates = low_precision_products(start(0).model) if seeds > 0 else []
    if seeds > 0 and not candidates:
        raise ConfigError(f"{recipe} has no low-precision product that could be promoted; choose a "
                          f"recipe of 8 or 4 bits")

    def loss(promoted: Sequence[Unit], seed: int, nudge: int) -> float:
        training = start(seed).copy()
        if nudge:
            for p in training.model.parameters():
                p.data = p.data.to(NUDGES[nudge - 1]).to(p.dtype)
        if planted is not None:
            inject(training.model, planted)
        run_in_high_precision(training.model, promoted)
        nothing = math.log(config.model.vocab)  # what a run that breaks is worth: it knows nothing
        return statistics.fmean(min(value, nothing) if math.isfinite(value) else nothing
                                for value in train(training, warm_steps, warm_steps + steps))

    name = suspect if planted is None else f"{planted.fault} in {recipe}"
    return search(name, candidates, loss, seeds=seeds)


def train_with_telemetry(config: Config, planted: Injection, *, every: int = 5) -> list[Sample]:
    """Train `config` with a fault in it, under the fault's recipe, and return what the telemetry
    saw; no other trace."""
    training = Training.build(config.replace({"precision.recipe": FAULTS[planted.fault].recipe,
                                              "system.compile": False}))
    inject(training.model, planted)
    seen = telemetry.attach(training, every=every)
    train(training, 0, config.steps)
    return seen.samples


def hidden_injection(config: Config, fault: str, seed: int) -> Injection:
    """`fault` in a layer of `config`'s model that only `seed` knows. Raises ConfigError for an
    unknown fault."""
    recipe = pick(FAULTS, fault, "fault").recipe
    model = Training.build(config.replace({"precision.recipe": recipe,
                                           "system.compile": False})).model
    return random_injection(model, fault, seed)


def warmed(config: Config, steps: int) -> Training:
    """The training of `config`, after `steps` with every product in 16 bits."""
    training = Training.build(config)
    recipes = {layer: layer.recipe for layer in scaled_linears(training.model)}
    run_in_high_precision(training.model, low_precision_products(training.model))
    train(training, 0, steps)
    for layer, recipe in recipes.items():
        layer.recipe = recipe
    return training


def train(training: Training, first: int, last: int) -> list[float]:
    """Steps `first` to `last`, nothing kept but the losses: nats per token."""
    losses = [training.update(step).loss for step in range(first, last)]
    return torch.stack(losses).tolist() if losses else []
