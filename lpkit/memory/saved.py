"""Activations that wait for backward elsewhere, or in fewer bits.

Autograd hands over what the operations of a block save (torch.autograd.graph.saved_tensors_hooks)
and asks for it again in backward. Weights and their casts stay: they exist anyway. So do tensors
with less than a 32nd of the numbers of the block's input: statistics of norms, log-sums of
attention, a few of the bytes, and what the rest depends on. A tensor that several operations save
goes once.

On the host or on a disk nothing changes but the time. In low precision a tensor comes back as
another one that has it as its mean: groups of 256 numbers are spread between their least and their
largest, and rounded stochastically (ActNN, Chen et al. 2021, https://arxiv.org/abs/2104.14129).
What is linear in it, so the gradient of a weight whose input it is, is right on average. What is
not, the derivatives of norms, softmax and gelu, is off by a second-order term; docs/memory.md says
how much.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lpkit.contracts import Stage, Transform
from lpkit.memory import files
from lpkit.techniques.memory import GROUP

MIN_SHARE_OF_INPUT = 32     # tensors with less than a 32nd of the numbers of the block's input stay
PREFETCH_DEPTH = 4          # tensors that are brought while one is used
PASSES_ON = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0",
             "AliasBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}


class Store:
    """Takes dense tensors and gives them back."""

    def put(self, t: Tensor) -> Any:
        raise NotImplementedError

    def get(self, put: Any) -> Tensor:
        raise NotImplementedError

    def expect(self, put: Any) -> None:
        """It will be asked for soon."""

    def takes(self, t: Tensor) -> bool:
        return True


class CpuCopyStore(Store):
    """Somewhere else in the memory of the CPU."""

    def put(self, t: Tensor) -> Tensor:
        return t.clone()

    def get(self, put: Tensor) -> Tensor:
        return put


class HostStore(Store):
    """Pinned memory of the CPU, by a stream of its own, in order."""

    @dataclass
    class Away:
        pinned: Tensor
        device: torch.device
        back: tuple[Tensor, torch.cuda.Event] | None = None

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def put(self, t: Tensor) -> HostStore.Away:
        self.stream.wait_stream(torch.cuda.current_stream(t.device))
        pinned = torch.empty_like(t, device="cpu", pin_memory=True)
        with torch.cuda.stream(self.stream):
            pinned.copy_(t, non_blocking=True)
        t.record_stream(self.stream)        # its memory is free for others when the copy is done
        return HostStore.Away(pinned, t.device)

    def expect(self, put: HostStore.Away) -> None:
        if put.back is None:
            with torch.cuda.stream(self.stream):
                put.back = put.pinned.to(put.device, non_blocking=True), self.stream.record_event()

    def get(self, put: HostStore.Away) -> Tensor:
        self.expect(put)
        (t, there), put.back = put.back, None
        current = torch.cuda.current_stream(t.device)
        current.wait_event(there)
        t.record_stream(current)
        return t


class DiskStore(Store):
    """A file without a name, written and read by a thread beside the computation."""

    @dataclass
    class Away:
        slot: files.Slot
        dtype: torch.dtype
        shape: torch.Size
        device: torch.device

    def __init__(self):
        self.file = files.Slots()

    def put(self, t: Tensor) -> DiskStore.Away:
        return DiskStore.Away(self.file.write(t.detach().cpu().view(-1).view(torch.uint8)), t.dtype,
                              t.shape, t.device)

    def expect(self, put: DiskStore.Away) -> None:
        self.file.expect(put.slot)

    def get(self, put: DiskStore.Away) -> Tensor:
        return self.file.read(put.slot).view(put.dtype).view(put.shape).to(put.device)


class GpuDiskStore(Store):
    """GPUDirect Storage: the file and the GPU's memory without the CPU's between them (NVIDIA's
    kvikio)."""

    @dataclass
    class Away:
        slot: files.Slot
        like: Callable[[], Tensor]

    def __init__(self):
        import kvikio

        self.file = files.Slots(open_again=partial(kvikio.CuFile, flags="r+"))

    def put(self, t: Tensor) -> GpuDiskStore.Away:
        slot = self.file.slot(t.nbytes)
        # the library reads when it is told, not when streams agree
        torch.cuda.current_stream(t.device).synchronize()
        self.file.again.write(t.view(-1).view(torch.uint8), t.nbytes, slot.offset)
        return GpuDiskStore.Away(slot, partial(torch.empty, t.shape, dtype=t.dtype,
                                               device=t.device))

    def get(self, put: GpuDiskStore.Away) -> Tensor:
        t = put.like()
        # whoever had this memory before is done with it
        torch.cuda.current_stream(t.device).synchronize()
        self.file.again.read(t.view(-1).view(torch.uint8), t.nbytes, put.slot.offset)
        return t


@dataclass(frozen=True)
class QuantizedStore(Store):
    """`bits` of 8, 4 or 2 a number, and 8 bytes for each group."""

    bits: int

    @dataclass
    class Away:
        codes: Tensor       # uint8, 8 / bits to a byte
        scale: Tensor       # float32, (groups, 1): of one step, and the least
        least: Tensor
        dtype: torch.dtype
        shape: torch.Size

    def takes(self, t: Tensor) -> bool:
        return t.is_floating_point() and t.element_size() > 1

    def put(self, t: Tensor) -> QuantizedStore.Away:
        flat = t.detach().reshape(-1).float()
        groups = F.pad(flat[None], (0, -len(flat) % GROUP), mode="replicate").view(-1, GROUP)
        least, most = groups.aminmax(dim=1, keepdim=True)
        scale = (most - least) / (2**self.bits - 1)
        steps = (groups - least).div_(scale.clamp(min=torch.finfo(torch.float32).tiny))
        codes = steps.add_(torch.rand_like(steps)).floor_().clamp_(max=2**self.bits
                                                                   - 1).to(torch.uint8)
        return QuantizedStore.Away(self._pack(codes), scale, least, t.dtype, t.shape)

    def get(self, put: QuantizedStore.Away) -> Tensor:
        values = self._unpack(put.codes).float().mul_(put.scale).add_(put.least)
        return values.view(-1)[:put.shape.numel()].to(put.dtype).view(put.shape)

    def _pack(self, codes: Tensor) -> Tensor:
        parts = codes.view(len(codes), 8 // self.bits, -1)
        packed = parts[:, 0].clone()
        for i in range(1, parts.shape[1]):
            packed |= parts[:, i] << (i * self.bits)
        return packed

    def _unpack(self, packed: Tensor) -> Tensor:
        return torch.cat([packed >> shift & (2**self.bits - 1) for shift in range(0, 8, self.bits)],
                         dim=1)


# ---- what goes, and once

@dataclass(eq=False)
class SavedTensor:
    """One tensor that is away; `before`: the one that went before it, which backward wants next."""

    put: Any
    before: Callable[[], SavedTensor | None]


@dataclass(frozen=True)
class SavedTensorRef:
    """What autograd keeps: a parcel, and how this operation saw it."""

    parcel: SavedTensor
    order: tuple[int, ...]      # of the dimensions, the slowest first
    shape: torch.Size           # in that order


@dataclass(eq=False)
class SavedTensorOffloader:
    """Sends the tensors of one model's blocks to `store`."""

    store: Store
    # by storage, by view
    parcels: dict[int, dict[tuple, weakref.ref]] = field(default_factory=dict)
    storages: dict[int, weakref.ref] = field(default_factory=dict)
    last: Callable[[], SavedTensor | None] = lambda: None

    def pack(self, least: int, t: Tensor) -> Tensor | SavedTensorRef:
        if t.numel() * MIN_SHARE_OF_INPUT < least or t.nbytes > t.untyped_storage().nbytes() or not self.store.takes(
                t) or _of_weight(t):
            return t
        order = tuple(sorted(range(t.ndim), key=t.stride, reverse=True))
        dense = t.detach().permute(order)
        return SavedTensorRef(self._parcel(dense), order, dense.shape)

    def unpack(self, kept: Tensor | SavedTensorRef) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        near = kept.parcel
        for _ in range(PREFETCH_DEPTH):
            if (near := near.before()) is None:
                break
            self.store.expect(near.put)
        back = sorted(range(len(kept.order)), key=kept.order.__getitem__)
        return self.store.get(kept.parcel.put).view(kept.shape).permute(back)

    def _parcel(self, t: Tensor) -> SavedTensor:
        """Of a dense view of a storage, one, as long as both live."""
        storage = t.untyped_storage()
        at = storage._cdata
        if at not in self.parcels:
            self.parcels[at], self.storages[at] = {}, weakref.ref(storage, partial(self._gone, at))
        view = (t.storage_offset(), t.numel(), t.dtype, t._version,
                *(() if t.is_contiguous() else (t.shape, t.stride())))
        parcel = self.parcels[at].get(view, lambda: None)()
        if parcel is None:
            parcel = SavedTensor(self.store.put(t.contiguous()), self.last)
            self.last = self.parcels[at][view] = weakref.ref(parcel)
        return parcel

    def _gone(self, at: int, _: Any) -> None:
        del self.parcels[at], self.storages[at]


def _of_weight(t: Tensor) -> bool:
    """A parameter, a view or a cast of one."""
    if isinstance(t, nn.Parameter) or getattr(t, "of_weight", False):
        return True
    node = t.grad_fn
    while node is not None and node.name() in PASSES_ON:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(Transform):
    """What each block saves goes to `store`, in place."""

    store: Callable[[torch.device], Store]
    stage = Stage.RECOMPUTE         # around what is recomputed: then a block's input goes

    def __call__(self, model: nn.Module) -> nn.Module:
        counter = SavedTensorOffloader(self.store(next(model.parameters()).device))
        for block in model.blocks:
            block.forward = partial(_forward, block.forward, counter)
        return model


def _forward(forward: Callable[..., Tensor], counter: SavedTensorOffloader, x: Tensor,
             *rest) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(x, *rest)
    with saved_tensors_hooks(partial(counter.pack, x.numel()), counter.unpack):
        return forward(x, *rest)


# Of the rows of `lpkit.techniques.memory.ACTIVATION_OFFLOAD`: the store on a device, and what is
# said of it there.

@dataclass(frozen=True, kw_only=True)
class Place:
    """`store`: None leaves activations where they were made. `used` and `why` are recorded; empty:
    as the row says."""

    store: Callable[[torch.device], Store] | None = None
    used: str = ""
    why: str = ""

    @property
    def transforms(self) -> tuple[Transform, ...]:
        return () if self.store is None else (OffloadActivations(store=self.store),)


def on_device(device: torch.device) -> Place:
    return Place()


def on_host(device: torch.device) -> Place:
    if device.type == "cuda":
        return Place(store=HostStore)
    return Place(store=lambda device: CpuCopyStore(), used="cpu", why=(
        "copied: the device is the CPU, so the copies lie beside what they were copied from, and "
        "this shows what is moved and not what it frees"))


def on_disk(device: torch.device) -> Place:
    where = files.Scratch.where()
    if device.type == "cuda" and files.has_kvikio():
        return Place(store=lambda device: GpuDiskStore(), used="disk",
                     why=f"by GPUDirect Storage, in {where} (kvikio is here)")
    direct = "through the page cache: this filesystem has no O_DIRECT"
    if files.allows_direct():
        direct = "past the page cache (O_DIRECT)"
    return Place(store=lambda device: DiskStore(), used="disk",
                 why=f"{direct}, in {where} (Rajbhandari et al. 2021, arXiv:2104.07857)")


def int8(device: torch.device) -> Place:
    return Place(store=lambda device: QuantizedStore(8))


def int4(device: torch.device) -> Place:
    return Place(store=lambda device: QuantizedStore(4))


def int2(device: torch.device) -> Place:
    return Place(store=lambda device: QuantizedStore(2))
