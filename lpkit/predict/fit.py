"""Decide whether a step fits into a device's free memory, and which settings would make it fit.

    answer = fit(config, on)        # on.memory_bytes: the bytes that are free on the device
    answer.refused                  # True: the step does not fit, by more than the formula's error
    answer.ways                     # settings with which the step fits, cheapest first

`train`, `measure` and the report of a run that is out of memory all use this answer. Settings fit
if `Memory.missing_bytes` is 0 or less, as in `plan`. A run that is not refused starts, even if the
formula says that it may not fit.
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

# fields of config.memory for which no formula predicts seconds
UNPRICED = ("activation_offload", "optimizer_state")
# The share by which a predicted peak may be too high before a run is refused: ERROR, or
# ERROR_DOUBTED if the prediction has a doubt.
ERROR, ERROR_DOUBTED = 0.02, 0.10
# The largest share by which a predicted peak was above the measured peak
# (data/measured/ledger-*.json).
MEASURED = {ERROR: 0.015, ERROR_DOUBTED: 0.068}
CONTEXTS_BYTES = 2**30      # at most the bytes of this process's own CUDA context
SHOWN = 3       # number of rows and of ways that a sentence names


@dataclass(frozen=True, kw_only=True, order=True)
class Way:
    """Settings with which a step fits. Ways sort by their slowdown."""

    # seconds of the step with the settings, divided by the seconds without them; infinite: unknown
    slowdown: float
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
    """The answer whether a step fits."""

    config: Config
    on: Machine
    rows: Mapping[str, float]       # bytes by row at the peak
    moment: str                     # the moment of the peak, in words
    error: float = ERROR            # share by which `rows` may be too high
    without: str = ""               # the bytes that `rows` leave out, and why

    @property
    def peak_bytes(self) -> float:
        return sum(self.rows.values())

    @property
    def refused(self) -> bool:
        return (1 - self.error) * self.peak_bytes > self.on.memory_bytes

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """The single settings that are enough, cheapest first. If no single setting is enough, one
        set of several settings, each of which is needed. Empty if all settings together are not
        enough."""
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
        """Return the reason why the run is refused. `whole_bytes`: the memory of the device if it
        is idle. `others_bytes`: the bytes that other processes hold there."""
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
    """Return whether one update of `config` fits on the machine `on`. `compiled`: the run uses
    torch.compile, which fuses operations that the ledger counts one by one.

    Bytes without a formula count as 0, and `Fit.without` names them. So a run that might fit is
    never refused.
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
    """Return the bytes of weights and optimizer state, which outlive a step, and of gradients, if
    all gradients are alive at the same time."""
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
        """Return, for each key, the cheapest value with which the step fits; cheapest key first."""
        ways = []
        for key, values in self.others.items():
            ways += self.cheapest({key: value} for value in values)
        return sorted(ways)

    def several(self, keys: Sequence[str]) -> list[Way]:
        """Return a list of one Way that changes several of `keys`; empty if none fits.

        First each key gets the value with the lowest peak. Then keys that are not needed are
        removed, the slowest first. Then each remaining key gets the cheapest value that fits."""
        chosen: dict[str, Any] = {}
        for key in [*keys, *keys]:      # twice, because a value may help only after others changed
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
        """Return a list with the cheapest of the `tried` settings that fit; empty if none fits."""
        ways = []
        for settings in tried:
            held = self.held(settings)
            if held is not None and held.missing_bytes <= 0:
                ways.append(Way(settings=settings, peak_bytes=held.peak_bytes,
                                slowdown=self.slowdown(settings)))
        return sorted(ways)[:1]

    def held(self, settings: Mapping[str, Any]) -> Memory | None:
        """Return the memory of a step with these settings; None if they contradict each other."""
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
