"""Weights kept in bf16 without losing small updates.

A bf16 weight has 8 significant bits: an update of less than 2^-9 of it rounds back to where it was,
every time. Rounded up or down with the probability of the remainder instead, it is right on
average, and a thousand of them add up (Gupta et al. 2015, https://arxiv.org/abs/1502.02551; Zamirai
et al. 2020, https://arxiv.org/abs/2010.06192).
"""

import zlib

import torch
from torch import Tensor

DROPPED = 16    # bits of a float32 that bf16 has not


def to_bf16(w: Tensor, generator: torch.Generator | None) -> Tensor:
    """float32 -> bf16, in expectation the same number: noise is added to the bits that drop."""
    return drawn(w, noise(w, generator))


def noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """int32, of the bits that drop."""
    return torch.randint(1 << DROPPED, like.shape, dtype=torch.int32, device=like.device,
                         generator=generator)


def drawn(w: Tensor, bits: Tensor) -> Tensor:
    """float32 -> bf16, by noise, which is used up."""
    bits.add_(w.view(torch.int32)).bitwise_and_(-(1 << DROPPED))
    return bits.view(torch.float32).bfloat16()


def generator(device: torch.device, *key: int) -> torch.Generator:
    """Its numbers follow from `key` (seed, parameter, update) alone, also in a resumed run."""
    high, low = (zlib.crc32(repr((word, *key)).encode()) for word in ("high", "low"))
    return torch.Generator(device).manual_seed(high << 32 | low)
