"""Weights in bf16 that do not lose small updates.

A bf16 weight has 8 significant bits. An update of less than 2^-9 of the weight always rounds back
to the old weight. Stochastic rounding rounds up or down with the probability of the remainder: it
is right on average, so a thousand small updates add up (Gupta et al. 2015,
https://arxiv.org/abs/1502.02551; Zamirai et al. 2020, https://arxiv.org/abs/2010.06192).
"""

import zlib

import torch
from torch import Tensor

DROPPED = 16    # bits of float32 that bf16 lacks


def to_bf16(w: Tensor, generator: torch.Generator | None) -> Tensor:
    """Round float32 to bf16 such that the expectation is exact: adds noise to the dropped bits."""
    return drawn(w, noise(w, generator))


def noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return random int32 noise for the bits that are dropped."""
    return torch.randint(1 << DROPPED, like.shape, dtype=torch.int32, device=like.device,
                         generator=generator)


def drawn(w: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bf16 by noise, and overwrite the noise."""
    bits.add_(w.view(torch.int32)).bitwise_and_(-(1 << DROPPED))
    return bits.view(torch.float32).bfloat16()


def generator(device: torch.device, *key: int) -> torch.Generator:
    """Return a generator that depends only on `key` (seed, parameter, update), so that a resumed
    run draws the same numbers."""
    high, low = (zlib.crc32(repr((word, *key)).encode()) for word in ("high", "low"))
    return torch.Generator(device).manual_seed(high << 32 | low)
