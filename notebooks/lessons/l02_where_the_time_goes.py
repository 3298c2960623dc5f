"""Lesson 02, where the time goes: its study, its figures and its exercises."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lessons import roofs
from lessons.figures.drawing import SECONDS, axis, figure, note, rule, scatter
from lessons.figures.opened import opened_time
from lessons.figures.style import COLOURS
from lessons.figures.waiting import progress
from lessons.judging.judge import Exercise, adding_to
from lessons.roofs import attainable_flops, gradients_of, intensity_of, ridge
from lessons.timing import PHASES, by_phase
from lpkit import hardware
from lpkit.config import Config
from lpkit.contracts import Choice
from lpkit.errors import ConfigError, pick
from lpkit.measure.updates import Bench, take_turns
from lpkit.predict.compare import disturbance
from lpkit.predict.flops import Product, products, training_flops, training_flops_per_token
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.roofline import FLOOR
from lpkit.predict.time import StepTime, step_time
from lpkit.predict.units import quantity
from lpkit.techniques.machines import Machine
from lpkit.timing import Watch

# notebook 02 imports these from here
__all__ = ["PRECISIONS", "FlopCounterMode", "disturbance", "opened_time", "progress", "ridge",
           "training_flops", "training_flops_per_token"]

# ---- The study

@dataclass(frozen=True, kw_only=True)
class RooflineMeasurement:
    """A step and the ceilings of the machine, measured in turns over several rounds.

    The speed of a machine may change during the measurement, so each round has its own ceilings and
    its own floor: the shortest step that these ceilings allow. Properties are medians over the
    rounds, unless a comment says "best"."""

    machine: Machine                        # the best ceilings of all rounds
    # best seconds of one call of each matmul alone; forward and backward matmuls are separate keys
    product_seconds: dict[Product, float]
    floors: tuple[StepTime, ...]            # the predicted floor of each round
    phases: tuple[tuple[float, float, float], ...]   # for each round, the seconds of each of PHASES
    other_cpu_share: float      # share of the CPUs' time that other processes used
    precision: Choice
    where: str

    @property
    def floor_seconds(self) -> dict[str, float]:
        """The floor's seconds of each of PHASES, and of the whole "step"."""
        return _medians([[floor.phases[name] for name in PHASES] for floor in self.floors])

    @property
    def seconds(self) -> dict[str, float]:
        """The measured seconds of each of PHASES, and of the whole "step"."""
        return _medians(self.phases)

    @property
    def ratio_to_floor(self) -> list[float]:
        """For each round, the measured seconds of the step divided by the seconds of the floor."""
        return [sum(phases) / floor.step_seconds for phases, floor in zip(self.phases, self.floors)]

    @property
    def product_rates(self) -> dict[Product, float]:
        """The FLOP/s of each matmul alone."""
        return {p: p.flops / p.calls / seconds for p, seconds in self.product_seconds.items()}


def roofline(config: Config, *, device: str | None = None, rounds: int = 7,
             watch: Watch = iter) -> RooflineMeasurement:
    """Measure in each of `rounds` rounds: the machine's ceilings (large square matmuls, and a sweep
    over memory), each matmul of the model alone, and an update of the model. Raises ConfigError for
    a precision without a roofline."""
    bench = Bench(config, device)
    dtype = bench.precision.used
    pick(hardware.DTYPES, dtype, "precision.recipe with a roofline")
    squares, (sweep, moved) = hardware.squares(dtype, bench.device), hardware.triad(bench.device)
    forward = products(config.model, batch=config.micro_batch)
    alone = {}
    gradients = [gradient for p in forward for gradient in gradients_of(p)]
    for p in (*forward, *gradients):
        group = () if p.group == 1 else (p.group,)
        alone[p] = hardware.product((*group, p.M, p.K), (*group, p.K, p.N), dtype, bench.device)
    phases = []
    times, other_cpu_share = take_turns(
        [*squares.values(), *alone.values(), sweep, lambda: phases.append(by_phase(bench))], rounds,
        watch)
    # The arithmetic ceiling of a round is the fastest matmul: a square, or one of the model's
    # matmuls, whose shapes may be faster than squares.
    flops = [*(2 * n**3 for n in squares), *(p.flops / p.calls for p in alone)]
    peaks = [max(work / seconds for work, seconds in zip(flops, row)) for row in zip(*times)]
    sweeps = [moved / seconds for seconds in times[len(flops)]]
    base = hardware.machine(str(bench.device))
    by_round = [replace(base, flops={dtype: peak}, bytes_per_second=sweep)
                for peak, sweep in zip(peaks, sweeps)]
    return RooflineMeasurement(
        machine=replace(base, flops={dtype: max(peaks)}, bytes_per_second=max(sweeps)),
        product_seconds={p: min(seconds) for p, seconds in zip(alone, times[len(squares):])},
        floors=tuple(step_floor(config, machine, dtype) for machine in by_round),
        phases=tuple(phases[1:]), other_cpu_share=other_cpu_share,
        precision=bench.precision, where=bench.where)


def step_floor(config: Config, machine: Machine, precision: str) -> StepTime:
    """Return the shortest step that the machine's ceilings allow without a compiler. Each pointwise
    operation reads and writes memory, as in the measured eager step."""
    return step_time(config, machine, precision=precision, efficiency=replace(FLOOR, fused=1.0))


def _medians(rounds: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return the medians over the rounds of each phase and of their sum."""
    columns = zip(*((*phases, sum(phases)) for phases in rounds))
    return dict(zip((*PHASES, "step"), map(statistics.median, columns)))


# ---- Figures

PRODUCTS = {    # by kind of matmul: suffixes of the products' names, colour and marker
    "forward": (("",), COLOURS[0], "circle"),
    "input gradient": (("input gradient", "left gradient"), COLOURS[1], "square"),
    "weight gradient": (("weight gradient", "right gradient"), COLOURS[2], "diamond"),
}


def roofline_figure(machine: Machine, rates: Mapping[Product, float], *, dtype: str, itemsize: int,
                    title: str = "", others: float = 0.0) -> dict:
    """Return the plotly spec of a roofline: attainable FLOP/s over FLOPs per byte, both axes
    logarithmic, and a point for each matmul.

    rates: measured FLOP/s of each matmul. The FLOPs per byte of a matmul assume that each operand
        and the result move once, so matmuls of equal shape coincide.
    itemsize: bytes of a number
    others: the share of the cores that other processes used during the measurement

    A matmul whose operands are in a cache can be faster than memory allows. A second, dotted roof
    then shows the speed of the caches, so that no point is above both roofs. Raises ConfigError for
    a matmul that is faster than the arithmetic of `machine`."""
    def roof(intensity: float) -> float:
        return attainable_flops(machine, dtype, intensity)

    def words(p: Product) -> str:
        together = f", {p.group} at once" if p.group > 1 else ""
        share = rates[p] / roof(intensity_of(p, itemsize))
        return (f"{p.name}: ({p.M}, {p.K}) x ({p.K}, {p.N}){together}<br>"
                f"{quantity(rates[p], 'FLOP/s')}, {share:.0%} of the roof")

    ridge, peak = roofs.ridge(machine, dtype), machine.peak_flops(dtype)
    if (fastest := max(rates.values())) > peak:
        raise ConfigError(f"a matmul reached {quantity(fastest, 'FLOP/s')}, more than the roof of "
                          f"{quantity(peak, 'FLOP/s')}: the roof was measured too low; measure "
                          f"again")
    intensities = [intensity_of(p, itemsize) for p in rates]
    ends = [min(ridge, *intensities) / 4, ridge, max(ridge, *intensities) * 4]
    data = [scatter(ends, map(roof, ends), "roof", COLOURS[5], hover=None)]
    swept = machine.bytes_per_second
    cached = max(rate / intensity_of(p, itemsize) for p, rate in rates.items())
    if cached > swept:
        reach = [ends[0], peak / cached, ridge]
        data.append(scatter(reach, [min(peak, cached * x) for x in reach],
                            f"roof of the caches: {quantity(cached, 'B/s')}", COLOURS[5],
                            line={"width": 1.5, "dash": "dot"}, hover=None))
    for kind, (names, colour, symbol) in PRODUCTS.items():
        ours = [p for p in rates if p.name.partition(": ")[2] in names]
        if ours:
            data.append(scatter([intensity_of(p, itemsize) for p in ours],
                                [rates[p] for p in ours], kind, colour, mode="markers",
                                text=list(map(words, ours)),
                                marker={"symbol": symbol, "size": 9},
                                hover="%{text}<extra></extra>", **SECONDS))
    bottom = min(roof(ends[0]), *rates.values()) / 2
    speed = (f"memory: {quantity(machine.bytes_per_second, 'B/s')}; "
             f"ridge at {ridge:.0f} FLOPs per byte")
    return figure(
        data, title, others=others, height=440,
        xaxis=axis("FLOPs per byte moved", type="log", dtick="D2"),
        yaxis=axis(f"FLOP/s in {dtype}", type="log", dtick="D2", exponentformat="SI",
                   range=[math.log10(bottom), math.log10(2 * peak)]),
        shapes=[rule(x=ridge, layer="below")],
        annotations=[note(f"arithmetic: {quantity(peak, 'FLOP/s')}", 0.99, math.log10(peak),
                          "right bottom", xref="paper", yshift=3),     # above the roof
                     note(speed, 0.99, 0.03, "right bottom", xref="paper", yref="paper")])


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: FLOPs, bytes, FLOP/s, bytes/s.

@exercise("02.intensity", (1, 1, 1, 4), (4096, 768, 256, 2),
          draw=lambda r: (r.randint(1, 9999), r.randint(1, 9999), r.randint(1, 9999),
                          r.choice((1, 2, 4))),
          mistakes={"the result is written, so count its bytes, too":
                        lambda M, N, K, itemsize: 2 * M * N * K / ((M * K + K * N) * itemsize),
                    "a multiplication and an addition are two FLOPs":
                        lambda M, N, K, itemsize: M * N * K / ((M * K + K * N + M * N) * itemsize)})
def intensity(M: int, N: int, K: int, itemsize: int) -> float:
    return 2 * M * N * K / ((M * K + K * N + M * N) * itemsize)


# an n rounded up to an integer is right, too
@exercise("02.smallest_square", (200e9, 40e9, 4), (989.4e12, 4.8e12, 2), tolerance=0.01,
          draw=lambda r: (10 ** r.uniform(13, 15), 10 ** r.uniform(10.5, 11), r.choice((1, 2, 4))),
          mistakes={"three matrices move: two operands and the result":
                        lambda peak, speed, itemsize: 0.5 * itemsize * peak / speed})
def smallest_square(peak_flops: float, bytes_per_second: float, itemsize: int) -> float:
    # 2 n^3 / (3 n^2 itemsize) FLOPs per byte meet the ridge, peak / speed
    return 1.5 * itemsize * peak_flops / bytes_per_second


@exercise("02.attention_share", (256, 256), (4096, 8192),
          draw=lambda r: (r.randint(32, 16384), r.randint(1, 200_000)),
          mistakes={"the share is of all FLOPs, attention's included":
                        lambda width, context: context / (6 * width)})
def attention_share(width: int, context: int) -> float:
    return context / (6 * width + context)      # 4 T D of 2 * 12 D^2 + 4 T D FLOPs per token


# Exercises: the work of a product, and the bound on a chain of operations.

def _factors(r: Random) -> tuple[Tensor, Tensor]:
    M, N, K, batch, heads = (r.randint(1, 5) for _ in range(5))
    a, b = r.choice((((batch, heads, M, K), (heads, K, N)), ((M, K), (batch, K, N)),
                     ((batch, 1, M, K), (heads, K, N)), ((M, K), (K, N))))
    return torch.zeros(a), torch.zeros(b)


@exercise("02.flops", (torch.zeros(2, 3), torch.zeros(3, 4)),
          (torch.zeros(2, 3), torch.zeros(5, 3, 4)), draw=_factors, minutes=8, stars=2,
          mistakes={"a multiplication and an addition are two FLOPs":
                        lambda a, b: (a @ b).numel() * a.shape[-1],
                    "the axes in front broadcast": lambda a, b: 2 * a.numel() * b.shape[-1]})
def flops(a: Tensor, b: Tensor) -> int:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]).numel()
    return 2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


@exercise("02.roofline_seconds", ([(1e9, 1e6)], 1e12, 1e9), ([(1e9, 0.0), (0.0, 1e6)], 1e12, 1e9),
          draw=lambda r: ([(10 ** r.uniform(6, 9), 10 ** r.uniform(3, 6)) for _ in range(
              r.randint(1, 5))], 10 ** r.uniform(11, 13), 10 ** r.uniform(8, 10)), minutes=4,
          mistakes={"take the bound of each operation, then add up": lambda ops, peak, speed:
                        max(sum(f for f, _ in ops) / peak, sum(b for _, b in ops) / speed),
                    "moving and computing overlap within one operation": lambda ops, peak, speed:
                        sum(f / peak + b / speed for f, b in ops)})
def roofline_seconds(operations: list[tuple[float, float]], peak_flops: float,
                     bytes_per_second: float) -> float:
    return sum(max(flops / peak_flops, moved / bytes_per_second) for flops, moved in operations)
