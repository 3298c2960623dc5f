"""Lesson 15, multi GPU FP8: its study, its figures and its exercises."""

import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.draws import normal
from lessons.figures import live as live
from lessons.figures.step_bytes import SENT_COLOURS, stacked_figure
from lessons.judging.judge import Exercise, adding_to
from lessons.l14_data_parallel_and_zero import rows_of_rank
from lessons.published import runs, seconds
from lessons.race import race_figure
from lessons.ranks.messages import each_sends, messages, sent_bytes
from lessons.ranks.on_ranks import WORLD, OnRanks
from lessons.ranks.rank_exercises import by_hand
from lessons.rows import cast_gather_torch as cast_gather
from lpkit import hardware
from lpkit.config import Config
from lpkit.parallel.processes import WarmParent
from lpkit.precision.scaled import quantise
from lpkit.predict.compare import Row
from lpkit.predict.ledger import memory
from lpkit.predict.messages import ALL_GATHER, Message
from lpkit.predict.plan import plan
from lpkit.predict.time import step_time
from lpkit.predict.units import duration, quantity
from lpkit.tables import html_table
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES
from lpkit.training.runs import RunFailedError

# the notebook imports these names of other modules from here
__all__ = ["RECIPES", "Layout", "RunFailedError", "WarmParent", "by_hand", "cast_gather", "dist",
           "hardware", "plan", "quantise", "race_figure", "replace"]

# ---- The study

def kill(run: Any, rank: int) -> None:
    """Kill the process of a rank of a launched run (SIGKILL), as the system does if memory runs
    out."""
    os.kill(run.ranks[rank]["pid"], signal.SIGKILL)


def gather_bytes(nbytes: int, ranks: int) -> float:
    """Return the bytes that a rank sends in an all-gather whose result has `nbytes` bytes."""
    return each_sends(Message(ALL_GATHER, nbytes, ranks))


def torchao_row() -> Row:
    """Return the comparison of the speed-up of Llama 3 8B in FP8 over bf16: by formula, and as
    torchao published it."""
    bf16, fp8 = runs("torchao")[:2]
    return Row(name="Llama 3 8B, tokens/s, FP8 over bf16", unit="times",
               where=f"{bf16.source.title}, {bf16.machine}",
               formula=seconds(bf16) / seconds(fp8), measured=fp8.published / bf16.published)



# ---- Figures

def gathers_view(ways: Callable[[Config, int], Mapping[str, Config]]) -> Callable[..., Any]:
    """Return a function of model, machine and ranks for an Explorer: it compares ways to gather
    weights by the bytes that a rank sends per update, the time of these messages, the time of a
    step and the peak memory of a rank. Each rank computes one sequence and recomputes each block.

    ways: returns the configs to compare, by name, for a config and a number of ranks
    """
    def show(model: Config, machine: Machine, ranks: int) -> tuple[dict, str]:
        config = model.replace({"global_batch": ranks, "grad_accum_steps": ranks,
                                "memory.recompute": "block"})
        sent, rows = {}, []
        for name, gathered in ways(config, ranks).items():
            sent[name] = sent_bytes(messages(gathered, machine))
            step, held = step_time(gathered, machine), memory(gathered, machine)
            shards = [row for row in step.rows if row.name.startswith("shard")]
            seen, hidden = (sum(getattr(row, key) for row in shards)
                            for key in ("seconds", "hidden_seconds"))
            rows.append((name, quantity(sum(sent[name].values()), "bytes"), duration(seen + hidden),
                         duration(hidden), duration(step.step_seconds),
                         quantity(held.peak_bytes, "bytes")))
        spec = stacked_figure(
            list(sent), {kind: [each.get(kind) for each in sent.values()] for kind in SENT_COLOURS
                         if kind != "all-reduce"},
            axis_title="bytes that a rank sends in an update",
            title=f"{ranks:,} x {machine.title}, a sequence each: what a rank sends")
        heads = ("weights gathered in", "sent per update", "time of messages", "of which hidden",
                 "step", "peak memory")
        return spec, html_table(heads, rows)

    return show


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)
rank_exercise = adding_to(EXERCISES, OnRanks)

# Exercises: the bytes that a cast saves, how often to save a checkpoint, and who reads which data.

def _shapes(r: Random) -> tuple[list[tuple[int, int]], list[bool], int]:
    shapes = [(r.randint(1, 99), r.randint(1, 99)) for _ in range(r.randint(1, 5))]
    return shapes, [r.random() < 0.5 for _ in shapes], r.choice((2, 3, 8))


def _unpadded(shapes: list[tuple[int, int]], cast: list[bool], ranks: int) -> float:
    whole = sum(rows * columns * (1 if eight_bits else 4)
                for (rows, columns), eight_bits in zip(shapes, cast))
    return (ranks - 1) / ranks * whole


def _others_in_bf16(shapes: list[tuple[int, int]], cast: list[bool], ranks: int) -> float:
    eight = gathered_bytes(shapes, [True] * len(shapes), ranks)
    return 2 * eight - gathered_bytes([shape for shape, is_cast in zip(shapes, cast) if is_cast],
                                      [True] * sum(cast), ranks)


@exercise("15.gathered_bytes", ([(4, 8)], [True], 2), ([(4, 8), (8, 1)], [True, False], 2),
          draw=_shapes, minutes=8, stars=2,
          mistakes={"a rank does not send its own part to itself":
                        lambda shapes, cast, ranks: gathered_bytes(shapes, cast, ranks)
                        * ranks / (ranks - 1),
                    "parameters that are not cast travel in float32": _others_in_bf16,
                    "all parts of a message have the same size: round rows up": _unpadded})
def gathered_bytes(shapes: list[tuple[int, int]], cast: list[bool], ranks: int) -> float:
    whole = 0
    for (rows, columns), eight_bits in zip(shapes, cast):
        whole += math.ceil(rows / ranks) * ranks * columns * (1 if eight_bits else 4)
    return (ranks - 1) / ranks * whole


@exercise("15.interval", (50.0, 100.0, 1), (60.0, 1e6, 100), (60.0, 1.825e8, 16_384),
          draw=lambda r: (10 ** r.uniform(0, 3), 10 ** r.uniform(5, 9), r.randint(1, 20_000)),
          minutes=6, stars=2,
          mistakes={"any device may fail: `devices` of them fail `devices` times as often":
                        lambda save, apart, devices: math.sqrt(2 * save * apart),
                    "a failure costs half an interval on average":
                        lambda save, apart, devices: math.sqrt(save * apart / devices),
                    "that is the time between failures, not the best interval":
                        lambda save, apart, devices: apart / devices})
def interval(save_seconds: float, apart_seconds: float, devices: int) -> float:
    # per second, save / t is spent on saving and t / 2 / (apart / devices) is lost: minimal in t
    return math.sqrt(2 * save_seconds * apart_seconds / devices)


def _of_every_file(rows: int, wrote: int, reads: int, rank: int) -> list[tuple[int, int, int]]:
    start, stop = rows_of_rank(rows, reads, rank)
    parts = (rows_of_rank(rows, wrote, writer) for writer in range(wrote))
    return [(writer, max(start, first), min(stop, last))
            for writer, (first, last) in enumerate(parts)]


def _from_its_first(rows: int, wrote: int, reads: int, rank: int) -> list[tuple[int, int, int]]:
    return [(writer, first - rows_of_rank(rows, wrote, writer)[0],
             last - rows_of_rank(rows, wrote, writer)[0])
            for writer, first, last in pieces(rows, wrote, reads, rank)]


@exercise("15.pieces", (4, 2, 1, 0), (4, 1, 2, 1), (5, 2, 3, 1),
          draw=lambda r: (r.randint(1, 40), r.randint(1, 6), (reads := r.randint(1, 6)),
                          r.randrange(reads)), minutes=10, stars=2,
          mistakes={"leave out files that have no rows for this rank": _of_every_file,
                    "rows count from the parameter's first, not from the file's": _from_its_first,
                    "return only the rows of this rank, not the whole file":
                        lambda rows, wrote, reads, rank:
                        [(writer, *rows_of_rank(rows, wrote, writer))
                         for writer, *_ in pieces(rows, wrote, reads, rank)]})
def pieces(rows: int, wrote: int, reads: int, rank: int) -> list[tuple[int, int, int]]:
    def part(ranks: int, rank: int) -> tuple[int, int]:
        each = math.ceil(rows / ranks)
        return min(rank * each, rows), min((rank + 1) * each, rows)

    start, stop = part(reads, rank)
    parts = []
    for writer in range(wrote):
        first, last = part(wrote, writer)
        if max(start, first) < min(stop, last):
            parts.append((writer, max(start, first), min(stop, last)))
    return parts


# Exercises: an all-gather in 8 bits, on real ranks.

def _own_scale(rows, rank, ranks, all_reduce_max, all_gather_bytes):
    scale = rows.abs().amax() / 448
    cast = (rows / scale).to(torch.float8_e4m3fn)
    return all_gather_bytes(cast.view(torch.uint8)).view(torch.float8_e4m3fn).float() * scale


def _never_scaled_back(rows, rank, ranks, all_reduce_max, all_gather_bytes):
    scale = all_reduce_max(rows.abs().amax()) / 448
    cast = (rows / scale).to(torch.float8_e4m3fn)
    return all_gather_bytes(cast.view(torch.uint8)).view(torch.float8_e4m3fn).float()


def _up_to_one(rows, rank, ranks, all_reduce_max, all_gather_bytes):
    scale = all_reduce_max(rows.abs().amax())
    cast = (rows / scale).to(torch.float8_e4m3fn)
    return all_gather_bytes(cast.view(torch.uint8)).view(torch.float8_e4m3fn).float() * scale


def _signed(rows, rank, ranks, all_reduce_max, all_gather_bytes):
    scale = all_reduce_max(rows.amax()) / 448
    cast = (rows / scale).to(torch.float8_e4m3fn)
    return all_gather_bytes(cast.view(torch.uint8)).view(torch.float8_e4m3fn).float() * scale


@rank_exercise("15.eight_bits",
          (torch.tensor([[1.0, 0.3], [-7.0, 0.5]]),),
          draw=lambda r: (normal(r, WORLD, r.randint(1, 9)) * normal(r, WORLD, 1).exp(),),
          stars=3, minutes=12,
          mistakes={"all ranks need one scale: another rank may have the largest magnitude":
                        _own_scale,
                    "the values that arrive are divided by the scale: multiply them by it":
                        _never_scaled_back,
                    "E4M3 reaches 448: map the largest magnitude to 448": _up_to_one,
                    "a magnitude has no sign": _signed})
def eight_bit_gather(rows: Tensor, rank: int, ranks: int,
                     all_reduce_max: Callable[[Tensor], Tensor],
                     all_gather_bytes: Callable[[Tensor], Tensor]) -> Tensor:
    scale = all_reduce_max(rows.abs().amax()) / 448
    cast = (rows / scale).to(torch.float8_e4m3fn)
    return all_gather_bytes(cast.view(torch.uint8)).view(torch.float8_e4m3fn).float() * scale
