"""Will low precision be faster for me? A verdict for one config on one machine, and what it rests
on.

    advise(config, "h200")      by formula, in a millisecond

The formula is `lpkit.predict.precision`: the step that `lpkit plan` prices, with the recipe's casts
and without. What a machine reaches of its datasheet is, in this order: a recorded `fp8-linear`
bench of that machine in data/measured; else an assumption with its source. A recorded `fp8-step`
bench of the same model replaces the prediction altogether.

A recipe with fewer bits is taken only when its step is MIN_WORTHWHILE_SPEEDUP times as fast: a step
in 8 bits teaches a little less, and what counts is the time to an equal loss.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError, pick
from lpkit.files import resource
from lpkit.measure import matrix
from lpkit.precision.backends import BACKENDS, Library
from lpkit.predict import evidence
from lpkit.predict.casts import FINE_SHARE, Operand, Recipe, cast_passes, linear_cost, on_hardware
from lpkit.predict.compare import Comparison
from lpkit.predict.compare import Row as Compared
from lpkit.predict.flops import Product
from lpkit.predict.precision import StepCost, emulated, step_cost
from lpkit.predict.roofline import Efficiency
from lpkit.predict.units import duration, quantity
from lpkit.tables import html_table
from lpkit.techniques import machines
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES, SCALES, resolve
from lpkit.techniques.recipes import Recipe as Row
from lpkit.values import Text, checked

BASES = ("bf16", "fp16", "fp32")
# nanochat, 26 x 1664 on H100: a step 1.17x as fast was 1.05x at equal quality
MIN_WORTHWHILE_SPEEDUP = 1.11
WORTH_SOURCE = "https://github.com/karpathy/nanochat/blob/master/dev/LOG.md, 2026-02-02"
MEASURED = resource("data/measured")
# traffic of casts that are many kernels over that of fused ones: 21.9 ms against 4.6 in nanochat's
# log, rowwise
MANY_KERNELS_TRAFFIC = 12
# the same of emulated casts that mix and draw: gives nvfp4 the 2.3x of bf16's step that cpu-3m took
NOISY_CAST_TRAFFIC = 7

@dataclass(frozen=True, kw_only=True)
class Plan:
    """One recipe on this machine."""

    recipe: str
    backend: str
    status: str             # native, emulated
    why: str
    cost: StepCost
    recorded_speedup: float | None = None       # of the same model, from data/measured
    source: str = "formula"

    @property
    def speedup(self) -> float:
        """Of a step, against 16 bits."""
        return self.cost.speedup if self.recorded_speedup is None else self.recorded_speedup

    @property
    def bits(self) -> float:
        """Of the narrowest operand."""
        return min(cast.bits for pair in RECIPES[self.recipe].products.values() for cast in pair)

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in
                  ("recipe", "backend", "status", "why", "recorded_speedup", "source", "speedup")}
        costs = {name: getattr(self.cost, name) for name in
                 ("step_seconds", "base_step_seconds", "share", "linear_speedup", "bytes",
                  "more_bytes", "rest_seconds")}
        linears = [{**asdict(one), "speedup": one.speedup} for one in self.cost.linears]
        return {**values, **costs, "linears": linears}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do, in `sentence`; everything else is why."""

    machine: str
    base: str
    choice: str
    sentence: str
    plans: tuple[Plan, ...]
    efficiency: Efficiency

    def __getitem__(self, recipe: str) -> Plan:
        return next(plan for plan in self.plans if plan.recipe == recipe)

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """For `html_table(*advice.table())`."""
        rows = []
        for p in self.plans:
            cost = p.cost
            casts = sum(one.calls * one.cast_seconds for one in cost.linears) / cost.step_seconds
            rows.append((p.recipe, p.status, duration(cost.step_seconds), f"{p.speedup:.2f}x",
                         f"{cost.linear_speedup:.2f}x", f"{casts:.0%}", _signed(cost.more_bytes)))
        return ("recipe", "runs", "step", "speed", "Linears", "casts", "memory"), rows

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"sentence": self.sentence, "choice": self.choice, "base": self.base,
                "machine": self.machine, "plans": [plan.to_dict() for plan in self.plans],
                "efficiency": asdict(self.efficiency),
                "sources": [f"worth it above {MIN_WORTHWHILE_SPEEDUP}x: {WORTH_SOURCE}"]}

    def _repr_html_(self) -> str:
        return html_table(*self.table(), caption=f"{self.sentence}. {self.efficiency.source}")


def _signed(nbytes: float) -> str:
    return f"{'-' if nbytes < 0 else '+'}{quantity(abs(nbytes), 'bytes')}" if nbytes else "0"


def in_emulation(recipe: Recipe, row: Row, base: str) -> Recipe:
    """As `backends.Emulated` runs it: values in 16 bits, scales multiplied into them where that is
    exact, and float32 products where float32 scales vary inside the sum."""
    unfolded = [cast for pair in row.products.values() for cast in pair
                if not SCALES[cast.scale].folds]
    inside = any(cast.block[1] > 1 for cast in unfolded)
    dtype, bits = ("fp32", 32) if inside or base == "fp32" else (base, 16)
    wide = emulated(recipe, dtype=dtype, bits=bits, folded=not unfolded)
    return replace(wide, cast_factor=NOISY_CAST_TRAFFIC) if row.stochastic else wide


@checked
def advise(config: Config, machine: str | Machine = "h200", *, recipes: Sequence[str] | None = None,
           base: Text | None = None, measured: Path = MEASURED) -> Advice:
    """Which recipe to train `config` with on one `machine`, a name of the catalogue or one that was
    measured here.

    recipes   rows to consider; None: every one that casts
    base      what to beat: bf16, fp16 or fp32; None: the fastest of what the machine has
    measured  the folder of recorded benches
    Raises ConfigError for an unknown machine or recipe, or settings that go with none.
    """
    on = machines.find(machine)
    if base is None:
        base = max((dtype for dtype in BASES if dtype in on.flops), key=on.flops.get)
    on.peak_flops(pick(dict.fromkeys(BASES, base), base, "base"))   # raises where there is none
    efficiency, recorded = recall(on, base, measured)
    asked, plans = config.precision.recipe, []
    casting = [name for name, row in RECIPES.items() if row.products]
    for name in recipes or casting:
        row = resolve(asked if asked.name == name else name)
        if not row.products:
            raise ConfigError(f"{name} casts nothing, so there is nothing to weigh against {base}; "
                              f"choose from {', '.join(casting)}")
        plans.append(_plan(name, row, config, on, base, efficiency, recorded))
    plans.sort(key=lambda plan: (plan.status != "native", -plan.speedup))
    choice, sentence = _verdict(plans, on, base)
    return Advice(machine=on.title, base=base, choice=choice, sentence=sentence,
                  plans=tuple(plans), efficiency=efficiency)


def _plan(name: str, row: Row, config: Config, on: Machine, base: str, efficiency: Efficiency,
          recorded: Mapping[str, tuple[float, str]]) -> Plan:
    recipe = on_hardware(name, row, config.model)
    cells = [cell for cell in matrix.by_rule(matrix.known_as(on))
             if cell.recipe == name and cell.feature == "forward"]
    native = [cell for cell in cells if cell.status == "native" and recipe.dtype in on.flops]
    if not native:
        (cell,) = [cell for cell in cells if cell.backend == "emulated"]
        cost = step_cost(config, in_emulation(recipe, row, base), on, efficiency, base=base)
        return Plan(recipe=name, backend=cell.backend, status="emulated", why=cell.why, cost=cost)
    cell, *others = native
    why = cell.why
    # 16 elements are mixed by a product, and 4 bits packed: torch.compile has no one kernel for it
    if row.stochastic and not isinstance(BACKENDS[cell.backend], Library):
        recipe = replace(recipe, cast_factor=MANY_KERNELS_TRAFFIC)
        why += "; its casts are many kernels"
        if others:
            why += f", which {others[0].backend} has as one"
    speedup, source = recorded.get(case_name(name, config), (None, "formula"))
    return Plan(recipe=name, backend=cell.backend, status="native", why=why,
                cost=step_cost(config, recipe, on, efficiency, base=base),
                recorded_speedup=speedup, source=source)


def _verdict(plans: Sequence[Plan], on: Machine, base: str) -> tuple[str, str]:
    """Choice and sentence. `plans` come best first, native ones before the others."""
    native = [plan for plan in plans if plan.status == "native"]
    if not native:
        best = plans[0]
        return base, (f"{base}: {on.title} multiplies none of these formats itself; emulated, "
                      f"{best.recipe} gives the same numbers and a step takes "
                      f"{1 / best.speedup:.2f} times as long")
    chosen, reached = None, 1.0
    for bits in sorted({plan.bits for plan in native}, reverse=True):
        best = next(plan for plan in native if plan.bits == bits)
        if best.speedup >= MIN_WORTHWHILE_SPEEDUP * reached:
            chosen, reached = best, best.speedup
    if chosen is not None:
        cost = chosen.cost
        return chosen.recipe, (
            f"{chosen.recipe}: a step {chosen.speedup:.2f} times as fast as {base} "
            f"({chosen.source}): the Linears that it casts are {cost.share:.0%} of the step and "
            f"get {cost.linear_speedup:.2f} times as fast; memory {_signed(cost.more_bytes)}")
    best = native[0]
    if best.speedup < 1:
        return base, (f"{base}: at these widths the casts cost more than the products save "
                      f"({best.recipe}: {best.speedup:.2f} times the speed, {best.source})")
    return base, (f"{base}: at these widths the casts take most of what the products save "
                  f"({best.recipe}: a step {best.speedup:.2f} times as fast, {best.source}; below "
                  f"{MIN_WORTHWHILE_SPEEDUP} it loses at equal loss)")


# Recorded benches.

@contextmanager
def recorded_bench(path: Path) -> Iterator[dict[str, Any]]:
    """What `lpkit bench` wrote. Raises ConfigError where reading it, or what is done with it, shows
    that it is something else."""
    try:
        yield json.loads(path.read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.name} in {path.parent.name} is not a recorded bench ({error!r}); "
                          f"write it again with `lpkit bench`, or remove it") from None


def recall(on: Machine, base: str, folder: Path = MEASURED
           ) -> tuple[Efficiency, dict[str, tuple[float, str]]]:
    """What benches of this machine say: the efficiency of its products, and speed-ups of whole
    steps by `case_name`."""
    efficiency, steps = evidence.efficiency(on), {}
    for path in sorted(folder.glob("fp8-*.json")):
        with recorded_bench(path) as bench:
            row, cases = catalogued(bench["device"]), bench["cases"]
            if on.kind != "gpu" or on.title not in (bench["device"], row and row.title):
                continue        # another machine's
            where = f"recorded: {path.name}"
            if bench["name"] == "fp8-linear" and cases:
                products = {**efficiency.products, **_reached(cases, on, efficiency)}
                efficiency = replace(efficiency, products=products,
                                     source=f"products {where}; the rest {efficiency.source}")
            elif bench["name"] == "fp8-step":
                steps |= {case["case"]: (float(case["ratio"]), where) for case in cases
                          if case["peer"] == base}
    return efficiency, steps


def catalogued(device: str) -> Machine | None:
    """The row of the catalogue for a GPU by the name that its driver gives it: the one whose model
    it names (H100, 4090), and of several the one with most words in common. None for what is not in
    the catalogue."""
    words, best, most = set(re.findall(r"\w+", device)), None, 0
    for row in machines.CATALOGUE.values():
        title = re.findall(r"\w+", row.title)
        model = next((word for word in title if re.search(r"\d", word)), "")
        common = len(words & set(title))
        if row.kind == "gpu" and model in words and common > most:
            best, most = row, common
    return best


def case_name(recipe: str, config: Config) -> str:
    """Of a case of `bench fp8-step`."""
    m, sequences = config.model, config.global_batch // config.grad_accum_steps
    return f"{recipe}, {m.L} x {m.D}, {sequences} x {m.T} tokens"


def _reached(cases: Sequence[Mapping[str, Any]], on: Machine, assumed: Efficiency
             ) -> dict[str, float]:
    """Shares of the peak that make the formula give the recorded seconds, median over the cases."""
    shares: dict[str, list[float]] = {"bf16": [], "fp8": []}
    bandwidth = on.bytes_per_second * assumed.bandwidth
    for case in cases:
        if case["peer"] != "bf16":
            continue
        M, K, _, N = map(int, re.split("x| @ ", case["case"]))      # "MxK @ KxN"
        results = 2 * (M * N + M * K + N * K) / bandwidth
        # the bench's weight is bf16 already, and torchao's passes are those of `cast_passes`
        casts = sum(each.bytes for each in cast_passes(_TENSORWISE, M=M, N=N, K=K)) / bandwidth
        for dtype, seconds in (("bf16", case["peer_median"] - results),
                               ("fp8", case["ours_median"] - results - casts)):
            if seconds > 0:
                shares[dtype].append(min(1.0, 6 * M * N * K / on.peak_flops(dtype) / seconds))
    return {dtype: statistics.median(values) for dtype, values in shares.items() if values}


_TENSORWISE = Recipe(name="fp8-tensorwise", dtype="fp8",
                     casts=dict.fromkeys(("y", "dx", "dw"),
                                         (Operand(bits=8, transposes=True),) * 2))


# What others published, beside the formula. Theirs: conditions and versions are in the sources.
# https://github.com/pytorch/ao/blob/main/torchao/float8/README.md

META_H100 = replace(machines.CATALOGUE["h100"], bytes_per_second=2.4e12)    # of torchao's tables


def claims() -> Comparison:
    """Published speed-ups as `measured`, the formula's beside them. The second fixed the assumed
    FP8 efficiency, both of rowwise together `casts.FINE_SHARE`."""
    tensorwise = replace(_TENSORWISE, kept={"head": 1})
    row = Operand(bits=8, block=(1, 0))
    rowwise = replace(tensorwise, casts=dict.fromkeys(tensorwise.casts, (row, row)),
                      product_share=FINE_SHARE["fp8"])
    nanochat = Config(global_batch=16, model=ModelConfig(
        layers=26, width=1664, heads=13, vocab=32_768, context=2048, tied=False))
    llama = Config(global_batch=1, model=ModelConfig(
        layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14_336, vocab=128_256, context=8192,
        norm="rmsnorm", position="rope", mlp="swiglu", bias=False, tied=False))

    def linear(M: int, K: int, N: int) -> float:
        product = Product(name="Linear", M=M, N=N, K=K, calls=1)
        return linear_cost(product, tensorwise, META_H100).speedup

    def step(config: Config, recipe: Recipe) -> float:
        return step_cost(config, recipe, machines.CATALOGUE["h100"]).speedup

    readme = "torchao README, H100, tensorwise"
    log = "nanochat dev/LOG.md 2026-02-02, 8 x H100, torch 2.9, torchao 0.15"
    table = "torchao README, 8 x H100, FSDP2, torch 2.7, torchao 0.10"
    rows = (("Linear 1024 x 2048 -> 1024", linear(1024, 2048, 1024), 0.80, readme),
            ("Linear 4096 x 8192 -> 16384", linear(4096, 8192, 16_384), 1.39, readme),
            ("26 x 1664, tensorwise", step(nanochat, tensorwise), 1.17, log),
            ("26 x 1664, rowwise", step(nanochat, rowwise), 0.90, log),
            ("Llama 3 8B, tensorwise", step(llama, tensorwise), 1.25, table),
            ("Llama 3 8B, rowwise", step(llama, rowwise), 1.10, table))
    return Comparison(tuple(Compared(name=name, formula=ours, measured=theirs, unit="times",
                                     where=where) for name, ours, theirs, where in rows))
