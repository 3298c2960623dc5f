"""A fault that somebody hid: which one, and in which layer, only the seed knows.

    case = Case.open(Starts(config, steps=200), "unknown", seed=0)
    well, ill = case.run(20, faulty=False), case.run(20, every=4)       # losses, and telemetry
    print(bisect(case.starts, case.injection))
    cured = case.run(20, cured=True)
    print(case.recovered(well, ill, cured))
"""

import random
import statistics
from dataclasses import dataclass

from lpkit.errors import pick
from lpkit.measure.telemetry import Sample, Telemetry
from lpkit.precision.linear import scaled_linears
from lpkit.predict.compare import TIED
from lpkit.studies import faults
from lpkit.studies.bisect import Starts, bounded, train
from lpkit.studies.faults import FAULTS, Fault, Injection

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Run:
    losses: list[float]         # nats per token, of each step; NaN where it broke
    samples: list[Sample]


@dataclass(frozen=True, kw_only=True)
class Case:
    starts: Starts
    injection: Injection

    @classmethod
    def open(cls, starts: Starts, fault: str, seed: int) -> "Case":
        """`fault` in one low-precision Linear; "unknown": one of those that a tiny model's loss
        shows. Raises ConfigError for an unknown name."""
        draw = random.Random(seed)
        name = draw.choice([name for name, row in FAULTS.items() if not row.unseen])
        if fault != UNKNOWN:
            name = fault
        recipe = pick(FAULTS, name, "fault").recipe
        layers = [layer.name for layer in scaled_linears(starts.build(recipe).model)]
        return cls(starts=starts, injection=Injection(fault=name, layers=(draw.choice(layers),)))

    @property
    def fault(self) -> Fault:
        return FAULTS[self.injection.fault]

    @property
    def layer(self) -> str:
        return self.injection.layers[0]

    @property
    def answers(self) -> list[str]:
        """What is right to say, as "fault in layer". TIED is where nobody could tell."""
        faults = [self.injection.fault] + [TIED] * bool(self.fault.unseen)
        return [f"{fault} in {self.layer}" for fault in faults]

    def run(self, steps: int, *, faulty: bool = True, cured: bool = False, every: int = 0) -> Run:
        """The same steps on the same batches: with the fault or without, under its cure or not.
        Telemetry every so many steps, from its first on; 0: none."""
        training = self.starts.under(self.fault.recipe)
        if faulty:
            faults.inject(training.model, self.injection)
        if cured:
            faults.cure(training.model, self.injection)
        first = self.starts.steps
        seen = Telemetry(model=training.model, every=every or 1)
        if every:   # the first step always: after it a NaN is everywhere
            training.watchers.append(lambda step: seen.watch(step - first))
        return Run(losses=train(training, first, first + steps), samples=seen.samples)

    def recovered(self, well: Run, ill: Run, cured: Run) -> float:
        """The share of the lost loss that the cure brings back."""
        without, with_it, after = map(self._mean, (well, ill, cured))
        return (with_it - after) / (with_it - without)

    def outcome(self, well: Run, ill: Run, cured: Run) -> str:
        """The same in words."""
        row, cost = self.fault, self._mean(ill) - self._mean(well)
        if row.unseen:
            return (f"{self.injection.fault} costs {cost:+.1g} nats per token here, which is "
                    f"chance: {row.unseen}. There is nothing that a cure could bring back.")
        return (f"{self.injection.fault} costs {cost:.3f} nats per token. With {self.layer} in "
                f"{row.cure}, {self.recovered(well, ill, cured):.0%} of that comes back: "
                f"{row.remedy}.")

    def _mean(self, run: Run) -> float:
        """Nats per token. A run that breaks knows nothing."""
        return statistics.fmean(bounded(run.losses, self.starts.config.model.vocab))
