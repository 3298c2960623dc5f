"""Scratch space on a disk, in files without names, which vanish when the process ends in any way.

In a traced step (`lpkit.measure.trace`), nothing is written, and no file space is taken.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from lpkit.contracts import StatePlacement
from lpkit.errors import ConfigError
from lpkit.memory.saved import ActivationStorage, Away, SavedTensorOffloader

PAGE, SEGMENT = mmap.PAGESIZE, 2**26     # bytes


class Scratch(StatePlacement):
    """A place for an optimizer's state: memory-mapped files in the temporary folder (TMPDIR). Many
    tensors share a file; each tensor has whole pages. Tensors are fetched as `lpkit.memory.state`
    describes. The system writes the pages to the disk, and this process drops them from its RAM as
    soon as they are written to."""

    name = "disk"
    in_memory = False

    def __init__(self):
        super().__init__(f"memory-mapped, in {self.where()} (Rajbhandari et al. 2021, "
                         f"arXiv:2104.07857)")
        self.where_is: dict[int, tuple[mmap.mmap, int, int]] = {}   # address: map, offset, bytes
        self.segment: mmap.mmap | None = None
        self.taken = 0

    @staticmethod
    def where() -> str:
        """Return the folder and its file system, for messages."""
        folder, kind, longest = Path(tempfile.gettempdir()), "unknown filesystem", 0
        for mount in psutil.disk_partitions(all=True):
            depth = len(mount.mountpoint)
            if depth > longest and folder.resolve().is_relative_to(mount.mountpoint):
                kind, longest = mount.fstype, depth
        ram = ", which is RAM: point TMPDIR to a disk" if kind in ("tmpfs", "ramfs") else ""
        return f"{folder} ({kind}{ram})"

    def mapped(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros. Raises ConfigError if the disk has no room."""
        if detect_fake_mode():
            return torch.empty(shape, dtype=dtype, device="meta")
        nbytes = max(1, shape.numel()) * dtype.itemsize
        if self.segment is None or self.taken + nbytes > len(self.segment):
            size = max(nbytes, SEGMENT)
            with tempfile.TemporaryFile() as file:
                _take(file.fileno(), 0, size)       # fail now, not by a signal within a step
                self.segment, self.taken = mmap.mmap(file.fileno(), size), 0
        pages, offset = self.segment, self.taken
        self.taken += _whole_pages(nbytes)
        numbers = shape.numel()     # 0 for a slot that a parameter does not need
        t = torch.frombuffer(pages, dtype=dtype, count=max(1, numbers), offset=offset)
        t = t[:numbers].view(shape)
        self.where_is[t.data_ptr()] = pages, offset, nbytes
        return t

    def let_go(self, t: Tensor) -> None:
        """Drop the pages of `t` from this process's RAM; the system writes them back later."""
        if t.device.type != "meta":
            pages, offset, nbytes = self.where_is[t.data_ptr()]
            pages.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def store(self, t: Tensor) -> Tensor:
        mapped = self.mapped(t.shape, t.dtype).copy_(t)
        self.let_go(mapped)
        return mapped

    def prefetch(self, stored: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        return lambda: [t.to(device, copy=True) for t in stored]

    def write_back(self, stored: list[Tensor], used: list[Tensor]) -> None:
        for t, new in zip(stored, used, strict=True):
            t.copy_(new)
            self.let_go(t)


def state_on_disk(device: torch.device) -> StatePlacement:
    return Scratch()


def _whole_pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // PAGE) * PAGE


def _take(file: int, offset: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(file, offset, nbytes)
    except OSError as error:
        raise ConfigError(f"{Scratch.where()} has no room for {offset + nbytes:,} bytes "
                          f"({error.strerror}); point TMPDIR to a disk that has, or keep this on "
                          f"the device") from None


# ---- a file of slots

@dataclass(eq=False)
class Slot:
    """A place in the file, free again when the object is collected."""

    offset: int
    nbytes: int
    leaving: mmap.mmap | None = None    # pages that are being written
    written: Future | None = None
    coming: Future | None = None        # pages that are being read


class Slots:
    """One file of slots of whole pages, which are reused. One thread writes and reads in order, so
    callers do not wait; data that is still being written is returned from memory."""

    WAITING = 2**28     # bytes being written, above which a writer must wait

    def __init__(self):
        handle, path = tempfile.mkstemp()
        os.unlink(path)
        self.file, self.direct = _direct(handle)
        self.end, self.free = 0, {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="lpkit disk")
        self.out: deque[tuple[Future, int]] = deque()
        self.close = weakref.finalize(self, _close, self.thread, self.file)

    def slot(self, nbytes: int) -> Slot:
        """Return a free slot. Raises ConfigError if the disk has no room."""
        size = _whole_pages(nbytes)
        free = self.free.setdefault(size, [])
        if not free:
            _take(self.file, self.end, size)
            free.append(self.end)
            self.end += size
        slot = Slot(free.pop(), nbytes)
        weakref.finalize(slot, free.append, slot.offset).atexit = False
        return slot

    def write(self, t: Tensor) -> Slot:
        """Write t (bytes,), uint8 on the CPU, to a new slot; t may change after this returns."""
        if detect_fake_mode():
            return Slot(0, len(t))
        slot = self.slot(len(t))
        slot.leaving = _pages(slot.nbytes)
        torch.frombuffer(slot.leaving, dtype=torch.uint8, count=len(t)).copy_(t)
        slot.written = self.thread.submit(_write, self.file, slot)
        self.out.append((slot.written, slot.nbytes))
        while self.out and (self.out[0][0].done()
                            or sum(nbytes for _, nbytes in self.out) > self.WAITING):
            self.out.popleft()[0].result()
        return slot

    def expect(self, slot: Slot) -> None:
        """Start to read the slot."""
        if slot.written and slot.leaving is None and slot.coming is None:
            slot.coming = self.thread.submit(_read, self.file, slot.nbytes, slot.offset)

    def read(self, slot: Slot) -> Tensor:
        """Return the slot's bytes as uint8 (bytes,). Raises OSError."""
        if fake := detect_fake_mode():
            # without tracking: in a real step, pages of the system are not tracked either
            with _disable_current_modes(), fake:
                return torch.empty(slot.nbytes, dtype=torch.uint8)
        if (pages := slot.leaving) is None:
            slot.written.result()
            self.expect(slot)
            pages, slot.coming = slot.coming.result(), None
        return torch.frombuffer(pages, dtype=torch.uint8, count=slot.nbytes)


def _direct(handle: int) -> tuple[int, bool]:
    """Open the file again without the page cache (O_DIRECT). Returns the open file, and whether it
    bypasses the page cache; some file systems do not allow it."""
    try:
        # by handle, since another process may have reused the file's name by now
        direct = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError):
        return handle, False
    try:
        os.ftruncate(direct, PAGE)
        os.pwrite(direct, _pages(1), 0)     # some file systems accept the flag but not the write
    except OSError as error:
        os.close(direct)
        if error.errno != errno.EINVAL:
            raise
        return handle, False
    os.close(handle)
    return direct, True


def _pages(nbytes: int) -> mmap.mmap:
    """Return memory that begins at a page, which O_DIRECT requires."""
    return mmap.mmap(-1, _whole_pages(nbytes))


def _write(file: int, slot: Slot) -> None:
    done, view = 0, memoryview(slot.leaving)
    while done < len(view):
        done += os.pwrite(file, view[done:], slot.offset + done)
    slot.leaving = None


def _read(file: int, nbytes: int, offset: int) -> mmap.mmap:
    pages, done = _pages(nbytes), 0
    view = memoryview(pages)
    while done < len(pages):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            raise OSError(f"the scratch file ends at {offset + done}, where {nbytes - done} bytes "
                          f"are missing")
        done += count
    return pages


def _close(thread: ThreadPoolExecutor, file: int) -> None:
    thread.shutdown(wait=True)
    os.close(file)


# ---- activations

class OnDisk(Away):
    """Stores tensors in a file without a name; a background thread writes and reads it."""

    def __init__(self, t: Tensor, file: Slots):
        self.file, self.dtype, self.shape, self.device = file, t.dtype, t.shape, t.device
        self.slot = file.write(t.detach().cpu().view(-1).view(torch.uint8))
        self.file_bytes = self.slot.nbytes

    def expect(self) -> None:
        self.file.expect(self.slot)

    def get(self) -> Tensor:
        return self.file.read(self.slot).view(self.dtype).view(self.shape).to(self.device)


def activations_on_disk(device: torch.device) -> ActivationStorage:
    file = Slots()
    how = "through the page cache: this filesystem has no O_DIRECT"
    if file.direct:
        how = "past the page cache (O_DIRECT)"
    return ActivationStorage(transforms=(SavedTensorOffloader(OnDisk, file=file),), used="disk",
                             why=f"{how}, in {Scratch.where()} (Rajbhandari et al. 2021, arXiv:2104.07857)")
