"""What really happened: bytes by what they are for, seconds, and what this machine can do.

Bytes, seconds, FLOPs and bytes/s; nothing here is rounded. Ceilings are the best of several tries (what the machine
can do), step times are medians (what it did).
"""

import functools
import math
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lpkit.config import Config
from lpkit.contracts import Choice, pick
from lpkit.nn import attention
from lpkit.nn.init import INITS
from lpkit.nn.transformer import Transformer, cross_entropy
from lpkit.predict.flops import Product, products
from lpkit.predict.machines import Machine
from lpkit.predict.roofline import Floor, step_floor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def bf16_choice(device: torch.device | str, *, size: int = 512, rounds: int = 50) -> Choice:
    """Which dtype the matrix products of `precision.recipe=auto` take here, "bf16" or "fp32", and why.

    A GPU decides by its compute capability: tensor cores take bf16 from 8.0 (Ampere). A CPU decides by a race of
    (size, size) products, because some run bf16 in hardware and others emulate it at a tenth of the speed. The best of
    many short rounds counts: other processes may slow some, but none makes one faster. Under 0.3 s.
    """
    device = torch.device(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        used, why = (("bf16", "has bf16 tensor cores") if (major, minor) >= (8, 0)
                     else ("fp32", "has no bf16 tensor cores, they came with 8.0"))
        return Choice(asked="auto", used=used, why=f"compute capability {major}.{minor} {why}")
    operands = [torch.ones(size, size, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16)]
    fp32, bf16 = race([lambda x=x: x @ x for x in operands], rounds=rounds, within_seconds=0.25)
    ratio = min(fp32) / min(bf16)
    return Choice(asked="auto", used="bf16" if ratio > 1.1 else "fp32",
                  why=f"a {size} x {size} matrix product in bf16 ran at {ratio:.2f}x the speed of fp32 on this "
                      f"{device.type}, best of {len(fp32)} rounds; bf16 is taken above 1.1x")


def race(runners: list[Callable[[], object]], *, rounds: int, within_seconds: float = math.inf) -> list[list[float]]:
    """Seconds of each runner in each round, after one round that is thrown away.

    Rounds alternate between the runners, so that a slow moment of the machine meets all of them. No new round begins
    after `within_seconds`, but one is always measured.
    """
    seconds: list[list[float]] = [[] for _ in runners]
    begun = time.perf_counter()
    for i in range(rounds + 1):
        for runner, times in zip(runners, seconds):
            start = time.perf_counter()
            runner()
            times.append(time.perf_counter() - start)
        if i and time.perf_counter() - begun > within_seconds:
            break
    return [times[1:] for times in seconds]


def peak_bytes(device: torch.device | str) -> int:
    """The most memory held so far. Cheap enough for every step.

    On a GPU: the most that PyTorch's allocator had handed out to tensors since the process began or `reset_peak`.
    Elsewhere: the most that the whole process had in RAM (VmHWM on Linux), libraries and Python included, so it
    starts at some 300 MB and compares between runs, not with a sum of tensors.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():   # getrusage's maximum would include the process that started this one
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak(device: torch.device | str) -> bool:
    """Start `peak_bytes` again from what is held now. False where the system does not allow it: then it only rises."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text("5")   # "reset the peak resident set size", proc(5)
    except OSError:
        return False
    return True


def cpu_name() -> str:
    """As the system calls it."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines()
             if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def machine(device: str | None = None) -> Machine:
    """This machine as a row of the catalogue, with ceilings that were reached here: the best matrix product in each
    dtype, the best memory sweep. Under 3 s, and measured once per process. On a GPU a datasheet promises more."""
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = on.type == "cuda"
    flops, shapes = {}, {}
    for name in DTYPES:
        flops[name], shapes[name] = peak_flops(name, str(on))
    triad, swept = _triad(on)
    (seconds,) = race([triad], rounds=9, within_seconds=0.35)
    if gpu:
        title, extra = torch.cuda.get_device_name(on), {}
    else:
        title, extra = cpu_name(), {"threads": torch.get_num_threads()}
    return Machine(
        name="this", title=title, kind="gpu" if gpu else "cpu", memory_bytes=memory_bytes(on),
        bytes_per_second=swept / min(seconds), flops=flops, link_bytes_per_second=None, watts=None, price_per_hour=None,
        source=f"measured here, torch {torch.__version__}", price_source="unknown: pass price_per_hour",
        details={"product_shapes": shapes, "swept_bytes": swept, **extra})


@functools.cache
def peak_flops(dtype: str, device: str) -> tuple[float, tuple[int, int, int]]:
    """FLOP/s of the best square product in a dtype of DTYPES, and its shape. Under a second, once per process."""
    best, on = (0.0, (0, 0, 0)), torch.device(device)
    for n, square in _squares(dtype, on).items():
        (seconds,) = race([square], rounds=9, within_seconds=0.35)
        best = max(best, (2 * n**3 / min(seconds), (n, n, n)))
    return best


def _squares(dtype: str, device: torch.device) -> dict[int, Callable[[], object]]:
    """Products of two square matrices, by size."""
    sizes = (4096, 8192) if device.type == "cuda" else (1024, 2048)
    return {n: _product((n, n), (n, n), dtype, device) for n in sizes}


def _product(left: tuple[int, ...], right: tuple[int, ...], dtype: str, device: torch.device) -> Callable[[], object]:
    x, y = (torch.ones(shape, dtype=DTYPES[dtype], device=device) for shape in (left, right))
    return synchronised(lambda: x @ y, device)


def _triad(device: torch.device) -> tuple[Callable[[], object], int]:
    """STREAM's triad, a = b + s c, over arrays larger than a cache; and the bytes it moves: two read, one written."""
    a, b, c = torch.ones(3, 2**28 if device.type == "cuda" else 2**24, device=device)
    return synchronised(lambda: torch.add(b, c, alpha=3.0, out=a), device), 3 * a.nbytes


def memory_bytes(device: torch.device | str) -> int:
    """A GPU's memory; elsewhere RAM, or the container's share of it."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(path).read_text().strip() if Path(path).exists() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def synchronised(runner: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`runner`, ended only when the device is done."""
    if device.type != "cuda":
        return runner

    def run() -> None:
        runner()
        torch.cuda.synchronize(device)

    return run


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that autograd kept for the backward pass, each storage once, under the operation that kept it first."""

    operations: dict[str, int]    # by module, block numbers left out: norm1, attention.qkv, ..., loss
    weight_copy_bytes: int        # copies of the weights in another dtype, made by autocast

    @property
    def total_bytes(self) -> int:
        """Without the weight copies."""
        return sum(self.operations.values())


def saved_bytes(model: nn.Module, step: Callable[[], Tensor], *, ignore: Iterable[Tensor] = ()) -> Saved:
    """Run `step`, which returns a loss, and count what autograd keeps of it. Nothing is changed or slowed afterwards.

    What is kept outside any module is the loss's. The model's parameters, and the tensors in `ignore`, exist anyway.
    """
    exists = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *ignore)}
    copies, inside, operations, copy_bytes, held = _WeightCopies(model), ["loss"], {}, 0, []

    def pack(t: Tensor) -> Tensor:
        nonlocal copy_bytes
        storage = t.untyped_storage()
        if storage.data_ptr() not in exists:
            exists.add(storage.data_ptr())
            held.append(storage)   # so that no address is used twice
            if storage.data_ptr() in copies.made:
                copy_bytes += storage.nbytes()
            else:
                operations[inside[-1]] = operations.get(inside[-1], 0) + storage.nbytes()
        return t

    hooks = []
    for name, module in model.named_modules():
        name = ".".join(part for part in name.split(".") if part != "blocks" and not part.isdigit())
        hooks += [module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)),
                  module.register_forward_hook(lambda *_: (inside.pop(), None)[1])]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), copies:
            loss = step()
    finally:
        for hook in hooks:
            hook.remove()
    if not loss.requires_grad:
        raise ValueError("step() returned something that backward cannot start from")
    return Saved(operations=operations, weight_copy_bytes=copy_bytes)


class _WeightCopies(TorchDispatchMode):
    """Remembers the storages of parameters cast to another dtype."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.made, self.held = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self.parameters:
            self.made.add(out.untyped_storage().data_ptr())
            self.held.append(out)
        return out


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
    """Build the model of `config`, update it `rounds` times on random tokens, and count and time what happens."""
    bench = _Bench(config, device)
    bench.update()   # the optimizer makes its state in the first one
    saved = saved_bytes(bench.model, lambda: bench.loss(*(t.clone() for t in bench.pieces[0])))
    bench.loss(*bench.pieces[0]).backward()
    held = {
        "weights": sum(p.nbytes for p in bench.model.parameters()),
        "optimizer state": sum(t.nbytes for state in bench.optimizer.state.values() for t in state.values()),
        "gradients": sum(p.grad.nbytes for p in bench.model.parameters()),
        "weight copies": saved.weight_copy_bytes,
        "activations": saved.total_bytes - saved.operations["loss"],
        "logits and loss": saved.operations["loss"],
    }
    bench.optimizer.zero_grad(set_to_none=True)
    peak = _peak_of_tensors(bench.update, bench.device, before=held["weights"] + held["optimizer state"])
    forward, backward, optimize = map(statistics.median, zip(*(bench.update() for _ in range(rounds))))
    return StepMeasurement(
        bytes={name: n for name, n in held.items() if n}, operations=saved.operations, peak_bytes=peak,
        forward_seconds=forward, backward_seconds=backward, optimizer_seconds=optimize, tokens=config.tokens_per_step,
        precision=bench.precision, attention=bench.attention, where=bench.where)


@dataclass(frozen=True, kw_only=True)
class RooflineMeasurement:
    """A step beside the ceilings of the machine, measured in turns. The machine's speed may change meanwhile, so each
    round has its own ceilings and its own floor; shown are medians over the rounds, except where it says best."""

    machine: Machine                    # best ceilings
    product_seconds: dict[Product, float]   # best time of one call, forward and backward, each alone
    floors: tuple[Floor, ...]           # by round
    phases: tuple[tuple[float, float, float], ...]   # forward, backward, optimizer seconds by round
    disturbed: float                    # share of the CPUs' time that other processes took meanwhile
    precision: Choice
    attention: Choice
    where: str

    @property
    def floor_seconds(self) -> dict[str, float]:
        return self._medians([(f.forward_seconds, f.backward_seconds, f.optimizer_seconds) for f in self.floors])

    @property
    def seconds(self) -> dict[str, float]:
        return self._medians(self.phases)

    @property
    def over_floor(self) -> list[float]:
        """How many times its floor the step of each round took."""
        return [sum(phases) / floor.step_seconds for phases, floor in zip(self.phases, self.floors)]

    @property
    def product_rates(self) -> dict[Product, float]:
        """FLOP/s of each product."""
        return {p: p.flops / p.calls / seconds for p, seconds in self.product_seconds.items()}

    @staticmethod
    def _medians(rounds: Iterable[tuple[float, float, float]]) -> dict[str, float]:
        rounds = list(rounds)
        medians = dict(zip(("forward", "backward", "optimizer"), map(statistics.median, zip(*rounds))))
        return {**medians, "step": statistics.median(map(sum, rounds))}


def roofline(config: Config, *, device: str | None = None, rounds: int = 7) -> RooflineMeasurement:
    """Take turns: the ceilings, each product of the model alone, one update of the whole model."""
    bench = _Bench(config, device)
    dtype = bench.precision.used
    squares, (triad, moved) = _squares(dtype, bench.device), _triad(bench.device)
    forward = products(config.model, batch=config.batch // config.accumulate)
    group = {p: () if p.group == 1 else (p.group,) for p in (*forward, *(g for p in forward for g in p.backward()))}
    alone = {p: _product((*g, p.M, p.K), (*g, p.K, p.N), dtype, bench.device) for p, g in group.items()}
    phases, others, begun = [], _others_seconds(), time.perf_counter()
    times = race([*squares.values(), triad, *alone.values(), lambda: phases.append(bench.update())], rounds=rounds)
    available = (time.perf_counter() - begun) * psutil.cpu_count()
    disturbed = max(0.0, _others_seconds() - others) / available
    # the model's own products count too: one of their shapes may suit the machine better than a square
    flops = [*(2 * n**3 for n in squares), 0, *(p.flops / p.calls for p in alone)]
    peaks = [max(work / seconds for work, seconds in zip(flops, row)) for row in zip(*times)]
    sweeps = [moved / seconds for seconds in times[len(squares)]]
    here = machine(str(bench.device))
    each = [replace(here, flops={dtype: peak}, bytes_per_second=sweep) for peak, sweep in zip(peaks, sweeps)]
    return RooflineMeasurement(
        machine=replace(here, flops={dtype: max(peaks)}, bytes_per_second=max(sweeps)),
        product_seconds={p: min(seconds) for p, seconds in zip(alone, times[len(squares) + 1:])},
        floors=tuple(step_floor(config, one, precision=dtype) for one in each), phases=tuple(phases[1:]),
        disturbed=disturbed,
        precision=bench.precision, attention=bench.attention, where=bench.where)


def _others_seconds() -> float:
    """CPU time that was not this process's, since the machine began; time stolen from a virtual machine included."""
    t = psutil.cpu_times()
    unused = sum(getattr(t, name, 0) for name in ("idle", "iowait", "guest", "guest_nice"))   # guests are in user too
    return sum(t) - unused - time.process_time()


class _Bench:
    """A model, an optimizer (PyTorch's fused AdamW) and random tokens: one update, timed by phase.

    Raises ConfigError when the config asks for a recipe that is not timed here.
    """

    def __init__(self, config: Config, device: str | None):
        self.device = on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        asked = config.precision.recipe
        self.precision = bf16_choice(on) if asked == "auto" else Choice(asked=asked, used=asked, why="asked for")
        self.dtype = pick(DTYPES, self.precision.used, "precision.recipe to measure")
        self.attention = attention.choose(config.model.attention, device_type=on.type, recipe=self.precision.used,
                                          context=config.model.context)
        torch.manual_seed(config.seed)
        self.model = Transformer(config.model, pick(attention.BACKENDS, self.attention.used, "model.attention"))
        pick(INITS, config.model.init, "model.init")(self.model)
        self.model.to(on)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.optimizer.lr, fused=True)
        x, y = (torch.randint(config.model.vocab, (config.batch, config.model.context), device=on) for _ in range(2))
        self.pieces = list(zip(x.chunk(config.accumulate), y.chunk(config.accumulate)))
        name = torch.cuda.get_device_name(on) if on.type == "cuda" else "this CPU"
        self.where = f"{name}, {self.precision.used}, {self.attention.used} attention"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logits = self.model(x)
        return cross_entropy(logits, y) / len(self.pieces)

    def update(self) -> tuple[float, float, float]:
        """Forward, backward and optimizer seconds."""
        forward = backward = 0.0
        for piece in self.pieces:
            start = self._now()
            loss = self.loss(*piece)
            middle = self._now()
            loss.backward()
            forward, backward = forward + middle - start, backward + self._now() - middle
        start = self._now()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return forward, backward, self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _peak_of_tensors(update: Callable[[], object], device: torch.device, *, before: int) -> int:
    """The most bytes that tensors held while `update` ran. `before` is held from outside it."""
    if device.type == "cuda":
        reset_peak(device)
        update()
        return peak_bytes(device)
    with _LiveBytes() as live:
        update()
    return before + live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make, from their making to their end. What a kernel takes and gives back
    inside one operation is not seen."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor) and (at := t.untyped_storage().data_ptr()) not in self.known | given:
                storage = t.untyped_storage()
                self.known.add(at)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, at, storage.nbytes()).atexit = False
        return out

    def _gone(self, at: int, nbytes: int) -> None:
        self.known.discard(at)
        self.now -= nbytes
