"""Decide whether low precision is faster for one config on one machine, and give the reasons.

    advise(config, "h200")      # an Advice by formula, in a millisecond

The formulas of `lpkit predict` give the step and the peak of the config, in the base precision and
under each recipe. If there is a recorded `fp8-step` bench of the same model, its measured speed-up
replaces the predicted speed-up of its recipe, and the speed-ups of other recipes are corrected by
the same factor. The verdict then names the record.

A recipe with fewer bits is chosen only if its step is MIN_WORTHWHILE_SPEEDUP times as fast. A step
in 8 bits reduces the loss slightly less, and the goal is the least time to an equal loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from lpkit.config import Config
from lpkit.errors import ConfigError, pick
from lpkit.predict import evidence
from lpkit.predict.casts import CastRecipe, LinearCost, as_run, linear_cost
from lpkit.predict.evidence import MEASURED
from lpkit.predict.flops import Product
from lpkit.predict.ledger import Memory, memory
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.roofline import Efficiency, nearest
from lpkit.predict.stacks import stack_of
from lpkit.predict.time import StepTime, rank_products, step_time
from lpkit.predict.units import cells, words
from lpkit.tables import html_table, picked, text_table
from lpkit.techniques import machines
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES, resolve
from lpkit.values import Text, checked

# If the recorded speeds of the same matmuls differ by this factor, the source names all records.
DISAGREE = 1.25
BASES = ("bf16", "fp16", "fp32")
# In nanochat (26 layers of width 1,664 on H100), a step that was 1.17 times as fast reached an
# equal loss 1.05 times as fast: 1.17 / 1.05 = 1.11.
MIN_WORTHWHILE_SPEEDUP = 1.11
WORTH_SOURCE = "https://github.com/karpathy/nanochat/blob/master/dev/LOG.md, 2026-02-02"
COLUMNS = {"recipe": "{recipe}", "runs": "{status} ({backend})", "step": "{step_seconds:time}",
           "speed": "{speedup:.2f}x", "Linears": "{linear_speedup:.2f}x",
           # templates for `RecipePrediction.to_dict()`
           "casts": "{cast_share:.0%}", "memory": "{more_bytes:+bytes}"}


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The cost of one update in a base precision and under a recipe.

    The parts of a step that the recipe does not cast take the same time in both. So if a share `p`
    of the step becomes `s` times as fast, the step becomes `1 / (1 - p + p / s)` times as fast
    (Amdahl 1967, https://doi.org/10.1145/1465482.1465560)."""

    base: StepTime                          # the step in the base precision
    cast: StepTime                          # the step under the recipe
    linears: tuple[LinearCost, ...]         # Linears that the recipe casts
    touched_seconds: float                  # seconds of these Linears in the base's step
    cast_seconds: float                     # seconds of these Linears in the recipe's step
    # bytes by which the recipe raises each row of memory, each step at its own peak
    bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def base_step_seconds(self) -> float:
        return self.base.step_seconds

    @property
    def step_seconds(self) -> float:
        return self.cast.step_seconds

    @property
    def rest_seconds(self) -> dict[str, float]:
        """The seconds of the rows that the recipe does not cast, by row."""
        names = {linear.name for linear in self.linears}
        return {row.name: row.seconds for row in self.cast.rows if row.name not in names}

    @property
    def share(self) -> float:
        """Amdahl's p: the share of the base's step in the Linears that the recipe casts."""
        return self.touched_seconds / self.base_step_seconds

    @property
    def linear_speedup(self) -> float:
        """Amdahl's s: the speed-up of these Linears."""
        return self.touched_seconds / self.cast_seconds if self.linears else 1.0

    @property
    def speedup(self) -> float:
        return self.base_step_seconds / self.step_seconds

    @property
    def cast_share(self) -> float:
        """The share of the recipe's step that its casts take."""
        return sum(linear.calls * linear.cast_seconds
                   for linear in self.linears) / self.step_seconds

    @property
    def more_bytes(self) -> float:
        """The bytes by which the recipe raises the peak."""
        return sum(self.bytes.values())


def compared(plain: StepTime, cast: StepTime, products: Sequence[Product], recipe: CastRecipe
             ) -> StepCost:
    """Return the cost of two predicted steps: `plain` in the base precision and `cast` under
    `recipe`. `products`: the matmuls of one micro-batch on one rank."""
    # touched and under: seconds of the cast Linears in the plain step and in the recipe's step
    costs, touched, under = [], 0.0, 0.0
    for p in products if recipe.casts else ():
        kept = recipe.kept.get(p.name, 0) / p.calls
        if p.pairs or kept >= 1:
            continue
        seconds = plain[p.name].seconds
        touched += seconds * (1 - kept)
        under += cast[p.name].seconds - seconds * kept
        costs.append(linear_cost(
            p, recipe, plain.machine, plain.efficiency, base=plain.dtype,
            itemsize=PRECISIONS[plain.precision].compute_bytes,
            calls=round(p.calls * (1 - kept)) * plain.micro_batches))
    return StepCost(base=plain, cast=cast, linears=tuple(costs), touched_seconds=touched,
                    cast_seconds=under)


@dataclass(frozen=True, kw_only=True)
class RecipePrediction:
    """The prediction for one recipe on the machine."""

    recipe: str
    backend: str
    status: str             # native or emulated
    why: str                # the reason for the status
    cost: StepCost
    recorded_speedup: float | None = None       # speed-up of the same model in data/measured
    # share of the predicted speed-up that recorded recipes of this model reached
    reached: float = 1.0
    source: str = "formula"     # the source of the speed-up

    @property
    def speedup(self) -> float:
        """The speed-up of a step over the base precision: recorded, or predicted and corrected."""
        formula = self.reached * self.cost.speedup
        return formula if self.recorded_speedup is None else self.recorded_speedup

    @property
    def bits(self) -> float:
        """The bits of the narrowest operand."""
        return min(cast.bits for cast in RECIPES[self.recipe].all_casts)

    def to_dict(self) -> dict[str, Any]:
        linears = [{**asdict(linear), "speedup": linear.speedup} for linear in self.cost.linears]
        return {
            **picked(self, "recipe backend status why recorded_speedup source speedup"),
            **picked(self.cost, "step_seconds base_step_seconds share linear_speedup bytes "
                     "more_bytes cast_share rest_seconds"), "linears": linears}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice which precision to train in."""

    machine: str
    base: str               # the precision that recipes are compared with
    choice: str             # the recipe to use, or `base`
    sentence: str           # the advice and its main reason
    plans: tuple[RecipePrediction, ...]     # the predictions by recipe, best first
    efficiency: Efficiency

    def __getitem__(self, recipe: str) -> RecipePrediction:
        return next(plan for plan in self.plans if plan.recipe == recipe)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and the rows for `html_table(*advice.table())`."""
        heads, *rows = cells(COLUMNS, [plan.to_dict() for plan in self.plans])
        return heads, rows

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {**picked(self, "sentence choice base machine"),
                "plans": [plan.to_dict() for plan in self.plans],
                "efficiency": asdict(self.efficiency),
                "sources": [f"worthwhile from {MIN_WORTHWHILE_SPEEDUP}x on: {WORTH_SOURCE}", *[
                    f"{plan.recipe}: {plan.source}" for plan in self.plans
                    if " but " in plan.source]]}

    def __str__(self) -> str:
        heads, rows = self.table()
        return f"{self.sentence}\n{text_table([heads, *rows])}"

    def _repr_html_(self) -> str:
        return (f"{html_table(*self.table(), caption=f'{self.sentence}.')}<details><summary>Sources"
                f"</summary>{escape(self.efficiency.source)}</details>")


@checked
def advise(config: Config, machine: str | Machine = "h200", *, recipes: Sequence[str] | None = None,
           base: Text | None = None, measured: Path = MEASURED) -> Advice:
    """Return the advice which recipe to use to train `config` on a `machine`: a row of the
    catalogue, or a machine that `lpkit measure` wrote.

    recipes   names of the recipes to consider; None: all recipes that cast
    base      the precision to compare with: bf16, fp16 or fp32; None: the fastest of the three on
              the machine
    measured  the folder of recorded benches

    Raises ConfigError for an unknown machine or recipe, and for settings that fit no recipe.
    """
    on = machines.find(machine)
    if base is None:
        base = max((dtype for dtype in BASES if dtype in on.flops), key=on.flops.get)
    # raises ConfigError for an unknown base, or if the machine has no such dtype
    on.peak_flops(pick(dict.fromkeys(BASES, base), base, "base"))
    known = evidence.efficiency(on, stack_of(config), folder=measured)
    plain = _predicted(config, on, base, known)
    recorded = recorded_steps(on, base, measured)
    files = evidence.recorded_products(on, measured) if known.ratios else {}
    asked, plans, backend = config.precision.recipe, [], config.precision.backend
    backend = "scaled_mm" if backend == "auto" else backend
    casting = [name for name, row in RECIPES.items() if row.products]
    for name in recipes or casting:
        row = resolve(asked if asked.name == name else name)
        if not row.products:
            raise ConfigError(f"{name} casts nothing, so it cannot be compared with {base}; choose "
                              f"from {', '.join(casting)}")
        step, held = _predicted(config, on, name, known)
        products = rank_products(config.model, step.layout, step.sequences)
        cost = compared(plain[0], step, products, as_run(config, name, on)[0])
        speedup, source = recorded.get(case_name(name, config), (
            None, by_records(name, products, {} if step.emulated else files)))
        plans.append(RecipePrediction(
            recipe=name, backend="emulated" if step.emulated else backend,
            status="emulated" if step.emulated else "native", recorded_speedup=speedup,
            why=step.emulated or f"{on.title} has matmuls for these formats", source=source,
            cost=replace(cost, bytes=more_at_peak(held, plain[1]))))
    if reached := [plan.speedup / plan.cost.speedup for plan in plans if plan.recorded_speedup]:
        # assumption: the cause that slows the recorded recipes slows the other recipes equally
        share = min(1.0, statistics.median(reached))
        corrected = f"formula times {share:.2f}, the share that recorded recipes reached"
        plans = [replace(plan, reached=share, source=corrected)
                 if (plan.recorded_speedup, plan.status) == (None, "native") else plan
                 for plan in plans]
    plans.sort(key=lambda plan: (plan.status != "native", -plan.speedup))
    choice, sentence = verdict(plans, on, base)
    if plain[1].doubt and (config.transforms or config.governors):
        sentence += f"; {plain[1].doubt}"
    return Advice(machine=on.title, base=base, choice=choice, sentence=sentence,
                  plans=tuple(plans), efficiency=known)


def _predicted(config: Config, on: Machine, precision: str,
               efficiency: Efficiency) -> tuple[StepTime, Memory]:
    """Return the predicted time and memory of a step."""
    return (step_time(config, on, precision=precision, efficiency=efficiency),
            memory(config, on, precision=precision))


def more_at_peak(held: Memory, base: Memory) -> dict[str, float]:
    """Return, by row, the bytes of `held` minus the bytes of `base`, each step at the moment of its
    own peak. Their sum is the difference of the peaks."""
    return difference(held.at(held.peak_moment), base.at(base.peak_moment))


def difference(rows: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """Return `rows` minus `others`; a missing row is 0."""
    return {name: rows.get(name, 0.0) - others.get(name, 0.0) for name in {**rows, **others}}


def verdict(plans: Sequence[RecipePrediction], on: Machine, base: str) -> tuple[str, str]:
    """Return the choice and the sentence of an Advice. `plans` are sorted: native plans first, and
    the fastest plan first among them."""
    native = [plan for plan in plans if plan.status == "native"]
    if not native:
        best = plans[0]
        return base, (f"{base}: {on.title} has no matmul for these formats; {best.recipe}, "
                      f"emulated, gives the same numbers, and a step takes "
                      f"{1 / best.speedup:.2f} times as long")
    chosen, reached = None, 1.0
    for bits in sorted({plan.bits for plan in native}, reverse=True):
        best = next(plan for plan in native if plan.bits == bits)
        if best.speedup >= MIN_WORTHWHILE_SPEEDUP * reached:
            chosen, reached = best, best.speedup
    if chosen is not None:
        return chosen.recipe, words(
            "{recipe}: a step {speedup:.2f} times as fast as {base} ({source}): the Linears that "
            "it casts are {share:.0%} of the step and get {linear_speedup:.2f} times as fast; "
            "memory {more_bytes:+bytes}", chosen.to_dict(), base=base)
    best = native[0]
    if best.speedup < 1:
        slower = sum(linear.calls * (linear.product_seconds - linear.base_seconds)
                     for linear in best.cost.linears) > 0
        why = ("matmuls in fewer bits are slower" if slower else
               "the casts cost more time than faster matmuls save")
        return base, (f"{base}: at these widths {why} ({best.recipe}: {best.speedup:.2f} times the "
                      f"speed, {best.source})")
    return base, (f"{base}: at these widths the casts take most of the time that faster matmuls "
                  f"save ({best.recipe}: a step {best.speedup:.2f} times as fast, {best.source}; "
                  f"it reaches an equal loss sooner only above {MIN_WORTHWHILE_SPEEDUP})")


# Recorded benches

def by_records(recipe: str, products: Sequence[Product],
               files: Mapping[str, Mapping[str, Sequence]]) -> str:
    """Return the source of a recipe's predicted speed in words.

    If the shapes of recorded matmuls are near the shapes of `products`, the source names the record
    and its speed relative to bf16. If the speeds of several records differ by the factor DISAGREE,
    the source names all of them. `files`: the records, as `evidence.recorded_products` returns
    them."""
    speeds = {}
    for name in [name for name in files if recipe in files[name]]:
        near, ratios, work = zip(*[(*nearest(files[name][recipe], *sizes), product.flops)
                                   for product in products if not product.pairs
                                   for sizes in product.shapes.values()])
        if any(near):
            speeds[name] = statistics.harmonic_mean(ratios, work)
    sources = [f"{speed:.2f} times as fast as bf16 by {name}" for name, speed in speeds.items()]
    apart = max(speeds.values(), default=0) >= DISAGREE * min(speeds.values(), default=1)
    return "formula" + f", matmuls {' but '.join(sources if apart else sources[:1])}" * bool(
        sources)


def recorded_steps(on: Machine, base: str, folder: Path) -> dict[str, tuple[float, str]]:
    """Return the recorded speed-ups of whole steps over `base` on the machine, by `case_name`, each
    with its source."""
    speedups = {}
    for path, bench in evidence.benches(on, folder):
        if bench["name"] == "fp8-step":
            with evidence.whole(path):
                speedups |= {case["case"]: (float(case["ratio"]), f"recorded: {path.name}")
                          for case in bench["cases"] if case["peer"] == base}
    return speedups


def case_name(recipe: str, config: Config) -> str:
    """Return the name of the config's case in a record of `lpkit bench fp8-step`."""
    m, sequences = config.model, config.global_batch // config.grad_accum_steps
    return f"{recipe}, {m.L} x {m.D}, {sequences} x {m.T} tokens"
