"""Which layer and product lose the loss: `lpkit.studies.faults.search` over short runs of a Config.

    print(bisect(config, "nvfp4"))                                              # a recipe
    print(bisect(config, Plant(fault="stale-amax", layers=("blocks.1.mlp.up",))))

A fresh model's loss hardly depends on its layers, so each seed is first trained for `warm_steps` in 16 bits. All runs
continue from there, on the same batches, and differ in what is promoted to 16 bits alone. Deterministic.
"""

import copy
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from lpkit.config import Config, ConfigError, nearest
from lpkit.contracts import pick
from lpkit.measure.telemetry import Sample, Telemetry
from lpkit.precision.linear import scaled_linears
from lpkit.precision.recipes import RECIPES
from lpkit.studies.faults import FAULTS, NUDGES, Finding, Plant, Unit, hidden, plant, promote, search, units
from lpkit.training.assembly import assemble
from lpkit.training.loop import Job, update


def bisect(config: Config, suspect: str | Plant, *, seeds: int = 3, warm_steps: int = 120, steps: int = 8) -> Finding:
    """`suspect`: a recipe, a fault (in every layer), or a Plant; a fault brings its own recipe. `steps` of each run.

    Raises ConfigError for a suspect that there is not, and for a recipe without low-precision products.
    """
    planted = suspect if isinstance(suspect, Plant) else Plant(fault=suspect) if suspect in FAULTS else None
    if planted is None and suspect not in RECIPES:
        raise ConfigError(f"there is no recipe or fault {suspect!r}; {nearest(suspect, [*RECIPES, *FAULTS])}")
    recipe = suspect if planted is None else pick(FAULTS, planted.fault, "fault").recipe
    config = config.replace({"precision.recipe": recipe, "precision.backend": "auto", "steps": warm_steps + steps,
                             "optimizer.schedule": "constant", "system.compile": False,
                             # a copy of a job has no hooks, streams and files of its own
                             "memory.saved": "device", "memory.optimizer_state": "device", "memory.update": "after"})

    @functools.cache
    def start(seed: int) -> Job:
        return warmed(config.replace({"seed": config.seed + seed}), warm_steps)

    candidates = units(start(0).model) if seeds > 0 else []
    if seeds > 0 and not candidates:
        raise ConfigError(f"{recipe} has no low-precision product that could be promoted; choose a recipe of 8 or 4 bits")

    def loss(promoted: Sequence[Unit], seed: int, nudge: int) -> float:
        job = start(seed)
        model, optimizer, finish = copy.deepcopy((job.model, job.optimizer, job.finish))    # together: they share parameters
        if nudge:
            for p in model.parameters():
                p.data = p.data.to(NUDGES[nudge - 1]).to(p.dtype)
        if planted is not None:
            plant(model, planted)
        job = replace(job, model=promote(model, promoted), optimizer=optimizer, finish=finish)
        nothing = math.log(config.model.vocab)      # what a run that breaks is worth: it knows nothing
        return statistics.fmean(min(value, nothing) if math.isfinite(value) else nothing
                                for value in train(job, warm_steps, warm_steps + steps))

    name = suspect if planted is None else f"{planted.fault} in {recipe}"
    return search(name, candidates, loss, seeds=seeds)


def watched(config: Config, planted: Plant, *, every: int = 5) -> list[Sample]:
    """Train `config` with a fault in it, under the fault's recipe, and return what the telemetry saw; no other trace."""
    job = assemble(config.replace({"precision.recipe": FAULTS[planted.fault].recipe, "system.compile": False}))
    plant(job.model, planted)
    telemetry = Telemetry(model=job.model, every=every)
    train(telemetry.onto(job), 0, config.steps)
    return telemetry.samples


def hide(config: Config, fault: str, seed: int) -> Plant:
    """`fault` in a layer of `config`'s model that only `seed` knows. Raises ConfigError for an unknown fault."""
    recipe = pick(FAULTS, fault, "fault").recipe
    return hidden(assemble(config.replace({"precision.recipe": recipe, "system.compile": False})).model, fault, seed)


def warmed(config: Config, steps: int) -> Job:
    """The job of `config`, after `steps` of training with every product in 16 bits."""
    job = assemble(config)
    recipes = {layer: layer.recipe for layer in scaled_linears(job.model)}
    promote(job.model, units(job.model))
    train(job, 0, steps)
    for layer, recipe in recipes.items():
        layer.recipe = recipe
    return job


def train(job: Job, first: int, last: int) -> list[float]:
    """Steps `first` to `last`, nothing kept but the losses: nats per token."""
    config, losses = job.config, []
    for step in range(first, last):
        x, y = job.data.batch(step)
        for group in job.optimizer.param_groups:
            group["lr"] = config.optimizer.lr * job.schedule(step)
        losses.append(update(job, x.to(job.device), y.to(job.device))[0])
    return torch.stack(losses).tolist() if losses else []
