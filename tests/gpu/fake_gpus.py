"""GPUs that are not there: torch.cuda's devices, streams, events and pinned memory, over a CPU's
tensors.

    with gpus(2) as fake:
        x = torch.randn(8, device="cuda")       # x.device is cuda:0, x.is_cuda; its numbers are the
        CPU's fake.races                              # what no stream waited for

Numbers are computed at once. What might have happened on a GPU is kept beside them: each stream and
the host has a vector clock, which events, waits and synchronisation carry on. What reads or writes
memory that another line wrote or reads, and has not waited for, is a race, and raises; so does
memory that is given back while a stream that nobody recorded may still use it, at the end. No event
has been reached before somebody waited for it: the slowest GPU there is. Operations take tensors of
one device, as CUDA's do.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lpkit import hardware

# CUDA's, for the device
WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select",
         "aten::_unique2")
# take indices of a CPU
MIXES = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
WIDE = ("aten::mm", "aten::bmm")        # of 16 bits, whose result is float32: CUDA's alone
EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
H100 = {"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "total_memory": 80 * 2**30,
        "multi_processor_count": 132, "uuid": "fake"}


class RaceError(AssertionError):
    """What a GPU might have done in another order."""


class Line:
    """What happens in order: a stream, or the host. `clock`: how far it knows each line to be."""

    def __init__(self, name: str):
        self.name, self.clock = name, Counter()

    def join(self, clock: Counter) -> None:
        for line, at in list(clock.items()):
            self.clock[line] = max(self.clock[line], at)


class Stream(Line):
    fake: Fake

    def __init__(self, device: Any = None, priority: int = 0):
        self.index = self.fake.index(device)
        super().__init__(f"stream {next(self.fake.numbers)} of cuda:{self.index}")
        self.device = torch.device("cuda", self.index)
        self.fake.streams.append(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.fake.Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.join(event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self.join(stream.clock)

    def synchronize(self) -> None:
        self.fake.host.join(self.clock)

    def query(self) -> bool:
        return all(self.fake.host.clock[line] >= at for line, at in self.clock.items())


class Event:
    fake: Fake

    def __init__(self, enable_timing: bool = False, blocking: bool = False,
                 interprocess: bool = False):
        self.timing, self.clock, self.at = enable_timing, Counter(), None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.fake.current()
        stream.join(self.fake.host.clock)
        self.clock, self.at = Counter(stream.clock), stream.clock.total()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.fake.current()).wait_event(self)

    def query(self) -> bool:
        return all(self.fake.host.clock[line] >= at for line, at in self.clock.items())

    def synchronize(self) -> None:
        self.fake.host.join(self.clock)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, one for each operation that the end knows of and the beginning does not. As
        CUDA's, it wants both to be over."""
        if not (self.timing and end.timing and self.query() and end.query()
                and None not in (self.at, end.at)):
            raise RuntimeError("Both events must be recorded, with enable_timing, and completed "
                               "before calculating elapsed time.")
        return float(end.at - self.at)


@dataclass(eq=False)
class Memory:
    """Of a storage. `device` None: the host's. `born`: the stream that was current when it was
    made, whose turn it is to use it again."""

    ref: weakref.ref
    device: int | None = None
    pinned: bool = False
    born: Stream | None = None
    wrote: tuple[Line, int] | None = None
    reads: Counter = field(default_factory=Counter)
    recorded: set = field(default_factory=set)

    @property
    def uses(self) -> list[tuple[Line, int]]:
        return [*self.reads.items(), *([self.wrote] if self.wrote else [])]


class Fake:
    def __init__(self, count: int, properties: dict[str, Any]):
        self.count, self.properties = count, properties
        self.host, self.streams, self.memory, self.races = Line("the host"), [], {}, []
        self.numbers, self.lock, self.local, self.current_devices = iter(
            range(10**9)), threading.RLock(), threading.local(), []
        self.Stream = type("Stream", (Stream,), {"fake": self})
        self.Event = type("Event", (Event,), {"fake": self})
        self.default = [self.Stream(index) for index in range(count)]

    # ---- what is current: of a thread, and of a device in it

    def index(self, device: Any = None) -> int:
        if isinstance(device, int):
            index = device
        else:
            index = None if device is None else torch.device(device).index
        index = self.current_device() if index is None else index
        if index >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal, {index} of {self.count}")
        return index

    def current_device(self) -> int:
        return getattr(self.local, "device", 0)

    def set_device(self, device: Any) -> None:
        self.local.device = self.index(device)
        self.current_devices.append((threading.current_thread().name, self.local.device))

    def current(self, device: Any = None) -> Stream:
        index = self.index(device)
        return getattr(self.local, "streams", {}).get(index, self.default[index])

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before, device = dict(getattr(self.local, "streams", {})), self.current_device()
        self.local.streams, self.local.device = before | {stream.index: stream}, stream.index
        try:
            yield
        finally:
            self.local.streams, self.local.device = before, device

    def synchronize(self, device: Any = None) -> None:
        index = self.index(device)
        for stream in self.streams:
            if stream.index == index:
                self.host.join(stream.clock)

    # ---- memory, and who may use it

    def of(self, t: Tensor, make: bool = False) -> Memory | None:
        with torch._C.DisableTorchFunction():
            if t.layout != torch.strided:
                return None
            storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.memory and make:
            self.memory[key] = Memory(weakref.ref(storage, partial(self.gone, key)))
        return self.memory.get(key)

    def gone(self, key: int, ref: Any = None) -> None:
        with self.lock:
            memory = self.memory.pop(key, None)
            if memory is None or memory.device is None:
                return
            for line, at in memory.uses:
                if (line not in (memory.born, self.host) and line not in memory.recorded
                    and max(memory.born.clock[line], self.host.clock[line]) < at):
                    self.races.append(f"memory of {memory.born.name} is given back while "
                                      f"{line.name} may still use it")

    def device_of(self, t: Tensor) -> torch.device:
        memory = self.of(t)
        if memory is not None and memory.device is not None:
            return torch.device("cuda", memory.device)
        with torch._C.DisableTorchFunction():
            return t.device

    def touch(self, line: Line, reads: list[Memory], writes: list[Memory], what: str) -> None:
        with self.lock:
            line.clock[line] += 1
            now, race = line.clock[line], ""
            for memory in (*reads, *writes):
                if memory.wrote and line.clock[memory.wrote[0]] < memory.wrote[1]:
                    race = (race or f"{what} on {line.name} uses what {memory.wrote[0].name} "
                                    f"wrote, and has not waited for it")
            for memory in writes:
                for other, at in memory.reads.items():
                    if line.clock[other] < at:
                        race = (race or f"{what} on {line.name} writes what {other.name} still "
                                        f"reads")
            for memory in reads:
                memory.reads[line] = now
            for memory in writes:
                memory.wrote, memory.reads = (line, now), Counter()
        if race:
            self.races.append(race)
            raise RaceError(race)

    def launch(self, stream: Stream, reads: list[Memory], writes: list[Memory], what: str) -> None:
        stream.join(self.host.clock)        # the host did before what it did before
        self.touch(stream, reads, writes, what)

    def place(self, t: Tensor, device: int | None, pinned: bool = False, what: str = "") -> Tensor:
        """What was just made lies there."""
        memory = self.of(t, make=True)
        memory.device, memory.pinned, memory.wrote, memory.reads = device, pinned, None, Counter()
        memory.born = None if device is None else self.current(device)
        if what and what not in EMPTY and device is not None:
            self.launch(memory.born, [], [memory], what)
        return t

    def transfer(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        to, of = self.of(target, make=True), self.of(source, make=True)
        if None not in (to.device, of.device):      # each waits for the other's current stream
            here, there = self.current(of.device), self.current(to.device)
            here.join(there.clock)
            self.launch(here, [of], [to], "a copy")
            there.join(here.clock)
            return
        on_host = of if of.device is None else to
        stream = self.current(to.device if of.device is None else of.device)
        if on_host.pinned:
            self.launch(stream, [of], [to], "a copy")
            if not non_blocking:
                self.host.join(stream.clock)
        elif on_host is of:
            self.touch(self.host, [of], [], "a copy")
            self.launch(stream, [], [to], "a copy")
        else:
            self.launch(stream, [of], [], "a copy")
            self.host.join(stream.clock)
            self.touch(self.host, [], [to], "a copy")

    def allocated(self, device: Any = None) -> int:
        index, storages = self.index(device), [(memory.ref(), memory.device)
            for memory in list(self.memory.values())]
        return sum(storage.nbytes() for storage, on in storages
                   if storage is not None and on == index)

    @contextmanager
    def modes(self) -> Iterator[None]:
        with ByName(self), ByOperation(self):
            yield


    def seen(self, hook: Any) -> Any:
        """A hook that an operation calls from within: the mode is off there."""
        def call(x: Any) -> Any:
            if any(isinstance(mode, ByName) for mode in _get_current_function_mode_stack()):
                return hook(x)
            with ByName(self):
                return hook(x)

        return call


class ByOperation(TorchDispatchMode):
    """What PyTorch computes, also in backward: which memory it reads and writes, on which
    stream."""

    def __init__(self, fake: Fake):
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        fake, kwargs, name = self.fake, kwargs or {}, func._schema.name
        with torch._C.DisableTorchFunction():
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if any(t.is_meta for t in given):
                return func(*args, **kwargs)
            of = {id(t): fake.of(t) for t in given}
            devices = {memory.device for memory in of.values() if memory is not None
                       and memory.device is not None}
            away = [t for t in given if t.dim() and (of[id(t)] is None or of[id(t)].device is None)]
            quiet = getattr(fake.local, "quiet", False)
            if (not quiet and (len(devices) > 1
                               or (devices and away and name not in (*MIXES, "aten::copy_")))):
                raise RuntimeError(f"Expected all tensors to be on the same device, but {name} was "
                                   f"given {len(devices)} GPUs and "
                                   f"{len(away)} tensors of a CPU")
            if func._overloadname == "dtype" and name in WIDE:
                a, b, dtype = args
                result = func.overloadpacket(a.to(dtype), b.to(dtype))
            else:
                result = func(*args, **kwargs)
            outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if quiet:
            return result
        if name == "aten::copy_" and devices and fake.device_of(args[0]) != fake.device_of(args[1]):
            fake.transfer(args[0], args[1], args[2] if len(args) > 2
                          else kwargs.get("non_blocking", False))
            return result
        reads, writes = [], []
        for argument, value in zip(func._schema.arguments, args):
            for t in tree_leaves(value):
                if isinstance(t, Tensor) and of.get(id(t)) is not None:
                    (writes if argument.alias_info is not None and argument.alias_info.is_write
                     else reads).append(of[id(t)])
        reads += [of[id(t)] for t in tree_leaves(kwargs) if isinstance(t, Tensor)
                  and of.get(id(t)) is not None]
        if not devices:
            if (reads or writes) and not func.is_view:
                fake.touch(fake.host, reads, writes, name)
            return result
        stream = fake.current(*devices)
        for t in outputs:
            if fake.of(t) is None:
                memory = fake.of(t, make=True)
                memory.device, memory.born = stream.index, stream
                if func._schema.name.removeprefix("aten::") not in EMPTY:
                    writes.append(memory)
        if not func.is_view and name.removeprefix("aten::") not in EMPTY:
            fake.launch(stream, reads, writes, name)
        if name in WAITS:
            fake.host.join(stream.clock)
        return result


class ByName(TorchFunctionMode):
    """What Python asks for by the word: devices, pinned memory, streams."""

    def __init__(self, fake: Fake):
        super().__init__()
        self.fake = fake
        of, device_of = torch.Tensor, fake.device_of
        self.special = {
            of.device.__get__: device_of, of.is_cuda.__get__: lambda t: device_of(t).type == "cuda",
            of.is_cpu.__get__: lambda t: device_of(t).type == "cpu",
            of.get_device: lambda t: -1 if device_of(t).index is None else device_of(t).index,
            of.to: self.to, of.cuda: lambda t, device=None, non_blocking=False: self.to(t,
                device or "cuda", non_blocking=non_blocking),
            of.cpu: lambda t: self.to(t, "cpu"),
            of.is_pinned: lambda t, *_: bool((m := fake.of(t)) and m.pinned),
            of.pin_memory: lambda t, *_: fake.place(t.clone(), None, True), of.numpy: self.numpy,
            of.tolist: self.tolist,
            # safetensors reads there
            of.data_ptr: lambda t: (t if device_of(t).type == "cuda" else self._read(t)).data_ptr()}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        try:
            special = self.special.get(func)
        except TypeError:
            special = None
        if special is not None:
            return special(*args, **kwargs)
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        if isinstance(device, int):
            device = torch.device("cuda", device)
        if not pinned and (device is None or torch.device(device).type not in ("cpu", "cuda")):
            return func(*args, **kwargs)
        on_gpu = device is not None and torch.device(device).type == "cuda"
        index = self.fake.index(device) if on_gpu else None
        if device is not None:
            kwargs["device"] = "cpu"
        with self.quiet():
            result = func(*args, **kwargs)
        return (self.fake.place(result, index, pinned, func.__name__) if isinstance(result, Tensor)
                else result)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        before, self.fake.local.quiet = getattr(self.fake.local, "quiet", False), True
        try:
            yield
        finally:
            self.fake.local.quiet = before

    def to(self, t: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        like = next((self.fake.device_of(arg) for arg in args if isinstance(arg, Tensor)), None)
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        device, more = like or device, {} if form is None else {"memory_format": form}
        if device is not None and device.type not in ("cpu", "cuda"):
            return t.to(*args, copy=copy, **kwargs)
        here = self.fake.device_of(t).index
        target = (here if device is None else None if device.type == "cpu"
                  else self.fake.index(device))
        if here == target:
            return t.to(dtype=dtype or t.dtype, copy=copy, **more)
        with self.quiet():
            result = t.to(dtype=dtype or t.dtype, copy=True, **more)
        # PyTorch pins what nobody waits for
        self.fake.place(result, target, target is None and non_blocking)
        self.fake.transfer(result, t, non_blocking)
        return result

    def numpy(self, t: Tensor, **kwargs: Any) -> Any:
        if self.fake.device_of(t).type == "cuda":
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to "
                            "copy the tensor to host memory first.")
        return self._read(t).numpy(**kwargs)

    def tolist(self, t: Tensor) -> list:
        return self._read(t.cpu() if self.fake.device_of(t).type == "cpu"
                          else self.to(t, "cpu")).tolist()

    def _read(self, t: Tensor) -> Tensor:
        if (memory := self.fake.of(t)) is not None:
            self.fake.touch(self.fake.host, [memory], [], "a look")
        return t


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


class Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any):
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


@contextmanager
def gpus(count: int = 1, **properties: Any) -> Iterator[Fake]:
    """Inside, PyTorch sees `count` GPUs of these properties. Threads that begin inside see them,
    too. Raises RaceError at the end for memory that was given back too early."""
    fake = Fake(count, H100 | properties)
    run, copied, about = threading.Thread.run, torch.Tensor.__deepcopy__, SimpleNamespace(
        **fake.properties)
    hooks = saved_tensors_hooks.__init__

    def in_thread(thread: threading.Thread) -> None:
        with fake.modes():
            run(thread)

    def deepcopy(t: Tensor, memo: dict) -> Tensor:
        result = copied(t, memo)
        if (memory := fake.of(t)) is not None and fake.of(result) is not memory:
            fake.place(result, memory.device, memory.pinned)
        return result

    functions = {
        "is_available": lambda: True, "device_count": lambda: count,
        "current_device": fake.current_device, "set_device": fake.set_device,
        "get_device_name": lambda device=None: about.name,
        "get_device_capability": lambda device=None: (about.major, about.minor),
        "get_device_properties": lambda device=None: about, "mem_get_info": lambda device=None: (
            about.total_memory - fake.allocated(device), about.total_memory),
        "memory_allocated": fake.allocated, "memory_reserved": fake.allocated,
        "max_memory_allocated": fake.allocated,
        "max_memory_reserved": fake.allocated, "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": fake.synchronize,
        "Stream": fake.Stream, "Event": fake.Event, "stream": fake.stream,
        "current_stream": fake.current,
        "default_stream": lambda device=None: fake.default[fake.index(device)],
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None, "_lazy_init": lambda: None,
        "get_arch_list": list, "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False}       # a build for CUDA asks its driver
    with pytest.MonkeyPatch.context() as patch:
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch, "autocast", Autocast)
        patch.setattr(threading.Thread, "run", in_thread)
        patch.setattr(torch.Tensor, "__deepcopy__", deepcopy)
        patch.setattr(saved_tensors_hooks, "__init__",
                      lambda hook, pack, unpack: hooks(hook, fake.seen(pack), fake.seen(unpack)))
        patch.setattr(torch.Tensor, "record_stream",
                      lambda t, stream: fake.of(t).recorded.add(stream))
        # else they go on without the mode
        for module in (torch._tensor, torch.autograd, torch.functional, torch.nn.functional):
            for name in ("has_torch_function", "has_torch_function_unary",
                         "has_torch_function_variadic"):
                if hasattr(module, name):
                    patch.setattr(module, name, lambda *_: False)
        # its speeds say nothing: two small products, and a small sweep
        square, sweep = hardware.product, hardware._drawn
        patch.setattr(hardware, "squares",
                      lambda dtype, device, fast=True: {64: square((64, 64), (64, 64), dtype,
                          device, fast=fast)})
        patch.setattr(hardware, "triad", lambda device: (partial(torch.clone, sweep((64,), device)),
            512))
        measured = hardware._machine, hardware.peak_flops
        try:
            for function in measured:
                function.cache_clear()
            with fake.modes():
                yield fake
        finally:
            for function in measured:
                function.cache_clear()
    if fake.races:
        raise RaceError(fake.races[0])


@contextmanager
def nccl() -> Iterator[list[str]]:
    """Gloo where NCCL was asked for, which is in the list."""
    initialize, backends = torch.distributed.init_process_group, []

    def init(backend: str, **kwargs: Any) -> None:
        backends.append(backend)
        initialize("gloo", **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        patch.setattr(torch.distributed, "init_process_group", init)
        yield backends
