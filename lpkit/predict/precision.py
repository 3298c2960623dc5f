"""What low precision buys in a training step: the step and its peak twice, with casts and without.

Both sides are what `lpkit.predict.predict` says of them. Everything that a recipe leaves alone
costs the same in both, so a share `p` of the step that gets `s` times as fast makes it
`1 / (1 - p + p / s)` times as fast (Amdahl 1967, https://doi.org/10.1145/1465482.1465560).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lpkit.config import Config
from lpkit.predict.casts import LinearCost, Recipe, linear_cost
from lpkit.predict.ledger import Memory
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.time import StepTime, rank_products


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One update under one recipe, beside the same in another dtype."""

    base: StepTime
    cast: StepTime
    linears: tuple[LinearCost, ...]         # those that the recipe casts
    touched_seconds: float                  # of the base's step, what the recipe casts,
    cast_seconds: float                     # and what that takes under the recipe
    bytes: Mapping[str, float] = field(default_factory=dict)    # more at the peak, or fewer, by row

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
        """The share of the base's step that the recipe casts: Amdahl's p."""
        return self.touched_seconds / self.base_step_seconds

    @property
    def linear_speedup(self) -> float:
        """Amdahl's s."""
        return self.touched_seconds / self.cast_seconds if self.linears else 1.0

    @property
    def speedup(self) -> float:
        return self.base_step_seconds / self.step_seconds

    @property
    def more_bytes(self) -> float:
        """The bytes by which the peak is higher under the recipe."""
        return sum(self.bytes.values())


def compared(plain: StepTime, cast: StepTime, config: Config, recipe: Recipe) -> StepCost:
    """`recipe`: the casts of the second step."""
    costs, touched, under = [], 0.0, 0.0
    for p in rank_products(config.model, plain.layout, plain.sequences) if recipe.casts else ():
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


def more_at_peak(held: Memory, base: Memory) -> dict[str, float]:
    """Bytes by row, each at its own peak: their sum is the difference of both peaks."""
    rows, others = held.at(held.peak_moment), base.at(base.peak_moment)
    return {name: rows.get(name, 0.0) - others.get(name, 0.0) for name in {**rows, **others}}
