"""The call of a learner's kernel, and the memory of its tensors, for the definition of a puzzle and
for the process of an attempt.

A tensor is placed inside a larger one. The margins are NaN or very large, belong to no argument,
and are checked when the kernel has ended, since a GPU does not refuse a nearby address.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

# bits of an element that no kernel has written yet: NaN, also in E4M3
UNTOUCHED = {torch.float32: 0x7FC0BEEF, torch.uint8: 0x7F}
MARGIN = 64                     # elements around a tensor
LONG_BYTES = 1 << 11            # above this size, repeated reads are not only wrapped edges


class Launch:
    """A call of a kernel: its arguments (tensors and numbers) by name. `out` has the arguments that
    the kernel writes, with their initial values, in the order of the definition's results."""

    def __init__(self, *grid: int, out: Mapping[str, Tensor], **given: Any):
        self.grid, self.out, self.arguments = grid, out, {**given, **out}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}


def bits(x: Tensor) -> Tensor:
    """Return the bits of a float32 or uint8 tensor, as a view of integers."""
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor whose elements are marked as not written."""
    empty = torch.empty(shape, dtype=dtype)
    bits(empty).fill_(UNTOUCHED[dtype])
    return empty


@dataclass
class Held:
    """An argument of a launch, placed in the middle of a larger tensor, with the accesses to it."""

    name: str
    whole: Tensor
    tensor: Tensor              # a view of `whole`
    kept: Tensor                # a copy of `whole` before the launch
    inside: np.ndarray          # bool, by element of `whole`: whether it belongs to the tensor
    is_output: bool
    owner: np.ndarray = field(init=False)       # by element of `whole`: the program that wrote it
    loaded_bytes: int = 0
    stored_bytes: int = 0

    def __post_init__(self):
        self.owner = np.full(len(self.inside), -1)

    @classmethod
    def of(cls, name: str, x: Tensor, *, outside: float, device: str, is_output: bool) -> Self:
        """Copy `x` with its strides. The margin of an input is filled with `outside`."""
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
        """Return the bytes between an address and this tensor's memory; negative inside it."""
        start = self.whole.data_ptr()
        return max(start - address, address - start - self.whole.nbytes)

    def element(self, at: int) -> str:
        """Return the name of the tensor's element at an index into `whole`."""
        at, shape = at - MARGIN, list(self.tensor.shape)
        if len(shape) == 2 and at >= 0 and self.tensor.stride(1) == 1:
            row, column = divmod(at, max(self.tensor.stride(0), 1))
            return f"{self.name}[{row}, {column}]"
        return f"{self.name}[{at}]"

    def trespass(self) -> str:
        """Return a message about a forbidden write; empty if there is none. Compares the memory with
        its copy before the launch, so it also sees writes that bypass `Memory`."""
        changed = (bits(self.whole) != bits(self.kept)).cpu()
        if self.is_output:
            changed &= ~torch.from_numpy(self.inside)
        if not changed.any():
            return ""
        why = "which is outside" if self.is_output else f"and {self.name} is an input"
        return f"it wrote to {self.element(int(changed.nonzero()[0]))}, {why}"

    def read_again(self) -> str:
        """Return a message if the kernel read the tensor more than once; empty otherwise, and if
        reads were not counted."""
        least = self.tensor.numel() * self.whole.itemsize
        if least <= LONG_BYTES or self.loaded_bytes <= 1.5 * least:
            return ""
        times = float(f"{self.loaded_bytes / least:.3g}")
        return f"it reads {self.name} {times:,g} times; once is enough"
