"""Lesson 24, Start from a run: its study, its figures and its exercises.

Counts, measures and times a step of full fine-tuning and a step of LoRA. Then a small model that
learned from Python code is trained further on the Python manual, with adapters of several ranks and
with all weights, and its loss on code is measured again. Units: bytes, seconds, losses in nats per
token.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lessons.draws import normal
from lessons.figures.drawing import axis, figure, scatter
from lessons.figures.style import COLOURS
from lessons.figures.waiting import progress as progress
from lessons.judging.judge import adding_to
from lessons.timing import by_phase
from lpkit import hardware as hardware
from lpkit import measure as measure
from lpkit import train as train
from lpkit.config import Config
from lpkit.measure.tracking import Footprint
from lpkit.measure.updates import Bench, take_turns
from lpkit.nn.adapters import Lora as Lora
from lpkit.predict.compare import disturbance
from lpkit.predict.flops import training_flops
from lpkit.predict.ledger import Memory, memory
from lpkit.predict.params import parameter_count as parameter_count
from lpkit.predict.params import trained_count
from lpkit.predict.units import quantity
from lpkit.presets import preset
from lpkit.tables import html_table
from lpkit.timing import Watch
from lpkit.training.runs import Run
from lpkit.training.training import Training

# ---- One step

FULL, ALL, QKV = "full", "LoRA", "LoRA of attention.qkv"
STATES = ("weights", "gradients", "optimizer state")
# Hu et al. 2021, section 4.2: VRAM of training GPT-3 175B with Adam
PUBLISHED = {"full": 1.2e12, "LoRA": 350e9}


def adapted(config: Config, rank: int, **more: Any) -> Config:
    """Return the config with LoRA of this rank."""
    return config.replace({"model.changes": [{"name": "lora", "rank": rank, **more}]})


def three(config: Config, rank: int) -> dict[str, Config]:
    """Return three configs by name: all weights are trained, LoRA on all matrices, and LoRA on
    `attention.qkv` only."""
    return {FULL: config, ALL: adapted(config, rank),
            QKV: adapted(config, rank, targets=["attention.qkv"])}


def trained_share(config: Config) -> float:
    """Return the trained parameters over the parameters of the model without adapters."""
    return trained_count(config.model) / trained_count(
        config.replace({"model.changes": []}).model)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Seconds of one update by config and phase: the best of rounds in which the configs took
    turns."""

    forward: dict[str, float]
    backward: dict[str, float]
    optimizer: dict[str, float]
    others: float           # share of the cores that other processes used
    where: str              # the device and the number of rounds, for captions

    def whole(self, name: str) -> float:
        """Return the seconds of a whole update."""
        return self.forward[name] + self.backward[name] + self.optimizer[name]

    def share(self, name: str) -> float:
        """Return the seconds of an update over those of full fine-tuning."""
        return self.whole(name) / self.whole(FULL)


def timed(configs: Mapping[str, Config], *, rounds: int, watch: Watch = iter) -> Timed:
    benches = {name: Bench(config) for name, config in configs.items()}
    spent: dict[str, list[tuple]] = {name: [] for name in configs}

    def runner(name: str, bench: Bench) -> Callable[[], None]:
        return lambda: spent[name].append(by_phase(bench))

    _, others = take_turns([runner(*bench) for bench in benches.items()], rounds, watch)
    # the first round is a warm-up
    best = {name: min(by_round[1:], key=sum) for name, by_round in spent.items()}
    forward, backward, optimizer = ({name: phases[i] for name, phases in best.items()}
                                    for i in range(3))
    return Timed(forward=forward, backward=backward, optimizer=optimizer, others=others,
                 where=f"{benches[FULL].where}, the best of {rounds} rounds")


# ---- Training continues from a run

TEXT = {"code": "*.py", "manual": "pydoc_data/topics.py"}      # in Python's standard library
SMALL = {"model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 64,
         "model.init": "fan-in", "schedule": "constant", "schedule.warmup_steps": 10,
         "optimizer.weight_decay": 0.0, "optimizer.lr": 0.005, "eval_every": 0, "eval_batches": 8,
         "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1,
         "system.compile": False, "global_batch": 8, "grad_accum_steps": 1}
RATES = (0.0015, 0.005, 0.015)
GENTLE = 0.0005                 # an additional, low learning rate for full fine-tuning


def source_of(text: str) -> str:
    return str(Path(sysconfig.get_path("stdlib")) / TEXT[text])


def base(steps: int) -> Config:
    """Return the config of a model that learns code."""
    return preset("cpu-3m").replace(SMALL | {"data.source": source_of("code"), "steps": steps})


@dataclass(frozen=True, kw_only=True)
class Went:
    """One continued training."""

    rank: int               # of the adapters; 0: all weights are trained
    lr: float
    trained: int            # number of trained parameters
    learned: float          # final loss on the new text, the manual
    remembered: float       # final loss on the first text, the code

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank else "all weights"


@dataclass(frozen=True, kw_only=True)
class Study:
    """All continued trainings. `code` and `manual`: the base model's losses on both texts."""

    code: float
    manual: float
    went: tuple[Went, ...]

    def best(self, rank: int) -> Went:
        """Return the training of this rank with the lowest loss on the manual."""
        return min((run for run in self.went if run.rank == rank), key=lambda run: run.learned)

    def at(self, rank: int, lr: float) -> Went:
        return next(run for run in self.went if (run.rank, run.lr) == (rank, lr))

    def forgot(self, run: Went) -> float:
        """Return the increase of the loss on the first text."""
        return run.remembered - self.code

    @property
    def ranks(self) -> list[int]:
        return sorted({run.rank for run in self.went})


def go_on(run: Run, ranks: Sequence[int], steps: int, watch: Watch = iter) -> Study:
    """Continue `run` on the manual: with adapters of each rank, and with all weights, at each
    learning rate."""
    first = Training.build(run.config.replace({"start.run": str(run.path)}))
    text = [first.val.batch(i) for i in range(run.config.eval_batches)]
    cases = [(0, GENTLE), *((rank, lr) for rank in (0, *ranks) for lr in RATES)]
    went, before = [], 0.0
    for rank, lr in watch(cases):
        training = Training.build(going_on(run, rank, lr, steps))
        before = before or training.evaluate()
        for step in range(steps):
            training.update(step)
        went.append(Went(rank=rank, lr=lr, trained=trained_count(training.config.model),
                         learned=training.evaluate(), remembered=_loss(training, text)))
    return Study(code=_loss(first, text), manual=before, went=tuple(went))


def going_on(run: Run, rank: int, lr: float, steps: int) -> Config:
    config = run.config.replace({"start.run": str(run.path), "data.source": source_of("manual"),
                                 "optimizer.lr": lr, "steps": steps})
    return adapted(config, rank) if rank else config


@torch.no_grad()
def _loss(training: Training, text: Sequence[Any]) -> float:
    return fmean(training.loss(training.model, batch).item() for batch in text)


# ---- Figures and tables

def rows_table(formulas: Mapping[str, Memory], measured: Mapping[str, Footprint] | None = None
               ) -> str:
    """Return an HTML table of the most bytes of each row of memory, and of the peak: measured if
    `measured` is given, else predicted."""
    heads, lines = [*formulas, "over full"], []
    most = {name: {row.name: row.bytes for row in formula.rows}
            for name, formula in formulas.items()}
    peaks = {name: formula.peak_bytes for name, formula in formulas.items()}
    if measured:
        most = {name: footprint.most for name, footprint in measured.items()}
        peaks = {name: footprint.peak_bytes for name, footprint in measured.items()}
    for row in (*STATES, "activations", "temporaries"):
        lines.append(_line(row, [sizes.get(row, 0) for sizes in most.values()]))
    lines.append(_line("peak (at one moment, so not the sum)", list(peaks.values())))
    return html_table(("largest size of each row", *heads), lines)


def _line(name: str, sizes: Sequence[float]) -> tuple[str, ...]:
    shares = " and ".join(f"{size / sizes[0]:.1%}" for size in sizes[1:])
    return (name, *(quantity(size, "bytes") for size in sizes), shares)


def kept_table(measured: Mapping[str, Footprint]) -> str:
    """Return an HTML table of the bytes saved for backward by operation. The bytes of an adapter's
    A count with its Linear; those of its B are in a separate row."""
    named = {name: {} for name in measured}
    for name, footprint in measured.items():
        for operation, size in footprint.operations.items():
            whole = operation.replace(".A", "")
            if ".B" in operation:
                whole = "between A and B"
            named[name][whole] = named[name].get(whole, 0) + size
    rows = sorted({row for sizes in named.values() for row in sizes},
                  key=lambda row: -max(sizes.get(row, 0) for sizes in named.values()))
    lines = [(row, *(f"{sizes.get(row, 0):,}" for sizes in named.values())) for row in rows]
    return html_table(("bytes saved for backward", *measured), lines)


def seconds_table(times: Timed, configs: Mapping[str, Config]) -> str:
    """Return an HTML table of seconds by phase, and of the shares of full fine-tuning's time, FLOPs
    and weights."""
    lines, whole = [], training_flops(configs[FULL].model)
    for name, config in configs.items():
        lines.append((name, *(f"{1e3 * phase[name]:.1f} ms" for phase in (
            times.forward, times.backward, times.optimizer)), f"{times.share(name):.0%}",
            f"{training_flops(config.model) / whole:.0%}", f"{trained_share(config):.1%}"))
    return html_table(("", "forward", "backward", "optimizer", "update, over full",
                       "FLOPs, over full", "trained weights"), lines,
                      caption="; ".join(filter(None, (times.where, disturbance(times.others)))))


def seven_billion() -> Config:
    """Return the config of Llama 2 7B (Touvron et al. 2023, https://arxiv.org/abs/2307.09288), with
    one sequence per update."""
    return preset("llama-8b").replace({
        "model.kv_heads": 32, "model.mlp_width": 11_008, "model.vocab": 32_000,
        "model.context": 4096, "global_batch": 1, "grad_accum_steps": 1,
        "precision.recipe": "bf16"})


def gpt3() -> Config:
    """Return the config of GPT-3 175B (Brown et al. 2020, https://arxiv.org/abs/2005.14165, table
    2.1), with one sequence per update."""
    return preset("gpt2-1.5b").replace({
        "model.layers": 96, "model.width": 12_288, "model.heads": 96, "model.context": 2048,
        "global_batch": 1, "grad_accum_steps": 1, "precision.recipe": "bf16"})


WAYS = {"float32 weights, autocast": {}, "weights in bf16": {"memory.param_dtype": "bf16"},
        "and blocks recomputed": {"memory.param_dtype": "bf16", "memory.recompute": "block"}}


def rented(config: Config, rank: int, machine: str) -> dict[str, tuple[Memory, Memory]]:
    """Return the predicted memory of full fine-tuning and of LoRA on `machine`, by WAYS."""
    by_way = {}
    for way, settings in WAYS.items():
        with_settings = config.replace(settings)
        by_way[way] = memory(with_settings, machine), memory(adapted(with_settings, rank), machine)
    return by_way


def rented_table(models: Mapping[str, Mapping[str, tuple[Memory, Memory]]]) -> str:
    """Return an HTML table of predicted peaks. The last row has the published numbers of Hu et
    al."""
    lines = []
    for name, by_way in models.items():
        for way, (full, lora) in by_way.items():
            lines.append((name, way, quantity(full.peak_bytes, "bytes"),
                          quantity(lora.peak_bytes, "bytes"),
                          f"{full.peak_bytes / lora.peak_bytes:.2f} times",
                          "yes" if lora.missing_bytes <= 0 else "no"))
    lines.append(("GPT-3 175B, published", "as Hu et al. trained it", *(
        quantity(size, "bytes") for size in PUBLISHED.values()),
        f"{PUBLISHED['full'] / PUBLISHED['LoRA']:.2f} times", "no"))
    return html_table(("model", "settings", "peak, full", "peak, LoRA", "full over LoRA",
                       "LoRA fits"), lines)


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


def rates_figure(study: Study) -> dict:
    """Return the plotly spec of the loss on the new text over the learning rate, a line per
    rank."""
    lines = []
    for i, rank in enumerate(study.ranks):
        own = sorted((run.lr, run.learned) for run in study.went if run.rank == rank)
        shade = COLOURS[1] if not rank else COLOURS[0]
        faint = 1.0 if not rank else 0.25 + 0.75 * i / (len(study.ranks) - 1)
        lines.append(scatter([lr for lr, _ in own], [loss for _, loss in own],
                             study.best(rank).name, shade, mode="lines+markers", opacity=faint,
                             marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 9},
                             hover="learning rate %{x}: %{y:.3f} nats"))
    return figure(lines, "Loss on the manual by learning rate", height=420,
                  xaxis=axis("learning rate", type="log", tickvals=[GENTLE, *RATES],
                             ticktext=[f"{lr:g}" for lr in (GENTLE, *RATES)]),
                  yaxis=axis("loss on the manual, nats per byte"))


def forgetting_figure(study: Study) -> dict:
    """Return the plotly spec of the loss on the first text over the loss on the new text: one point
    per run."""
    dots = [scatter([study.manual], [study.code], "base model", COLOURS[2], mode="markers",
                    marker={"symbol": "x", "size": 11})]
    for name, colour, own in (
            ("all weights", COLOURS[1], [run for run in study.went if not run.rank]),
            ("LoRA", COLOURS[0], [run for run in study.went if run.rank])):
        dots.append(scatter([run.learned for run in own], [run.remembered for run in own], name,
                            colour, mode="markers", marker={"size": 9},
                            customdata=[f"{run.name}, {run.lr:g}" for run in own],
                            hover="%{customdata}: manual %{x:.3f}, code %{y:.3f}"))
    return figure(dots, "Learning the manual, and forgetting the code", height=420,
                  xaxis=axis("loss on the manual, nats per byte"),
                  yaxis=axis("loss on the code, nats per byte"))


def ladder_table(study: Study) -> str:
    """Return an HTML table of the result of each rank at its best learning rate."""
    lines = []
    for rank in [*study.ranks[1:], 0]:
        best = study.best(rank)
        lines.append((best.name, f"{best.trained:,}", f"{best.lr:g}", f"{best.learned:.3f}",
                      f"{best.learned - study.manual:+.3f}", f"{best.remembered:.3f}",
                      f"{study.forgot(best):+.3f}"))
    return html_table(("", "trained parameters", "best learning rate", "loss on the manual",
                       "change", "loss on the code", "change"), lines)


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


def _pair(r: Random) -> tuple[Tensor, Tensor, Tensor, float]:
    """Draw W, A, B and alpha."""
    out, into, rank = r.randint(1, 6), r.randint(1, 6), r.randint(1, 4)
    return (normal(r, out, into), normal(r, rank, into), normal(r, out, rank), r.uniform(0.5, 32))


@exercise("24.merged",
          (torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), 3.0),
          (torch.ones(2, 3), torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]]),
           torch.tensor([[1.0, 0.0], [0.0, -1.0]]), 16.0), minutes=4, draw=_pair,
          mistakes={"multiply the product by alpha over the rank":
                        lambda w, A, B, alpha: w + alpha * B @ A,
                    "the rank is the number of rows of A": lambda w, A, B, alpha: (
                        w + alpha / A.shape[1] * B @ A),
                    "add the product to W": lambda w, A, B, alpha: alpha / len(A) * B @ A})
def merged(w: Tensor, A: Tensor, B: Tensor, alpha: float) -> Tensor:
    return w + alpha / A.shape[0] * (B @ A)


@exercise("24.trained", ([torch.zeros(4, 4)], 1), ([torch.zeros(6, 2), torch.zeros(2, 6)], 2),
          minutes=4, drawn=60,
          draw=lambda r: ([torch.zeros(r.randint(1, 9), r.randint(1, 9))
                           for _ in range(r.randint(1, 5))], r.randint(1, 8)),
          mistakes={"only A and B are trained, not the matrix itself": lambda weights, rank: sum(
                        w.numel() for w in weights),
                    "A has rank times inputs numbers, B has rank times outputs":
                        lambda weights, rank: 2 * rank * sum(w.shape[1] for w in weights)})
def trained(weights: list[Tensor], rank: int) -> int:
    return sum(rank * (w.shape[0] + w.shape[1]) for w in weights)


@exercise("24.rslora", (16.0, 1), (16.0, 4), (8.0, 64), minutes=4,
          draw=lambda r: (r.uniform(0.5, 64), r.randint(1, 256)),
          mistakes={"rsLoRA divides by the root of the rank": lambda alpha, rank: (
                        alpha / rank, alpha),
                    "LoRA divides by the rank, so its alpha is larger": lambda alpha, rank: (
                        alpha / rank**0.5, alpha / rank**0.5)})
def rslora(alpha: float, rank: int) -> tuple[float, float]:
    return alpha / rank**0.5, alpha * rank**0.5


def _with_values(r: Random) -> tuple[Tensor, int]:
    """Draw a matrix with distinct singular values, so that its largest directions are unique."""
    n = r.randint(1, 5)
    into = n + r.randint(0, 3)
    left, right = (torch.linalg.qr(normal(r, side, side).contiguous())[0] for side in (n, into))
    values = torch.tensor([float(2 * n - 2 * i + r.random()) for i in range(n)])
    w = left @ (values[:, None] * right[:n])
    return (w.mT if r.random() < 0.5 else w), r.randint(1, n)


@exercise("24.pissa", (torch.tensor([[2.0]]), 1), (torch.tensor([[3.0, 0.0], [0.0, 1.0]]), 1),
          minutes=6, stars=2, drawn=60, draw=_with_values,
          mistakes={"take the largest singular directions, which come first": lambda w, rank: (
                        (rest := _part(w, min(w.shape) - rank)), w - rest),
                    "return the frozen rest first and the product second":
                        lambda w, rank: (_part(w, rank), w - _part(w, rank))})
def pissa(w: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    U, S, Vh = torch.linalg.svd(w, full_matrices=False)
    B, A = U[:, :rank] * S[:rank].sqrt(), S[:rank].sqrt()[:, None] * Vh[:rank]
    return w - B @ A, B @ A


def _part(w: Tensor, rank: int) -> Tensor:
    U, S, Vh = torch.linalg.svd(w, full_matrices=False)
    return U[:, :rank] * S[:rank] @ Vh[:rank]


def _by_head(r: Random) -> tuple[Tensor, int]:
    heads = r.randint(1, 4)
    return normal(r, 3 * heads * r.randint(1, 3), r.randint(1, 5)), heads


@exercise("24.c_attn", (torch.arange(6.0).reshape(6, 1), 2),
          (torch.arange(24.0).reshape(12, 2), 2), minutes=7, stars=2, drawn=60, draw=_by_head,
          mistakes={"order the rows: queries of all heads, then keys, then values":
                        lambda qkv, heads: qkv.mT,
                    "c_attn is transposed: (in, out)": lambda qkv, heads: (
                        qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2))})
def c_attn(qkv: Tensor, heads: int) -> Tensor:
    return qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).mT
