"""Save and load the tensors of a checkpoint as safetensors files, one file per process. Any number
of processes can load what any other number has saved.

A process writes its pieces of each `Cut` tensor. If several processes have the same pieces, each of
them writes some of the tensors. The header of a file has the offsets of each piece in the whole
tensor (`saved_offsets`), in the form that the HuggingFaceStorageReader of
`torch.distributed.checkpoint` (DCP) reads. To load, a process maps all files into memory, and fills
each of its pieces from the saved pieces that overlap with it.

DCP itself is not used: its processes agree on a plan by messages that are unpickled, and it stores
offsets in a pickle. Unpickling can run any code.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lpkit.errors import packed, unpacked
from lpkit.files import sync
from lpkit.parallel.cut import Cut, Offsets, TensorPiece
from lpkit.parallel.ranks import distributed, everybodys

# "NAME", "NAME//piece-1", "NAME//piece-2", ...: keys of the pieces of one tensor in the same file
MORE = "//piece-"
# The header has a single key, because safetensors writes several keys in no fixed order: the same
# tensors must give the same bytes.
SHARDING = "DCP_SHARDING_INFO"
# at least the memory that safetensors allocates to write a file
WRITE_BUFFER_BYTES = 2**22

Prefix = str | tuple[str, ...]      # the start of a name; a tuple matches any of its members
Blank = Callable[[str, torch.Size, torch.dtype], Tensor | Cut]


def file_names(processes: int) -> list[str]:
    """Return the names of the files that `processes` processes write."""
    if processes <= 1:
        return ["tensors.safetensors"]
    return [f"tensors-{i + 1:05d}-of-{processes:05d}.safetensors" for i in range(processes)]


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` into `folder`, one file for each process. All processes must call it. If it
    fails on one process, it raises OSError on all of them."""
    _together(f"could not write {folder}", _write, folder, tensors)


def save_whole(folder: Path, count: int, groups: Iterable[Mapping[str, Tensor]]) -> None:
    """Write whole tensors in one process, as the files of `count` processes. `groups` yields the
    tensors of each file, so that only one file's tensors are in memory. Raises OSError."""
    for name, group in zip(file_names(count), groups, strict=True):
        _save_file(folder / name, group, {key: [0] * t.ndim for key, t in group.items()})


def whole(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor for all numbers of a saved tensor: a `Blank` for `load`."""
    return torch.empty(shape, dtype=dtype)


def load(paths: list[Path], *, only: Prefix = "", blank: Blank = whole) -> dict[str, Tensor]:
    """Return the tensors in the files `paths` whose names start with `only`.

    A tensor that was saved as one piece is mapped from its file, so it takes no memory until it is
    read. A tensor that was saved in several pieces is copied into `blank(name, shape, dtype)`. If
    that is a `Cut`, only the numbers of the Cut's pieces are read.

    All processes must call it. If it fails on one process, it raises OSError on all of them.
    """
    saved = {name: saved_tensor for name, saved_tensor in _mapped(paths).items()
             if name.startswith(only)}
    filled = {name: blank(name, saved_tensor.size, saved_tensor.dtype)
              for name, saved_tensor in saved.items() if len(saved_tensor.pieces) > 1}
    _together(f"could not read {paths[0].parent}", _fill, filled, saved)
    return {name: filled.get(name, saved_tensor.pieces[0][1])
            for name, saved_tensor in saved.items()}


def _together(what: str, work: Callable, *args: Any) -> None:
    """Call `work(*args)` on all processes. If it raises an error on one process, raise OSError with
    this error on all processes. `what`: the beginning of the sentence."""
    raised = None
    try:
        work(*args)
    except Exception as error:
        raised = error
    for rank, failure in enumerate(everybodys(raised and packed(raised))):
        if failure:
            where = f" on process {rank}" if distributed() else ""
            cause = unpacked(*failure)
            raise OSError(f"{what}{where}: {cause}") from raised or cause


def _pieces(t: Tensor | Cut) -> tuple[Sequence[TensorPiece], tuple[int, ...]]:
    """Return this process's pieces of a tensor, and the ranks that have the same pieces. A plain
    tensor is one piece that all ranks have."""
    if isinstance(t, Cut):
        return t.pieces, t.owners
    everybody = tuple(range(dist.get_world_size() if distributed() else 1))
    return [TensorPiece((0,) * t.ndim, t.detach())], everybody


def _write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this process's share of the pieces into its file. If n processes have the same pieces,
    each writes about 1 / n of their bytes: tensors are sorted by size and dealt out in turn. The
    names may differ between stages of a pipeline."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed() else (0, 1)
    pieces, places, turns = {}, {}, Counter[tuple[int, ...]]()
    by_size = sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))
    for name in by_size:
        here, owners = _pieces(tensors[name])
        # All owners of a piece go through the same names in the same order, so they agree without a
        # message on who writes the piece.
        turns[owners] += 1
        if owners[turns[owners] % len(owners)] == rank:
            for more, (offsets, piece) in enumerate(here):
                # a key may occur only once in a file, so further pieces get a number
                key = f"{name}{MORE}{more}" if more else name
                pieces[key], places[key] = piece.detach(), list(offsets)
    path = folder / file_names(world)[rank]
    _save_file(path, pieces, places)
    if distributed():           # each process syncs its own file; the caller syncs the folder
        sync(path)


def _save_file(path: Path, pieces: Mapping[str, Tensor], places: Mapping[str, list[int]]) -> None:
    """Write `pieces` with their offsets `places`, both by key."""
    # If memory is full, this line raises MemoryError, which a run can report. safetensors would
    # abort the process.
    bytearray(WRITE_BUFFER_BYTES)
    offsets = {name: {"saved_offsets": place} for name, place in places.items()}
    save_file({name: piece.contiguous() for name, piece in pieces.items()}, path,
              metadata={SHARDING: json.dumps(offsets)})


@dataclass
class _Saved:
    """A saved tensor: the shape of the whole tensor, and its pieces, mapped from the files."""

    dtype: torch.dtype
    size: torch.Size
    pieces: list[tuple[Offsets, Tensor]] = field(default_factory=list)


def _mapped(paths: list[Path]) -> dict[str, _Saved]:
    """Return the saved tensors of all files, by name. The pieces are mapped: a piece is read from
    disk only when it is copied. The whole shape follows from where the pieces end."""
    saved: dict[str, _Saved] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            places = json.loads(file.metadata()[SHARDING])
            for key in file.keys():
                piece, offsets = file.get_tensor(key), tuple(places[key]["saved_offsets"])
                whole = saved.setdefault(key.partition(MORE)[0], _Saved(piece.dtype, piece.shape))
                ends = [start + length for start, length in zip(offsets, piece.shape)]
                whole.size = torch.Size(map(max, whole.size, ends))
                whole.pieces.append((offsets, piece))
    return saved


def _fill(wanted: Mapping[str, Tensor], saved: Mapping[str, _Saved]) -> None:
    """Copy into each piece of the `wanted` tensors the numbers that overlap with a saved piece."""
    for name, t in wanted.items():
        for (begin, target), (start, piece) in itertools.product(_pieces(t)[0], saved[name].pieces):
            for dim, (ours, theirs) in enumerate(_overlap(begin, target, start, piece)):
                target, piece = target.narrow(dim, *ours), piece.narrow(dim, *theirs)
            target.copy_(piece)


def _overlap(a: Offsets, first: Tensor, b: Offsets, other: Tensor
             ) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield, for each dimension, where two pieces of one tensor overlap: (start, length) in the
    piece `first`, which is at offsets `a`, and (start, length) in `other`, at offsets `b`."""
    for i, j, n, m in zip(a, b, first.shape, other.shape):
        start = max(i, j)
        length = max(0, min(i + n, j + m) - start)
        yield (min(start - i, n), length), (min(start - j, m), length)
