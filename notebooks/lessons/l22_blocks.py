"""Lesson 22, blocks: its study, its figures and its exercises.

    by_depth(layers, seeds)             # predicted and measured curves of five blocks, by name
    trained("sas-p", steps)             # losses of a short run
    matrices("sas-p")                   # elements of a block's matrices, over width^2
    step("sas-p")                       # the config of an update, for timing

The closed forms are in `lessons.signals`, the blocks in `lessons.rows.blocks`. `unshaped`, a block
without a skip around attention and without a remedy, is a row of this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor

from lessons import signals
from lessons.draws import normal
from lessons.figures.colours import ANSWER_COLOURS
from lessons.figures.drawing import POWERS, axis, figure, scatter
from lessons.figures.style import DISTINCT as COLOURS
from lessons.judging.judge import Exercise, adding_to
from lessons.rows import blocks_torch
from lessons.signals import Curves
from lessons.timing import in_turns as in_turns
from lpkit.config import Config, ModelConfig
from lpkit.nn.transformer import Block
from lpkit.predict.compare import disturbance as disturbance
from lpkit.predict.flops import training_flops
from lpkit.predict.params import of
from lpkit.presets import preset
from lpkit.techniques import blocks as block_rows
from lpkit.techniques.operation import Kind
from lpkit.training.training import Training

blocks = blocks_torch   # the notebook shows its source

# ---- A block without a remedy


class Unshaped(Block):
    """Pre-norm without the skip around attention."""

    def forward(self, x, rotation=None, cache=None, layer=0, documents=None):
        x = self.attention(self.norm1(x), rotation, cache, layer, documents)
        return x + self.mlp(self.norm2(x))


block_rows.BLOCKS["unshaped"] = Kind(
    operations=lambda s: [op for op in block_rows.pre_norm(s) if op.name != "add1"],
    implementation=f"{__name__}:Unshaped", why="pre-norm without the skip around attention")

# ---- Depth

STUDIED = {     # by name in figures: the row of `model.block`, its formula in signals, `model.norm`
    "pre-norm": ("pre-norm", "pre-norm", "layernorm"),
    "no norm": ("pre-norm", "without norm", "none"),
    "no skip": ("unshaped", "without skip", "layernorm"),
    "no skip, shaped": ("sas-p", "sas-p", "layernorm"),
    "gain of 0": ("skipinit", "skipinit", "layernorm"),
}
TOKENS = 64


def small(block: str, layers: int, **settings: Any) -> ModelConfig:
    """Return the model that is studied by depth: width 128, TOKENS tokens."""
    return ModelConfig(**{"layers": layers, "width": 128, "heads": 4, "vocab": 256,
                          "context": TOKENS, "block": block, "init": "llama"} | settings)


def tokens() -> Tensor:
    """Return tokens of a text without repetition."""
    return torch.randperm(256, generator=torch.Generator().manual_seed(0))[:TOKENS]


def by_depth(layers: int, seeds: int) -> dict[str, tuple[Curves, Curves]]:
    """Return the predicted and the measured curves of each block of STUDIED, by its name. The
    measured curves are means over `seeds` initialisations."""
    curves = {}
    for name, (block, form, norm) in STUDIED.items():
        m = small(block, layers, norm=norm)
        curves[name] = signals.predicted(m, tokens(), form), signals.measured(m, tokens(), seeds)
    return curves


def off(curves: tuple[Curves, Curves]) -> tuple[float, float]:
    """Return the largest errors of the formula over depth: of the variance (relative) and of the
    cosine (absolute). `curves`: predicted and measured."""
    predicted, measured = curves
    return (max(abs(a / b - 1) for a, b in zip(predicted.variance, measured.variance)),
            max(abs(a - b) for a, b in zip(predicted.cosine, measured.cosine)))


def depth_figure(by_block: Mapping[str, tuple[Curves, Curves]], what: str) -> dict:
    """Return the plotly spec of `what` (variance, cosine or gradient) by depth. Lines are
    predicted, dots are measured; some blocks have no prediction of the gradient."""
    data = []
    for (name, curves), colour in zip(by_block.items(), COLOURS):
        predicted, measured = (getattr(each, what) for each in curves)
        every = max(1, len(measured) // 12)
        at = [*range(0, len(measured), every)]
        data.append(scatter(at, [measured[i] for i in at], f"{name}, measured", colour,
                            mode="markers", showlegend=not predicted))
        if predicted:
            data.append(scatter(range(len(predicted)), predicted, name, colour))
    titles = {"variance": "Variance of the residual stream by depth",
              "cosine": "Similarity of tokens by depth",
              "gradient": "Variance of the stream's gradient, over that after the last layer"}
    scale = {} if what == "cosine" else POWERS
    return figure(data, f"{titles[what]}: lines by formula, dots measured", height=430,
                  xaxis=axis("layers so far"), yaxis=axis(
                      "mean cosine of two tokens" if what == "cosine" else "variance", **scale))


def collapse_depth(layers: int, at: float = 0.9) -> int:
    """Return the number of layers without a skip after which the mean cosine of two tokens exceeds
    `at`, by formula; `layers` if it does not."""
    m = small("unshaped", layers)
    curve = signals.predicted(m, tokens(), "without skip").cosine
    return next((i for i, cosine in enumerate(curve) if cosine > at), layers)


# ---- Two matrices

def matrices(block: str) -> int:
    """Return the number of elements of a block's matrices, over the width squared."""
    m = ModelConfig(width=384, heads=6, block=block)
    return round(of(m).linear_weights / m.D**2)


def step(block: str) -> Config:
    """Return a config of six layers of width 256, for timing."""
    return Config().replace({
        "model.layers": 6, "model.width": 256, "model.heads": 4, "model.context": 128,
        "global_batch": 4, "precision.recipe": "fp32", "steps": 100, "model.block": block})


def faster_by_flops(block: str, than: str = "pre-norm") -> float:
    """Return the FLOPs of an update with the block `than` over those with `block`."""
    return training_flops(step(than).model) / training_flops(step(block).model)


# ---- Short runs

RUNS = {"pre-norm": 1e-3, "unshaped": 1e-3, "sas-p": 1e-3}       # learning rates


def run_of(block: str, steps: int, lr: float, layers: int = 12) -> Config:
    return preset("cpu-3m").replace({
        "model.layers": layers, "model.width": 64, "model.heads": 4, "model.context": 64,
        "global_batch": 8, "steps": steps, "optimizer.lr": lr, "schedule.warmup_steps": 5,
        "eval_batches": 8, "model.block": block, "precision.recipe": "fp32"})


def trained(block: str, steps: int) -> tuple[list[float], float]:
    """Return the loss of each update, and the validation loss at the end."""
    training = Training.build(run_of(block, steps, RUNS[block]))
    losses = [training.update(i).loss.item() for i in range(steps)]
    return losses, training.evaluate()


def losses_figure(runs: Mapping[str, tuple[list[float], float]]) -> dict:
    data = [scatter(range(1, len(losses) + 1), losses, name, colour)
            for (name, (losses, _)), colour in zip(runs.items(), COLOURS)]
    return figure(data, "Twelve layers of width 64 at the same learning rate", height=380,
                  xaxis=axis("updates"), yaxis=axis("training loss, nats per token"))


def speed_figure(names: list[str], seconds: list[float], predicted: list[float],
                 others: float) -> dict:
    """Return the plotly spec of the speed of each block over the first one's: `predicted` by FLOPs
    and measured in `seconds` per update. `others`: share of the cores that other processes used."""
    ratio = [seconds[0] / each for each in seconds]
    return figure([
        scatter(names, predicted, "by FLOPs", ANSWER_COLOURS["formula"], mode="markers",
                marker={"size": 12, "symbol": "line-ew-open"}),
        scatter(names, ratio, "measured", ANSWER_COLOURS["measured"], mode="markers",
                marker={"size": 10}, meta="seconds")],
        "Updates per second, over pre-norm's", others=others, height=340,
        yaxis=axis("speed-up over pre-norm"))


# ---- Exercises

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)


def _values(r: Random) -> tuple[Tensor]:
    """Draw (..., T, E) with zero, one or two axes before the tokens."""
    before = [r.randint(1, 4) for _ in range(r.randrange(3))]
    return (normal(r, *before, r.randint(1, 9), r.randint(1, 3)),)


@exercise("22.mean", (torch.tensor([[[1.0], [3.0], [5.0]]]),),
          (torch.tensor([[[2.0, 4.0], [4.0, 0.0]]]),),
          (normal(Random(1), 512, 1),), draw=_values, tolerance=1e-5, minutes=5,
          # too little memory for a (T, T) matrix, even with one byte per element
          most_bytes=lambda v: max(v.shape[-2] ** 2, 1 << 14),
          mistakes={"divide each sum by its number of tokens": lambda v: v.cumsum(-2),
                    "a token sees itself and the past, but no later token":
                        lambda v: v.mean(-2, keepdim=True).expand_as(v),
                    "divide by the number of tokens up to this one, not by all tokens":
                        lambda v: v.cumsum(-2) / v.shape[-2]})
def running_mean(v: Tensor) -> Tensor:
    counts = torch.arange(1, v.shape[-2] + 1)[:, None]
    return v.cumsum(-2) / counts


def _branches(r: Random) -> tuple[int, int, float]:
    return r.randint(1, 72), r.randint(1, 4), r.uniform(0.5, 2)


@exercise("22.scale", (1, 2, 1.0), (8, 2, 1.0), (72, 1, 0.5), draw=_branches, minutes=6, stars=2,
          mistakes={"variances add up; standard deviations do not": lambda L, n, v: 1 / (L * n * v),
                    "each layer has several branches: count them all":
                        lambda L, n, v: 1 / math.sqrt(L * v),
                    "the factor depends on the variance of a branch":
                        lambda L, n, v: 1 / math.sqrt(L * n)})
def branch_scale(layers: int, branches: int, variance: float) -> float:
    return 1 / math.sqrt(layers * branches * variance)


def _qk(r: Random) -> tuple[Tensor, int]:
    heads, size = r.randint(1, 3), r.randint(1, 3)
    return normal(r, heads * 2 * size, r.randint(1, 4)), heads


def _zero_q(w: Tensor, heads: int, part: int) -> Tensor:
    w = w.clone().unflatten(0, (heads, 2, -1))
    w[:, part] = 0
    return w.flatten(0, 2)


@exercise("22.identity", (torch.arange(1.0, 5.0)[:, None], 1), (torch.arange(1.0, 9.0)[:, None], 2),
          draw=_qk, minutes=6, stars=2,
          mistakes={"heads take turns: q and k of the first head, then q and k of the second":
                        lambda w, heads: torch.cat(
                        (torch.zeros_like(w[:len(w) // 2]), w[len(w) // 2:])),
                    "set the queries to 0, not the keys":
                        lambda w, heads: _zero_q(w, heads, 1),
                    "keys stay as they are": lambda w, heads: torch.zeros_like(w)})
def zero_queries(w: Tensor, heads: int) -> Tensor:
    q, k = w.unflatten(0, (heads, 2, -1)).unbind(1)
    return torch.stack((torch.zeros_like(q), k), 1).flatten(0, 2)


def _gram(r: Random) -> tuple[Tensor, float]:
    x = normal(r, r.randint(1, 6), 4)
    return x @ x.mT / 4, r.uniform(0.1, 2)


def _past(G: Tensor) -> Tensor:
    return torch.ones_like(G).tril() / torch.arange(1, len(G) + 1)[:, None]


@exercise("22.gram", (torch.eye(2), 1.0), (torch.tensor([[4.0, 0.0], [0.0, 1.0]]), 0.5), draw=_gram,
          tolerance=1e-5, minutes=10, stars=3,
          mistakes={"the norm sets the diagonal to 1":
                        lambda G, a: G + a * _past(G) @ G @ _past(G).mT,
                    "average over both sides: A K Aᵀ": lambda G, a: G + a * _past(G) @ (
                        G / (G.diag()[:, None] * G.diag()).sqrt()),
                    "the skip stays": lambda G, a: a * _past(G) @ (
                        G / (G.diag()[:, None] * G.diag()).sqrt()) @ _past(G).mT})
def attended(G: Tensor, a: float) -> Tensor:
    K, A = G / (G.diag()[:, None] * G.diag()).sqrt(), _past(G)
    return G + a * A @ K @ A.mT
