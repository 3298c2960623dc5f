"""What each memory technique buys and what it costs: the peak and the seconds of one step, beside
the plain one.

Bytes are those of `lpkit.predict.memory` and `lpkit.measure.memory`. Time is a multiple of the
plain step's: predicted by `lpkit.predict.time` where all that a technique adds are FLOPs, and
measured in turns, so that a slow moment of the machine meets all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lpkit import measure
from lpkit.config import Config
from lpkit.errors import pick
from lpkit.measure.tracking import Footprint
from lpkit.predict import Machine, Memory, memory
from lpkit.predict.time import step_time
from lpkit.techniques.memory import rows_of
from lpkit.timing import Watch, interleaved_seconds

PLAIN = "plain"
# of 256 standard normal numbers, on average, from the least to the largest (Tippett 1925)
RANGE = 5.65
# relative, of what is exact: a GPU's atomics add in the order in which they arrive, so that float32
# sums differ in their last digits, and what becomes bf16 by one rounding
SLACK = {"cpu": 0.0, "gpu": 2.0**-8}


@dataclass(frozen=True)
class Technique:
    """Settings that change a config. `exact`: the same losses, within SLACK. `flops`: what it adds
    are FLOPs, or nothing; what it moves or casts, and that takes time too, no formula here
    knows."""

    settings: Mapping[str, Any]
    exact: bool = True
    flops: bool = True

    @property
    def source(self) -> str:
        """Of the rows that the settings name."""
        rows = rows_of(Config().replace({"optimizer.clip": 0, **self.settings}))
        changed = dict.fromkeys(key.split(".")[1] for key in self.settings)
        return "; ".join(rows[field].source for field in changed)


RECOMPUTE, IN_BACKWARD = {"memory.recompute": "block"}, {"memory.optimizer_step": "in-backward"}
CHUNKED = {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 256}
INT8 = {"memory.moment_format": "int8"}
TECHNIQUES: dict[str, Technique] = {
    PLAIN: Technique({}),
    "recompute": Technique(RECOMPUTE),
    "recompute, every 2nd": Technique(RECOMPUTE | {"memory.recompute.every": 2}),
    "selective": Technique({"memory.recompute": "selective"}),
    "chunked loss": Technique(CHUNKED, exact=False),
    "update in backward": Technique(IN_BACKWARD),
    "8-bit moments": Technique(INT8, exact=False, flops=False),
    "moments on disk": Technique({"memory.optimizer_state": "disk"}, flops=False),
    "saved on the host": Technique({"memory.activation_offload": "cpu"}, flops=False),
    "saved on disk": Technique({"memory.activation_offload": "disk"}, flops=False),
    **{f"saved in {bits} bits": Technique({"memory.activation_offload": f"int{bits}"}, exact=False,
                                          flops=False) for bits in (8, 4, 2)},
    "the four together": Technique(RECOMPUTE | CHUNKED | IN_BACKWARD | INT8, exact=False,
                                   flops=False),
}


def with_technique(config: Config, name: str) -> Config:
    """Raises ConfigError for an unknown name."""
    return config.replace(dict(pick(TECHNIQUES, name, "technique").settings))


@dataclass(frozen=True, kw_only=True)
class Predicted:
    memory: Memory
    slowdown: float | None       # None: no formula

    @property
    def peak_bytes(self) -> float:
        return self.memory.peak_bytes


def predicted(config: Config, machine: Machine) -> dict[str, Predicted]:
    """Every technique by the closed forms. `config` says its precision and attention: "auto" is for
    a run to decide."""
    plain, found = step_time(config, machine).step_seconds, {}
    for name, technique in TECHNIQUES.items():
        changed, slowdown = with_technique(config, name), None
        if technique.flops:
            slowdown = step_time(changed, machine).step_seconds / plain
        found[name] = Predicted(memory=memory(changed, machine, attention=config.system.attention),
                                slowdown=slowdown)
    return found


@dataclass(frozen=True, kw_only=True)
class Measured:
    footprint: Footprint
    slowdown: float  # median over the rounds, each against the plain step of the same round
    losses: tuple[float, ...]       # of the first updates, on the same batch

    @property
    def peak_bytes(self) -> int:
        return self.footprint.peak_bytes


def measured(config: Config, *, rounds: int = 3, watch: Watch = iter) -> dict[str, Measured]:
    """Real steps of the same model on the same random tokens, with every technique."""
    footprints = {name: measure.memory(with_technique(config, name)) for name in TECHNIQUES}
    benches = {name: measure.Bench(with_technique(config, name)) for name in TECHNIQUES}
    losses: dict[str, list[float]] = {name: [] for name in TECHNIQUES}
    for bench in benches.values():
        bench.training.data.drawn = benches[PLAIN].batch
    torch.manual_seed(config.seed)      # of stochastic rounding

    def step(name: str) -> None:
        losses[name].append(benches[name].train().item())   # read, so that the device has finished

    seconds = interleaved_seconds([partial(step, name) for name in TECHNIQUES], rounds=rounds,
                                  watch=watch)
    found = {}
    for name, times in zip(TECHNIQUES, seconds):
        slowdown = statistics.median(mine / plain for mine, plain in zip(times, seconds[0]))
        found[name] = Measured(footprint=footprints[name], losses=tuple(losses[name]),
                               slowdown=slowdown)
    return found


def gradient_errors(config: Config, names: Iterable[str]) -> dict[str, float]:
    """|g - g_plain| / |g_plain| over all parameters, for the same weights and tokens."""
    batch = measure.Bench(config).batch

    def gradient(name: str) -> torch.Tensor:
        training = measure.Bench(with_technique(config, name)).training
        torch.manual_seed(0)
        training.forward_backward(batch)
        return torch.cat([p.grad.flatten().float() for p in training.model.parameters()])

    plain = gradient(PLAIN)
    return {name: ((gradient(name) - plain).norm() / plain.norm()).item() for name in names}


def rounding_error(bits: int) -> float:
    """Root mean square error of normal numbers in `bits` bits, over their own: groups of 256 are
    spread evenly between their least and their largest, and rounded up or down at random, which
    errs by the step over sqrt(6).

    A gradient that is a sum over many tokens whose terms do not line up has the same relative error
    as its terms.
    """
    return RANGE / (2**bits - 1) / math.sqrt(6)
