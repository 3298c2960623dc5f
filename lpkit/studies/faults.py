"""The failure lab: what goes wrong in low-precision training, put in on purpose, and the search for where it is.

    plant(model, Plant(fault="stale-amax", layers=("blocks.1.mlp.up",)))    # then train, and look at the telemetry
    search(units, loss)                                                     # which layer and product: promote halves

A fault is a row: what it does to one `ScaledLinear`, by composition with its recipe, its backend or its operands. None of
them changes what the layer computes in exact arithmetic, so the same model in bf16 does not have it. `lpkit.studies.bisect` runs
the search on a Config.
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

OUTLIER = 2.0**18       # times as large as it was; from half its least subnormal to its largest value E4M3 spans 2^18.8
STALE = 64.0            # times smaller was the tensor whose amax is still used


# ---- what the faults do to a layer ---------------------------------------------------------------------------------------

def _with(change: Callable[[Recipe], Recipe]) -> Callable[[ScaledLinear], None]:
    def put(layer: ScaledLinear) -> None:
        layer.recipe = change(layer.recipe)

    return put


def _operand(recipe: Recipe, change: Callable[[str, str, Cast], Cast]) -> Recipe:
    """`change(product, operand, cast)` on every cast."""
    return replace(recipe, **{product: tuple(change(product, operand, cast) for operand, cast in zip(PRODUCTS[product], casts))
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
        raise ConfigError(f"{layer.name} scales by what is there and has no history to spoil; set precision.recipe=fp8-delayed")
    return layer.recipe.delayed


def _stale(layer: ScaledLinear) -> None:
    """The history stops after the first micro-batch, as if the tensors had been STALE times smaller then."""
    _history(layer)

    def advance(self: ScaledLinear) -> None:
        seen = self.amax_history
        if not seen[:, 1:].any():
            seen[:, 1:] = seen[:, :1] / STALE
        seen[:, 0] = 0

    layer.advance = MethodType(advance, layer)


def _forgetful(layer: ScaledLinear) -> None:
    delayed = replace(_history(layer), history=1, rule="most-recent")
    layer.amax_history = layer.amax_history[:, :2].clone()      # the micro-batch at hand, and the one before
    layer.recipe = replace(layer.recipe, delayed=delayed)


class _Divided(nn.Module):
    def __init__(self, by: Tensor):
        super().__init__()
        self.register_buffer("by", by, persistent=False)

    def forward(self, w: Tensor) -> Tensor:
        return w / self.by


def _outlier(layer: ScaledLinear) -> None:
    """One input feature times a power of two, its weights divided by it: the same function, exactly, and in bf16 too."""
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

    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, amax: Tensor | None, noise: Noise | None) -> Scaled:
        made = self.inner.cast(x, cast, dtype, amax=amax, noise=noise)
        zero = kernel.amax(TRANSFORMS[cast.transform](x), cast.block).values == 0
        return replace(made, data=torch.where(spread(zero, x.shape), torch.nan, made.data))

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        return self.inner.product(a, b, dtype, bias)


def _zero_block(layer: ScaledLinear) -> None:
    rows, columns = (side or whole for side, whole in zip(layer.recipe.y[1].block, layer.weight.shape))
    with torch.no_grad():
        layer.weight[:rows, :columns] = 0
    layer.arithmetic = _Unguarded(inner=layer.arithmetic)


@dataclass(frozen=True, kw_only=True)
class Fault:
    what: str
    recipe: str                             # the row of `recipes` in which it happens
    put: Callable[[ScaledLinear], None]     # changes the layer in place
    shows: tuple[str, str, int]             # the role and the number of the telemetry that move, and whither: +1 or -1
    symptom: str
    source: str


_TE = "Transformer Engine, FP8 primer, https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html"
_NVFP4 = "NVIDIA 2025, section 4, https://arxiv.org/abs/2509.25149"
FAULTS: dict[str, Fault] = {
    "stale-amax": Fault(
        what=f"delayed scaling whose history no longer moves, from a time when the tensors were {STALE:g} times smaller",
        recipe="fp8-delayed", put=_stale, shows=("x", "saturated", +1), source=_TE,
        symptom="much saturates, at once and in every role; the amax itself is as ever"),
    "short-history": Fault(
        what="delayed scaling that remembers one micro-batch",
        recipe="fp8-delayed", put=_forgetful, shows=("dy", "saturated", +1), source=_TE,
        symptom="a little saturates whenever a tensor has grown since the last step; the loss hardly notices"),
    "swapped-roles": Fault(
        what="E5M2 for activations and weights, E4M3 for gradients",
        recipe="fp8-tensorwise", put=_with(_swapped), shows=("x", "sqnr_db", -1),
        symptom="6 dB less for x and w, one mantissa bit; more of dy underflows, for want of range",
        source="Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433"),
    "outlier-channel": Fault(
        what=f"one input feature {OUTLIER:g} times as large as the others, its weights so much smaller",
        recipe="fp8-tensorwise", put=_outlier, shows=("x", "underflow", +1),
        symptom="one scale for the tensor: what is not the outlier underflows; blocks keep the damage to one of them",
        source="Dettmers et al. 2022, https://arxiv.org/abs/2208.07339"),
    "no-stochastic-rounding": Fault(
        what="gradients in FP4 rounded to nearest",
        recipe="nvfp4", put=_with(_nearest), shows=("dy", "sqnr_db", +1), source=_NVFP4,
        symptom="the SQNR of dy rises, and that is the trap: the error is smaller, but no longer zero on average, so over "
                "many steps it adds up"),
    "no-hadamard": Fault(
        what="the operands of the weight gradient in FP4 cast unmixed",
        recipe="nvfp4", put=_with(_unmixed), shows=("dy.T", "worst_block_db", -1), source=_NVFP4,
        symptom="blocks of the weight gradient's operands that hold an outlier lose everything else"),
    "zero-amax-block": Fault(
        what="a block of weights that is all zero, and a cast that divides by its amax",
        recipe="mxfp8", put=_zero_block, shows=("w", "zero_blocks", +1),
        symptom="0 / 0: NaN in everything that comes after, from the first step",
        source="OCP Microscaling 1.0, section 6.3, leaves the scale of a zero block to the implementation"),
}


# ---- planting and promoting ------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class Plant:
    """A fault in the Linears that match one of `layers`, by default in all that are low-precision."""

    fault: str
    layers: tuple[str, ...] = ("*",)


def plant(model: nn.Module, what: Plant) -> nn.Module:
    """Put it in, in place. Raises ConfigError for an unknown fault, or a pattern that no low-precision Linear matches."""
    fault = pick(FAULTS, what.fault, "fault")
    layers = {layer.name: layer for layer in scaled_linears(model)}
    for pattern in what.layers:
        found = [name for name in layers if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(f"{pattern!r} matches no low-precision Linear to put {what.fault} into; "
                              f"{nearest(pattern, layers)}")
        for name in found:
            fault.put(layers[name])
    return model


def hidden(model: nn.Module, fault: str, seed: int) -> Plant:
    """The fault in one low-precision Linear, drawn from `seed`: for whoever wants to find it."""
    return Plant(fault=fault, layers=(random.Random(seed).choice([layer.name for layer in scaled_linears(model)]),))


Unit = tuple[str, str]      # layer, product


def units(model: nn.Module) -> list[Unit]:
    """Every product that is low-precision, layer by layer."""
    return [(layer.name, product) for layer in scaled_linears(model) for product in layer.recipe.products]


def promote(model: nn.Module, which: Sequence[Unit]) -> nn.Module:
    """Run these products in 16 bits, in place."""
    for layer in scaled_linears(model):
        layer.recipe = replace(layer.recipe, **{product: None for name, product in which if name == layer.name})
    return model


# ---- the search ---------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class Trial:
    """Short runs with some products in 16 bits: means over seeds."""

    promoted: tuple[Unit, ...]
    loss: float                 # nats per token
    recovery: float             # 0: as bad as with nothing promoted; 1: as good as with everything


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Where it is, and how sure that is."""

    suspect: str
    culprits: tuple[Unit, ...]      # the smallest set that halving reaches
    units: int                      # low-precision products in the model
    gap: float                      # nats per token that low precision costs, mean over seeds
    noise: float                    # nats per token between runs in 16 bits that differ by one rounding of the start, rms
    recovery: float                 # of the gap, by promoting the culprits alone
    without: float                  # by promoting everything else
    seeds: int
    runs: int
    path: tuple[Trial, ...]

    @property
    def effect(self) -> float:
        """The gap in units of the noise."""
        return self.gap / self.noise if self.noise else math.copysign(math.inf, self.gap) if self.gap else 0.0

    @property
    def certainty(self) -> str:
        """low: no gap beyond noise, or one that is spread over several layers or comes back by promoting others too."""
        layers = {name for name, _ in self.culprits}
        if self.effect < CLEAR or len(layers) > 1 or self.recovery < 0.5 or self.without > 0.5:
            return "low"
        return "high" if self.effect > 2 * CLEAR and self.recovery > 0.8 and self.without < 0.2 else "medium"

    def __str__(self) -> str:
        cost = (f"{self.suspect} costs {self.gap:.3f} nats per token, {self.effect:.1f} times the noise between runs "
                f"({self.noise:.1g})")
        after = f"certainty {self.certainty}, {self.runs} runs of {self.seeds} seeds"
        if self.effect < CLEAR:
            return f"Nothing to find: {cost}; {after}."
        return (f"{named(self.culprits)}: {cost}; promoting it to 16 bits brings back {self.recovery:.0%} of that, promoting "
                f"everything else {self.without:.0%}; {after}.")


def named(which: Sequence[Unit]) -> str:
    """'blocks.1.mlp.up (y, dx)'."""
    layers = dict.fromkeys(name for name, _ in which)
    return ", ".join(f"{name} ({', '.join(product for layer, product in which if layer == name)})" for name in layers)


CLEAR = 4.0     # a gap of fewer noises is none
Loss = Callable[[Sequence[Unit], int, int], float]      # of a short run: what is promoted, number of the seed and of the nudge
NUDGES = (torch.bfloat16, torch.float16)                # to which a start is rounded, so that two runs drift apart as runs do


def search(suspect: str, all_units: Sequence[Unit], loss: Loss, *, seeds: int = 3) -> Finding:
    """Promote halves, keep the half that brings the loss back; first of the layers, then of one layer's products.

    `loss(promoted, seed, nudge)`: nudge 0 starts from the weights themselves, n from a copy rounded to NUDGES[n - 1].
    At most seeds * (5 + 2 log2(layers) + 4) runs; 4 seeds where nothing is lost. Raises ConfigError for no seeds.
    """
    if seeds < 1:
        raise ConfigError(f"a search needs at least 1 seed, got {seeds}")
    everything, path, numbers = tuple(all_units), [], range(seeds)
    runs = 0

    def mean(promoted: Sequence[Unit]) -> float:
        nonlocal runs
        runs += seeds
        return statistics.fmean(loss(promoted, seed, 0) for seed in numbers)

    def trial(promoted: Sequence[Unit]) -> Trial:
        value = mean(promoted)
        return Trial(promoted=tuple(promoted), loss=value, recovery=(low - value) / gap)

    low, high = mean(()), [loss(everything, seed, 0) for seed in numbers]
    drift = [loss(everything, seed, nudge + 1) - high[seed] for seed in numbers for nudge in range(len(NUDGES))]
    runs += seeds + len(drift)
    gap, noise = low - statistics.fmean(high), math.sqrt(statistics.fmean(d * d for d in drift))
    finding = Finding(suspect=suspect, culprits=everything, units=len(everything), gap=gap, noise=noise, recovery=1.0,
                      without=0.0, seeds=seeds, runs=runs, path=())
    if finding.effect < CLEAR:
        return finding
    found = Trial(promoted=everything, loss=low - gap, recovery=1.0)
    while len(found.promoted) > 1:
        for half in _halves(found.promoted):
            path.append(trial(half))
            if path[-1].recovery > 0.5:
                found = path[-1]
                break
        else:
            break       # it takes both
    rest = trial([unit for unit in everything if unit not in found.promoted])
    return replace(finding, culprits=found.promoted, recovery=found.recovery, without=rest.recovery, runs=runs,
                   path=(*path, rest))


def _halves(which: tuple[Unit, ...]) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """A layer is not cut while there are several."""
    layers = list(dict.fromkeys(name for name, _ in which))
    if len(layers) > 1:
        first = set(layers[:len(layers) // 2])
        return tuple(u for u in which if u[0] in first), tuple(u for u in which if u[0] not in first)
    return which[:len(which) // 2], which[len(which) // 2:]
