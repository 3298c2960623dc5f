"""Lesson 01, memory math: its study, its figures and its exercises."""

import dataclasses
from itertools import accumulate
from random import Random

import torch
from torch import Tensor

from lessons import saved
from lessons.activations import kept
from lessons.figures.comparison import comparison_figure
from lessons.figures.explorer import Explorer
from lessons.figures.opened import opened_memory
from lessons.figures.step_bytes import limit_of, stacked_figure, timeline_figure
from lessons.judging.judge import Exercise, adding_to
from lessons.terms import kept_terms, terms_table
from lpkit import hardware
from lpkit.config import Config, ModelConfig
from lpkit.predict.ledger import MOMENTS, Memory, memory
from lpkit.predict.params import parameters
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.units import quantity
from lpkit.presets import PRESETS, preset
from lpkit.tables import html_table
from lpkit.techniques.machines import CATALOGUE, Machine
from lpkit.techniques.memory import RECOMPUTE
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.training.training import RandomTokens, Training

# notebook 01 imports these from here
__all__ = ["RandomTokens", "Training", "comparison_figure", "hardware", "kept", "opened_memory",
           "parameters", "saved", "timeline_figure"]

# ---- Figures

def memory_figure(held: Memory, *, title: str = "") -> dict:
    """Return the plotly spec of the predicted bytes of a device: a bar for each moment of a step,
    divided into the rows of the ledger. The longest bar is the peak."""
    return stacked_figure(
        list(MOMENTS), {row.name: [row.at.get(moment) for moment in MOMENTS] for row in held.rows},
        about={row.name: row.formula for row in held.rows}, limit=limit_of(held), title=title)


def memory_view(model: Config, machine: Machine, sequences: int, devices: int, precision: str,
                optimizer: str, zero_stage: int, recompute: str) -> tuple[dict, str]:
    """Return (spec, html) for an Explorer: the figure of the memory of a device, and a table of the
    rows at the peak. Each device computes `sequences` sequences at a time, without gradient
    accumulation."""
    config = dataclasses.replace(model, global_batch=sequences * devices, grad_accum_steps=1)
    held = memory(config, machine, devices, precision=precision, optimizer=optimizer,
                  zero=zero_stage, recompute=recompute)
    peak, moment = quantity(held.peak_bytes, "bytes"), held.peak_moment
    title = (f"A peak of {peak} {'fits' if held.fits else 'does not fit'} into the "
             f"{quantity(machine.memory_bytes, 'bytes')} of one {machine.title}")
    rows = [(name, quantity(size, "bytes"), f"{size / held.peak_bytes:.0%}")
            for name, size in sorted(held.at(moment).items(), key=lambda row: -row[1])]
    heads = ("row at the peak", "bytes per device", "share of the peak")
    return memory_figure(held, title=title), html_table(
        heads, [*rows, ("sum", peak, "100%")], caption=f"{moment}: {MOMENTS[moment]}")


def memory_explorer(*, model: str, machine: str, devices: int, precision: str) -> Explorer:
    """Return an Explorer of `memory_view` with menus for the presets, the machines of the catalogue
    and the settings. The arguments are the initial values of four controls."""
    return Explorer(
        memory_view, model={name: preset(name) for name in PRESETS}, machine=dict(CATALOGUE),
        sequences=[1, 2, 4, 8, 16, 32, 64], devices=[1, 2, 4, 8, 16, 64, 256, 1024, 4096],
        precision=list(PRECISIONS), optimizer=list(OPTIMIZERS), zero_stage=[0, 1, 2, 3],
        recompute=list(RECOMPUTE),
        labels={"zero_stage": "ZeRO stage", "optimizer": "optimizer state"},
        start={"model": preset(model), "machine": CATALOGUE[machine], "devices": devices,
               "precision": precision, "optimizer": "adamw"})     # the notebook's example


KEPT = {    # by heading of a column: a row of PRECISIONS, and a kind of machine
    "fp32": ("fp32", "cpu"), "bf16": ("bf16", "cpu"), "fp8, on a GPU": ("fp8-tensorwise", "gpu")}


def kept_table(model: ModelConfig, style: str) -> str:
    """Return two HTML tables of the bytes that autograd keeps with fused attention, as terms in
    letters: in one block, and outside the blocks. Each operation has a row, each precision a
    column. `style` names the model in the captions."""
    columns = {}
    for name, (precision, kind) in KEPT.items():
        p = PRECISIONS[precision]
        columns[name] = kept_terms(     # for any batch: the terms have the letter B, not 8
            model, 8, attention="sdpa", kind=kind, compute_bytes=p.compute_bytes,
            residual_bytes=p.residual_bytes, operand_bytes=p.low and p.low.bits / 8)
    both = [{name: terms[i] for name, terms in columns.items()} for i in (0, 1)]
    return (terms_table(both[0], rows="operation", caption=f"{style}: bytes that one block keeps")
            + terms_table(both[1], rows="operation", caption=f"{style}: outside the blocks"))


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: bytes.

@exercise("01.state_bytes", (1_000, 1, 0), (1_000, 4, 3), (7_500_000_000, 64, 1),
          (7_500_000_000, 64, 2),
          draw=lambda r: (r.randint(1, 10**11), r.choice((1, 2, 4, 8, 64, 1024)), r.randrange(4)),
          mistakes={"stage 1 shards only the optimizer state, stage 2 also gradients, stage 3 also "
                    "weights":
                        lambda N, devices, stage: 16 * N / (devices if stage else 1)})
def state_bytes(parameters: int, devices: int, stage: int) -> float:
    # ZeRO 1 shards the optimizer's 12 bytes, ZeRO 2 also the gradients', ZeRO 3 also the weights'
    shared = [devices if stage >= needed else 1 for needed in (1, 2, 3)]
    return parameters * (12 / shared[0] + 2 / shared[1] + 2 / shared[2])


@exercise("01.loss_bytes", (1, 1, 256), (16, 1024, 50_304),
          draw=lambda r: (r.randint(1, 64), r.randint(1, 8192), r.randint(2, 200_000)),
          mistakes={"count three float32 tensors of that size": lambda B, T, V: 4 * B * T * V})
def loss_bytes(sequences: int, context: int, vocab: int) -> int:
    return 3 * 4 * sequences * context * vocab


@exercise("01.score_bytes", (1, 1, 8, 4), (2, 12, 1024, 2),
          draw=lambda r: (r.randint(1, 64), r.randint(1, 64), r.randint(8, 8192), r.choice((2, 4))),
          mistakes={"each head has its own scores":
                        lambda B, H, T, itemsize: B * T * (T * itemsize - 4),
                    "a flash kernel keeps a number per token and head":
                        lambda B, H, T, itemsize: B * H * T * T * itemsize})
def score_bytes(sequences: int, heads: int, context: int, itemsize: int) -> int:
    return sequences * heads * context * (context * itemsize - 4)


# Exercises: the bytes in memory, and when.

def _views(r: Random) -> tuple[list[Tensor]]:
    bases = [torch.zeros(r.randint(1, 9), 8, dtype=r.choice((torch.float32, torch.bfloat16)))
             for _ in range(2)]
    return ([r.choice((base, base.t(), base[:1], base.flatten()[2:4]))
             for base in r.choices(bases, k=4)],)


@exercise("01.saved_bytes", ([torch.zeros(2, 3)],), ([torch.zeros(2, 8)[:1]],),
          ([(x := torch.zeros(4)), x, x[1:]],), draw=_views, tolerance=0, minutes=6, stars=2,
          mistakes={"tensors that share a storage count once":
                        lambda tensors: sum(t.numel() * t.element_size() for t in tensors),
                    "a slice keeps the whole storage alive":
                        lambda tensors: sum({t.untyped_storage().data_ptr():
                                             t.numel() * t.element_size()
                                             for t in tensors}.values())})
def saved_bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _lives(r: Random) -> tuple[list[tuple[int, int, int]]]:
    begins = [r.randrange(10) for _ in range(r.randint(1, 8))]
    return ([(begin, begin + r.randint(1, 6), r.randint(1, 99)) for begin in begins],)


def _freed_late(lives: list[tuple[int, int, int]]) -> int:
    return max(sum(n for begin, end, n in lives if begin <= now <= end) for now, _, _ in lives)


@exercise("01.peak_bytes", ([(0, 1, 8)],), ([(0, 2, 8), (2, 3, 4), (1, 2, 1)],), draw=_lives,
          minutes=6, stars=2,
          mistakes={"not all tensors are alive at once": lambda lives: sum(n for _, _, n in lives),
                    "at each moment, free the tensors that end before you count those that begin":
                        _freed_late})
def peak_bytes(lives: list[tuple[int, int, int]]) -> int:
    changes = sorted([(begin, n) for begin, _, n in lives] + [(end, -n) for _, end, n in lives])
    return max(accumulate(n for _, n in changes))
