"""Random tensors for the exercises of several lessons."""

from random import Random

import torch
from torch import Tensor

FP8, LARGEST = torch.float8_e4m3fn, 448.0       # E4M3 and its largest value
UNCLAMPED = "clamp before the cast: up to PyTorch 2.11, what is too large becomes NaN"


def normal(r: Random, *shape: int, size: float = 1.0) -> Tensor:
    """Draw a tensor of normal numbers with standard deviation `size`. In a third of the tensors,
    rows are 3 elements longer in memory than in the shape, so that an answer that ignores strides
    fails."""
    rows, columns, gap = shape[:-1], shape[-1], r.choice((0, 0, 3))
    chance = torch.Generator().manual_seed(r.getrandbits(32))
    return (size * torch.randn(*rows, columns + gap, generator=chance))[..., :columns]
