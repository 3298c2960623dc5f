"""Lesson 29, Fewer bits, fewer weights: its study, its figures and its exercises.

A trained model of two layers (tokens are bytes) is rounded and pruned without training (RTN, GPTQ;
magnitude, Wanda, SparseGPT), and trained with rounded or missing weights (QAT, distillation,
lottery tickets). data/measured/fewer-bits-*.json has the results of five seeds, which `lpkit bench
fewer-bits --out data/measured` records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial, reduce
from operator import getitem
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpkit
from lessons.draws import normal
from lessons.figures.drawing import axis, bars, figure, scatter
from lessons.figures.style import COLOURS
from lessons.judging.judge import adding_to
from lpkit.config import Config
from lpkit.errors import ConfigError, pick
from lpkit.predict.evidence import MEASURED
from lpkit.training.runs import Run
from lpkit.training.sampling import trained as load
from lpkit.training.training import Training

STEPS, SEEDS = 500, 5       # updates and seeds of models that are rounded and pruned
TRAINED_STEPS, TRAINED_SEEDS = 200, 3       # updates and seeds of training with fewer bits
MORE = 60                   # updates of QAT
BASE = {"model.layers": 2, "model.width": 128, "model.heads": 4, "model.context": 64,
        "global_batch": 8, "eval_every": 0, "eval_batches": 32, "checkpoint_every": 0,
        "optimizer.lr": 3e-3, "schedule.warmup_steps": 50, "precision.recipe": "fp32",
        "system.device": "cpu", "system.threads": 1}
GROUP = 64                  # weights of a row that share a scale
CALIBRATION = 8             # batches of training tokens from which Linears' inputs are recorded
FISHER = 160                # sequences whose gradients estimate the Fisher diagonal
DAMPING = 1e-2              # share of the mean diagonal that is added to the Hessian
ACROSS = 0.25               # share of a change at which the loss's slope and curvature are measured


def config(steps: int = STEPS, seed: int = 0, **changes: Any) -> Config:
    return lpkit.preset("cpu-3m").replace(BASE | {"steps": steps, "seed": seed} | changes)


def trained(config: Config, state: Mapping[str, Tensor] | None = None, first: int = 0,
            after: Callable[[nn.Module], None] = lambda model: None) -> Training:
    """Train a model and return its Training. `state`: initial weights; `first`: number of the first
    update; `after(model)` is called before the first update and after each update."""
    training = Training.build(config)
    if state is not None:
        training.model.load_state_dict(state, strict=False)
    with torch.no_grad():
        after(training.model)
    for step in range(first, config.steps):
        training.update(step)
        with torch.no_grad():
            after(training.model)
    return training


def matrices(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the Linears of the blocks by name."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and "blocks." in name}


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state dict."""
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


# ---- Methods: weights (N, K) and inputs x (M, K) of a Linear -> new weights

def rtn(w: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """Return w rounded to nearest: each group of a row becomes integers of `bits` bits times one
    scale."""
    largest = 2 ** (bits - 1) - 1
    parts = w.reshape(len(w), -1, group)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
    return ((parts / scale).round() * scale).view_as(w)


def hessian(x: Tensor) -> Tensor:
    """Return the damped x^T x / M (K, K) of inputs x (M, K) in float64. The second derivative of a
    row's squared output error is twice this matrix."""
    x = x.double()
    H = x.T @ x / len(x)
    return H + DAMPING * H.diag().mean() * torch.eye(len(H), dtype=H.dtype)


def compensated(w: Tensor, x: Tensor, choose: Callable[[Tensor, Tensor, int], Tensor],
                block: int) -> Tensor:
    """Return w (N, K) with its columns replaced from left to right. After each column, the columns
    on its right are changed so that the outputs x w^T change least (Frantar and Alistarh 2022).

    At each multiple `start` of `block`, `choose(w, d, start)` gets the weights as changed so far,
    and returns a function of a column and its index in the block, which returns the new column.
    d (K,) is the diagonal of the Cholesky factor of the inverse Hessian."""
    U = torch.linalg.cholesky(torch.linalg.inv(hessian(x)), upper=True)
    w, d = w.double().clone(), U.diag()
    for start in range(0, w.shape[1], block):
        replaced = choose(w, d, start)
        for j in range(start, min(start + block, w.shape[1])):
            new = replaced(w[:, j], j - start)
            # U[j, j] * U[j, j:] is the first row of the inverse of H[j:, j:], the Hessian of the
            # columns that may still change: this change of them minimises the outputs' error
            error = (w[:, j] - new) / U[j, j]
            w[:, j + 1:] -= error[:, None] * U[j, j + 1:]
            w[:, j] = new
    return w.float()


def gptq(w: Tensor, x: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """Return w rounded by GPTQ (Frantar et al. 2022): to integers like RTN, one column at a time,
    with compensation. The scale of a group is computed when its first column is reached."""
    largest = 2 ** (bits - 1) - 1

    def choose(w: Tensor, d: Tensor, start: int) -> Callable[[Tensor, int], Tensor]:
        scale = w[:, start:start + group].abs().amax(1).clamp(min=1e-30) / largest
        return lambda column, j: (column / scale).round().clamp(-largest, largest) * scale

    return compensated(w, x, choose, group)


def smallest(scores: Tensor, zeros: int, of: int) -> Tensor:
    """Return the mask (N, K) that is True for the `zeros` smallest scores in each group of `of`
    elements along a row. If `of` is 0, it is True for the smallest `zeros` percent of the whole
    matrix."""
    if not of:
        last = scores.flatten().kthvalue(max(1, round(zeros / 100 * scores.numel())))[0]
        return scores <= last
    parts = scores.reshape(len(scores), -1, of)
    mask = torch.zeros_like(parts, dtype=torch.bool)
    return mask.scatter_(-1, parts.argsort(-1)[..., :zeros], True).view_as(scores)


def magnitude(w: Tensor, x: Tensor, zeros: int, of: int) -> Tensor:
    """Return w with its smallest weights set to zero: of the whole matrix if `of` is GROUP, else
    `zeros` in each group of `of`."""
    whole = w.shape[1] if of == GROUP else 0
    mask = smallest(w.abs(), 100 * zeros // of, 0) if whole else smallest(w.abs(), zeros, of)
    return w.masked_fill(mask, 0)


def wanda(w: Tensor, x: Tensor, zeros: int, of: int) -> Tensor:
    """Return w pruned by Wanda (Sun et al. 2023): the score of a weight is its magnitude times its
    input's norm. Scores are compared within a row."""
    across = w.shape[1] if of == GROUP else of
    scores = w.abs() * x.norm(dim=0)
    return w.masked_fill(smallest(scores, zeros * across // of, across), 0)


def sparsegpt(w: Tensor, x: Tensor, zeros: int, of: int) -> Tensor:
    """Return w pruned by SparseGPT (Frantar and Alistarh 2023): the score of a weight is the error
    of the outputs that remains after its removal has been compensated by the columns on its
    right."""
    def choose(w: Tensor, d: Tensor, start: int) -> Callable[[Tensor, int], Tensor]:
        scores = (w[:, start:start + of] / d[start:start + of]).square()
        mask = smallest(scores, zeros, of)
        return lambda column, j: column.masked_fill(mask[:, j], 0)

    return compensated(w, x, choose, of)


HALF, TWO_OF_FOUR = (GROUP // 2, GROUP), (2, 4)     # zeros per group, elements of a group in a row
PRUNERS = {"magnitude": magnitude, "Wanda": wanda, "SparseGPT": sparsegpt}
SPLIT = ("RTN int3", "magnitude 50%", "SparseGPT 50%")     # methods whose effects are split
METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{f"RTN int{bits}": partial(lambda w, x, bits: rtn(w, bits), bits=bits)
       for bits in (8, 4, 3)},
    **{f"GPTQ int{bits}": partial(gptq, bits=bits) for bits in (4, 3)},
    **{f"{name} 50%": partial(prune, zeros=HALF[0], of=HALF[1])
       for name, prune in PRUNERS.items()},
    **{f"{name} 2:4": partial(prune, zeros=2, of=4) for name, prune in PRUNERS.items()}}


def method(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a method of METHODS. Raises ConfigError for an unknown name, with the nearest name."""
    return pick(METHODS, name, "method")


def apply_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set the weights of each Linear to zero where its mask is False. If a mask belongs to no
    Linear or has the wrong shape, raises ConfigError and changes nothing."""
    linears = matrices(model)
    for name, mask in masks.items():
        if name not in linears:
            raise ConfigError(f"the mask {name!r} has no Linear in this model; its Linears are "
                              f"{', '.join(linears)}")
        if mask.shape != linears[name].weight.shape:
            raise ConfigError(f"the mask of {name} is {tuple(mask.shape)} and its weight is "
                              f"{tuple(linears[name].weight.shape)}; prune this model again")
    with torch.no_grad():
        for name, mask in masks.items():
            linears[name].weight.mul_(mask)


# ---- The study of one trained model

@dataclass(frozen=True)
class Effect:
    """The effect of a method on a model."""

    added: float                # nats that the method adds to the validation loss
    predicted: float            # nats that the Fisher diagonal predicts
    errors: dict[str, float]    # by matrix: squared error of the outputs over squared outputs


@dataclass(frozen=True)
class Parts:
    """The nats that a change of the weights adds, and three terms of the loss's Taylor series along
    the change, in nats."""

    added: float        # measured increase of the loss
    slope: float        # first-order term
    curvature: float    # second-order term
    diagonal: float     # the second-order term's diagonal part, by the Fisher diagonal


class Study:
    """A trained model, the inputs of its Linears, and its Fisher diagonal."""

    def __init__(self, training: Training):
        self.training, self.model = training, training.model
        self.linears = matrices(self.model)
        self.weights = {name: layer.weight.detach().clone() for name, layer in self.linears.items()}
        self.loss = training.evaluate()

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Return the inputs x (M, K) of each Linear for tokens of the training data."""
        seen: dict[str, list[Tensor]] = {name: [] for name in self.linears}
        hooks = [layer.register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].detach().flatten(0, 1)))
            for name, layer in self.linears.items()]
        with torch.no_grad():
            for step in range(CALIBRATION):
                self.model(self.training.batch(10_000 + step).tokens)
        for hook in hooks:
            hook.remove()
        return {name: torch.cat(parts) for name, parts in seen.items()}

    @cached_property
    def fisher(self) -> dict[str, Tensor]:
        """Return the diagonal of the Fisher matrix of the mean loss, with labels drawn from the
        model: the mean over sequences of the squared gradient of the summed loss, per token."""
        generator = torch.Generator().manual_seed(0)
        weights = [layer.weight for layer in self.linears.values()]
        sums = [torch.zeros_like(w) for w in weights]
        sequences = torch.cat([self.training.batch(20_000 + step).tokens
                               for step in range(-(-FISHER // self.training.config.global_batch))])
        for tokens in sequences[:FISHER].split(1):
            logits = self.model(tokens)[0]
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            nats = F.cross_entropy(logits, drawn, reduction="sum")
            for total, g in zip(sums, torch.autograd.grad(nats, weights)):
                total += g.square() / FISHER / len(drawn)
        return dict(zip(self.linears, sums))

    @contextmanager
    def changed(self, change: Mapping[str, Tensor], share: float = 1.0) -> Iterator[None]:
        """Add `share` times the change to the weights within the `with` block."""
        with torch.no_grad():
            for name, layer in self.linears.items():
                layer.weight.copy_(self.weights[name] + share * change[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, layer in self.linears.items():
                    layer.weight.copy_(self.weights[name])

    def added(self, change: Mapping[str, Tensor], share: float = 1.0) -> float:
        """Return the nats that `share` times a change adds to the validation loss."""
        with self.changed(change, share):
            return self.training.evaluate() - self.loss

    def change(self, name: str) -> dict[str, Tensor]:
        """Return the change that a method makes to each matrix."""
        by = method(name)
        return {layer: by(w, self.inputs[layer]) - w for layer, w in self.weights.items()}

    def predicted(self, change: Mapping[str, Tensor]) -> float:
        """Return the nats that the Fisher diagonal F predicts for a change: 1/2 sum F dw^2."""
        return sum((self.fisher[name] * dw.square()).sum().item() / 2
                   for name, dw in change.items())

    def effect(self, name: str) -> Effect:
        change = self.change(name)
        return Effect(self.added(change), self.predicted(change), {
            layer: output_error(self.weights[layer], self.weights[layer] + dw, self.inputs[layer])
            for layer, dw in change.items()})

    def parts(self, name: str) -> Parts:
        """Return the parts of a method's effect, from the losses at +1/4 and -1/4 of its change."""
        change = self.change(name)
        up, down = (self.added(change, share) for share in (ACROSS, -ACROSS))
        return Parts(self.added(change), (up - down) / 2 / ACROSS, (up + down) / 2 / ACROSS**2,
                     self.predicted(change))

    def with_random_signs(self, name: str) -> float:
        """Return the nats that a change with the magnitudes of the method's change and random signs
        adds. The mean over this change and its negative is returned, so the slope cancels."""
        generator = torch.Generator().manual_seed(0)
        change = {layer: dw * (2 * torch.randint(0, 2, dw.shape, generator=generator) - 1)
                  for layer, dw in self.change(name).items()}
        return (self.added(change) + self.added(change, -1.0)) / 2


def output_error(w: Tensor, new: Tensor, x: Tensor) -> float:
    """Return |x (new - w)^T|^2 / |x w^T|^2."""
    x = x.double()
    return ((x @ (new - w).double().T).square().sum() / (x @ w.double().T).square().sum()).item()


def smoothed_error(w: Tensor, x: Tensor, alpha: float, bits: int = 8) -> float:
    """Return the output error of a Linear whose weights and activations are integers, with one
    scale per row of w and per token. Before rounding, input j is divided by
    s_j = max|x_j|^alpha / max|w_j|^(1 - alpha), and its weights are multiplied by s_j (SmoothQuant,
    Xiao et al. 2022). alpha 0 means no smoothing: s = 1."""
    x, w = x.double(), w.double()
    s = torch.ones(w.shape[1], dtype=x.dtype)
    if alpha:
        s = x.abs().amax(0) ** alpha / w.abs().amax(0).clamp(min=1e-9) ** (1 - alpha)
        s = s.clamp(min=1e-9)
    new = rtn(x / s, bits, x.shape[1]) @ rtn(w * s, bits, w.shape[1]).T
    return ((new - x @ w.T).square().sum() / (x @ w.T).square().sum()).item()


# ---- Training with fewer bits and weights

def lottery(seed: int, steps: int = TRAINED_STEPS, share: float = 0.8,
            rewind: int = 30) -> dict[str, float]:
    """Return the final losses of four runs (Frankle and Carbin 2018; rewinding: Frankle et al.
    2019):

    dense           all weights
    ticket          only the weights that are largest at the end of the dense run, starting from
                    their values after `rewind` updates; the `share` of the others are zero
    reshuffled      as many weights as the ticket, at random places
    another start   the ticket's weights, starting from another initialisation
    """
    whole = config(steps, seed)
    early: dict[str, Tensor] = {}
    calls = iter(range(steps + 1))

    def keep(model: nn.Module) -> None:
        if next(calls) == rewind:
            early.update(copied(model))

    dense = trained(whole, after=keep)
    masks = {name: ~smallest(layer.weight.detach().abs(), round(100 * share), 0)
             for name, layer in matrices(dense.model).items()}
    generator = torch.Generator().manual_seed(seed)
    moved = {name: mask.flatten()[torch.randperm(mask.numel(), generator=generator)].view_as(mask)
             for name, mask in masks.items()}
    other = copied(Training.build(config(steps, seed + 1000)).model)
    return {"dense": dense.evaluate()} | {
        name: trained(whole, state, rewind, partial(apply_masks, masks=chosen)).evaluate()
        for name, state, chosen in (("ticket", early, masks), ("reshuffled", early, moved),
                                    ("another start", other, masks))}


def rounded_training(dense: Mapping[str, Tensor], seed: int, weights: Sequence[str],
                     steps: int = MORE, group: int = 32) -> dict[str, dict[str, float]]:
    """Return three losses for each weight format: of the dense model, rounded; of the dense model
    after `steps` more updates in float32, rounded; and after `steps` updates of QAT."""
    ways = {"imports": ("experiments.qat",), "optimizer.lr": 1e-3, "schedule.warmup_steps": 5}
    longer = trained(config(steps, seed, **ways), dense).model.state_dict()
    losses = {}
    for name in weights:
        rounded = config(steps, seed, **ways, **{
            "precision.recipe": {"name": "qat", "weights": name, "group": group}})
        losses[name] = {"rounded": trained(rounded, dense, first=steps).evaluate(),
                        "trained on, rounded": trained(rounded, longer, first=steps).evaluate(),
                        "QAT": trained(rounded, dense).evaluate()}
    return losses


def teacher(folder: Path, seed: int, steps: int = TRAINED_STEPS) -> Run:
    """Train the dense model into a run folder, from which distillation and QAT start."""
    return lpkit.train(config(steps, seed, checkpoint_every=steps), out=folder)


def distilled(folder: Path, seed: int, steps: int = TRAINED_STEPS) -> dict[str, float]:
    """Return the losses of a student with half the teacher's width, trained without (`alone`) and
    with the teacher's probabilities in its objective (`distilled`). The teacher's run is in
    `folder`."""
    student = {"model.width": 64, "model.heads": 2, "imports": ("experiments.distil",)}
    objective = {"objective": {"name": "distil", "teacher": str(folder)}}
    return {"alone": trained(config(steps, seed, **student)).evaluate(),
            "distilled": trained(config(steps, seed, **student, **objective)).evaluate()}


# ---- Records

def record(seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Train a model and return the effect of each method, for the record."""
    study = Study(trained(config(steps, seed)))
    return {"seed": seed, "loss": study.loss,
            "effects": {name: asdict(study.effect(name)) for name in METHODS},
            "parts": {name: asdict(study.parts(name)) for name in SPLIT}}


def record_of_training(folder: Path, seed: int) -> dict[str, Any]:
    """Return the losses of QAT, of distillation and of the lottery tickets of a seed."""
    run = teacher(folder, seed)
    dense = copied(load(run).model)
    return {"seed": seed, "rounding": rounded_training(dense, seed, ("int3", "int2")),
            "distillation": distilled(folder, seed), "lottery": lottery(seed)}


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the seeds of a record, `fewer-bits` or `fewer-trained`."""
    return json.loads(next(MEASURED.glob(f"{name}-*.json")).read_text())["seeds"]


# ---- Figures

def effects_figure(seeds: Sequence[Mapping[str, Any]]) -> dict:
    """Return the plotly spec of the nats that each method adds, with a marker per recorded seed."""
    names = [name for name in METHODS if name not in ("RTN int8", "RTN int4", "GPTQ int4")]
    data = [scatter([row["effects"][name]["added"] for name in names], names,
                    f"seed {row['seed']}", COLOURS[number % len(COLOURS)], mode="markers",
                    marker={"size": 9}, hover="%{y}: %{x:.4f} nats")
            for number, row in enumerate(seeds)]
    return figure(data, "Nats that rounding and pruning add", height=420,
                  xaxis=axis("validation loss minus the dense model's, nats"),
                  yaxis={"autorange": "reversed"}, margin={"l": 120})


def parts_figure(seeds: Sequence[Mapping[str, Any]]) -> dict:
    """Return the plotly spec of the parts of a change, as means over the recorded seeds."""
    words = {"diagonal": "predicted by the Fisher diagonal",
             "curvature": "curvature along the change", "added": "measured increase of the loss"}
    data = [bars(SPLIT, [fmean(row["parts"][name][part] for row in seeds) for name in SPLIT],
                 label, colour, hover="%{y}: %{x:.4f} nats")
            for (part, label), colour in zip(words.items(), COLOURS)]
    return figure(data, "Predicted and measured effect of a change", height=380, barmode="group",
                  xaxis=axis("nats, mean of the recorded seeds"),
                  yaxis={"autorange": "reversed"}, margin={"l": 120})


def wins(seeds: Sequence[Mapping[str, Any]], name: str, pattern: str) -> int:
    """Return the number of seeds in which the pruner `name` adds the fewest nats. `pattern`: "50%"
    or "2:4"."""
    return sum(best({method: Effect(**effect) for method, effect in row["effects"].items()},
                    pattern) == name for row in seeds)


def best(effects: Mapping[str, Effect], pattern: str) -> str:
    """Return the pruner that adds the fewest nats."""
    return min(PRUNERS, key=lambda name: effects[f"{name} {pattern}"].added)


def matrices_worse(seeds: Sequence[Mapping[str, Any]], effects: Mapping[str, Effect]) -> list[str]:
    """Return the matrices of the recorded models and of the model trained here for which GPTQ's
    output error is not below RTN's."""
    models = [{name: Effect(**effect) for name, effect in row["effects"].items()} for row in seeds]
    return [f"{matrix}, {bits}" for model in [*models, effects] for bits in ("int4", "int3")
            for matrix, error in model[f"GPTQ {bits}"].errors.items()
            if error >= model[f"RTN {bits}"].errors[matrix]]


def seen(seeds: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the predicted over the measured increase of the loss, as a ratio of means over
    seeds."""
    predicted, added = (fmean(row["effects"][name][key] for row in seeds)
                        for key in ("predicted", "added"))
    return predicted / added


def learned_rows(seeds: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the table of training with fewer bits and weights. Each row has what was
    reduced, two ways to train, and their losses (means over seeds)."""
    def mean(*keys: str) -> str:
        values = [reduce(getitem, keys, row) for row in seeds]
        return f"{fmean(values):.3f}"

    return [*((f"{bits} weights", "QAT, 60 updates", mean("rounding", bits, "QAT"),
               f"60 updates, then rounded (at once: {mean('rounding', bits, 'rounded')})",
               mean("rounding", bits, "trained on, rounded")) for bits in ("int3", "int2")),
            ("a student of half the width", "a teacher", mean("distillation", "distilled"),
             "the text alone", mean("distillation", "alone")),
            ("20% of the weights", f"the lottery ticket (dense: {mean('lottery', 'dense')})",
             mean("lottery", "ticket"), "reshuffled places", mean("lottery", "reshuffled")),
            ("20% of the weights", "the ticket's places, another start",
             mean("lottery", "another start"), "reshuffled places", mean("lottery", "reshuffled"))]


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


def _sizes(r: Random) -> tuple[int, int, int]:
    return r.randint(2, 8), r.choice([8, 16, 32, 64, 128]), r.choice([8, 16, 32])


@exercise("29.bits", (4, 32, 16), (3, 64, 32), (8, 128, 8), minutes=3, draw=_sizes,
          mistakes={"a scale serves a whole group": lambda bits, group, scale: bits + scale,
                    "scales take memory, too": lambda bits, group, scale: float(bits)})
def bits_per_weight(bits: int, group: int, scale_bits: int) -> float:
    return bits + scale_bits / group


def _kept(w: Tensor, kept: int = 2, *, absolute: bool = True, rows: bool = True) -> Tensor:
    """Keeps the `kept` largest of each four weights, or makes a common mistake."""
    across = w if rows else w.T
    parts = across.reshape(across.shape[0], -1, 4)
    scores = parts.abs() if absolute else parts
    out = parts.masked_fill(scores < scores.topk(kept).values[..., -1:], 0).reshape(across.shape)
    return out if rows else out.T


@exercise("29.two_of_four", (torch.tensor([[1.0, -3.0, 2.0, 0.5]]),),
          (torch.tensor([[4.0, 3.0, 2.0, 1.0, -5.0, 6.0, -7.0, 8.0]]),), minutes=6, stars=2,
          draw=lambda r: (normal(r, 4 * r.randint(1, 3), 4 * r.randint(1, 4)),), drawn=60,
          mistakes={"compare magnitudes, without signs": partial(_kept, absolute=False),
                    "keep two of each four weights": partial(_kept, kept=3),
                    "a group is four neighbours in a row": lambda w: _kept(
                        w, rows=len(w) % 4 > 0)})
def two_of_four(w: Tensor) -> Tensor:
    parts = w.reshape(w.shape[0], -1, 4)
    order = parts.abs().argsort(-1)
    return parts.scatter(-1, order[..., :2], 0.0).reshape(w.shape)


def _hessian(r: Random) -> tuple[Tensor, Tensor, int]:
    size = r.randint(2, 5)
    x = normal(r, 3 * size, size)
    return normal(r, size), x.T @ x / len(x) + 0.1 * torch.eye(size), r.randrange(size)


@exercise("29.compensate", (torch.tensor([1.0, 2.0]), torch.tensor([[2.0, 1.0], [1.0, 2.0]]), 0),
          (torch.tensor([1.0, 2.0]), torch.tensor([[2.0, 1.0], [1.0, 4.0]]), 1), minutes=9, stars=2,
          draw=_hessian, drawn=60,
          mistakes={"change the other weights, too": lambda w, H, q: w * (
                        torch.arange(len(w)) != q),
                    "use the inverse of H": lambda w, H, q: w - w[q] / H[q, q] * H[:, q],
                    "check the sign: weight q must become 0": lambda w, H, q: w + w[q]
                        / H.inverse()[q, q] * H.inverse()[:, q]})
def compensate(w: Tensor, H: Tensor, q: int) -> Tensor:
    inverse = torch.linalg.inv(H)
    return w - w[q] / inverse[q, q] * inverse[:, q]
