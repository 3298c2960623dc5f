"""The failure lab: what goes wrong in low-precision training, put in on purpose, and the search for
where it is.

    inject(model, Injection(fault="stale-amax", layers=("blocks.1.mlp.up",)))    # then train, and
    look at the telemetry
    search(units, loss)                                                     # which layer and
                                                                            product: promote halves

A fault is a row: what it does to one `ScaledLinear`, by composition with its recipe, its backend or
its operands. None of them changes what the layer computes in exact arithmetic, so the same model in
bf16 does not have it. `lpkit.studies.bisect` runs the search on a Config.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lpkit.errors import ConfigError, nearest, pick
from lpkit.kernels import cast as kernel
from lpkit.kernels.cast import Noise
from lpkit.precision.linear import Arithmetic, ScaledLinear, scaled_linears
from lpkit.precision.scaled import TRANSFORMS, Scaled, spread
from lpkit.techniques.recipes import PRODUCTS, Cast, Delayed, Recipe

# times as large as it was; from half its least subnormal to its largest value E4M3 spans 2^18.8
OUTLIER = 2.0**18
STALE = 64.0            # times smaller was the tensor whose amax is still used


# ---- what the faults do to a layer
# ---------------------------------------------------------------------------------------

def _with(change: Callable[[Recipe], Recipe]) -> Callable[[ScaledLinear], None]:
    def put(layer: ScaledLinear) -> None:
        layer.recipe = change(layer.recipe)

    return put


def _operand(recipe: Recipe, change: Callable[[str, str, Cast], Cast]) -> Recipe:
    """`change(product, operand, cast)` on every cast."""
    return replace(recipe, **{product: tuple(change(product, operand, cast)
                                             for operand, cast in zip(PRODUCTS[product], casts))
                              for product, casts in recipe.products.items()})


def _swapped(recipe: Recipe) -> Recipe:
    formats = {"g": "e4m3fn", "x": "e5m2", "w": "e5m2"}
    return _operand(recipe, lambda product, operand, cast: replace(cast, format=formats[operand]))


def _nearest(recipe: Recipe) -> Recipe:
    return _operand(recipe, lambda product, operand, cast: replace(cast, rounding="nearest-even"))


def _unmixed(recipe: Recipe) -> Recipe:
    return _operand(recipe, lambda product, operand, cast: replace(cast, transform="none"))


def _history(layer: ScaledLinear) -> Delayed:
    if layer.recipe.delayed is None:
        raise ConfigError(f"{layer.name} scales by what is there and has no history to spoil; set "
                          f"precision.recipe=fp8-delayed")
    return layer.recipe.delayed


def _stale(layer: ScaledLinear) -> None:
    """The history stops after the first micro-batch, as if the tensors had been STALE times smaller
    then."""
    _history(layer)

    def advance(self: ScaledLinear) -> None:
        seen = self.amax_history
        if not seen[:, 1:].any():
            seen[:, 1:] = seen[:, :1] / STALE
        seen[:, 0] = 0

    layer.advance = MethodType(advance, layer)


def _forgetful(layer: ScaledLinear) -> None:
    delayed = replace(_history(layer), history=1, rule="most-recent")
    # the micro-batch at hand, and the one before
    layer.amax_history = layer.amax_history[:, :2].clone()
    layer.recipe = replace(layer.recipe, delayed=delayed)


class _Divided(nn.Module):
    def __init__(self, by: Tensor):
        super().__init__()
        self.register_buffer("by", by, persistent=False)

    def forward(self, w: Tensor) -> Tensor:
        return w / self.by


def _outlier(layer: ScaledLinear) -> None:
    """One input feature times a power of two, its weights divided by it: the same function,
    exactly, and in bf16 too."""
    by = torch.ones(layer.in_features, device=layer.weight.device)
    by[layer.in_features // 2] = OUTLIER
    parametrize.register_parametrization(layer, "weight", _Divided(by))
    layer.register_forward_pre_hook(lambda module, args: (args[0] * by.to(args[0].dtype),))


@dataclass(frozen=True, kw_only=True)
class _Unguarded(Arithmetic):
    """A backend that divides by the scale of a block of zeros: 0 / 0."""

    inner: Arithmetic

    @property
    def traceable(self) -> bool:
        return self.inner.traceable

    @property
    def alignment(self) -> int:
        return self.inner.alignment

    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, amax: Tensor | None,
             noise: Noise | None) -> Scaled:
        made = self.inner.cast(x, cast, dtype, amax=amax, noise=noise)
        zero = kernel.amax(TRANSFORMS[cast.transform](x), cast.block).values == 0
        return replace(made, data=torch.where(spread(zero, x.shape), torch.nan, made.data))

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype,
                bias: Tensor | None = None) -> Tensor:
        return self.inner.product(a, b, dtype, bias)


def _zero_block(layer: ScaledLinear) -> None:
    rows, columns = (side or whole for side, whole in zip(layer.recipe.y[1].block,
                                                          layer.weight.shape))
    with torch.no_grad():
        layer.weight[:rows, :columns] = 0
    layer.arithmetic = _Unguarded(inner=layer.arithmetic)


@dataclass(frozen=True, kw_only=True)
class Fault:
    what: str
    recipe: str                             # the row of `recipes` in which it happens
    put: Callable[[ScaledLinear], None]     # changes the layer in place
    # the role and the number of the telemetry that move, and whither: +1 or -1
    shows: tuple[str, str, int]
    symptom: str
    source: str


_TE = "Transformer Engine, FP8 primer, https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html"
_NVFP4 = "NVIDIA 2025, section 4, https://arxiv.org/abs/2509.25149"
FAULTS: dict[str, Fault] = {
    "stale-amax": Fault(
        what=f"delayed scaling whose history no longer moves, from a time when the tensors were "
        f"{STALE:g} times smaller", recipe="fp8-delayed", put=_stale, shows=("x", "saturated", +1),
        source=_TE,
        symptom="much saturates, at once and in every role; the amax itself is as ever"),
    "short-history": Fault(
        what="delayed scaling that remembers one micro-batch",
        recipe="fp8-delayed", put=_forgetful, shows=("dy", "saturated", +1), source=_TE,
        symptom="a little saturates whenever a tensor has grown since the last step; the loss "
        "hardly notices"), "swapped-roles": Fault(
        what="E5M2 for activations and weights, E4M3 for gradients",
        recipe="fp8-tensorwise", put=_with(_swapped), shows=("x", "sqnr_db", -1),
        symptom="6 dB less for x and w, one mantissa bit; more of dy underflows, for want of range",
        source="Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433"),
    "outlier-channel": Fault(
        what=f"one input feature {OUTLIER:g} times as large as the others, its weights so much "
        f"smaller", recipe="fp8-tensorwise", put=_outlier, shows=("x", "underflow", +1),
        symptom="one scale for the tensor: what is not the outlier underflows; blocks keep the "
        "damage to one of them", source="Dettmers et al. 2022, https://arxiv.org/abs/2208.07339"),
    "no-stochastic-rounding": Fault(
        what="gradients in FP4 rounded to nearest",
        recipe="nvfp4", put=_with(_nearest), shows=("dy", "sqnr_db", +1), source=_NVFP4,
        symptom="the SQNR of dy rises, and that is the trap: the error is smaller, but no longer "
        "zero on average, so over many steps it adds up"),
    "no-hadamard": Fault(
        what="the operands of the weight gradient in FP4 cast unmixed",
        recipe="nvfp4", put=_with(_unmixed), shows=("dy.T", "worst_block_db", -1), source=_NVFP4,
        symptom="blocks of the weight gradient's operands that hold an outlier lose everything "
        "else"), "zero-amax-block": Fault(
        what="a block of weights that is all zero, and a cast that divides by its amax",
        recipe="mxfp8", put=_zero_block, shows=("w", "zero_blocks", +1),
        symptom="0 / 0: NaN in everything that comes after, from the first step",
        source="OCP Microscaling 1.0, section 6.3, leaves the scale of a zero block to the "
        "implementation"),
}


# ---- planting and promoting
# ------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class Injection:
    """A fault in the Linears that match one of `layers`, by default in all that are
    low-precision."""

    fault: str
    layers: tuple[str, ...] = ("*",)


def inject(model: nn.Module, what: Injection) -> nn.Module:
    """Put it in, in place. Raises ConfigError for an unknown fault, or a pattern that no
    low-precision Linear matches."""
    fault = pick(FAULTS, what.fault, "fault")
    layers = {layer.name: layer for layer in scaled_linears(model)}
    for pattern in what.layers:
        found = [name for name in layers if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(f"{pattern!r} matches no low-precision Linear to put {what.fault} "
                              f"into; {nearest(pattern, layers)}")
        for name in found:
            fault.put(layers[name])
    return model


def random_injection(model: nn.Module, fault: str, seed: int) -> Injection:
    """The fault in one low-precision Linear, drawn from `seed`: for whoever wants to find it."""
    return Injection(fault=fault, layers=(
        random.Random(seed).choice([layer.name for layer in scaled_linears(model)]),))


Unit = tuple[str, str]      # layer, product


def low_precision_products(model: nn.Module) -> list[Unit]:
    """Every product that is low-precision, layer by layer."""
    return [(layer.name, product) for layer in scaled_linears(model)
            for product in layer.recipe.products]


def run_in_high_precision(model: nn.Module, which: Sequence[Unit]) -> nn.Module:
    """Run these products in 16 bits, in place."""
    for layer in scaled_linears(model):
        layer.recipe = replace(layer.recipe,
                               **{product: None for name, product in which if name == layer.name})
    return model


# ---- the search ---------------------------------------------------------------------------------

# Student's t, 97.5%, for 2 seeds, 3, ...: so many standard errors from a mean, chance is ruled out.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)
CLEAR = 4.0     # a gap of fewer noises is none
MORE = 3        # times as many seeds as were asked for: the most that are drawn


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Short runs with some products in 16 bits: means over seeds."""

    promoted: tuple[Unit, ...]
    loss: float                 # nats per token
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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Where it is, and how sure that is."""

    suspect: str
    culprits: tuple[Unit, ...]      # the smallest set that halving reaches, or cannot divide
    units: int                      # low-precision products in the model
    gap: float                      # nats per token that low precision costs, mean over seeds
    noise: float                    # nats per token between runs that start one rounding apart
    alone: Trial                    # promoting the culprits alone
    rest: Trial                     # promoting everything else
    seeds: int
    runs: int
    path: tuple[Trial, ...]

    @property
    def recovery(self) -> float:
        return self.alone.recovery

    @property
    def without(self) -> float:
        return self.rest.recovery

    @property
    def effect(self) -> float:
        """The gap in units of the noise."""
        if self.noise:
            return self.gap / self.noise
        return math.copysign(math.inf, self.gap) if self.gap else 0.0

    @property
    def certainty(self) -> str:
        """low: no gap beyond noise, or seeds that do not agree on one layer and no other."""
        layers = {name for name, _ in self.culprits}
        if self.effect < CLEAR or len(layers) > 1 or not self.alone.kept or not self.rest.dropped:
            return "low"
        return ("high" if self.effect > 2 * CLEAR and self.recovery > 0.8 and self.without < 0.2
                else "medium")

    def __str__(self) -> str:
        cost = (f"{self.suspect} costs {self.gap:.3f} nats per token, {self.effect:.1f} times the "
                f"noise between runs ({self.noise:.1g})")
        after = f"certainty {self.certainty}, {self.runs} runs of {self.seeds} seeds"
        if self.effect < CLEAR:
            return f"Nothing to find: {cost}; {after}."
        back = f"{self.recovery:.0%} (+-{self.alone.error:.0%}) of that"
        others = f"promoting everything else {self.without:.0%} (+-{self.rest.error:.0%})"
        if self.certainty == "low":
            layers = list(dict.fromkeys(name for name, _ in self.culprits))
            where = layers[0]
            if len(layers) > 1:
                where = f"{len(layers)} layers, {layers[0]} to {layers[-1]}"
            return f"Cannot tell: {cost}; promoting {where} brings back {back}, {others}; {after}."
        where = named(self.culprits)
        return f"{where}: {cost}; promoting it brings back {back}, {others}; {after}."


def named(which: Sequence[Unit]) -> str:
    """'blocks.1.mlp.up (y, dx)'."""
    layers = dict.fromkeys(name for name, _ in which)
    return ", ".join(f"{name} ({', '.join(product for layer, product in which if layer == name)})"
                     for name in layers)


# of a short run: what is promoted, number of the seed and of the nudge
Loss = Callable[[Sequence[Unit], int, int], float]
NUDGES = (torch.bfloat16, torch.float16)                # of a start: two such runs drift as runs do


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
    found, others, path = everything, (), []
    if runs.gap > max(0.0, CLEAR * runs.noise):
        while len(found) > 1:
            several = len({name for name, _ in found}) > 1
            path += runs.judged(_halves(found), most if several else runs.drawn)
            if not path[-1].kept:
                break       # it takes both, or chance decides
            found = path[-1].promoted
        others = tuple(unit for unit in everything if unit not in found)
        path += runs.judged([others], most)
    return Finding(suspect=suspect, culprits=found, units=len(everything), gap=runs.gap,
                   noise=runs.noise, alone=runs.trial(found), rest=runs.trial(others),
                   seeds=runs.drawn, runs=len(runs.known), path=tuple(path))


class _Runs:
    """The runs of one search, each made once, and what they say about sets of products."""

    def __init__(self, loss: Loss, everything: tuple[Unit, ...], drawn: int):
        self.loss, self.everything, self.drawn, self.noise = loss, everything, drawn, 0.0
        self.known: dict[tuple[tuple[Unit, ...], int, int], float] = {}

    def losses(self, promoted: tuple[Unit, ...], nudge: int = 0) -> list[float]:
        keys = [(promoted, seed, nudge) for seed in range(self.drawn)]
        for key in keys:
            if key not in self.known:
                self.known[key] = self.loss(*key)
        return [self.known[key] for key in keys]

    def gained(self, worse: tuple[Unit, ...], better: tuple[Unit, ...], nudge: int = 0
               ) -> list[float]:
        """Nats per token, seed by seed."""
        return [a - b for a, b in zip(self.losses(worse, nudge), self.losses(better))]

    @property
    def gap(self) -> float:
        return statistics.fmean(self.gained((), self.everything))

    def error(self, values: list[float]) -> float:
        """Half of the 95% interval of their mean. Differences spread at least as nudged runs do."""
        count = len(values)
        if count < 2:
            return math.inf
        spread = max(statistics.stdev(values), math.sqrt(2) * self.noise)
        return STUDENT[min(count - 2, len(STUDENT) - 1)] * spread / math.sqrt(count)

    def trial(self, promoted: tuple[Unit, ...]) -> Trial:
        """Recovery is a ratio of two means; its error is that of what the ratio leaves over."""
        gaps, back = self.gained((), self.everything), self.gained((), promoted)
        recovery = sum(back) / sum(gaps) if sum(gaps) else math.nan
        left = [b - recovery * gap for b, gap in zip(back, gaps)]
        error = self.error(left) / abs(self.gap) if self.gap else math.nan
        return Trial(promoted=promoted, loss=statistics.fmean(self.losses(promoted)),
                     recovery=recovery, error=error)

    def judged(self, sets: Sequence[tuple[Unit, ...]], most: int) -> list[Trial]:
        """Trials of the sets, up to the first that is kept; more seeds while chance decides."""
        while True:
            trials = []
            for promoted in sets:
                trials.append(self.trial(promoted))
                if trials[-1].kept:
                    return trials
            if self.drawn >= most or all(one.dropped for one in trials):
                return trials
            self.drawn += 1


def _halves(which: tuple[Unit, ...]) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """A layer is not cut while there are several."""
    layers = list(dict.fromkeys(name for name, _ in which))
    if len(layers) > 1:
        first = set(layers[:len(layers) // 2])
        return (tuple(u for u in which if u[0] in first),
                tuple(u for u in which if u[0] not in first))
    return which[:len(which) // 2], which[len(which) // 2:]
