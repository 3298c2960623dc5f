"""Bytes that a chain of PyTorch's operations moves when each of them is a kernel of its own, and
one such chain: a tensor cast to FP8 in both layouts, as its products need it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lpkit.techniques.formats import FORMATS

LARGEST = FORMATS["e4m3fn"].largest


class Moved(TorchDispatchMode):
    """`with Moved() as moved:`, then `moved.rows`: (operation, bytes read, bytes written), in the
    order in which they ran. A view moves nothing."""

    def __init__(self):
        super().__init__()
        self.rows: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (),
                           kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns):
            self.rows.append((func.overloadpacket.__name__, _bytes(args), _bytes((result,))))
        return result


def _bytes(values: tuple) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def cast_both_layouts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (R, C) in E4M3 as it lies and turned, (C, R), and its amax: operation after operation."""
    amax = x.abs().amax()
    codes = (x * (LARGEST / amax)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, codes.T.contiguous(), amax
