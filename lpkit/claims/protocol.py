"""The file of a claim: everything that could be chosen after the fact, said before the first run.

    base: cpu-3m                        a preset or a config file
    settings: {model.layers: 2}         over it, for all arms
    arms: {adamw: {optimizer: adamw}, lion: {optimizer: lion}}      the first is the one to beat
    differ: [optimizer]                 the only settings that arms may differ in
    target: val_loss
    effect: 0.02                        the smallest gain of interest, a share of the target
    budget: {steps: 60}                 or {flops: 1e12}: each arm its own steps
    seeds: 12                           of each arm, at most
    tuning: {optimizer.lr: [3e-4, 1e-3], optimizer.weight_decay: [0, 0.1]}
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from lpkit.claims import referee
from lpkit.config import Config, flat
from lpkit.errors import ConfigError, named, pick, shown
from lpkit.plain_yaml import read_yaml
from lpkit.predict.flops import training_flops_per_token
from lpkit.presets import resolve
from lpkit.values import Checked, Count, InnerShare, Positive, Text, between, convert, positive

TARGETS = {"val_loss": "nats per token of the validation text, as `Training.evaluate` has it"}
NEEDED = {"arms": "two or more by name, each a mapping of settings",
          "differ": "the settings that arms may differ in", "target": ", ".join(TARGETS),
          "effect": "the smallest gain of interest, such as 0.01",
          "budget": "{steps: 300} or {flops: 1e13}", "seeds": "of each arm, at most",
          "tuning": "values of each tuned setting, the same for all arms"}
TUNED = ("optimizer.lr", "optimizer.weight_decay")      # at least
DECIDED = {"seed": "seeds", "steps": "budget"}          # settings, and the key that decides them
SAME_TEXT = ("data.source", "data.tokenizer", "data.val_fraction", "model.context", "model.vocab")
MOST_RUNS = 2000
TUNING_SEED, AGAIN_SEED = 1_000_000, 2_000_000          # the comparison has those from 0


@dataclass(frozen=True, kw_only=True)
class Claim(Checked):
    """A claim as its file says it. Raises ConfigError for one that cannot be settled."""

    base: Text = "cpu-3m"
    settings: Mapping = field(default_factory=dict)
    arms: Mapping
    differ: tuple[str, ...]
    target: Text
    effect: InnerShare
    budget: Mapping
    seeds: Annotated[int, between(referee.LEAST, 1000)]
    tuning: Mapping
    tuning_seeds: Count = 1
    pilot: Annotated[int, between(referee.LEAST, 100)] = 5      # runs of the first arm, for sigma
    sigma: Positive | None = None       # a share of the target, known from before: no pilot
    looks: Annotated[int, between(1, 5)] = 2

    def __post_init__(self):
        super().__post_init__()
        pick(TARGETS, self.target, "target")
        self._check_arms()
        self._check_tuning()
        if self.sigma is not None:
            self.seeds_to_see(self.sigma)

    def _check_arms(self) -> None:
        if len(self.arms) < 2:
            raise ConfigError(f"arms needs two or more, got {', '.join(self.arms) or 'none'}; to "
                              f"hold an arm against itself, use --null")
        for name, given in {"settings": self.settings, **self.arms}.items():
            if not isinstance(given, Mapping):
                raise ConfigError(f"{shown(name)} must be a mapping of settings, got "
                                  f"{shown(given)}")
            if wrong := [key for key in given if key in DECIDED]:
                raise ConfigError(f"{shown(name)} sets {wrong[0]}, which {DECIDED[wrong[0]]} of "
                                  f"the claim decides; leave it out there")
        configs = {name: flat(self.config(name)) for name in self.arms}
        first, *others = configs
        for key in self.differ:
            if not any(_below(one, [key]) for one in configs[first]):
                pick(configs[first], key, "setting (in differ)")
        for name in others:
            ours, theirs = configs[first], configs[name]
            other = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
            if not other:
                raise ConfigError(f"{first} and {name} have the same settings; let them differ in "
                                  f"{', '.join(self.differ)}, or hold an arm against itself with "
                                  f"--null")
            for key in other:
                if not _below(key, [*self.differ, *self.tuning, *self._budgeted]):
                    raise ConfigError(f"{first} and {name} differ in {key} ({shown(ours.get(key))} "
                                      f"and {shown(theirs.get(key))}), which was not declared; "
                                      f"make it the same, or add it to differ")
                if key in SAME_TEXT:
                    raise ConfigError(f"{first} and {name} differ in {key}, so their {self.target} "
                                      f"is of other text; make it the same")
            if len({_evaluated(self.config(arm)) for arm in (first, name)}) > 1:
                raise ConfigError(f"{first} and {name} evaluate on other amounts of text; set "
                                  f"eval_batches so that eval_batches * global_batch / "
                                  f"grad_accum_steps is the same")

    def _check_tuning(self) -> None:
        for key in TUNED:
            if key not in self.tuning:
                raise ConfigError(f"tuning lacks {key}; give the values that every arm tries, or "
                                  f"the arm that came tuned wins")
        for key, values in self.tuning.items():
            if not isinstance(values, list) or not values or key in DECIDED:
                raise ConfigError(f"tuning.{key} must be a list of values of a setting that is "
                                  f"tuned, got {shown(values)}")
        runs = len(self.arms) * (self.points * self.tuning_seeds + self.seeds)
        if runs > MOST_RUNS:
            raise ConfigError(f"the claim asks for up to {runs:,} runs, and {MOST_RUNS:,} are the "
                              f"most; give fewer values, seeds or arms")
        for arm in self.arms:
            list(self.grid(arm))        # an arm may lack a setting, or refuse a value

    @property
    def points(self) -> int:
        return math.prod(map(len, self.tuning.values()))

    @property
    def _budgeted(self) -> tuple[str, ...]:
        return ("steps",) if "flops" in self.budget else ()

    @property
    def comparisons(self) -> int:
        return len(self.arms) - 1

    def config(self, arm: str, changes: Mapping[str, Any] | None = None) -> Config:
        """An arm with its budget, of seed 0. Threads change the order of sums: by default, one."""
        config = resolve(self.base).replace(dict(self.settings)).replace(
            self.arms[arm] | dict(changes or {}))
        if config.system.threads is None:
            config = config.replace({"system.threads": 1})
        kind, amount = next(iter(self.budget.items()), ("", None))
        if kind not in ("steps", "flops") or len(self.budget) > 1:
            raise ConfigError(f"budget must be {NEEDED['budget']}, got {shown(dict(self.budget))}")
        if kind == "flops":
            if config.sizes.name != "constant":
                raise ConfigError(f"a budget of flops needs updates of one size, and sizes is "
                                  f"{config.sizes.name}; give steps")
            each = training_flops_per_token(config.model) * config.tokens_per_step
            positive("budget.flops", total := convert(amount, float, "budget.flops"))
            amount = int(total / each)
            if amount < 1:
                raise ConfigError(f"budget.flops={shown(self.budget['flops'])} is less than a step of "
                                  f"{arm}, which has {each:.2e}; give more")
        return config.replace({"steps": amount, "seed": 0})

    def grid(self, arm: str) -> Iterator[tuple[dict[str, Any], Config]]:
        """Every point of the tuning grid, and the arm there."""
        for values in itertools.product(*self.tuning.values()):
            point = dict(zip(self.tuning, values))
            yield point, self.config(arm, point)

    def level(self) -> float:
        """Of the last look, which is the one that must see the effect."""
        return referee.levels(self.looks, self.comparisons)[-1]

    def seeds_to_see(self, sigma: float, pilot_df: int | None = None) -> int:
        """Seeds an arm that see the effect. `sigma`: of one arm's target, a share of it; pairs are
        taken to share nothing. Raises ConfigError where the budget has not as many."""
        given = (math.sqrt(2) * sigma, self.level(), pilot_df)
        n = referee.needed(self.effect, *given)
        if n > self.seeds:
            raise ConfigError(
                f"{self.seeds} seeds an arm cannot see an effect of {self.effect:.2%} at sigma "
                f"{sigma:.2%}: they see {referee.visible(self.seeds, *given):.2%} with a power of "
                f"{referee.POWER:.0%}; give seeds: {n}, or a larger effect")
        return n


def _below(key: str, declared: list[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in declared)


def _evaluated(config: Config) -> int:
    """Sequences of an evaluation."""
    return config.eval_batches * (config.global_batch // config.grad_accum_steps)


def read(path: Path) -> Claim:
    """The claim in a YAML file. Raises ConfigError, in one sentence, before anything runs."""
    values = read_yaml(path)
    known = {f.name for f in fields(Claim)}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{named(path)} must be a mapping of {', '.join(sorted(known))}, got "
                          f"{shown(values)}")
    for key in values:
        pick(dict.fromkeys(known), key, "key of a claim")
    for key, what in NEEDED.items():
        if values.get(key) is None:
            raise ConfigError(f"{named(path)} says no {key}; give {key}: {what}")
    return Claim(**values)
