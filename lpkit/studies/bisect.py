"""Which layer and product lose the loss: promote halves to 16 bits and keep the half that brings it
back.

    starts = Starts(config, steps=200)
    print(bisect(starts, "nvfp4"))                                              # a recipe
    print(bisect(starts, Injection(fault="stale-amax", layers=("blocks.1.mlp.up",))))

A fresh model's loss hardly depends on its layers, so each seed is first trained for a while in
fp32. All runs continue from there, on the same batches, and differ in what is promoted to 16 bits
alone. A run that breaks counts as one that knows nothing. Deterministic.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from lpkit.config import Config
from lpkit.errors import ConfigError, pick
from lpkit.studies import faults
from lpkit.studies.faults import FAULTS, Injection, Unit, layers_of, low_precision_products, named
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import Training

# Student's t, 97.5%, for 2 seeds, 3, ...: so many standard errors from a mean, chance is ruled out.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)
CLEAR = 4.0     # a gap of fewer noises is none
MORE = 3        # times as many seeds as were asked for: the most that are drawn
NUDGES = (torch.bfloat16, torch.float16)        # of a start: two such runs drift as runs do

Units = tuple[Unit, ...]
# of a short run: what is promoted, number of the seed and of the nudge
Loss = Callable[[Units, int, int], float]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Short runs with some products in 16 bits: means over seeds."""

    promoted: Units
    recovery: float             # 0: as bad as with nothing promoted; 1: as good as with everything
    error: float                # of the recovery: half of its 95% interval

    @property
    def kept(self) -> bool:
        """It brings back more than half, beyond chance."""
        return self.recovery - self.error > 0.5

    @property
    def dropped(self) -> bool:
        """It brings back less than half, beyond chance."""
        return self.recovery + self.error < 0.5

    def __str__(self) -> str:
        return f"{self.recovery:.0%} (+-{self.error:.0%})"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Where it is, and how sure that is."""

    suspect: str
    culprits: Units                 # the smallest set that halving reaches, or cannot divide
    gap: float                      # nats per token that low precision costs, mean over seeds
    noise: float                    # nats per token between runs that start one rounding apart
    alone: Trial                    # promoting the culprits alone
    rest: Trial                     # promoting everything else
    seeds: int
    runs: int
    path: tuple[Trial, ...]

    @property
    def effect(self) -> float:
        """The gap in units of the noise."""
        if self.noise:
            return self.gap / self.noise
        return math.copysign(math.inf, self.gap) if self.gap else 0.0

    @property
    def certainty(self) -> str:
        """low: no gap beyond noise, or seeds that do not agree on one layer and no other."""
        layers = len(layers_of(self.culprits))
        if self.effect < CLEAR or layers > 1 or not self.alone.kept or not self.rest.dropped:
            return "low"
        sure = self.effect > 2 * CLEAR and self.alone.recovery > 0.8 and self.rest.recovery < 0.2
        return "high" if sure else "medium"

    def __str__(self) -> str:
        cost = (f"{self.suspect} costs {self.gap:.3f} nats per token, {self.effect:.1f} times the "
                f"noise between runs ({self.noise:.1g})")
        after = f"certainty {self.certainty}, {self.runs} runs of {self.seeds} seeds"
        if self.effect < CLEAR:
            return f"Nothing to find: {cost}; {after}."
        back = f"brings back {self.alone} of that, promoting everything else {self.rest}"
        if self.certainty != "low":
            return f"{named(self.culprits)}: {cost}; promoting it {back}; {after}."
        first, *others = layers_of(self.culprits)
        where = f"{1 + len(others)} layers, {first} to {others[-1]}" if others else first
        return f"Cannot tell: {cost}; promoting {where} {back}; {after}."


def search(suspect: str, all_units: Sequence[Unit], loss: Loss, *, seeds: int = 3) -> Finding:
    """Promote halves and keep the half that brings the loss back: of the layers, then of products.

    `loss(promoted, seed, nudge)`: nudge 0 starts from the weights themselves, n from a copy that is
    rounded to NUDGES[n - 1]. Runs are compared seed by seed. While chance may have decided on a
    layer, another seed is drawn, up to MORE * seeds. A set whose halves still cannot be told apart
    is the answer; so are products of one layer that the seeds drawn so far do not tell apart.
    With k seeds drawn, at most k * (5 + 2 log2(layers) + 4) runs; 4 * seeds where nothing is lost.
    Raises ConfigError for no seeds.
    """
    if seeds < 1:
        raise ConfigError(f"a search needs at least 1 seed, got {seeds}")
    everything, most = tuple(all_units), MORE * seeds
    runs = _Runs(loss, everything, seeds)
    drift = runs.gained(everything, everything, nudge=1) + runs.gained((), (), nudge=2)
    runs.noise = math.sqrt(statistics.fmean(d * d for d in drift))
    culprits, others, path = everything, (), []
    if runs.gap > max(0.0, CLEAR * runs.noise):
        while len(culprits) > 1:
            several = len(layers_of(culprits)) > 1
            path += runs.judged(_halves(culprits), most if several else runs.drawn)
            if not path[-1].kept:
                break       # it takes both, or chance decides
            culprits = path[-1].promoted
        others = tuple(unit for unit in everything if unit not in culprits)
        path += runs.judged([others], most)
    return Finding(suspect=suspect, culprits=culprits, gap=runs.gap, noise=runs.noise,
                   alone=runs.trial(culprits), rest=runs.trial(others), seeds=runs.drawn,
                   runs=runs.loss.cache_info().currsize, path=tuple(path))


class _Runs:
    """The runs of one search, each made once, and what they say about sets of products."""

    def __init__(self, loss: Loss, everything: Units, drawn: int):
        self.loss, self.everything, self.drawn = functools.cache(loss), everything, drawn
        self.noise = 0.0

    def gained(self, worse: Units, better: Units, nudge: int = 0) -> list[float]:
        """Nats per token, seed by seed. `nudge`: of the worse."""
        return [self.loss(worse, seed, nudge) - self.loss(better, seed, 0)
                for seed in range(self.drawn)]

    @property
    def gap(self) -> float:
        return statistics.fmean(self.gained((), self.everything))

    def trial(self, promoted: Units) -> Trial:
        """Recovery is a ratio of two means; its error is half of the 95% interval of what the ratio
        leaves over. Differences spread at least as nudged runs do."""
        gaps, back = self.gained((), self.everything), self.gained((), promoted)
        if not sum(gaps):
            return Trial(promoted=promoted, recovery=math.nan, error=math.nan)
        recovery, error = sum(back) / sum(gaps), math.inf
        if self.drawn > 1:
            left = [b - recovery * gap for b, gap in zip(back, gaps)]
            spread = max(statistics.stdev(left), math.sqrt(2) * self.noise)
            student = STUDENT[min(self.drawn - 2, len(STUDENT) - 1)]
            error = student * spread / math.sqrt(self.drawn)
        return Trial(promoted=promoted, recovery=recovery, error=error / abs(self.gap))

    def judged(self, sets: Sequence[Units], most: int) -> list[Trial]:
        """Trials of the sets, up to the first that is kept; more seeds while chance decides."""
        while True:
            trials = []
            for promoted in sets:
                trials.append(self.trial(promoted))
                if trials[-1].kept:
                    return trials
            if self.drawn >= most or all(trial.dropped for trial in trials):
                return trials
            self.drawn += 1


def _halves(which: Units) -> tuple[Units, Units]:
    """A layer is not cut while there are several."""
    layers = layers_of(which)
    if len(layers) > 1:
        first = layers[:len(layers) // 2]
        cut = sum(layer in first for layer, _ in which)
    else:
        cut = len(which) // 2
    return which[:cut], which[cut:]


# On real runs.

class Starts:
    """Models that were trained in fp32 for `steps` steps, one a seed, each when it is first asked
    for; runs under any recipe begin there."""

    def __init__(self, config: Config, *, steps: int):
        self.steps = steps
        self.config = config.replace({"precision.backend": "auto", "schedule": "constant",
                                      "system.compile": False,
                                      # a copy of a training has no hooks, streams and files
                                      "memory.activation_offload": "device",
                                      "memory.optimizer_state": "device",
                                      "memory.optimizer_step": "after"})
        self.trained, self._under = functools.cache(self._train), functools.cache(self._move)

    def under(self, recipe: str, seed: int = 0) -> Training:
        """A training of one's own. `seed`: beside the config's."""
        return self._under(recipe, seed).copy()

    def build(self, recipe: str, seed: int = 0) -> Training:
        """As it is before the first step."""
        return Training.build(self.config.replace({"seed": self.config.seed + seed,
                                                   "precision.recipe": recipe}))

    def _train(self, seed: int) -> Training:
        training = self.build("fp32", seed)
        train(training, 0, self.steps)
        return training

    def _move(self, recipe: str, seed: int) -> Training:
        training, trained = self.build(recipe, seed), self.trained(seed)
        # a recipe may have state of its own
        training.model.load_state_dict(trained.model.state_dict(), strict=False)
        training.optimizer.load_state_dict(trained.optimizer.state_dict())
        return training


def bisect(starts: Starts, suspect: str | Injection, *, seeds: int = 3, steps: int = 8) -> Finding:
    """`suspect`: a recipe, a fault (in every layer), or an Injection; a fault brings its own
    recipe. `steps` of each run.

    Raises ConfigError for an unknown suspect, and for a recipe without low-precision products.
    """
    if isinstance(suspect, str):
        pick({**RECIPES, **FAULTS}, suspect, "recipe or fault")
    if suspect in FAULTS:
        suspect = Injection(fault=suspect)
    recipe = name = suspect
    if isinstance(suspect, Injection):
        recipe = pick(FAULTS, suspect.fault, "fault").recipe
        name = f"{suspect.fault} in {recipe}"
    candidates = low_precision_products(starts.build(recipe).model)
    if not candidates:
        raise ConfigError(f"{recipe} has no low-precision product that could be promoted; choose a "
                          f"recipe of 8 or 4 bits")

    def loss(promoted: Units, seed: int, nudge: int) -> float:
        training = starts.under(recipe, seed)
        if nudge:
            for p in training.model.parameters():
                p.data = p.data.to(NUDGES[nudge - 1]).to(p.dtype)
        if isinstance(suspect, Injection):
            faults.inject(training.model, suspect)
        faults.run_in_high_precision(training.model, promoted)
        losses = train(training, starts.steps, starts.steps + steps)
        return statistics.fmean(bounded(losses, starts.config.model.vocab))

    return search(name, candidates, loss, seeds=seeds)


def bounded(losses: Iterable[float], vocab: int) -> list[float]:
    """A run that breaks, or is worse than that, knows nothing: ln(vocab)."""
    nothing = math.log(vocab)
    return [loss if loss < nothing else nothing for loss in losses]


def train(training: Training, first: int, last: int) -> list[float]:
    """Steps `first` to `last`, nothing kept but the losses: nats per token."""
    return [training.update(step).loss.item() for step in range(first, last)]
