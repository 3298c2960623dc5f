"""Lesson 27, Width and muP: its study, its figures and its exercises.

The best learning rate of a narrow model is not the best rate of a wide one. muP (Yang et al. 2022,
https://arxiv.org/abs/2203.03466) scales the initialisation and the rate of each parameter with the
width of its inputs, so that the best rate stays the same. The model and the text are those of
lesson 21. `lpkit bench width-rates --out data/measured` records the runs in
data/measured/width-rates-*.json. Losses are in nats per token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, linear_regression
from typing import Any

import torch

from lessons.figures.drawing import axis, figure, scatter
from lessons.figures.style import COLOURS
from lessons.judging.judge import adding_to
from lessons.l21_noise_scale_and_schedules import config
from lessons.l21_noise_scale_and_schedules import slope as slope
from lessons.rows import blocks_torch
from lessons.rows.blocks_torch import MUP_WIDTH
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.predict.evidence import MEASURED
from lpkit.tables import html_table
from lpkit.training.training import Training

starts = blocks_torch   # the notebook shows its source

# ---- The standard parametrisation, and muP

WIDTHS = (32, 64, 128, 256)
WIDTH_RATES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
HEAD_DIM = 16       # the same for every width, so that attention's scores keep their scale


def mup(width: int) -> dict[str, Any]:
    """Return the settings of muP for a width. Adam's learning rate of matrices whose input width
    grows is multiplied by MUP_WIDTH / width, so at MUP_WIDTH it is the run's learning rate. The
    learning rates of embeddings and vectors do not depend on the width."""
    scale = MUP_WIDTH / width
    return {"model.init": "mup", "optimizer.groups": (
        f"blocks.*.attention.*.weight:lr_scale={scale}", f"blocks.*.mlp.*.weight:lr_scale={scale}",
        f"head.weight:lr_scale={scale}")}


PARAMETRISATIONS = {"standard": lambda width: {}, "muP": mup}


def of_width(how: str, width: int, lr: float, seed: int = 0) -> Config:
    """Return the config of a run. `how`: a key of PARAMETRISATIONS."""
    return config("adamw", 8, lr, seed).replace(
        {"model.width": width, "model.heads": width // HEAD_DIM, "model.tied": False, "steps": 60,
         "eval_batches": 16}
        | PARAMETRISATIONS[how](width))


@torch.no_grad()
def activations(training: Training, held: Batch) -> dict[str, torch.Tensor]:
    """Return the outputs of the last block's attention and MLP and of the head for a batch, by
    name."""
    outputs, hooks = {}, []
    block = training.model.blocks[-1]
    parts = {"attention": block.attention, "mlp": block.mlp, "logits": training.model.head}
    for name, part in parts.items():
        hooks.append(part.register_forward_hook(
            lambda module, inputs, out, name=name: outputs.update({name: out.clone()})))
    training.model(held.tokens)
    for hook in hooks:
        hook.remove()
    return outputs


def coordinate_check(how: str, width: int, *, lr: float = 0.01, steps: int = 4, seeds: int = 3
                     ) -> dict[str, float]:
    """Return the root mean square change of the outputs of each part (see `activations`) after a
    few updates, averaged over seeds (Yang et al. 2022, appendix D.1)."""
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
    """Train a run to its end and return its validation loss; None if the run diverged."""
    training = Training.build(of_width(how, width, lr, seed))
    for step in range(training.config.steps):
        training.update(step)
    loss = training.evaluate()
    return round(loss, 4) if loss < 10 else None


def mean_loss(runs: Sequence[Mapping[str, Any]], how: str, width: int, lr: float) -> float:
    """Return the mean loss over seeds; infinite if a run diverged."""
    losses = [run["loss"] for run in runs
             if (run["how"], run["width"], run["lr"]) == (how, width, lr)]
    return math.inf if None in losses else fmean(losses)


def best_by_width(runs: Sequence[Mapping[str, Any]], how: str) -> dict[int, float]:
    """Return the best learning rate of the grid for each width."""
    return {width: min(WIDTH_RATES, key=lambda lr, width=width: mean_loss(runs, how, width, lr))
            for width in WIDTHS}


@dataclass(frozen=True)
class Transfer:
    """The result of moving a learning rate from the narrowest to the widest model."""

    best: dict[int, float]      # the best learning rate by width
    own: float                  # loss of the widest model at its own best learning rate
    moved: float                # loss of the widest model at the narrowest model's best rate

    @property
    def cost(self) -> float:
        """The share by which the moved learning rate increases the loss."""
        return self.moved / self.own - 1


def transfer(runs: Sequence[Mapping[str, Any]], how: str) -> Transfer:
    best = best_by_width(runs, how)
    return Transfer(best, *(mean_loss(runs, how, WIDTHS[-1], best[width])
                            for width in (WIDTHS[-1], WIDTHS[0])))


# ---- Figures and tables

def check_figure(changes: Mapping[str, Mapping[int, Mapping[str, float]]]) -> dict:
    """Return the plotly spec of the change of activations over widths. `changes`: results of
    `coordinate_check` by parametrisation and width."""
    data = []
    for how, dash in zip(changes, ("dot", "solid")):
        for name, colour in zip(changes[how][WIDTHS[0]], COLOURS):
            data.append(scatter(WIDTHS, [changes[how][w][name] for w in WIDTHS], f"{how}: {name}",
                                colour, mode="lines+markers", line={"dash": dash},
                                hover="width %{x}: %{y:.3f}"))
    return figure(data, "Change of activations by four updates at one learning rate",
                  height=420, xaxis=axis("width", type="log", tickvals=list(WIDTHS)),
                  yaxis=axis("root mean square of the change", type="log", dtick="D2"))


def width_runs() -> list[dict[str, Any]]:
    """Return the runs of `lpkit bench width-rates`."""
    return json.loads(next(MEASURED.glob("width-rates-*.json")).read_text())["runs"]


def transfer_figure(runs: Sequence[Mapping[str, Any]]) -> dict:
    """Return the plotly spec of the loss over learning rates: a line per width and
    parametrisation, without diverged runs."""
    data = []
    for how, dash in zip(PARAMETRISATIONS, ("dot", "solid")):
        for width, colour in zip(WIDTHS, (*COLOURS[:3], COLOURS[4])):
            losses = {lr: mean_loss(runs, how, width, lr) for lr in WIDTH_RATES}
            kept = {lr: loss for lr, loss in losses.items() if math.isfinite(loss)}
            data.append(scatter(kept, kept.values(), f"{how}, width {width}", colour,
                                mode="lines+markers", line={"dash": dash},
                                hover="%{x:.4g}: %{y:.3f} nats"))
    return figure(data, "Loss after 60 updates, by learning rate", height=440,
                  xaxis=axis("learning rate", type="log", dtick=1, exponentformat="power"),
                  yaxis=axis("validation loss, nats"))


def transfer_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return an HTML table of the best learning rate of each width, and of the widest model's loss
    at its own best rate and at the narrowest model's best rate."""
    rows = []
    for how in PARAMETRISATIONS:
        result = transfer(runs, how)
        rows.append((how, *(f"{lr:g}" for lr in result.best.values()), f"{result.own:.3f}",
                     f"{result.moved:.3f}"))
    return html_table(("", *(f"best rate, width {width}" for width in WIDTHS),
                       f"loss of width {WIDTHS[-1]} at its own best rate",
                       f"loss at the best rate of width {WIDTHS[0]}"), rows)


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


@exercise("27.mup_rate", ("embedding", 256, 64, 0.004), ("hidden", 256, 64, 0.004),
          ("head", 256, 64, 0.004), ("vector", 256, 64, 0.004), minutes=4,
          draw=lambda r: (r.choice(["embedding", "hidden", "head", "vector"]),
                          r.choice([64, 128, 512]), r.choice([32, 64, 256]), r.uniform(1e-4, 1e-2)),
          mistakes={"embeddings and vectors keep their rate": lambda kind, width, base, lr: (
                        lr * base / width),
                    "the head's inputs grow with the width, too": lambda kind, width, base, lr: (
                        lr * base / width if kind == "hidden" else lr)})
def mup_rate(kind: str, width: int, base: int, lr: float) -> float:
    return lr * base / width if kind in ("hidden", "head") else lr


def _points(r: Random) -> tuple[list[float], list[float]]:
    widths = sorted(r.sample([16, 32, 64, 128, 256, 512, 1024], r.randint(2, 5)))
    size, slope = r.uniform(0.01, 1), r.uniform(-1, 1)
    return list(map(float, widths)), [size * w**slope * r.uniform(0.8, 1.25) for w in widths]


@exercise("27.power", ([1.0, 2.0], [3.0, 6.0]), ([64.0, 256.0], [2.0, 4.0]),
          ([1.0, 2.0, 4.0], [1.0, 1.0, 4.0]), ([32.0, 64.0, 256.0], [1.0, 4.0, 2.0]), minutes=5,
          draw=_points,
          mistakes={"take the logarithm on both axes": lambda widths, changes: (
                        linear_regression(widths, changes).slope),
                    "fit all points, not only the two ends": lambda widths, changes: (
                        math.log(changes[-1] / changes[0]) / math.log(widths[-1] / widths[0])),
                    "return the power of the width: the slope is change over width":
                        lambda widths, changes: (
                        slope(changes, widths))})
def power(widths: list[float], changes: list[float]) -> float:
    x = [math.log(width) for width in widths]
    mean = sum(x) / len(x)      # only x is centred: a constant added to all y cancels
    above = sum((a - mean) * math.log(change) for a, change in zip(x, changes))
    return above / sum((a - mean) ** 2 for a in x)
