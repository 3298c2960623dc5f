"""Lesson 23, Less of the model: its study, its figures and its exercises.

A schedule gives the share of the tokens that each layer sees in each update. The FLOPs of an update
are

    head + sum over layers of (s * weights + s^2 * pairs)

with s the layer's share, `weights` the FLOPs of the matmuls with a layer's weights, and `pairs` the
FLOPs of attention, which computes a score for each pair of tokens. Six published schedules are rows
of `rows/depth.py`; this module counts their FLOPs and measures their seconds. Then runs are
compared at equal FLOPs: a whole model, a model stacked from few layers, and a small model. Losses
are in nats per token. Ways to grow a model are rows of `rows/growth.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lessons.draws import normal
from lessons.figures.drawing import axis, figure, heat, note, scatter
from lessons.figures.style import DISTINCT
from lessons.figures.waiting import progress as progress
from lessons.judging.judge import adding_to
from lessons.rows import depth, growth
from lessons.rows.depth_torch import Partly as Partly
from lessons.rows.depth_torch import Stacking as Stacking
from lessons.timing import PHASES, by_phase
from lpkit import hardware
from lpkit import train as train
from lpkit.claims import referee
from lpkit.config import Config, ModelConfig
from lpkit.measure.updates import Bench
from lpkit.predict.compare import disturbance
from lpkit.predict.flops import training_flops
from lpkit.presets import preset
from lpkit.tables import html_table
from lpkit.techniques.changes import GOVERNORS
from lpkit.timing import Watch
from lpkit.training.runs import Run
from lpkit.training.training import RandomTokens, Training

# ---- Schedules

WHOLE = "whole"
SCHEDULES = ("stochastic-depth", "layer-drop", "progressive-layer-drop", "stack", "random-ltd",
             "token-drop")
SMALL = {"model.layers": 8, "model.width": 64, "model.heads": 2, "model.context": 64,
         "global_batch": 4, "grad_accum_steps": 1, "eval_every": 0, "precision.recipe": "fp32",
         "system.device": "cpu", "system.threads": 1, "system.compile": False}


def scheduled(config: Config, name: str, **settings: Any) -> Config:
    """Return the config with the schedule `name`: a row of `rows/depth.py`, or WHOLE for none."""
    return config if name == WHOLE else config.replace({
        "imports": depth.__name__, "governors": [{"name": name, **settings}]})


def shares(config: Config, step: int) -> tuple[float, ...]:
    """Return the share of the tokens that each layer sees in update `step` (from 0)."""
    if not config.governors:
        return (1.0,) * config.model.layers
    governor = config.governors[0]
    return GOVERNORS[governor.name].shares(governor, config.model.layers, config.steps, config.seed,
                                           step)


def picture(config: Config) -> list[tuple[float, ...]]:
    """Return the shares of all layers for every update of a run."""
    return [shares(config, step) for step in range(config.steps)]


@dataclass(frozen=True, kw_only=True)
class Price:
    """The FLOPs of an update for one sequence of T tokens, forward and backward."""

    weights: float          # of the matmuls with one layer's weights
    pairs: float            # of one layer's attention over pairs of tokens
    head: float             # of the head
    T: int

    @classmethod
    def of(cls, model: ModelConfig) -> Price:
        """Return the price of a model. Each product runs three times: forward, and for both
        gradients. Attention's scores and its weighted sum take 2 T^2 D FLOPs each."""
        pairs, head = 12.0 * model.T**2 * model.D, 6.0 * model.T * model.D * model.V
        layer = (training_flops(model) - head) / model.L
        return cls(weights=layer - pairs, pairs=pairs, head=head, T=model.T)

    def layer(self, share: float) -> float:
        """Return the FLOPs of a layer that sees this share, rounded to whole tokens."""
        seen = max(1, round(share * self.T)) / self.T if share else 0.0
        return seen * self.weights + seen**2 * self.pairs

    def update(self, shares: Sequence[float]) -> float:
        return self.head + sum(map(self.layer, shares))

    def run(self, config: Config) -> float:
        """Return the FLOPs of all updates of a run, for one sequence per update."""
        return sum(map(self.update, picture(config)))


def expected(config: Config) -> float:
    """Return the share of the FLOPs that progressive layer dropping saves on average over its
    draws, with the row's default `theta` (0.5) and `gamma` (100 / updates)."""
    price, layers = Price.of(config.model), config.model.layers
    kept = fmean(progressive(0.5, 100 / config.steps, layers, t) for t in range(config.steps))
    whole = price.update((1.0,) * layers)
    return (1 - kept) * (whole - price.head) / whole


def saved(config: Config) -> float:
    """Return the share of the whole model's FLOPs that the schedule of `config` saves in a run."""
    price = Price.of(config.model)
    return 1 - price.run(config) / price.run(config.replace({"governors": []}))


def flops(config: Config) -> float:
    """Return the FLOPs of all updates of a run, with all sequences."""
    return config.global_batch * Price.of(config.model).run(config)


# Savings as papers state them: by the probabilities, without draws

def progressive(theta: float, gamma: float, layers: int, step: int) -> float:
    """Return the probability of keeping a layer in update `step`, averaged over layers, by
    progressive layer dropping (Zhang and He 2020). The last layer's probability falls from 1 to
    `theta`; the probabilities of the layers below it are on a line from 1 to the last layer's."""
    last = (1 - theta) * math.exp(-gamma * step) + theta
    return 1 - (1 - last) * (layers + 1) / (2 * layers)


# The savings that two papers state, and those computed for their BERT of 12 layers
BERT = 12
# github.com/tensorflow/models, official/projects/token_dropping/encoder.py at 00b830c: with 256 of
# 512 tokens (in its .yaml). The queries of the sixth layer attend to all keys
TOKENS = (1.0,) * 5 + (0.5,) * 6 + (1.0,)


def published_table() -> str:
    """Return an HTML table of the share of layers or tokens that two papers leave out, their stated
    savings, and the speed-up that follows."""
    pld, tokens = 1 - progressive(0.5, 1.0, BERT, 10_000), 1 - sum(TOKENS) / BERT
    return html_table(("method", "share left out of all layers", "savings in the paper",
                       "speed-up"), [
        ("progressive layer dropping, theta = 0.5 (Zhang and He 2020)", f"{pld:.1%}",
         "24% less time per sample, 2.5 times faster to an accuracy",
         f"{1 / 0.76:.2f} times per sample, {2.5 * 0.76:.1f} times by fewer samples"),
        ("token dropping, half of the tokens in 6 layers (Hou et al. 2022)", f"{tokens:.1%}",
         "25% less pretraining cost", f"{1 / (1 - tokens):.2f} times with as many updates")],
        caption="BERT of 12 layers")


# ---- Real updates

def counted(config: Config) -> float:
    """Run all updates and return their FLOPs, as PyTorch counts them by operation. Attention is
    `plain`, since PyTorch's counter does not know the fused attention of a CPU."""
    config = config.replace({"system.attention": "plain"})
    training = Training.build(config, data=RandomTokens(config))
    with FlopCounterMode(display=False) as counter:
        for step in range(config.steps):
            training.update(step)
    return counter.get_total_flops()


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of a run's updates. Each update counts with its best time over several rounds in
    which the configs took turns."""

    phases: dict[str, tuple[float, ...]]    # by config: the seconds of each phase of PHASES
    others: float           # share of the cores that other processes used
    where: str              # the device and the number of rounds, for captions

    def over_whole(self, name: str) -> float:
        """Return the seconds of a config over those of the whole model."""
        return sum(self.phases[name]) / sum(self.phases[WHOLE])


def timed(configs: Mapping[str, Config], *, rounds: int, watch: Watch = iter) -> Timed:
    best: dict[tuple[str, int], tuple[float, ...]] = {}
    steps, share = next(iter(configs.values())).steps, hardware.others()
    for _ in watch(range(rounds)):
        benches = {name: Bench(config) for name, config in configs.items()}
        for step, (name, bench) in itertools.product(range(steps), benches.items()):
            seconds = by_phase(bench, step)
            best[name, step] = min(seconds, best.get((name, step), seconds), key=sum)
    # without the first update, which allocates the optimizer's state
    phases = {name: tuple(map(sum, zip(*(best[name, step] for step in range(1, steps)))))
              for name in configs}
    return Timed(phases=phases, others=share(),
                 where=f"{benches[WHOLE].where}, the best of {rounds} rounds")


# ---- A drawn schedule

def resumed(config: Config, cut: int) -> tuple[list[float], list[float]]:
    """Return the losses of a run, and the losses of a run that is stopped after `cut` updates and
    continued by a new object, which receives only the first run's state."""
    whole, begun, other = (Training.build(config) for _ in range(3))
    losses = [whole.update(step).loss.item() for step in range(config.steps)]
    again = [begun.update(step).loss.item() for step in range(cut)]
    other.load_state_dict({name: t.clone() if torch.is_tensor(t) else t
                           for name, t in begun.state_dict().items()})
    again += [other.update(step).loss.item() for step in range(cut, config.steps)]
    return losses, again


# ---- Growth

GROWN = {"stack": {"model.layers": 4}, "interpolate": {"model.layers": 4},
         "identity-depth": {"model.layers": 4}, "bert2bert": {"model.width": 64, "model.heads": 4}}
PRESERVING = ("identity-depth", "bert2bert")


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The effect of growing a model, on one validation batch. `moved`: norm of the change of the
    logits, over the norm of the small model's logits. `losses`: before growth, after growth, and
    after further training."""

    moved: float
    losses: tuple[float, float, float]


def grow(run: Run, row: str, updates: int) -> Growth:
    """Grow the model of `run` by a row of `start.grow`, train the large model for `updates`
    updates, and return the effect."""
    small = Training.build(run.config.replace({"start.run": str(run.path)}))
    large = Training.build(run.config.replace({
        **GROWN[row], "steps": updates, "imports": growth.__name__, "start.grow": row,
        "start.run": str(run.path)}))
    batch = small.val.batch(0)

    @torch.no_grad()
    def logits_and_loss(training: Training) -> tuple[Tensor, float]:
        return training.model(batch.tokens), training.loss(training.model, batch).item()

    (was, before), (now, after) = logits_and_loss(small), logits_and_loss(large)
    for step in range(updates):
        large.update(step)
    return Growth(moved=((now - was).norm() / was.norm()).item(),
                  losses=(before, after, logits_and_loss(large)[1]))


# ---- At equal FLOPs

STUDY = {"model.width": 32, "model.heads": 2, "model.context": 32, "model.init": "fan-in",
         "global_batch": 8, "grad_accum_steps": 1, "eval_every": 0, "eval_batches": 16,
         "schedule.warmup_steps": 10, "optimizer.lr": 0.01, "precision.recipe": "fp32",
         "system.device": "cpu", "system.threads": 1, "system.compile": False}
LAYERS = 4
STACKED, ALONE, DROPPED = "stacked from 1 layer", "1 layer alone", "progressive layer dropping"


def study_config(layers: int, updates: int, seed: int = 0) -> Config:
    return preset("cpu-3m").replace(STUDY | {"model.layers": layers, "steps": updates,
                                             "seed": seed})


def arms(updates: int) -> dict[str, Config]:
    """Return the configs of all arms. Each run takes the FLOPs of `updates` updates of the whole
    model. The stacked model starts as a small model within its run, so the run includes the small
    model's FLOPs."""
    whole, small = study_config(LAYERS, updates), study_config(1, updates)
    configs = {WHOLE: whole, STACKED: scheduled(whole, "stack", start=1),
               DROPPED: scheduled(whole, "progressive-layer-drop"), ALONE: small}
    return {name: config.replace({"steps": equal(config, whole)})
            for name, config in configs.items()}


def equal(config: Config, whole: Config) -> int:
    """Return the number of updates of `config` that take the FLOPs of all updates of `whole`. A
    schedule that is given in shares of a run is stretched with the run, so the number is found by
    iteration."""
    budget = Price.of(whole.model).run(whole)
    steps = whole.steps
    for _ in range(4):
        longer = config.replace({"steps": steps})
        steps = round(steps * budget / Price.of(config.model).run(longer))
    return steps


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to spend the FLOPs."""

    config: Config
    losses: tuple[float, ...]               # final validation loss, by seed
    curves: tuple[tuple[float, ...], ...]   # training loss, by seed and update


def spend(updates: int, seeds: int, watch: Watch = iter) -> dict[str, Arm]:
    """Run every arm with every seed. All arms of a seed read the same text in the same order."""
    runs_by_arm: dict[str, list[tuple]] = {}
    configs = arms(updates)
    for seed, (name, config) in watch(list(itertools.product(range(seeds), configs.items()))):
        training = Training.build(config.replace({"seed": seed}))
        curve = tuple(training.update(step).loss.item() for step in range(config.steps))
        runs_by_arm.setdefault(name, []).append((training.evaluate(), curve))
    return {name: Arm(config=configs[name], losses=tuple(loss for loss, _ in runs),
                      curves=tuple(curve for _, curve in runs))
            for name, runs in runs_by_arm.items()}


def verdicts(by_arm: Mapping[str, Arm], against: str = WHOLE) -> dict[str, referee.Verdict]:
    """Compare every other arm with the arm `against`. The comparisons together have an error
    probability of 5%."""
    others = [name for name in by_arm if name != against]
    [level] = referee.levels(1, len(others))
    return {name: referee.look(by_arm[against].losses, by_arm[name].losses, level)
            for name in others}


# ---- Figures and tables

def schedule_figure(configs: Mapping[str, Config]) -> dict:
    """Return the plotly spec of one panel per schedule: layers over updates, coloured by the share
    of the tokens. The number in a panel's title is the mean share (its area)."""
    data, notes, layout, wide = [], [], {}, 3
    for i, (name, config) in enumerate(configs.items()):
        rows, at = picture(config), "" if not i else str(i + 1)
        column, line = i % wide, i // wide
        layers = [*range(1, config.model.layers + 1)]
        data.append(heat([*range(config.steps)], layers, [list(column) for column in zip(*rows)],
                         ends=(0, 1), xaxis=f"x{at}", yaxis=f"y{at}", showscale=not i,
                         bar={"title": {"text": "share"}, "tickformat": ".0%"},
                         hovertemplate="update %{x}, layer %{y}: %{z:.0%}<extra></extra>")
                    | {"xgap": 0})
        area = fmean(itertools.chain(*rows))
        notes.append(note(f"{name}: {area:.0%}", 0, 1.02, xref=f"x{at} domain",
                          yref=f"y{at} domain"))
        low = 0.57 * (1 - line)
        layout[f"xaxis{at}"] = axis("update" if line else "", anchor=f"y{at}", showgrid=False,
                                    domain=[0.345 * column, 0.345 * column + 0.29])
        layout[f"yaxis{at}"] = axis("" if column else "layer", anchor=f"x{at}", showgrid=False,
                                    dtick=len(layers) // 4, domain=[low, low + 0.41])
    return figure(data, "Share of the tokens that each layer sees, and its mean", height=480,
                  annotations=notes, **layout)


def schedules_view(config: Config) -> Callable[..., dict]:
    """Return a view for an Explorer. Its `kept` is the probability of keeping the last layer, or
    the share of the tokens that middle layers see."""

    def show(layers: int, updates: int, kept: float) -> dict:
        own = config.replace({"model.layers": layers, "steps": updates})
        dials = {"stochastic-depth": {"rate": 1 - kept}, "layer-drop": {"rate": 1 - kept},
                 "progressive-layer-drop": {"theta": kept}, "stack": {},
                 "random-ltd": {"share": kept}, "token-drop": {"share": kept}}
        return schedule_figure({name: scheduled(own, name, **dial)
                                for name, dial in dials.items()})

    return show


def cost_table(configs: Mapping[str, Config], counts: Mapping[str, float] | None = None) -> str:
    """Return an HTML table of each schedule's area (the mean share) and FLOPs: by formula, over the
    whole model's, and as PyTorch counts them (`counts`)."""
    lines = []
    for name, config in configs.items():
        own, counted_cells = flops(config), () if counts is None else (f"{counts[name]:,.0f}",)
        lines.append((name, f"{fmean(itertools.chain(*picture(config))):.1%}",
                      f"{own / flops(configs[WHOLE]):.1%}", f"{own:,.0f}", *counted_cells))
    return html_table(("schedule", "area", "FLOPs, over the whole model's", "FLOPs, by formula",
                       *(() if counts is None else ("FLOPs, counted",))), lines)


def seconds_table(times: Timed, configs: Mapping[str, Config]) -> str:
    """Return an HTML table of FLOPs and seconds (in total and by phase), over those of the whole
    model."""
    lines = []
    for name, config in configs.items():
        phases = (f"{own / all_:.0%}" for own, all_ in zip(times.phases[name], times.phases[WHOLE]))
        lines.append((name, f"{1 - saved(config):.0%}", f"{times.over_whole(name):.0%}", *phases))
    phases_of_whole = ", ".join(f"{phase} {1e3 * spent / (configs[WHOLE].steps - 1):.1f} ms"
                     for phase, spent in zip(PHASES, times.phases[WHOLE]))
    notes = (f"an update of the whole model: {phases_of_whole}", times.where,
             disturbance(times.others))
    return html_table(("over the whole model's", "FLOPs", "seconds", *PHASES), lines,
                      caption="; ".join(filter(None, notes)))


def curves_figure(by_arm: Mapping[str, Arm], most: int = 25) -> dict:
    """Return the plotly spec of the training loss (mean over seeds) over the share of the FLOPs
    that is spent, with at most `most` points per arm."""
    lines = []
    for (name, arm), colour in zip(by_arm.items(), DISTINCT):
        price = Price.of(arm.config.model)
        spent = [*itertools.accumulate(map(price.update, picture(arm.config)))]
        parts = min(most, len(spent))
        ends = [len(spent) * (k + 1) // parts for k in range(parts)]
        losses = [fmean(fmean(curve[a:b]) for curve in arm.curves)
                  for a, b in itertools.pairwise([0, *ends])]
        share = [100 * spent[end - 1] / spent[-1] for end in ends]
        lines.append(scatter(share, losses, name, colour, hover="%{x:.0f}%: %{y:.3f} nats"))
    return figure(lines, "Equal FLOPs, spent in four ways", height=420,
                  xaxis=axis("FLOPs spent, %"), yaxis=axis("training loss, nats per byte"))


def spent_table(by_arm: Mapping[str, Arm], against: str = WHOLE) -> str:
    """Return an HTML table of each arm's updates and loss, and of its comparison with the arm
    `against`."""
    judged, lines = verdicts(by_arm, against), []
    for name, arm in by_arm.items():
        comparison = ("", "", "")
        if name in judged:
            verdict = judged[name]
            low, high = verdict.interval
            comparison = (f"{verdict.gain:+.1%} ({low:+.1%} to {high:+.1%})", verdict.word,
                    f"{verdict.could_see:.1%}")
        lines.append((name, f"{arm.config.steps:,}", f"{fmean(arm.losses):.3f}", *comparison))
    seeds = len(next(iter(by_arm.values())).losses)
    return html_table(("arm", "updates", "validation loss", f"lower than {against}'s by", "verdict",
                       "smallest detectable gain"), lines,
                      caption=f"{seeds} seeds, equal FLOPs for all arms")


def growth_table(grown: Mapping[str, Growth]) -> str:
    """Return an HTML table of the effect of each row of `start.grow` on a small model."""
    lines = []
    for row, effect in grown.items():
        sizes = ", ".join(f"{size} {key.partition('.')[2]}" for key, size in GROWN[row].items())
        lines.append((row, sizes, f"{effect.moved:.1e}",
                      *(f"{loss:.3f}" for loss in effect.losses)))
    return html_table(("start.grow", "grows to", "relative change of logits", "loss before",
                       "loss after growth", "loss after more updates"), lines)


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


@exercise("23.probabilities", (1, 0.5), (4, 0.5), (3, 0.2), minutes=4,
          draw=lambda r: (r.randint(1, 24), r.uniform(0.0, 0.9)),
          mistakes={"count layers from 1: the first layer is sometimes left out, too":
                        lambda layers, rate: [
                        1 - rate * layer / layers for layer in range(layers)],
                    "return the probability to be kept, not the probability to be left out":
                        lambda layers, rate: [
                        rate * (layer + 1) / layers for layer in range(layers)],
                    "the probability falls linearly with depth":
                        lambda layers, rate: [1 - rate] * layers})
def probabilities(layers: int, rate: float) -> list[float]:
    return [1 - rate * layer / layers for layer in range(1, layers + 1)]


@exercise("23.area", (1, 1, 0.5, 1.0), (12, 1, 0.5, 0.1), (12, 100, 0.5, 0.1), minutes=7, stars=2,
          draw=lambda r: (r.randint(1, 24), r.randint(1, 60), r.uniform(0.1, 0.9),
                          r.uniform(0.01, 2.0)),
          mistakes={"updates are discrete: take a sum, not an integral":
                        lambda layers, steps, theta, gamma: 1 - (1 - theta) * (layers + 1) / (
                            2 * layers) * (1 - (1 - math.exp(-gamma * steps)) / gamma / steps),
                    "only the last layer falls to theta":
                        lambda layers, steps, theta, gamma: 1 - fmean(
                            (1 - theta) * (1 - math.exp(-gamma * t)) for t in range(steps)),
                    "the first update has all layers":
                        lambda layers, steps, theta, gamma: 1 - fmean(
                            (1 - theta) * (1 - math.exp(-gamma * (t + 1))) for t in range(steps)
                            ) * (layers + 1) / (2 * layers)})
def area(layers: int, steps: int, theta: float, gamma: float) -> float:
    left_out = [(1 - theta) * (1 - math.exp(-gamma * step)) * layer / layers
                for step in range(steps) for layer in range(1, layers + 1)]
    return 1 - sum(left_out) / (steps * layers)


def _tokens(r: Random) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width = r.randint(1, 7), r.randint(1, 4)
    kept = sorted(r.sample(range(tokens), r.randint(1, tokens)))
    return normal(r, tokens, width), normal(r, width, width), torch.tensor(kept)


@exercise("23.some_tokens", (torch.ones(1, 1), torch.zeros(1, 1), torch.tensor([0])),
          (torch.arange(6.0).reshape(3, 2) / 6, torch.ones(2, 2), torch.tensor([0, 2])),
          minutes=6, stars=2, drawn=60, draw=_tokens,
          mistakes={"the others pass unchanged": lambda x, w, kept: torch.zeros_like(x).index_copy(
                        0, kept, _mixed(x[kept], w)),
                    "take the mean only of tokens that the layer sees":
                        lambda x, w, kept: x.index_copy(
                        0, kept, _mixed(x, w)[kept]),
                    "put the tokens back at their old positions": lambda x, w, kept: torch.cat((
                        _mixed(x[kept], w), x[len(kept):]))})
def some_tokens(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
    some = x.index_select(0, kept)
    seen = some.cumsum(0) / torch.arange(1, len(some) + 1)[:, None]
    return x.index_copy(0, kept, some + seen @ w)


def _mixed(x: Tensor, w: Tensor) -> Tensor:
    return x + x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None] @ w


def _neuron(r: Random) -> tuple[Tensor, Tensor, Tensor, int]:
    wide, width = r.randint(1, 6), r.randint(1, 4)
    return (normal(r, wide, width), normal(r, 1, wide)[0], normal(r, width, wide),
            r.randrange(wide))


@exercise("23.split", (torch.ones(1, 1), torch.ones(1), torch.ones(1, 1), 0),
          (torch.arange(6.0).reshape(3, 2), torch.tensor([0.0, 1.0, -1.0]),
           torch.arange(6.0).reshape(2, 3), 1), minutes=6, stars=2, drawn=60, draw=_neuron,
          mistakes={"both halves together must add up to the old neuron":
                        lambda up, bias, down, i: (
                        torch.cat((up, up[i:i + 1])), torch.cat((bias, bias[i:i + 1])),
                        torch.cat((down, down[:, i:i + 1]), 1)),
                    "GELU is not linear: keep the incoming weights as they are":
                        lambda up, bias, down, i: (
                        torch.cat((_halved(up, i), up[i:i + 1] / 2)),
                        torch.cat((_halved(bias, i), bias[i:i + 1] / 2)),
                        torch.cat((down, down[:, i:i + 1]), 1)),
                    "halve the outgoing weights of both neurons": lambda up, bias, down, i: (
                        torch.cat((up, up[i:i + 1])), torch.cat((bias, bias[i:i + 1])),
                        torch.cat((down, down[:, i:i + 1] / 2), 1))})
def split(up: Tensor, bias: Tensor, down: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
    down = torch.cat((down, down[:, i:i + 1]), 1)
    down[:, [i, -1]] /= 2
    return torch.cat((up, up[i:i + 1])), torch.cat((bias, bias[i:i + 1])), down


def _halved(x: Tensor, i: int) -> Tensor:
    return torch.cat((x[:i], x[i:i + 1] / 2, x[i + 1:]))
