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
from lpkit.predict.scaling import DEFAULT, LAWS
from lpkit.predict.time import bill, step_time
from lpkit.predict.units import between, duration, quantity
from lpkit.techniques.machines import Machine, find


@dataclass(frozen=True, kw_only=True)
class Point:
    """`values` by axis; `facts` for a figure to filter by; `where` says what gave the values."""

    name: str
    values: Mapping[str, float]
    facts: Mapping[str, Any] = field(default_factory=dict)
    where: str = "formula"


def frontier(points: Iterable[Point], *, least: Sequence[str] = (),
             most: Sequence[str] = ()) -> tuple[Point, ...]:
    """Those that no other beats, in their order. Equal points are all kept.

    Raises ConfigError for an axis that a point lacks or where it has no number.
    """
    points = tuple(points)
    if not (least or most):
        raise ConfigError("a frontier needs an axis: least=('days', 'dollars'), "
                          "most=('tokens_per_second',)")
    goals = []
    for point in points:
        for axis in (*least, *most):
            if not math.isfinite(point.values.get(axis, math.nan)):
                raise ConfigError(f"{point.name} has no {axis!r}; it has {', '.join(point.values)}")
        goals.append((*(point.values[axis] for axis in least),
                      *(-point.values[axis] for axis in most)))
    rivals = set(goals)
    return tuple(point for point, goal in zip(points, goals)
                 if not any(_beats(rival, goal) for rival in rivals))


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
         tokens: Iterable[float]) -> tuple[Candidate, ...]:
    """Every config on every number of devices of every machine, in the soonest layout that fits
    (`plan`), for each number of tokens. Where nothing fits there is no candidate."""
    made, tokens = [], tuple(tokens)
    for (name, config), machine, count in itertools.product(configs.items(), map(find, machines),
                                                            devices):
        for best in plan(config, max(tokens), machine, devices=count).options[:1]:
            for many in tokens:
                words = f"{name}, {quantity(many, 'tokens')}, {count:,} {machine.name}"
                made.append(Candidate(name=words, config=best.config, machine=machine, tokens=many))
    return tuple(made)


def triangle(candidates: Iterable[Candidate], *,
             measured: Mapping[str, float] | None = None) -> tuple[Point, ...]:
    """A point for each, with `days`, `dollars` and `loss` (of the law DEFAULT), and
    `tokens_per_second` beside them.

    `measured` are losses by candidate's name: they replace the law's, and the point says so. All of
    them must then be of one corpus. A loss beyond the law's fit is labelled `extrapolated`.
    """
    measured, made = measured or {}, []
    for one in candidates:
        on, count = find(one.machine), parameter_count(one.config.model)
        step = step_time(one.config, on)
        paid = bill(step, on, one.tokens)
        if paid.cost is None:
            raise ConfigError(f"{on.title} has no price_per_hour, so {one.name} has no cost; "
                              f"describe the machine with one")
        said = LAWS[DEFAULT].extrapolate(count, one.tokens)
        loss, where, note = said.nats, "formula" if said.inside else "extrapolated", said.note
        if one.name in measured:
            loss, where, note = measured[one.name], "measured", "measured"
        values = {"days": paid.seconds / 86_400, "dollars": paid.cost, "loss": loss,
                  "tokens_per_second": step.tokens_per_second}
        dollars = between(paid.range_of(paid.cost), lambda value: "$" + quantity(value))
        likely = f"nine of ten: {between(paid.range_of(paid.seconds), duration)}, {dollars}"
        facts = {"range": likely, "machine": on.name, "devices": step.devices, "parameters": count,
                 "tokens": one.tokens, "layout": str(one.config.parallel), "note": note}
        made.append(Point(name=one.name, where=where, values=values, facts=facts))
    return tuple(made)
