"""How a learner's kernel is called, and the memory in which its tensors lie: what a puzzle says, and
what the process of an attempt does.

A tensor lies inside a larger one. The margins are NaN or very large, belong to nobody, and are
looked at when the kernel has ended: a GPU refuses no address that is near.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

# what no kernel has written yet, as bits: NaN, of E4M3 too
UNTOUCHED = {torch.float32: 0x7FC0BEEF, torch.uint8: 0x7F}
MARGIN = 64                     # elements around a tensor
LONG_BYTES = 1 << 11            # from which on what is read twice is no edge, wrapped around


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


@dataclass
class Held:
    """A tensor in the midst of a larger one."""

    name: str
    whole: Tensor
    tensor: Tensor              # a view of it
    kept: Tensor                # what `whole` was before
    inside: np.ndarray          # bool, of `whole`: what belongs to the tensor
    is_output: bool
    owner: np.ndarray = field(init=False)       # of `whole`: which program wrote it last
    loaded_bytes: int = 0
    stored_bytes: int = 0

    def __post_init__(self):
        self.owner = np.full(len(self.inside), -1)

    @classmethod
    def of(cls, name: str, x: Tensor, *, outside: float, device: str, is_output: bool) -> Self:
        """A copy of `x`, its strides included; around what is only read lies `outside`."""
        steps = zip(x.shape, x.stride(), strict=True)
        span = 1 + sum((n - 1) * step for n, step in steps) if x.numel() else 0
        whole = blank(span + 2 * MARGIN, dtype=x.dtype).to(device)
        if x.is_floating_point() and not is_output:
            whole.fill_(outside)
        view = whole.as_strided(x.shape, x.stride(), MARGIN)
        bits(view).copy_(bits(x))
        inside = torch.zeros(len(whole), dtype=torch.bool)
        inside.as_strided(x.shape, x.stride(), MARGIN).fill_(True)
        return cls(name, whole, view, whole.clone(), inside.numpy(), is_output)

    def distance(self, address: int) -> int:
        start = self.whole.data_ptr()
        return max(start - address, address - start - self.whole.nbytes)

    def element(self, at: int) -> str:
        """Names the tensor's element at an index into `whole`."""
        at, shape = at - MARGIN, list(self.tensor.shape)
        if len(shape) == 2 and at >= 0 and self.tensor.stride(1) == 1:
            row, column = divmod(at, max(self.tensor.stride(0), 1))
            return f"{self.name}[{row}, {column}]"
        return f"{self.name}[{at}]"

    def trespass(self) -> str:
        """Says what was written that is nobody's to write; empty for nothing."""
        changed = (bits(self.whole) != bits(self.kept)).cpu()
        if self.is_output:
            changed &= ~torch.from_numpy(self.inside)
        if not changed.any():
            return ""
        why = "which is outside" if self.is_output else f"and {self.name} is not its to write"
        return f"it wrote to {self.element(int(changed.nonzero()[0]))}, {why}"

    def read_again(self) -> str:
        """Says how often it was read, if more than once; empty where nobody counted."""
        least = self.tensor.numel() * self.whole.itemsize
        if least <= LONG_BYTES or self.loaded_bytes <= 1.5 * least:
            return ""
        times = float(f"{self.loaded_bytes / least:.3g}")
        return f"it reads {self.name} {times:,g} times, and once is enough"
