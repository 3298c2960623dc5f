"""Lesson 07, when FP8 fails: its study, its figures and its exercises.

The lesson injects faults of low-precision training into a model on purpose. Then train the model
and look at the telemetry:

    inject(model, Injection(fault="stale-amax", layers=("blocks.1.mlp.up",)))

A `Fault` is a row of FAULTS: how it changes one `ScaledLinear` (its recipe, its backend or its
operands), and the recipe that cures that layer. No fault changes what the layer computes in exact
arithmetic, so the same model in bf16 is not affected.

`bisect` searches for the layer, and its matmul, that cost the loss: it runs one half of the
low-precision matmuls in 16 bits, and keeps the half that restores the loss.

    starts = Starts(config, steps=200)
    print(bisect(starts, "nvfp4"))                                              # a recipe
    print(bisect(starts, Injection(fault="stale-amax", layers=("blocks.1.mlp.up",))))

The loss of an untrained model hardly depends on single layers, so a model is first trained for
`steps` steps in fp32, once for each seed. All runs of a seed continue from that model on the same
batches; they differ only in which matmuls are in 16 bits. A run that diverges counts as a model
that has learned nothing. Results are deterministic.

A `Case` is a riddle: a fault in a layer, both drawn from a seed.

    case = Case.open(Starts(config, steps=200), "unknown", seed=0)
    well, ill = case.run(20, faulty=False), case.run(20, every=4)       # losses, and telemetry
    print(bisect(case.starts, case.injection))
    cured = case.run(20, cured=True)
    print(case.recovered(well, ill, cured))
"""

from __future__ import annotations

import copy
import functools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from html import escape
from random import Random
from types import MethodType
from typing import Any

import ipywidgets as widgets
import torch
import traitlets
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lessons.draws import normal
from lessons.figures.colours import WARNING
from lessons.figures.drawing import GROUND, NAMES, axis, figure, heat, note, scatter
from lessons.figures.explorer import Explorer
from lessons.figures.figure import Stored
from lessons.figures.heat import Samples, cell_and_table, explorer
from lessons.figures.style import COLOURS
from lessons.judging.judge import Exercise, adding_to
from lessons.judging.questions import Question
from lpkit.config import Config
from lpkit.errors import ConfigError, nearest, pick
from lpkit.kernels import cast as kernel
from lpkit.measure.telemetry import Sample, Telemetry
from lpkit.precision import backends
from lpkit.precision.linear import ROLES, ScaledLinear, scaled_linears
from lpkit.precision.scaled import TRANSFORMS, Scaled, spread
from lpkit.predict.compare import TIED
from lpkit.tables import FAINT
from lpkit.techniques.recipes import PRODUCTS, RECIPES, Cast, resolve
from lpkit.training.training import Training

# notebook 07 imports these from here
__all__ = ["backends", "resolve"]

# ---- The study

# Factor on one input feature. E4M3 spans a factor of 2^18.8, from half of its smallest subnormal to
# its largest value. So all other features underflow, unless they were more than 2^5 times as large
# as this feature before.
OUTLIER = 2.0**24
STALE = 64.0            # the stale amax is this many times too small
Put = Callable[[ScaledLinear], None]        # changes the layer in place


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of low-precision training; all texts are shown to the learner."""

    what: str                               # what the fault changes
    recipe: str                             # the recipe (a key of RECIPES) that the fault needs
    put: Put
    # where telemetry shows the fault: role, metric, and whether it rises (+1) or falls (-1)
    shows: tuple[str, str, int]
    symptom: str
    cure: str                               # the recipe (a key of RECIPES) that cures the layer
    remedy: str                             # why that recipe helps
    # why a tiny model's loss does not show the fault within a few steps; "" if it does
    unseen: str = ""
    source: str


def _recast(setting: str, **values: str) -> Put:
    """Return a `put` that sets one setting ("format", "rounding" or "transform") of all casts of
    the operands x, w and g (the gradient dy) to the value given for the operand."""
    def put(layer: ScaledLinear) -> None:
        casts = {}
        for product, pair in layer.recipe.products.items():
            casts[product] = tuple(cast and replace(cast, **{setting: values[operand]})
                                   for operand, cast in zip(PRODUCTS[product], pair))
        layer.recipe = replace(layer.recipe, **casts)

    return put


def _stale(layer: ScaledLinear) -> None:
    """Freeze the amax history at 1 / STALE of the amax of the first micro-batch's tensors."""
    def cast(self: ScaledLinear, product: str, role: str, x: Tensor, dtype: torch.dtype,
             **how: Any) -> Scaled:
        seen = self.amax_history[ROLES.index(role)]
        if not seen.any():
            seen[1:] = x.abs().amax() / STALE
        return ScaledLinear.cast(self, product, role, x, dtype, **how)

    layer.cast = MethodType(cast, layer)
    layer.advance = MethodType(lambda self: None, layer)


def _forgetful(layer: ScaledLinear) -> None:
    """Shorten the amax history to one micro-batch."""
    delayed = replace(layer.recipe.delayed, history=1, history_rule="most-recent")
    # columns of the history: the current micro-batch and the previous one
    layer.amax_history = layer.amax_history[:, :2].clone()
    layer.recipe = replace(layer.recipe, delayed=delayed)


class _Divided(nn.Module):
    """A parametrization of a weight: the weight divided by `by`, one number per input feature."""

    def __init__(self, by: Tensor):
        super().__init__()
        self.register_buffer("by", by, persistent=False)

    def forward(self, w: Tensor) -> Tensor:
        return w / self.by


def _outlier(layer: ScaledLinear) -> None:
    """Multiply one input feature by OUTLIER and divide its weights by OUTLIER. Since OUTLIER is a
    power of two, the layer computes exactly the same function, also in bf16."""
    by = torch.ones(layer.in_features, device=layer.weight.device)
    by[layer.in_features // 2] = OUTLIER
    parametrize.register_parametrization(layer, "weight", _Divided(by))
    layer.register_forward_pre_hook(lambda module, args: (args[0] * by.to(args[0].dtype),))


def _zero_block(layer: ScaledLinear) -> None:
    """Set a block of weights to zero, and replace the layer's cast by one that divides by the amax
    of a block: 0 / 0 is NaN in that block."""
    rows, columns = (side or whole for side, whole in zip(layer.recipe.y[1].block,
                                                          layer.weight.shape))
    with torch.no_grad():
        layer.weight[:rows, :columns] = 0
    guarded = layer.arithmetic

    def divide(x: Tensor, cast: Cast, dtype: torch.dtype, **how: Any) -> Scaled:
        scaled = guarded.cast(x, cast, dtype, **how)
        zero = kernel.amax(TRANSFORMS[cast.transform](x), cast.block).values == 0
        return replace(scaled, data=torch.where(spread(zero, x.shape), torch.nan, scaled.data))

    layer.arithmetic = copy.copy(guarded)
    layer.arithmetic.cast = divide


_TE = ("Transformer Engine, FP8 primer, https://docs.nvidia.com/deeplearning/"
       "transformer-engine/user-guide/examples/fp8_primer.html")
_NVFP4 = "NVIDIA 2025, section 4, https://arxiv.org/abs/2509.25149"
FAULTS: dict[str, Fault] = {
    "stale-amax": Fault(
        what=f"delayed scaling whose history is no longer updated; it is from a time when the "
             f"tensors were {STALE:g} times smaller",
        recipe="fp8-delayed", put=_stale, shows=("x", "saturated", +1), source=_TE,
        symptom="many elements saturate, from the first step and in every role; the amax itself "
                "does not change",
        cure="fp8-tensorwise", remedy="a scale from the current tensor needs no history"),
    "short-history": Fault(
        what="delayed scaling that remembers one micro-batch",
        recipe="fp8-delayed", put=_forgetful, shows=("dy", "saturated", +1), source=_TE,
        symptom="a few elements saturate whenever a tensor has grown since the last step",
        cure="fp8-tensorwise", remedy="a scale from the current tensor needs no history",
        unseen="from step to step a tensor hardly grows"),
    "swapped-roles": Fault(
        what="E5M2 for activations and weights, E4M3 for gradients",
        recipe="fp8-delayed", put=_recast("format", x="e5m2", w="e5m2", g="e4m3fn"),
        shows=("x", "sqnr_db", -1),
        symptom="x and w have 6 dB less (one mantissa bit); more of dy underflows, because E4M3 "
                "has less range",
        cure="fp8-delayed", remedy="E4M3 for x and w, E5M2 for dy",
        unseen="25 dB of signal over noise in one layer are enough",
        source="Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433"),
    "outlier-channel": Fault(
        what=f"one input feature is 2^{math.log2(OUTLIER):.0f} times as large, and its weights are "
             f"smaller by the same factor",
        recipe="fp8-delayed", put=_outlier, shows=("x", "underflow", +1),
        symptom="with one scale for the tensor, everything except the outlier underflows; blocks "
                "would confine the damage to one block",
        cure="bf16", remedy="an exponent of 8 bits covers both magnitudes",
        source="Dettmers et al. 2022, https://arxiv.org/abs/2208.07339"),
    "no-stochastic-rounding": Fault(
        what="gradients in FP4 rounded to nearest", recipe="nvfp4",
        put=_recast("rounding", x="nearest-even", w="nearest-even", g="nearest-even"),
        shows=("dy", "sqnr_db", +1), source=_NVFP4,
        symptom="the SQNR of dy rises, which misleads: the error is smaller, but its mean is no "
                "longer zero, so it adds up over many steps",
        cure="nvfp4", remedy="stochastic rounding is right on average",
        unseen="a bias takes thousands of steps to add up"),
    "no-hadamard": Fault(
        what="operands of the weight gradient cast to FP4 without the rotation that mixes them",
        recipe="nvfp4",
        put=_recast("transform", x="none", w="none", g="none"),
        shows=("dy.T", "worst_block_db", -1), source=_NVFP4,
        symptom="blocks of the weight gradient's operands that have an outlier lose everything "
                "else",
        cure="nvfp4", remedy="the rotation spreads an outlier over the sixteen elements of a block",
        unseen="a tiny model has no outliers yet"),
    "zero-amax-block": Fault(
        what="a block of weights that are all zero, and a cast that divides by the block's amax",
        recipe="mxfp8", put=_zero_block, shows=("w", "zero_blocks", +1),
        symptom="0 / 0: NaN in all later layers, from the first step",
        cure="fp8-tensorwise", remedy="with one scale per tensor, the amax is not zero",
        source="OCP Microscaling 1.0, section 6.3, leaves the scale of a zero block to the "
               "implementation"),
}


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A fault (a key of FAULTS) in all low-precision Linears whose names match one of the patterns
    `layers`; by default in all of them."""

    fault: str
    layers: tuple[str, ...] = ("*",)


def inject(model: nn.Module, what: Injection) -> nn.Module:
    """Inject the fault into the model in place, and return the model. Raises ConfigError for an
    unknown fault, for a pattern that matches no low-precision Linear, and for a fault of the amax
    history in a layer that has none."""
    fault = pick(FAULTS, what.fault, "fault")
    layers = {layer.name: layer for layer in scaled_linears(model)}
    for pattern in what.layers:
        matching = [layer for name, layer in layers.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(f"{pattern!r} matches no low-precision Linear, so {what.fault} "
                              f"cannot be injected; {nearest(pattern, layers)}")
        for layer in matching:
            if RECIPES[fault.recipe].delayed and not layer.recipe.delayed:
                raise ConfigError(f"{layer.name} scales by the current tensor and has no history "
                                  f"to spoil; set precision.recipe=fp8-delayed")
            fault.put(layer)
    return model


def cure(model: nn.Module, what: Injection) -> nn.Module:
    """Set the recipe of the faulty layers to the fault's cure, in place, and return the model."""
    for layer in scaled_linears(model):
        if any(fnmatchcase(layer.name, pattern) for pattern in what.layers):
            layer.recipe = RECIPES[FAULTS[what.fault].cure]
    return model


Unit = tuple[str, str]      # a matmul: name of the layer, and product ("y", "dx" or "dw")


def low_precision_products(model: nn.Module) -> list[Unit]:
    """Return all low-precision matmuls of the model, layer by layer."""
    return [(layer.name, product) for layer in scaled_linears(model)
            for product in layer.recipe.products]


def run_in_high_precision(model: nn.Module, which: Iterable[Unit]) -> None:
    """Make the model compute these matmuls in 16 bits, in place."""
    layers = {layer.name: layer for layer in scaled_linears(model)}
    for name, product in which:
        layers[name].recipe = replace(layers[name].recipe, **{product: None})


def layers_of(which: Iterable[Unit]) -> list[str]:
    """Return the names of the layers, each once, in order."""
    return list(dict.fromkeys(layer for layer, _ in which))


def named(which: Iterable[Unit]) -> str:
    """Return the matmuls as text, by layer: 'blocks.1.mlp.up (y, dx)'."""
    which = list(which)
    return ", ".join(f"{name} ({', '.join(product for layer, product in which if layer == name)})"
                     for name in layers_of(which))


# Half-width of a 95% interval in standard errors, for 2, 3, ... seeds (Student's t at 97.5%).
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)
CLEAR = 4.0     # a gap of fewer standard deviations of the noise counts as no gap
MORE = 3        # a search uses at most this many times the requested number of seeds
# Dtypes to which the weights of a start are rounded once. Runs from rounded weights drift away from
# a run from the exact weights; their difference is the noise.
NUDGES = (torch.bfloat16, torch.float16)

Units = tuple[Unit, ...]
# loss(promoted, seed, nudge): the mean loss of a short run in which the matmuls `promoted` are in
# 16 bits; see `search`
Loss = Callable[[Units, int, int], float]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of short runs with some matmuls in 16 bits: means over the seeds."""

    promoted: Units
    # share of the gap that is recovered. 0: the loss with all matmuls in low precision; 1: the loss
    # with all of them in 16 bits
    recovery: float
    error: float                # half-width of the 95% interval of the recovery

    @property
    def kept(self) -> bool:
        """Whether these runs recover significantly more than half of the gap."""
        return self.recovery - self.error > 0.5

    @property
    def dropped(self) -> bool:
        """Whether these runs recover significantly less than half of the gap."""
        return self.recovery + self.error < 0.5

    def __str__(self) -> str:
        return f"{self.recovery:.0%} (+-{self.error:.0%})"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a search: the matmuls that cost the loss, and how certain the result is."""

    suspect: str                    # name of the recipe or fault
    culprits: Units                 # the smallest set of matmuls that halving found
    gap: float                      # nats per token that low precision costs, mean over seeds
    noise: float                    # nats per token between runs from rounded weights (NUDGES)
    alone: Trial                    # only the culprits in 16 bits
    rest: Trial                     # all other matmuls in 16 bits
    seeds: int                      # number of seeds that were used
    runs: int                       # number of runs
    path: tuple[Trial, ...]         # the trials of the search, in order

    @property
    def effect(self) -> float:
        """The gap divided by the noise."""
        if self.noise:
            return self.gap / self.noise
        return math.copysign(math.inf, self.gap) if self.gap else 0.0

    @property
    def certainty(self) -> str:
        """How certain the culprits are: "low" if the gap is within the noise, or if the seeds do
        not single out one layer; else "medium" or "high"."""
        layers = len(layers_of(self.culprits))
        if self.effect < CLEAR or layers > 1 or not self.alone.kept or not self.rest.dropped:
            return "low"
        sure = self.effect > 2 * CLEAR and self.alone.recovery > 0.8 and self.rest.recovery < 0.2
        return "high" if sure else "medium"

    def __str__(self) -> str:
        cost = (f"{self.suspect} costs {self.gap:.3f} nats per token, {self.effect:.1f} times the "
                f"noise between runs ({self.noise:.1g})")
        after = f"certainty {self.certainty}, {self.runs} runs with {self.seeds} seeds"
        if self.effect < CLEAR:
            return f"Nothing to find: {cost}; {after}."
        back = f"recovers {self.alone} of this loss, and 16 bits everywhere else {self.rest}"
        if self.certainty != "low":
            return f"{named(self.culprits)}: {cost}; 16 bits there {back}; {after}."
        first, *others = layers_of(self.culprits)
        where = f"{1 + len(others)} layers, {first} to {others[-1]}" if others else first
        return f"Cannot tell: {cost}; 16 bits in {where} {back}; {after}."


def search(suspect: str, all_units: Sequence[Unit], loss: Loss, *, seeds: int = 3) -> Finding:
    """Find the low-precision matmuls that cost the loss, by halving: first the layers, then the
    matmuls of a layer. The half that restores the loss in 16 bits is kept.

    all_units: all low-precision matmuls
    loss: loss(promoted, seed, nudge) returns the loss of a run with the matmuls `promoted` in 16
        bits. With nudge 0, the run starts from the exact weights; with nudge n, from weights that
        were rounded to NUDGES[n - 1].

    Runs are compared seed by seed. The search adds one seed at a time, up to MORE * seeds, while a
    decision between layers, or the last comparison with all other matmuls, may be due to chance. It
    adds no seeds for a decision between the matmuls of one layer. The search ends if the halves of
    a set cannot be distinguished.

    With k seeds, there are at most k * (5 + 2 log2(layers) + 4) runs. If low precision costs no
    loss, there are 4 * seeds runs. Raises ConfigError for fewer than 1 seed.
    """
    if seeds < 1:
        raise ConfigError(f"a search needs at least 1 seed, got {seeds}")
    everything, most = tuple(all_units), MORE * seeds
    runs = _Runs(loss, everything, seeds)
    # runs from rounded weights against runs from exact weights, in 16 bits and in low precision
    drift = runs.gained(everything, everything, nudge=1) + runs.gained((), (), nudge=2)
    runs.noise = math.sqrt(statistics.fmean(d * d for d in drift))
    culprits, others, path = everything, (), []
    if runs.gap > max(0.0, CLEAR * runs.noise):
        while len(culprits) > 1:
            several = len(layers_of(culprits)) > 1
            path += runs.judged(_halves(culprits), most if several else runs.drawn)
            if not path[-1].kept:
                break       # both halves are needed, or the difference may be chance
            culprits = path[-1].promoted
        others = tuple(unit for unit in everything if unit not in culprits)
        path += runs.judged([others], most)
    return Finding(suspect=suspect, culprits=culprits, gap=runs.gap, noise=runs.noise,
                   alone=runs.trial(culprits), rest=runs.trial(others), seeds=runs.drawn,
                   runs=runs.loss.cache_info().currsize, path=tuple(path))


class _Runs:
    """The runs of one search, each done once, and comparisons of sets of matmuls by these runs.
    `drawn` is the number of seeds so far."""

    def __init__(self, loss: Loss, everything: Units, drawn: int):
        self.loss, self.everything, self.drawn = functools.cache(loss), everything, drawn
        self.noise = 0.0

    def gained(self, worse: Units, better: Units, nudge: int = 0) -> list[float]:
        """Return, for each seed, the loss with `worse` in 16 bits minus the loss with `better` in
        16 bits, in nats per token. `nudge` applies to the run of `worse`."""
        return [self.loss(worse, seed, nudge) - self.loss(better, seed, 0)
                for seed in range(self.drawn)]

    @property
    def gap(self) -> float:
        """The loss that low precision costs, in nats per token: mean over the seeds."""
        return statistics.fmean(self.gained((), self.everything))

    def trial(self, promoted: Units) -> Trial:
        """Return the trial of these matmuls. The recovery is the mean gain over the mean gap. Its
        error comes from the residuals, gain - recovery * gap of each seed, by Student's t. Their
        standard deviation is taken as at least sqrt(2) times the noise of runs from rounded
        weights."""
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
        """Return the trials of the sets in order, up to the first set that is kept. While no set is
        kept and not all are dropped, add a seed, up to `most` seeds."""
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
    """Return two halves of the matmuls: halves of the layers, or of the matmuls of a single
    layer."""
    layers = layers_of(which)
    if len(layers) > 1:
        first = layers[:len(layers) // 2]
        cut = sum(layer in first for layer, _ in which)
    else:
        cut = len(which) // 2
    return which[:cut], which[cut:]


# Searches on real runs.

class Starts:
    """Models trained in fp32 for `steps` steps, one for each seed, from which runs with any recipe
    start. A model is trained when it is first needed."""

    def __init__(self, config: Config, *, steps: int):
        self.steps = steps
        self.config = config.replace({"precision.backend": "auto", "schedule": "constant",
                                      "system.compile": False,
                                      # a copy of a training lacks hooks, streams and files
                                      "memory.activation_offload": "device",
                                      "memory.optimizer_state": "device",
                                      "memory.optimizer_step": "after"})
        self.trained, self._under = functools.cache(self._train), functools.cache(self._move)

    def under(self, recipe: str, seed: int = 0) -> Training:
        """Return a new copy of the training of this seed with its state after `steps` steps, for
        further steps with `recipe`. `seed` is added to the config's seed."""
        return self._under(recipe, seed).copy()

    def build(self, recipe: str, seed: int = 0) -> Training:
        """Return an untrained training with this recipe and seed."""
        return Training.build(self.config.replace({"seed": self.config.seed + seed,
                                                   "precision.recipe": recipe}))

    def _train(self, seed: int) -> Training:
        """Return the training of this seed after `steps` steps in fp32."""
        training = self.build("fp32", seed)
        train(training, 0, self.steps)
        return training

    def _move(self, recipe: str, seed: int) -> Training:
        """Return a training with this recipe, and the trained weights and optimizer state."""
        training, trained = self.build(recipe, seed), self.trained(seed)
        # strict=False: the recipe may have state of its own, for example an amax history
        training.model.load_state_dict(trained.model.state_dict(), strict=False)
        training.optimizer.load_state_dict(trained.optimizer.state_dict())
        return training


def bisect(starts: Starts, suspect: str | Injection, *, seeds: int = 3, steps: int = 8) -> Finding:
    """Search for the matmuls that cost the loss, by runs of `steps` steps.

    suspect: the name of a recipe; the name of a fault, which is then injected into every layer; or
        an Injection. A fault is searched under the recipe that it needs.

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
        raise ConfigError(f"{recipe} has no low-precision product that could be run in 16 bits; "
                          f"choose a recipe of 8 or 4 bits")

    def loss(promoted: Units, seed: int, nudge: int) -> float:
        training = starts.under(recipe, seed)
        if nudge:
            for p in training.model.parameters():
                p.data = p.data.to(NUDGES[nudge - 1]).to(p.dtype)
        if isinstance(suspect, Injection):
            inject(training.model, suspect)
        run_in_high_precision(training.model, promoted)
        losses = train(training, starts.steps, starts.steps + steps)
        return statistics.fmean(bounded(losses, starts.config.model.vocab))

    return search(name, candidates, loss, seeds=seeds)


def bounded(losses: Iterable[float], vocab: int) -> list[float]:
    """Return the losses, with each NaN and each loss above ln(vocab) replaced by ln(vocab), the
    loss of a model that has learned nothing."""
    nothing = math.log(vocab)
    return [loss if loss < nothing else nothing for loss in losses]


def train(training: Training, first: int, last: int) -> list[float]:
    """Run the steps `first` to `last` - 1 and return their losses in nats per token."""
    return [training.update(step).loss.item() for step in range(first, last)]


UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of the steps of a case."""

    losses: list[float]         # nats per token, of each step; NaN after the run diverged
    samples: list[Sample]       # telemetry; empty if it was not requested


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault in one layer, for the learner to find."""

    starts: Starts
    injection: Injection

    @classmethod
    def open(cls, starts: Starts, fault: str, seed: int) -> Case:
        """Return a case with `fault` in one low-precision Linear, which is drawn from `seed`. If
        `fault` is "unknown", the fault is drawn, too: one that changes a tiny model's loss. Raises
        ConfigError for an unknown name."""
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
        """The right answers, as "fault in layer". If the loss does not show the fault, TIED in
        place of the fault is right, too."""
        faults = [self.injection.fault] + [TIED] * bool(self.fault.unseen)
        return [f"{fault} in {self.layer}" for fault in faults]

    def run(self, steps: int, *, faulty: bool = True, cured: bool = False, every: int = 0) -> Run:
        """Run `steps` steps after the start, always on the same batches, with or without the fault
        and its cure. Telemetry is sampled in the first step and then in every `every`-th step; 0:
        never."""
        training = self.starts.under(self.fault.recipe)
        if faulty:
            inject(training.model, self.injection)
        if cured:
            cure(training.model, self.injection)
        first = self.starts.steps
        seen = Telemetry(model=training.model, every=every or 1)
        if every:   # sample the first step: in later steps, every layer may have received NaN
            training.watchers.append(lambda step: seen.watch(step - first))
        return Run(losses=train(training, first, first + steps), samples=seen.samples)

    def recovered(self, well: Run, ill: Run, cured: Run) -> float:
        """Return the share of the loss gap, `ill` minus `well`, that the cure recovers."""
        without, with_it, after = map(self._mean, (well, ill, cured))
        return (with_it - after) / (with_it - without)

    def outcome(self, well: Run, ill: Run, cured: Run) -> str:
        """Return a sentence with the cost of the fault and the share that the cure recovers."""
        row, cost = self.fault, self._mean(ill) - self._mean(well)
        if row.unseen:
            return (f"{self.injection.fault} costs {cost:+.1g} nats per token here, which is "
                    f"chance: {row.unseen}. So a cure has nothing to recover.")
        return (f"{self.injection.fault} costs {cost:.3f} nats per token. With {self.layer} in "
                f"{row.cure}, {self.recovered(well, ill, cured):.0%} of this is recovered: "
                f"{row.remedy}.")

    def _mean(self, run: Run) -> float:
        """Return the mean loss in nats per token; a diverged run counts as ln(vocab)."""
        return statistics.fmean(bounded(run.losses, self.starts.config.model.vocab))


def standing_out(samples: Iterable[Sample]) -> list[tuple[str, float]]:
    """Return (layer, excess) for each layer, the largest excess first: which layers lose more in
    their casts than others?

    The loss of a cast is the share of elements that become zero or saturate. Its excess is that
    share minus the median of all layers with the same role and step. The excess of a layer is the
    mean over the steps, in the role where it is largest. The layer that produced the first NaN or
    Inf has excess 1; layers that received a NaN are left out."""
    samples = list(samples)
    alike: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for sample in samples:
        if sample.own is not None:
            lost = sample.own.underflow + sample.own.saturated
            alike[sample.step, sample.role][sample.layer] = lost
    excess: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (_, role), layers in alike.items():
        usual = statistics.median(layers.values())
        for layer, lost in layers.items():
            excess[layer, role].append(lost - usual)
    worst: dict[str, float] = {}
    for (layer, _), values in excess.items():
        mean = statistics.fmean(values)
        worst[layer] = max(mean, worst.get(layer, mean))
    if source := source_of_nonfinite(samples):
        worst[source] = 1.0
    return sorted(worst.items(), key=lambda item: -item[1])


def source_of_nonfinite(samples: Iterable[Sample]) -> str:
    """Return the layer that produced the first NaN or Inf; "" if there was none, or if it appeared
    between two sampled steps.

    Samples are in the order of execution: x and w from the first layer to the last, dy from the
    last to the first. A NaN in a layer's x or dy comes from the previous layer in that order; a NaN
    in its weights comes from the layer itself."""
    before = None
    for sample in samples:
        if sample.nonfinite:
            if before is None or before.step != sample.step:
                return ""       # the NaN was there at the start of the step
            return sample.layer if sample.role.startswith("w") else before.layer
        before = sample
    return ""


def nonfinite_report(samples: Iterable[Sample]) -> str:
    """Return a sentence that says in which step and tensors NaN or Inf first appeared, and which
    layer produced it; "" if there was none."""
    samples = list(samples)
    bad = [sample for sample in samples if sample.nonfinite]
    if not bad:
        return ""
    first = [sample for sample in bad if sample.step == bad[0].step]
    named = ", ".join(f"{sample.nonfinite} in {sample.role} of {sample.layer}"
                      for sample in first[:3])
    more = f" and in {len(first) - 3} more tensors" if len(first) > 3 else ""
    source = source_of_nonfinite(samples)
    who = f"; produced by {source}" if source else "; already there when the step began"
    return f"NaN or Inf at step {first[0].step}: {named}{more}{who}"


# ---- Figures

# placeholders of the two answers before the learner chooses
NOBODY, NOTHING = "Click a row of the map", "which fault"


def case_figure(losses: Mapping[str, Sequence[float]], *, title: str = "") -> dict:
    """Return the plotly spec of the losses of runs, in nats per token, by name. The line of a
    diverged run ends at its last finite loss, and a note gives the step."""
    lines, notes = [], []
    for i, (name, curve) in enumerate(losses.items()):
        whole = [loss if math.isfinite(loss) else None for loss in curve]
        steps = list(range(1, 1 + len(whole)))
        lines.append(scatter(steps, whole, escape(name), COLOURS[(0, 2, 4)[i % 3]],
                             mode="lines+markers", marker={"size": 5}, line={"width": 2},
                             hover="step %{x}: %{y:.3f} nats"))
        if None in whole:
            at = whole.index(None)
            notes.append(note(f"{escape(name)}: NaN from step {steps[at]} on", 1,
                              1.02 + 0.08 * len(notes), "right bottom", xref="paper",
                              yref="paper", font={"color": WARNING}))
    return figure(lines, title, height=340, annotations=notes, xaxis=axis("step"),
                  yaxis=axis("loss (nats per token)"))


class Accusation(Stored, Question):
    """A question: which fault is in which layer? It shows the telemetry of a case in an Explorer
    and a menu of faults. A click on a row of the map, or the menu of layers, chooses the layer.
    `.value` is "fault in layer", or None until both are chosen."""

    value = traitlets.Unicode(None, allow_none=True)

    def __init__(self, question: str, explorer: Explorer, faults: Collection[str]):
        self.explorer, self.figure, self.layer = explorer, explorer.figure, ""
        self.fault = widgets.Dropdown(
            options=[(NOTHING, ""), *((name, name) for name in faults)], description=NOBODY,
            style={"description_width": "initial"}, layout={"max_width": "100%"})
        super().__init__(question, [self.fault], None)
        self.children = [self.children[0], explorer, *self.children[1:]]
        explorer.figure.observe(self._clicked, names="clicked")
        explorer.controls["layer"].observe(lambda change: self._accuse(change["new"]), "value")
        self.fault.observe(lambda _: self._accuse(self.layer), "value")

    def _clicked(self, change: dict) -> None:
        if change["new"].get("curve") == 0:
            self._accuse(change["new"]["y"])

    def _accuse(self, layer: str) -> None:
        """Set the layer of the answer, unless the question has been answered."""
        if not self.locked:
            self.layer, self.fault.description = layer, layer or NOBODY
            self.value = f"{self.fault.value} in {layer}" if layer and self.fault.value else None

    def restore(self, value: float | str, factor: float | None) -> None:
        """Show an answer that was given earlier."""
        self.fault.value, _, layer = str(value).partition(" in ")
        self._accuse(layer)
        super().restore(value, factor)

    def judged(self, right: Sequence[str]) -> None:
        """Score the answer: it is right if it is one of `right`."""
        self._ends(" or ".join(right), self.value in right)


def search_figure(finding: Any, layers: Sequence[str], *, title: str = "") -> dict:
    """Return the plotly spec of the trials of a search, in order: which of `layers` (the first on
    top) were in 16 bits, and the share of the loss gap that was recovered. Where only some matmuls
    of a layer were in 16 bits, the cell names them. `finding` is a `Finding`."""
    runs = []
    values, words = ([[gap] * len(finding.path) for _ in layers] for gap in (None, ""))
    for column, trial in enumerate(finding.path):
        runs.append(f"{column + 1}<br>{round(100 * trial.recovery)}%")     # no -0%
        for row, layer in enumerate(layers):
            products = [product for name, product in trial.promoted if name == layer]
            if products:
                values[row][column] = 100 * trial.recovery
                words[row][column] = "" if len(products) == 3 else ", ".join(products)
    cells = heat(runs, list(layers), values, ends=(0, 100), bar={"title": {"text": "%"}},
                 text=words, texttemplate="%{text}",
                 hovertemplate="%{y} in 16 bits: %{z:.0f}% recovered<extra></extra>")
    nothing = note("low precision cost no loss, so nothing was searched", 0.5, 0.5,
                   "center middle", xref="paper", yref="paper", bgcolor=GROUND,
                   font={"color": FAINT})
    return figure([cells], title, height=140 + 26 * len(layers), showlegend=False,
                  annotations=[] if finding.path else [nothing],
                  xaxis=axis("trial, and the share of the loss gap that it recovered",
                             type="category", showgrid=False, ticks=""),
                  yaxis={**NAMES, "type": "category"})


def telemetry_explorer(samples: Samples, *, start: Mapping[str, Any] | None = None,
                       title: str = "") -> Explorer:
    """Return an Explorer of telemetry samples: a map of layers by steps and one cell as a histogram
    and a table (`lessons.figures.heat`). Raises ConfigError without samples."""
    samples = list(samples)

    def show(**choices: Any) -> tuple[dict, str]:
        return cell_and_table(samples, title=title, **choices)

    return explorer(show, samples, start)


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: decibels, shares, powers of two.

def _of_magnitudes(x: Sequence[float], y: Sequence[float]) -> float:
    return 10 * math.log10(sum(map(abs, x)) / sum(abs(a - b) for a, b in zip(x, y, strict=True)))


def _noisy(r: Random) -> tuple[tuple[float, ...], tuple[float, ...]]:
    x = tuple(r.gauss(0, 2) for _ in range(5))
    return x, tuple(a + r.gauss(0, 0.1) for a in x)


@exercise("07.sqnr_db", ((1.0, 0.0), (0.9, 0.0)), ((3.0, -1.0, 0.5), (3.25, -1.0, 0.5)),
          ((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 3.5)), draw=_noisy,
          mistakes={"it is a ratio of energies: use squares": _of_magnitudes})
def sqnr_db(x: Sequence[float], y: Sequence[float]) -> float:
    noise = sum((a - b) ** 2 for a, b in zip(x, y, strict=True))
    return 10 * math.log10(sum(a * a for a in x) / noise)


def _grown(r: Random) -> tuple[tuple[float, ...], float]:
    amax = r.uniform(0.5, 4)
    beyond = (0.0, 0.5, 1.0, 1.0345, 1.037, 1.05, 2.0, -1.0345, -1.5)
    return (amax / 3, *(amax * r.choice(beyond) for _ in range(6))), amax


@exercise("07.saturated", ((1.0, 2.0), 1.0), ((1.02, -3.0, 0.5), 1.0), ((0.0, 0.0, 4.0, -1.0), 2.0),
          draw=_grown,
          mistakes={"values up to 464 are rounded to 448":
                        lambda x, amax: sum(abs(a) > amax for a in x) / sum(a != 0 for a in x),
                    "return the share of the non-zero elements":
                        lambda x, amax: sum(abs(a) > amax * 464 / 448 for a in x) / len(x)})
def saturated(x: Sequence[float], amax: float) -> float:
    nonzero = [abs(a) for a in x if a]      # the last spacing is 32
    return sum(a > amax * 464 / 448 for a in nonzero) / len(nonzero)


# `draw` avoids growths just above a power of two: there, rounding still avoids saturation
@exercise("07.margin", (1.0,), (2.0,), (3.0,), (64.0,),
          draw=lambda r: (r.uniform(1.04, 2) * 2 ** r.randrange(10),),
          mistakes={"round the exponent up": lambda growth: int(math.log2(growth))})
def margin(growth: float) -> int:
    return math.ceil(math.log2(growth))


# Exercises: the worst row, and the faulty layer.

def _row_noise(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1)


def _unequal_rows(r: Random) -> tuple[Tensor, Tensor]:
    x = normal(r, r.randint(2, 6), 5) * 10 ** normal(r, 1)
    sizes = 10 ** normal(r, len(x), 1)
    x, exact = x * sizes, normal(r, len(x), 1) > 0.8
    y = torch.where(exact, x, x + 0.1 * normal(r, len(x), 5))
    silent = torch.arange(len(x))[:, None] == r.randrange(-2, len(x))
    return x * ~silent, y * ~silent


@exercise("07.worst_row",
          (torch.tensor([[1.0, 1.0], [9.0, 9.0]]), torch.tensor([[1.0, 1.5], [9.0, 8.0]])),
          (torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.1]])),
          draw=_unequal_rows, minutes=8, stars=2,
          mistakes={"noise counts in proportion to the row's signal":
                        lambda x, y: int(_row_noise(x, y).argmax()),
                    "0 / 0: a row that is exact is never the worst": lambda x, y:
                        int((x.square().sum(-1) / _row_noise(x, y)).argmin())})
def worst_row(x: Tensor, y: Tensor) -> int:
    noise, signal = (x - y).square().sum(-1), x.square().sum(-1)
    return int(torch.where(noise > 0, noise / signal, 0.0).argmax())


class Suspects:
    """`fails(layers)`: whether training fails with these layers in FP8. Counts its calls."""

    def __init__(self, culprit: str, most: int):
        self.culprit, self.most, self.calls = culprit, most, 0

    def __call__(self, layers: list[str]) -> bool:
        self.calls += 1
        if self.calls > self.most:
            raise RuntimeError(f"fails() was called more than {self.most} times; halve the "
                               f"list of suspects with each call")
        return self.culprit in layers

    def __repr__(self) -> str:
        return f"fails (because of {self.culprit})"


def _suspects(r: Random) -> tuple[list[str], Suspects]:
    layers = [f"block{i}.{name}" for i in range(8) for name in ("qkv", "out", "up", "down")]
    layers = layers[:r.randint(1, 32)]
    return layers, Suspects(r.choice(layers), math.ceil(math.log2(len(layers))))


@exercise("07.bisect", (["up"], Suspects("up", 0)), (["up", "down"], Suspects("down", 1)),
          (["q", "k", "v", "o"], Suspects("o", 2)), draw=_suspects, minutes=8, stars=2,
          mistakes={"halve the suspects": lambda layers, fails: layers[0]})
def bisect_layers(layers: list[str], fails: Callable[[list[str]], bool]) -> str:
    while len(layers) > 1:
        half = layers[:len(layers) // 2]
        layers = half if fails(half) else layers[len(layers) // 2:]
    return layers[0]
