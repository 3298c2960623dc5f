"""Activations that wait for backward elsewhere.

Autograd hands over what the operations of a block save (torch.autograd.graph.saved_tensors_hooks)
and asks for it again in backward. Weights and their casts stay: they exist anyway. So do tensors
with less than a 32nd of the numbers of the block's input: statistics of norms, log-sums of
attention, a few of the bytes, and what the rest depends on. A tensor that several operations save
goes once.

On the host nothing changes but the time. A kind of `Away` that `rounds` gives other numbers back,
as those of `lessons.rows.activations` do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lpkit.contracts import Stage, Transform
from lpkit.memory.state import Host

MIN_SHARE_OF_INPUT = 32     # tensors with less than a 32nd of the numbers of the block's input stay
PREFETCH_DEPTH = 4          # tensors that are brought while one is used
PASSES_ON = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0",
             "AliasBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}


class Away:
    """A dense tensor that waits elsewhere."""

    before: Callable[[], Away | None]   # the one that went before it, which backward wants next
    rounds = False      # it comes back as other numbers, by a generator `draws`
    file_bytes = 0      # in a file: a `Tracker` sees tensors by itself

    @staticmethod
    def takes(t: Tensor) -> bool:
        return True

    def expect(self) -> None:
        """It will be asked for soon."""

    def get(self) -> Tensor:
        raise NotImplementedError


class CpuCopy(Away):
    """Somewhere else in the memory of the CPU."""

    def __init__(self, t: Tensor):
        self.copy = t.clone()

    def get(self) -> Tensor:
        return self.copy


class OnHost(Away):
    """Stores tensors in pinned memory of the CPU, by the stream of `host`, in order."""

    def __init__(self, t: Tensor, host: Host):
        self.host, self.device = host, t.device
        self.pinned = torch.empty_like(t, device="cpu", pin_memory=True)
        self.back: Callable[[], list[Tensor]] | None = None     # waits for what is on its way
        host.write_back([self.pinned], [t])

    def expect(self) -> None:
        if self.back is None:
            self.back = self.host.prefetch([self.pinned], self.device)

    def get(self) -> Tensor:
        self.expect()
        [t], self.back = self.back(), None
        return t


# ---- what goes, and once

@dataclass(frozen=True)
class SavedTensorRef:
    """The reference that autograd keeps: to a tensor that is away, and how this operation saw
    it."""

    parcel: Away
    order: tuple[int, ...]      # of the dimensions, the slowest first
    shape: torch.Size           # in that order


class SavedTensorOffloader(Transform):
    """Sends what each block of one model saves away, as `kind(t, **settings)`."""

    stage = Stage.RECOMPUTE         # around what is recomputed: then a block's input goes
    masked = False      # blocks may have additive masks, of infinities: they are not rounded

    def __init__(self, kind: type[Away], **settings: Any):
        self.kind, self.settings = kind, settings
        self.parcels: dict[int, weakref.WeakValueDictionary[tuple, Away]] = {}  # by storage, view
        self.storages: dict[int, weakref.ref] = {}
        self.last: Callable[[], Away | None] = lambda: None

    def __call__(self, model: nn.Module) -> nn.Module:
        for block in model.blocks:
            block.forward = partial(self._forward, block.forward)
        return model

    def _forward(self, forward: Callable[..., Any], *given, **named) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        x = next(one for one in (*given, *named.values()) if isinstance(one, Tensor))
        if self.kind.rounds:            # its draws are none of a block's, which runs again alike
            seed = int(torch.randint(2**62, ()))
            self.settings["draws"] = torch.Generator(x.device).manual_seed(seed)
        with saved_tensors_hooks(partial(self.pack, x.numel()), self.unpack):
            return forward(*given, **named)

    def pack(self, least: int, t: Tensor) -> Tensor | SavedTensorRef:
        small = t.numel() * MIN_SHARE_OF_INPUT < least
        expanded = t.nbytes > t.untyped_storage().nbytes()
        mask = self.masked and self.kind.rounds and not t.requires_grad
        if small or expanded or mask or not self.kind.takes(t) or _of_weight(t):
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
            near.expect()
        back = sorted(range(len(kept.order)), key=kept.order.__getitem__)
        return kept.parcel.get().view(kept.shape).permute(back)

    def _parcel(self, t: Tensor) -> Away:
        """Returns one parcel for a dense view of a storage, as long as both live."""
        storage = t.untyped_storage()
        at = storage._cdata
        if at not in self.parcels:
            self.parcels[at] = weakref.WeakValueDictionary()
            self.storages[at] = weakref.ref(storage, partial(self._gone, at))
        layout = None if t.is_contiguous() else (t.shape, t.stride())
        view = t.storage_offset(), t.numel(), t.dtype, t._version, layout
        parcel = self.parcels[at].get(view)
        if parcel is None:
            self.parcels[at][view] = parcel = self.send(t.contiguous())
            parcel.before, self.last = self.last, weakref.ref(parcel)
        return parcel

    def send(self, t: Tensor) -> Away:
        return self.kind(t, **self.settings)

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


# Of the rows of `lpkit.techniques.memory.ACTIVATION_OFFLOAD`: f(device) -> Place.

@dataclass(frozen=True, kw_only=True)
class Place:
    """`transforms`: none leaves activations where they were made. `used` and `why` are recorded;
    empty: as the row says."""

    transforms: tuple[Transform, ...] = ()
    used: str = ""
    why: str = ""


def on_device(device: torch.device) -> Place:
    return Place()


def on_host(device: torch.device) -> Place:
    if device.type == "cuda":
        return Place(transforms=(SavedTensorOffloader(OnHost, host=Host(device)),))
    return Place(transforms=(SavedTensorOffloader(CpuCopy),), used="cpu", why=(
        "copied: the device is the CPU, so the copies lie beside what they were copied from, and "
        "this shows what is moved and not what it frees"))
