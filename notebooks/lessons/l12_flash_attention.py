"""Lesson 12, flash attention: its study, its figures and its exercises.

Compares the measured bytes that attention holds and moves with closed forms, and steps through its
online softmax, tile by tile.

Held bytes are the storages that are alive (`measure.tracking`): q, k and v, which one matmul
returns, the tensors that a backend keeps for backward, and the working memory of backward. Moved
bytes are read from slow memory or written to slow memory, where q, k, v and the results are stored.
Intermediate results that are computed and dropped one tile at a time stay in fast memory.

The lesson also times the generation of one token at a given place of a sequence, with the cache of
the tokens before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lessons import activations
from lessons.decoding import Step as Decoded
from lessons.decoding import decoding
from lessons.draws import normal
from lessons.figures.colours import ANSWER_COLOURS, SYMBOLS, WARNING, lines_of
from lessons.figures.drawing import BYTES, axis, box, columns, figure, heat, note, rule, scatter
from lessons.figures.style import COLOURS
from lessons.judging.judge import Exercise, adding_to
from lessons.rows import linear_attention as linear_attention
from lessons.saved import kept
from lessons.terms import Lettered, letter
from lpkit import hardware
from lpkit.config import Config, ModelConfig
from lpkit.contracts import Attend
from lpkit.hardware import synchronised
from lpkit.kernels import tiled_attention
from lpkit.kernels.tiled_attention import attend, tiles
from lpkit.measure.attention import tried
from lpkit.measure.probes import Check, Probe, probe
from lpkit.measure.tracking import Tracker
from lpkit.nn.attention import backend
from lpkit.nn.kv_cache import Cache, new_cache
from lpkit.predict.compare import disturbance
from lpkit.predict.units import quantity
from lpkit.tables import FAINT, INK, html_table
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.machines import Machine
from lpkit.techniques.operation import FP32, MicroBatch
from lpkit.timing import interleaved_seconds
from lpkit.training.training import RandomTokens, Training

# the notebook imports these names of other modules from here
__all__ = ["ATTENTION", "Config", "RandomTokens", "Training", "backend", "decoding", "disturbance",
           "hardware", "interleaved_seconds", "median", "quantity", "synchronised",
           "tiled_attention"]

# ---- The study

# operations that write their first argument in place without reading its old values
OVERWRITES = ("copy_", "fill_", "zero_")
# operations that move no bytes, although their schemas do not declare the result a view
MOVES_NOTHING = ("new_empty", "_unsafe_view")


# Held bytes.

@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of attention alone, without the rest of the model."""

    kept_bytes: float       # kept for backward
    peak_bytes: float       # most bytes alive in forward and backward


class Alone(nn.Module):
    """Attention without the matmuls around it: q, k, v (B, H, T, E) to (B, T, H E), the layout that
    the output projection reads."""

    def __init__(self, call: Attend):
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(q, k, v, None, None).transpose(1, 2).flatten(2)


def cell(kind: str, name: str, dtype: str, device: torch.device, model: ModelConfig) -> Probe:
    """Run the backend `name` once on this device and return whether it works. `kind` names the
    model's kind of attention in the result."""
    check = Check(f"{name}, {kind} in {dtype}", "attention", partial(tried, name, model, dtype))
    return probe(check, device)


def model_of(T: int, *, heads: int, head_width: int) -> ModelConfig:
    """Return the config of a model of one layer whose attention has these sizes."""
    return ModelConfig(layers=1, width=heads * head_width, heads=heads, context=T, vocab=2)


def formula(name: str, model: ModelConfig, *, batch: int = 1, kind: str = "cpu") -> Held:
    """Return the held bytes of a backend in float32, by the formula of its row in ATTENTION."""
    op = ATTENTION[name].formula(MicroBatch(model=model, batch=batch, attention=name, kind=kind))
    # when backward begins: what forward saved, and the gradient of the result
    now = op.saved_bytes + FP32 * batch * model.T * model.H * model.E
    peak = now
    for moment in op.backward:
        peak = max(peak, now + moment.nbytes)
        now += moment.grows - moment.frees * op.saved_bytes
    return Held(kept_bytes=op.saved_bytes, peak_bytes=max(peak, now))


# backends whose inner operations a dispatch mode does not see, so that their bytes are unknown
UNSEEN = ("flex",)


def kept_in_letters(name: str, model: ModelConfig, *, kind: str = "cpu") -> str:
    """Return the bytes that a backend keeps for the backward pass of one sequence, as text in
    letters (docs/notation.md)."""
    kept_bytes = activations.kept(Lettered(model), batch=letter("B", 1), attention=name, kind=kind)
    return str(kept_bytes.operations["attention"])


def measured(name: str, model: ModelConfig, *, batch: int = 1, device: str = "cpu") -> Held:
    """Return the held bytes of a forward and a backward pass of the backend, measured on random
    numbers in float32."""
    alone, m = Alone(ATTENTION[name].load()), model
    with Tracker(alone, device=device) as tracker:
        product = torch.randn(batch, m.T, 3, m.H, m.E, device=device)
        q, k, v = (t.requires_grad_() for t in product.transpose(1, 3).unbind(2))
        out = alone(q, k, v)
        held = sum(kept(tracker).values())
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return Held(kept_bytes=held, peak_bytes=tracker.footprint().peak_bytes)


def fit(xs: Sequence[float], ys: Sequence[float], degree: int) -> float:
    """Return R^2 of the polynomial of this degree that fits the points best: 1 is a perfect fit."""
    ys = np.asarray(ys, dtype=float)
    rest = ys - np.polyval(np.polyfit(xs, ys, degree), xs)
    return 1 - float((rest**2).sum() / ((ys - ys.mean())**2).sum())


# Moved bytes.

class SlowMemory(TorchDispatchMode):
    """Counts the bytes that PyTorch operations read and write:

    with SlowMemory() as slow:
        out = attend(q, k, v)
    slow.moved((q, k, v, out))      # bytes moved from and to the storages of these tensors
    slow.moved()                    # bytes moved from and to all storages

    A view moves no bytes."""

    def __init__(self):
        super().__init__()
        self.bytes: Counter[int] = Counter()    # by address of the storage

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        name, schema = func.overloadpacket.__name__, func._schema
        aliases = (returned.alias_info for returned in schema.returns)
        # a view's result is an alias of an argument, without being written
        views = any(alias and not alias.is_write for alias in aliases)
        result = func(*args, **(kwargs or {}))
        if views or name in MOVES_NOTHING:
            return result
        for given, argument in zip(args, schema.arguments):
            if isinstance(given, Tensor):
                writes = argument.alias_info is not None and argument.alias_info.is_write
                reads = not (writes and name in OVERWRITES)
                self.bytes[_storage(given)] += given.nbytes * (reads + writes)
        if isinstance(result, Tensor) and not schema.returns[0].alias_info:
            self.bytes[_storage(result)] += result.nbytes
        return result

    def moved(self, tensors: Sequence[Tensor] | None = None) -> int:
        """Return the bytes moved from and to the storages of `tensors`; None: all storages."""
        if tensors is None:
            return self.bytes.total()
        return sum(self.bytes[storage] for storage in {_storage(t) for t in tensors})


def _storage(t: Tensor) -> int:
    """Return the address of the storage of t; views of one storage have the same address."""
    return t.untyped_storage().data_ptr()


def counted(T: int, E: int, tile: int, *, heads: int = 1) -> int:
    """Return the bytes that the forward pass of the kit's tiled attention moves from and to slow
    memory (q, k, v and the results) in float32, counted operation by operation."""
    q, k, v = torch.randn(3, 1, heads, T, E)
    with SlowMemory() as slow:
        out, lse = attend(q, k, v, None, None, Rule(), tile)
    return slow.moved((q, k, v, out, lse))


def counted_one_by_one(T: int, E: int, *, heads: int = 1) -> int:
    """Return all bytes that plain attention reads and writes in float32 if each operation is a
    separate kernel, counted operation by operation."""
    q, k, v = torch.randn(3, 1, heads, T, E)
    with SlowMemory() as slow:
        ATTENTION["plain"].load()(q, k, v)
    return slow.moved()


def moved(T: int, E: int, tile: int, *, heads: int = 1) -> int:
    """Return the bytes of `counted` by formula: q is read once, the result and one number per query
    (the log of its sum) are written once, and each tile of queries reads the keys and values up to
    its own end."""
    keys_read = sum(min(first + tile, T) for first in range(0, T, tile))
    return FP32 * heads * (2 * T * E + T + 2 * E * keys_read)


def moved_one_by_one(T: int, E: int, *, heads: int = 1) -> int:
    """Return the bytes of `counted_one_by_one` by formula. The scores (T, T) are read or written
    eight times: by the first matmul, the division, the mask, the softmax and the second matmul. The
    mask, one byte per pair, is read or written four times: when it is computed, inverted and
    applied. Grouped keys and values are copied for each head of their group."""
    return FP32 * heads * (8 * T * E + 8 * T * T) + 4 * T * T


def fast_bytes(tile: int, E: int) -> int:
    """Return the bytes of fast memory that a program needs in float32: the tiles of q, of the
    accumulated result, of k and of v (tile, E), and the scores (tile, tile)."""
    return FP32 * (4 * tile * E + tile * tile)


# The online softmax.

@dataclass(frozen=True, kw_only=True)
class Step:
    """A tile of n queries after one more tile of keys."""

    queries: slice
    keys: slice             # the tile of keys of this step
    m: Tensor               # (n,): the largest score so far
    l: Tensor               # (n,): the sum of exp(score - m) over the keys so far
    shrink: Tensor          # (n,): the factor on the previous l and accumulator
    answer: Tensor          # (n, E): attention over the keys so far
    there: Tensor           # (n,): share of the final sum over all keys that is already in l


def online(q: Tensor, k: Tensor, v: Tensor, tile: int) -> list[Step]:
    """Return the steps of causal attention over q, k and v (T, E) in tiles of `tile` queries and
    keys, in the order in which they are computed."""
    steps: list[Step] = []
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(
        torch.ones(len(q), len(q)).triu(1) > 0, -torch.inf)
    total = scores.logsumexp(1)
    for queries, seen in tiles(Rule(), len(q), tile):
        m = torch.full((queries.stop - queries.start,), -torch.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(q[queries])
        for keys in seen:
            now = scores[queries, keys]
            m_new = torch.maximum(m, now.amax(1))
            shrink, p = (m - m_new).exp(), (now - m_new[:, None]).exp()
            # m grew, so the old sum and accumulator shrink by exp(old m - new m)
            l, acc, m = l * shrink + p.sum(1), acc * shrink[:, None] + p @ v[keys], m_new
            steps.append(Step(queries=queries, keys=keys, m=m, l=l, shrink=shrink,
                              answer=acc / l[:, None], there=l * (m - total[queries]).exp()))
    return steps


def at(training: Training, place: int, format: str = "same") -> tuple[Callable[[], Tensor], Cache]:
    """Return a function that computes the logits of one token after `place` others and waits for
    the device, and the cache of those others. Each call computes the same token again.

    format: a row of CACHES; numbers that it does not shorten are float32

    The model is switched to evaluation mode and needs no gradients from now on."""
    m, device = training.config.model, training.device
    training.model.eval().requires_grad_(False)
    cache = new_cache(m, tokens=place + 1, format=format, dtype=torch.float32, device=device)
    with torch.no_grad():
        training.model.hidden(torch.randint(m.V, (1, place), device=device), cache)
    given = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def step() -> Tensor:
        cache.lengths.fill_(place)
        return training.logits(given, cache)

    return synchronised(step, device), cache


# ---- Figures

SO_FAR, IN_THE_END = ANSWER_COLOURS["formula"], ANSWER_COLOURS["measured"]
# marker of a final value: a horizontal line
LEVEL = {"symbol": "line-ew", "size": 16, "line": {"width": 3, "color": IN_THE_END}}
NEVER = "#eceef1"       # colour of tiles that are skipped


def held_figure(held: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]], *,
                title: str = "") -> dict:
    """Return the plotly spec of the peak bytes over the context length, both axes logarithmic.
    `held` has, for each name, the bytes by formula (a line) and as measured (markers), by context.
    A line on top of an equal line is dotted, so that both are visible."""
    data, ticks = [], sorted({T for _, measured in held.values() for T in measured})
    lines, drawn = lines_of(held), []
    for name, (formula, measured) in held.items():
        line = {**lines[name], "dash": "dot"} if formula in drawn else lines[name]
        drawn.append(formula)
        data.append(scatter(formula, formula.values(), "", line=line, hover=None, showlegend=False,
                            legendgroup=name))
        (before, last) = list(measured.values())[-2:]
        data.append(scatter(measured, measured.values(), f"{name}: {last / before:.2f} times",
                            lines[name]["color"], mode="markers", legendgroup=name,
                            marker={"symbol": SYMBOLS[lines[name]["dash"]]},
                            hover="%{x:,} tokens: %{y:.4s}B"))
    return figure(
        data, title, height=440,
        xaxis=axis("tokens (legend: growth of the bytes when the tokens last doubled)", type="log",
                   tickvals=ticks, ticktext=[f"{T:,}" for T in ticks]),
        yaxis=axis("peak bytes", type="log", dtick=1, **BYTES))


def traffic_figure(lines: Mapping[str, tuple[Mapping[float, float], Mapping[float, float]]], *,
                   machines: Mapping[str, float], title: str = "") -> dict:
    """Return the plotly spec of the bytes moved over the bytes of fast memory, both axes
    logarithmic.

    lines: for each name, the bytes by formula (a line) and as counted (markers), by bytes of fast
        memory. A line without counts is dashed.
    machines: bytes of fast memory by name, marked by vertical lines
    """
    data = []
    for (name, (formula, counted)), colour in zip(lines.items(), COLOURS):
        data.append(scatter(formula, formula.values(), name if not counted else "", colour,
                            hover=None, showlegend=not counted, legendgroup=name,
                            line={"dash": "solid" if counted else "dash"}))
        if counted:
            data.append(scatter(counted, counted.values(), name, colour, mode="lines+markers",
                                line={"width": 0}, legendgroup=name,
                                hover="%{y:.4s}B with %{x:.3s}B of fast memory"))
    marks = [rule(x=size, layer="below") for size in machines.values()]
    notes = [note(name, math.log10(size), 0.78, "left middle", yref="paper", xshift=4,
                  font={"size": 12, "color": FAINT}) for name, size in machines.items()]
    return figure(
        data, title, height=440, shapes=marks, annotations=notes,
        xaxis=axis("fast memory of a program", type="log", dtick="D2", **BYTES),
        yaxis=axis("bytes moved", type="log", dtick="D2", **BYTES))


def steps_view(steps: Sequence[Any], scores: Sequence[Sequence[float]], tile: int
               ) -> Callable[[int], dict]:
    """Return a function of `step` (from 1) for an Explorer: it draws the visited tiles of the
    scores, and m, l and the answer of the current tile of queries.

    steps: the result of `online`
    scores: the masked scores (T, T)
    tile: queries and keys of a tile
    """
    T = len(scores)
    ends = min(map(min, scores)), max(map(max, scores))
    # by the first query of a tile of queries: the last step of that tile
    final = {tile_step.queries.start: tile_step for tile_step in steps}
    least = min(tile_step.m.min().item() for tile_step in steps)

    def show(step: int) -> dict:
        now = steps[step - 1]
        end = final[now.queries.start]
        rows, shrink = list(range(now.queries.start, now.queries.stop)), now.shrink.min().item()
        shrinks = f"; a sum shrinks to {shrink:.0%}" if 0 < shrink < 1 else ""
        done = [(tile_step.queries, tile_step.keys) for tile_step in steps[:step]]
        return figure(
            [_map(scores, done, ends), *_queries(rows, now, end), *_answer(now, end)],
            f"Step {step} of {len(steps)}: queries {rows[0]} to {rows[-1]} meet keys "
            f"{now.keys.start} to {now.keys.stop - 1}{shrinks}",
            height=560, margin={"t": 92}, shapes=_grid(T, tile, now), barmode="overlay",
            annotations=_words(T, rows, now), legend={"y": 1.06, "x": 0.58},
            xaxis=axis("keys", range=[-0.5, T - 0.5], domain=[0, 0.44], dtick=tile, tick0=0,
                       showgrid=False, zeroline=False),
            yaxis=axis("queries", range=[T - 0.5, -0.5], dtick=tile, tick0=0, showgrid=False,
                       zeroline=False),
            **{f"xaxis{i}": axis(words, domain=[0.58, 1], anchor=f"y{i}", tickvals=ticks)
               for i, words, ticks in ((2, "", rows), (3, "query", rows), (4, "channel", None))},
            yaxis2=axis("", domain=[0.76, 0.96], anchor="x2", range=[least - 1, ends[1] + 1]),
            yaxis3=axis("", domain=[0.42, 0.62], anchor="x3", range=[0, 1.08], tickformat=".0%"),
            yaxis4=axis("", domain=[0, 0.22], anchor="x4"))

    return show


def _map(scores: Sequence[Sequence[float]], done: Sequence[tuple[slice, slice]],
         ends: tuple[float, float]) -> dict:
    """Return the heat map of the scores (T, T) in the visited tiles `done`; other cells are
    gaps."""
    T = len(scores)
    z: list[list[float | None]] = [[None] * T for _ in range(T)]
    for queries, keys in done:
        for i in range(queries.start, queries.stop):
            for j in range(keys.start, min(keys.stop, i + 1)):
                z[i][j] = scores[i][j]
    return heat(list(range(T)), list(range(T)), z, ends=ends, bar={"x": 0.45, "title": ""},
                hovertemplate="query %{y}, key %{x}: %{z:.2f}<extra>score</extra>")


def _queries(rows: Sequence[int], now: Any, end: Any) -> list[dict]:
    """Return the traces of m and of l for each query of the tile: so far (`now`), and for m also
    after the tile's last step (`end`)."""
    second, third = {"xaxis": "x2", "yaxis": "y2"}, {"xaxis": "x3", "yaxis": "y3"}
    return [
        scatter(rows, end.m.tolist(), "final", IN_THE_END, mode="markers", **second,
                marker=LEVEL, hover="query %{x}: %{y:.2f}"),
        scatter(rows, now.m.tolist(), "so far", SO_FAR, mode="markers", **second,
                marker={"size": 9}, hover="query %{x}: %{y:.2f}"),
        columns(rows, now.there.tolist(), "so far", SO_FAR, showlegend=False, **third,
                hover="query %{x}: %{y:.1%}")]


def _answer(now: Any, end: Any) -> list[dict]:
    """Return the traces of the answer (E numbers) of the tile's last query: so far, and after the
    tile's last step."""
    fourth, numbers = {"xaxis": "x4", "yaxis": "y4"}, list(range(now.answer.shape[1]))
    return [
        columns(numbers, now.answer[-1].tolist(), "so far", SO_FAR, showlegend=False, **fourth,
                hover="%{y:.3f}"),
        scatter(numbers, end.answer[-1].tolist(), "final", IN_THE_END, mode="markers",
                showlegend=False, **fourth, hover="%{y:.3f}",
                marker=LEVEL)]


def _grid(T: int, tile: int, now: Any) -> list[dict]:
    """Return the outlines of all tiles. Tiles of future keys, which are never visited, are filled;
    the current tile has a thick frame."""
    shapes = []
    for top in range(0, T, tile):
        for left in range(0, T, tile):
            sides = left - 0.5, left + tile - 0.5, top - 0.5, top + tile - 0.5
            shapes.append(box(*sides, fill=NEVER if left > top else None, edge="#c9ced6", width=1))
    shapes.append(box(now.keys.start - 0.5, now.keys.stop - 0.5, now.queries.start - 0.5,
                      now.queries.stop - 0.5, edge=WARNING, width=4))
    return shapes


def _words(T: int, rows: Sequence[int], now: Any) -> list[dict]:
    """Return the notes of the panels."""
    small = {"xref": "paper", "yref": "paper", "font": {"size": 13, "color": INK}}
    return [note("m, the largest score so far", 0.58, 0.965, **small),
            note("l, as a share of its final value", 0.58, 0.625, **small),
            note(f"the answer of query {rows[-1]}", 0.58, 0.225, **small),
            note("the future: never visited", 0.97 * T, 0.06 * T, "right middle",
                 font={"size": 12, "color": FAINT})]


# ---- Tables

def peaks_table(rows: Sequence[tuple], before: int, last: int, *, caption: str) -> str:
    """Return an HTML table with a row for each backend: the bytes kept for backward, in letters,
    the peak bytes at `before` and at `last` tokens, and the ratio of the two."""
    return html_table(("backend", "bytes kept for backward", f"peak at {before:,} tokens",
                       f"peak at {last:,} tokens", "ratio"), rows, caption=caption)


def caches_table(steps: Mapping[str, Mapping[int, Decoded]], early: int, late: int,
                 machine: Machine) -> str:
    """Return an HTML table with a row for each cache: its bytes, and the seconds per token, at the
    places `early` and `late` of a sequence, and the ratio of the seconds. `steps` has the predicted
    steps by cache and place; there must be a cache "full"."""
    rows = [(name, *(quantity(by[t].cache_bytes, "bytes") for t in (early, late)),
             *(quantity(by[t].seconds, "s") for t in (early, late)),
             f"{by[late].seconds / by[early].seconds:.2f} times") for name, by in steps.items()]
    return html_table(
        ("cache", f"cache at {early:,} tokens", f"cache at {late:,} tokens",
         f"time per token at {early:,}", f"time per token at {late:,}", "ratio of the times"),
        rows, caption=f"By formula, with the {quantity(machine.bytes_per_second, 'bytes')}/s that "
        f"were measured on this machine and weights of "
        f"{quantity(steps['full'][late].weight_bytes, 'bytes')}")


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: bytes, tiles.

@exercise("12.kept_bytes", (1, 1, 8, 4, 4, True), (1, 1, 8, 4, 4, False),
          (2, 12, 1024, 64, 2, True), (2, 12, 1024, 64, 2, False),
          draw=lambda r: (r.randint(1, 64), r.randint(1, 64), r.randint(8, 8192),
                          r.choice((16, 64, 128)), r.choice((2, 4)), r.random() < 0.5), minutes=5,
          mistakes={"the log of each sum is float32, even if the numbers have 16 bits":
                        lambda B, H, T, E, itemsize, flash: B * H * T * itemsize
                        * (4 * E + 1 if flash else 3 * E + T),
                    "the flash kernel also keeps the answer": lambda B, H, T, E, itemsize, flash:
                        B * H * T * (3 * E * itemsize + (4 if flash else T * itemsize)),
                    "half of the scores are masked, but all are kept":
                        lambda B, H, T, E, itemsize, flash: B * H * T * (
                        4 * E * itemsize + 4 if flash else (3 * E + (T + 1) / 2) * itemsize)})
def attention_kept_bytes(B: int, H: int, T: int, E: int, itemsize: int, flash: bool) -> int:
    if flash:
        return B * H * T * (4 * E * itemsize + 4)
    return B * H * T * (3 * E + T) * itemsize


def _causal(T: int, tile: int) -> int:
    return math.ceil(T / tile) * (math.ceil(T / tile) + 1) // 2


@exercise("12.tiles", (128, 128, 128), (256, 128, 256), (300, 128, 300), (512, 128, 129),
          draw=lambda r: (r.randint(1, 3000), r.choice((16, 64, 128)), r.randint(1, 3000)),
          minutes=8, stars=2,
          mistakes={"take the windows of all queries of a tile, not only of the first query":
                        lambda T, tile, window: sum(math.ceil(min(window, first + 1) / tile)
                                                    for first in range(0, T, tile)),
                    "the future is skipped": lambda T, tile, window: math.ceil(T / tile) ** 2,
                    "tiles outside the window are skipped, too":
                        lambda T, tile, window: _causal(T, tile),
                    "the last tile is visited, even if it is short":
                        lambda T, tile, window: visited_tiles(T // tile * tile, tile, window)})
def visited_tiles(T: int, tile: int, window: int) -> int:
    visited = 0
    for first in range(0, T, tile):
        last = min(first + tile, T)                     # end of the queries and their keys
        begin = max(0, first - window + 1)              # the oldest key that the first query sees
        visited += math.ceil((last - begin) / tile)
    return visited


# Exercises: one tile, two partial answers, and backward from one number per query.

def _tile(r: Random) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, keys, E = r.randint(1, 4), r.randint(1, 5), r.randint(1, 4)
    m, l, acc = normal(r, n, size=3), 0.1 + normal(r, n).abs(), normal(r, n, E)
    if r.random() < 0.3:        # this is the first tile
        m, l, acc = torch.full((n,), -math.inf), torch.zeros(n), torch.zeros(n, E)
    scores = normal(r, n, keys, size=r.choice((1, 5, 60)))
    return m, l, acc, scores, normal(r, keys, E)


def _kept_its_size(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor
                   ) -> tuple[Tensor, Tensor, Tensor]:
    m_new = torch.maximum(m, scores.amax(1))
    p = (scores - m_new[:, None]).exp()
    return m_new, l + p.sum(1), acc + p @ v


def _sum_alone_shrinks(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor
                       ) -> tuple[Tensor, Tensor, Tensor]:
    m_new, l_new, _ = step(m, l, acc, scores, v)
    return m_new, l_new, acc + (scores - m_new[:, None]).exp() @ v


def _largest_of_the_tile(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor
                         ) -> tuple[Tensor, Tensor, Tensor]:
    m_new = scores.amax(1)
    p, shrink = (scores - m_new[:, None]).exp(), (m - m_new).exp()
    return m_new, l * shrink + p.sum(1), acc * shrink[:, None] + p @ v


@exercise("12.step",
          (torch.tensor([-math.inf]), torch.zeros(1), torch.zeros(1, 1), torch.tensor([[0.0]]),
           torch.tensor([[3.0]])),
          draw=_tile, tolerance=1e-5, stars=2, minutes=12,
          mistakes={"when m grows, multiply the sums so far by exp(m - m_new)": _kept_its_size,
                    "acc shrinks by the same factor as l": _sum_alone_shrinks,
                    "m never falls, even if a tile has no larger score": _largest_of_the_tile})
def step(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor
         ) -> tuple[Tensor, Tensor, Tensor]:
    m_new = torch.maximum(m, scores.amax(1))
    shrink, p = (m - m_new).exp(), (scores - m_new[:, None]).exp()
    return m_new, l * shrink + p.sum(1), acc * shrink[:, None] + p @ v


def _halves(r: Random) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, E, size = r.randint(1, 4), r.randint(1, 4), r.choice((1, 5, 300))
    lse = [normal(r, n, size=size) for _ in range(2)]
    of = r.randrange(2)
    lse[of][torch.tensor([r.random() < 0.2 for _ in range(n)])] = -math.inf     # saw no keys
    a, b = (normal(r, n, E) * log_sums.isfinite()[:, None] for log_sums in lse)
    return a, lse[0], b, lse[1]


def _overflows(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    total = lse_a.exp() + lse_b.exp()
    return ((a * lse_a.exp()[:, None] + b * lse_b.exp()[:, None]) / total[:, None], total.log())


@exercise("12.merge",
          (torch.tensor([[1.0]]), torch.tensor([0.0]), torch.tensor([[3.0]]), torch.tensor([0.0])),
          draw=_halves, tolerance=1e-5, stars=2, minutes=10,
          mistakes={"the half with the larger sum has the larger weight":
                        lambda a, lse_a, b, lse_b: ((a + b) / 2, torch.logaddexp(lse_a, lse_b)),
                    "exp overflows: subtract the larger of the two first": _overflows,
                    "add the sums, not their logs":
                        lambda a, lse_a, b, lse_b: (merge(a, lse_a, b, lse_b)[0], lse_a + lse_b)})
def merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    top = torch.maximum(lse_a, lse_b)
    of_a, of_b = (lse_a - top).exp(), (lse_b - top).exp()
    total = of_a + of_b
    return (a * of_a[:, None] + b * of_b[:, None]) / total[:, None], top + total.log()


def _attended(r: Random) -> tuple[Tensor, ...]:
    T, E = r.randint(1, 5), r.randint(1, 4)
    q, k, v, d_out = (normal(r, T, E) for _ in range(4))
    scores = q @ k.T / math.sqrt(E)
    return q, k, v, scores.softmax(1) @ v, scores.logsumexp(1), d_out


def _without_the_rows_sum(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                          d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return backward(q, k, v, torch.zeros_like(out), lse, d_out)


def _unscaled(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor
              ) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = backward(q, k, v, out, lse, d_out)
    return dq * math.sqrt(q.shape[1]), dk * math.sqrt(q.shape[1]), dv


@exercise("12.backward", _attended(Random(1)), draw=_attended, tolerance=1e-5,
          stars=3, minutes=20,
          mistakes={"subtract from each row of dp the sum of d_out times out":
                        _without_the_rows_sum,
                    "divide the gradients of the scores by sqrt(E), like the scores": _unscaled})
def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor
             ) -> tuple[Tensor, Tensor, Tensor]:
    scale = q.shape[1] ** -0.5
    p = (q @ k.T * scale - lse[:, None]).exp()      # the softmax, without computing a maximum
    ds = p * (d_out @ v.T - (d_out * out).sum(1, keepdim=True)) * scale
    return ds @ k, ds.T @ q, p.T @ d_out
