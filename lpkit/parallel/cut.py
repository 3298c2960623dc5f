"""Tensors that are divided over ranks: which pieces of a parameter a rank has, and where these
pieces are in the whole parameter.

Tensor parallelism cuts a parameter along one dimension. ZeRO then cuts the remaining part by rows.
A rank may have several pieces of one parameter: for example, the gate and up weights are stacked in
one matrix, and a rank has some rows of each. A checkpoint stores each piece with its offsets in the
whole parameter. So a run in another layout can read the pieces that overlap with its own pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Offsets = tuple[int, ...]


class TensorPiece(NamedTuple):
    offsets: Offsets        # index of the piece's first number in the whole tensor
    data: Tensor            # the piece: a view of this rank's tensor


@dataclass(frozen=True)
class Split:
    """How tensor parallelism cuts a parameter over `ranks` ranks. `index` is this rank's number.

    Dimension `dim` consists of `parts` stretches of equal length, for example 2 for gate and up.
    Each stretch is divided equally over the ranks. With 2 parts and 2 ranks, rank 0 has rows 0, 1,
    4, 5 of 8 rows. If `dim` is None, rank 0 has the whole tensor, and the other ranks have zeros.
    """

    dim: int | None
    index: int
    ranks: int
    parts: int = 1

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, as one tensor."""
        if self.dim is None:
            return torch.zeros_like(whole) if self.index else whole
        stretches = whole.chunk(self.parts, self.dim)
        return torch.cat([t.chunk(self.ranks, self.dim)[self.index] for t in stretches], self.dim)

    def shape(self, part: torch.Size) -> torch.Size:
        """Return the shape of the whole tensor, from the shape of a part."""
        sizes = list(part)
        if self.dim is not None:
            sizes[self.dim] *= self.ranks
        return torch.Size(sizes)

    def spans(self, part: torch.Size) -> Iterator[tuple[int, int, int]]:
        """Yield (start in the part, start in the whole tensor, length) along `dim` for this rank's
        share of each stretch. `part`: the shape of this rank's part."""
        length = part[self.dim] // self.parts
        for stretch in range(self.parts):
            yield stretch * length, (stretch * self.ranks + self.index) * length, length


@dataclass(frozen=True)
class Cut:
    """A whole tensor of `shape`, of which this rank has only `pieces`. `owners` are the ranks that
    have the same pieces, this rank included."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]
    owners: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def empty(self, dtype: torch.dtype) -> Cut:
        """Return a Cut with pieces at the same offsets, and uninitialised data of `dtype`."""
        pieces = (TensorPiece(offsets, torch.empty(t.shape, dtype=dtype))
                  for offsets, t in self.pieces)
        return replace(self, dtype=dtype, pieces=tuple(pieces))

    def copy_(self, source: Tensor | Cut) -> None:
        """Fill the pieces from the whole tensor, or from a Cut with pieces at the same offsets."""
        if isinstance(source, Cut):
            for (_, ours), (_, theirs) in zip(self.pieces, source.pieces, strict=True):
                ours.copy_(theirs)
            return
        for offsets, ours in self.pieces:
            ours.copy_(_there(source, offsets, ours))

    def full_tensor(self) -> Tensor:
        """Return the whole tensor on every rank, bit for bit. All ranks must call it."""
        whole = torch.zeros(self.shape, dtype=self.dtype)
        if dist.get_rank() == self.owners[0]:
            replace(self, pieces=tuple(TensorPiece(at, _there(whole, at, t))
                                       for at, t in self.pieces)
                    ).copy_(self)
        # A sum over ranks: for each number, one rank adds its bytes and all other ranks add zeros.
        # Bytes are summed, not floats, because -0.0 + 0.0 = 0.0, and a NaN could change its bits.
        dist.all_reduce(whole.view(-1).view(torch.uint8))
        return whole


def _there(whole: Tensor, offsets: Offsets, like: Tensor) -> Tensor:
    """Return the view of `whole` at `offsets` with the shape of `like`."""
    return whole[tuple(slice(at, at + size) for at, size in zip(offsets, like.shape))]


def pieces(t: Tensor, first: int, shape: torch.Size, split: Split | None
           ) -> tuple[TensorPiece, ...]:
    """Return the pieces of which `t` consists, with their offsets in the whole tensor.

    `split` cut a part of shape `shape` from the whole tensor (None: the part is the whole tensor).
    ZeRO then cut the rows of this part: `t` has the rows from `first` on.
    """
    if split is None or split.dim is None:
        spans, dim = ([(0, 0, shape[0])] if split is None or not split.index else []), 0
    else:
        spans, dim = list(split.spans(shape)), split.dim
    cut_pieces = []
    # A stretch begins at `at` in the part, and at `place` in the whole tensor.
    for at, place, length in spans:
        offsets, piece = [0] * t.ndim, t
        if dim:         # the split cut columns, so each stretch has all rows of `t`
            piece, offsets[0], offsets[dim] = t.narrow(dim, at, length), first, place
        else:           # the split cut rows, as ZeRO did: take the rows that are in both
            begin, end = max(at, first), min(at + length, first + len(t))
            piece, offsets[0] = t[begin - first:max(begin, end) - first], place + begin - at
        if piece.numel():
            cut_pieces.append(TensorPiece(tuple(offsets), piece))
    return tuple(cut_pieces)
