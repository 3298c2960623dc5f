"""Will low precision be faster for me? A verdict for one config on one machine, and what it rests
on.

    advise(config, "h200")                          by formula, in a millisecond
    advise(config, machine, train=lpkit.train)      and by short real runs on this machine, several
                                                    seeds each

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
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError, pick
from lpkit.files import resource
from lpkit.measure import matrix
from lpkit.precision.backends import BACKENDS
from lpkit.predict.casts import Operand, Recipe, cast_passes, linear_cost, on_hardware
from lpkit.predict.compare import Comparison
from lpkit.predict.compare import Row as Compared
from lpkit.predict.flops import Product
from lpkit.predict.params import of
from lpkit.predict.precision import StepCost, emulated, step_cost
from lpkit.predict.roofline import ASSUMED, REACHED, Efficiency
from lpkit.predict.units import duration, quantity
from lpkit.techniques import machines
from lpkit.techniques.formats import format_of
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES, SCALES, Cast, kept, resolve, scale_bytes
from lpkit.techniques.recipes import Recipe as Row

BASES = ("bf16", "fp16", "fp32")
# nanochat, 26 x 1664 on H100: a step 1.17x as fast was 1.05x at equal quality
MIN_WORTHWHILE_SPEEDUP = 1.11
WORTH_SOURCE = "https://github.com/karpathy/nanochat/blob/master/dev/LOG.md, 2026-02-02"
MEASURED = resource("data/measured")
# a recipe's dtype, by the name of its row in a datasheet
CATALOGUED = {"mxfp8": "fp8", "nvfp4": "fp4"}
# traffic of casts outside torch.compile over fused ones: 21.9 ms against 4.6 in nanochat's log,
# rowwise
EAGER = 12
# the same of emulated casts that mix and draw: gives nvfp4 the 2.3x of bf16's step that cpu-3m took
NOISY_CAST_TRAFFIC = 7
WINDOW = 5      # steps whose mean loss counts as the loss of a moment

Train = Callable[..., Any]      # lpkit.train: (config, out=folder) -> Run


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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Short real runs: each seed of a recipe beside the same seed of the base."""

    recipe: str
    step_seconds: float
    losses: tuple[float, ...]                   # at the end, by seed
    seconds_to_equal_loss: tuple[float | None, ...]  # until the base's last loss; None: not reached
    speedups: tuple[float | None, ...]          # at equal loss, by seed

    @property
    def speedup(self) -> float | None:
        """Median; None when most seeds did not get there."""
        reached = [s for s in self.speedups if s is not None]
        return statistics.median(reached) if 2 * len(reached) > len(self.speedups) else None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do, in `sentence`; everything else is why."""

    machine: str
    base: str
    choice: str
    sentence: str
    plans: tuple[Plan, ...]
    efficiency: Efficiency
    measured: tuple[Measured, ...] = ()
    sources: tuple[str, ...] = field(default=(f"worth it above {MIN_WORTHWHILE_SPEEDUP}x: "
                                              f"{WORTH_SOURCE}",))

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
        plans = []
        for plan in self.plans:
            cost, facts = plan.cost, asdict(replace(plan, cost=None))
            facts.pop("cost")
            linears = [{**asdict(one), "speedup": one.speedup} for one in cost.linears]
            plans.append({
                **facts, "speedup": plan.speedup, "step_seconds": cost.step_seconds,
                "base_step_seconds": cost.base_step_seconds, "share": cost.share,
                "linear_speedup": cost.linear_speedup, "bytes": dict(cost.bytes),
                "more_bytes": cost.more_bytes, "rest_seconds": cost.rest_seconds,
                "linears": linears})
        measured = [{**asdict(one), "speedup": one.speedup} for one in self.measured]
        return {"sentence": self.sentence, "choice": self.choice, "base": self.base,
                "machine": self.machine, "plans": plans, "measured": measured,
                "efficiency": asdict(self.efficiency), "sources": list(self.sources)}

    def _repr_html_(self) -> str:
        from html import escape

        heads, rows = self.table()
        line = (lambda cells, tag: "<tr>"
                + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>")
        return (
            f"<p><b>{escape(self.sentence)}</b></p><table>{line(heads, 'th')}{''.join(line(r, 'td') for r in rows)}</table><p>{escape(self.efficiency.source)}</p>")


def _signed(nbytes: float) -> str:
    return f"{'-' if nbytes < 0 else '+'}{quantity(abs(nbytes), 'bytes')}" if nbytes else "0"


def describe(name: str, row: Row, config: Config) -> Recipe:
    """A row of `recipes` in the words of the formulas, as hardware runs it. Raises ConfigError for
    a `keep` that matches no Linear."""
    linears = [op.name for op in of(config.model).linears]
    names = {f"blocks.{i}.{linear}": linear for i in range(config.model.L) for linear in linears}
    names["head"] = "head"
    stay = [names[full] for full in kept(names, row.high_precision_layers)] if row.products else []
    casts = {product: tuple(map(_operand, pair)) for product, pair in row.products.items()}
    return on_hardware(name, CATALOGUED.get(row.dtype, row.dtype), casts,
                       history=row.delayed.history if row.delayed else 0,
                       kept={product: stay.count(product) for product in set(stay)})


def in_emulation(recipe: Recipe, row: Row, base: str) -> Recipe:
    """As `backends.Emulated` runs it: values in 16 bits, scales multiplied into them where that is
    exact, and float32 products where float32 scales vary inside the sum."""
    operands = [cast for pair in row.products.values() for cast in pair]
    inside = any(cast.block[1] > 1 and not SCALES[cast.scale].folds for cast in operands)
    dtype, bits = ("fp32", 32) if inside or base == "fp32" else (base, 16)
    made = emulated(recipe, dtype=dtype, bits=bits,
                    folded=all(SCALES[cast.scale].folds for cast in operands))
    return replace(made, cast_factor=NOISY_CAST_TRAFFIC) if row.stochastic else made


def _operand(cast: Cast) -> Operand:
    return Operand(bits=cast.bits, block=cast.block, transposes=cast.transposes,
                   scale_bytes=scale_bytes(cast))


def advise(config: Config, machine: str | Machine = "h200", *, recipes: Sequence[str] | None = None,
           base: str | None = None, train: Train | None = None, seeds: int = 3, steps: int = 60,
           measured: Path = MEASURED) -> Advice:
    """Which recipe to train `config` with on one `machine`, a name of the catalogue or one that was
    measured here.

    recipes   rows to consider; None: every one that casts
    base      what to beat: bf16, fp16 or fp32; None: the fastest of what the machine has
    train     `lpkit.train`, to settle it by running: the two best and 16 bits, `steps` steps of
              `seeds` seeds each. The machine must then be the one at hand
    measured  the folder of recorded benches
    Raises ConfigError for an unknown machine or recipe, or settings that go with none.
    """
    on = machines.find(machine)
    base = _base(on) if base is None else pick(dict.fromkeys(BASES, base), base, "base")
    on.peak_flops(base)     # raises where there is none
    efficiency, recorded = recall(on, base, measured)
    plans = []
    for name in recipes or [name for name, row in RECIPES.items() if row.products]:
        try:
            row = resolve(name if config.precision.recipe.name != name else config.precision.recipe)
        except ConfigError:
            if recipes:
                raise
            row = RECIPES[name]     # a setting that belongs to another recipe
        if not row.products:
            raise ConfigError(f"{name} casts nothing, so there is nothing to weigh against {base}; "
                              f"choose from "
                              f"{', '.join(key for key, row in RECIPES.items() if row.products)}")
        plans.append(_plan(name, row, config, on, base, efficiency, recorded))
    plans = tuple(sorted(plans, key=lambda plan: (plan.status != "native", -plan.speedup)))
    choice, sentence = _verdict(plans, on, base)
    made = Advice(machine=on.title, base=base, choice=choice, sentence=sentence, plans=plans,
                  efficiency=efficiency)
    if train is None:
        return made
    runs = measure(config, base, [plan.recipe for plan in plans[:2]], train, seeds=seeds,
                   steps=steps)
    choice, sentence = _settled(runs, base, on, {plan.recipe: plan.status for plan in plans})
    return replace(made, choice=choice, sentence=sentence, measured=runs)


def _base(on: Machine) -> str:
    """The 16-bit recipe to beat: the fastest of what the machine has."""
    return max((dtype for dtype in BASES if dtype in on.flops), key=lambda dtype: on.flops[dtype])


def _plan(name: str, row: Row, config: Config, on: Machine, base: str, efficiency: Efficiency,
          recorded: Mapping[str, tuple[float, str]]) -> Plan:
    recipe = describe(name, row, config)
    # a machine that was measured here and has no row
    known = (on.name if on.name in matrix.CAPABILITY else "cpu")
    cells = [cell for cell in matrix.by_rule(known) if cell.recipe == name
             and cell.feature == "forward"]
    native = [cell for cell in cells if cell.status == "native" and recipe.dtype in on.flops]
    if native:
        cell = native[0]
        # a Linear with state (a history, a counter of draws) runs outside torch.compile, as
        # lpkit.precision.linear says
        stateful = row.delayed is not None or row.stochastic
        if stateful and getattr(BACKENDS[cell.backend], "traceable", False):
            recipe = replace(recipe, cast_factor=EAGER)
            fused = [other.backend for other in native[1:]]
            cell = replace(cell, why=f"{cell.why}; its casts are not fused"
                           + (f", as {fused[0]} does" if fused else ""))
        cost = step_cost(config, recipe, on, efficiency, base=base)
    else:
        (cell,) = [cell for cell in cells if cell.backend == "emulated"]
        cost = step_cost(config, in_emulation(recipe, row, base), on, efficiency, base=base)
    speedup, source = (recorded.get(case_name(name, config), (None, "formula")) if native
                       else (None, "formula"))
    return Plan(recipe=name, backend=cell.backend, status="native" if native else "emulated",
                why=cell.why, cost=cost, recorded_speedup=speedup, source=source)


def _bits(plan: Plan) -> float:
    return min(format_of(cast.format).bits for pair in RECIPES[plan.recipe].products.values()
               for cast in pair)


def _verdict(plans: Sequence[Plan], on: Machine, base: str) -> tuple[str, str]:
    native = [plan for plan in plans if plan.status == "native"]
    if not native:
        best = plans[0]
        return base, (f"{base}: {on.title} multiplies none of these formats itself; emulated, "
                      f"{best.recipe} gives the same numbers and a step takes "
                      f"{1 / best.speedup:.2f} times as long")
    chosen, reached = None, 1.0
    for bits in sorted({_bits(plan) for plan in native}, reverse=True):
        best = max((plan for plan in native if _bits(plan) == bits), key=lambda plan: plan.speedup)
        if best.speedup >= MIN_WORTHWHILE_SPEEDUP * reached:
            chosen, reached = best, best.speedup
    if chosen is not None:
        cost = chosen.cost
        return chosen.recipe, (
            f"{chosen.recipe}: a step {chosen.speedup:.2f} times as fast as {base} "
            f"({chosen.source}): the Linears that it casts are {cost.share:.0%} of the step and "
            f"get {cost.linear_speedup:.2f} times as fast; memory {_signed(cost.more_bytes)}")
    best = max(native, key=lambda plan: plan.speedup)
    if best.speedup < 1:
        return base, (f"{base}: at these widths the casts cost more than the products save "
                      f"({best.recipe}: {best.speedup:.2f} times the speed, {best.source})")
    return base, (f"{base}: at these widths the casts take most of what the products save "
                  f"({best.recipe}: a step {best.speedup:.2f} times as fast, {best.source}; below "
                  f"{MIN_WORTHWHILE_SPEEDUP} it loses at equal loss)")


# Recorded benches.

def recall(on: Machine, base: str, folder: Path = MEASURED) -> tuple[Efficiency,
                                                                     dict[str, tuple[float, str]]]:
    """What benches of this machine say: the efficiency of its products, and speed-ups of whole
    steps by `case_name`."""
    efficiency, steps = (REACHED if on.name == "this" else ASSUMED), {}
    for path in sorted(folder.glob("fp8-*.json")):
        try:
            found = json.loads(path.read_text())
            cases = found["cases"] if _same_device(found["device"], on) else []
            where = f"recorded: {path.name}"
            if found["name"] == "fp8-linear" and cases:
                efficiency = replace(efficiency,
                                     products={**efficiency.products,
                                               **_reached(cases, on, efficiency)},
                                     source=f"products {where}; the rest {efficiency.source}")
            elif found["name"] == "fp8-step":
                steps |= {case["case"]: (float(case["ratio"]), where) for case in cases
                          if case["peer"] == base}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path.name} in {folder.name} is not a recorded bench ({error!r}); "
                              f"write it again with `lpkit bench`, or remove it") from None
    return efficiency, steps


def catalogued(device: str) -> Machine | None:
    """The row of the catalogue for a GPU by the name that its driver gives it: the one whose model
    it names (H100, 4090), and of several the one with most words in common. None for what is not in
    the catalogue."""
    words = set(re.findall(r"\w+", device))
    titles = {name: re.findall(r"\w+", row.title) for name, row in machines.CATALOGUE.items()
              if row.kind == "gpu"}
    named = [name for name, title in titles.items()
             if next((word for word in title if re.search(r"\d", word)), "") in words]
    best = max(named, key=lambda name: len(words & set(titles[name])), default=None)
    return best and machines.CATALOGUE[best]


def _same_device(name: str, on: Machine) -> bool:
    found = catalogued(name)
    return on.kind == "gpu" and on.title in (name, found and found.title)


def case_name(recipe: str, config: Config) -> str:
    """Of a case of `bench fp8-step`."""
    m, sequences = config.model, config.global_batch // config.grad_accum_steps
    return f"{recipe}, {m.L} x {m.D}, {sequences} x {m.T} tokens"


def _reached(cases: Sequence[Mapping[str, Any]], on: Machine, assumed: Efficiency) -> dict[str,
                                                                                           float]:
    """Shares of the peak that make the formula give the recorded seconds, median over the cases."""
    shares: dict[str, list[float]] = {"bf16": [], "fp8": []}
    bandwidth = on.bytes_per_second * assumed.bandwidth
    for case in cases:
        if case["peer"] != "bf16":
            continue
        left, right = (part.strip().split("x") for part in case["case"].split("@"))
        (M, K), N = map(int, left), int(right[1])
        results = 2 * (M * N + M * K + N * K) / bandwidth
        # the bench's weight is bf16 already, and torchao's passes are those of `cast_passes`
        casts = (sum(max(one.bytes, 0) for one in cast_passes(_TENSORWISE, M=M, N=N, K=K))
                 / bandwidth)
        for dtype, seconds in (("bf16", case["peer_median"] - results),
                               ("fp8", case["ours_median"] - results - casts)):
            if seconds > 0:
                shares[dtype].append(min(1.0, 6 * M * N * K / on.peak_flops(dtype) / seconds))
    return {dtype: statistics.median(values) for dtype, values in shares.items() if values}


_TENSORWISE = Recipe(name="fp8-tensorwise", dtype="fp8",
                     casts=dict.fromkeys(("y", "dx", "dw"),
                                         (Operand(bits=8, transposes=True),) * 2))


# Short real runs.

def measure(config: Config, base: str, recipes: Sequence[str], train: Train, *, seeds: int = 3,
            steps: int = 60) -> tuple[Measured, ...]:
    """Train `base` and each of `recipes` for `steps` steps with each seed, and compare the times to
    an equal loss.

    The target of a seed is the base's loss at its end, a mean over WINDOW steps. Raises ConfigError
    for no seeds, or too few steps.
    """
    if seeds < 1 or steps < 2 * WINDOW:
        raise ConfigError(f"measuring takes at least 1 seed and {2 * WINDOW} steps, got {seeds} "
                          f"and {steps}")
    short = {"steps": steps, "eval_every": 0, "checkpoint_every": 0, "eval_batches": 1,
             "schedule": "constant", "schedule.warmup_steps": min(config.schedule.warmup_steps,
                                                                  steps // 10)}
    curves: dict[str, list[tuple[list[float], float]]] = {}
    with tempfile.TemporaryDirectory(prefix="lpkit-advise-") as folder:
        for seed in range(seeds):
            for name in (base, *recipes):       # in turns, so that a slow moment meets all of them
                made = train(config.replace({**short, "seed": seed, "precision.recipe": name}),
                             out=Path(folder) / f"{name}-{seed}")
                curves.setdefault(name, []).append(_curve(made.metrics))
    # the least disturbed run's
    seconds = {name: min(s for _, s in runs) for name, runs in curves.items()}
    return tuple(_measured(name, curves[name], curves[base], seconds[name], seconds[base])
                 for name in curves)


def _curve(metrics: Sequence[Mapping[str, float]]) -> tuple[list[float], float]:
    """Mean losses over WINDOW steps, and the seconds of a step: the lower quartile, for a machine
    that is shared; the first ones left out."""
    losses = [line["loss"] for line in metrics]
    return ([statistics.fmean(losses[i:i + WINDOW]) for i in range(len(losses) - WINDOW + 1)],
            statistics.quantiles([line["step_seconds"] for line in metrics[2:]], n=4)[0])


def _measured(name: str, runs: Sequence[tuple[list[float], float]],
              bases: Sequence[tuple[list[float], float]], seconds: float,
              base_seconds: float) -> Measured:
    to_equal, speedups = [], []
    for (losses, _), (base_losses, _) in zip(runs, bases, strict=True):
        target = base_losses[-1]
        steps, base_steps = (next((i + WINDOW for i, loss in enumerate(curve) if loss <= target),
                                  None)
                             for curve in (losses, base_losses))
        to_equal.append(None if steps is None else steps * seconds)
        speedups.append(None if steps is None else base_steps * base_seconds / (steps * seconds))
    return Measured(recipe=name, step_seconds=seconds,
                    losses=tuple(losses[-1] for losses, _ in runs),
                    seconds_to_equal_loss=tuple(to_equal), speedups=tuple(speedups))


def _settled(runs: Sequence[Measured], base: str, on: Machine,
             statuses: Mapping[str, str]) -> tuple[str, str]:
    """The first is the base. A gain must exceed what the seeds differ by; emulation, which does
    more, cannot gain."""
    first, *others = runs
    reached = [run for run in others if run.speedup is not None]
    if not reached:
        return (base, f"{base}: none of {', '.join(run.recipe for run in others)} reached its loss "
                f"in these runs")
    best = max(reached, key=lambda run: run.speedup)
    each = [s for s in best.speedups if s is not None]
    spread = f"{min(each):.2f} to {max(each):.2f} over {len(best.speedups)} seeds"
    faster = min(each) > 1 and len(each) == len(best.speedups) > 1
    if faster and statuses[best.recipe] == "native":
        return best.recipe, (f"{best.recipe}: reaches the loss of {base} {best.speedup:.2f} times "
                             f"as fast on {on.title}, measured ({spread})")
    why = ("it is emulated here, which does more work, so what is above 1 is noise"
           if statuses[best.recipe] != "native" else "one seed is no evidence"
           if len(best.speedups) == 1 else "the seeds do not agree on a gain")
    return base, (f"{base}: measured on {on.title}, {best.recipe} takes "
                  f"{best.step_seconds / first.step_seconds:.2f} times as long for a step and "
                  f"reaches an equal loss at {best.speedup:.2f} times the speed ({spread}); {why}")


# What others published, beside the formula. Theirs: conditions and versions are in the sources.

AO_README = "https://github.com/pytorch/ao/blob/main/torchao/float8/README.md"
META_H100 = replace(machines.CATALOGUE["h100"], bytes_per_second=2.4e12)    # of torchao's tables


def claims() -> Comparison:
    """Published speed-ups as `measured`, the formula's beside them. The second fixed the assumed
    FP8 efficiency, both of rowwise together `casts.FINE_SHARE`."""
    tensorwise = replace(_TENSORWISE, kept={"head": 1})
    row = Operand(bits=8, block=(1, 0))
    rowwise = on_hardware("rowwise", "fp8", dict.fromkeys(tensorwise.casts, (row, row)),
                          kept={"head": 1})
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

    log = "nanochat dev/LOG.md 2026-02-02, 8 x H100, torch 2.9, torchao 0.15"
    table = "torchao README, 8 x H100, FSDP2, torch 2.7, torchao 0.10"
    return Comparison(tuple(Compared(name=name, formula=ours, measured=theirs, unit="times",
                                     where=where)
                            for name, ours, theirs, where in (
        ("Linear 1024 x 2048 -> 1024", linear(1024, 2048, 1024), 0.80,
         "torchao README, H100, tensorwise"),
        ("Linear 4096 x 8192 -> 16384", linear(4096, 8192, 16_384), 1.39,
         "torchao README, H100, tensorwise"),
        ("26 x 1664, tensorwise", step(nanochat, tensorwise), 1.17, log),
        ("26 x 1664, rowwise", step(nanochat, rowwise), 0.90, log),
        ("Llama 3 8B, tensorwise", step(llama, tensorwise), 1.25, table),
        ("Llama 3 8B, rowwise", step(llama, rowwise), 1.10, table),
    )))


def claims_table() -> str:
    """The rows of docs/advise.md. tests/test_advise.py holds the page to them."""
    return "".join(f"| {row.name} | {row.measured:.2f} | {row.formula:.2f} | {row.where} |\n"
                   for row in claims())
