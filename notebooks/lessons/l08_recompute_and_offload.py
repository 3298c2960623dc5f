"""Lesson 08, recompute and offload: its study, its figures and its exercises.

Compares the peak memory and the seconds of a step with each memory technique to those of the plain
step, which uses none.

Bytes are predicted by `lpkit.predict.memory` and measured by `lpkit.measure.memory`. Times are
given as a multiple of the plain step's time. They are predicted by `lpkit.predict.time` if a
technique adds only FLOPs. They are measured in turns, so that a slow moment of the machine affects
all techniques.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from random import Random
from typing import Any

import torch
from torch import Tensor

import lessons.rows.activations
import lessons.rows.disk  # noqa: F401  adds rows
from lessons.activations import kept
from lessons.draws import normal
from lessons.figures.colours import ANSWER_COLOURS
from lessons.figures.drawing import BYTES, SECONDS, axis, bars, figure, note, rule, scatter
from lessons.figures.step_bytes import Points, timeline_figure, total_bytes
from lessons.figures.style import COLOURS
from lessons.figures.waiting import progress
from lessons.judging.judge import Exercise, adding_to
from lessons.rivals import rivals
from lpkit import hardware, measure
from lpkit.config import Config
from lpkit.errors import ConfigError, pick
from lpkit.measure.tracking import Footprint
from lpkit.memory import recompute
from lpkit.predict.compare import TIED
from lpkit.predict.ledger import Memory, memory
from lpkit.predict.time import step_time
from lpkit.predict.units import duration, quantity
from lpkit.tables import FAINT
from lpkit.techniques.machines import CATALOGUE, Machine
from lpkit.techniques.memory import rows_of
from lpkit.timing import Watch, interleaved_seconds
from lpkit.training.training import RandomTokens, Training

# notebook 08 imports these from here
__all__ = ["CATALOGUE", "TIED", "RandomTokens", "Training", "duration", "hardware", "kept",
           "progress", "recompute", "rivals"]

# ---- The study

PLAIN = "plain"
# mean difference between the largest and the smallest of 256 standard normal numbers (Tippett 1925)
RANGE = 5.65
# Relative tolerance of the losses of exact techniques. Atomic additions of a GPU happen in order of
# arrival, so float32 sums differ in their last digits, and then some values round to a neighbouring
# value of bf16.
SLACK = {"cpu": 0.0, "gpu": 2.0**-8}


@dataclass(frozen=True)
class Technique:
    """A memory technique: the settings of a config that turn it on."""

    settings: Mapping[str, Any]
    exact: bool = True      # the losses equal those of the plain step, within SLACK
    # The technique adds FLOPs or nothing, so its time has a formula. False: it adds transfers or
    # casts, whose time has none.
    flops: bool = True

    @property
    def source(self) -> str:
        """Sources of the rows that the settings name."""
        rows = rows_of(Config().replace({"optimizer.clip": 0, **self.settings}))
        changed = dict.fromkeys(key.split(".")[1] for key in self.settings)
        return "; ".join(rows[field].source for field in changed)


RECOMPUTE, IN_BACKWARD = {"memory.recompute": "block"}, {"memory.optimizer_step": "in-backward"}
CHUNKED = {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 256}
INT8 = {"memory.moment_format": "int8"}
TECHNIQUES: dict[str, Technique] = {
    PLAIN: Technique({}),
    "recompute": Technique(RECOMPUTE),
    "recompute, every 2nd": Technique(RECOMPUTE | {"memory.recompute.every": 2}),
    "selective": Technique({"memory.recompute": "selective"}),
    "chunked loss": Technique(CHUNKED, exact=False),
    "update in backward": Technique(IN_BACKWARD),
    "8-bit moments": Technique(INT8, exact=False, flops=False),
    "moments on disk": Technique({"memory.optimizer_state": "disk"}, flops=False),
    "saved on the host": Technique({"memory.activation_offload": "cpu"}, flops=False),
    "saved on disk": Technique({"memory.activation_offload": "disk"}, flops=False),
    **{f"saved in {bits} bits": Technique({"memory.activation_offload": f"int{bits}"}, exact=False,
                                          flops=False) for bits in (8, 4, 2)},
    "the four together": Technique(RECOMPUTE | CHUNKED | IN_BACKWARD | INT8, exact=False,
                                   flops=False),
}


def with_technique(config: Config, name: str) -> Config:
    """Return the config with the technique. Raises ConfigError for an unknown name."""
    return config.replace(dict(pick(TECHNIQUES, name, "technique").settings))


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction of a step with a technique."""
    memory: Memory
    slowdown: float | None      # seconds of a step over the plain step's; None: no formula

    @property
    def peak_bytes(self) -> float:
        return self.memory.peak_bytes


def predicted(config: Config, machine: Machine) -> dict[str, Predicted]:
    """Return the prediction of a step with each technique, by its name. `config` must name its
    precision and attention: "auto" is resolved only in a run."""
    plain, predictions = step_time(config, machine).step_seconds, {}
    for name, technique in TECHNIQUES.items():
        changed, slowdown = with_technique(config, name), None
        if technique.flops:
            slowdown = step_time(changed, machine).step_seconds / plain
        held = memory(changed, machine, attention=config.system.attention)
        predictions[name] = Predicted(memory=held, slowdown=slowdown)
    return predictions


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurement of steps with a technique."""
    footprint: Footprint
    # seconds of a step over the plain step's of the same round; median over the rounds
    slowdown: float
    losses: tuple[float, ...]       # nats per token, of each update; all on the same batch

    @property
    def peak_bytes(self) -> int:
        return self.footprint.peak_bytes


def measured(config: Config, *, rounds: int = 3, watch: Watch = iter) -> dict[str, Measured]:
    """Measure steps of the same model on the same random tokens with each technique, `rounds` times
    in turns; return the results by name of the technique."""
    footprints = {name: measure.memory(with_technique(config, name)) for name in TECHNIQUES}
    benches = {name: measure.Bench(with_technique(config, name)) for name in TECHNIQUES}
    losses: dict[str, list[float]] = {name: [] for name in TECHNIQUES}
    for bench in benches.values():
        bench.training.data.drawn = benches[PLAIN].batch
    torch.manual_seed(config.seed)      # for stochastic rounding

    def step(name: str) -> None:
        losses[name].append(benches[name].train().item())   # `item` waits for the device

    seconds = interleaved_seconds([partial(step, name) for name in TECHNIQUES], rounds=rounds,
                                  watch=watch)
    measurements = {}
    for name, times in zip(TECHNIQUES, seconds):
        slowdown = statistics.median(mine / plain for mine, plain in zip(times, seconds[0]))
        measurements[name] = Measured(footprint=footprints[name], losses=tuple(losses[name]),
                                      slowdown=slowdown)
    return measurements


def gradient_errors(config: Config, names: Iterable[str]) -> dict[str, float]:
    """Return the relative error of the gradient with each of the named techniques:
    |g - g_plain| / |g_plain| over all parameters, for the same weights and tokens."""
    batch = measure.Bench(config).batch

    def gradient(name: str) -> torch.Tensor:
        training = measure.Bench(with_technique(config, name)).training
        torch.manual_seed(0)
        training.forward_backward(batch)
        return torch.cat([p.grad.flatten().float() for p in training.model.parameters()])

    plain = gradient(PLAIN)
    return {name: ((gradient(name) - plain).norm() / plain.norm()).item() for name in names}


def rounding_error(bits: int) -> float:
    """Return the expected relative error (root mean square) of normal numbers stored in `bits`
    bits.

    The 2^bits levels of a group of 256 numbers are evenly spaced from its smallest to its largest
    number. A number is rounded to the level above or below at random; the root mean square of the
    error is the distance of two levels over sqrt(6).

    A gradient is a sum over many tokens. If its terms are not aligned, it has the same relative
    error as its terms.
    """
    return RANGE / (2**bits - 1) / math.sqrt(6)


# ---- Figures

# Recomputation.

FORWARD, BACKWARD = 1, 2        # time of the two passes of a block, in forward passes


def recompute_figure(layers: int = 6, *, title: str = "") -> dict:
    """Return the plotly spec of the time during which the activations of each block are stored. In
    the upper panel, blocks keep all activations. In the lower panel, blocks keep only their input,
    and repeat their forward pass in backward. Raises ConfigError for fewer than 2 blocks."""
    if layers < 2:
        raise ConfigError(f"a drawing of recomputation needs 2 blocks or more, got layers={layers}")
    names = [f"block {i + 1}" for i in range(layers)]
    forward_ends = layers * FORWARD
    plain_end, again = forward_ends + layers * BACKWARD, FORWARD + BACKWARD
    done = [forward_ends + (layers - i) * BACKWARD for i in range(layers)]
    redone = [forward_ends + (layers - i) * again for i in range(layers)]
    begun = [i * FORWARD for i in range(layers)]
    data = []

    def stairs(name: str, colour: str, ends: list[tuple[float, float]], panel: str, width: float,
               shown: bool = True) -> None:
        data.append(bars(names, [end - start for start, end in ends], name, colour,
                         base=[start for start, _ in ends], width=width, xaxis=f"x{panel}",
                         yaxis=f"y{panel}", showlegend=shown,
                         hover="%{y}: " + name + ", %{base} to %{x}"))

    stairs("all activations of the block", COLOURS[2], list(zip(begun, done)), "", 0.7)
    stairs("only its input", COLOURS[1], list(zip(begun, redone)), "2", 0.14)
    stairs("all activations, recomputed", COLOURS[2],
           [(end - again, end) for end in redone], "2", 0.7, shown=False)
    stairs("its forward pass, repeated", COLOURS[0],
           [(end - again, end - BACKWARD) for end in redone], "2", 0.3)
    end = forward_ends + layers * again
    names_axis = {"range": [layers - 0.5, -0.5], "showgrid": False, "ticks": ""}
    across = {"range": [0, end + 0.2], "zeroline": False, "dtick": layers}
    words = {"font": {"size": 12, "color": FAINT}}
    shapes = [rule(x=forward_ends, xref=f"x{i}", yref=f"y{i} domain") for i in ("", 2)]
    notes = [note("forward", forward_ends - 0.1, 1, "right bottom", yref="paper", **words),
             note("backward", forward_ends + 0.1, 1, "left bottom", yref="paper", **words),
             note(f"the step ends at {plain_end}", plain_end, layers - 1, "left middle", **words,
                  xshift=8),
             note(f"it ends at {end}: {end / plain_end:.2f} times", end, layers - 1, "right middle",
                  xref="x2", yref="y2", **words)]
    return figure(
        data, title, height=220 + 48 * layers, barmode="overlay", shapes=shapes,
        annotations=notes, legend={"y": 1.06}, margin={"t": 104},
        xaxis=axis("", anchor="y", **across), yaxis={**names_axis, "domain": [0.56, 1]},
        xaxis2=axis("time, in forward passes of a block", anchor="y2", **across),
        yaxis2={**names_axis, "anchor": "x2", "domain": [0, 0.44]})


def bits_figure(formula: Callable[[int], float], measured: Mapping[int, float], *,
                title: str = "") -> dict:
    """Return the plotly spec of the relative error of the gradient, on a log scale, over the bits
    of a saved number: a line by `formula`, and points as measured, by bits."""
    bits, words = range(min(measured), max(measured) + 1), "%{x} bits: %{y:.2g}"
    return figure(
        [scatter(bits, map(formula, bits), "formula", ANSWER_COLOURS["formula"], hover=words),
         scatter(measured, measured.values(), "measured",
                 ANSWER_COLOURS["measured"], mode="markers", marker={"size": 11}, hover=words)],
        title, height=340, xaxis=axis("bits of a saved number", tickvals=list(bits)),
        yaxis=axis("relative error of the gradient", type="log", dtick=1))


def timelines_view(steps: Mapping[str, tuple[Points, Memory | None]]) -> Callable[[str], dict]:
    """Return a function of `step` (a key of `steps`) for an Explorer, which draws the live bytes of
    that step. A value of `steps` has the measured points and the prediction. The vertical axis is
    the same for all steps."""
    highest = max(total_bytes(point) for points, _ in steps.values() for point in points)

    def show(step: str) -> dict:
        points, formula = steps[step]
        return timeline_figure(points, formula=formula, title=step, highest=highest)

    return show


# Bytes that a technique saves, over the time that it adds: a point for each technique.

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon")    # with COLOURS: 35 markers

Gains = Mapping[str, tuple[float, float]]   # by technique: added time in percent, saved bytes


def bought_figure(predicted: Mapping[str, tuple[float, float | None]],
                  measured: Mapping[str, tuple[float, float]], *, title: str = "",
                  others: float = 0.0) -> dict:
    """Return the plotly spec of the bytes that each technique saves over the time that it adds.

    predicted, measured: for each technique, its peak bytes, and its time as a multiple of the plain
        step's. A predicted time of None (there is no formula) is drawn at the measured time.
    others: the share of the cores that other processes used during the measurement

    A line connects the measured techniques that no other technique beats in both bytes and time.
    Raises ConfigError without "plain"."""
    if PLAIN not in predicted or PLAIN not in measured:
        raise ConfigError(f"savings are relative to {PLAIN!r}, which is missing")
    most = measured[PLAIN][0]
    at = {name: (100 * (time - 1), most - size) for name, (size, time) in measured.items()
          if name != PLAIN}
    forecast = {name: (at[name][0] if time is None else 100 * (time - 1),
                       predicted[PLAIN][0] - size)
                for name, (size, time) in predicted.items() if name in at}
    edge = _edge(at)
    data = [scatter([at[name][0] for name in edge], [at[name][1] for name in edge],
                    "not beaten by another technique", FAINT, line={"width": 3, "shape": "hv"},
                    hover=None)]
    for (name, point), colour, symbol in zip(at.items(), itertools.cycle(COLOURS),
                                             itertools.cycle(SYMBOLS)):
        if name in forecast:
            data.append(scatter(*zip(point, forecast[name]), "", colour, mode="lines", hover=None,
                                legendgroup=name, showlegend=False, line={"width": 1.5}))
            data.append(_mark(name, forecast[name], "predicted", f"{symbol}-open", colour)
                        | {"showlegend": False})
        data.append(_mark(name, point, "measured", symbol, colour) | SECONDS)
    return figure(
        data, title, others=others, height=560,
        xaxis=axis("added time of a step; filled marks: measured, open marks: by formula",
                   ticksuffix="%", zeroline=False),
        yaxis=axis(f"saved bytes of plain's peak of {quantity(most, 'bytes')}", **BYTES,
                   zeroline=False),
        shapes=[rule(x=0, layer="below"), rule(y=0, layer="below")])


def _mark(name: str, gain: tuple[float, float], how: str, symbol: str, colour: str) -> dict:
    """Return the trace of one technique's point; `how` is "predicted" or "measured"."""
    more, less = gain
    return scatter([more], [less], escape(name), colour, mode="markers", legendgroup=name,
                   marker={"symbol": symbol, "size": 11, "line": {"width": 2, "color": colour}},
                   hover=f"{escape(name)}, {how}: {quantity(less, 'bytes')} saved, "
                         f"{more:+.0f}% time<extra></extra>")


def _edge(at: Gains) -> list[str]:
    """Return the techniques that save more bytes than every technique that adds less time, in the
    order of added time."""
    best, edge = 0.0, []
    for name in sorted(at, key=lambda name: (at[name][0], -at[name][1])):
        if at[name][1] > best:
            best = at[name][1]
            edge.append(name)
    return edge


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: bytes and numbers of blocks.

def _without_the_block(layers: int, block: int, kept: int, budget: int) -> int:
    fits = [n for n in range(1, layers + 1)
            if sum(kept if i % n == 0 else block for i in range(layers)) <= budget]
    return max(fits, default=0)


@exercise("08.every", (4, 10, 1, 12), (4, 10, 1, 22), (4, 10, 1, 25), minutes=10, stars=2,
          draw=lambda r: (r.randint(1, 40), r.randint(4, 40), r.randint(1, 3), r.randint(5, 900)),
          mistakes={"at the peak the whole last block is alive": _without_the_block})
def every(layers: int, block: int, kept: int, budget: int) -> int:
    fits = [n for n in range(1, layers + 1)
            if sum(kept if i % n == 0 else block for i in range(layers - 1)) + block <= budget]
    return max(fits, default=0)


@exercise("08.moment_bytes", (256, 256), (1000, 256), (124_000_000, 2048),
          draw=lambda r: (r.randint(1, 10**9), r.choice((64, 128, 256, 2048))),
          mistakes={"the scales take bytes, too": lambda parameters, block: 2 * parameters,
                    "a block that is not full has a scale, too":
                        lambda parameters, block: 2 * (parameters + 4 * (parameters // block))})
def moment_bytes(parameters: int, block: int) -> int:
    return 2 * (parameters + 4 * math.ceil(parameters / block))


@exercise("08.segment", (64, 1, 1), (64, 16, 1), (10, 3, 2), minutes=6, stars=2,
          draw=lambda r: (r.randint(1, r.choice((4, 128))), r.randint(1, 40), r.randint(1, 6)),
          mistakes={"a checkpoint is smaller than a block":
                        lambda layers, block, kept: round(math.sqrt(layers)),
                    "segments are whole: try each number of blocks": lambda layers, block, kept:
                        max(1, round(math.sqrt(layers * kept / block)))})
def segment(layers: int, block: int, kept: int) -> int:
    # one checkpoint per segment, plus all activations of one segment
    return min(range(1, layers + 1), key=lambda n: math.ceil(layers / n) * kept + n * block)


# Exercises: recompute a block, and compute a loss in chunks.

class Watched:
    """A block that complains if the first forward pass keeps intermediate results."""

    def __init__(self, weight: Tensor):
        self.weight, self.calls = weight.detach().requires_grad_(), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = (x @ self.weight.to(x.dtype)).tanh()
        if self.calls == 1 and y.requires_grad:
            raise RuntimeError("the first forward kept its activations; see torch.no_grad()")
        return y

    def __repr__(self) -> str:
        return f"a block of {list(self.weight.shape)}"


def _block(r: Random) -> tuple[Watched, Tensor, Tensor]:
    tokens, width = r.randint(1, 4), r.randint(1, 5)
    return Watched(normal(r, width, width)), normal(r, tokens, width), normal(r, tokens, width)


@exercise("08.recomputed", (Watched(torch.eye(1)), torch.zeros(1, 1), torch.ones(1, 1)),
          draw=_block, tolerance=1e-5, stars=3, minutes=12,
          mistakes={"dy is the gradient of the result; do not leave it out": lambda block, x, dy:
                        recomputed(block, x, torch.ones_like(dy))})
def recomputed(block: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y = block(x)                            # forward: only x is kept
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        again = block(x)                        # backward: run again, with its graph
    return y, torch.autograd.grad(again, x, dy)[0]


def _chunks(r: Random, tokens: int = 0, vocab: int = 0) -> tuple[Tensor, Tensor, Tensor, int]:
    tokens, width, vocab = tokens or r.randint(1, 9), r.randint(1, 4), vocab or r.randint(2, 7)
    targets = torch.tensor([r.randrange(vocab) for _ in range(tokens)])
    return normal(r, tokens, width), normal(r, vocab, width), targets, r.randint(1, 4)


def _mean_of_means(h: Tensor, w: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    h = h.detach().requires_grad_()
    losses = [torch.nn.functional.cross_entropy(a @ w.T, b)
              for a, b in zip(h.split(chunk), targets.split(chunk), strict=True)]
    loss = torch.stack(losses).mean()
    return loss.detach(), torch.autograd.grad(loss, h)[0]


@exercise("08.chunked_loss",
          (torch.ones(2, 1), torch.tensor([[1.0], [0.0]]), torch.tensor([0, 1]), 1),
          _chunks(Random(1), 256, 256), draw=_chunks, tolerance=1e-5, stars=3, minutes=15,
          # half of all logits
          most_bytes=lambda h, w, targets, chunk: max(2 * len(h) * len(w), 1 << 14),
          mistakes={"the last chunk may be shorter: divide by all tokens": _mean_of_means})
def chunked_loss(h: Tensor, w: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    loss, dh = torch.zeros(()), torch.empty_like(h)
    for start in range(0, len(h), chunk):
        rows = slice(start, start + chunk)
        logits = h[rows] @ w.T                  # the only logits in memory
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        p[torch.arange(len(p)), targets[rows]] -= 1
        loss -= log_p.gather(-1, targets[rows, None]).sum() / len(h)
        dh[rows] = p @ w / len(h)
    return loss, dh


def _moments(r: Random) -> tuple[Tensor, Tensor, float, int]:
    """Draw dyadic numbers of few bits, so that every order of operations gives the same result."""
    n = r.randint(1, 20)
    stored = [r.choice((0, r.randrange(256))) * 2.0 ** r.randint(-12, 2) for _ in range(n)]
    return (torch.tensor(stored), torch.tensor([r.choice((0, r.randint(-40, 40))) / 16
                                                for _ in range(n)]),
            r.choice((0.5, 0.75, 0.875)), r.choice((4, 8)))


@exercise("08.moment", (torch.tensor([255.0]), torch.tensor([1.0]), 0.5, 4),
          (torch.tensor([64.0, 0.0, 1.0]), torch.tensor([2.0, 0.0, 0.25]), 0.5, 2),
          (torch.zeros(5), torch.zeros(5), 0.5, 4), draw=_moments, tolerance=0, stars=2, minutes=12,
          mistakes={"each block has a scale of its own": lambda v, g, beta, block:
                        moment(v, g, beta, len(v)),
                    "the second moment averages squares": lambda v, g, beta, block:
                        moment(beta * v + (1 - beta) * g.abs(), 0 * g, 1.0, block),
                    "what is stored has eight bits": lambda v, g, beta, block:
                        beta * v + (1 - beta) * g * g})
def moment(v: Tensor, g: Tensor, beta: float, block: int) -> Tensor:
    v = beta * v + (1 - beta) * g.square()
    stored = torch.empty_like(v)
    for start in range(0, len(v), block):
        part = v[start:start + block]
        scale = 2.0 ** torch.ceil(torch.log2(part.max() / 255)) if part.any() else 1.0
        stored[start:start + block] = (part / scale).round() * scale    # codes 0 to 255
    return stored
