"""Storage formats of moments between updates: float32, bf16, or 8 bits with a scale per block.

In 8 bits, each block of 256 numbers is divided by its largest magnitude, and each number is rounded
to the nearest of 256 values. The spacing of the values grows with their size, so they span seven
decades, with two digits in the largest decade. The second moment is never negative, so its values
have no sign (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861, section 2).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lpkit.techniques.optimizers import BLOCK

DECADES = 7


class Float32:
    """The float32 format, whose methods every format has. `suffixes` end the names of a slot's
    tensors in a checkpoint."""

    suffixes: tuple[str, ...] = ("",)

    def zeros(self, p: Tensor, *, signed: bool) -> list[Tensor]:
        """Return the tensors of a slot of zeros, on the device of p."""
        return [torch.zeros_like(p, dtype=torch.float32)]

    def decode(self, tensors: list[Tensor], *, signed: bool) -> Tensor:
        """Return the moment in float32, to be updated in place."""
        return tensors[0]

    def encode(self, tensors: list[Tensor], moment: Tensor, *, signed: bool) -> None:
        """Write the moment back into `tensors`. In float32 it is the stored tensor already."""


class BFloat16(Float32):
    def zeros(self, p: Tensor, *, signed: bool) -> list[Tensor]:
        return [torch.zeros_like(p, dtype=torch.bfloat16)]

    def decode(self, tensors: list[Tensor], *, signed: bool) -> Tensor:
        return tensors[0].float()

    def encode(self, tensors: list[Tensor], moment: Tensor, *, signed: bool) -> None:
        tensors[0].copy_(moment)


class BlockwiseInt8(Float32):
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
    """float32 of any shape -> codes (uint8, like x), and the largest magnitude of each block of
    256."""
    codes, scale = nearest(blocks_of(x.flatten(), BLOCK), midpoints(signed).to(x.device))
    return codes.flatten()[:x.numel()].view(x.shape), scale


def from_blocks(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    values = levels(signed).to(codes.device)[codes.flatten().int()]
    blocks = blocks_of(values, BLOCK).mul_(scale[:, None])
    return blocks.flatten()[:codes.numel()].view(codes.shape)


def blocks_of(flat: Tensor, size: int) -> Tensor:
    """(n,) -> (blocks, size). The last block is padded with zeros."""
    return F.pad(flat, (0, -len(flat) % size)).view(-1, size)


def nearest(blocks: Tensor, between: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each block of (blocks, size) by its largest magnitude. Returns the codes (uint8) of
    the nearest values, and the magnitudes. `between`: the midpoints of the ascending values."""
    scale = blocks.abs().amax(1)
    ratio = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return torch.bucketize(ratio, between, out_int32=True).to(torch.uint8), scale


@cache
def levels(signed: bool) -> Tensor:
    """Return the 256 values, ascending, in float32: 0, 1, and for each decade the midpoints of
    equal parts of (0.1, 1). Each decade has twice as many parts as the decade below."""
    values = [0.0, 1.0]
    for i in range(DECADES):
        edges = torch.linspace(0.1, 1, 2**(i + (not signed)) + 1, dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0**(i - DECADES + 1)).tolist()
        values += middles + ([-x for x in middles] if signed else [])
    return torch.tensor(sorted(values))


@cache
def midpoints(signed: bool) -> Tensor:
    return (levels(signed)[:-1] + levels(signed)[1:]) / 2
