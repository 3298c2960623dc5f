"""How AdamW's two moments rest between updates: in float32, or in 8 bits with a scale for each block.

8 bits: each block of 256 is divided by its largest magnitude, and each number becomes the nearest of 256 values whose
spacing grows with their size, so that seven decades are there with two digits at the top. The second moment is never
negative and needs no sign (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861, section 2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256     # numbers that share a scale
DECADES = 7


class Form(ABC):
    """`slots` are the names under which a checkpoint holds the tensors."""

    slots: tuple[str, ...]
    bytes_per_param: float

    @abstractmethod
    def zeros(self, p: Tensor) -> list[Tensor]:
        """The tensors of two moments that are zero, on the device of p."""

    @abstractmethod
    def decode(self, tensors: list[Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Both moments in float32, to be updated in place."""

    @abstractmethod
    def encode(self, tensors: list[Tensor], m: Tensor, v: Tensor) -> None:
        """Write them back into `tensors`."""


class Float32(Form):
    slots = ("exp_avg", "exp_avg_sq")
    bytes_per_param = 8

    def zeros(self, p: Tensor) -> list[Tensor]:
        return [torch.zeros_like(p, dtype=torch.float32) for _ in self.slots]

    def decode(self, tensors: list[Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
        return tensors[0], tensors[1]

    def encode(self, tensors: list[Tensor], m: Tensor, v: Tensor) -> None:
        pass    # they are the tensors


class Blocks8(Form):
    slots = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    bytes_per_param = 2 * (1 + 4 / BLOCK)

    def zeros(self, p: Tensor) -> list[Tensor]:
        blocks = -(-p.numel() // BLOCK)
        return [made for signed in (True, False) for made in (
            torch.full(p.shape, int(levels(signed).tolist().index(0.0)), dtype=torch.uint8, device=p.device),
            torch.zeros(blocks, dtype=torch.float32, device=p.device))]

    def decode(self, tensors: list[Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
        m, m_scale, v, v_scale = tensors
        return from_blocks(m, m_scale, signed=True), from_blocks(v, v_scale, signed=False)

    def encode(self, tensors: list[Tensor], m: Tensor, v: Tensor) -> None:
        for i, (moment, signed) in enumerate(((m, True), (v, False))):
            codes, scale = to_blocks(moment, signed=signed)
            tensors[2 * i].copy_(codes)
            tensors[2 * i + 1].copy_(scale)


def to_blocks(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """float32 of any shape -> codes (uint8, like x) and the largest magnitude of each block of 256, the last one short."""
    flat = x.flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    ratio = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(ratio, midpoints(signed).to(x.device), out_int32=True).to(torch.uint8)
    return codes.flatten()[:len(flat)].view(x.shape), scale


def from_blocks(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    values = levels(signed).to(codes.device)[codes.flatten().int()]
    short = -len(values) % BLOCK
    return F.pad(values, (0, short)).view(-1, BLOCK).mul_(scale[:, None]).flatten()[:codes.numel()].view(codes.shape)


@cache
def levels(signed: bool) -> Tensor:
    """The 256 values, ascending, float32: for each decade the middles of evenly spaced pieces of (0.1, 1), twice as many
    as for the decade below; and 0 and 1."""
    found = [0.0, 1.0]
    for i in range(DECADES):
        edges = torch.linspace(0.1, 1, 2**(i + (not signed)) + 1, dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0**(i - DECADES + 1)).tolist()
        found += middles + ([-x for x in middles] if signed else [])
    return torch.tensor(sorted(found))


@cache
def midpoints(signed: bool) -> Tensor:
    return (levels(signed)[:-1] + levels(signed)[1:]) / 2
