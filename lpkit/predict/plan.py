"""Search for layouts that train a model on a machine, before a deadline and within a budget.

The result ranks the feasible layouts and gives the reason why the other layouts are not feasible.
With a budget or a number of devices, the layout that finishes soonest is first. With only a
deadline, the cheapest layout is first, since otherwise the largest number of devices would always
win.

The search counts every layout of every number of devices, but evaluates the formulas for few:
- `layouts.check` rejects layouts that cannot exist.
- A number of devices is skipped if its matmuls alone take longer than the deadline.
- Each size of micro-batch gets the least recomputation with which it fits. If none fits, larger
  micro-batches are not tried.

These choices are fixed, not searched:
- The number of devices is a power of two, unless it is given.
- The tensor ranks of a group are in one node.
- A context rank has at least `LEAST_CONTEXT` tokens.
- A layout with a pipeline has ZeRO stage 1 (stage 3 would gather all weights for every
  micro-batch); a layout without a pipeline has stage 1 or 3.
- A micro-batch has 1, 2, 4 or 8 sequences.
- A pipeline stage has one chunk, or the largest possible number of chunks up to `MOST_CHUNKS`.
- If the config names a recomputation, no other one is tried.

A layout is counted once for each split into tensor, pipeline and context ranks. The result has the
best layout of each split.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any

from lpkit.config import Config, MemoryConfig, SystemConfig
from lpkit.errors import ConfigError
from lpkit.predict import evidence
from lpkit.predict.casts import as_run
from lpkit.predict.device import to_search
from lpkit.predict.fit import UNPRICED
from lpkit.predict.flops import training_flops
from lpkit.predict.governed import governed
from lpkit.predict.ledger import USABLE_MEMORY_SHARE, Memory, memory, model_states
from lpkit.predict.params import parameter_count
from lpkit.predict.recipes import PRECISIONS, precision_of
from lpkit.predict.roofline import Efficiency
from lpkit.predict.scaling import LAWS
from lpkit.predict.stacks import stack_of
from lpkit.predict.time import Bill, StepTime, bill, step_time
from lpkit.predict.units import duration, quantity
from lpkit.tables import picked
from lpkit.techniques import machines
from lpkit.techniques.layouts import AXES, Layout, check, divisors, refuse_untrainable, stages_fit
from lpkit.techniques.machines import Machine
from lpkit.values import Positive, Text, between, checked

MOST_DEVICES = 65_536
# tokens of a context rank; Llama 3 splits 131,072 tokens over 16 context ranks
LEAST_CONTEXT = 8192
MOST_CHUNKS = 8             # chunks of a pipeline stage, as in Llama 3
MICRO_BATCH_SIZES = (1, 2, 4, 8)
CONSTRAINTS = ("layout", "batch", "memory", "deadline", "budget")
UNTRAINED = {       # precisions that no config can name, and the precision to plan with instead
    "bf16-master": "the ZeRO paper's setting; lpkit trains float32 weights: bf16",
    "bf16-pure": "whose weights lose updates; lpkit rounds them: bf16, memory.param_dtype=bf16",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One feasible layout, with its memory, its seconds and the bill of the run."""

    base: Config                # the config, with the micro-batch of this layout
    layout: Layout
    precision: str
    optimizer: str
    recompute: str
    memory: Memory
    time: StepTime
    bill: Bill

    @property
    def order(self) -> tuple:
        """The sort key: first the seconds of the run, then its cost, then the number of axes that
        the layout uses."""
        axes = sum(getattr(self.layout, axis) > 1 for axis in AXES)
        return (self.bill.seconds, self.bill.cost or 0.0, axes)

    @property
    def price_order(self) -> tuple:
        """The sort key that puts the cost first; device hours if no price is known."""
        return (self.bill.cost or self.bill.device_hours, *self.order)

    @property
    def why_untrained(self) -> str:
        """The reason why lpkit predicts this layout but cannot train it; "": lpkit can."""
        try:
            refuse_untrainable(replace(self.config, system=SystemConfig()))
        except ConfigError as error:
            return str(error)
        return ""

    @property
    def config(self) -> Config:
        """The config with this layout and settings. Raises ConfigError for a precision that no
        config can name."""
        if self.precision in UNTRAINED:
            raise ConfigError(f"lpkit does not train {self.precision}, {UNTRAINED[self.precision]}")
        return replace(self.base, parallel=self.layout).replace({
            "precision.recipe": self.precision, "optimizer": self.optimizer,
            "memory.recompute": self.recompute})

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; every row has its formula and source."""
        peak = self.memory.at(self.memory.peak_moment)
        return {
            **asdict(self.layout), **self.bill.to_dict(), **picked(
                self, "layout.devices why_untrained precision time.emulated optimizer recompute "
                "time.sequences time.micro_batches memory.peak_bytes memory.peak_moment "
                "time.step_seconds time.tokens_per_second time.mfu"),
            "memory_rows": [{**picked(row, "name bytes formula source"),
                             "at_peak": row.name in peak} for row in self.memory.rows],
            "time_rows": [row.to_dict() for row in self.time.rows]}


@dataclass
class Refusal:
    """The layouts that one constraint excludes."""

    layouts: int = 0                # their number
    excess: float = math.inf        # bytes, seconds or dollars too much in the nearest layout
    nearest: str = ""               # the layout that misses the constraint by least, in words

    def add(self, excess: float, words: str, layouts: int = 1) -> None:
        """Count `layouts` that miss the constraint by `excess`; keep `words` if it is the least."""
        self.layouts += layouts
        if excess < self.excess:
            self.excess, self.nearest = excess, words


@dataclass(eq=False)
class Plan:
    """A search and its result."""

    config: Config
    tokens: float               # tokens of the run
    machine: Machine
    optimizer: str
    calibration: float | None   # a factor from one measured step; None: 1
    budget: float               # US dollars; infinite: no limit
    deadline: float             # seconds; infinite: no limit
    first: str = "cheapest"     # the order of the options: cheapest or soonest first
    evaluations: int = 0        # calls of the formulas for memory and for time
    options: list[Option] = field(default_factory=list)     # feasible layouts, best first
    # excluded layouts by constraint
    refusals: dict[str, Refusal] = field(
        default_factory=lambda: {name: Refusal() for name in CONSTRAINTS})

    @cached_property
    def efficiency(self) -> Efficiency:
        return evidence.efficiency(self.machine, stack_of(self.config))

    @cached_property
    def recomputations(self) -> Sequence[str]:
        return to_search(self.config)

    @property
    def counted(self) -> int:
        """The number of all layouts, feasible or not."""
        return len(self.options) + sum(refusal.layouts for refusal in self.refusals.values())

    @property
    def order(self) -> str:
        """The order of the options in words, and the number of options that are too close to the
        first option for the formula to rank."""
        values = [self._key(option)[0] for option in self.options]
        near = sum(value <= (1 + evidence.TELLS) * values[0] for value in values)
        ties = (f"; {near} are within {evidence.TELLS:.0%} of the first, too close for the formula "
                f"to rank") if near > 1 else ""
        return f"the {self.first} comes first{ties}"

    @property
    def _key(self) -> Callable[[Option], tuple]:
        return attrgetter("order" if self.first == "soonest" else "price_order")

    @property
    def sentence(self) -> str:
        """The reason why no layout is feasible: for each constraint, the layout that misses it by
        least, and the budget or the number of tokens that would be enough."""
        misses = [f"{name} excludes {refusal.layouts:,} layouts, nearest: {refusal.nearest}"
                  for name, refusal in self.refusals.items() if refusal.layouts]
        out = ""
        if self.refusals["budget"].layouts:
            enough = self.budget + self.refusals["budget"].excess
            out = (f"; a budget of ${enough:,.0f} would be enough, or "
                   f"{quantity(self.tokens * self.budget / enough, 'tokens')}")
        return (f"none of {self.counted:,} layouts on {self.machine.title} is feasible. "
                f"{'; '.join(misses)}{out}")

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Return a JSON-ready dict with the first `top` options; None: all."""
        m, best, optimal = self.machine, self.options[0] if self.options else None, []
        if best and self.budget < math.inf:
            optimal = _optimal(best, self.budget)
        return {
            **picked(self, "first order counted evaluations tokens config.tokens_per_step"),
            "doubt": best.memory.doubt if best else "", "currency": "USD",
            "plans": [option.to_dict() for option in self.options[:top]],
            "feasible": len(self.options),
            "refused": {name: picked(refusal, "layouts nearest")
                        for name, refusal in self.refusals.items() if refusal.layouts},
            "parameters": parameter_count(self.config.model),
            "compute_optimal": optimal,
            "largest_parameters": best and largest_model(
                m, best.layout.devices, precision=best.precision, optimizer=best.optimizer),
            "machine": picked(m, "name title memory_bytes price_per_hour watts source price_source "
                              "network") | {"usable_bytes": USABLE_MEMORY_SHARE * m.memory_bytes},
            "factor": best.time.factor if best else 1.0,
            "efficiency": best and asdict(best.time.efficiency)}

    def rank(self, first: str) -> None:
        """Sort the options by `first`: "soonest" or "cheapest" first."""
        self.first = first
        self.options.sort(key=self._key)

    def search(self, precision: str, count: int) -> None:
        """Add the best option for each split of `count` devices into tensor, pipeline and context
        ranks."""
        self.precision, p = precision, PRECISIONS[precision]
        dtype = as_run(self.config, precision, self.machine)[0].dtype if p.low else p.dtype
        reached = self.efficiency
        rate = self.machine.peak_flops(dtype) * max(
            reached.products[dtype],
            *[measured[3] for measured in reached.shapes.get(dtype, ())], 0)
        m = governed(self.config).model
        flops = training_flops(m, batch=1, attention="causal") / m.T * self.tokens
        seconds = flops / (count * rate) * min(reached.factor, 1 if reached.fades else math.inf)
        seconds *= 1 if self.calibration is None else self.calibration
        splits = list(self.splits(count))
        if seconds > self.deadline:
            words = f"{count:,} devices take {duration(seconds)} for the matmuls alone"
            self.refusals["deadline"].add(seconds - self.deadline, words, len(splits))
            return
        for layout in splits:
            self.split(layout)

    def splits(self, count: int) -> Iterator[Layout]:
        """Yield the layouts of `count` devices that can exist. All devices that are not tensor,
        pipeline or context ranks of one replica are shard ranks. Record the other layouts as
        refusals."""
        for layout in self.shapes(count):
            try:
                check(self.config, layout)
            except ConfigError as error:
                self.refusals["layout"].add(count, str(error))
                continue
            ranks = count // layout.devices
            if self.config.global_batch % ranks:
                words = (f"{self.config.global_batch} sequences do not split over {ranks} ranks; "
                         f"set --batch-tokens")
                self.refusals["batch"].add(ranks, words)
                continue
            if (share := self.config.global_batch // ranks) < layout.pipeline:
                words = (f"{layout.pipeline} stages need as many micro-batches, and a rank has "
                         f"{share} sequences; set --batch-tokens")
                self.refusals["batch"].add(layout.pipeline / share, words)
                continue
            yield replace(layout, shard=ranks)

    def shapes(self, count: int) -> Iterator[Layout]:
        """Yield the splits of `count` devices into tensor, pipeline and context ranks."""
        m = self.config.model
        for tensor in divisors(count):
            if tensor > self.machine.devices_per_node:
                break
            for pipeline in divisors(count // tensor):
                if pipeline > m.L + 2:
                    break
                for context in divisors(count // tensor // pipeline):
                    if context > 1 and m.T // context < LEAST_CONTEXT:
                        break
                    yield Layout(tensor=tensor, pipeline=pipeline, context=context)

    def split(self, layout: Layout) -> None:
        """Add the best option of a split over all ZeRO stages, chunks, micro-batches and
        recomputations. If no option is feasible, record the constraint that excludes all
        options."""
        share = self.config.global_batch // layout.batch_ranks
        feasible: list[Option] = []
        missed = (math.inf, "")     # the least missing bytes of a layout that does not fit
        for zero in (1,) if layout.pipeline > 1 or layout.state_ranks == 1 else (1, 3):
            for interleave in self.chunks(layout, share):
                schedule = "interleaved" if interleave > 1 else layout.schedule
                variant = replace(layout, zero=zero, interleave=interleave, schedule=schedule)
                for micro in MICRO_BATCH_SIZES:
                    # the bubble formula needs a micro-batch for each stage, in whole rounds
                    rounds, left = divmod(share // micro, layout.pipeline)
                    if share % micro or not rounds or (interleave > 1 and left):
                        break
                    config = replace(self.config,
                                     grad_accum_steps=self.config.global_batch // micro)
                    options, excess = self.leanest(config, variant)
                    feasible += options
                    if not options:         # larger micro-batches need even more memory
                        missed = min(missed, (excess, str(variant)))
                        break
        devices = f"{layout.devices:,} devices"
        if not feasible:
            excess, variant = missed
            words = f"{devices} ({variant}) need {quantity(excess, 'bytes')} more each"
            self.refusals["memory"].add(excess, words)
            return
        best = min(feasible, key=attrgetter("order"))
        late, over = best.bill.seconds - self.deadline, (best.bill.cost or 0.0) - self.budget
        if late > 0:
            words = f"take {duration(best.bill.seconds)}, {duration(late)} too long"
            self.refusals["deadline"].add(late, f"{devices} ({best.layout}) {words}")
        elif over > 0:
            words = f"cost ${best.bill.cost:,.0f}, ${over:,.0f} too much"
            self.refusals["budget"].add(over, f"{devices} ({best.layout}) {words}")
        else:
            self.options.append(best)

    def chunks(self, layout: Layout, share: int) -> Sequence[int]:
        """Return the numbers of chunks of a pipeline stage to try: 1, and the largest number that
        divides the layers. `share`: sequences of a rank in an update."""
        if layout.pipeline == 1 or share % layout.pipeline:
            return (1,)
        most = max(v for v in range(1, MOST_CHUNKS + 1)
                   if stages_fit(self.config.model.L, layout.pipeline, v))
        return (1, most) if most > 1 else (1,)

    def leanest(self, config: Config, layout: Layout) -> tuple[list[Option], float]:
        """Return the options with the least recomputation with which the layout fits, and 0.0: one
        option with all shard ranks, and with ZeRO 3 another one with the smallest shard group that
        fits. If no recomputation fits, return an empty list and the missing bytes of the last
        one."""
        for recompute in self.recomputations:
            held = self.held(config, layout, recompute)
            if held.missing_bytes <= 0:
                options = [self.option(config, layout, recompute, held)]
                if layout.zero == 3:
                    options += self.hybrid(config, layout, recompute)
                return options, 0.0
        return [], held.missing_bytes

    def hybrid(self, config: Config, layout: Layout, recompute: str) -> list[Option]:
        """Return an option with the smallest shard group that fits, and several replicas of it
        (hybrid sharding). A small group is in one node, so its all-gathers are fast. The sizes are
        searched by bisection."""
        sizes, smallest = divisors(layout.shard)[:-1], None
        while sizes:
            middle = len(sizes) // 2
            variant = replace(layout, shard=sizes[middle], data=layout.shard // sizes[middle])
            held = self.held(config, variant, recompute)
            if held.missing_bytes <= 0:
                sizes, smallest = sizes[:middle], (variant, recompute, held)
            else:
                sizes = sizes[middle + 1:]
        return [self.option(config, *smallest)] if smallest else []

    def held(self, config: Config, layout: Layout, recompute: str) -> Memory:
        self.evaluations += 1
        return memory(config, self.machine, layout=layout, precision=self.precision,
                      optimizer=self.optimizer, recompute=recompute)

    def option(self, config: Config, layout: Layout, recompute: str, held: Memory) -> Option:
        self.evaluations += 1
        how = {"precision": self.precision, "optimizer": self.optimizer, "recompute": recompute}
        step = step_time(config, self.machine, layout, calibration=self.calibration,
                         **how)
        return Option(base=config, layout=layout, memory=held, time=step,
                      bill=bill(step, self.machine, self.tokens), **how)


@checked
def plan(config: Config, tokens: Positive, machine: "str | Machine" = "h200", *,
         budget: Positive | None = None, deadline_seconds: Positive | None = None,
         devices: Annotated[int, between(1, 10**6)] | None = None,
         precisions: Sequence[str] | None = None,
         optimizer: Text | None = None, price_per_hour: Positive | None = None,
         calibration: float | None = None) -> Plan:
    """Search for layouts of a run over `tokens` tokens. All layouts have the config's global batch,
    `model` and `memory`; its `grad_accum_steps` is not used.

    budget      US dollars for the whole run; None: no limit
    deadline_seconds
                seconds for the whole run; None: no limit
    devices     number of devices; None: powers of two up to 65,536
    precisions  rows of `recipes.PRECISIONS` to try; None: the config's recipe, where "auto" means
                bf16 if the machine has bf16, else fp32
    optimizer   a row of OPTIMIZERS; None: the config's
    price_per_hour
                US dollars per device; None: the machine's price
    calibration a factor from one measured step (`time.calibrate`), for every layout

    Raises ConfigError for numbers that are not positive, for a budget without a price, and for
    memory techniques whose seconds no formula predicts.
    """
    on = machines.find(machine)
    if price_per_hour is not None:
        on = replace(on, price_per_hour=price_per_hour, price_source="given")
    if budget is not None and on.price_per_hour is None:
        raise ConfigError(f"{on.title} has no price, so no budget can be checked; give "
                          f"price_per_hour")
    for name in UNPRICED:
        value = getattr(config.memory, name)
        if value != getattr(MemoryConfig(), name):
            raise ConfigError(f"plan has no seconds for memory.{name}={value.name}, which moves "
                              f"bytes to the host or a disk, or stores them as codes; leave it "
                              f"out, or predict only its bytes with `lpkit predict`")
    # raises ConfigError for unknown names, before the search would take each for a refused layout
    memory(config, on, layout=Layout(), optimizer=optimizer)
    ranked = Plan(config, tokens, on, optimizer or config.optimizer.name,
                 calibration, budget=budget or math.inf,
                 deadline=deadline_seconds or math.inf)
    to_try = [precision_of(config, on, name) for name in precisions or (None,)]
    for precision in to_try:
        for count in [devices] if devices else powers_of_two(1, MOST_DEVICES):
            ranked.search(precision, count)
    ranked.rank("soonest" if budget or devices else "cheapest")
    return ranked


def powers_of_two(first: int, last: int) -> list[int]:
    """Return the powers of two from `first`, which is a power of two, up to `last`.

    >>> powers_of_two(4, 40)
    [4, 8, 16, 32]
    """
    return [first << i for i in range((last // first).bit_length())]


def largest_model(machine: "str | Machine", devices: int = 1, *, precision: str = "bf16",
                  optimizer: str = "adamw") -> float:
    """Return the parameter count whose model states fill the usable memory of `devices` devices, if
    each device has a shard of all states. This is an upper bound, because activations need memory
    too."""
    rows = model_states(1, precision=precision, optimizer=optimizer)
    per_parameter = sum(row.bytes for row in rows)
    return USABLE_MEMORY_SHARE * machines.find(machine).memory_bytes * devices / per_parameter


def _optimal(option: Option, budget: float) -> list[dict[str, Any]]:
    """Return the compute-optimal model size and number of tokens by each scaling law, for the FLOPs
    that the budget pays for at the speed and price of this option."""
    flops_per_second = option.time.flops_per_device * option.layout.devices
    dollars_per_flop = option.bill.cost / (option.bill.seconds * flops_per_second)
    flops = budget / dollars_per_flop
    return [{"law": law.name, "flops": flops, "source": law.source,
             **picked(law.optimum(flops), "parameters tokens note inside", loss="nats")}
            for law in LAWS.values()]
