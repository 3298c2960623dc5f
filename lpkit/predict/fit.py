"""Decide whether a step fits into a device's free memory, and which settings would make it fit.

    asked = fit(config, on)         # on.memory_bytes: what a run may still take there
    asked.refused                   # it does not fit, by more than the formula's error
    asked.ways                      # settings with which it fits, the cheapest first

`train`, `measure` and the report of a run that is out of memory all use this answer. A way fits by
`Memory.missing_bytes`, as in `plan`. A run that is not refused is tried, even if it may not fit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.predict.governed import governed
from lpkit.predict.ledger import MOMENTS, UPDATE, Memory, memory
from lpkit.predict.params import optimizer_work, parameter_count, trained_count
from lpkit.predict.recipes import precision_of, row_of
from lpkit.predict.time import step_time
from lpkit.predict.units import quantity
from lpkit.tables import picked
from lpkit.techniques import layouts
from lpkit.techniques import memory as techniques
from lpkit.techniques.layouts import divisors
from lpkit.techniques.machines import Machine

# fields of config.memory without a formula for seconds
UNPRICED = ("activation_offload", "optimizer_state")
# ERROR is the error of the ledger that a refusal allows for, without and with a doubt. MEASURED is
# the most by which its peak was above a measured step's (data/measured/ledger-*.json).
ERROR, ERROR_DOUBTED = 0.02, 0.10
MEASURED = {ERROR: 0.015, ERROR_DOUBTED: 0.068}
CONTEXTS_BYTES = 2**30      # the CUDA context of this process
SHOWN = 3       # number of rows, and of ways, in a sentence


@dataclass(frozen=True, kw_only=True, order=True)
class Way:
    """Settings with which a step fits. Ways sort by their cost."""

    slowdown: float     # seconds of the step over those without the settings; infinite: no formula
    peak_bytes: float
    settings: Mapping[str, Any] = field(compare=False)

    def __str__(self) -> str:
        words = " ".join(f"--set {key}={value}" for key, value in self.settings.items())
        return f"{words} ({quantity(self.peak_bytes, 'bytes')})"

    def to_dict(self) -> dict[str, Any]:
        return {**picked(self, "settings peak_bytes"),
                "slowdown": self.slowdown if math.isfinite(self.slowdown) else None}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Bytes by row at the peak. If only some bytes have a formula, `without` says what is left out
    and why."""

    config: Config
    on: Machine
    rows: Mapping[str, float]
    moment: str
    error: float = ERROR
    without: str = ""

    @property
    def peak_bytes(self) -> float:
        return sum(self.rows.values())

    @property
    def refused(self) -> bool:
        return (1 - self.error) * self.peak_bytes > self.on.memory_bytes

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Single settings, cheapest first. If none is enough, one set of settings without any that
        it does not need; empty if all settings together are not enough."""
        search = _Search(self.config, self.on)
        every = [*search.others]
        priced = [key for key in every if key.removeprefix("memory.") not in UNPRICED]
        return tuple(search.single() or search.several(priced) or search.several(every))

    @property
    def left_out(self) -> str:
        return f", not counting {self.without}" if self.without else ""

    @property
    def way_out(self) -> str:
        if self.ways:
            return f"it would fit with {' or '.join(map(str, self.ways[:SHOWN]))}"
        return ("no technique of memory makes it fit; choose a smaller preset, or see what it "
                "takes with `lpkit predict`")

    def sentence(self, whole_bytes: float, others_bytes: float = 0) -> str:
        """Return why the run is refused, on a device with `whole_bytes` when idle, of which other
        processes hold `others_bytes`."""
        has = quantity(self.on.memory_bytes, "bytes")
        if self.on.memory_bytes < whole_bytes:
            has += f" left of {quantity(whole_bytes, 'bytes')}"
        if others_bytes > CONTEXTS_BYTES:
            has += (f", of which {quantity(others_bytes, 'bytes')} are used by other processes "
                    f"(nvidia-smi names them)")
        least = " at least" if self.without else ""
        return (f"this run takes{least} {quantity(self.peak_bytes, 'bytes')} at its peak "
                f"({self.moment}), by a formula that was {MEASURED[self.error]:.1%} too high at "
                f"worst in measured steps{self.left_out}, and {self.on.title} has {has}; the "
                f"largest of it: {largest(self.rows)}; {self.way_out}")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return picked(self, "peak_bytes rows moment without")


def largest(rows: Mapping[str, float]) -> str:
    """Return the largest rows in words: 'activations 20.1 GB, weights 4.98 GB'."""
    first = sorted(rows, key=rows.get, reverse=True)[:SHOWN]
    return ", ".join(f"{name} {quantity(rows[name], 'bytes')}" for name in first)


def fit(config: Config, on: Machine, *, compiled: bool = False) -> Fit:
    """Return whether one update of `config` fits on `on`. `compiled`: torch.compile fuses
    operations that the ledger counts one by one.

    Bytes without a formula count as 0, and the answer names them. So no run is refused that might
    fit.
    """
    config = config.replace({"system.stack": "auto"})       # the run is lpkit's
    if config.transforms or governed(config).governors:
        rows = {"weights": _states(config, on)["weights"]}
        return Fit(config=config, on=on, rows=rows, moment="the model alone",
                   without="what its transforms and governors make of it")
    if compiled:
        return Fit(config=config, on=on, rows=_states(config, on), moment=MOMENTS[UPDATE],
                   without="activations, which torch.compile fuses as it likes")
    try:
        held = memory(config, on)
    except ConfigError as unknown:
        return Fit(config=config, on=on, rows=_states(config, on), moment=MOMENTS[UPDATE],
                   without=f"activations, for which there is no formula ({unknown})")
    return Fit(config=config, on=on, rows=held.at(held.peak_moment),
               moment=MOMENTS[held.peak_moment], error=ERROR_DOUBTED if held.doubt else ERROR)


def _states(config: Config, on: Machine) -> dict[str, float]:
    """Return the bytes that outlive a step, and the bytes of gradients if all exist at once."""
    rows, count = techniques.rows_of(config), parameter_count(config.model)
    each = rows["param_dtype"].param_bytes
    states = {"weights": each * count, "gradients": each * trained_count(config.model)}
    if not rows["optimizer_step"].gradients_held:
        del states["gradients"]
    if on.kind not in rows["optimizer_state"].leaves:
        work = optimizer_work(config)
        states["optimizer state"] = trained_count(config.model) * (
            work.cut_bytes + work.whole_bytes)
    return states


class _Search:
    """A search over the rows of each memory technique, and over smaller micro-batches."""

    def __init__(self, config: Config, on: Machine):
        self.config, self.on = config, on
        self.others: dict[str, list[Any]] = {}      # other values of each key
        for key, row in techniques.rows_of(config).items():
            self.others[f"memory.{key}"] = [
                name for name, other in techniques.TABLES[key].items() if other is not row
                and not other.needs_compile
                and not (other.eager and config.system.compile not in (False, "auto"))]
        self.others["grad_accum_steps"] = [parts for parts in divisors(config.global_batch)
                                           if parts > config.grad_accum_steps]

    def single(self) -> list[Way]:
        """Return the cheapest value that fits for each setting, cheapest setting first."""
        ways = []
        for key, values in self.others.items():
            ways += self.cheapest({key: value} for value in values)
        return sorted(ways)

    def several(self, keys: Sequence[str]) -> list[Way]:
        """Return one way that changes several of `keys`, or none. Each key first gets the value
        with the lowest peak. Then keys that are not needed are left out, the most expensive first.
        Then each remaining key gets the cheapest value that fits."""
        chosen: dict[str, Any] = {}
        for key in [*keys, *keys]:      # twice: a value may help only together with others
            tried = [chosen, *(chosen | {key: value} for value in self.others[key])]
            chosen = min(tried, key=self.peak_bytes)
        dearest = sorted(chosen, key=lambda key: self.slowdown({key: chosen[key]}), reverse=True)
        for key in dearest:
            fewer = {name: value for name, value in chosen.items() if name != key}
            if self.cheapest([fewer]):
                chosen = fewer
        for key in chosen:
            for way in self.cheapest(chosen | {key: value} for value in self.others[key]):
                chosen = way.settings
        return self.cheapest([chosen])

    def cheapest(self, tried: Iterable[dict[str, Any]]) -> list[Way]:
        """Return the cheapest of these settings that fits, as a list; empty if none fits."""
        ways = []
        for settings in tried:
            held = self.held(settings)
            if held is not None and held.missing_bytes <= 0:
                ways.append(Way(settings=settings, peak_bytes=held.peak_bytes,
                                slowdown=self.slowdown(settings)))
        return sorted(ways)[:1]

    def held(self, settings: Mapping[str, Any]) -> Memory | None:
        """Return the memory with these settings; None if they do not go together."""
        try:
            changed = self.config.replace(settings)
            recipe = row_of(changed, precision_of(changed, self.on))
            techniques.check(changed, recipe)
            layouts.refuse_untrainable(changed)
            return memory(changed, self.on)
        except ConfigError:
            return None

    def peak_bytes(self, settings: Mapping[str, Any]) -> float:
        held = self.held(settings)
        return math.inf if held is None else held.peak_bytes

    def slowdown(self, settings: Mapping[str, Any]) -> float:
        if any(f"memory.{key}" in settings for key in UNPRICED):
            return math.inf
        changed = step_time(self.config.replace(settings), self.on).step_seconds
        return changed / step_time(self.config, self.on).step_seconds
