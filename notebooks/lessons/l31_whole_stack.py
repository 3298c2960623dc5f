"""Lesson 31, The whole stack: its study, its figures and its exercises.

Five techniques (ARMS) are added to one baseline, in all 32 combinations. Each combination trains to
the same loss. The factor of a combination is the baseline's cost over the combination's cost. The
logarithm of a factor is a sum of effects: one per technique, one per pair, and so on (the Moebius
transform). If only single techniques had effects, the factors of techniques would multiply.
`lpkit bench whole-stack` records the runs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
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
from lpkit.claims import referee
from lpkit.claims.protocol import Claim
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.errors import ConfigError, named, pick
from lpkit.predict.evidence import MEASURED
from lpkit.predict.params import optimizer_work, parameter_count
from lpkit.presets import preset
from lpkit.tables import html_table
from lpkit.training.training import Training

# ---- The baseline and the techniques

GROW_AT = (20, 40)      # updates after which layers or sequences double
MOST_STEPS = 400
BASE = SMALL | {"imports": ["lessons.rows.depth", "lessons.l21_noise_scale_and_schedules"],
                "model.layers": 4, "global_batch": 32, "grad_accum_steps": 16,
                "system.attention": "plain"}
ARMS: dict[str, dict[str, Any]] = {
    "fused attention": {"system.attention": "sdpa"},
    "larger micro-batches": {"grad_accum_steps": 4},
    "Muon": {"optimizer": "muon"},
    "stacked layers": {"governors": [{"name": "stack", "start": 1, "at": list(GROW_AT)}]},
    "small batches first": {"sizes": {"name": "batch-ramp", "doublings": len(GROW_AT),
                                      "every": GROW_AT[0]}}}
LEARNING = ("Muon", "stacked layers", "small batches first")    # the others do not change results
RATES = [0.006, 0.012, 0.03, 0.09, 0.18, 0.36]
SEEDS, TUNING_SEED = 9, 1_000_000
TARGET, HELD = 2.5, 64  # target loss in nats per token, on this many held-out sequences
Arms = frozenset[str]
BASELINE, WHOLE = frozenset(), frozenset(ARMS)


def subsets(names: Iterable[str]) -> list[Arms]:
    """Return all combinations of `names`, the smallest combinations first."""
    names = list(names)
    return [frozenset(some) for n in range(len(names) + 1)
            for some in itertools.combinations(names, n)]


def title(arms: Arms) -> str:
    """Return the name of a combination: "Muon + stacked layers"."""
    return " + ".join(name for name in ARMS if name in arms) or "baseline"


def settings(arms: Iterable[str]) -> dict[str, Any]:
    """Return the settings of the arms. Raises ConfigError for an arm that is not in ARMS."""
    return {key: value for name in arms for key, value in pick(ARMS, name, "arm").items()}


@cache
def protocol() -> Claim:
    """Return the comparison as a claim of `lpkit claim`. A claim rejects arms that differ in any
    setting that `differ` does not name."""
    return Claim(base="cpu-3m", settings=BASE, target="val_loss", effect=0.02, seeds=SEEDS,
                 arms={title(arms): settings(arms) for arms in subsets(LEARNING)},
                 differ=("optimizer", "governors", "sizes"), budget={"steps": MOST_STEPS},
                 tuning={"optimizer.lr": RATES, "optimizer.weight_decay": [0.0],
                         "optimizer.clip": [0.0]})


@cache
def config(arms: Arms, lr: float = RATES[1], seed: int = 0) -> Config:
    own = settings(arms - {*LEARNING})
    [point] = (point for point in protocol().points if point["optimizer.lr"] == lr)
    return protocol().config(title(arms & {*LEARNING}), point).replace(own | {"seed": seed})


def learning(arms: Arms, lr: float, seed: int) -> Config:
    """Return a config that learns like `config(arms)` but runs faster: with fused attention and the
    largest possible micro-batches, which do not change results."""
    return config(arms | {"fused attention"}, lr, seed).replace({
        "grad_accum_steps": 4 if "small batches first" in arms else 1})


@cache
def held_out() -> Batch:
    return Training.build(config(BASELINE).replace({"global_batch": HELD})).val.batch(0)


def loss_curve(config: Config, most: float = math.inf) -> list[tuple[int, float]]:
    """Train a run until its loss is TARGET or for `most` updates, and return its (updates, loss)
    pairs."""
    looks = curve(Training.build(config), held_out(), TARGET)
    return [(0, math.log(256)), *itertools.takewhile(lambda at: at[0] <= most, looks)]


def updates_to_target(config: Config, most: float = math.inf) -> float | None:
    """Return the number of updates after which a run reaches TARGET; None if it needs more than
    `most`."""
    return steps_to(loss_curve(config, most), TARGET)


def tuned(arms: Arms) -> dict[str, float | None]:
    """Return the updates to TARGET by learning rate, for TUNING_SEED, which is not compared. A run
    stops when it has made more updates than the best learning rate so far."""
    by_rate: dict[str, float | None] = {}
    for lr in reversed(RATES) if "Muon" in arms else RATES:
        best = min((updates for updates in by_rate.values() if updates), default=MOST_STEPS)
        by_rate[str(lr)] = updates_to_target(learning(arms, lr, TUNING_SEED), best)
    return by_rate


def total(config: Config, updates: float, price: Callable[[Config, int], float]) -> float:
    """Return the cost of a run's updates: the sum of `price(config, step)`. A price changes only at
    the updates GROW_AT."""
    return sum(max(0.0, min(updates, end) - begin) * price(config, begin)
               for begin, end in itertools.pairwise((0, *GROW_AT, math.inf)))


def flops(config: Config, step: int) -> float:
    """Return the FLOPs of the matmuls of update `step`. Of Muon's FLOPs, only those of the layers
    that run count."""
    seen = shares(config, step)
    muon = optimizer_work(config).flops * parameter_count(config.model) * fmean(seen)
    return config.sizes_at(step)[0] * Price.of(config.model).update(seen) + muon


def kind(config: Config, step: int) -> str:
    """Return a description of update `step`. Updates with the same description take the same
    time."""
    return (f"{config.system.attention}, micro-batches of {config.micro_batch}, "
            f"{config.optimizer.name}, {sum(shares(config, step)):.0f} layers, "
            f"{config.sizes_at(step)[0]} sequences")


def seconds_by_kind(combinations: Iterable[Arms], rounds: int) -> dict[str, float]:
    """Return the CPU seconds of each kind of update: the minimum over rounds in which the kinds
    take turns."""
    runners: dict[str, tuple[Training, int]] = {}
    for each in map(config, combinations):
        training = Training.build(each)
        for step in (first + 1 for first in (0, *GROW_AT)):
            runners.setdefault(kind(each, step), (training, step))
    fastest = dict.fromkeys(runners, math.inf)
    for _ in range(rounds + 1):
        for name, (training, step) in runners.items():
            begun = process_time()
            training.update(step)
            fastest[name] = min(fastest[name], process_time() - begun)
    return fastest


# the predicted model and machine; LAYERS and SEQUENCES of it stand for one of the small model
REAL, MACHINE, LAYERS, SEQUENCES = "gpt2-124m", "h100", 3, 16


@cache
def h100_seconds(arms: Arms, layers: int, sequences: int, recipe: str = "bf16") -> float:
    """Return the predicted seconds of an update of REAL on MACHINE. Its 12 layers represent the 4
    layers of the small model. `layers` and `sequences`: of the small model's update."""
    batch, micro = SEQUENCES * sequences, 8 if "larger micro-batches" in arms else 2
    return lpkit.predict(preset(REAL).replace({
        "model.layers": LAYERS * layers, "global_batch": batch, "grad_accum_steps": batch // micro,
        "precision.recipe": recipe, "optimizer": "muon" if "Muon" in arms else "adamw",
        "system.attention": "auto" if "fused attention" in arms else "plain"}),
        MACHINE).step_seconds


# ---- The record and its factors

@dataclass(frozen=True)
class Factor:
    """The baseline's cost over a combination's cost: mean over seeds and 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Factor:
        """Return the factor of costs that are paired by seed, with the statistics of `lpkit
        claim`."""
        gain_found = referee.look(before, after, referee.ALPHA)
        return cls(*(1 / (1 - gain) for gain in (gain_found.gain, *gain_found.interval)))

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Record:
    """The record of `lpkit bench whole-stack`."""

    updates: Mapping[str, Sequence[float]]  # to TARGET, by title of the combination and by seed
    rates: Mapping[str, float]              # best learning rate, by title
    seconds: Mapping[str, float]            # CPU seconds of an update, by `kind`

    @classmethod
    def read(cls, folder: Path = MEASURED) -> Record:
        """Read the record. Raises ConfigError if the folder has none."""
        if not (paths := sorted(folder.glob("whole-stack-*.json"))):
            raise ConfigError(f"{named(folder)} has no whole-stack-*.json; record it with `lpkit "
                              f"bench whole-stack --out {named(folder)}`")
        facts = json.loads(paths[0].read_text())
        return cls(*(facts[key] for key in ("updates", "rates", "seconds")))

    def costs(self, arms: Arms, unit: str) -> list[float]:
        """Return the cost of reaching TARGET, by seed. `unit`: "updates", "FLOPs", "tokens",
        "seconds" or "H100 seconds"."""
        price = pick({"updates": lambda *_: 1.0, "FLOPs": flops,
                      "tokens": lambda config, step: math.prod(config.sizes_at(step)),
                      "seconds": lambda config, step: self.seconds[kind(config, step)],
                      "H100 seconds": lambda config, step: h100_seconds(
                          arms, int(sum(shares(config, step))), config.sizes_at(step)[0])},
                     unit, "unit")
        return [total(config(arms), updates, price)
                for updates in self.updates[title(arms & {*LEARNING})]]

    def factor(self, arms: Arms, unit: str, baseline: Arms = BASELINE) -> Factor:
        return Factor.of(self.costs(baseline, unit), self.costs(arms, unit))

    def rebuilt(self, unit: str, order: int, arms: Arms = WHOLE) -> list[float]:
        """Return the factor of `arms`, by seed, that follows from the effects of combinations of at
        most `order` techniques."""
        costs = {some: self.costs(some, unit) for some in subsets(arms)}
        by_seed = ({some: math.log(costs[BASELINE][seed] / cost[seed])
                    for some, cost in costs.items()} for seed in range(len(costs[BASELINE])))
        return [math.exp(sum(effect for some, effect in effects(logs).items()
                             if len(some) <= order)) for logs in by_seed]

    def gap(self, unit: str, order: int, arms: Arms = WHOLE) -> Factor:
        """Return the factor that is predicted from effects of at most `order` techniques, over the
        measured factor."""
        return Factor.of(self.rebuilt(unit, order, arms), self.rebuilt(unit, len(arms), arms))


def effects(logs: Mapping[Arms, float]) -> dict[Arms, float]:
    """Return the Moebius transform of the logarithms of factors: the effect of each combination
    that its parts do not explain. The effects of a combination and of all its parts add up to the
    combination's logarithm."""
    return {some: sum((-1) ** (len(some) - len(part)) * logs[part] for part in subsets(some))
            for some in logs}


# ---- Figures and tables

def singles_table(record: Record) -> str:
    """Return an HTML table of the factor of each technique alone, and of all techniques together,
    in each unit."""
    units = "updates", "tokens", "FLOPs", "seconds"
    lines = [("all five" if arms == WHOLE else title(arms),
              *(str(record.factor(arms, unit)) for unit in units),
              f"{record.factor(arms, 'H100 seconds').value:.2f}")
             for arms in (*(frozenset([name]) for name in ARMS), WHOLE)]
    return html_table(("factor: times less", *units, "seconds, H100"), lines, caption=(
        f"cost until the loss is {TARGET} nats; {len(record.updates['baseline'])} seeds, 95% "
        f"intervals; H100: predicted for {REAL}, with the updates measured here"))


def ladder(record: Record, unit: str) -> list[tuple[Arms, float, float]]:
    """Return, as techniques are added one by one: the techniques so far, their measured factor, and
    the product of their single factors."""
    sums = [frozenset(itertools.islice(ARMS, n)) for n in range(len(ARMS) + 1)]
    return [(arms, record.factor(arms, unit).value if arms else 1.0, math.prod(
        record.factor(frozenset([name]), unit).value for name in arms)) for arms in sums]


def waterfall_figure(record: Record) -> dict:
    """Return the plotly spec of the share of the baseline's seconds that is left as techniques are
    added: measured, and by the product of single factors."""
    data, places = [], list(range(len(ARMS) + 1))
    for side, (unit, label) in enumerate((("seconds", "here"), ("H100 seconds", "on an H100"))):
        _, measured, products = zip(*ladder(record, unit))
        left, promised = ([100 / factor for factor in each] for each in (measured, products))
        at, colour = [place + 0.4 * side - 0.2 for place in places], COLOURS[side]
        data += [columns(at, promised, f"{label}, product of single factors", colour,
                         hover="%{y:.1f}%", width=0.38, opacity=0.35),
                 columns(at, left, f"{label}, together", colour, hover="%{y:.1f}%", width=0.2)]
    names = ["baseline",
             *(f"+ {name}".replace(" ", "<br>").replace("+<br>", "+ ") for name in ARMS)]
    return figure(data, "Seconds to the same loss, as techniques are added", height=480,
                  margin={"t": 100}, yaxis=axis("seconds, % of the baseline's"), barmode="overlay",
                  xaxis=axis("", tickvals=places, ticktext=names), shapes=[rule(y=20)])


def pairs_figure(record: Record, unit: str = "seconds") -> dict:
    """Return the plotly spec of the factor of each pair of techniques, over the product of its two
    single factors."""
    names = list(ARMS)
    z = [[1 / record.gap(unit, 1, frozenset((row, column))).value if i >= j else None
          for j, column in enumerate(names[:-1])] for i, row in enumerate(names[1:])]
    words = [[f"{value:.2f}" if value else "" for value in line] for line in z]
    return figure([heat(names[:-1], names[1:], z, ends=(0.3, 1.7), bar={}, text=words,
                        texttemplate="%{text}",
                        hovertemplate="%{y}, %{x}: %{text}<extra></extra>")],
                  "Factor of two techniques together, over the product of their factors",
                  height=400,
                  xaxis=axis("", showgrid=False), yaxis=axis("", showgrid=False))


def baselines_table(record: Record) -> str:
    """Return an HTML table of the factor of all five techniques, compared with baselines that
    already include some of them."""
    slow = (h100_seconds(BASELINE, 4, 32, "fp32") / h100_seconds(BASELINE, 4, 32)
            * record.factor(WHOLE, "H100 seconds").value)
    return html_table(("baseline", "times fewer seconds here", "times fewer on an H100"), [
        ("ours, in fp32", "", f"{slow:.1f}"),
        *((f"ours{' + ' * bool(arms)}{title(arms) * bool(arms)}",
           *(f"{record.factor(WHOLE, unit, arms).value:.2f}"
             for unit in ("seconds", "H100 seconds")))
          for arms, *_ in ladder(record, "updates")[:-1])])


def curves_figure(curves: Mapping[str, Sequence[tuple[int, float]]]) -> dict:
    return figure([scatter(*zip(*points), name, colour, hover="%{x} updates: %{y:.3f} nats")
                   for (name, points), colour in zip(curves.items(), COLOURS)],
                  f"Updates to {TARGET} nats", height=380, xaxis=axis("updates"),
                  yaxis=axis("held-out loss, nats per token"), shapes=[rule(y=TARGET)])


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
                    "single factors count, too": lambda singles, pairs: math.prod(
                        pair / a / b for pair, (a, b) in zip(
                            pairs, itertools.combinations(singles, 2))),
                    "pairs change the product": lambda singles, pairs: math.prod(singles)})
def with_pairs(singles: list[float], pairs: list[float]) -> float:
    product = math.prod(singles)
    for pair, (a, b) in zip(pairs, itertools.combinations(singles, 2)):
        product *= pair / (a * b)
    return product


@exercise("31.same_seconds", (1.0, 2.0, 2.0), (0.5, 2.0, 2.0), (0.25, 4.0, 1.0), minutes=5,
          draw=lambda r: (r.uniform(0.05, 1.0), r.uniform(1.1, 8), r.uniform(1.1, 8)),
          mistakes={"only a share of the seconds is faster": lambda share, a, b: a * b,
                    "both are faster in the same seconds": lambda share, a, b: 1 / (
                        (1 - share + share / a) * (1 - share + share / b)),
                    "the factor is the old seconds over the new": lambda share, a, b: (
                        1 - share + share / (a * b))})
def same_seconds(share: float, a: float, b: float) -> float:
    return 1 / (1 - share + share / (a * b))
