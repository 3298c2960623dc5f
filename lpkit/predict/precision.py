"""What low precision buys in a training step: the step priced twice, with casts and in 16 bits.

Everything that a recipe leaves alone costs the same in both, so the gain of the step is that of its
Linears under Amdahl's law (1967, https://doi.org/10.1145/1465482.1465560). What a machine reaches
of its datasheet is an `Efficiency`; records in data/measured replace it (`lpkit.studies.advice`).
What nobody reached is not taken off here: both sides would lose it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lpkit.config import Config
from lpkit.predict import evidence
from lpkit.predict.casts import LinearCost, Recipe, linear_cost
from lpkit.predict.flops import Product
from lpkit.predict.recipes import BF16, FP32, PRECISIONS
from lpkit.predict.roofline import Efficiency
from lpkit.predict.time import StepTime, rank_products, step_time
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One update on one device under one recipe, beside the same in 16 bits."""

    recipe: str
    base: StepTime
    cast: StepTime
    linears: tuple[LinearCost, ...]         # those that the recipe casts
    touched_seconds: float                  # of the 16-bit step, what the recipe casts
    bytes: Mapping[str, float]              # more than in 16 bits (or fewer), after forward

    @property
    def base_step_seconds(self) -> float:
        return self.base.step_seconds

    @property
    def step_seconds(self) -> float:
        return self.cast.step_seconds

    @property
    def rest_seconds(self) -> dict[str, float]:
        """Rows of the step that the recipe leaves alone."""
        names = {one.name for one in self.linears}
        return {row.name: row.seconds for row in self.cast.rows if row.name not in names}

    @property
    def share(self) -> float:
        """Of the 16-bit step, what the recipe casts: Amdahl's p."""
        return self.touched_seconds / self.base_step_seconds

    @property
    def linear_speedup(self) -> float:
        """Amdahl's s."""
        if not self.linears:
            return 1.0
        saved = self.base_step_seconds - self.step_seconds
        return self.touched_seconds / (self.touched_seconds - saved)

    @property
    def speedup(self) -> float:
        return amdahl(self.share, self.linear_speedup)

    @property
    def more_bytes(self) -> float:
        return sum(self.bytes.values())


def amdahl(share: float, speedup: float) -> float:
    """Of the whole, when `share` of its time gets `speedup` times faster."""
    return 1 / (1 - share + share / speedup)


def step_cost(config: Config, recipe: Recipe, machine: Machine,
              efficiency: Efficiency | None = None, *, base: str = "bf16") -> StepCost:
    """One update on one `machine`. Raises ConfigError when it lacks the recipe's dtype."""
    how = {"precision": base, "efficiency": efficiency or evidence.efficiency(machine)}
    plain = step_time(config, machine, Layout(), **how)
    cast = step_time(config, machine, Layout(), recipe=recipe, **how)
    costs, touched, seconds = [], {}, 0.0
    for p in rank_products(config.model, Layout(), plain.sequences) if recipe.casts else ():
        calls = p.calls - recipe.kept.get(p.name, 0)
        if p.pairs or not calls:
            continue
        touched[p] = calls
        seconds += plain[p.name].seconds * calls / p.calls
        costs.append(linear_cost(
            p, recipe, machine, plain.efficiency, base=base,
            itemsize=PRECISIONS[base].compute_bytes, calls=calls * plain.micro_batches))
    return StepCost(recipe=recipe.name, base=plain, cast=cast, linears=tuple(costs),
                    touched_seconds=seconds, bytes=memory_change(recipe, touched))


def memory_change(recipe: Recipe, linears: Mapping[Product, int]) -> dict[str, float]:
    """Bytes at the end of a micro-batch's forward, against 16 bits: what `ScaledLinear` saves for
    its backward is cast. Master weights, gradients and optimizer states stay as they were."""
    rows = {"activations kept": 0.0, "weight copies": 0.0, "scales": 0.0, "amax histories": 0.0}
    kept = (("activations kept", recipe.operand("x", "dw")),
            ("weight copies", recipe.operand("w", "dx")))
    for p, calls in linears.items():
        for (row, operand), size in zip(kept, (p.M, p.N)):
            if operand is not None:
                rows[row] += calls * size * p.K * (operand.bits / 8 - BF16)
                rows["scales"] += calls * operand.all_scales(p.K, size)
        if recipe.history:
            rows["amax histories"] += calls * 3 * (1 + recipe.history) * FP32
    return rows


def emulated(recipe: Recipe, *, dtype: str, bits: float, folded: bool = False) -> Recipe:
    """The same casts, as values of a wider dtype and multiplied in it. `folded`: with scales."""
    changes = {"bits": bits, **({"scale_bytes": 0} if folded else {})}
    casts = {name: tuple(replace(operand, **changes) for operand in pair)
             for name, pair in recipe.casts.items()}
    return replace(recipe, dtype=dtype, casts=casts, result_bytes=BF16, product_share=1.0,
                   cast_factor=1.0)
