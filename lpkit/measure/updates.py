"""What really happened in a step: bytes by what they are for, and seconds.

Bytes, seconds, FLOPs and bytes/s; nothing here is rounded. Step times are medians (what the machine
did), the ceilings beside them the best of several tries (what it can do: `lpkit.hardware`).
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lpkit import hardware
from lpkit.config import Config
from lpkit.contracts import Batch, Choice, Transform
from lpkit.errors import ConfigError, pick
from lpkit.measure.tracking import Footprint, Tracker
from lpkit.memory.rows import asked
from lpkit.predict.compare import Comparison
from lpkit.predict.flops import Product, products
from lpkit.predict.time import StepTime, step_floor, step_time
from lpkit.techniques.machines import Machine
from lpkit.timing import interleaved_seconds
from lpkit.training.build import Decisions, decide
from lpkit.training.training import RandomTokens, Training


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that autograd kept for the backward pass, each storage once, under the operation that
    kept it first."""

    operations: dict[str, int]  # by module, block numbers left out: norm1, attention.qkv, ..., loss
    weight_copy_bytes: int        # copies of the weights in another dtype, made by autocast

    @property
    def total_bytes(self) -> int:
        """Without the weight copies."""
        return sum(self.operations.values())


def saved_bytes(model: nn.Module, step: Callable[[], Tensor], *,
                ignore: Iterable[Tensor] = ()) -> Saved:
    """Run `step`, which returns a loss, and count what autograd keeps of it. Nothing is changed or
    slowed afterwards.

    What is kept outside any module is the loss's. The model's parameters, and the tensors in
    `ignore`, exist anyway.
    """
    ignore = tuple(ignore)
    with Tracker(model, device=next(model.parameters()).device) as tracker:
        tracker.hold(ignore, "batch")
        loss = step()
        kept = tracker.kept()
    if not loss.requires_grad:
        raise ValueError("step() returned something that backward cannot start from")
    return Saved(operations=kept, weight_copy_bytes=tracker.now().get("weight copies", 0))


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """One update of a real model, on this machine. Seconds are medians over the rounds."""

    bytes: dict[str, int]           # by the names of the rows in lpkit.predict.ledger
    operations: dict[str, int]      # what autograd kept, by operation
    peak_bytes: int                 # the most that tensors held at once, weights and all
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    tokens: int
    precision: Choice
    attention: Choice
    where: str                      # for a Comparison

    @property
    def step_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds


def step(config: Config, *, device: str | None = None, rounds: int = 5) -> StepMeasurement:
    """Build the model of `config`, update it `rounds` times on random tokens, and count and time
    what happens."""
    bench = Bench(config, device)
    training, (piece, *_) = bench.training, bench.batch.chunk(config.grad_accum_steps)
    bench.train()   # the optimizer makes its state in the first one
    saved = saved_bytes(bench.model, lambda: training.loss(bench.model,
                                                           Batch(*(t.clone()
                                                                   for t in piece.tensors))))
    training.forward_backward(bench.batch)
    held = {
        "weights": sum(p.nbytes for p in bench.model.parameters()),
        "optimizer state": sum(t.nbytes for state in training.optimizer.state.values()
                               for t in state.values() if torch.is_tensor(t)),
        # used up in backward
        "gradients": sum(p.grad.nbytes for p in bench.model.parameters() if p.grad is not None),
        "weight copies": saved.weight_copy_bytes,
        "activations": saved.total_bytes - saved.operations["loss"],
        "logits and loss": saved.operations["loss"],
    }
    training.optimizer.zero_grad(set_to_none=True)
    with bench.tracker() as tracker:
        bench.train()
    peak = tracker.footprint().peak_bytes
    forward, backward, optimize = map(statistics.median,
                                      zip(*(bench.update() for _ in range(rounds))))
    return StepMeasurement(
        bytes={name: n for name, n in held.items() if n}, operations=saved.operations,
        peak_bytes=peak, forward_seconds=forward, backward_seconds=backward,
        optimizer_seconds=optimize, tokens=config.tokens_per_step, precision=bench.precision,
        attention=bench.attention, where=bench.where)


def memory(config: Config, *, device: str | None = None, count: bool = False) -> Footprint:
    """Every live byte of one update of the model of `config`, as lpkit.train makes it, by row; the
    second one, because the optimizer makes its state in the first.

    On a GPU the allocator counts too, cuBLAS's workspace included; on a CPU PyTorch's profiler
    does, in one more update, if asked to `count`.
    """
    bench = Bench(config, device)
    bench.train()
    gpu = bench.device.type == "cuda"
    if gpu:
        hardware.reset_peak(bench.device)
    with bench.tracker() as tracker:
        tracker.hold(bench.batch.tensors, "batch")
        bench.train(tracker)
    counted, reserved = ((hardware.peak_bytes(bench.device),
                          torch.cuda.max_memory_reserved(bench.device)) if gpu else (None, None))
    held = sum(tracker.now().values())
    if count and not gpu:
        counted = held + _counted_peak(bench.train)
    return tracker.footprint(counted_bytes=counted, reserved_bytes=reserved,
                             chosen=bench.decisions.choices, where=bench.where)


def _counted_peak(update: Callable[[], object]) -> int:
    """The most that the CPU's allocator gave out beyond what was there, by PyTorch's profiler: it
    sees into kernels."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        update()
    events = [(e.start_ns(), e.nbytes()) for e in profiler.profiler.kineto_results.events()
              if e.name() == "[memory]"]
    return max(itertools.accumulate(nbytes
                                    for _, nbytes in sorted(events, key=lambda event: event[0])),
               default=0)


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """One update, by the rows of `lpkit.predict.time`; products of the same three sizes share a
    row."""

    # median over the rounds; "the rest": between operations, and where no operation is PyTorch's
    rows: dict[str, float]
    step_seconds: float         # of the clock, unprofiled
    where: str


OTHER, REST = "norms, activations, loss", "the rest"
PRODUCTS = {"aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_int_mm"}
BY_OPERATION = {    # by the start of its name; what is none of these is pointwise
    "aten::_scaled_dot_product": "attention", "aten::_flash_attention": "attention",
    "aten::_efficient_attention": "attention",
    "aten::bmm": "attention", "aten::baddbmm": "attention", "aten::_fused_adam": "optimizer",
    "aten::_foreach": "optimizer",
}


def seconds(config: Config, *, device: str | None = None, rounds: int = 3) -> Seconds:
    """Where the time of an update goes, by PyTorch's profiler: each operation's own time, a product
    by its sizes.

    A profiled step is slower than others; its rows are scaled so that they add up to the clock's.
    Raises ConfigError.
    """
    bench = Bench(config, device)
    bench.train()
    timed, each = [], []
    for _ in range(rounds):
        start = bench._now()
        bench.train()
        timed.append(bench._now() - start)
    for _ in range(rounds):
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (bench.device.type == "cuda")
        with profile(activities=kinds, record_shapes=True) as profiler:
            start = bench._now()
            bench.train()
            whole = bench._now() - start
        each.append(_rows_of(profiler, config, bench.device, whole))
    clock = statistics.median(timed)
    rows = {name: statistics.median(one.get(name, 0.0) for one in each)
            for name in {name for one in each for name in one}}
    scale = clock / sum(rows.values())
    return Seconds(rows={name: scale * value
                         for name, value in sorted(rows.items(), key=lambda row: -row[1])},
                   step_seconds=clock, where=f"{bench.where}, PyTorch's profiler, median of "
                   f"{rounds}")


def _rows_of(profiler: profile, config: Config, device: torch.device, whole: float) -> dict[str,
                                                                                            float]:
    labels = _labels(config)
    found: dict[str, float] = {}
    for event in profiler.key_averages(group_by_input_shape=True):
        spent = ((event.self_device_time_total if device.type == "cuda"
                  else event.self_cpu_time_total) / 1e6)
        if not event.key.startswith("aten::") or not spent:
            continue
        name = next((row for start, row in BY_OPERATION.items() if event.key.startswith(start)),
                    OTHER)
        if event.key in PRODUCTS:
            *_, left, right = [shape for shape in event.input_shapes if len(shape) == 2]
            name = labels.get(tuple(sorted((*left, right[1]))), OTHER)
        found[name] = found.get(name, 0.0) + spent
    return found | {REST: max(0.0, whole - sum(found.values()))}


def _labels(config: Config) -> dict[tuple[int, ...], str]:
    """The Linears by the three sizes of their product, in order of size: its two gradients have the
    same."""
    labels: dict[tuple[int, ...], str] = {}
    for p in products(config.model, batch=config.global_batch // config.grad_accum_steps):
        if not p.pairs:
            size = tuple(sorted((p.M, p.N, p.K)))
            labels[size] = f"{labels[size]}, {p.name}" if size in labels else p.name
    return labels


def reconcile_seconds(config: Config, *, device: str | None = None, rounds: int = 3) -> Comparison:
    """Rooflines at this machine's ceilings beside a profiled update, row by row. Raises
    ConfigError, also for a recipe that this machine emulates: there is no ceiling for it."""
    on = hardware.machine(device)
    said = step_time(config, on)
    found = seconds(config, device=device, rounds=rounds)
    shared = {name: label for label in _labels(config).values() for name in label.split(", ")}
    formula: dict[str, float] = {}
    for row in said.rows:
        name = shared.get(row.name, row.name)
        formula[name] = formula.get(name, 0.0) + row.seconds
    return Comparison.of_rows(formula, found.rows, unit="s", where=found.where)


@dataclass(frozen=True, kw_only=True)
class RooflineMeasurement:
    """A step beside the ceilings of the machine, measured in turns. The machine's speed may change
    meanwhile, so each round has its own ceilings and its own floor; shown are medians over the
    rounds, except where it says best."""

    machine: Machine                    # best ceilings
    product_seconds: dict[Product, float]  # best time of one call, forward and backward, each alone
    floors: tuple[StepTime, ...]           # by round
    phases: tuple[tuple[float, float, float], ...]   # forward, backward, optimizer seconds by round
    other_cpu_share: float  # share of the CPUs' time that other processes took meanwhile
    precision: Choice
    attention: Choice
    where: str

    @property
    def floor_seconds(self) -> dict[str, float]:
        phases = ("forward", "backward", "optimizer")
        return self._medians(tuple(floor.phases[name] for name in phases) for floor in self.floors)

    @property
    def seconds(self) -> dict[str, float]:
        return self._medians(self.phases)

    @property
    def ratio_to_floor(self) -> list[float]:
        """How many times its floor the step of each round took."""
        return [sum(phases) / floor.step_seconds for phases, floor in zip(self.phases, self.floors)]

    @property
    def product_rates(self) -> dict[Product, float]:
        """FLOP/s of each product."""
        return {p: p.flops / p.calls / seconds for p, seconds in self.product_seconds.items()}

    @staticmethod
    def _medians(rounds: Iterable[tuple[float, float, float]]) -> dict[str, float]:
        rounds = list(rounds)
        medians = dict(zip(("forward", "backward", "optimizer"),
                           map(statistics.median, zip(*rounds))))
        return {**medians, "step": statistics.median(map(sum, rounds))}


def roofline(config: Config, *, device: str | None = None, rounds: int = 7) -> RooflineMeasurement:
    """Take turns: the ceilings, each product of the model alone, one update of the whole model."""
    bench = Bench(config, device)
    dtype = bench.precision.used
    pick(hardware.DTYPES, dtype, "precision.recipe with a roofline")
    squares, (sweep, moved) = hardware.squares(dtype, bench.device), hardware.triad(bench.device)
    forward = products(config.model, batch=config.global_batch // config.grad_accum_steps)
    group = {p: () if p.group == 1 else (p.group,)
             for p in (*forward, *(g for p in forward for g in p.backward()))}
    alone = {p: hardware.product((*g, p.M, p.K), (*g, p.K, p.N), dtype, bench.device)
             for p, g in group.items()}
    phases, others, begun = [], _others_seconds(), time.perf_counter()
    times = interleaved_seconds([*squares.values(), sweep, *alone.values(),
                                 lambda: phases.append(bench.update())], rounds=rounds)
    other_cpu_share = _other_cpu_share(others, begun)
    # the model's own products count too: one of their shapes may suit the machine better than a
    # square
    flops = [*(2 * n**3 for n in squares), 0, *(p.flops / p.calls for p in alone)]
    peaks = [max(work / seconds for work, seconds in zip(flops, row)) for row in zip(*times)]
    sweeps = [moved / seconds for seconds in times[len(squares)]]
    here = hardware.machine(str(bench.device))
    each = [replace(here, flops={dtype: peak}, bytes_per_second=sweep)
            for peak, sweep in zip(peaks, sweeps)]
    return RooflineMeasurement(
        machine=replace(here, flops={dtype: max(peaks)}, bytes_per_second=max(sweeps)),
        product_seconds={p: min(seconds) for p, seconds in zip(alone, times[len(squares) + 1:])},
        floors=tuple(step_floor(config, one, precision=dtype) for one in each),
        phases=tuple(phases[1:]), other_cpu_share=other_cpu_share,
        precision=bench.precision, attention=bench.attention, where=bench.where)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Updates of several models that took turns, so that a slow moment of the machine met all of
    them."""

    seconds: tuple[float, ...]          # of each model's update: the best of its turns
    other_cpu_share: float  # share of the CPUs' time that other processes took meanwhile
    precision: Choice                   # of the last model
    where: str


def turns(configs: Iterable[Config], *, device: str | None = None, rounds: int = 5) -> Turns:
    """Update the model of each config `rounds` times, one after the other."""
    benches = [Bench(config, device) for config in configs]
    others, begun = _others_seconds(), time.perf_counter()
    times = interleaved_seconds([bench.update for bench in benches], rounds=rounds)
    return Turns(seconds=tuple(map(min, times)), other_cpu_share=_other_cpu_share(others, begun),
                 precision=benches[-1].precision, where=f"{benches[-1].where}, the best of "
                 f"{rounds} turns")


def _other_cpu_share(others: float, begun: float) -> float:
    """Share of the CPUs' time since `begun` that was not this process's; `others` is what
    `_others_seconds` said then."""
    return (max(0.0, _others_seconds() - others)
            / ((time.perf_counter() - begun) * psutil.cpu_count()))


def _others_seconds() -> float:
    """CPU time that was not this process's, since the machine began; time stolen from a virtual
    machine included."""
    t = psutil.cpu_times()
    # guests are in user too
    unused = sum(getattr(t, name, 0) for name in ("idle", "iowait", "guest", "guest_nice"))
    return sum(t) - unused - time.process_time()


def refuse_compiled(config: Config) -> None:
    """Hooks and modes do not see into what is compiled. Raises ConfigError for what must be."""
    for key, row in asked(config).items():
        if row.needs_compile:
            raise ConfigError(f"memory.{key}={getattr(config.memory, key)} needs torch.compile, "
                              f"and what is compiled cannot be watched; compare peak_bytes of "
                              f"lpkit.train instead, or choose another memory.{key}")


class Bench:
    """A Training on random tokens: one update as a run makes it, or timed by phase."""

    def __init__(self, config: Config, device: str | None = None, *,
                 decisions: Decisions | None = None, more: tuple[Transform, ...] = ()):
        refuse_compiled(config)
        config = config.replace({"system.device": device or config.system.device,
                                 "system.compile": False})
        self.decisions = decisions or decide(config)
        self.device = self.decisions.device
        self.training = Training.build(config, data=RandomTokens(config, self.device),
                                       decisions=self.decisions, more=more)
        self.model, self.batch = self.training.model, self.training.batch(0)
        self.precision, self.attention = (self.decisions.choices[key]
                                          for key in ("precision", "attention"))
        self.how = f"{self.precision.used}, {self.attention.used} attention"

    @property
    def where(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "this CPU"
        return f"{name}, {self.how}"

    def update(self) -> tuple[float, float, float]:
        """Forward, backward and optimizer seconds; the clock waits for the device before and after
        each."""
        spent = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}

        @contextmanager
        def timed(phase: str) -> Iterator[None]:
            start = self._now()
            yield
            spent[phase] += self._now() - start

        self.training.update(0, phases=timed)
        return tuple(spent.values())

    def tracker(self) -> Tracker:
        return Tracker(self.model, self.training.optimizer, self.device,
                       place=self.training.state_placement)

    def train(self, tracker: Tracker | None = None) -> Tensor:
        """As the loop does it; the loss. `tracker` is told when the optimizer is at work."""
        at_work = {} if tracker is None else {"optimizer": tracker.optimizing}
        return self.training.update(0, phases=lambda phase: at_work.get(phase, nullcontext)()).loss

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
