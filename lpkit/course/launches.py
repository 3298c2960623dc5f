"""How a learner's kernel is called: what its puzzle says, and what its process does."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# what no kernel has written yet, as bits: a NaN where there is one
UNTOUCHED = {torch.float32: 0x7FC0BEEF, torch.uint8: 0x7F, torch.int16: 0x7FC1,
             torch.int32: 0x7FC0BEEF}


class Launch:
    """A call of a kernel: its arguments by name, tensors and numbers. `out` names some, with
    what is in them before, in the order of what the definition returns."""

    def __init__(self, *grid: int, out: Mapping[str, Tensor], **given: Any):
        self.grid, self.out, self.arguments = grid, out, {**given, **out}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: one for name, one in self.arguments.items() if isinstance(one, Tensor)}


def bits(x: Tensor) -> Tensor:
    """A view as integers."""
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a tensor that nobody has written to yet."""
    empty = torch.empty(shape, dtype=dtype)
    bits(empty).fill_(UNTOUCHED[dtype])
    return empty
