"""Stores activations elsewhere until backward needs them, for example in host memory.

Autograd calls two hooks (torch.autograd.graph.saved_tensors_hooks): `pack` with each tensor that an
operation of a block saves, and `unpack` when backward needs it. These tensors stay where they are:
- weights and their casts, because they exist anyway
- tensors with less than a 32nd of the numbers of the block's input, such as statistics of norms and
  log-sums of attention: they take few bytes, and many results depend on them
A tensor that several operations save is moved once.

If the tensors are stored in host memory, the results are bit-exact: they equal the results without
offload. A subclass of `Away` with `rounds` stores rounded numbers, as in
`lessons.rows.activations`.
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

MIN_SHARE_OF_INPUT = 32     # a tensor with less than 1/32 of the block input's numbers stays
PREFETCH_DEPTH = 4          # tensors that are fetched before backward needs them
# graph nodes of casts and views: `_of_weight` follows them back to a parameter
PASSES_ON = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0",
             "AliasBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}


class Away:
    """A dense tensor that is stored elsewhere. Subclasses define where."""

    # returns the tensor that was stored just before this one; backward needs it next
    before: Callable[[], Away | None]
    rounds = False      # whether numbers are rounded stochastically, by a generator `draws`
    file_bytes = 0      # bytes in a file, which a `Tracker` of tensors cannot see

    @staticmethod
    def takes(t: Tensor) -> bool:
        """Return whether this class can store t."""
        return True

    def expect(self) -> None:
        """Start to fetch the tensor: it will be needed soon."""

    def get(self) -> Tensor:
        """Return the tensor on its device."""
        raise NotImplementedError


class CpuCopy(Away):
    """A tensor of the CPU, copied to other memory of the CPU."""

    def __init__(self, t: Tensor):
        self.copy = t.clone()

    def get(self) -> Tensor:
        return self.copy


class OnHost(Away):
    """A tensor of a GPU, copied to pinned memory of the CPU and back by the stream of `host`. The
    stream copies in order, so no fetch can overtake the copy to the host."""

    def __init__(self, t: Tensor, host: Host):
        self.host, self.device = host, t.device
        self.pinned = torch.empty_like(t, device="cpu", pin_memory=True)
        self.back: Callable[[], list[Tensor]] | None = None     # waits for the copy to the device
        host.write_back([self.pinned], [t])

    def expect(self) -> None:
        if self.back is None:
            self.back = self.host.prefetch([self.pinned], self.device)

    def get(self) -> Tensor:
        self.expect()
        [t], self.back = self.back(), None
        return t


# ---- which tensors are moved, each only once

@dataclass(frozen=True)
class SavedTensorRef:
    """What autograd saves instead of a tensor: the stored tensor, and how to make the view of it
    that the operation saved."""

    parcel: Away
    order: tuple[int, ...]      # dimensions of the saved view, sorted by stride, largest first
    shape: torch.Size           # sizes of the dimensions in this order


class SavedTensorOffloader(Transform):
    """Moves the tensors that the blocks of a model save for backward: each tensor t is stored as
    `kind(t, **settings)`."""

    # Applied around recomputation. So if blocks are recomputed, only their inputs are moved.
    stage = Stage.RECOMPUTE
    # whether blocks may have additive masks with infinities, which must not be rounded
    masked = False

    def __init__(self, kind: type[Away], **settings: Any):
        self.kind, self.settings = kind, settings
        # stored tensors by storage and by view of the storage, for as long as both exist
        self.parcels: dict[int, weakref.WeakValueDictionary[tuple, Away]] = {}
        self.storages: dict[int, weakref.ref] = {}
        self.last: Callable[[], Away | None] = lambda: None

    def __call__(self, model: nn.Module) -> nn.Module:
        for block in model.blocks:
            block.forward = partial(self._forward, block.forward)
        return model

    def _forward(self, forward: Callable[..., Any], *given, **named) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        x = next(argument for argument in (*given, *named.values()) if isinstance(argument, Tensor))
        # Rounding uses its own generator, so that it does not change the block's random numbers.
        if self.kind.rounds:
            seed = int(torch.randint(2**62, ()))
            self.settings["draws"] = torch.Generator(x.device).manual_seed(seed)
        with saved_tensors_hooks(partial(self.pack, x.numel()), self.unpack):
            return forward(*given, **named)

    def pack(self, least: int, t: Tensor) -> Tensor | SavedTensorRef:
        """Return what autograd saves for t: t itself if it stays, otherwise a reference. least:
        numbers of the block's input."""
        small = t.numel() * MIN_SHARE_OF_INPUT < least
        expanded = t.nbytes > t.untyped_storage().nbytes()
        mask = self.masked and self.kind.rounds and not t.requires_grad
        if small or expanded or mask or not self.kind.takes(t) or _of_weight(t):
            return t
        order = tuple(sorted(range(t.ndim), key=t.stride, reverse=True))
        dense = t.detach().permute(order)
        return SavedTensorRef(self._parcel(dense), order, dense.shape)

    def unpack(self, kept: Tensor | SavedTensorRef) -> Tensor:
        """Return the tensor that `pack` was given. Also start to fetch the tensors that were stored
        before it, because backward needs them in reverse order."""
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
        """Return the stored copy of t. If another operation has saved the same view of the same
        storage, this is the copy that exists already."""
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
    """Return whether t is a parameter, or a view or a cast of a parameter."""
    if isinstance(t, nn.Parameter) or getattr(t, "of_weight", False):
        return True
    node = t.grad_fn
    while node is not None and node.name() in PASSES_ON:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)


# Functions f(device) -> ActivationStorage. The rows of
# `lpkit.techniques.memory.ACTIVATION_OFFLOAD` name them.

@dataclass(frozen=True, kw_only=True)
class ActivationStorage:
    """Where activations are stored. transforms: of the model; empty: activations stay. `used` and
    `why` are recorded in the run; empty: the row's name and reason."""

    transforms: tuple[Transform, ...] = ()
    used: str = ""
    why: str = ""


def on_device(device: torch.device) -> ActivationStorage:
    return ActivationStorage()


def on_host(device: torch.device) -> ActivationStorage:
    if device.type == "cuda":
        return ActivationStorage(transforms=(SavedTensorOffloader(OnHost, host=Host(device)),))
    return ActivationStorage(transforms=(SavedTensorOffloader(CpuCopy),), used="cpu", why=(
        "copied: the device is the CPU, so the copies are in the same memory as the originals, and "
        "this shows which bytes move, but frees none"))
