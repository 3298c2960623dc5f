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
from dataclasses import dataclass, field
from typing import Any

import torch

from lpkit import measure
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.errors import pick
from lpkit.measure.tracking import Footprint
from lpkit.predict import Machine, Memory, memory
from lpkit.predict.time import step_time
from lpkit.timing import interleaved_seconds

PLAIN = "plain"
# of 256 standard normal numbers, on average, from the least to the largest (Tippett 1925)
RANGE = 5.65


@dataclass(frozen=True, kw_only=True)
class Technique:
    """Settings that change a config. `exact`: the same losses, bit for bit. `flops`: what it adds
    are FLOPs, or nothing; what it moves or casts, and that takes time too, no formula here
    knows."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    flops: bool = True
    source: str = ""


CHECKPOINTS, OFFLOAD = "Chen et al. 2016, arXiv:1604.06174", "Ren et al. 2021, arXiv:2101.06840"
INFINITY, ACTNN = "Rajbhandari et al. 2021, arXiv:2104.07857", "Chen et al. 2021, arXiv:2104.14129"
TECHNIQUES: dict[str, Technique] = {
    PLAIN: Technique(),
    "recompute": Technique(settings={"memory.recompute": "block"}, source=CHECKPOINTS),
    "recompute, every 2nd": Technique(settings={"memory.recompute": "block",
                                                "memory.recompute.every": 2}, source=CHECKPOINTS),
    "selective": Technique(settings={"memory.recompute": "selective"},
                           source="Korthikanti et al. 2022, arXiv:2205.05198"),
    "chunked loss": Technique(settings={"memory.cross_entropy": "chunked",
                                        "memory.cross_entropy.chunk_tokens": 256}, exact=False,
                              source="Hsu et al. 2024, arXiv:2410.10989"),
    "update in backward": Technique(settings={"memory.optimizer_step": "in-backward"},
                                    source="Lv et al. 2023, arXiv:2306.09782"),
    "8-bit moments": Technique(settings={"memory.moment_format": "int8"}, exact=False, flops=False,
                               source="Dettmers et al. 2021, arXiv:2110.02861"),
    "moments on disk": Technique(settings={"memory.optimizer_state": "disk"}, flops=False,
                                 source=INFINITY),
    "saved on the host": Technique(settings={"memory.activation_offload": "cpu"}, flops=False,
                                   source=OFFLOAD),
    "saved on disk": Technique(settings={"memory.activation_offload": "disk"}, flops=False,
                               source=INFINITY), **{f"saved in {bits} bits": Technique(
                                   settings={"memory.activation_offload": f"int{bits}"},
                                   exact=False, flops=False, source=ACTNN) for bits in (8, 4, 2)},
    "the four together": Technique(
        settings={"memory.recompute": "block", "memory.cross_entropy": "chunked",
                  "memory.cross_entropy.chunk_tokens": 256, "memory.optimizer_step": "in-backward",
                  "memory.moment_format": "int8"},
        exact=False, flops=False, source="recompute, chunked loss, update in backward, 8-bit "
        "moments"),
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


def predicted(config: Config, machine: Machine,
              names: Iterable[str] = tuple(TECHNIQUES)) -> dict[str, Predicted]:
    """By the closed forms. `config` says its precision and attention: "auto" is for a run to
    decide."""
    seconds = step_time(config, machine).step_seconds
    found = {}
    for name in names:
        changed = with_technique(config, name)
        held = memory(changed, machine, attention=config.model.attention)
        times = (step_time(changed, machine).step_seconds / seconds if TECHNIQUES[name].flops
                 else None)
        found[name] = Predicted(memory=held, slowdown=times)
    return found


@dataclass(frozen=True, kw_only=True)
class Measured:
    footprint: Footprint
    slowdown: float  # median over the rounds, each against the plain step of the same round
    seconds: float                  # median
    losses: tuple[float, ...]       # of the first updates, on the same batch

    @property
    def peak_bytes(self) -> int:
        return self.footprint.peak_bytes


def measured(config: Config, names: Iterable[str] = tuple(TECHNIQUES), *, device: str | None = None,
             rounds: int = 3) -> dict[str, Measured]:
    """Real steps of the same model on the same random tokens; `plain` goes first, whether it is
    named or not."""
    names = list(dict.fromkeys((PLAIN, *names)))
    footprints = {name: measure.memory(with_technique(config, name), device=device)
                  for name in names}
    benches = {name: measure.Bench(with_technique(config, name), device) for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for bench in benches.values():
        bench.training.data.drawn = benches[PLAIN].batch
    torch.manual_seed(config.seed)      # of stochastic rounding
    # the loss is read at the end, so that the device has finished
    runners = [lambda name=name: losses[name].append(benches[name].train().item())
               for name in names]
    seconds = interleaved_seconds(runners, rounds=rounds)
    plain = seconds[0]
    return {name: Measured(footprint=footprints[name], losses=tuple(losses[name]),
                           seconds=statistics.median(times),
                           slowdown=statistics.median(t / p for t, p in zip(times, plain)))
            for name, times in zip(names, seconds)}


def gradient_errors(config: Config, names: Iterable[str], *, device: str | None = None) -> dict[str,
                                                                                                float]:
    """|g - g_plain| / |g_plain| over all parameters, for the same weights and tokens."""
    plain = measure.Bench(config, device)
    want = _gradient(plain, plain.batch)
    errors = {}
    for name in names:
        bench = measure.Bench(with_technique(config, name), device)
        errors[name] = ((_gradient(bench, plain.batch) - want).norm() / want.norm()).item()
    return errors


def _gradient(bench: measure.Bench, batch: Batch) -> torch.Tensor:
    torch.manual_seed(0)
    bench.training.forward_backward(batch)
    return torch.cat([p.grad.flatten().float() for p in bench.model.parameters()])


def rounding_error(bits: int) -> float:
    """Root mean square error of normal numbers in `bits` bits, over their own: groups of 256 are
    spread evenly between their least and their largest, and rounded up or down at random, which
    errs by the step over sqrt(6).

    A gradient that is a sum over many tokens whose terms do not line up has the same relative error
    as its terms.
    """
    return RANGE / (2**bits - 1) / math.sqrt(6)
