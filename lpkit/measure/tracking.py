"""Every live byte of a training step, each counted in one row of `ROWS`, from its allocation until
it is freed.

A `Tracker` watches the storages that operations allocate, real or fake, and the storages that exist
before the step. The row of a storage is often known only later: a storage that forward allocates is
an activation if it is alive when backward begins, else it was a temporary. So each storage has one
Record, whose row may change, and the log of allocations and frees is read after the step.

Bytes are counted by storage. Memory that a kernel allocates and frees within one operation is not
seen. If the device's allocator counted, too, `Footprint.counted_bytes` exceeds `peak_bytes` by this
memory. Source: PyTorch's torch.distributed._tools.mem_tracker uses the same method; the rows by
phase, module and use are lpkit's.
"""

from __future__ import annotations

import re
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from lpkit import hardware
from lpkit.contracts import Choice, StatePlacement
from lpkit.kernels.operator import MADE_OF_OPERATIONS
from lpkit.memory.saved import Away, SavedTensorOffloader
from lpkit.parallel.fully_sharded import gathered
from lpkit.parallel.sharding import local
from lpkit.precision.linear import Scaling, scaled_linears
from lpkit.predict.messages import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND, Message

ROWS = {
    "weights": "parameters",
    "master weights": "float32 copies that the optimizer updates",
    "optimizer state": "moments, their scales, step counts",
    "amax histories": "buffers of delayed scaling",
    "buffers": "of modules: numbers that no gradient changes",
    "batch": "tokens and targets of one update",
    "gradients": "of parameters, until zero_grad",
    "weight copies": "of parameters in another dtype, by autocast",
    "low-precision weights": "cast operands made of weights",
    "transposed copies": "operands cast once more, the other way around",
    "scales": "of cast operands",
    "activations": "made in forward and still there when backward begins",
    "attention workspace": "temporaries of attention's own operations",
    "recomputed block": "made by a forward that runs again in backward",
    "logits and loss": "made by the head and by the loss",
    "logits' gradients": "made in backward by the loss's own operations",
    "gathered weights": "whole parameters, between FSDP's unshard and reshard",
    "communication buffers": "what collectives read and write",
    "temporaries": "in flight: gradients of activations, casts",
    "optimizer temporaries": "made and dropped by clipping and the update",
    "allocator": "CUDA: each storage rounded up to 512 bytes",
}
WORKING = ("temporaries", "attention workspace", "recomputed block")
IN_FLIGHT = (*WORKING, "communication buffers")
# rows of a module's buffers by name; all other buffers of a Linear with cast operands are scales
BUFFERS = {"amax_history": "amax histories", **dict.fromkeys(
    ("features", "codes", "scales", "scales_scale", "scales_mean", "table"), "weights")}
SEGMENT = 512       # bytes; c10/cuda/CUDACachingAllocator.h, kMinBlockSize
LOSS = "loss"       # the name that counts as the module if an operation runs outside any module
# for each operation of c10d: its kind, and the index of the argument that has all bytes
DATA = {"allreduce_": (ALL_REDUCE, 0), "_allgather_base_": (ALL_GATHER, 0),
        "_reduce_scatter_base_": (REDUCE_SCATTER, 1), "alltoall_base_": (ALL_TO_ALL, 1),
        "send": (SEND, 0)}


@dataclass(slots=True, eq=False)
class Record:
    """A storage that is alive."""

    nbytes: int
    row: str                        # key of ROWS; it may change
    phase: str                      # phase in which it was allocated, "before" the step included
    module: str                     # module in which it was allocated
    kept_by: str | None = None      # module whose operation saved it for backward first


@dataclass(frozen=True)
class Point:
    """The live bytes at one point of the step."""

    phase: str                  # forward, backward, optimizer
    module: str                 # the module at work
    rows: dict[str, int]        # bytes by row

    @property
    def bytes(self) -> int:
        return sum(self.rows.values())


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The bytes that one device held in a step, by row."""

    rows: dict[str, int]            # bytes by row at the peak of the step
    phase: str                      # phase of the peak
    module: str                     # module of the peak
    most: dict[str, int]            # bytes of each row at its own peak
    # bytes of activations, logits and loss when the last backward began, by the operation that
    # saved them
    operations: dict[str, int]
    # Points in the order of the step. Of neighbouring points only the largest is kept, so the peak
    # is one of them.
    timeline: tuple[Point, ...]
    messages: Counter[Message] = field(default_factory=Counter)     # messages to other ranks
    offloaded_bytes: int = 0        # most bytes on another device or in a file
    # the peak that the device's allocator counted, which includes temporaries of kernels
    counted_bytes: int | None = None
    reserved_bytes: int | None = None   # CUDA: most bytes that the allocator took from the driver
    chosen: dict[str, Choice] = field(default_factory=dict)     # decisions of the run, by setting
    where: str = ""                 # device and method, for `Comparison`

    @property
    def peak_bytes(self) -> int:
        return sum(self.rows.values())


class Tracker(TorchDispatchMode):
    """Watch the memory of one step:

        with Tracker(model, optimizer, device) as tracker:
            ...                         # one step
        tracker.footprint()

    The tensors of model and optimizer have rows from the start; `hold` gives rows to other tensors
    that exist. The tracker finds out the phase itself: backward if an autograd node runs, optimizer
    in `optimizing()` or in `optimizer.step`, else forward.

    place   placement of the optimizer's state (memory or a file); None: in memory
    heads   names of the modules whose results are logits
    hooked  False: the caller calls `at_update` around updates; else hooks of the optimizer do
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None,
                 device: torch.device | str = "cpu", *, place: StatePlacement | None = None,
                 heads: Iterable[str] = ("head",), hooked: bool = True):
        super().__init__()
        self.hooked = hooked and optimizer is not None      # else the caller calls `at_update`
        self.heads, self.after_head = set(heads), False
        parts = [head.split(".") for head in self.heads]
        # Modules that contain a head. If a model computes its own loss, it does so in such a module
        # after the head.
        self.above_heads = {".".join(names[:i]) for names in parts for i in range(len(names))}
        self.attentions = {name for name, module in model.named_modules()
                           if name.endswith("attention")
                           or re.search("attention|attn", type(module).__name__.lower())}
        self.place = place or StatePlacement()      # placement of the optimizer's state
        self.model, self.optimizer, self.kind = model, optimizer, torch.device(device).type
        self.records: dict[int, Record] = {}
        self.refs: dict[int, weakref.ref] = {}
        self.log: list[tuple[Record, int, str, str]] = []       # record, bytes, phase, module
        self.modules: list[str] = []    # modules in forward, the innermost last
        # (autograd sequence number, module): nodes from this number on belong to the module
        self.marks: list[tuple[int, str]] = [(0, LOSS)]
        # depth of optimizer updates, and of calls of autograd.grad in forward
        self.optimizers = self.inside = 0
        self.phase, self.operations = "forward", {}
        self.elsewhere: dict[int, int] = {}     # bytes of storages on another device or in a file
        self.most_offloaded = 0
        self.exits = ExitStack()

    # ---- Held tensors, and the current phase and module

    def hold(self, tensors: Iterable[Tensor | None], row: str) -> None:
        """Count existing tensors in this row, whatever their row was before."""
        for t in _tensors(list(tensors)):
            record = self._record(t, row, "before", "")
            if record is not None:
                record.row = row

    def _hold_states(self) -> None:
        """Give rows to the buffers of modules, the state of the optimizer and the gradients."""
        for module in self.model.modules():
            other = "scales" if isinstance(module, Scaling) else "buffers"
            for name, buffer in module.named_buffers(recurse=False):
                self.hold([buffer], BUFFERS.get(name, other))
        for state in self.optimizer.state.values() if self.optimizer else ():
            for name, value in state.items():
                if not self.place.in_memory:
                    self._offload(value)
                else:
                    self.hold([value], "master weights" if "master" in name else "optimizer state")
        self._hold_gradients()

    def _hold_gradients(self) -> None:
        """Count the gradients of whole parameters, and of the shards that this rank updates, in the
        row of gradients."""
        owned = self.optimizer.param_groups if self.optimizer else ()
        parameters = chain(self.model.parameters(), *(group["params"] for group in owned))
        self.hold([local(p.grad) for p in parameters if p.grad is not None], "gradients")

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """The block clips gradients and updates weights: its phase is optimizer."""
        self.at_update(1)
        try:
            yield
        finally:
            self.at_update(-1)

    def at_update(self, change: int, *_: Any) -> None:
        """Enter (1) or leave (-1) the optimizer phase."""
        self.optimizers += change

    @property
    def _at_work(self) -> str:
        """The innermost module in forward. After the head, in a module that contains the head, it
        is LOSS: a model computes its own loss there."""
        name = self.modules[-1] if self.modules else LOSS
        return LOSS if self.after_head and name in self.above_heads else name

    def _where(self) -> tuple[str, str]:
        """Return the current phase and module, and do what a change of phase requires."""
        node = torch._C._current_autograd_node()
        if self.optimizers:
            phase, module = "optimizer", ""
        elif self.inside:       # forward calls autograd.grad, as the chunked loss does
            phase, module = "forward", self._at_work
        elif node is not None:
            phase, module = "backward", self._at_work if self.modules else self._module_of(node)
        elif self.phase == "backward" and not self.modules:
            phase, module = "backward", ""  # after the last node: callbacks, amax histories
        else:
            phase, module = "forward", self._at_work
        if phase != self.phase:
            self._enter(phase)
        return phase, module

    def _module_of(self, node: Any) -> str:
        """Return the module whose forward made an autograd node. Nodes that accumulate gradients
        have the largest sequence numbers and belong to no module."""
        number = node._sequence_nr()
        if number >= 2**62:
            return "gradient"
        return self.marks[bisect_right(self.marks, number, key=itemgetter(0)) - 1][1]

    def _enter(self, phase: str) -> None:
        """Change the phase. When backward begins, count what forward saved; when it ends, count the
        gradients."""
        before, self.phase = self.phase, phase
        if before == "backward":
            self._hold_gradients()
        if (before, phase) != ("forward", "backward"):
            return
        operations: Counter[str] = Counter()
        # forward is over, so storages that it allocated and that are still alive are activations
        for record in self.records.values():
            if record.phase == "forward" and record.row in ("temporaries", "attention workspace"):
                record.row = "activations"
            if record.row == "activations":
                operations[short(record.kept_by or record.module)] += record.nbytes
            elif record.row == "logits and loss":
                operations[LOSS] += record.nbytes
        self.operations = dict(operations)

    # ---- Allocations and frees

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if wrapped(types):
            return NotImplemented
        # A kernel that is composed of PyTorch's operations: watch these, because they allocate the
        # kernel's workspace.
        if (kernel := MADE_OF_OPERATIONS.get(func)) is not None:
            _push_mode(self)
            try:
                return kernel(*args, **(kwargs or {}))
            finally:
                _pop_mode()
        out = func(*args, **(kwargs or {}))
        allocated = [t for t in _tensors(out) if t.untyped_storage()._cdata not in self.records]
        if allocated:
            phase, module = self._where()
            row = self._row(phase, module)
            if func is torch.ops.aten._to_copy.default:
                source = self._find(args[0])
                if source is not None and source.row in ("weights", "weight copies"):
                    row = "weight copies"
            given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
            for t in allocated:
                # a storage that is also an argument existed before the tracker, and has no row
                if t.untyped_storage()._cdata not in given:
                    self._record(t, row, phase, module)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._relabel((args, kwargs, out), "communication buffers", WORKING)
        return out

    def _find(self, t: Tensor) -> Record | None:
        """Return the Record of a tensor's storage; None: it has none."""
        return self.records.get(t.untyped_storage()._cdata)

    def _row(self, phase: str, module: str) -> str:
        """Return the row of a new storage by the phase and the module in which it is allocated."""
        if phase == "optimizer":
            return "optimizer temporaries"
        if phase == "backward" and self.modules:
            return "recomputed block"
        if module == LOSS:
            return "logits and loss" if phase == "forward" else "logits' gradients"
        return "attention workspace" if module in self.attentions else "temporaries"

    def _record(self, t: Tensor, row: str, phase: str, module: str) -> Record | None:
        """Return the Record of a tensor's storage, and create it if it is missing. Return None for
        an empty storage, and for a storage on another device, which counts as offloaded."""
        storage = t.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.records:
            return self.records[key]
        if not nbytes and phase != "before":
            return None
        if t.device.type != self.kind:
            self._away(storage, key, nbytes)
            return None
        record = self.records[key] = Record(nbytes, row, phase, module)
        self.refs[key] = weakref.ref(storage, partial(self._gone, key))
        self.log.append((record, nbytes, phase, module))
        return record

    def _gone(self, key: int, _: Any) -> None:
        """Log that a storage was freed; its weak reference calls this."""
        record = self.records.pop(key)
        del self.refs[key]
        module = self.modules[-1] if self.modules else ""
        self.log.append((record, -record.nbytes, self.phase, module))

    def _offload(self, value: Any) -> None:
        """Count the tensors of `value` as offloaded bytes."""
        for t in _tensors(value):
            storage = t.untyped_storage()
            self._away(storage, storage._cdata, storage.nbytes())

    def _away(self, thing: Any, key: int, nbytes: int) -> None:
        """Count `nbytes` as offloaded until the object `thing` is deleted."""
        if key not in self.elsewhere:
            self.elsewhere[key] = nbytes
            self.refs[key] = weakref.ref(thing, partial(self._back, key))
            self.most_offloaded = max(self.most_offloaded, sum(self.elsewhere.values()))

    def _back(self, key: int, _: Any) -> None:
        del self.elsewhere[key], self.refs[key]

    def _relabel(self, tensors: Any, row: str, among: tuple[str, ...]) -> None:
        """Move the tensors whose row is one of `among` to the row `row`."""
        for t in _tensors(tensors):
            record = self._find(t)
            if record is not None and record.row in among:
                record.row = row

    # ---- Hooks: they observe the step and do not change its numbers

    def __enter__(self):
        self.hold(self.model.parameters(), "weights")
        self._hold_states()
        self.hold(gathered(self.model), "gathered weights")
        handles = []
        for name, module in self.model.named_modules():
            leave = partial(self._leave_module, name)
            handles += [module.register_forward_pre_hook(partial(self._enter_module, name)),
                        module.register_forward_hook(leave, always_call=True)]
        for p in self.model.parameters():
            if p.requires_grad:
                handles.append(p.register_hook(partial(self._gradient, weakref.ref(p))))
        if self.hooked:      # if updates run in backward, the optimizer steps once per parameter
            handles += [self.optimizer.register_step_pre_hook(partial(self.at_update, 1)),
                        self.optimizer.register_step_post_hook(partial(self.at_update, -1))]
        for handle in handles:
            self.exits.callback(handle.remove)
        for layer in scaled_linears(self.model):
            layer.cast = partial(self._cast, layer.cast)
            self.exits.callback(layer.__dict__.pop, "cast")
        self.exits.enter_context(saved_tensors_hooks(self._kept, lambda t: t))
        self._replace(torch.UntypedStorage, "resize_", self._resize)
        self._replace(torch.autograd, "grad", self._grad)
        self._replace(SavedTensorOffloader, "send", self._send)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._hold_states()
        self.exits.close()

    def _replace(self, owner: Any, name: str, by: Callable) -> None:
        """Replace the function `name` of `owner` by `by(original, ...)` until the tracker ends."""
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: by(original, *args, **kwargs))
        self.exits.callback(setattr, owner, name, original)

    def _resize(self, resize: Callable, storage: torch.UntypedStorage,
                size: int) -> torch.UntypedStorage:
        """Log the change of a storage's size: FSDP frees and allocates memory by resizing a storage
        that stays alive."""
        out = resize(storage, size)
        record = self.records.get(storage._cdata)
        if record is not None and storage.nbytes() != record.nbytes:
            change, record.nbytes = storage.nbytes() - record.nbytes, storage.nbytes()
            self.log.append((record, change, *self._where()))
        return out

    def _grad(self, grad: Callable, *args: Any, **kwargs: Any) -> Any:
        """Mark a call of torch.autograd.grad in forward, so that its phase stays forward."""
        self.inside += 1
        try:
            return grad(*args, **kwargs)
        finally:
            self.inside -= 1

    def _send(self, send: Callable, offloader: SavedTensorOffloader, t: Tensor) -> Away:
        """Count the bytes that an activation takes in a file."""
        parcel = send(offloader, t)
        if parcel.file_bytes:
            self._away(parcel, id(parcel), parcel.file_bytes)
        return parcel

    def _enter_module(self, name: str, *_: Any) -> None:
        self.after_head &= bool(self.modules)
        self.modules.append(name)
        self._mark()

    def _leave_module(self, name: str, module: nn.Module, inputs: Any, out: Any) -> None:
        self.modules.pop()
        if name in self.heads:
            self.after_head = True
            self._relabel(out, "logits and loss", WORKING)
        self._mark()

    def _mark(self) -> None:
        """Note that the autograd nodes from now on belong to the module at work. In a forward pass
        that recomputation runs again, new nodes are never used, so nothing is noted."""
        if torch._C._current_autograd_node() is None:
            self.marks.append((torch._C._autograd._get_sequence_nr(), self._at_work))

    def _kept(self, t: Tensor) -> Tensor:
        """Note that an operation saved a tensor for backward: in forward, it is an activation."""
        forward = self.phase == "forward" and not self.inside
        for inner in _tensors(t):
            record = self._record(inner, "activations", "before", LOSS)
            if forward and record is not None and record.kept_by is None:
                record.kept_by = self._at_work
                if record.row in ("temporaries", "attention workspace"):
                    record.row = "activations"
        return t

    def _gradient(self, parameter: Callable[[], nn.Parameter], gradient: Tensor) -> None:
        """Move a parameter's first gradient from the temporaries to the gradients."""
        if parameter().grad is None:     # else it is added to an existing gradient
            self._relabel(gradient, "gradients",
                          (*IN_FLIGHT, "logits' gradients", "logits and loss"))

    def _cast(self, cast: Callable, product: str, role: str, x: Tensor, dtype: torch.dtype, *,
              first: bool = False, **how: bool) -> Any:
        """Cast an operand by `cast`, the method of a ScaledLinear, and give rows to the tensors of
        the result. `first`: it is the first cast of this operand; a later cast of dy, and the
        `turned` layout of an operand, are transposed copies."""
        operand = cast(product, role, x, dtype, first=first, **how)
        turned = operand.turned
        for layout in filter(None, (operand, turned)):
            if role == "w":
                self._relabel(layout.data, "low-precision weights", IN_FLIGHT)
            elif role == "g" and (layout is turned or not first):
                self._relabel(layout.data, "transposed copies", IN_FLIGHT)
            self._relabel((layout.scale, layout.tensor, layout.amax, layout.nonfinite), "scales",
                          WORKING)
        return operand

    # ---- The result

    def footprint(self, *, points: int = 400, **more: Any) -> Footprint:
        """Return the Footprint from the log, after the `with` block. `points`: the most Points of
        its timeline. `more`: other fields of Footprint."""
        most: Counter[str] = Counter()
        totals = []
        for rows in self._rows():
            most |= rows        # element-wise maximum
            totals.append(rows.total())
        held = takewhile(lambda entry: entry[2] == "before", self.log)
        moments = range(max(0, len(list(held)) - 1), len(totals))
        size = max(1, -(-len(moments) // points))
        shown = {max(moments[i:i + size], key=totals.__getitem__)
                 for i in range(0, len(moments), size)}
        timeline = []
        for i, ((_, _, phase, module), rows) in enumerate(zip(self.log, self._rows())):
            if i in shown:
                phase = "forward" if phase == "before" else phase
                timeline.append(Point(phase, module, _ordered(rows)))
        peak = max(timeline, key=lambda point: point.bytes)
        return Footprint(rows=peak.rows, phase=peak.phase, module=peak.module, most=_ordered(most),
                         operations=self.operations, timeline=tuple(timeline),
                         offloaded_bytes=self.most_offloaded, **more)

    def _rows(self) -> Iterator[Counter[str]]:
        """Yield the live bytes by row after each entry of the log. All yields are the same Counter,
        which changes."""
        rows: Counter[str] = Counter()
        for record, change, _, _ in self.log:
            rows[record.row] += change
            if self.kind == "cuda":
                rounding = -abs(change) % SEGMENT
                rows["allocator"] += rounding if change > 0 else -rounding
            yield rows


class MessageCount(TorchDispatchMode):
    """Count the messages of this process:

        with MessageCount() as count:
            training.update(0)
        count.sent

    `sent` counts the collectives by kind, bytes and ranks, as notebooks/lessons/ranks/messages.py
    predicts them. `control` counts all other messages by the name of their c10d operation. These
    are small messages between hosts, for example from `Ranks.broadcast` and `Ranks.agreed`.

    MessageCount sees all messages that pass PyTorch's dispatcher: messages of FSDP2 and of
    `lpkit.parallel`, in a real or "fake" process group. PyTorch's
    torch.distributed.tensor.debug.CommDebugMode sees the same messages, but counts no bytes.
    """

    def __init__(self):
        super().__init__()
        self.sent: Counter[Message] = Counter()
        self.control: Counter[Message] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._opname
            kind, whole = DATA.get(name, (name, 0))
            nbytes = sum(t.nbytes for t in tree_leaves(args[whole]) if isinstance(t, Tensor))
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = 2 if kind == SEND else dist.ProcessGroup.unbox(group).size()
            (self.sent if name in DATA else self.control)[Message(kind, nbytes, ranks)] += 1
        return func(*args, **(kwargs or {}))


def allocator_counts(device: torch.device) -> dict[str, int]:
    """Return the fields of a Footprint that CUDA's allocator counted since `hardware.reset_peak`;
    an empty dict on a CPU."""
    if device.type != "cuda":
        return {}
    return {"counted_bytes": hardware.peak_bytes(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device)}


def wrapped(types: Iterable[type]) -> bool:
    """Return whether an operation's tensors are of types that wrap other tensors (DTensor, for
    example). Such an operation is not counted, because its inner operations are."""
    return any(t is not Tensor and t is not nn.Parameter and not issubclass(t, FakeTensor)
               for t in types)


def _ordered(rows: dict[str, int]) -> dict[str, int]:
    return {name: rows[name] for name in ROWS if rows.get(name)}


def short(name: str) -> str:
    """Return a module's name without its block.

    >>> short("blocks.3.mlp.up")
    'mlp.up'
    """
    return ".".join(part for part in name.split(".") if part != "blocks" and not part.isdigit())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with storages in nested lists, tuples, dicts and wrapper tensors."""
    for leaf in tree_leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            yield from _tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor):
            yield leaf
