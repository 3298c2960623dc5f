"""Lesson 05, mixed precision: its study, its figures and its exercises.

Why does mixed precision keep float32 master weights, and why does float16 scale its loss? This
lesson predicts and measures what is lost without them.

The neighbours of a bf16 weight w are 2^(floor(log2 |w|) - 7) away, so an update of less than half
of that distance rounds back to w: it is lost. Weights are about N(0, sigma). The size of Adam's
update is between two limits: the learning rate, if every gradient has the same direction, and the
learning rate times sqrt((1 - beta1) / (1 + beta1)), if gradients are noise that the first moment
averages. Before training, these limits bracket the share of lost updates; the size of the updates,
measured in training, then gives one value.
Sources: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740 (masters, loss scaling);
Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322 (bf16); Zamirai et al. 2020,
https://arxiv.org/abs/2010.06192 (stochastic rounding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import NormalDist

import torch
from torch import Tensor

from lessons.draws import normal
from lessons.figures.colours import ANSWER_COLOURS, lines_of
from lessons.figures.drawing import POWERS, axis, columns, figure, rule, scatter
from lessons.figures.style import COLOURS
from lessons.judging.judge import Exercise, adding_to
from lpkit.errors import pick
from lpkit.optim.rounding import to_bf16
from lpkit.techniques.formats import FORMATS
from lpkit.training.steps import LossScaler
from lpkit.training.training import Training

# notebook 05 imports LossScaler from here
__all__ = ["LossScaler"]

# ---- The study

BF16_MANTISSA = FORMATS["bf16"].mantissa_bits
BINS = 200      # number of quantiles of |w| over which `expected_lost_share` averages


def _bf16(w: Tensor) -> Tensor:
    return w.bfloat16().float()


STORES: dict[str, Callable[[Tensor], Tensor]] = {   # how a weight is stored after an update
    "float32 master": lambda w: w,
    "bf16 weights": _bf16,
    "bf16 weights, stochastic": lambda w: to_bf16(w.contiguous(), None).float(),
}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Result of a short training whose weights are rounded as a row of STORES says after each
    update. Everything else is computed as usual."""

    losses: tuple[float, ...]   # nats per token, of each step
    lost_share: float           # share of the last step's updates that bf16 weights would lose
    sigma: float                # root mean square of the weight matrices before the last step
    update: float               # root mean square of the last step's updates


def train(training: Training, store: str, *, steps: int) -> Stored:
    """Train `steps` updates at a constant learning rate, and store the weights as STORES[store]
    after each. Raises ConfigError for an unknown store."""
    training = replace(training, schedule=lambda step: 1.0)
    become, losses = pick(STORES, store, "way to store weights"), []
    matrices = [p for p in training.model.parameters() if p.ndim == 2]
    for step in range(steps):
        before = [p.detach().clone() for p in matrices] if step == steps - 1 else []
        losses.append(training.update(step).loss.item())
        updated = [p.detach().clone() for p in matrices] if before else []
        with torch.no_grad():
            for p in training.model.parameters():
                p.copy_(become(p))
    return Stored(losses=tuple(losses), lost_share=lost_share(before, updated), sigma=_rms(before),
                  update=_rms([b - a for a, b in zip(before, updated)]))


def _rms(tensors: list[Tensor]) -> float:
    """Return the root mean square of the elements of all tensors."""
    energy = sum(t.double().square().sum().item() for t in tensors)
    return math.sqrt(energy / sum(t.numel() for t in tensors))


def lost_share(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the share of the non-zero updates, after - before, that would leave a weight stored in
    bf16 unchanged. The two lists have the weights before and after an update."""
    lost = moved = 0
    for start, to in zip(before, after, strict=True):
        w, update = _bf16(start), (to - start).float()
        lost += int(((_bf16(w + update) == w) & (update != 0)).sum())
        moved += int((update != 0).sum())
    return lost / max(1, moved)


def noisy_update(lr: float, beta1: float = 0.9) -> float:
    """Return the root mean square of Adam's update if the gradients are noise: the smaller of the
    two limits. The larger limit is `lr`, if the gradient always has the same direction."""
    return lr * math.sqrt((1 - beta1) / (1 + beta1))


def expected_lost_share(update: float, *, sigma: float) -> float:
    """Return the expected share of lost updates, for weights from N(0, sigma) that are stored in
    bf16 and Gaussian updates with root mean square `update`."""
    total = 0.0
    for i in range(BINS):       # |w| at evenly spaced probabilities
        w = sigma * NormalDist().inv_cdf((1 + (i + 0.5) / BINS) / 2)
        # half the distance to the neighbours of w
        half = 2.0 ** (math.floor(math.log2(w)) - BF16_MANTISSA - 1)
        total += math.erf(half / update / math.sqrt(2))
    return total / BINS


# Loss scaling.

def underflow(tensors: list[Tensor], scale: float) -> float:
    """Return the share of the non-zero elements of all tensors that become zero in float16 after a
    multiplication by `scale`."""
    lost = sum(int(((t * scale).half() == 0).sum() - (t == 0).sum()) for t in tensors)
    return lost / sum(int((t != 0).sum()) for t in tensors)


def expected_underflow(shares: dict[int, float], scale: float) -> float:
    """Return `underflow` by a histogram {floor(log2 |x|): share} of the non-zero elements. Elements
    below half of float16's smallest subnormal, 2^-25, become zero."""
    limit = math.log2(FORMATS["fp16"].smallest / 2) - math.log2(scale)
    return sum(share for e, share in shares.items() if e < limit)


# ---- Figures

def lost_figure(rates: Sequence[float], formula: Mapping[str, Sequence[float]],
                measured: Mapping[float, float], *, title: str = "") -> dict:
    """Return the plotly spec of the share of lost updates over the learning rate: a line for each
    limit in `formula` (shares at `rates`), and points for the `measured` shares by rate."""
    data = [scatter(rates, [100 * y for y in shares], name, ANSWER_COLOURS["formula"],
                    line={"dash": ("solid", "dash")[i % 2]})
            for i, (name, shares) in enumerate(formula.items())]
    data.append(scatter(measured, [100 * y for y in measured.values()], "measured",
                        ANSWER_COLOURS["measured"], mode="markers", marker={"size": 10}))
    return figure(data, title, height=360, xaxis=axis("learning rate", **POWERS),
                  yaxis=axis("lost updates (%)", range=[0, 105]))


def losses_figure(curves: Mapping[str, Sequence[float]], *, title: str = "") -> dict:
    """Return the plotly spec of training losses over steps, by name. The first lines are the
    broadest, so that a line stays visible under an equal line."""
    lines = [scatter(range(1, len(curves[name]) + 1), curves[name], name,
                     line={**line, "width": 2 + 2.5 * below})
             for below, (name, line) in zip(reversed(range(len(curves))),
                                            lines_of(curves).items())]
    return figure(lines, title, height=380, xaxis=axis("step"),
                  yaxis=axis("training loss, nats per token"))


def scaling_view(shares: Mapping[int, float], smallest: float,
                 largest: float) -> Callable[[int], dict]:
    """Return a function of `exponent` for an Explorer: a histogram of the gradients times
    2^exponent, and the range of a format. Gradients left of the range become zero, gradients right
    of it become infinite.

    shares: share of the gradients by floor(log2 |gradient|), without a scale
    smallest, largest: the format's smallest and largest value
    """
    low, high = math.log2(smallest) - 1, math.log2(largest)

    def show(exponent: int) -> dict:
        moved = {float(e + exponent): 100 * share for e, share in shares.items()}
        held = {e: share for e, share in moved.items() if low <= e + 0.999 and e <= high}
        lost = {e: share for e, share in moved.items() if e not in held}
        zero = sum(share for e, share in lost.items() if e < low)
        return figure(
            [columns(held, held.values(), "held", COLOURS[0], width=0.9),
             columns(lost, lost.values(), "lost", COLOURS[2], width=0.9)],
            f"Scaled by 2^{exponent}: {zero:.1f}% of the gradients become zero", height=360,
            barmode="overlay", yaxis=axis("share of the gradients, %"),
            xaxis=axis("log2 of a gradient after scaling", range=[-50, 20]),
            shapes=[rule(x=x, width=1.5, dash="dash") for x in (low, high)])

    return show


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: an update that does not change a weight, the scale that saves a gradient, and the bytes
# of mixed precision.

def _update(r: Random) -> tuple[float, float]:
    weight = r.randrange(128, 256) * 2.0 ** r.randint(-16, -4)      # a bf16 number
    return weight, 2.0 ** (math.floor(math.log2(weight)) - 8) * r.choice((0.3, 0.7, 0.9, 1.1, 1.7))


@exercise("05.is_lost", (1.0, 1e-3), (1.0, 5e-3), (0.01953125, 1e-5), (0.01953125, 1e-4),
          draw=_update,
          mistakes={"from half the gap on, the weight is rounded up":
                        lambda w, update: update < 2.0 ** (math.floor(math.log2(w)) - 7),
                    "half the gap, not a quarter":
                        lambda w, update: update < 2.0 ** (math.floor(math.log2(w)) - 9)})
def is_lost(weight: float, update: float) -> bool:
    return update < 2.0 ** (math.floor(math.log2(weight)) - 8)      # half of the spacing


@exercise("05.scale_for", (2.0**-14,), (1e-6,), (1e-9,), (0.5,),
          draw=lambda r: (2.0 ** r.uniform(-40, 4),),
          mistakes={"2^-24 is the smallest subnormal number":
                        lambda gradient: max(1.0, 2.0 ** math.ceil(-24 - math.log2(gradient))),
                    "the scale is 1 or more":
                        lambda gradient: 2.0 ** math.ceil(-14 - math.log2(gradient))})
def scale_for(gradient: float) -> float:
    return max(1.0, 2.0 ** math.ceil(-14 - math.log2(gradient)))


@exercise("05.state_bytes", (1, False), (124_000_000, True),
          draw=lambda r: (r.randint(1, 10**11), r.random() < 0.5),
          mistakes={"the float32 masters are kept, too":
                        lambda parameters, low: parameters * ((2 if low else 4) + 8)})
def mixed_state_bytes(parameters: int, low_precision_weights: bool) -> int:
    return parameters * (4 + 8 + (2 if low_precision_weights else 0))


# Exercises: the loss scaler, and the purpose of masters.

def _never_reset(finite: list[bool], scale: float, interval: int) -> list[float]:
    scales, good = [], 0
    for ok in finite:
        scales.append(scale)
        good += ok
        scale = scale / 2 if not ok else scale
        if ok and good % interval == 0:
            scale *= 2
    return scales


@exercise("05.loss_scaler", ([True, False], 8.0, 2), ([True, True, True], 8.0, 2),
          draw=lambda r: ([r.random() < 0.8 for _ in range(r.randint(1, 20))],
                          r.choice((1.0, 65536.0)), r.randint(1, 4)), minutes=10, stars=2,
          mistakes={"an overflow starts the count again": _never_reset,
                    "return the scale that each step used, not the scale after it":
                        lambda finite, scale, interval:
                        loss_scaler([*finite, True], scale, interval)[1:]})
def loss_scaler(finite: list[bool], scale: float, interval: int) -> list[float]:
    scales, good = [], 0
    for ok in finite:
        scales.append(scale)
        good = good + 1 if ok else 0
        if not ok:
            scale /= 2
        elif good == interval:
            scale, good = scale * 2, 0
    return scales


def _without_masters(weight: Tensor, updates: list[Tensor]) -> Tensor:
    for update in updates:
        weight = (weight - update).to(torch.bfloat16)
    return weight


@exercise("05.with_masters", (torch.tensor([1.0]).bfloat16(), [torch.tensor([0.5])]),
          (torch.tensor([1.0]).bfloat16(), [torch.tensor([0.001])] * 16),
          draw=lambda r: (normal(r, 8).bfloat16(),
                          [normal(r, 8, size=1e-3) for _ in range(r.randint(1, 20))]),
          tolerance=0, minutes=5,
          mistakes={"each update is rounded away in 16 bits: add the updates in float32":
                        _without_masters})
def with_masters(weight: Tensor, updates: list[Tensor]) -> Tensor:
    master = weight.float()
    for update in updates:
        master = master - update
    return master.to(torch.bfloat16)
