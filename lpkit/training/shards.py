"""Tensors in safetensors files, one file per process, however the tensors are cut.

A process writes its pieces of each `Cut` tensor. Processes that have the same pieces share the
work: each writes some of the tensors. The file's header stores the offsets of each piece in the
whole tensor, `saved_offsets`, where the HuggingFaceStorageReader of `torch.distributed.checkpoint`
(DCP) reads them, too. A reader maps all files, and fills each of its own pieces from the pieces
that overlap with it. So reading and writing need no common plan. DCP plans by collectives that
unpickle what arrives, and stores offsets in a pickle, and unpickling can run any code.

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
from lpkit.parallel.cut import Cut, Offsets, Piece
from lpkit.parallel.ranks import distributed, everybodys

MORE = "//piece-"       # between name and number of a further piece of a tensor in the same file
# a single key of the header: safetensors writes several keys in any order
SHARDING = "DCP_SHARDING_INFO"
# more than the memory that safetensors needs in addition to the tensors
WRITE_BUFFER_BYTES = 2**22

Prefix = str | tuple[str, ...]      # the start of a name; a tuple matches any of its members
Blank = Callable[[str, torch.Size, torch.dtype], Tensor | Cut]


def file_names(processes: int) -> list[str]:
    if processes <= 1:
        return ["tensors.safetensors"]
    return [f"tensors-{i + 1:05d}-of-{processes:05d}.safetensors" for i in range(processes)]


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes `tensors` into `folder`. All processes of a group must call it. Raises OSError on all
    of them."""
    _together(f"could not write {folder}", _write, folder, tensors)


def save_whole(folder: Path, count: int, groups: Iterable[Mapping[str, Tensor]]) -> None:
    """Writes `count` groups of whole tensors, each into a file, as `count` processes would. Only
    one group is in memory at a time. Raises OSError."""
    for name, group in zip(file_names(count), groups, strict=True):
        _save_file(folder / name, group, {key: [0] * t.ndim for key, t in group.items()})


def whole(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def load(paths: list[Path], *, only: Prefix = "", blank: Blank = whole) -> dict[str, Tensor]:
    """Returns the tensors in `paths` whose name starts with `only`.

    A tensor that one file has whole is mapped, and takes no memory. A tensor in several pieces is
    read into the tensor that `blank` makes of its name, shape and dtype. If that is a `Cut`, only
    its pieces are read.
    All processes of a group must call it. Raises OSError on all of them.
    """
    saved = {name: saved_tensor for name, saved_tensor in _mapped(paths).items()
             if name.startswith(only)}
    filled = {name: blank(name, saved_tensor.size, saved_tensor.dtype)
              for name, saved_tensor in saved.items() if len(saved_tensor.pieces) > 1}
    _together(f"could not read {paths[0].parent}", _fill, filled, saved)
    return {name: filled.get(name, saved_tensor.pieces[0][1])
            for name, saved_tensor in saved.items()}


def _together(what: str, work: Callable, *args: Any) -> None:
    """Calls `work(*args)` on all processes. If it raises on one process, all raise OSError."""
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


def _pieces(t: Tensor | Cut) -> tuple[Sequence[Piece], tuple[int, ...]]:
    """Returns this process's pieces of a tensor, and the ranks that have the same pieces."""
    if isinstance(t, Cut):
        return t.pieces, t.owners
    everybody = tuple(range(dist.get_world_size() if distributed() else 1))
    return [Piece((0,) * t.ndim, t.detach())], everybody


def _write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes this process's share of the pieces. The n processes that own the same pieces take
    turns, by size, so that each writes about 1 / n of the bytes. Processes of another pipeline
    stage may have other names."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed() else (0, 1)
    pieces, places, turns = {}, {}, Counter[tuple[int, ...]]()
    by_size = sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))
    for name in by_size:
        here, owners = _pieces(tensors[name])
        # all owners go through the same names in the same order, so they agree without a message
        turns[owners] += 1
        if owners[turns[owners] % len(owners)] == rank:
            for more, (offsets, piece) in enumerate(here):
                # a name may occur only once in a file
                key = f"{name}{MORE}{more}" if more else name
                pieces[key], places[key] = piece.detach(), list(offsets)
    path = folder / file_names(world)[rank]
    _save_file(path, pieces, places)
    if distributed():           # each process syncs its own file; the caller syncs the folder
        sync(path)


def _save_file(path: Path, pieces: Mapping[str, Tensor], places: Mapping[str, list[int]]) -> None:
    # Raises MemoryError here, which a run can report: safetensors would abort the process.
    bytearray(WRITE_BUFFER_BYTES)
    offsets = {name: {"saved_offsets": place} for name, place in places.items()}
    save_file({name: piece.contiguous() for name, piece in pieces.items()}, path,
              metadata={SHARDING: json.dumps(offsets)})


@dataclass
class _Saved:
    """A tensor in files: its mapped pieces, and the shape of the whole."""

    dtype: torch.dtype
    size: torch.Size
    pieces: list[tuple[Offsets, Tensor]] = field(default_factory=list)


def _mapped(paths: list[Path]) -> dict[str, _Saved]:
    """Returns the tensors of all files, mapped: a piece is read from disk only when it is copied.
    """
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
    for name, t in wanted.items():
        for (begin, target), (start, piece) in itertools.product(_pieces(t)[0], saved[name].pieces):
            for dim, (ours, theirs) in enumerate(_overlap(begin, target, start, piece)):
                target, piece = target.narrow(dim, *ours), piece.narrow(dim, *theirs)
            target.copy_(piece)


def _overlap(a: Offsets, first: Tensor, b: Offsets, other: Tensor
             ) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields the overlap of two pieces of a tensor: for each dimension (start, length) in the first
    piece, and in the second."""
    for i, j, n, m in zip(a, b, first.shape, other.shape):
        start = max(i, j)
        length = max(0, min(i + n, j + m) - start)
        yield (min(start - i, n), length), (min(start - j, m), length)
