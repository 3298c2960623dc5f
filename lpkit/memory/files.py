"""Scratch space on a disk, gone when its process is, however that ends: files are unlinked as soon as they are open."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import psutil
import torch
from torch import Tensor

from lpkit.config import ConfigError

PAGE, SEGMENT = mmap.PAGESIZE, 2**26     # bytes


def filesystem(folder: Path) -> str:
    """Of the mount that `folder` is on, "ext4" for example; empty where the system does not say."""
    mounts = [m for m in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(m.mountpoint)]
    return max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else ""


class Scratch:
    """Tensors in memory-mapped files under the system's temporary folder (TMPDIR), in segments: few files, whole pages."""

    def __init__(self):
        self.where_is: dict[int, tuple[mmap.mmap, int, int]] = {}    # by address: the map, offset and bytes in it
        self.segment: mmap.mmap | None = None
        self.taken = 0

    @staticmethod
    def where() -> str:
        """The folder and its kind, for people."""
        folder = Path(tempfile.gettempdir())
        kind = filesystem(folder)
        ram = ", which is RAM: point TMPDIR to a disk" if kind in ("tmpfs", "ramfs") else ""
        return f"{folder} ({kind or 'unknown filesystem'}{ram})"

    def mapped(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Room for a tensor, zeros. Raises ConfigError when the disk has none."""
        nbytes = max(1, shape.numel() * dtype.itemsize)
        if self.segment is None or self.taken + nbytes > len(self.segment):
            self.segment, self.taken = _segment(max(nbytes, SEGMENT)), 0
        pages, offset = self.segment, self.taken
        self.taken += -(-nbytes // PAGE) * PAGE
        t = torch.frombuffer(pages, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
        self.where_is[t.data_ptr()] = pages, offset, nbytes
        return t

    def let_go(self, t: Tensor) -> None:
        """This process needs the pages of `t` no more for now: written back when the system likes, and out of our RAM."""
        pages, offset, nbytes = self.where_is[t.data_ptr()]
        pages.madvise(mmap.MADV_DONTNEED, offset, nbytes)


def _segment(nbytes: int) -> mmap.mmap:
    with tempfile.TemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)     # now, and not by a signal in the middle of a step
        except OSError as error:
            raise ConfigError(f"{Scratch.where()} has no room for {nbytes:,} bytes ({error.strerror}); point TMPDIR to a "
                              f"disk that has, or keep this on the device") from None
        return mmap.mmap(file.fileno(), nbytes)
