"""The YAML file of a claim. It fixes every choice of the comparison before the first run, so that
no choice can depend on the results. docs/claim.md documents every key."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from lpkit.claims import referee
from lpkit.config import Config, flat
from lpkit.errors import ConfigError, named, pick, shown
from lpkit.plain_yaml import read_yaml
from lpkit.predict.flops import training_flops
from lpkit.predict.governed import governed
from lpkit.predict.params import optimizer_work, parameter_count
from lpkit.presets import resolve
from lpkit.techniques import outside
from lpkit.techniques.data import POLICIES, evaluating
from lpkit.values import Checked, Count, InnerShare, Positive, Text, between, convert, positive

# required key -> what its value must be, for messages
NEEDED = {"arms": "two or more names, each with a mapping of settings",
          "differ": "the settings that arms may differ in", "target": "val_loss",
          "effect": "the smallest gain of interest, such as 0.01 for 1%",
          "budget": "{steps: 300}, {flops: 1e13}, {seconds: 30} or {joules: 500}",
          "seeds": "the most seeds per arm, such as 10",
          "tuning": "a list of values for each tuned setting, which every arm tries"}
TUNED = ("optimizer.lr", "optimizer.weight_decay")      # settings that every claim must tune
DECIDED = {"seed": "seeds", "steps": "budget"}          # setting -> the claim's key that decides it
BUDGETS = ("steps", "flops", "seconds", "joules")
# budgets for which no formula gives the cost of a step, so short runs measure it
METERED = ("seconds", "joules")
METERED_STEPS = 20                  # steps of a run that measures the cost of a step


@dataclass(frozen=True, kw_only=True)
class Made(Checked):
    """Base class of a claim and a sweep: the executor that makes the runs (`executors`). It does
    not change results."""

    executor: Literal["workers", "submitit", "ray"] = "workers"
    job: Mapping = field(default_factory=dict)      # the executor's arguments for each run


@dataclass(frozen=True, kw_only=True)
class Claim(Made):
    """The contents of a claim's file. Raises ConfigError for a claim that no test can decide."""

    base: Text = "cpu-3m"               # a preset or a config file
    settings: Mapping = field(default_factory=dict)     # changes of `base`, for all arms
    arms: Mapping                       # name -> settings; the first arm is the baseline
    differ: tuple[str, ...]             # settings in which arms may differ
    target: Text                        # val_loss, as `Training.evaluate` returns it
    effect: InnerShare                  # the smallest gain of interest, as a share of the target
    budget: Mapping                     # what a run may cost: one of BUDGETS -> number
    seeds: Annotated[int, between(referee.LEAST, 1000)]     # most seeds per arm
    tuning: Mapping                     # setting -> list of values; every arm tries all points
    tuning_seeds: Count = 1             # runs per point and arm
    # number of runs of the first arm that measure sigma
    pilot: Annotated[int, between(referee.LEAST, 100)] = 5
    # standard deviation of the target over seeds, as a share of the target, known from earlier
    # runs; None: the pilot measures it
    sigma: Positive | None = None
    looks: Annotated[int, between(1, 5)] = 2    # how often the test looks at the losses so far

    def __post_init__(self):
        super().__post_init__()
        pick({"val_loss": None}, self.target, "target")
        self._check_shape()
        first, *others = self.arms
        ours = flat(self.config(first))
        for key in self.differ:
            if not any(_below(setting, [key]) for arm in self.arms
                       for setting in flat(self.config(arm))):
                pick(ours, key, "setting")
        for other in others:
            self._check_pair(first, other, ours, flat(self.config(other)))
        for arm, point in itertools.product(self.arms, ({}, *self.points)):
            if keys := other_text(self.config(first), self.config(arm, point)):
                raise ConfigError(f"{first} and {arm}{f' with {point}' * bool(point)} are "
                                  f"evaluated on other text, so their losses do not compare; "
                                  f"make {keys} the same")
        if self.sigma is not None:
            self.seeds_to_see(self.sigma)

    def _check_shape(self) -> None:
        """Raise ConfigError for arms, settings or tuning of a wrong type."""
        if len(self.arms) < 2:
            raise ConfigError(f"arms must be {NEEDED['arms']}, got {', '.join(self.arms)}; --null "
                              f"compares an arm with itself")
        for name, given in {"settings": self.settings, **self.arms}.items():
            if not isinstance(given, Mapping):
                raise ConfigError(f"{name} must be a mapping of settings, got {shown(given)}")
            for key in DECIDED.keys() & given.keys():
                raise ConfigError(f"{name} sets {key}, which the claim's {DECIDED[key]} decides; "
                                  f"leave it out")
        for key in {*TUNED, *self.tuning}:
            values = self.tuning.get(key)
            if not isinstance(values, list) or not values or key in DECIDED:
                raise ConfigError(f"tuning.{key} must be a list of values, got {shown(values)}; "
                                  f"all arms must be tuned alike, because tuning alone can win")

    def _check_pair(self, first: str, other: str, ours: Mapping, theirs: Mapping) -> None:
        """Raise ConfigError if two arms do not differ, or differ in a setting that was not
        declared. ours, theirs: the flat settings of both arms."""
        differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)
                     and key != "imports"]      # imports follow from the rows that an arm names
        if not differing:
            raise ConfigError(f"{first} and {other} have the same settings; let them differ, or "
                              f"compare an arm with itself by --null")
        may = [*self.differ, *self.tuning, *(["steps"] if "steps" not in self.budget else [])]
        for key in differing:
            if not _below(key, may):
                raise ConfigError(f"{first} and {other} differ in {key} ({shown(ours.get(key))} "
                                  f"and {shown(theirs.get(key))}), which was not declared; give "
                                  f"both the same value, or add {key} to differ")

    @property
    def level(self) -> float:
        """Returns the share of the error rate that the last look may spend. Plans assume that only
        the last look detects a difference."""
        return referee.levels(self.looks, len(self.arms) - 1)[-1]

    def config(self, arm: str, point: Mapping[str, Any] | None = None,
               cost: float | None = None) -> Config:
        """Returns the Config of a run: the settings of `arm`, changed by `point` of the tuning
        grid, seed 0, and as many steps as the budget pays for. It has one thread (unless the file
        says otherwise), because other numbers of threads add in other orders.

        `cost`: the measured seconds or joules of a step; None: the Config gets METERED_STEPS steps,
        for a run that measures the cost. Not used for budgets in steps or FLOPs."""
        config = resolve(self.base).replace(self.settings).replace(self.arms[arm] | (point or {}))
        config = config.replace({"seed": 0, "system.threads": config.system.threads or 1})
        kind = next(iter(self.budget), "")
        if len(self.budget) != 1 or kind not in BUDGETS:
            raise ConfigError(f"budget must be {NEEDED['budget']}, got {shown(self.budget)}")
        if kind == "steps":
            return config.replace(self.budget)
        if kind == "joules" and (self.executor != "workers" or config.parallel.devices > 1):
            raise ConfigError("budget.joules needs an energy counter that counts one run only; "
                              "give executor: workers and one rank, or a budget in steps")
        positive(f"budget.{kind}", budget := convert(self.budget[kind], float, f"budget.{kind}"))
        cost = step_flops(config) if kind == "flops" else cost
        if config.sizes.name != "constant" or (cost and budget < cost):
            each = f" ({cost:.3g} {kind})" if cost else ""
            raise ConfigError(f"budget.{kind}={budget:g} must be at least the cost of one "
                              f"step of {arm}{each}, and the config's `sizes` must be constant; "
                              f"raise the budget and set sizes=constant, or give budget: "
                              f"{{steps: 300}}")
        return config.replace({"steps": int(budget / cost) if cost else METERED_STEPS})

    def metering(self, arm: str, point: Mapping[str, Any]) -> Config:
        """Returns the Config of the run that measures the cost of a step of `arm` at this point of
        the tuning grid. Learning rate and weight decay do not change the cost, so they keep the
        arm's values, and one run measures for all of their values."""
        return self.config(arm, {key: point[key] for key in point if key not in TUNED})

    @property
    def points(self) -> list[dict[str, Any]]:
        """Returns the points of the tuning grid, each as {setting: value}."""
        return [dict(zip(self.tuning, values))
                for values in itertools.product(*self.tuning.values())]

    def sees(self, n: int, sigma: float, pilot_df: int | None = None) -> float:
        """Returns the smallest gain that n seeds per arm detect with probability POWER.

        sigma:    standard deviation of one arm's target over seeds, as a share of the target
        pilot_df: degrees of freedom of the pilot that measured sigma; None: sigma is known

        Assumes that the two runs of a pair are uncorrelated, so a pair's gain has the standard
        deviation sqrt(2) sigma. A positive correlation makes the test more sensitive."""
        return referee.visible(n, math.sqrt(2) * sigma, self.level, pilot_df)

    def seeds_to_see(self, sigma: float, pilot_df: int | None = None) -> int:
        """Returns the number of seeds per arm that detect `effect`; arguments as for `sees`. Raises
        ConfigError if it is more than `seeds`."""
        n = referee.needed(self.effect, math.sqrt(2) * sigma, self.level, pilot_df)
        if n > self.seeds:
            raise ConfigError(
                f"{self.seeds} seeds per arm cannot detect an effect of {self.effect:.2%} if sigma "
                f"is {sigma:.2%}: with probability {referee.POWER:.0%} they detect "
                f"{self.sees(self.seeds, sigma, pilot_df):.2%}; give seeds: {n}, or a larger "
                f"effect")
        return n


def _below(key: str, declared: list[str]) -> bool:
    """Return True if `key` is a declared setting or belongs to a declared group: model.width
    belongs to model."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in declared)


def step_flops(config: Config) -> float:
    """Returns the FLOPs of the matmuls of one update: of the model, and of the optimizer if it
    multiplies matrices, such as Muon (`techniques.optimizers`)."""
    work = optimizer_work(config)
    return (training_flops(governed(config).model, batch=config.global_batch)
            + (work.flops * parameter_count(config.model) if work.flops else 0))


# Settings that decide which tokens an evaluation reads, and what a token is -> the value of the
# setting in a Config. Losses of two runs compare only if all these values are equal.
EVALUATED = {
    "data.source": lambda c: c.data.source, "data.tokenizer": lambda c: c.data.tokenizer,
    "data.val_fraction": lambda c: c.data.val_fraction,
    "data.special_tokens": lambda c: c.data.special_tokens,
    "data.policy": lambda c: evaluating(c.data.policy),
    "model.context": lambda c: c.model.context,
    # bpe learns this many entries
    "model.vocab": lambda c: c.data.tokenizer == "bpe" and c.model.vocab,
    "eval_batches * global_batch": lambda c: c.eval_batches * c.global_batch,
    "seed": lambda c: POLICIES[evaluating(c.data.policy).name].seeded and c.seed,
}


def other_text(a: Config, b: Config) -> str:
    """Returns the names of the settings that make two runs evaluate different text, joined by
    "and"; empty if their losses compare."""
    return " and ".join(key for key, of in EVALUATED.items() if of(a) != of(b))


def _modules(value: Any, named: bool = False) -> list[str]:
    """Returns the module names under all keys `imports` in nested values. `named`: `value` itself
    is under such a key."""
    if isinstance(value, Mapping):
        return [module for key, inner in value.items()
                for module in _modules(inner, named or key == "imports")]
    if isinstance(value, list):
        return [module for inner in value for module in _modules(inner, named)]
    return [str(value)] * named


def read(path: Path, kind: type = Claim, needed: Mapping[str, str] = NEEDED,
         executor: str | None = None) -> Any:
    """Reads a claim, or a sweep, from a YAML file. Raises ConfigError before the first run.

    kind:     the class of the file's contents
    needed:   its required keys, as NEEDED
    executor: replaces the executor of the file; None: keep it
    """
    values, known = read_yaml(path), {f.name: f for f in fields(kind)}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{named(path)} must be a mapping, got {shown(values)}")
    for key in values:
        pick(known, key, f"key of a {kind.__name__.lower()}")
    outside.refuse_unknown(_modules(values))
    for key, what in needed.items():
        if values.get(key) in (None, {}):
            raise ConfigError(f"{named(path)} has no {key}; give {key}: {what}")
    return kind(**values | ({"executor": executor} if executor else {}))
