"""A tensor of which a rank has some pieces, and how a parameter is cut into pieces.

Tensor parallelism cuts a parameter along one dimension. ZeRO then cuts the remaining part by rows.
The gate and up weights are stacked in one matrix, and a rank has some rows of each, so a rank may
have several pieces of one parameter. A checkpoint stores each piece with its offsets. A run in any
other layout reads the pieces that overlap with its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Offsets = tuple[int, ...]


class Piece(NamedTuple):
    offsets: Offsets        # of the piece's first number in the whole tensor
    data: Tensor            # a view of this rank's numbers


@dataclass(frozen=True)
class Split:
    """The part of rank `index` of `ranks`: its share of each of `parts` equal stretches of
    dimension `dim`. If dim is None, the first rank has the whole tensor and the others nothing."""

    dim: int | None
    index: int
    ranks: int
    parts: int = 1

    def part(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a tensor, as one tensor."""
        if self.dim is None:
            return torch.zeros_like(whole) if self.index else whole
        stretches = whole.chunk(self.parts, self.dim)
        return torch.cat([t.chunk(self.ranks, self.dim)[self.index] for t in stretches], self.dim)

    def shape(self, part: torch.Size) -> torch.Size:
        """Returns the shape of the whole tensor, from the shape of a part."""
        sizes = list(part)
        if self.dim is not None:
            sizes[self.dim] *= self.ranks
        return torch.Size(sizes)

    def spans(self, part: torch.Size) -> Iterator[tuple[int, int, int]]:
        """Yields the stretches along `dim`: start in the part, start in the whole tensor, and
        length."""
        length = part[self.dim] // self.parts
        for stretch in range(self.parts):
            yield stretch * length, (stretch * self.ranks + self.index) * length, length


@dataclass(frozen=True)
class Cut:
    """A tensor of `shape`, of which this rank has `pieces`. `owners` are the ranks that have the
    same pieces."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    owners: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def empty(self, dtype: torch.dtype) -> Cut:
        """Returns a Cut with the same pieces and uninitialised data of `dtype`."""
        pieces = (Piece(offsets, torch.empty(t.shape, dtype=dtype)) for offsets, t in self.pieces)
        return replace(self, dtype=dtype, pieces=tuple(pieces))

    def copy_(self, source: Tensor | Cut) -> None:
        """Fills the pieces from the whole tensor, or from a Cut with the same pieces."""
        if isinstance(source, Cut):
            for (_, ours), (_, theirs) in zip(self.pieces, source.pieces, strict=True):
                ours.copy_(theirs)
            return
        for offsets, ours in self.pieces:
            ours.copy_(_there(source, offsets, ours))

    def full_tensor(self) -> Tensor:
        """Returns the whole tensor, bit for bit. All ranks must call it."""
        whole = torch.zeros(self.shape, dtype=self.dtype)
        if dist.get_rank() == self.owners[0]:
            replace(self, pieces=tuple(Piece(at, _there(whole, at, t)) for at, t in self.pieces)
                    ).copy_(self)
        # the other ranks add zeros; as bytes, so that -0.0 and NaN stay
        dist.all_reduce(whole.view(-1).view(torch.uint8))
        return whole


def _there(whole: Tensor, offsets: Offsets, like: Tensor) -> Tensor:
    return whole[tuple(slice(at, at + size) for at, size in zip(offsets, like.shape))]


def pieces(t: Tensor, first: int, shape: torch.Size, split: Split | None) -> tuple[Piece, ...]:
    """Returns the pieces that make up `t`: the rows from `first` on of a part of `shape`, which
    `split` cut from the whole tensor."""
    if split is None or split.dim is None:
        spans, dim = ([(0, 0, shape[0])] if split is None or not split.index else []), 0
    else:
        spans, dim = list(split.spans(shape)), split.dim
    cut_pieces = []
    for at, place, length in spans:
        offsets, piece = [0] * t.ndim, t
        if dim:
            piece, offsets[0], offsets[dim] = t.narrow(dim, at, length), first, place
        else:
            begin, end = max(at, first), min(at + length, first + len(t))
            piece, offsets[0] = t[begin - first:max(begin, end) - first], place + begin - at
        if piece.numel():
            cut_pieces.append(Piece(tuple(offsets), piece))
    return tuple(cut_pieces)
