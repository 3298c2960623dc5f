"""Measurements of a step: bytes by row, and seconds.

Units: bytes, seconds, FLOPs and bytes/s; no number is rounded. A step's time is the median of
several steps. A ceiling of the machine is the best of several tries (`lpkit.hardware`).
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

from lpkit import hardware
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.execution.compiled import OFF
from lpkit.measure.tracking import Footprint, MessageCount, Tracker, allocator_counts
from lpkit.memory.rows import asked
from lpkit.parallel.processes import Processes, ranks_from_environment
from lpkit.parallel.ranks import Ranks
from lpkit.predict import evidence
from lpkit.predict.compare import Comparison
from lpkit.predict.flops import products
from lpkit.predict.messages import Message
from lpkit.predict.time import step_time
from lpkit.timing import Watch, interleaved_seconds
from lpkit.training.build import Decisions, decide
from lpkit.training.formulas import refuse_what_cannot_fit
from lpkit.training.graphs import ON
from lpkit.training.training import RandomTokens, Training


def memory(config: Config, *, device: str | None = None,
           ranks: Ranks | None = None) -> Footprint:
    """Return all live bytes, by row, of one update as lpkit.train runs it for `config`. It is the
    second update, because the first update creates the optimizer's state. Each of the `ranks` gets
    the result of its own device.

    On a GPU, the result also has the bytes that the allocator counted, which include cuBLAS's
    workspace.
    """
    return Bench(config, device, ranks=ranks).footprint()


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """The measured seconds of one update, by the rows of `lpkit.predict.time`. Matmuls of the same
    sizes share a row."""

    # medians over the rounds; the row "the rest" is the time outside of PyTorch's operations
    rows: dict[str, float]
    step_seconds: float         # seconds by the clock, without the profiler
    where: str                  # device and method


OTHER, REST = "norms, activations, loss", "the rest"
PRODUCTS = {"aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm"}
# row of an operation by the start of its name; all other operations are pointwise work
BY_OPERATION = {
    "aten::_scaled_dot_product": "attention", "aten::_flash_attention": "attention",
    "aten::_efficient_attention": "attention", "aten::_cudnn_attention": "attention",
    "aten::bmm": "attention", "aten::baddbmm": "attention", "lpkit::causal": "attention",
    "lpkit::flash_attention": "attention",
    "aten::_fused_adam": "optimizer", "aten::_foreach": "optimizer",
}


def seconds(config: Config, *, rounds: int = 3) -> Seconds:
    """Measure an update of `config` with PyTorch's profiler: the time of each operation without the
    operations that it calls. A matmul is assigned to its Linear by its sizes. The result has the
    medians over `rounds` updates.

    The profiler slows a step, so the rows are scaled to add up to the time without the profiler.
    Raises ConfigError for a config that cannot be trained or needs torch.compile.
    """
    bench = Bench(config)
    bench.train()
    clock = statistics.median([bench.seconds() for _ in range(rounds)])
    each: list[Counter[str]] = []
    for _ in range(rounds):
        with profile(record_shapes=True) as profiler:
            whole = bench.seconds()
        each.append(_rows_of(profiler, config, bench.device, whole))
    rows = {name: statistics.median([rows[name] for rows in each]) for name in set().union(*each)}
    scale = clock / sum(rows.values())
    rows = {name: scale * rows[name] for name in sorted(rows, key=rows.get, reverse=True)}
    return Seconds(rows=rows, step_seconds=clock,
                   where=f"{bench.where}, PyTorch's profiler, median of {rounds}")


def _rows_of(profiler: profile, config: Config, device: torch.device,
             whole: float) -> Counter[str]:
    """Return the seconds by row of a profiled step that took `whole` seconds."""
    same_sizes = _products_by_sizes(config)
    own_time = attrgetter("self_cpu_time_total")
    if device.type == "cuda":
        own_time = attrgetter("self_device_time_total")
    rows: Counter[str] = Counter()
    for event in profiler.key_averages(group_by_input_shape=True):
        spent = own_time(event) / 1e6
        name = next((row for start, row in BY_OPERATION.items() if event.key.startswith(start)),
                    OTHER if event.key.startswith("aten::") else "")
        if not (spent and name):
            continue
        if event.key in PRODUCTS:
            shapes = [shape for shape in event.input_shapes if len(shape) == 2]
            # In aten::addmm the bias is before the operands; in other operations scales are after
            # them.
            (M, K), (_, N) = shapes[-2:] if event.key == "aten::addmm" else shapes[:2]
            # FP4 packs two numbers in a byte, so the real K may be 2 * K
            names = (same_sizes.get(tuple(sorted((M, k, N)))) for k in (K, 2 * K))
            name = ", ".join(next(filter(None, names), [OTHER]))
        rows[name] += spent
    rows[REST] = max(0.0, whole - rows.total())
    return rows


def _products_by_sizes(config: Config) -> dict[tuple[int, ...], list[str]]:
    """Return the names of the Linears by the sorted (M, N, K) of their matmul. The two gradients of
    a matmul have the same three sizes in another order."""
    names: dict[tuple[int, ...], list[str]] = {}
    for p in products(config.model, batch=config.micro_batch):
        if not p.pairs:
            names.setdefault(tuple(sorted((p.M, p.N, p.K))), []).append(p.name)
    return names


def reconcile_seconds(config: Config, *, rounds: int = 3) -> Comparison:
    """Compare the predicted seconds of an update at this machine's ceilings with a profiled update,
    row by row. Raises ConfigError for a config that cannot be measured, and for a recipe that this
    machine emulates, because it has no ceiling."""
    predicted, measured = step_time(config, hardware.machine()), seconds(config, rounds=rounds)
    label = {}
    for names in _products_by_sizes(config).values():
        label |= dict.fromkeys(names, ", ".join(names))
    formula: Counter[str] = Counter()
    for row in predicted.rows:
        formula[label.get(row.name, row.name)] += row.seconds
    return Comparison.of_rows(formula, measured.rows, unit="s", where=measured.where)


def take_turns(runners: Sequence[Callable[[], object]], rounds: int,
               watch: Watch) -> tuple[list[list[float]], float]:
    """Call the runners in turn: one round that is not measured, then `rounds` measured rounds.
    Return [seconds of each measured round] for each runner, and the share (0 to 1) of this
    process's cores that other processes used, the first round included. `watch` wraps the iterator
    of all rounds, for example in a progress bar."""
    share = hardware.others()
    return interleaved_seconds(runners, rounds=rounds, watch=watch), share()


def row(config: Config, command: str) -> dict[str, Any]:
    """Measure this machine, at the matmul shapes of `config`, and return it as a row for
    `--machine`, in the form that `machines.from_dict` reads. Speeds are the best of several tries,
    because other processes slow some tries. `command`: the command line, which the row names as its
    source. Raises ConfigError for a config of several devices, and if a run of it cannot start."""
    ranks_from_environment(config)
    decisions = decide(config)
    refuse_what_cannot_fit(config, decisions)
    device = decisions.device
    used = {name: choice.used for name, choice in decisions.choices.items()}
    training = Training.build(config, data=RandomTokens(config, device), decisions=decisions)
    update = hardware.synchronised(lambda: training.update(0), device)
    (times,), others = take_turns([update], 9, iter)
    training = update = None        # free the memory of the training before the matmuls
    on, rates, ranks = hardware.machine(str(device)), _rates(config, device), 1
    best = {dtype: max(on.flops[dtype], *each.values()) for dtype, each in rates.items()}
    if device.type == "cuda":       # the catalogue has the links and the price of this GPU model
        on = replace(evidence.catalogued(on.title) or on, title=on.title,
                     memory_bytes=on.memory_bytes, bytes_per_second=on.bytes_per_second)
        ranks = torch.cuda.device_count()
    if ranks > 1:
        with Processes("lpkit.measure.ranks:run", {"program": "all-gather", "backend": "nccl"},
                       world=ranks) as running:
            on = replace(on, link_bytes_per_second=2 * min(running.wait()), devices_per_node=ranks)
    config = config.replace({
        "precision.recipe": used["precision"], "system.threads": used["threads"],
        "system.attention": used["attention"], "system.cuda_graphs": used["cuda_graphs"] == ON,
        "system.compile": used["compile"] != OFF and used["compile"]})
    shares = {dtype: [[*shape, round(rate / best[dtype], 4)] for shape, rate in each.items()]
              for dtype, each in rates.items()}
    measured = {"device": on.title, "torch": str(torch.__version__), "command": command,
                "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "ranks": ranks,
                "others": others, "products": shares, "seconds": min(times),
                "config": config.to_dict()}
    own = {key: value for key, value in asdict(on).items()
           if value and value != "this" and key not in ("details", "flops")}
    return {**own, "source": f"measured by `{command}`", "measured": measured,
            "flops": {**on.flops, **best}}


def _rates(config: Config, device: torch.device) -> dict[str, dict[tuple[int, ...], float]]:
    """Measure the FLOP/s of the matmul of each Linear and of its two gradients, by dtype and
    (M, N, K). Each shape is measured in three rounds, because other processes may slow one of the
    rounds."""
    shapes = [shape for p in products(config.model, batch=config.micro_batch) if not p.pairs
              for shape in p.shapes.values()]
    rates: dict[str, dict[tuple[int, ...], float]] = {}
    for M, N, K in 3 * sorted(set(shapes)):
        for dtype in (*hardware.DTYPES, *hardware.low_formats(device)):
            if dtype in hardware.LOW and (M % 16 or N % 16 or K % 16):
                continue        # low-precision kernels need multiples of 16
            tries = hardware.ways((M, K), (K, N), dtype, device)
            least = min(map(min, interleaved_seconds(tries, rounds=9, within_seconds=0.1)))
            each = rates.setdefault(dtype, {})
            each[M, N, K] = max(each.get((M, N, K), 0.0), 2 * M * N * K / least)
    return rates


def refuse_compiled(config: Config) -> None:
    """Raise ConfigError if the config has a technique that needs torch.compile, because the hooks
    that measure memory do not see compiled code."""
    for key, row in asked(config).items():
        if row.needs_compile:
            raise ConfigError(f"memory.{key}={getattr(config.memory, key)} needs torch.compile, "
                              f"and a compiled update cannot be watched; compare peak_bytes of "
                              f"lpkit.train instead, or choose another memory.{key}")


class Bench:
    """A Training on random tokens, to measure its updates. They equal the updates of a run of
    `config` without torch.compile and CUDA graphs. `decisions`: None: as a run decides; a trace has
    decisions of its own, and allocates nothing."""

    def __init__(self, config: Config, device: str | None = None, *,
                 decisions: Decisions | None = None, ranks: Ranks | None = None):
        refuse_compiled(config)
        config = config.replace({"system.device": device or config.system.device,
                                 "system.compile": False, "system.cuda_graphs": False})
        if decisions is None:
            decisions = decide(config, ranks=ranks)
            refuse_what_cannot_fit(config, decisions, ranks.local_world if ranks else 1)
        self.decisions = decisions
        self.device = self.decisions.device
        self.training = Training.build(config, data=RandomTokens(config, self.device),
                                       decisions=self.decisions, ranks=ranks)
        self.model, self.batch = self.training.model, self.training.batch(0)
        self.precision = self.decisions.choices["precision"]
        self.attention = self.decisions.choices["attention"]
        self.how = f"{self.precision.used}, {self.attention.used} attention"

    @property
    def where(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "this CPU"
        return f"{name}, {self.how}"

    def train(self, tracker: Tracker | None = None) -> Tensor:
        """Run one update as the training loop does; return the loss. The `tracker` counts the
        optimizer's part of the update as its phase "optimizer"."""
        at_work = {} if tracker is None else {"optimizer": tracker.optimizing}
        return self.training.update(0, phases=lambda phase: at_work.get(phase, nullcontext)()).loss

    def seconds(self) -> float:
        """Return the seconds of one update, until the device has finished its work."""
        start = hardware.now(self.device)
        self.train()
        return hardware.now(self.device) - start

    def tracker(self) -> Tracker:
        """Return a Tracker for this training; use it as a context manager."""
        return Tracker(self.model, self.training.optimizer, self.device,
                       place=self.training.state_placement)

    def footprint(self) -> Footprint:
        """Return the footprint of the second update, as `memory` does."""
        tracker, messages = self.watched()
        return tracker.footprint(chosen=self.decisions.choices, where=self.where,
                                 messages=messages, **allocator_counts(self.device))

    def watched(self) -> tuple[Tracker, Counter[Message]]:
        """Run two updates and watch the second one. Return its tracker, and the count of its
        messages to other ranks."""
        self.train()
        if self.device.type == "cuda" and torch.cuda.is_available():
            hardware.reset_peak(self.device)
        with self.tracker() as tracker, MessageCount() as count:
            tracker.hold(self.batch.tensors, "batch")
            self.train(tracker)
        return tracker, count.sent
