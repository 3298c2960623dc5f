"""The impossible triangle: speed, quality and cost cannot all be best. Which configs are not beaten
in all of them?

A point is beaten when another one is at least as good everywhere and better somewhere (Pareto).
`triangle` makes points of configs: days and dollars from `lpkit.predict.time`, loss from a
published scaling law, or measured where it was; `grid` finds each config its layout.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.predict.params import parameter_count
from lpkit.predict.plan import plan
from lpkit.predict.scaling import DEFAULT, LAWS, Law
from lpkit.predict.time import bill, step_time
from lpkit.predict.units import quantity
from lpkit.techniques.machines import Machine, find


@dataclass(frozen=True, kw_only=True)
class Point:
    """`values` are numbers by axis; `facts` are what a figure may filter by; `where` says what gave
    the values."""

    name: str
    values: Mapping[str, float]
    facts: Mapping[str, Any] = field(default_factory=dict)
    where: str = "formula"


def frontier(points: Iterable[Point], *, least: Sequence[str] = (),
             most: Sequence[str] = ()) -> tuple[Point, ...]:
    """Those that no other beats, in their order. Equal points are all kept.

    Raises ConfigError for an axis that a point lacks or where it has no number.
    """
    points = list(points)
    if not (least or most):
        raise ConfigError("a frontier needs an axis: least=('days', 'dollars'), "
                          "most=('tokens_per_second',)")
    goals = [(_goals(point, least, most), i) for i, point in enumerate(points)]
    kept: list[tuple[tuple[float, ...], int]] = []
    # whoever beats a point comes before it, or is equal in what is compared first
    for goal, i in sorted(goals):
        if not any(_beats(other, goal) for other, _ in kept):
            kept.append((goal, i))
    return tuple(points[i] for i in sorted(i for _, i in kept))


def _goals(point: Point, least: Sequence[str], most: Sequence[str]) -> tuple[float, ...]:
    missing = [axis for axis in (*least, *most)
               if not math.isfinite(point.values.get(axis, math.nan))]
    if missing:
        raise ConfigError(f"{point.name} has no {missing[0]!r}; it has {', '.join(point.values)}")
    return (*(point.values[axis] for axis in least), *(-point.values[axis] for axis in most))


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point to be made: what is trained, in the layout of its `parallel`, and where."""

    name: str
    config: Config
    machine: str | Machine = "h200"
    tokens: float


def grid(configs: Mapping[str, Config], machines: Iterable[str | Machine], devices: Iterable[int],
         tokens: Iterable[float],
         ) -> tuple[Candidate, ...]:
    """Every config on every number of devices of every machine, in the soonest layout that fits
    (`plan`), for each number of tokens. Where nothing fits there is no candidate."""
    made, devices, tokens = [], tuple(devices), tuple(tokens)
    for (name, config), machine, count in itertools.product(configs.items(), map(find, machines),
                                                            devices):
        for best in plan(config, max(tokens), machine, devices=count).options[:1]:
            for many in tokens:
                words = f"{name}, {quantity(many, 'tokens')}, {count:,} {machine.name}"
                made.append(Candidate(name=words, config=best.config, machine=machine, tokens=many))
    return tuple(made)


def triangle(candidates: Iterable[Candidate], *, law: Law | None = None,
             measured: Mapping[str, float] | None = None,
             ) -> tuple[Point, ...]:
    """A point for each, with `days`, `dollars` and `loss`, and `tokens_per_second` beside them.

    `measured` are losses by candidate's name: they replace the law's, and the point says so. All of
    them must then be of one corpus. A loss beyond the law's fit is labelled `extrapolated`.
    """
    law, measured, made = law or LAWS[DEFAULT], measured or {}, []
    for one in candidates:
        on = find(one.machine)
        step = step_time(one.config, on)
        paid = bill(step, on, one.tokens)
        if paid.cost is None:
            raise ConfigError(f"{on.title} has no price_per_hour, so {one.name} has no cost; "
                              f"describe the machine with one")
        count = parameter_count(one.config.model)
        said = law.extrapolate(count, one.tokens)
        where = "measured" if one.name in measured else "formula" if said.inside else "extrapolated"
        made.append(Point(
            name=one.name, where=where, values={"days": paid.seconds / 86_400, "dollars": paid.cost,
                                                "loss": measured.get(one.name, said.nats),
                                                "tokens_per_second": step.tokens_per_second},
            facts={"machine": on.name, "devices": step.devices, "parameters": count,
                   "tokens": one.tokens, "layout": str(one.config.parallel),
                   "note": "measured" if one.name in measured else said.note}))
    return tuple(made)
