"""Which layouts train a model on a machine, before a deadline and within a budget: the feasible ones ranked, and why the
rest are not. With a budget, or a number of devices, the soonest comes first; with a deadline alone, the cheapest: otherwise
every device there is would be best.

Every layout of every number of devices is counted; few are evaluated, because
    what cannot exist is left out by the axis that forbids it (`layout.check`);
    a number of devices whose products alone outlast the deadline is left out whole;
    more memory never helps time: the micro-batch grows, and recomputation begins, only as memory demands.
Chosen once, and not searched: powers of two where the number of devices is; tensor ranks in one node; at least
`LEAST_CONTEXT` tokens a context rank; ZeRO-1 with a pipeline (stage 3 would gather all weights for every micro-batch) and
1 or 3 without; micro-batches of 1, 2, 4 or 8 sequences; one chunk a stage or the most up to `MOST_CHUNKS`. Layouts are
counted by their split into tensor, pipeline and context; of the rest, each split shows its best.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lpkit.config import Config, ConfigError, nearest
from lpkit.predict.activations import RECOMPUTE
from lpkit.predict.flops import training_flops
from lpkit.predict.ledger import PRECISIONS, Memory, memory, model_states
from lpkit.predict.params import parameter_count
from lpkit.predict.precision import ASSUMED, REACHED, Efficiency
from lpkit.predict.scaling import LAWS
from lpkit.predict.time import Bill, Calibration, StepTime, bill, step_time
from lpkit.predict.units import duration, quantity
from lpkit.techniques import machines
from lpkit.techniques.layouts import AXES, Layout, check, divisors, powers_of_two, stages_fit
from lpkit.techniques.machines import Machine

USABLE = 0.92               # of the device's memory: the rest is the driver's, NCCL's and the allocator's. Assumed
MOST_DEVICES = 65_536
LEAST_CONTEXT = 8192        # tokens of a context rank: as Llama 3 at 131,072 tokens over 16
MOST_CHUNKS = 8             # of a stage: as Llama 3
MICRO = (1, 2, 4, 8)
RECOMPUTES = tuple(mode for mode in ("none", "selective", "block") if mode in RECOMPUTE)     # in order of their cost


@dataclass(frozen=True, kw_only=True)
class Option:
    """One feasible layout."""

    layout: Layout
    precision: str
    recompute: str
    held: Memory
    step: StepTime
    paid: Bill

    @property
    def order(self) -> tuple:
        """Soonest, then cheapest, then the fewest axes."""
        return (self.paid.seconds, self.paid.cost or 0.0, sum(getattr(self.layout, axis) > 1 for axis in AXES))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; every row with its formula and source."""
        return {
            "devices": self.layout.devices, **asdict(self.layout), "precision": self.precision, "recompute": self.recompute,
            "sequences": self.step.sequences, "micro_batches": self.step.micro_batches,
            "peak_bytes": self.held.peak_bytes, "peak_moment": self.held.peak_moment,
            "step_seconds": self.step.step_seconds, "tokens_per_second": self.step.tokens_per_second, "mfu": self.step.mfu,
            **self.paid.to_dict(),
            "memory_rows": [{"name": row.name, "bytes": row.bytes, "at_peak": row.name in self.held.at(
                self.held.peak_moment), "formula": row.formula, "source": row.source} for row in self.held.rows],
            "time_rows": [asdict(row) for row in self.step.rows]}


@dataclass
class Refusal:
    """Layouts that one constraint leaves out, and the one that came nearest."""

    layouts: int = 0
    excess: float = math.inf        # of the nearest: bytes, seconds or dollars too much
    nearest: str = ""

    def add(self, excess: float, words: str, layouts: int = 1) -> None:
        self.layouts += layouts
        if excess < self.excess:
            self.excess, self.nearest = excess, words


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`options` are ranked. `refusals` by constraint: layout, batch, memory, deadline, budget."""

    options: tuple[Option, ...]
    first: str                      # soonest or cheapest
    refusals: dict[str, Refusal]
    machine: Machine
    parameters: int
    tokens: float
    budget: float                   # infinite without one
    tokens_per_step: int
    evaluations: int                # of the formulas of memory or time
    optimal: tuple[dict[str, Any], ...] = field(default=())

    @property
    def counted(self) -> int:
        return len(self.options) + sum(one.layouts for one in self.refusals.values())

    @property
    def sentence(self) -> str:
        """Why nothing is feasible: the nearest miss of each constraint, and what would do."""
        misses = "; ".join(f"{name}: {one.layouts:,} layouts, {one.nearest}" for name, one in self.refusals.items()
                           if one.layouts)
        over = self.refusals["budget"]
        out = (f"; a budget of ${self.budget + over.excess:,.0f} would do, or "
               f"{quantity(self.tokens * self.budget / (self.budget + over.excess), 'tokens')}" if over.layouts else "")
        return f"no layout of {self.counted:,} on {self.machine.title} is feasible. {misses}{out}"

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        m = self.machine
        return {
            "first": self.first, "plans": [option.to_dict() for option in self.options[:top]], "feasible": len(self.options),
            "refused": {name: {"layouts": one.layouts, "nearest": one.nearest} for name, one in self.refusals.items()
                        if one.layouts},
            "counted": self.counted, "evaluations": self.evaluations, "parameters": self.parameters, "tokens": self.tokens,
            "tokens_per_step": self.tokens_per_step, "compute_optimal": list(self.optimal), "currency": "USD",
            "largest_parameters": max((largest_model(m, one.layout.devices, precision=one.precision) for one in
                                       self.options[:1]), default=None),
            "machine": {"name": m.name, "title": m.title, "memory_bytes": m.memory_bytes, "usable_bytes":
                        USABLE * m.memory_bytes, "price_per_hour": m.price_per_hour, "watts": m.watts, "source": m.source,
                        "price_source": m.price_source, "network": m.network},
            "factor": self.options[0].step.factor if self.options else 1.0,
            "efficiency": asdict(self.options[0].step.efficiency) if self.options else None}


def plan(config: Config, tokens: float, machine: "str | Machine" = "h200", *, budget: float | None = None,
         deadline_seconds: float | None = None, devices: int | None = None, precisions: Sequence[str] | None = None,
         optimizer: str = "adamw", price_per_hour: float | None = None, efficiency: Efficiency | None = None,
         calibration: Calibration | None = None) -> Plan:
    """Search. `config.batch` and `config.model.context` are kept; `config.accumulate` is not.

    budget      US dollars for the whole run; deadline_seconds: for the whole run; None: no limit
    devices     None: powers of two up to 65,536
    precisions  rows of `ledger.PRECISIONS`; None: bf16-master, or fp32 where the machine has no bf16
    efficiency  what is reached of the ceilings; None: as `time.step_time`
    calibration of one measured step (`time.calibrate`): the same factor for every layout
    Raises ConfigError for figures that are not positive.
    """
    on = machines.find(machine)
    for what, value in (("tokens", tokens), ("budget", budget), ("deadline_seconds", deadline_seconds),
                        ("price_per_hour", price_per_hour)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{what} must be positive, got {value}")
    if price_per_hour is not None:
        on = replace(on, price_per_hour=price_per_hour, price_source="given")
    if budget is not None and on.price_per_hour is None:
        raise ConfigError(f"{on.title} has no price, so a budget says nothing; give price_per_hour")
    if devices is not None and (not isinstance(devices, int) or not 1 <= devices <= 10**6):
        raise ConfigError(f"devices must be a whole number from 1 to 1,000,000, got {devices}")
    precisions = precisions or ("bf16-master" if "bf16" in on.flops else "fp32",)
    for name in precisions:
        if name not in PRECISIONS:
            raise ConfigError(f"there is no precision {name!r}; {nearest(name, PRECISIONS)}")
    search = _Search(config, tokens, on, budget or math.inf, deadline_seconds or math.inf, optimizer, efficiency, calibration)
    for precision in precisions:
        for count in [devices] if devices else powers_of_two(1, MOST_DEVICES):
            search.devices(count, precision)
    first = "soonest" if budget or devices else "cheapest"
    orders = {"soonest": lambda option: option.order, "cheapest": lambda option: (option.paid.cost or option.paid.device_hours,
                                                                                  *option.order)}
    options = tuple(sorted(search.options, key=orders[first]))
    optimal = _optimal(options[0], budget) if options and budget else ()
    return Plan(options=options, first=first, refusals=search.refusals, machine=on, parameters=parameter_count(config.model),
                tokens=tokens, budget=budget or math.inf, tokens_per_step=config.tokens_per_step,
                evaluations=search.evaluations, optimal=optimal)


class _Search:
    """What a search has met so far."""

    def __init__(self, config: Config, tokens: float, on: Machine, budget: float, deadline_seconds: float, optimizer: str,
                 efficiency: Efficiency | None, calibration: Calibration | None):
        self.config, self.tokens, self.on, self.optimizer, self.calibration = config, tokens, on, optimizer, calibration
        self.budget, self.deadline = budget, deadline_seconds
        self.options: list[Option] = []
        self.refusals = {name: Refusal() for name in ("layout", "batch", "memory", "deadline", "budget")}
        self.evaluations = 0
        self.flops = training_flops(config.model, batch=1, attention="causal") / config.model.T * tokens
        self.efficiency = efficiency or (REACHED if on.name == "this" else ASSUMED)

    def devices(self, count: int, precision: str) -> None:
        """All layouts of so many devices: one option, the best, for each split into tensor, pipeline and context."""
        p = PRECISIONS[precision]
        rate = self.on.peak_flops(p.dtype) * self.efficiency.products[p.dtype]
        seconds = self.flops / (count * rate) * (self.calibration.factor if self.calibration else 1)
        splits = list(self._splits(count))
        if seconds > self.deadline:
            self.refusals["deadline"].add(
                seconds - self.deadline, f"{count:,} devices take {duration(seconds)} for the products alone", len(splits))
            return
        for layout in splits:
            self._split(layout, precision)

    def _splits(self, count: int) -> Iterable[Layout]:
        m = self.config.model
        for tensor in divisors(count):
            if tensor > self.on.devices_per_node:
                break
            for pipeline in divisors(count // tensor):
                if pipeline > m.L + 2:
                    break
                for context in divisors(count // tensor // pipeline):
                    if context > 1 and m.T // context < LEAST_CONTEXT:
                        break
                    layout = Layout(tensor=tensor, pipeline=pipeline, context=context)
                    try:
                        check(self.config, layout)
                    except ConfigError as error:
                        self.refusals["layout"].add(count, str(error))
                        continue
                    ranks = count // layout.devices
                    if self.config.batch % ranks:
                        self.refusals["batch"].add(
                            ranks, f"{self.config.batch} sequences do not split over {ranks} ranks; set --batch-tokens")
                        continue
                    yield replace(layout, shard=ranks)

    def _split(self, layout: Layout, precision: str) -> None:
        """The best of its micro-batches, recomputations, ZeRO stages and chunks; or why there is none."""
        found = [option for option in self._variants(layout, precision) if option is not None]
        if not found:
            return
        best = min(found, key=lambda option: option.order)
        words = f"{layout.devices:,} devices ({best.layout})"
        if best.paid.seconds > self.deadline:
            late = best.paid.seconds - self.deadline
            self.refusals["deadline"].add(late, f"{words} take {duration(best.paid.seconds)}, {duration(late)} too long")
        elif (best.paid.cost or 0.0) > self.budget:
            over = best.paid.cost - self.budget
            self.refusals["budget"].add(over, f"{words} cost ${best.paid.cost:,.0f}, ${over:,.0f} too much")
        else:
            self.options.append(best)

    def _variants(self, layout: Layout, precision: str) -> Iterable[Option | None]:
        share = self.config.batch // layout.batch_ranks
        stages = (1,) if layout.pipeline > 1 or layout.state_ranks == 1 else (1, 3)
        nearest: tuple[float, str] = (math.inf, "")
        fitted = False
        for zero in stages:
            for interleave in self._chunks(layout, share):
                variant = replace(layout, zero=zero, interleave=interleave)
                for micro in MICRO:
                    if share % micro or (interleave > 1 and share // micro % layout.pipeline):
                        break
                    config = replace(self.config, accumulate=self.config.batch // micro)
                    excess = yield from self._leanest(config, variant, precision)
                    if excess is not None:      # larger micro-batches hold more still
                        nearest = min(nearest, (excess, str(variant)))
                        break
                    fitted = True
        if not fitted:
            self.refusals["memory"].add(nearest[0], f"{layout.devices:,} devices ({nearest[1]}) miss by "
                                                    f"{quantity(nearest[0], 'bytes')} each")

    def _leanest(self, config: Config, layout: Layout, precision: str):
        """The least recomputation that fits, its shard group whole and as small as it may be; else the bytes missed by."""
        for recompute in RECOMPUTES:
            held = self._held(config, layout, precision, recompute)
            excess = held.peak_bytes - USABLE * self.on.memory_bytes
            if excess <= 0:
                yield self._option(config, layout, precision, recompute, held)
                if layout.zero == 3:
                    yield self._hybrid(config, layout, precision, recompute)
                return None
        return excess

    def _hybrid(self, config: Config, layout: Layout, precision: str, recompute: str) -> Option | None:
        """The smallest shard group that fits, replicated: its gathers stay near."""
        sizes, held = divisors(layout.shard), None
        low, high = 0, len(sizes) - 1
        while low < high:
            middle = (low + high) // 2
            variant = replace(layout, shard=sizes[middle], data=layout.shard // sizes[middle])
            trial = self._held(config, variant, precision, recompute)
            if trial.peak_bytes <= USABLE * self.on.memory_bytes:
                high, held = middle, (variant, trial)
            else:
                low = middle + 1
        return self._option(config, held[0], precision, recompute, held[1]) if held else None

    def _chunks(self, layout: Layout, share: int) -> Sequence[int]:
        """1, and the most that divide the layers."""
        if layout.pipeline == 1 or share % layout.pipeline:
            return (1,)
        m = self.config.model
        most = max(v for v in range(1, MOST_CHUNKS + 1) if stages_fit(m.L, layout.pipeline, v))
        return (1, most) if most > 1 else (1,)

    def _held(self, config: Config, layout: Layout, precision: str, recompute: str) -> Memory:
        self.evaluations += 1
        return memory(config, self.on, layout=layout, precision=precision, optimizer=self.optimizer, recompute=recompute)

    def _option(self, config: Config, layout: Layout, precision: str, recompute: str, held: Memory) -> Option:
        self.evaluations += 1
        step = step_time(config, self.on, layout, precision=precision, recompute=recompute,
                         efficiency=self.efficiency, calibration=self.calibration)
        return Option(layout=layout, precision=precision, recompute=recompute, held=held, step=step,
                      paid=bill(step, self.on, self.tokens))


def largest_model(machine: "str | Machine", devices: int = 1, *, precision: str = "bf16-master",
                  optimizer: str = "adamw") -> float:
    """Parameters whose states fill the usable memory of `devices` when each holds its share: an upper bound, since
    activations want room too."""
    per_parameter = sum(row.bytes for row in model_states(1, precision=precision, optimizer=optimizer))
    return USABLE * machines.find(machine).memory_bytes * devices / per_parameter


def _optimal(option: Option, budget: float) -> tuple[dict[str, Any], ...]:
    """Compute-optimal sizes for what the budget buys at this option's FLOP/s, by each published law."""
    dollars_per_flop = option.paid.cost / (option.paid.seconds * option.step.flops_per_device * option.layout.devices)
    found = []
    for law in LAWS.values():
        best = law.optimum(budget / dollars_per_flop)
        found.append({"law": law.name, "flops": best.flops, "parameters": best.parameters, "tokens": best.tokens,
                      "loss": best.loss.nats, "inside": best.loss.inside, "note": best.loss.note, "source": law.source})
    return tuple(found)
