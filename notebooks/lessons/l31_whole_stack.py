"""Lesson 31, The whole stack: its study, its figures and its exercises.

Five techniques (ARMS) are added to one baseline, in all 32 combinations. Each combination trains
until it reaches the same loss, TARGET. With `u` updates, its cost in tokens, FLOPs or seconds is the
sum of the costs of these updates. The factor of a combination is the baseline's cost over its own.

The logarithms of the factors have a unique expansion in effects (the Moebius transform): one for each
technique, one for each pair, and so on. If techniques were independent, all effects of pairs would
be 0 and the factors would multiply. data/measured/whole-stack-*.json has the runs, which `lpkit bench
whole-stack --out data/measured` records.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import fmean
from time import process_time
from typing import Any

import lpkit
from lessons.figures.drawing import axis, columns, figure, heat, rule, scatter
from lessons.figures.style import COLOURS
from lessons.figures.waiting import progress as progress
from lessons.judging.judge import adding_to
from lessons.l21_noise_scale_and_schedules import BASE as SMALL
from lessons.l21_noise_scale_and_schedules import curve, steps_to
from lessons.l23_less_of_the_model import Price, shares
from lessons.rows import depth
from lpkit.claims import referee
from lpkit.claims.protocol import Claim
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.errors import ConfigError, pick
from lpkit.predict.evidence import MEASURED
from lpkit.predict.params import optimizer_work, parameter_count
from lpkit.presets import preset
from lpkit.tables import html_table
from lpkit.timing import Watch
from lpkit.training.training import Training

# ---- The baseline, and what is added to it

GROW_AT = (20, 40)      # updates after which layers or sequences double
MOST_STEPS = 400
BASE = SMALL | {
    "imports": [depth.__name__, "lessons.l21_noise_scale_and_schedules"], "model.layers": 4,
    "global_batch": 32, "grad_accum_steps": 16, "system.attention": "plain"}
ARMS: dict[str, dict[str, Any]] = {
    "fused attention": {"system.attention": "sdpa"},
    "larger micro-batches": {"grad_accum_steps": 4},
    "Muon": {"optimizer": "muon"},
    "stacked layers": {"governors": [{"name": "stack", "start": 1, "at": list(GROW_AT)}]},
    "small batches first": {"sizes": {"name": "batch-ramp", "doublings": len(GROW_AT),
                                      "every": GROW_AT[0]}}}
LEARNING = ("Muon", "stacked layers", "small batches first")    # others compute the same numbers
RATES = [0.006, 0.012, 0.03, 0.09, 0.18]
SEEDS, TUNING_SEED = 5, 1_000_000
TARGET, HELD = 2.5, 64  # nats per token of so many sequences of held-out text
UNITS = ("updates", "tokens", "FLOPs", "seconds")
Arms = frozenset[str]
BASELINE, WHOLE = frozenset(), frozenset(ARMS)


def subsets(names: Iterable[str]) -> list[Arms]:
    """Returns all combinations of `names`, small ones first."""
    names = list(names)
    return [frozenset(some) for n in range(len(names) + 1)
            for some in itertools.combinations(names, n)]


def title(arms: Arms) -> str:
    return " + ".join(name for name in ARMS if name in arms) or "baseline"


def settings(arms: Iterable[str]) -> dict[str, Any]:
    """Raises ConfigError for an arm that is not there."""
    return {key: value for name in arms for key, value in pick(ARMS, name, "arm").items()}


@cache
def protocol() -> Claim:
    """Returns the comparison as `lpkit claim` would read it from a file: which settings may differ,
    and the values that every arm tries. A difference that is not declared is refused."""
    return Claim(base="cpu-3m", settings=BASE, target="val_loss", effect=0.02, seeds=SEEDS,
                 arms={title(arms): settings(arms) for arms in subsets(LEARNING)},
                 differ=("optimizer", "governors", "sizes"), budget={"steps": MOST_STEPS},
                 tuning={"optimizer.lr": RATES, "optimizer.weight_decay": [0.0],
                         "optimizer.clip": [0.0]})


def config(arms: Arms, lr: float = RATES[1], seed: int = 0) -> Config:
    """Returns the Config of a combination."""
    [point] = (one for one in protocol().points if one["optimizer.lr"] == lr)
    own = settings(arms - frozenset(LEARNING))
    return protocol().config(title(arms & frozenset(LEARNING)), point).replace(own | {"seed": seed})


def learning(arms: Arms, lr: float, seed: int) -> Config:
    """Returns the Config of a run that only counts updates: it computes the same numbers as
    `config(arms)`, in the largest micro-batches that the arms allow."""
    parts = 4 if "small batches first" in arms else 1
    return config(arms | {"fused attention"}, lr, seed).replace({"grad_accum_steps": parts})


@cache
def held_out() -> Batch:
    return Training.build(config(BASELINE).replace({"global_batch": HELD})).val.batch(0)


def loss_curve(config: Config, most: float = math.inf) -> list[tuple[int, float]]:
    """Returns (updates, loss) of a run that ends at TARGET, or after `most` updates."""
    looks = curve(Training.build(config), held_out(), TARGET)
    return [(0, math.log(256)), *itertools.takewhile(lambda at: at[0] <= most, looks)]


def updates_to_target(config: Config, most: float = math.inf) -> float | None:
    """Returns the updates until a run reaches TARGET; None: not within `most`."""
    return steps_to(loss_curve(config, most), TARGET)


def tuned(arms: Arms, rates: Sequence[float] = tuple(RATES)) -> dict[str, float | None]:
    """Returns the updates to TARGET by learning rate, for a seed that is not compared. A run stops
    when it needs more updates than the best rate so far."""
    found: dict[str, float | None] = {}
    for lr in sorted(rates, key=lambda lr: abs(math.log(lr / (0.09 if "Muon" in arms else 0.012)))):
        best = min((n for n in found.values() if n), default=MOST_STEPS)
        found[str(lr)] = updates_to_target(learning(arms, lr, TUNING_SEED), best)
    return found


# ---- What an update costs

def total(config: Config, updates: float, price: Callable[[Config, int], float]) -> float:
    """Returns the cost of a run: `price(config, step)` of each update, and a part of the last."""
    whole = int(updates)
    return (sum(price(config, step) for step in range(whole))
            + (updates - whole) * price(config, whole))


def tokens(config: Config, step: int) -> float:
    return math.prod(config.sizes_at(step))


def flops(config: Config, step: int) -> float:
    """Returns the FLOPs of the matrix products of an update. Muon multiplies the matrices of the
    layers that run."""
    seen = shares(config, step)
    rule_flops = optimizer_work(config).flops * parameter_count(config.model)
    return config.sizes_at(step)[0] * Price.of(config.model).update(seen) + rule_flops * fmean(seen)


def kind(config: Config, step: int) -> str:
    """Returns a name of all updates that take the same seconds."""
    return (f"{config.system.attention}, micro-batches of {config.micro_batch}, "
            f"{config.optimizer.name}, {sum(shares(config, step)):.0f} layers, "
            f"{config.sizes_at(step)[0]} sequences")


def seconds_by_kind(combinations: Iterable[Arms], rounds: int, watch: Watch = iter
                    ) -> dict[str, float]:
    """Returns the CPU seconds of each kind of update, the least of rounds in which all kinds took
    turns. Time that other processes take is no part of CPU seconds, but they slow this process's
    caches."""
    runners: dict[str, tuple[Training, int]] = {}
    for each in map(config, combinations):
        training = Training.build(each)
        for step in (first + 1 for first in (0, *GROW_AT)):
            runners.setdefault(kind(each, step), (training, step))
    found = dict.fromkeys(runners, math.inf)
    for _ in watch(range(rounds + 1)):
        for name, (training, step) in runners.items():
            begun = process_time()
            training.update(step)
            found[name] = min(found[name], process_time() - begun)
    return found


# ---- The record

@dataclass(frozen=True)
class Factor:
    """The baseline's cost over that of a combination: mean over seeds, and its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Factor:
        """From costs in pairs of one seed, by the referee of `lpkit claim`."""
        found = referee.look(before, after, referee.ALPHA)
        return cls(*(1 / (1 - gain) for gain in (found.gain, *found.interval)))

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Record:
    """`lpkit bench whole-stack`: `updates` to TARGET by combination of LEARNING, one for each seed;
    the best `rates`; CPU `seconds` of each kind of update."""

    updates: Mapping[str, Sequence[float]]
    rates: Mapping[str, float]
    seconds: Mapping[str, float]

    @classmethod
    def read(cls) -> Record:
        facts = json.loads(next(MEASURED.glob("whole-stack-*.json")).read_text())
        return cls(*(facts[key] for key in ("updates", "rates", "seconds")))

    def config(self, arms: Arms, seed: int = 0) -> Config:
        return config(arms, self.rates[title(arms & frozenset(LEARNING))], seed)

    def costs(self, arms: Arms, unit: str) -> list[float]:
        """Returns the cost of reaching TARGET, by seed. `unit`: of UNITS, or "H100 seconds"."""
        price = pick({"updates": lambda *_: 1.0, "tokens": tokens, "FLOPs": flops,
                      "seconds": lambda one, step: self.seconds[kind(one, step)],
                      "H100 seconds": lambda one, step: h100_seconds(
                          arms, int(sum(shares(one, step))), one.sizes_at(step)[0])}, unit, "unit")
        return [total(self.config(arms), updates, price)
                for updates in self.updates[title(arms & frozenset(LEARNING))]]

    def factor(self, arms: Arms, unit: str, baseline: Arms = BASELINE) -> Factor:
        return Factor.of(self.costs(baseline, unit), self.costs(arms, unit))

    def rebuilt(self, unit: str, order: int, arms: Arms = WHOLE) -> list[float]:
        """Returns the factor of `arms` by seed, from the effects of at most `order` techniques."""
        costs = {some: self.costs(some, unit) for some in subsets(arms)}
        by_seed = ({some: math.log(costs[BASELINE][seed] / cost[seed])
                    for some, cost in costs.items()} for seed in range(len(costs[BASELINE])))
        return [math.exp(sum(effect for some, effect in effects(logs).items()
                             if len(some) <= order)) for logs in by_seed]

    def gap(self, unit: str, order: int) -> Factor:
        """Returns the factor that effects up to `order` promise over the measured one."""
        measured = [a / b for a, b in zip(self.costs(BASELINE, unit), self.costs(WHOLE, unit))]
        return Factor.of(self.rebuilt(unit, order), measured)

    def pair(self, one: str, other: str, unit: str) -> float:
        """Returns the factor of two techniques over the product of their own factors."""
        mean = {n: math.exp(fmean(map(math.log, self.rebuilt(unit, n, frozenset((one, other))))))
                for n in (1, 2)}
        return mean[2] / mean[1]


def effects(logs: Mapping[Arms, float]) -> dict[Arms, float]:
    """Returns the Moebius transform: of each combination what its parts do not explain. Effects of
    all parts of a combination add up to its logarithm."""
    return {some: sum((-1) ** (len(some) - len(part)) * logs[part] for part in subsets(some))
            for some in logs}


# ---- The same on an H100

REAL, LAYERS_A_LAYER, SEQUENCES_A_SEQUENCE = "gpt2-124m", 3, 16


@cache
def h100_seconds(arms: Arms, layers: int, sequences: int, **more: str) -> float:
    """Returns the predicted seconds of an update of REAL on an H100: 12 layers for the 4 here, 512
    sequences for 32; micro-batches have as many sequences as here."""
    batch = SEQUENCES_A_SEQUENCE * sequences
    micro = 8 if "larger micro-batches" in arms else 2
    return lpkit.predict(preset(REAL).replace({
        "model.layers": LAYERS_A_LAYER * layers, "global_batch": batch,
        "grad_accum_steps": batch // micro, "precision.recipe": "bf16",
        "system.attention": "auto" if "fused attention" in arms else "plain",
        "optimizer": "muon" if "Muon" in arms else "adamw"} | more), "h100").step_seconds


def fp32_factor() -> float:
    """Returns how many times as long the baseline's update takes in fp32 on an H100, predicted."""
    fp32 = lpkit.predict(preset(REAL).replace({
        "precision.recipe": "fp32", "system.attention": "plain", "grad_accum_steps": 256}), "h100")
    return fp32.step_seconds / h100_seconds(BASELINE, 4, 32)


# ---- Figures and tables

def singles_table(record: Record) -> str:
    """HTML: the factor of each technique alone, and of all, in each unit."""
    lines = [(title(arms), *(str(record.factor(arms, unit)) for unit in UNITS),
              f"{record.factor(arms, 'H100 seconds').value:.2f}")
             for arms in (*(frozenset([name]) for name in ARMS), WHOLE)]
    lines[-1] = ("all five", *lines[-1][1:])
    return html_table(("times fewer", *UNITS, "seconds, H100"), lines, caption=(
        f"to {TARGET} nats; {len(record.updates['baseline'])} seeds, 95% intervals; H100: predicted "
        f"for {REAL}, with the updates measured here"))


def ladder(record: Record, unit: str) -> list[tuple[str, float, float]]:
    """Returns each technique as it is added: its name, the measured factor of all so far, and the
    product of their own factors."""
    found, product, so_far = [], 1.0, BASELINE
    for name in ARMS:
        so_far |= {name}
        product *= record.factor(frozenset([name]), unit).value
        found.append((name, record.factor(so_far, unit).value, product))
    return found


def waterfall_figure(record: Record) -> dict:
    """The plotly spec of the seconds that are left, as techniques are added: measured here,
    predicted for an H100, and what a product of single factors promises."""
    data, names = [], ["baseline", *ARMS]
    for unit, label, colour in (("seconds", "here", COLOURS[0]),
                                ("H100 seconds", f"H100, {REAL}", COLOURS[1])):
        steps = ladder(record, unit)
        left = [100.0, *(100 / factor for _, factor, _ in steps)]
        data.append(columns(names, left, label, colour, hover="%{x}: %{y:.0f}%",
                            text=[f"{value:.0f}" for value in left], textposition="outside",
                            cliponaxis=False))
        data.append(scatter(names, [100.0, *(100 / product for _, _, product in steps)],
                            f"{label}, by the product", colour, mode="markers",
                            hover="%{x}: %{y:.0f}%",
                            marker={"symbol": "line-ew-open", "size": 22, "line": {"width": 3}}))
    return figure(data, "Seconds to the same loss, as techniques are added", height=480,
                  barmode="group", margin={"t": 120}, xaxis=axis(""),
                  yaxis=axis("of the baseline's seconds, %", range=[0, 112]),
                  shapes=[rule(y=20)])


def pairs_figure(record: Record, unit: str = "seconds") -> dict:
    """The plotly spec of the factor of each pair over the product of its two own factors."""
    names = list(ARMS)
    z = [[record.pair(one, other, unit) if i > j else None for j, other in enumerate(names[:-1])]
         for i, one in enumerate(names)][1:]
    words = [[f"{value:.2f}" if value else "" for value in line] for line in z]
    return figure([heat(names[:-1], names[1:], z, ends=(0.7, 1.3), bar={}, text=words,
                        texttemplate="%{text}",
                        hovertemplate="%{y}, %{x}: %{z:.3f}<extra></extra>")],
                  "Two techniques together, over the product of both", height=400,
                  xaxis=axis("", showgrid=False), yaxis=axis("", showgrid=False))


def baselines_table(record: Record) -> str:
    """HTML: the factor of all five over baselines that have some of them already."""
    lines, so_far = [], BASELINE
    for name in (None, *list(ARMS)[:-1]):
        so_far |= {name} - {None}
        lines.append((f"with {title(so_far)}" if so_far else "as above",
                      *(f"{record.factor(WHOLE, unit, so_far).value:.2f}"
                        for unit in ("seconds", "H100 seconds"))))
    slow = fp32_factor() * record.factor(WHOLE, "H100 seconds").value
    return html_table(("the baseline", "times fewer seconds here", "on an H100"),
                      [("as above, in fp32", "", f"{slow:.1f}"), *lines])


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


def _factors(r: Random) -> tuple[list[float], list[float]]:
    singles = [r.uniform(0.5, 4) for _ in range(r.randint(2, 5))]
    return singles, [a * b * r.uniform(0.5, 1.5) for a, b in itertools.combinations(singles, 2)]


@exercise("31.with_pairs", ([2.0, 3.0], [6.0]), ([2.0, 3.0], [4.0]),
          ([2.0, 3.0, 1.5], [4.0, 3.0, 5.0]), minutes=6, stars=2, draw=_factors,
          mistakes={"a pair counts over the product of its two": lambda singles, pairs: math.prod(
                        singles) * math.prod(pairs),
                    "singles count, too": lambda singles, pairs: math.prod(
                        pair / a / b for pair, (a, b) in zip(
                            pairs, itertools.combinations(singles, 2))),
                    "pairs change the product": lambda singles, pairs: math.prod(singles)})
def with_pairs(singles: list[float], pairs: list[float]) -> float:
    product = math.prod(singles)
    for pair, (a, b) in zip(pairs, itertools.combinations(singles, 2)):
        product *= pair / (a * b)
    return product


def _shares(r: Random) -> tuple[float, float, float]:
    return r.uniform(0.05, 1.0), r.uniform(1.1, 8), r.uniform(1.1, 8)


@exercise("31.same_seconds", (1.0, 2.0, 2.0), (0.5, 2.0, 2.0), (0.25, 4.0, 1.0), minutes=5, stars=1,
          draw=_shares,
          mistakes={"only a share of the seconds is faster": lambda share, a, b: a * b,
                    "both are faster in the same seconds": lambda share, a, b: 1 / (
                        (1 - share + share / a) * (1 - share + share / b)),
                    "the factor is the old seconds over the new": lambda share, a, b: (
                        1 - share + share / (a * b))})
def same_seconds(share: float, a: float, b: float) -> float:
    return 1 / (1 - share + share / (a * b))


def lacking() -> ConfigError:
    return ConfigError("data/measured has no record of the whole stack; run `lpkit bench "
                       "whole-stack --out data/measured`")
