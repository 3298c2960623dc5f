"""What a rank keeps and sends in each stage of ZeRO, on real processes; and the seconds of the ways
to send gradients.

    configs = spread(config, 2, sequences=4)        # ZeRO 0, 1, 2, 3 on two ranks
    found = steps(configs, processes=2, updates=4)
    found["ZeRO 1"].most["gradients"], found["ZeRO 1"].sent_bytes, found["ZeRO 1"].losses
    turns(config, processes=2, rounds=3)            # forward and backward, by reduction
    steps(gathers(config, 2), processes=2, updates=4)       # the same recipe, sent in 4 bytes and 1

They are predicted by `lpkit.predict_trace` (bytes) and `lpkit.predict.messages`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lpkit.config import Config
from lpkit.hardware import synchronised
from lpkit.measure.tracking import Footprint
from lpkit.measure.updates import Bench
from lpkit.parallel.processes import Place, Processes, WarmParent
from lpkit.parallel.ranks import Ranks, joined
from lpkit.predict.messages import Message, messages, sent_bytes
from lpkit.techniques.blocks import FP32
from lpkit.techniques.layouts import REDUCTIONS, STAGES, Layout
from lpkit.timing import interleaved_seconds
from lpkit.training.training import RandomTokens, Training

STATES = ("weights", "gathered weights", "gradients", "optimizer state")    # rows of a footprint
ALONE = "alone"     # without a word to others
PROGRESS_SECONDS = 120.0


def layouts(ranks: int) -> dict[str, Layout]:
    """All ranks along one axis, by stage of ZeRO. Gradients travel one by one: a message of a small
    model's would be a copy of all of them."""
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
    found, *_ = _on_ranks(_steps, processes, parent, updates=updates,
                          configs=[one.to_dict() for one in configs.values()])
    return {name: Step(most=most, losses=tuple(before),
                       messages=Counter({Message(*of): count for *of, count in told}))
            for name, (most, told, before) in zip(configs, found)}


def _steps(place: Place, told: dict[str, Any]) -> list[Any]:
    found = []
    for number, given in enumerate(told["configs"]):
        place.at(number, "step")
        config = Config.from_dict(given)
        with _joined(place, config, number) as ranks:
            before = losses(config, told["updates"], ranks)
            footprint = Bench(config, ranks=ranks).footprint()
        messages = [[*one, count] for one, count in footprint.messages.items()]
        found.append([states(footprint), messages, before])
    return found


# The ways to send gradients.

def turns(config: Config, *, processes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a forward and a backward pass with the average of gradients, by reduction and
    round, of the rank that took longest; and those of a rank that averages nothing, ALONE."""
    told = _on_ranks(_turns, processes, None, rounds=rounds,
                     config=replace(config, parallel=Layout(data=processes)).to_dict())
    return {name: [max(each) for each in zip(*(one[name] for one in told))] for name in told[0]}


def _turns(place: Place, told: dict[str, Any]) -> dict[str, list[float]]:
    config = Config.from_dict(told["config"])
    share = {"parallel.data": 1, "global_batch": config.global_batch // place.world}
    with _joined(place, config) as ranks:
        device = Bench(config, ranks=ranks).device

        def runner(config: Config, ranks: Ranks | None = None) -> Any:
            training = Training.build(config, data=RandomTokens(config, device), ranks=ranks)
            return synchronised(partial(_pass, training), device)

        runners = {ALONE: runner(config.replace(share))} | {
            name: runner(config.replace({"parallel.reduction": name}), ranks)
            for name in REDUCTIONS}
        return dict(zip(runners, interleaved_seconds([*runners.values()], rounds=told["rounds"])))


def _pass(training: Training) -> None:
    training.forward_backward(training.batch(0))
    training.optimizer.zero_grad()


# Ranks.

def _joined(place: Place, config: Config, number: int = 0) -> AbstractContextManager[Ranks]:
    """`number`: of a process group that these ranks make, one after the other."""
    return joined(config, rank=place.rank, world=place.world, local_rank=place.local_rank,
                  local_world=place.local_world, init_method=f"{place.store}-{number}")


def _on_ranks(function: Any, processes: int, parent: WarmParent | None, **told: Any) -> list[Any]:
    with Processes(f"{__name__}:{function.__name__}", told, world=processes, parent=parent,
                   progress_seconds=PROGRESS_SECONDS) as running:
        return running.wait()
