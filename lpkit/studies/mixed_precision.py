"""Why mixed precision keeps float32 masters, and why float16 scales its loss: what is lost without,
expected and measured.

A bf16 weight w has neighbours 2^(floor(log2 |w|) - 7) away; an update of less than half of that
rounds back to w. Weights are about N(0, sigma). Adam's update lies between two limits: the learning
rate, when every gradient points the same way, and the learning rate times sqrt((1 - beta1) / (1 +
beta1)), when they are noise that the first moment averages. That brackets the share of updates that
is lost before anything runs, and the size of the update that was made gives it.
Sources: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740 (masters, loss scaling);
Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322 (bf16); Zamirai et al. 2020,
https://arxiv.org/abs/2010.06192 (stochastic rounding).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

from lpkit.errors import pick
from lpkit.optim.rounding import to_bf16
from lpkit.techniques.formats import FORMATS
from lpkit.training.training import Training

BF16_MANTISSA = FORMATS["bf16"].mantissa_bits
BINS = 200      # of |w|, for the integral


def _bf16(w: Tensor) -> Tensor:
    return w.bfloat16().float()


STORES: dict[str, Callable[[Tensor], Tensor]] = {   # what becomes of a weight after an update
    "float32 master": lambda w: w,
    "bf16 weights": _bf16,
    "bf16 weights, stochastic": lambda w: to_bf16(w.contiguous(), None).float(),
}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A short training whose weights are stored as one of STORES; all arithmetic is the run's
    own."""

    losses: tuple[float, ...]
    lost_share: float           # of the last update of all matrices: too small for a bf16 weight
    sigma: float                # root mean square of their weights, before it
    update: float               # root mean square of that update


def train(training: Training, store: str, *, steps: int) -> Stored:
    """`steps` updates at a constant learning rate. Raises ConfigError for an unknown store."""
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
    energy = sum(t.double().square().sum().item() for t in tensors)
    return math.sqrt(energy / sum(t.numel() for t in tensors))


def lost_share(before: list[Tensor], after: list[Tensor]) -> float:
    """Of the updates that are not zero, those that leave a bf16 weight where it was."""
    lost = moved = 0
    for start, to in zip(before, after, strict=True):
        w, update = _bf16(start), (to - start).float()
        lost += int(((_bf16(w + update) == w) & (update != 0)).sum())
        moved += int((update != 0).sum())
    return lost / max(1, moved)


def noisy_update(lr: float, beta1: float = 0.9) -> float:
    """Root mean square of Adam's update when the gradient is noise; when it always points one way,
    it is `lr` itself."""
    return lr * math.sqrt((1 - beta1) / (1 + beta1))


def expected_lost_share(update: float, *, sigma: float) -> float:
    """Of Gaussian updates with that root mean square, to weights of N(0, sigma) stored in bf16."""
    total = 0.0
    for i in range(BINS):       # |w| at evenly spaced probabilities
        w = sigma * NormalDist().inv_cdf((1 + (i + 0.5) / BINS) / 2)
        half = 2.0 ** (math.floor(math.log2(w)) - BF16_MANTISSA - 1)
        total += math.erf(half / update / math.sqrt(2))
    return total / BINS


# Loss scaling.

def underflow(tensors: list[Tensor], scale: float) -> float:
    """Share of the elements other than zero that become zero in float16 after `scale`."""
    lost = sum(int(((t * scale).half() == 0).sum() - (t == 0).sum()) for t in tensors)
    return lost / sum(int((t != 0).sum()) for t in tensors)


def expected_underflow(shares: dict[int, float], scale: float) -> float:
    """The same from a histogram of exponents alone, {floor(log2 |x|): share}: below half the least
    subnormal, 2^-25."""
    limit = math.log2(FORMATS["fp16"].smallest / 2) - math.log2(scale)
    return sum(share for e, share in shares.items() if e < limit)
