"""Lesson 21, Noise scale and schedules: its study, its figures and its exercises.

The number of updates that a run needs depends on the noise of its gradients. Let g be the gradient
of a sequence, G its mean and S the trace of its covariance; then a batch of B sequences needs

    steps(B) = S_min (1 + B_noise / B),     B_noise = S / |G|^2

(McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, section 2 and appendix A.1). The model is
tiny and the text is real. The runs are recorded in data/measured/batch-steps-*.json, which
`lpkit bench batch-steps --out data/measured` writes. Batches and noise scales are in sequences,
losses in nats per token.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from statistics import fmean, linear_regression, stdev
from time import process_time
from typing import Any

import torch

import lessons.rows.sizes  # noqa: F401  adds rows
from lessons.figures.drawing import axis, figure, note, scatter
from lessons.figures.style import COLOURS
from lessons.judging.index import Moved
from lessons.judging.judge import adding_to
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.predict.evidence import MEASURED
from lpkit.presets import preset
from lpkit.tables import FAINT, html_table
from lpkit.training.training import Training

# ---- Runs and their noise

BASE = {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32,
        "model.init": "fan-in", "schedule": "constant", "schedule.warmup_steps": 10,
        "optimizer.weight_decay": 0.0, "optimizer.clip": 0.0, "eval_every": 0, "eval_batches": 1,
        "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1}
BATCHES = (4, 8, 16, 32, 64)    # batches to predict
ANCHOR = 128                    # batch from which they are predicted
TARGETS = (2.6, 2.4)
NOISE_FROM, PHASES = 3.3, 5     # the noise is measured below this loss, in this many parts of a run
RATES = {"adamw": (0.001, 0.002, 0.004, 0.008, 0.016, 0.032), "sgd": (0.2, 0.4, 0.8, 1.6)}
NAMES = {"adamw": "AdamW", "sgd": "SGD"}
MOST_STEPS = 1500
SEEDS = 3
SMALL, PARTS = 4, 16    # sequences of a micro-batch, micro-batches of a group
GROUPS = 4              # groups at each evaluation: 50 evaluations have 3,200 micro-batches
HELD = 128                          # validation sequences, the same for all runs
NOT_COMPARED = "no recorded run with this batch size reached the loss"


def config(optimizer: str, batch: int, lr: float, seed: int = 0) -> Config:
    return preset("cpu-3m").replace(BASE | {
        "optimizer": optimizer, "optimizer.lr": lr, "global_batch": batch, "seed": seed,
        "steps": MOST_STEPS})


def held_out() -> Batch:
    return Training.build(config("adamw", HELD, 0.001)).val.batch(0)


def moments_to_look() -> Iterator[int]:
    """Yield the steps after which a run is evaluated. Each is 4% later than the step before, and at
    least one step."""
    step = 5
    while True:
        yield step
        step = max(step + 1, round(1.04 * step))


def curve(training: Training, held: Batch, last: float) -> Iterator[tuple[int, float]]:
    """Train until the loss of the batch `held` is at most `last`, and yield (steps, loss) at each
    evaluation. Ends early if the run diverges, and after the config's steps."""
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
    """Return the step at which a curve of (step, loss) first reaches `target`, interpolated
    linearly; None if it does not."""
    for (s0, above), (s1, loss) in itertools.pairwise(points):
        if loss <= target < above:
            return s0 + (s1 - s0) * (above - target) / (above - loss)
    return None


def squared(gradients: Sequence[torch.Tensor]) -> float:
    """Return the squared norm of all gradients together."""
    return sum(g.square().sum().item() for g in gradients)


def squared_norms(training: Training, *, groups: int = GROUPS, first: int = 0
                  ) -> tuple[list[float], list[float]]:
    """Return two numbers for each group of PARTS micro-batches: the mean of the squared gradient
    norms of the micro-batches, and the squared norm of their mean gradient. `first`: number of the
    first group. The text is drawn with a seed that no run uses."""
    text = Training.build(config("adamw", SMALL * PARTS, 0.001, seed=12345)).data
    parameters, small, large = list(training.model.parameters()), [], []
    for group in range(first, first + groups):
        total, norms = [torch.zeros_like(p) for p in parameters], []
        for piece in text.batch(group).chunk(PARTS):
            gradients = torch.autograd.grad(training.loss(training.model, piece), parameters)
            norms.append(squared(gradients))
            torch._foreach_add_(total, gradients)
        small.append(fmean(norms))
        large.append(squared(total) / PARTS**2)
    return small, large


@dataclass(frozen=True)
class Estimate:
    """A noise scale in sequences, with its 95% interval over resamples."""

    value: float
    low: float
    high: float
    resampled: tuple[float, ...] = field(default=(), repr=False)


def noise_scale(small: Sequence[float], large: Sequence[float], *, b_small: int = SMALL,
                b_large: int = SMALL * PARTS, resamples: int = 1000, seed: int = 0) -> Estimate:
    """Estimate the noise scale from pairs of squared gradient norms: of batches of `b_small` and of
    `b_large` sequences. The interval is a bootstrap over the pairs.

    E|g_B|^2 = |G|^2 + S / B, so two batch sizes determine G and S (McCandlish et al. 2018, appendix
    A.1). If a resample has no signal (|G|^2 <= 0), its scale is infinite.
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


def noise_on_the_way(optimizer: str, batch: int, lr: float, held: Batch, last: float
                     ) -> dict[str, Any]:
    """Train one run down to the loss `last`. At each evaluation below NOISE_FROM, record the means
    of both squared norms over GROUPS groups."""
    training = Training.build(config(optimizer, batch, lr))
    points, looks = [(0, math.log(256))], []
    for step, loss in curve(training, held, last):
        points.append((step, round(loss, 4)))
        if loss <= NOISE_FROM:
            small, large = squared_norms(training, first=GROUPS * len(looks))
            looks.append({"step": step, "loss": round(loss, 4), "small": fmean(small),
                          "large": fmean(large)})
    return {"batch": batch, "lr": lr, "curve": points, "looks": looks}


def in_phases(looks: Sequence[Mapping[str, float]], phases: int = PHASES
              ) -> list[tuple[float, Estimate]]:
    """Return the mean loss and the noise scale of each of `phases` parts of a run. The evaluations
    of a part are pooled, because the squared norms at a single evaluation are too noisy."""
    estimates = []
    for k in range(phases):
        part = looks[k * len(looks) // phases:(k + 1) * len(looks) // phases]
        estimates.append((fmean(at["loss"] for at in part), noise_scale(
            [at["small"] for at in part], [at["large"] for at in part], seed=k)))
    return estimates


# ---- Recorded runs

@dataclass(frozen=True)
class Best:
    """The learning rate that reaches a loss in the fewest updates, and the number of these updates
    (`steps`). Both are interpolated between the grid's learning rates by a parabola. `spread`: the
    standard deviation over seeds of the logarithm of the updates."""

    lr: float
    steps: float
    spread: float


@dataclass(frozen=True)
class Record:
    """The recorded runs of `lpkit bench batch-steps`."""

    data: Mapping[str, Any]

    @classmethod
    def read(cls) -> Record:
        return cls(json.loads(next(MEASURED.glob("batch-steps-*.json")).read_text()))

    @cached_property
    def _steps(self) -> dict[tuple, list[float]]:
        """Return the updates of each seed by (optimizer, batch, target, lr), for runs of which all
        seeds reached the target."""
        by_setting: dict[tuple, list[float]] = {}
        for run in self.data["runs"]:
            for target, steps in zip(TARGETS, run["steps"], strict=True):
                key = run["optimizer"], run["batch"], target, run["lr"]
                by_setting.setdefault(key, []).append(steps)
        return {key: steps for key, steps in by_setting.items() if None not in steps}

    def by_rate(self, optimizer: str, batch: int, target: float) -> dict[float, list[float]]:
        return {key[3]: steps for key, steps in sorted(self._steps.items())
                if key[:3] == (optimizer, batch, target)}

    def best(self, optimizer: str, batch: int, target: float) -> Best:
        """Return the best learning rate for a batch size and a target loss. If the best rate is at
        an end of the grid, it is not interpolated."""
        rates = self.by_rate(optimizer, batch, target)
        x = [math.log(lr) for lr in rates]
        y = [fmean(map(math.log, steps)) for steps in rates.values()]
        at = y.index(min(y))
        of_seeds = [math.log(steps) for steps in list(rates.values())[at]]
        spread = stdev(of_seeds) if len(of_seeds) > 1 else 0.0
        if not 0 < at < len(y) - 1:
            return Best(math.exp(x[at]), math.exp(y[at]), spread)
        left, right = y[at - 1] - y[at], y[at + 1] - y[at]
        move = (left - right) / (left + right) / 2          # in steps of the grid
        lowest = y[at] - (left - right) ** 2 / (left + right) / 8
        return Best(math.exp(x[at] + move * (x[at + 1] - x[at])), math.exp(lowest), spread)

    def spread(self, optimizer: str) -> float:
        """Return `Best.spread` pooled over batches and targets (root mean square)."""
        spreads = [self.best(optimizer, batch, target).spread
                 for batch in (*BATCHES, ANCHOR) for target in TARGETS]
        return math.sqrt(fmean(s * s for s in spreads))

    @cached_property
    def scales(self) -> dict[str, list[tuple[float, Estimate]]]:
        """Return, by optimizer, the losses and noise scales along its run with ANCHOR sequences."""
        return {name: in_phases(way["looks"]) for name, way in self.data["noise"].items()}

    def on_the_way(self, optimizer: str, target: float, draw: int | None = None
                   ) -> tuple[float, float]:
        """Return the noise scale of a whole run to `target`, and the updates that an infinite batch
        would need over the anchor's updates. Each update of the anchor counts with the noise scale
        at its loss. `draw`: number of a bootstrap resample; None: the estimate."""
        known = [(loss, math.log(min(1e4, e.value if draw is None else e.resampled[draw])))
                 for loss, e in self.scales[optimizer]]
        ways, needed, noisy = self.data["noise"][optimizer]["curve"], 0.0, 0.0
        for (s0, _), (s1, loss) in itertools.pairwise(ways):
            scale = math.exp(between(known, loss))
            weight = (s1 - s0) / (1 + scale / ANCHOR)
            needed, noisy, last = needed + weight, noisy + weight * scale, s1
            if loss <= target:
                break
        return noisy / needed, needed / last

    def predicted(self, optimizer: str, batch: int, target: float) -> Estimate:
        """Predict the updates to `target` with `batch` sequences from the anchor's updates and the
        noise scale. The 95% interval is for a mean of SEEDS runs. It includes the bootstrap of the
        noise scale and the spread over seeds of both batches."""
        anchor, spread = self.best(optimizer, ANCHOR, target), self.spread(optimizer)
        rng, drawn = Random(0), []

        def steps(draw: int | None) -> float:
            scale, share = self.on_the_way(optimizer, target, draw)
            return anchor.steps * share * (1 + scale / batch)

        for draw in range(400):
            drawn.append(steps(draw) * math.exp(rng.gauss(0, spread * math.sqrt(2 / SEEDS))))
        drawn.sort()
        return Estimate(steps(None), drawn[9], drawn[-10], tuple(drawn))    # 2.5% of 400 draws

    def law(self, optimizer: str, target: float) -> tuple[float, float]:
        """Return S_min and B_noise of the law steps(B) = S_min (1 + B_noise / B) through the
        updates of the smallest and of the largest batch."""
        small, large = (self.best(optimizer, batch, target).steps for batch in (BATCHES[0], ANCHOR))
        scale = (small - large) / (large / BATCHES[0] - small / ANCHOR)
        return large / (1 + scale / ANCHOR), scale


def between(known: Sequence[tuple[float, float]], x: float) -> float:
    """Return y at x, interpolated linearly between the points `known`, whose x values decrease.
    Outside of their range, y is constant."""
    if x >= known[0][0]:
        return known[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(known):
        if x >= x1:
            return y0 + (y1 - y0) * (x0 - x) / (x0 - x1)
    return known[-1][1]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent of the power law through the points, by least squares of logarithms."""
    u, v = list(map(math.log, x)), list(map(math.log, y))
    return linear_regression(u, v).slope


# ---- Warm-up, and growing batches

def untuned(config: Config) -> int:
    """Return the warm-up steps by the rule of Ma & Yarats 2019, https://arxiv.org/abs/1910.04209:
    twice the number of updates over which Adam's second moment averages."""
    return round(2 / (1 - config.optimizer.beta2))


def steps_of(config: Config, tokens: float) -> int:
    """Return the number of updates that read this many tokens, at most all updates of the run. The
    sizes of updates may grow."""
    return 1 + bisect_left(range(config.steps - 1), tokens,
                           key=lambda step: config.tokens_after(step + 1))


GPT3_SHARE = 375e6 / 300e9      # Brown et al. 2020, https://arxiv.org/abs/2005.14165, appendix B
WARMUPS = {     # rules of thumb for the length of the warm-up
    "2 / (1 - beta2)": untuned,
    "as GPT-3: 1/800 of the tokens": lambda config: steps_of(
        config, GPT3_SHARE * config.tokens_after(config.steps))}
WARM = (0, 20, 100)


def warmed(beta2: float, warmup: int, seed: int) -> float:
    """Return the validation loss after 120 updates at a rate that is slightly too high."""
    training = Training.build(config("adamw", 16, 0.032, seed).replace({
        "optimizer.beta2": beta2, "schedule.warmup_steps": warmup, "steps": 120,
        "eval_batches": 16}))
    for step in range(training.config.steps):
        training.update(step)
    return training.evaluate()


def seconds_of(config: Config) -> float:
    """Return the CPU seconds of a run's updates, without a warm-up update. Time that other
    processes use is not included."""
    training = Training.build(config)
    training.update(0)
    begun = process_time()
    for step in range(config.steps):
        training.update(step)
    return process_time() - begun


# ---- Figures and tables

TARGET_COLOURS = dict(zip(TARGETS, COLOURS))


def steps_figure(record: Record, optimizer: str) -> dict:
    """Return the plotly spec of updates over batch sizes: measured, and predicted with
    intervals."""
    data = []
    for target, colour in TARGET_COLOURS.items():
        predicted = {batch: record.predicted(optimizer, batch, target) for batch in BATCHES}
        measured = [record.best(optimizer, batch, target).steps for batch in (*BATCHES, ANCHOR)]
        data += [
            scatter([*BATCHES, *reversed(BATCHES)],
                    [*(e.low for e in predicted.values()),
                     *(e.high for e in reversed(predicted.values()))],
                    f"95% interval to {target} nats", colour, fill="toself", opacity=0.25,
                    line={"width": 0}, hover=None),
            scatter(BATCHES, [e.value for e in predicted.values()], f"predicted to {target} nats",
                    colour, line={"dash": "dash"}, hover="%{x} sequences: %{y:.0f} updates"),
            scatter((*BATCHES, ANCHOR), measured, f"measured to {target} nats", colour,
                    mode="markers", marker={"size": 9}, hover="%{x} sequences: %{y:.0f} updates")]
    return figure(data, f"Updates of {NAMES[optimizer]} to two losses", height=420,
                  xaxis=axis("sequences in a batch", type="log", tickvals=[*BATCHES, ANCHOR]),
                  yaxis=axis("updates", type="log", dtick="D2"),
                  annotations=[note(f"predicted from {ANCHOR} sequences and the noise scale",
                                    0.5, 1, "center top", xref="paper", yref="paper",
                                    font={"color": FAINT})])


def best_rates(record: Record, optimizer: str, target: float = TARGETS[-1]) -> dict[int, float]:
    return {batch: record.best(optimizer, batch, target).lr for batch in (*BATCHES, ANCHOR)}


def rates_figure(record: Record) -> dict:
    """Return the plotly spec of the best learning rate over batch sizes, with the linear rule and
    the square-root rule."""
    data, batches = [], (*BATCHES, ANCHOR)
    for optimizer, colour in zip(RATES, COLOURS):
        rates = best_rates(record, optimizer)
        start = rates[BATCHES[0]]
        data.append(scatter(batches, rates.values(), f"{NAMES[optimizer]}, best", colour,
                            mode="lines+markers", line={"width": 3},
                            hover="%{x} sequences: %{y:.4g}"))
        for rule_name, power, dash in (("linear", 1.0, "dash"), ("square root", 0.5, "dot")):
            data.append(scatter(batches, [start * (b / BATCHES[0]) ** power for b in batches],
                                f"{rule_name}, from {BATCHES[0]} sequences", colour, opacity=0.6,
                                line={"dash": dash, "width": 1.5}, showlegend=optimizer == "sgd"))
    return figure(data, f"The learning rate that reaches {TARGETS[-1]} nats in the fewest updates",
                  height=420,
                  xaxis=axis("sequences in a batch", type="log", tickvals=list(batches)),
                  yaxis=axis("learning rate", type="log", dtick=1, exponentformat="power"))


def cells(record: Record, optimizer: str) -> list[tuple[int, float, Estimate, float]]:
    """Return batch, target, prediction and measured updates for each target and batch."""
    return [(batch, target, record.predicted(optimizer, batch, target),
             record.best(optimizer, batch, target).steps)
            for target in TARGETS for batch in BATCHES]


def held_cells(record: Record, optimizer: str) -> int:
    """Return the number of cells whose interval contains the measured updates."""
    return sum(e.low <= steps <= e.high for _, _, e, steps in cells(record, optimizer))


def cells_table(record: Record, optimizer: str) -> str:
    """Return an HTML table of predicted and measured updates for each target and batch."""
    rows = [(f"{batch}", f"{target}", f"{e.value:.0f}", f"{e.low:.0f} to {e.high:.0f}",
             f"{steps:.0f}",
             "yes" if e.low <= steps <= e.high else f"no, {steps / e.value - 1:+.0%}")
            for batch, target, e, steps in cells(record, optimizer)]
    heads = ("sequences", "target, nats", "predicted updates", "95% interval", "measured",
             "in the interval")
    return html_table(heads, rows)


def scales_table(record: Record) -> str:
    """Return an HTML table of the noise scale along the recorded runs with ANCHOR sequences."""
    rows = [(NAMES[name], f"{loss:.2f}", f"{e.value:.1f}", f"{e.low:.1f} to {e.high:.1f}")
            for name, estimates in record.scales.items() for loss, e in estimates]
    return html_table(("optimizer", "loss, nats", "noise scale, sequences", "95% interval"), rows)


def law_error(record: Record, optimizer: str, target: float) -> float:
    """Return the largest relative error of the fitted law at the batch sizes between the two that
    it is fitted to."""
    least, scale = record.law(optimizer, target)
    return max(abs(least * (1 + scale / batch) / record.best(optimizer, batch, target).steps - 1)
               for batch in BATCHES[1:])


def law_errors(record: Record) -> list[float]:
    return [law_error(record, name, target) for name in RATES for target in TARGETS]


def law_table(record: Record) -> str:
    """Return an HTML table of the law that is fitted to the smallest and the largest batch, and of
    the noise scale by gradients."""
    rows = []
    for optimizer, target in itertools.product(RATES, TARGETS):
        least, scale = record.law(optimizer, target)
        rows.append((NAMES[optimizer], f"{target}", f"{least:.0f}", f"{scale:.1f}",
                     f"{record.on_the_way(optimizer, target)[0]:.1f}",
                     f"{law_error(record, optimizer, target):.0%}"))
    return html_table(("optimizer", "target, nats", "S_min, updates",
                       f"B_noise by the updates with {BATCHES[0]} and {ANCHOR} sequences",
                       "B_noise by the gradients", "largest error of the law between these sizes"),
                      rows)


def rate_exponent(record: Record, optimizer: str) -> float:
    """Return the exponent with which the best learning rate grows with the batch size: 1 is the
    linear rule, 0.5 the square-root rule."""
    rates = best_rates(record, optimizer)
    return slope(list(rates), list(rates.values()))


# ---- Exercises

EXERCISES: dict = Moved()
exercise = adding_to(EXERCISES)


def _norms(r: Random) -> tuple[float, float, int, int]:
    signal, noise, b, times = r.uniform(0.5, 2), r.uniform(1, 50), r.randint(1, 8), r.randint(2, 40)
    return signal + noise / b, signal + noise / (b * times), b, b * times


@exercise("21.noise_scale", (2.0, 1.5, 1, 2), (5.0, 2.0, 1, 4), (9.0, 1.5, 4, 64), minutes=6,
          stars=2, draw=_norms,
          mistakes={"the large batch's squared norm contains noise, too":
                        lambda small, large, b, B: (
                        (small - large) / (1 / b - 1 / B) / large),
                    "divide the noise by the signal": lambda small, large, b, B: (
                        (B * large - b * small) / (B - b) / ((small - large) / (1 / b - 1 / B)))})
def noise_scale_of(small: float, large: float, b: int, B: int) -> float:
    signal = (B * large - b * small) / (B - b)
    noise = (small - large) / (1 / b - 1 / B)
    return noise / signal


@exercise("21.price", (8.0, 16.0), (16.0, 16.0), (64.0, 16.0), minutes=4,
          draw=lambda r: (r.uniform(1, 500), r.uniform(1, 500)),
          mistakes={"first the updates, then the sequences": lambda batch, scale: (
                        1 + batch / scale, 1 + scale / batch)})
def price(batch: float, scale: float) -> tuple[float, float]:
    return 1 + scale / batch, 1 + batch / scale


@exercise("21.adam_at", (0.001, 0.9, 0.95, 4.0), (0.004, 0.9, 0.99, 0.25), minutes=5,
          draw=lambda r: (r.uniform(1e-4, 1e-2), r.uniform(0.85, 0.95), r.uniform(0.9, 0.999),
                          r.choice([0.25, 0.5, 2.0, 4.0])),
          mistakes={"that is SGD's rule: Adam takes the root": lambda lr, beta1, beta2, k: (
                        k * lr, 1 - k * (1 - beta1), 1 - k * (1 - beta2)),
                    "with larger batches the moments average over more sequences":
                        lambda lr, beta1, beta2, k: (
                        math.sqrt(k) * lr, beta1, beta2)})
def adam_at(lr: float, beta1: float, beta2: float, k: float) -> tuple[float, float, float]:
    return math.sqrt(k) * lr, 1 - k * (1 - beta1), 1 - k * (1 - beta2)
