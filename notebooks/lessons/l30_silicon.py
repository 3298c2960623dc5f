"""Lesson 30, Silicon: its study, its figures and its exercises.

A systolic array is a grid of `rows` x `columns` processing elements (PEs). Each PE multiplies and
adds once in a cycle, and takes its operands from its left and upper neighbours. Operands enter only
at the left and upper edges. A product (M, K) x (K, N) that is larger than the array is cut into
folds, which are computed one after the other; the controller pads partial folds with zeros.

    array = Array(rows=8, columns=8, dataflow="weight")
    array.cycles(M, N, K)           # closed form
    simulate(array, a, b).cycles    # cycle by cycle, with the product as a result

`data/measured/systolic-*.json` has SCALE-Sim's cycles (`lpkit bench systolic`). Energies are
picojoules of Horowitz 2014 at 45 nm and 0.9 V; powers are watts of published tables.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lessons.figures.drawing import NAMES, axis, bars, figure, scatter
from lessons.figures.style import DISTINCT
from lessons.figures.waiting import progress as progress
from lessons.judging.judge import adding_to
from lpkit.errors import ConfigError, pick
from lpkit.measure.updates import take_turns
from lpkit.predict.evidence import MEASURED
from lpkit.predict.flops import Product
from lpkit.predict.flops import products as products
from lpkit.presets import preset as preset
from lpkit.tables import html_table
from lpkit.techniques.machines import find

# ---- Systolic arrays


class Folds(NamedTuple):
    """How a dataflow cuts a product (M, K) x (K, N) into folds."""

    rows: str           # the side of the product that the array's rows hold
    columns: str        # the side that the array's columns hold
    streamed: str       # the side that flows through the array
    row_cycles: int     # times that data passes all rows; 2 if each fold first loads its weights


DATAFLOWS = {"output": Folds("M", "N", "K", 1),     # each PE keeps an output
             "weight": Folds("K", "N", "M", 2),     # each PE keeps a weight; sums move down
             "input": Folds("K", "M", "N", 2)}      # each PE keeps an input; sums move down


@dataclass(frozen=True)
class Array:
    """A systolic array. Raises ConfigError for a side below 1 and for an unknown dataflow."""

    rows: int
    columns: int
    dataflow: str = "output"

    def __post_init__(self) -> None:
        pick(DATAFLOWS, self.dataflow, "dataflow")
        _check("of an array", rows=self.rows, columns=self.columns)

    def cut(self, M: int, N: int, K: int) -> tuple[int, int, int]:
        """Return the number of folds along the rows and along the columns of the array, and the
        cycles of one fold."""
        _check("of a product (M, K) x (K, N)", M=M, N=N, K=K)
        sides, how = {"M": M, "N": N, "K": K}, DATAFLOWS[self.dataflow]
        return (ceil(sides[how.rows] / self.rows), ceil(sides[how.columns] / self.columns),
                how.row_cycles * self.rows + self.columns + sides[how.streamed] - 2)

    def cycles(self, M: int, N: int, K: int) -> int:
        """Return the number of the last cycle of a product; the first cycle has number 0."""
        down, across, each = self.cut(M, N, K)
        return down * across * each - 1

    def utilization(self, M: int, N: int, K: int) -> float:
        """Return the share of all PEs' cycles in which they multiply elements of the product."""
        return M * N * K / ((self.cycles(M, N, K) + 1) * self.rows * self.columns)

    def words(self, M: int, N: int, K: int) -> int:
        """Return the words that the array reads from and writes to its memory."""
        down, across, _ = self.cut(M, N, K)
        if self.dataflow == "output":
            return M * K * across + K * N * down + M * N
        if self.dataflow == "input":
            M, N = N, M
        return K * N + M * K * across + M * N * (2 * down - 1)      # partial sums go out and back


def _check(where: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name} {where} must be a whole number of at least 1, got {size!r}")


# ---- The simulator: registers, one cycle after the other

@dataclass(frozen=True)
class Simulated:
    product: Tensor
    cycles: int             # the clock's value in the last cycle
    words: int              # read from and written to the array's memory
    busy: list[int] = field(repr=False)     # by cycle: PEs that multiply two non-zero numbers


def simulate(array: Array, a: Tensor, b: Tensor) -> Simulated:
    """Multiply a (M, K) by b (K, N) on the array, cycle by cycle. Raises ConfigError if their sizes
    do not match. An input-stationary array does what a weight-stationary array does for b.T a.T."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or not a.numel() * b.numel():
        raise ConfigError(f"a product needs (M, K) and (K, N), got {tuple(a.shape)} and "
                          f"{tuple(b.shape)}")
    if array.dataflow == "input":
        result = simulate(replace(array, dataflow="weight"), b.T, a.T)
        return replace(result, product=result.product.T)
    out, R, C = torch.zeros(len(a), b.shape[1], dtype=a.dtype), array.rows, array.columns
    busy, words = [], 0
    for i in range(0, len(a) if array.dataflow == "output" else len(b), R):
        for j in range(0, b.shape[1], C):
            if array.dataflow == "output":
                left, top, place = a[i:i + R], b[:, j:j + C], out[i:i + R, j:j + C]
                part = output_fold(_padded(left, R, len(b)), _padded(top, len(b), C), busy)
            else:
                left, top, place = a[:, i:i + R].T, b[i:i + R, j:j + C], out[:, j:j + C]
                part = weight_fold(_padded(left, R, len(a)), _padded(top, R, C), busy)
                words += place.numel() * (i > 0)        # the partial sums are read again
            words += left.numel() + top.numel() + place.numel()
            place += part[:len(place), :place.shape[1]]
    return Simulated(out, len(busy) - 1, words, busy)


def output_fold(left: Tensor, top: Tensor, busy: list[int]) -> Tensor:
    """Compute one fold of an output-stationary array and return its outputs (rows, columns).
    Operands move right and down; each PE adds to its output until it has all K terms. Appends the
    number of busy PEs of each cycle to `busy`."""
    across = down = torch.full((len(left), top.shape[1]), math.nan, dtype=left.dtype)
    sums, terms, cycle = torch.zeros_like(across), torch.zeros_like(across), 0
    while terms.min() < left.shape[1]:
        across = _moved(across, _entering(left, cycle), 1)
        down = _moved(down, _entering(top.T, cycle), 0)
        term = across * down                # nan: an operand has not arrived, or has passed
        sums, terms = sums + term.nan_to_num(0.0), terms + ~term.isnan()
        busy.append(int((term.nan_to_num(0.0) != 0).sum()))
        cycle += 1
    return sums


def weight_fold(inputs: Tensor, weights: Tensor, busy: list[int]) -> Tensor:
    """Compute one fold of a weight-stationary array and return its partial sums (M, columns).
    Weights enter from above and stay; inputs move right; partial sums move down and leave. Appends
    the number of busy PEs of each cycle to `busy`."""
    held = torch.zeros_like(weights)
    for row in weights.flip(0):
        held = _moved(held, row, 0)
        busy.append(0)
    across = sums = torch.full_like(held, math.nan)
    out = torch.zeros(inputs.shape[1], held.shape[1], dtype=held.dtype)
    left, cycle = torch.zeros(held.shape[1], dtype=torch.long), 0       # outputs that have left
    while left.min() < len(out):
        across = _moved(across, _entering(inputs, cycle), 1)
        term = held * across
        sums = _moved(sums, torch.zeros_like(sums[0]), 0) + term
        arrived = ~sums[-1].isnan()
        out[left[arrived], arrived.nonzero()[:, 0]] = sums[-1][arrived]
        left += arrived
        busy.append(int((term.nan_to_num(0.0) != 0).sum()))
        cycle += 1
    return out


def _moved(registers: Tensor, entering: Tensor, dim: int) -> Tensor:
    """Return the registers of all PEs after each has taken the value of its left (dim 1) or upper
    (dim 0) neighbour; `entering` are the values at the edge."""
    return torch.cat((entering.unsqueeze(dim),
                      registers.narrow(dim, 0, registers.shape[dim] - 1)), dim)


def _entering(lanes: Tensor, cycle: int) -> Tensor:
    """Return the value that enters each lane in a cycle (nan: none). Lane i starts i cycles after
    lane 0, so that operands meet in the right PE."""
    at = cycle - torch.arange(len(lanes))
    values = lanes[torch.arange(len(lanes)), at.clamp(0, lanes.shape[1] - 1)]
    return torch.where((at >= 0) & (at < lanes.shape[1]), values, math.nan)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


# ---- 36 products

ARRAYS = ((8, 8), (4, 16), (16, 4))
SHAPES = ((16, 16, 16), (24, 40, 9), (7, 33, 20), (50, 5, 31))     # M, N, K


def whole(rows: int, columns: int, draw: torch.Generator, density: float = 1.0) -> Tensor:
    """Return a matrix of whole numbers from 1 to 9 in float64, so that its products are exact. A
    share of 1 - density of its elements is 0."""
    kept = torch.rand(rows, columns, generator=draw) < density
    return torch.randint(1, 10, (rows, columns), generator=draw).double() * kept


def checked(watch: Callable[[Sequence], Iterable] = iter) -> dict[tuple, Simulated]:
    """Simulate SHAPES on ARRAYS with each dataflow, and return the results by array and shape.
    Raises AssertionError if a product is wrong."""
    draw, results = torch.Generator().manual_seed(0), {}
    for array, (M, N, K) in watch([(Array(*sides, dataflow), shape) for sides in ARRAYS
                                   for dataflow in DATAFLOWS for shape in SHAPES]):
        a, b = whole(M, K, draw), whole(K, N, draw)
        results[array, (M, N, K)] = result = simulate(array, a, b)
        assert torch.equal(result.product, a @ b), f"{array} computes {(M, N, K)} wrong"
    return results


def scale_sim() -> dict[tuple, int]:
    """Return the recorded cycles of SCALE-Sim, by array and shape."""
    record = json.loads(next(MEASURED.glob("systolic-*.json")).read_text())
    return {(Array(R, C, dataflow), tuple(shape)): cycles
            for dataflow, R, C, shape, cycles in record["cycles"]}


# ---- A model's products

def model_utilization(array: Array, listed: Sequence[Product]) -> float:
    """Return the share of all PEs' cycles in which they multiply, if the array computes all
    `listed` products one after the other."""
    times = [product.calls * product.group for product in listed]
    shapes = [(product.M, product.N, product.K) for product in listed]
    cycles = sum(n * (array.cycles(*shape) + 1) for n, shape in zip(times, shapes))
    return sum(n * math.prod(shape) for n, shape in zip(times, shapes)) / (
        cycles * array.rows * array.columns)


def aspects(pes: int, dataflow: str) -> list[Array]:
    """Return the arrays of `pes` PEs whose sides are powers of two."""
    if pes < 1 or pes & (pes - 1):
        raise ConfigError(f"the number of PEs must be a power of two, got {pes!r}")
    return [Array(2**i, pes >> i, dataflow) for i in range(pes.bit_length())]


def best_aspect(pes: int, dataflow: str, listed: Sequence[Product]) -> Array:
    return max(aspects(pes, dataflow), key=lambda array: model_utilization(array, listed))


def decoding(listed: Sequence[Product]) -> list[Product]:
    """Return the products with weights for one token, as in generating one sequence."""
    return [replace(product, M=1) for product in listed if not product.pairs]


# ---- Double buffering

def buffered(folds: int, fetch: int, compute: int, buffers: int) -> int:
    """Simulate the folds cycle by cycle and return their cycles. A memory fetches the operands of a
    fold into a free buffer in `fetch` cycles; the array computes a full buffer in `compute` cycles,
    and then the buffer is free."""
    _check("of buffered folds", folds=folds, fetch=fetch, compute=compute, buffers=buffers)
    cycles = full = done = fetched = fetching = computing = 0
    while done < folds:
        if not fetching and fetched < folds and full + bool(computing) < buffers:
            fetching = fetch
        if not computing and full:
            full, computing = full - 1, compute
        cycles += 1
        if fetching and not (fetching := fetching - 1):
            full, fetched = full + 1, fetched + 1
        if computing and not (computing := computing - 1):
            done += 1
    return cycles


def buffered_formula(folds: int, fetch: int, compute: int, buffers: int) -> int:
    """Return the cycles of all folds in closed form. With two or more buffers, fetching and
    computing overlap."""
    if buffers == 1:
        return folds * (fetch + compute)
    return fetch + (folds - 1) * max(fetch, compute) + compute


# ---- Zeros

def slowest(K: int, density: float, lanes: int) -> float:
    """Return the expected largest number of nonzero weights in a lane, among `lanes` lanes of K
    independent weights: the sum over k of 1 - P(a lane has at most k nonzero weights)^lanes."""
    exactly = (math.comb(K, k) * density**k * (1 - density)**(K - k) for k in range(K))
    return sum(1 - min(p, 1.0)**lanes for p in accumulate(exactly))


def skipped_cycles(weights: Tensor, lanes: int) -> int:
    """Return the cycles per input vector of an array with `lanes` columns that skip zero weights.
    The columns of a fold begin together, and the fold ends with its slowest column."""
    return sum(int((part != 0).sum(0).max()) for part in weights.split(lanes, 1))


class OnThisMachine(NamedTuple):
    """Seconds of matmuls with zeros in the weights, over those of a matmul without zeros (medians
    of rounds)."""

    dense: float        # the dense kernel, with zeros in the weights
    sparse: float       # PyTorch's kernel for the CSR format, which skips zeros
    others: float       # share of the cores that other processes used


def on_this_machine(density: float, width: int = 1024, rounds: int = 9) -> OnThisMachine:
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(width, 512, generator=draw), torch.randn(width, width, generator=draw)
    zeros = w * (torch.rand(w.shape, generator=draw) < density)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)    # PyTorch calls CSR a beta
        csr = zeros.to_sparse_csr()
    assert torch.allclose(csr @ x, zeros @ x, atol=1e-3)
    times, others = take_turns([lambda: w @ x, lambda: zeros @ x, lambda: csr @ x], rounds, iter)
    full, dense, sparse = (sorted(each)[rounds // 2] for each in times)
    return OnThisMachine(dense / full, sparse / full, others)


# ---- Energy

# Horowitz 2014, https://doi.org/10.1109/ISSCC.2014.6757323, as copied in
# https://gist.github.com/V0XNIHILI/2b6fa61edd4c06d9ffce5551065124c1
PJ = {"fp32": (3.7, 0.9), "fp16": (1.1, 0.4), "int8": (0.2, 0.03)}  # picojoules: multiply, add
BITS = {"fp32": 32, "fp16": 16, "int8": 8}
# picojoules to read 64 bits, by size of the memory; the source gives a range for DRAM, this is its
# lower end
READ_PJ = {"8 KB": 10, "32 KB": 20, "1 MB": 100, "DRAM": 1300}
PARTS = ("arithmetic", "memory of 1 MB", "DRAM")


def read_pj(level: str, bits: int) -> float:
    return pick(READ_PJ, level, "memory level") * bits / 64


def energy(array: Array, shape: tuple[int, int, int], fmt: str,
           density: float = 1.0) -> dict[str, float]:
    """Return the joules of a product by part of PARTS. Each matrix moves between DRAM and the
    memory of 1 MB once; the array reads from and writes to this memory. A PE uses no energy where a
    weight is 0 (it is gated), but all words move."""
    M, N, K = shape
    bits, mac = pick(BITS, fmt, "format"), sum(PJ[fmt])
    picojoules = (M * N * K * density * mac, array.words(M, N, K) * read_pj("1 MB", bits),
                  (M * K + K * N + M * N) * read_pj("DRAM", bits))
    return {part: each * 1e-12 for part, each in zip(PARTS, picojoules)}


# ---- Power, voltage and frequency

class Point(NamedTuple):
    hertz: float
    volts: float
    watts: float


# a computer with an Athlon 64 X2 4000+, at the wall socket:
# https://silentpcreview.com/forums/viewtopic.php?f=28&t=41353
ATHLON = (Point(2.1e9, 1.1, 98), Point(2.1e9, 1.2, 102), Point(2.1e9, 1.3, 108),
          Point(2.1e9, 1.375, 113))
# Sempron 3100+, thermal design power: AMD publication 30430, revision 3.51, table 26
SEMPRON = (Point(1.8e9, 1.4, 62), Point(1.0e9, 1.1, 20))
# Pentium M of 1.6 GHz: http://www.hardwaresecrets.com/inside-pentium-m-architecture/7/
PENTIUM = ((1.6e9, 1.484), (1.4e9, 1.42), (1.2e9, 1.276), (1.0e9, 1.164), (0.8e9, 1.036),
           (0.6e9, 0.956))


def power_line(points: Sequence[Point]) -> tuple[float, float]:
    """Return a (watts) and b of the line P = a + b f V^2 through the points, by least squares."""
    x = torch.tensor([point.hertz * point.volts**2 for point in points], dtype=torch.float64)
    y = torch.tensor([point.watts for point in points], dtype=torch.float64)
    b = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    return float(y.mean() - b * x.mean()), float(b)


def left_out(points: Sequence[Point]) -> list[float]:
    """Return the watts of each point as predicted by the line through all other points."""
    lines = [power_line([*points[:i], *points[i + 1:]]) for i in range(len(points))]
    return [a + b * point.hertz * point.volts**2 for (a, b), point in zip(lines, points)]


def per_watt(machine: str, dtype: str) -> float:
    """Return the FLOP/s per watt of a machine's datasheet."""
    return find(machine).peak_flops(dtype) / find(machine).watts


# ---- Figures and tables

def busy_figure(size: int = 8, shape: tuple[int, int, int] = (24, 8, 16)) -> dict:
    """Return the plotly spec of the number of PEs that multiply in each cycle of a product, by
    dataflow."""
    M, N, K = shape
    a, b = torch.ones(M, K, dtype=torch.float64), torch.ones(K, N, dtype=torch.float64)
    data = []
    for dataflow, colour in zip(DATAFLOWS, DISTINCT):
        busy = simulate(Array(size, size, dataflow), a, b).busy
        data.append(scatter(range(len(busy)), busy, f"{dataflow}-stationary", colour,
                            line={"shape": "hv"}, hover="cycle %{x}: %{y} PEs"))
    return figure(data, f"Busy PEs of an array of {size} x {size}: ({M}, {K}) x ({K}, {N})",
                  xaxis=axis("cycle"), yaxis=axis("PEs that multiply"))


def cycles_table(results: Mapping[tuple, Simulated]) -> str:
    """Return an HTML table of the cycles of SHAPES by formula, simulator and SCALE-Sim, with a row
    per dataflow and array."""
    recorded, lines = scale_sim(), {}
    for (array, shape), result in results.items():
        triple = array.cycles(*shape), result.cycles, recorded[array, shape]
        cell = f"{triple[0]:,}" if len(set(triple)) == 1 else " / ".join(map(str, triple))
        lines.setdefault(array, []).append(cell)
    return html_table(("last cycle: formula, simulator and SCALE-Sim", *(
        f"({M}, {K}) x ({K}, {N})" for M, N, K in SHAPES)), [
            (f"{array.dataflow}-stationary, {array.rows} x {array.columns}", *cells)
            for array, cells in lines.items()], caption="one number: all three agree")


def array_view(model: str, dataflow: str, tokens: int, rows: int, columns: int) -> tuple[dict, str]:
    """Return a figure and a table for an Explorer: the utilization of the array in each product of
    a forward pass over one sequence."""
    array = Array(rows, columns, dataflow)
    listed = products(preset(model).replace({"model.context": tokens}).model, batch=1)
    shares = [array.utilization(product.M, product.N, product.K) for product in listed]
    share = model_utilization(array, listed)
    best = best_aspect(1 << (rows * columns).bit_length() - 1, dataflow, listed)
    spec = figure([bars([product.name for product in listed], shares, "", DISTINCT[0],
                        text=[f"{each:.1%}" for each in shares], hover="%{x:.2%}")],
                  f"{share:.1%} of {rows} x {columns} PEs multiply on average", height=340,
                  yaxis=NAMES,
                  xaxis=axis("utilization", range=[0, 1.12], tickformat=".0%"))
    macs = sum(product.flops for product in listed) / 2
    return spec, html_table(("", ""), [
        ("cycles", f"{macs / share / rows / columns:,.0f}"), ("multiply-adds", f"{macs:,.0f}"),
        ("best shape of the array", f"{best.rows} x {best.columns}"),
        ("utilization with this shape", f"{model_utilization(best, listed):.1%}")])


def aspects_table(models: Iterable[str], pes: int) -> str:
    """Return an HTML table of the best shape of an array of `pes` PEs by model and dataflow, for a
    sequence and for one token."""
    lines, side = [], math.isqrt(pes)
    for name in models:
        listed = products(preset(name).model, batch=1)
        for what, kinds in (("a sequence", listed), ("one token", decoding(listed))):
            cells = []
            for dataflow in DATAFLOWS:
                best = best_aspect(pes, dataflow, kinds)
                square, share = (model_utilization(array, kinds) for array in (
                    Array(side, side, dataflow), best))
                cells += [f"{square:.1%}", f"{best.rows} x {best.columns}: {share:.1%}"]
            lines.append((f"{name}, {what}", *cells))
    return html_table(("", *(head for dataflow in DATAFLOWS for head in (
        f"{dataflow}-stationary, {side} x {side}", "best shape"))), lines)


def energy_figure(array: Array, shape: tuple[int, int, int]) -> dict:
    """Return the plotly spec of a product's energy by format, without zeros and with 90% zeros in
    gated PEs."""
    cases = {f"{fmt}{', 90% zeros' * (density < 1)}": energy(array, shape, fmt, density)
             for fmt in PJ for density in (1.0, 0.1)}
    data = [bars(cases, [1e3 * joules[part] for joules in cases.values()], part, colour,
                 hover="%{x:.3g} mJ") for part, colour in zip(PARTS, DISTINCT)]
    return figure(data, "Energy of one product by format", barmode="stack", height=380,
                  yaxis=NAMES, xaxis=axis("millijoules at 45 nm"))


def power_figure() -> dict:
    """Return the plotly spec of the energy per cycle over the frequency, relative to the highest
    frequency, by the share of static power at that frequency."""
    top = math.prod((PENTIUM[0][0], PENTIUM[0][1], PENTIUM[0][1]))
    data = []
    for share, colour in zip((0.0, 0.2, 0.4), DISTINCT):
        relative = [(share + (1 - share) * f * V**2 / top) * PENTIUM[0][0] / f for f, V in PENTIUM]
        data.append(scatter([f / 1e9 for f, _ in PENTIUM], relative, f"static power {share:.0%}",
                            colour, mode="lines+markers", hover="%{x} GHz: %{y:.2f}"))
    return figure(data, "Energy per cycle by P = a + b f V^2", xaxis=axis("frequency, GHz"),
                  yaxis=axis("energy per cycle, over that at 1.6 GHz", rangemode="tozero"))


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


@exercise("30.cycles", (1, 1, 1, 1, 1), (8, 4, 16, 4, 8), (8, 4, 17, 5, 9), (128, 128, 1, 256, 256),
          minutes=6, draw=lambda r: tuple(r.randint(1, 40) for _ in range(5)),
          mistakes={"a partial fold takes as long as a full fold: round up":
                        lambda rows, columns, M, N, K: (2 * rows + columns + M - 2) * max(
                            1, K // rows) * max(1, N // columns),
                    "the weights are loaded before the inputs enter": lambda rows, columns, M, N, K:
                        (rows + columns + M - 2) * ceil(K / rows) * ceil(N / columns),
                    "rows hold K and columns hold N": lambda rows, columns, M, N, K:
                        (2 * rows + columns + K - 2) * ceil(M / rows) * ceil(N / columns)})
def weight_stationary_cycles(rows: int, columns: int, M: int, N: int, K: int) -> int:
    return (2 * rows + columns + M - 2) * ceil(K / rows) * ceil(N / columns)


@exercise("30.skipping", ([3, 5], 1), ([3, 5, 2], 2), ([0, 0], 2), ([4, 1, 1, 4], 2), minutes=5,
          draw=lambda r: ([r.randint(0, 20) for _ in range(r.randint(1, 12))], r.randint(1, 5)),
          mistakes={"a fold ends with its slowest column": lambda nonzeros, columns:
                        ceil(sum(nonzeros) / columns),
                    "a fold begins when the fold before it has ended": lambda nonzeros, columns:
                        max(nonzeros)})
def skipping_cycles(nonzeros: list[int], columns: int) -> int:
    return sum(max(nonzeros[i:i + columns]) for i in range(0, len(nonzeros), columns))


@exercise("30.frequency", (0.0, 1.0), (2.0, 1.0), (10.0, 2.5), (0.3, 4.0), minutes=6, stars=2,
          draw=lambda r: (r.uniform(0.0, 50.0), r.uniform(0.1, 10.0)),
          mistakes={"power is least at 0; divide it by f first": lambda a, c: 0.0,
                    "the derivative of c f^2 is 2 c f": lambda a, c: (a / c) ** (1 / 3)})
def best_frequency(a: float, c: float) -> float:
    return (a / (2 * c)) ** (1 / 3)
