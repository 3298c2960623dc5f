"""What a rank keeps and sends in each stage of ZeRO, on real processes; and when.

    configs = spread(config, 2, sequences=4)        # ZeRO 0, 1, 2, 3 on two ranks
    found = steps(configs, processes=2, updates=4)
    found["ZeRO 1"].most["gradients"], found["ZeRO 1"].sent_bytes, found["ZeRO 1"].losses
    steps(gathers(config, 2), processes=2, updates=4)       # the same recipe, sent in 4 bytes and 1
    timelines(configs, processes=2, updates=4)["ZeRO 3"][0].hidden_seconds      # of rank 0

They are predicted by `lpkit.predict_trace` (bytes) and `lpkit.predict.messages`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure.overlap import Recorded, Timeline, traced
from lpkit.measure.tracking import Footprint
from lpkit.measure.updates import Bench
from lpkit.parallel.processes import Place, Processes, WarmParent
from lpkit.parallel.ranks import Ranks, joined
from lpkit.predict.messages import Message, messages, sent_bytes
from lpkit.techniques import outside
from lpkit.techniques.blocks import FP32
from lpkit.techniques.layouts import STAGES, Layout
from lpkit.training.training import Training

STATES = ("weights", "gathered weights", "gradients", "optimizer state")    # rows of a footprint
PROGRESS_SECONDS = 120.0


def layouts(ranks: int) -> dict[str, Layout]:
    """All ranks along one axis, by stage of ZeRO. Gradients travel one by one: a message of a small
    model's would be a copy of all of them. Raises ConfigError for less than two."""
    if ranks < 2:
        raise ConfigError(f"{ranks} ranks tell one another nothing; use 2 or more, which one core "
                          f"carries")
    return {f"ZeRO {stage}": Layout(reduction="per-parameter", zero=stage,
                                    **{"shard" if stage else "data": ranks}) for stage in STAGES}


def spread(config: Config, ranks: int, *, sequences: int, micro_batches: int = 1
           ) -> dict[str, Config]:
    """`config` in each of the layouts, with so many sequences an update for each rank."""
    sizes = {"global_batch": ranks * sequences, "grad_accum_steps": ranks * micro_batches}
    return {name: replace(config.replace(sizes), parallel=layout)
            for name, layout in layouts(ranks).items()}


# How weights are gathered: recipe, `parallel.gathered`
GATHERS = {"bf16": ("bf16", "compute"), "FP8, sent in float32": ("fp8-tensorwise", "float32"),
           "FP8": ("fp8-tensorwise", "fp8")}


def gathers(config: Config, ranks: int) -> dict[str, Config]:
    """`config` in ZeRO 3 with each of GATHERS."""
    return {name: replace(config.replace({"precision.recipe": recipe}),
                          parallel=Layout(shard=ranks, gathered=gathered))
            for name, (recipe, gathered) in GATHERS.items()}


# What is kept and sent.

@dataclass(frozen=True, kw_only=True)
class Step:
    """Of rank 0: the most bytes of each of STATES in an update, and its messages; and losses, which
    are those of all ranks."""

    most: dict[str, int]
    messages: Counter[Message]
    losses: tuple[float, ...]

    @property
    def sent_bytes(self) -> dict[str, float]:
        return counted(self.messages)


def states(footprint: Footprint) -> dict[str, int]:
    return {row: footprint.most[row] for row in STATES if footprint.most.get(row)}


def sent(config: Config) -> dict[str, float]:
    """Bytes that a rank sends in an update, by kind of collective, as they are predicted; without
    those that are one number, such as the loss."""
    return counted(messages(config))


def counted(messages: Mapping[Message, int]) -> dict[str, float]:
    """The same of messages that were counted."""
    return sent_bytes({one: count for one, count in messages.items() if one.nbytes > FP32})


def losses(config: Config, updates: int, ranks: Ranks | None = None) -> tuple[float, ...]:
    """Before each of the first updates, as the config's data has them."""
    training = Training.build(config, ranks=ranks)
    return tuple(training.update(step).loss.item() for step in range(updates))


def steps(configs: Mapping[str, Config], *, processes: int, updates: int,
          parent: WarmParent | None = None) -> dict[str, Step]:
    """Of each config, which lies over so many processes. Raises ConfigError and RunFailedError as
    `Processes.wait`."""
    found, *_ = _on_ranks(_steps, configs, processes, updates, parent)
    return {name: Step(most=most, losses=tuple(before),
                       messages=Counter({Message(*of): count for *of, count in told}))
            for name, (most, told, before) in zip(configs, found)}


def _steps(place: Place, told: dict[str, Any]) -> list[Any]:
    found = []
    for config, ranks in _joined(place, told):
        before = losses(config, told["updates"], ranks)
        footprint = Bench(config, ranks=ranks).footprint()
        messages = [[*one, count] for one, count in footprint.messages.items()]
        found.append([states(footprint), messages, before])
    return found


# When.

def timelines(configs: Mapping[str, Config], *, processes: int, updates: int
              ) -> dict[str, list[Timeline]]:
    """Of each config, on CPUs, by rank: of so many updates the one that took least."""
    configs = {name: one.replace({"system.device": "cpu"}) for name, one in configs.items()}
    told = _on_ranks(_timelines, configs, processes, updates)
    found = {}
    for name, by_rank in zip(configs, zip(*told)):
        each = [Timeline.aligned(spans) for spans in zip(*by_rank)]
        found[name] = min(each, key=lambda ranks: max(one.step_seconds for one in ranks))
    return found


def _timelines(place: Place, told: dict[str, Any]) -> list[Any]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")      # else it writes of each profile
    found = []
    for config, ranks in _joined(place, told):
        training = Bench(config, ranks=replace(ranks, waits=Recorded())).training
        traced(training)    # the first makes the optimizer's state
        found.append([traced(training) for _ in range(told["updates"])])
    return found


# Ranks.

def _joined(place: Place, told: Mapping[str, Any]) -> Iterator[tuple[Config, Ranks]]:
    """A process group for each config, one after the other."""
    for number, given in enumerate(told["configs"]):
        place.at(number, "step")
        outside.load(given["imports"])
        config = Config.from_dict(given)
        with joined(config, local_rank=place.local_rank,
                    **place.among | {"init_method": f"{place.store}-{number}"}) as ranks:
            yield config, ranks


def _on_ranks(function: Any, configs: Mapping[str, Config], processes: int, updates: int,
              parent: WarmParent | None = None) -> list[Any]:
    told = {"configs": [one.to_dict() for one in configs.values()], "updates": updates}
    with Processes(f"{__name__}:{function.__name__}", told, world=processes, parent=parent,
                   progress_seconds=PROGRESS_SECONDS) as running:
        return running.wait()
