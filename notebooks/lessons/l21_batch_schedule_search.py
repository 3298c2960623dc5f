"""Lesson 21, Batch, schedule, search: its study, its figures and its exercises.

How many updates a run needs follows from how noisy its gradients are. With g the gradient of a
sequence, G its mean and S the trace of its covariance, a batch of B sequences needs

    steps(B) = S_min (1 + B_noise / B),     B_noise = S / |G|^2

(McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, equations 2.8 and 5.1, appendix A.1). The
model is tiny and the text real; the runs are those of data/measured/batch-steps-*.json, which
`lpkit bench batch-steps --out data/measured` makes. Batches and noise scales are in sequences, losses
in nats per token.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from statistics import fmean, linear_regression, stdev
from typing import Any

import torch

from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.nn.init import fan_in
from lpkit.predict.evidence import MEASURED
from lpkit.presets import preset
from lpkit.techniques.inits import INITS
from lpkit.techniques.row import Row
from lpkit.training.training import Training

# ---- Runs, and their noise

BASE = {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32,
        "model.init": "fan-in", "schedule": "constant", "schedule.warmup_steps": 10,
        "optimizer.weight_decay": 0.0, "optimizer.clip": 0.0, "eval_every": 0, "eval_batches": 1,
        "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1}
BATCHES = (4, 8, 16, 32, 64)    # that are predicted
ANCHOR = 128                    # from which they are
TARGETS = (2.6, 2.4)
LEVELS = (3.2, 2.9, 2.7, 2.6, 2.5, 2.4)     # losses at which the noise is measured
RATES = {"adamw": (0.001, 0.002, 0.004, 0.008, 0.016, 0.032), "sgd": (0.2, 0.4, 0.8, 1.6, 3.2)}
MOST_STEPS = {"adamw": 1500, "sgd": 2000}
SEEDS = 3
SMALL, PARTS, GROUPS = 4, 16, 40    # sequences of a micro-batch, micro-batches of a group, groups
HELD = 128                          # validation sequences, the same for all


def config(optimizer: str, batch: int, lr: float, seed: int = 0) -> Config:
    return preset("cpu-3m").replace(BASE | {
        "optimizer": optimizer, "optimizer.lr": lr, "global_batch": batch, "seed": seed,
        "steps": MOST_STEPS[optimizer]})


def held_out() -> Batch:
    return Training.build(config("adamw", HELD, 0.001)).val.batch(0)


def moments_to_look() -> Iterator[int]:
    """Steps after which a run is evaluated: 4% apart, at least one."""
    step = 5
    while True:
        yield step
        step = max(step + 1, round(1.04 * step))


def curve(training: Training, held: Batch, last: float) -> Iterator[tuple[int, float]]:
    """Trains until the loss of `held` is `last`; yields (steps, loss) on the way. Ends early where
    it diverges, and after the config's steps."""
    looks = moments_to_look()
    due = next(looks)
    for step in range(training.config.steps):
        training.update(step)
        if step + 1 == due:
            with torch.no_grad():
                loss = training.loss(training.model, held).item()
            if not loss < 10:
                return
            yield due, loss
            if loss <= last:
                return
            due = next(looks)


def steps_to(points: Sequence[tuple[int, float]], target: float) -> float | None:
    """Returns where a curve reaches `target` first, between two looks by a straight line."""
    for (s0, above), (s1, loss) in itertools.pairwise(points):
        if loss <= target < above:
            return s0 + (s1 - s0) * (above - target) / (above - loss)
    return None


def squared(gradients: Sequence[torch.Tensor]) -> float:
    return sum(g.square().sum().item() for g in gradients)


def squared_norms(training: Training, *, groups: int = GROUPS, first: int = 0
                  ) -> tuple[list[float], list[float]]:
    """Returns, for each group of PARTS micro-batches, the mean of their gradients' squared norms, and
    the squared norm of their mean gradient. The text is drawn by another seed than a run's."""
    text = Training.build(config("adamw", SMALL * PARTS, 0.001, seed=12345)).data
    parameters, small, large = list(training.model.parameters()), [], []
    for group in range(first, first + groups):
        total, norms = [torch.zeros_like(p) for p in parameters], []
        for piece in text.batch(group).chunk(PARTS):
            found = torch.autograd.grad(training.loss(training.model, piece), parameters)
            norms.append(squared(found))
            torch._foreach_add_(total, found)
        small.append(fmean(norms))
        large.append(squared(total) / PARTS**2)
    return small, large


@dataclass(frozen=True)
class Estimate:
    """A noise scale in sequences, and where 95 of 100 resamples lie."""

    value: float
    low: float
    high: float
    resampled: tuple[float, ...] = ()


def noise_scale(small: Sequence[float], large: Sequence[float], *, b_small: int = SMALL,
                b_large: int = SMALL * PARTS, resamples: int = 1000, seed: int = 0) -> Estimate:
    """The noise scale from squared gradient norms of small and of large batches, in pairs, with a
    bootstrap interval over pairs.

    E|g_B|^2 = |G|^2 + S / B, so two sizes give both (McCandlish et al. 2018, appendix A.1). Where
    a resample has no signal left, |G|^2 <= 0, its scale is infinite.
    """
    def scale(a: float, b: float) -> float:
        signal = (b_large * b - b_small * a) / (b_large - b_small)
        noise = (a - b) / (1 / b_small - 1 / b_large)
        return noise / signal if signal > 0 else math.inf

    rng, n = Random(seed), len(small)
    drawn = []
    for _ in range(resamples):
        picks = rng.choices(range(n), k=n)
        drawn.append(scale(fmean(small[i] for i in picks), fmean(large[i] for i in picks)))
    in_order = sorted(drawn)
    low, high = (in_order[round(q * (resamples - 1))] for q in (0.025, 0.975))
    return Estimate(scale(fmean(small), fmean(large)), low, high, tuple(drawn))


def noise_on_the_way(optimizer: str, lr: float, held: Batch) -> dict[str, Any]:
    """The bench's: one run of ANCHOR sequences down to the last target, and the norms at LEVELS."""
    training = Training.build(config(optimizer, ANCHOR, lr))
    points, norms, left = [(0, math.log(256))], [], list(LEVELS)
    for step, loss in curve(training, held, min(TARGETS)):
        points.append((step, loss))
        if left and loss <= left[0]:
            left = [level for level in left if level < loss]
            small, large = squared_norms(training)
            norms.append({"step": step, "loss": loss, "small": small, "large": large})
    return {"lr": lr, "curve": points, "norms": norms}


# ---- What a record says

@dataclass(frozen=True)
class Best:
    """The learning rate that reaches a loss in the fewest updates, between those of the grid by a
    parabola, and those updates. `spread`: standard deviation of their logarithm from seed to
    seed."""

    lr: float
    steps: float
    spread: float


@dataclass(frozen=True)
class Record:
    """Replays `lpkit bench batch-steps`."""

    found: Mapping[str, Any]

    @classmethod
    def read(cls) -> Record:
        return cls(json.loads(next(MEASURED.glob("batch-steps-*.json")).read_text()))

    @cached_property
    def _steps(self) -> dict[tuple, list[float]]:
        """By (optimizer, batch, target, lr), a number a seed; those that all seeds reached."""
        found: dict[tuple, list[float]] = {}
        for run in self.found["runs"]:
            for target, steps in zip(TARGETS, run["steps"], strict=True):
                found.setdefault((run["optimizer"], run["batch"], target, run["lr"]), []).append(steps)
        return {key: steps for key, steps in found.items() if None not in steps}

    def by_rate(self, optimizer: str, batch: int, target: float) -> dict[float, list[float]]:
        return {key[3]: steps for key, steps in sorted(self._steps.items())
                if key[:3] == (optimizer, batch, target)}

    def best(self, optimizer: str, batch: int, target: float) -> Best:
        rates = self.by_rate(optimizer, batch, target)
        x, y = [math.log(lr) for lr in rates], [fmean(map(math.log, steps)) for steps in rates.values()]
        at = y.index(min(y))
        spread = stdev(map(math.log, rates[list(rates)[at]])) if len(next(iter(rates.values()))) > 1 else 0.0
        if not 0 < at < len(y) - 1:
            return Best(math.exp(x[at]), math.exp(y[at]), spread)
        left, right = y[at - 1] - y[at], y[at + 1] - y[at]
        move = (left - right) / (left + right) / 2          # in steps of the grid
        lowest = y[at] - (left - right) ** 2 / (left + right) / 8
        return Best(math.exp(x[at] + move * (x[at + 1] - x[at])), math.exp(lowest), spread)

    def spread(self, optimizer: str) -> float:
        """Pooled over batches and targets, at their best rates."""
        found = [self.best(optimizer, batch, target).spread
                 for batch in (*BATCHES, ANCHOR) for target in TARGETS]
        return math.sqrt(fmean(s * s for s in found))

    @cached_property
    def scales(self) -> dict[str, list[tuple[float, Estimate]]]:
        """Losses, and the noise scale there, on the way of an optimizer's largest batch."""
        return {name: [(at["loss"], noise_scale(at["small"], at["large"], seed=i))
                       for i, at in enumerate(way["norms"])]
                for name, way in self.found["noise"].items()}

    def on_the_way(self, optimizer: str, target: float, draw: int | None = None) -> tuple[float, float]:
        """Returns the noise scale of a whole run to `target`, and the share of the anchor's updates
        that an endless batch would need. `draw`: the bootstrap's resample; None: the estimate."""
        known = [(loss, math.log(min(1e4, e.value if draw is None else e.resampled[draw])))
                 for loss, e in self.scales[optimizer]]
        ways, needed, noisy = self.found["noise"][optimizer]["curve"], 0.0, 0.0
        for (s0, _), (s1, loss) in itertools.pairwise(ways):
            scale = math.exp(between(known, loss))
            weight = (s1 - s0) / (1 + scale / ANCHOR)
            needed, noisy, last = needed + weight, noisy + weight * scale, s1
            if loss <= target:
                break
        return noisy / needed, needed / last

    def predicted(self, optimizer: str, batch: int, target: float) -> Estimate:
        """Updates of `batch` sequences, from the anchor's and the noise. The interval is that of a
        mean of SEEDS runs: it has the bootstrap of the noise, and the seeds of both."""
        anchor, spread = self.best(optimizer, ANCHOR, target), self.spread(optimizer)
        rng, drawn = Random(0), []

        def steps(draw: int | None) -> float:
            scale, share = self.on_the_way(optimizer, target, draw)
            return anchor.steps * share * (1 + scale / batch)

        for draw in range(400):
            drawn.append(steps(draw) * math.exp(rng.gauss(0, spread * math.sqrt(2 / SEEDS))))
        drawn.sort()
        return Estimate(steps(None), drawn[9], drawn[-10], tuple(drawn))


def between(known: Sequence[tuple[float, float]], x: float) -> float:
    """Straight lines through `known`, whose first numbers fall; flat beyond the ends."""
    if x >= known[0][0]:
        return known[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(known):
        if x >= x1:
            return y0 + (y1 - y0) * (x0 - x) / (x0 - x1)
    return known[-1][1]


# ---- Width: standard parametrisation, and muP built from outside

WIDTHS = (32, 64, 128, 256)
WIDTH_RATES = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
HEAD_DIM = 16       # of every width, so that the scale of attention's scores stays as it is


@torch.no_grad()
def mup_init(model: torch.nn.Module) -> None:
    """Hidden matrices N(0, 1 / inputs) as ever, embeddings of one size at every width (table 3 of
    Yang et al. 2022), and the head 0 (its appendix D.2), which is small enough at every width."""
    fan_in(model)
    for table in (model.embed.weight, *model.positions.parameters()):
        torch.nn.init.normal_(table, std=WIDTHS[0] ** -0.5)
    torch.nn.init.zeros_(model.head.weight)


INITS["mup"] = Row(why="initialisation of muP", source="Yang et al. 2022, arXiv:2203.03466, table 3",
                   implementation="lessons.l21_batch_schedule_search:mup_init")


def mup(width: int) -> dict[str, Any]:
    """Settings of muP at a width: Adam's rate of what has a width of inputs goes with 1 / width, so
    that it is the run's own at WIDTHS[0]; the rates of embeddings and vectors stay."""
    scale = WIDTHS[0] / width
    return {"model.init": "mup", "optimizer.groups": (
        f"blocks.*.attention.*.weight:lr_scale={scale}", f"blocks.*.mlp.*.weight:lr_scale={scale}",
        f"head.weight:lr_scale={scale}")}


PARAMETRISATIONS = {"standard": lambda width: {}, "muP": mup}


def of_width(how: str, width: int, lr: float, seed: int = 0) -> Config:
    return config("adamw", 8, lr, seed).replace(
        {"model.width": width, "model.heads": width // HEAD_DIM, "model.tied": False, "steps": 60,
         "eval_batches": 16}
        | PARAMETRISATIONS[how](width))


@torch.no_grad()
def activations(training: Training, held: Batch) -> dict[str, torch.Tensor]:
    """What leaves each part for the same text, by name."""
    found, hooks = {}, []
    parts = {"embedding": training.model.embed, "attention": training.model.blocks[-1].attention,
             "mlp": training.model.blocks[-1].mlp, "logits": training.model.head}
    for name, part in parts.items():
        hooks.append(part.register_forward_hook(
            lambda module, inputs, out, name=name: found.update({name: out.clone()})))
    training.model(held.tokens)
    for hook in hooks:
        hook.remove()
    return found


def coordinate_check(how: str, width: int, *, lr: float = 0.01, steps: int = 4, seeds: int = 3
                     ) -> dict[str, float]:
    """Returns the root mean square by which each part's activations have moved after a few updates,
    the mean over seeds (Yang et al. 2022, appendix D.1)."""
    moved: dict[str, list[float]] = {}
    for seed in range(seeds):
        training = Training.build(of_width(how, width, lr, seed))
        held = training.val.batch(0)
        before = activations(training, held)
        for step in range(steps):
            training.update(step)
        for name, after in activations(training, held).items():
            moved.setdefault(name, []).append((after - before[name]).square().mean().sqrt().item())
    return {name: fmean(values) for name, values in moved.items()}


def loss_of_width(how: str, width: int, lr: float, seed: int) -> float | None:
    """Returns the validation loss after the config's steps; None: it diverged."""
    training = Training.build(of_width(how, width, lr, seed))
    for step in range(training.config.steps):
        training.update(step)
    loss = training.evaluate()
    return round(loss, 4) if loss < 10 else None


def mean_loss(runs: Sequence[Mapping[str, Any]], how: str, width: int, lr: float) -> float:
    """Over seeds; infinite where one diverged."""
    found = [run["loss"] for run in runs if (run["how"], run["width"], run["lr"]) == (how, width, lr)]
    return math.inf if None in found else fmean(found)


def best_by_width(runs: Sequence[Mapping[str, Any]], how: str) -> dict[int, float]:
    """The best learning rate of the grid for each width."""
    return {width: min(WIDTH_RATES, key=lambda lr, width=width: mean_loss(runs, how, width, lr))
            for width in WIDTHS}


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent of the power law through the points, by least squares of logarithms."""
    u, v = list(map(math.log, x)), list(map(math.log, y))
    return linear_regression(u, v).slope
