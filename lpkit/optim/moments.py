"""Storage formats of moments (slots of optimizer state) between updates: float32, bf16, or 8 bits
with a scale per block.

In 8 bits, each block of 256 numbers is divided by its largest magnitude, and each number is rounded
to the nearest of 256 values. A block takes 256 bytes and 4 bytes for its scale, 1.016 bytes per
number. The spacing of the values grows with their size: they span seven decades, and have about two
digits in the largest decade. The second moment is never negative, so its 256 values have no sign
(Dettmers et al. 2022, https://arxiv.org/abs/2110.02861, section 2).

signed: whether the moment can be negative, which selects one of two sets of values.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lpkit.techniques.optimizers import BLOCK

DECADES = 7


class Float32:
    """The float32 format, and the base class of the other formats. suffixes: of the names of a
    slot's tensors in a checkpoint, one for each tensor."""

    suffixes: tuple[str, ...] = ("",)

    def zeros(self, p: Tensor, *, signed: bool) -> list[Tensor]:
        """Return the tensors that represent a slot of zeros with the shape and device of p."""
        return [torch.zeros_like(p, dtype=torch.float32)]

    def decode(self, tensors: list[Tensor], *, signed: bool) -> Tensor:
        """Return the moment in float32, to be updated in place."""
        return tensors[0]

    def encode(self, tensors: list[Tensor], moment: Tensor, *, signed: bool) -> None:
        """Write `moment` to `tensors`. In float32, the moment is the stored tensor itself, so there
        is nothing to do."""


class BFloat16(Float32):
    def zeros(self, p: Tensor, *, signed: bool) -> list[Tensor]:
        return [torch.zeros_like(p, dtype=torch.bfloat16)]

    def decode(self, tensors: list[Tensor], *, signed: bool) -> Tensor:
        return tensors[0].float()

    def encode(self, tensors: list[Tensor], moment: Tensor, *, signed: bool) -> None:
        tensors[0].copy_(moment)


class BlockwiseInt8(Float32):
    """A code of 8 bits for each number, and a float32 scale for each block of 256 numbers."""

    suffixes = ("", "_scale")

    def zeros(self, p: Tensor, *, signed: bool) -> list[Tensor]:
        zero = levels(signed).tolist().index(0.0)
        codes = torch.full(p.shape, zero, dtype=torch.uint8, device=p.device)
        return [codes, torch.zeros(-(-p.numel() // BLOCK), dtype=torch.float32, device=p.device)]

    def decode(self, tensors: list[Tensor], *, signed: bool) -> Tensor:
        return from_blocks(*tensors, signed=signed)

    def encode(self, tensors: list[Tensor], moment: Tensor, *, signed: bool) -> None:
        for stored, new in zip(tensors, to_blocks(moment, signed=signed), strict=True):
            stored.copy_(new)


def to_blocks(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of x (float32, any shape), uint8 in the shape of x, and the scale of each
    block of 256 numbers, its largest magnitude, (blocks,) float32."""
    codes, scale = nearest(blocks_of(x.flatten(), BLOCK), midpoints(signed).to(x.device))
    return codes.flatten()[:x.numel()].view(x.shape), scale


def from_blocks(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """Return the numbers that the results of `to_blocks` represent, float32 in the shape of the
    codes."""
    values = levels(signed).to(codes.device)[codes.flatten().int()]
    blocks = blocks_of(values, BLOCK).mul_(scale[:, None])
    return blocks.flatten()[:codes.numel()].view(codes.shape)


def blocks_of(flat: Tensor, size: int) -> Tensor:
    """Return the n numbers of `flat` (n,) as (blocks, size). The last block is padded with zeros.

    >>> blocks_of(torch.tensor([1, 2, 3]), 2).tolist()
    [[1, 2], [3, 0]]
    """
    return F.pad(flat, (0, -len(flat) % size)).view(-1, size)


def nearest(blocks: Tensor, between: Tensor) -> tuple[Tensor, Tensor]:
    """Return the code of each number in `blocks` (blocks, size), uint8, and the largest magnitude
    of each block, (blocks,). The code is the index of the value that is nearest to the number
    divided by the block's largest magnitude. between: the midpoints of neighbouring values,
    ascending."""
    scale = blocks.abs().amax(1)
    ratio = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return torch.bucketize(ratio, between, out_int32=True).to(torch.uint8), scale


@cache
def levels(signed: bool) -> Tensor:
    """Return the 256 values, (256,) float32, ascending: 0, 1, and for each of DECADES decades the
    midpoints of equal parts of the decade; if `signed`, also the negative midpoints. Each decade
    has twice as many parts as the decade below."""
    values = [0.0, 1.0]
    for i in range(DECADES):
        edges = torch.linspace(0.1, 1, 2**(i + (not signed)) + 1, dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0**(i - DECADES + 1)).tolist()
        values += middles + ([-x for x in middles] if signed else [])
    return torch.tensor(sorted(values))


@cache
def midpoints(signed: bool) -> Tensor:
    """Return the midpoints of neighbouring values of `levels`, (255,)."""
    return (levels(signed)[:-1] + levels(signed)[1:]) / 2
