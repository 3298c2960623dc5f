"""Stochastic rounding of weights to bf16, so that small updates are not lost.

A bf16 weight has 8 significant bits. With rounding to nearest, an update of less than 2^-9 of the
weight always rounds back to the old weight. Stochastic rounding rounds up with a probability equal
to the distance from the bf16 number below, as a share of the spacing. So it is exact on average,
and a thousand small updates add up (Gupta et al. 2015, https://arxiv.org/abs/1502.02551; Zamirai et
al. 2020, https://arxiv.org/abs/2010.06192).
"""

import zlib

import torch
from torch import Tensor

DROPPED = 16    # bits of float32 that bf16 lacks


def to_bf16(w: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return w (float32) rounded stochastically to bf16. None: PyTorch's default generator."""
    return drawn(w, noise(w, generator))


def noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a random integer from 0 to 2^16 - 1 for each element of `like`, int32: noise for the
    bits that bf16 lacks."""
    return torch.randint(1 << DROPPED, like.shape, dtype=torch.int32, device=like.device,
                         generator=generator)


def drawn(w: Tensor, bits: Tensor) -> Tensor:
    """Return w (float32) rounded to bf16: add `bits`, the noise, to the bits of w, and drop the
    lowest 16 bits. Overwrites `bits`."""
    bits.add_(w.view(torch.int32)).bitwise_and_(-(1 << DROPPED))
    return bits.view(torch.float32).bfloat16()


def generator(device: torch.device, *key: int) -> torch.Generator:
    """Return a random generator whose numbers depend only on `key` (seed, number of the parameter,
    update), so that a resumed run draws the same numbers."""
    high, low = (zlib.crc32(repr((word, *key)).encode()) for word in ("high", "low"))
    return torch.Generator(device).manual_seed(high << 32 | low)
