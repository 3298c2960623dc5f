"""Tensors in safetensors files, one file per process, for `torch.distributed.checkpoint` (DCP).

DCP plans: which process writes which piece of a DTensor, one process for a tensor that all hold,
and, on loading, which bytes of which file fill which piece of a tensor that is now cut otherwise.
This module stores the pieces. A piece keeps its place in the whole tensor, `saved_offsets`, in the
file's header, where DCP's HuggingFaceStorageReader looks too. DCP's own format keeps such things
in a pickle, and reading a pickle runs what it says; here nothing is ever unpickled.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as facts
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.futures import Future

from lpkit.files import sync
from lpkit.parallel.ranks import distributed

SHARDING = "DCP_SHARDING_INFO"      # one key alone: safetensors writes several in any order


def file_names(processes: int) -> list[str]:
    if processes <= 1:
        return ["tensors.safetensors"]
    return [f"tensors-{i + 1:05d}-of-{processes:05d}.safetensors" for i in range(processes)]


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` into `folder`; all processes of a group call it. Raises OSError."""
    with _said_plainly(f"could not write {folder}"):
        dcp.save({ALL: dict(tensors)}, storage_writer=_Writer(folder), planner=_SavePlanner(),
                 no_dist=not distributed())


Blank = Callable[[str, torch.Size, torch.dtype], Tensor]


def whole(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def load(paths: list[Path], *, only: str = "", into: dict[str, Tensor] | None = None,
         blank: Blank = whole) -> dict[str, Tensor]:
    """The tensors in `paths` whose name starts with `only`, or `into`, filled in place.

    What one file has whole is mapped, and takes no memory. What lies in several is read into what
    `blank` makes for its name, shape and dtype; all of it, unless that is a DTensor.
    Every process of a group calls this. Raises ValueError when `into` does not fit, before any of
    it is written.
    """
    reader = _Reader(paths)
    saved = {name: one for name, one in reader.wholes.items() if name.startswith(only)}
    if into is None:
        into, wanted = {}, {}
        for name, found in saved.items():
            if len(found.chunks) == 1:
                into[name] = reader.pieces[name, tuple(found.chunks[0].offsets)]
            else:
                into[name] = wanted[name] = blank(name, found.size, found.properties.dtype)
    else:
        wanted = {name: t for name, t in into.items() if name.startswith(only)}
    for name, t in wanted.items():
        found, due = "nothing", f"{t.dtype} {tuple(t.shape)}"
        if name in saved:
            found = f"{saved[name].properties.dtype} {tuple(saved[name].size)}"
        if found != due:
            raise ValueError(f"{paths[0].parent} holds {found} as {name}, which is to fill {due}; "
                             f"load it with the settings that it was saved with")
    with _said_plainly(f"could not read {paths[0].parent}"):
        dcp.load({ALL: wanted}, storage_reader=reader, planner=_LoadPlanner(),
                 no_dist=not distributed())
    return into


@contextmanager
def _said_plainly(what: str) -> Iterator[None]:
    """DCP wraps every error, Ctrl-C too, in a BaseException, and warns of one process alone."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if not isinstance(cause, Exception):
            raise cause from None
        where = f" on process {rank}" if distributed() else ""
        raise OSError(f"{what}{where}: {cause}") from cause


# DCP logs four lines for every name at the top of what it is given, which for a small model takes
# as long as writing it. So it is given one name, and the planners look below it.
ALL = "tensors"


WRITE_BUFFER_BYTES = 2**22      # more than safetensors wants beside the tensors


class _SavePlanner(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: Any = None,
                       is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict[ALL], storage_meta, is_coordinator)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict: dict[str, Any], metadata: facts.Metadata | None = None,
                       is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict[ALL], metadata, is_coordinator)


class _Writer(dcp.FileSystemWriter):
    """DCP gives each process its pieces; each writes them to the file with its number."""

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        return [dataclasses.replace(plan, storage_data=name)
                for plan, name in zip(plans, file_names(len(plans)))]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list]:
        pieces, places = {}, {}
        for item in plan.items:
            name = item.index.fqn
            pieces[name] = planner.resolve_data(item).detach().contiguous()
            places[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        path = self.path / plan.storage_data
        # a MemoryError is an end that a run can tell; safetensors aborts the process without one
        bytearray(WRITE_BUFFER_BYTES)
        save_file(pieces, path, metadata={SHARDING: json.dumps(places)})
        if distributed():           # here, where it was written; the caller syncs the whole folder
            sync(path)
        return _done([])

    def finish(self, metadata: facts.Metadata, results: list) -> None:
        pass                        # the headers say it all; DCP would write a pickle


class _Reader(dcp.FileSystemReader):
    """Maps the files: a piece is read from the disk when a plan asks for it."""

    def __init__(self, paths: list[Path]):
        super().__init__(paths[0].parent)
        self.wholes: dict[str, facts.TensorStorageMetadata] = {}
        self.pieces: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                places = json.loads(file.metadata()[SHARDING])
                for name in file.keys():
                    piece = file.get_tensor(name)
                    self._add(name, tuple(places[name]["saved_offsets"]), piece)

    def _add(self, name: str, offsets: tuple[int, ...], piece: Tensor) -> None:
        if name not in self.wholes:
            self.wholes[name] = facts.TensorStorageMetadata(
                facts.TensorProperties(dtype=piece.dtype), torch.Size([0] * piece.ndim), [])
        whole = self.wholes[name]
        ends = [start + length for start, length in zip(offsets, piece.shape)]
        whole.size = torch.Size(map(max, whole.size, ends))
        whole.chunks.append(facts.ChunkStorageMetadata(torch.Size(offsets), piece.shape))
        self.pieces[name, offsets] = piece

    def read_metadata(self, *args: Any, **kwargs: Any) -> facts.Metadata:
        return facts.Metadata(self.wholes, storage_data=self.pieces)

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        for item in plan.items:
            piece = self.pieces[item.storage_index.fqn, tuple(item.storage_index.offset)]
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                piece = piece.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        return _done(None)


def _done(result: Any) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future
