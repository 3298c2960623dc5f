"""Operands as hardware holds them, for a step on shapes alone: nothing is cast or multiplied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lpkit.kernels.scales import Scaled, stored_dtype
from lpkit.precision.linear import Arithmetic
from lpkit.predict.recipes import scale_bytes
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import ALL, SCALES, Cast, Recipe

SCALE_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


class OnShapes(Arithmetic):
    """The bytes of `scaled_mm`, on any device."""

    def why_not(self, name: str, recipe: Recipe, device: torch.device) -> str:
        return ""

    def cast(self, x: Tensor, cast: Cast, dtype: torch.dtype, *, both: bool = False,
             **how: Any) -> Scaled:
        made = self._one(x, cast)
        if both:
            made = Scaled(**{**vars(made), "turned": self._one(x.T, cast)})
        return made

    def _one(self, x: Tensor, cast: Cast) -> Scaled:
        (rows, columns), (high, wide) = x.shape, cast.block
        dtype = stored_dtype(format_of(cast.format))
        packed = 2 if cast.bits == 4 else 1
        size = -(-rows // (high or rows)), -(-columns // (wide or columns))
        return Scaled(
            data=x.new_empty(rows, columns // packed, dtype=dtype),
            scale=x.new_empty(size, dtype=SCALE_DTYPES[scale_bytes(cast) or 4]),
            tensor=x.new_empty((), dtype=torch.float32) if SCALES[cast.scale].levels > 1 else None,
            amax=x.new_empty(1, 1, dtype=torch.float32),
            nonfinite=x.new_empty((), dtype=torch.int64))

    def taken(self, made: Scaled, cast: Cast, dtype: torch.dtype, *, both: bool = False) -> Scaled:
        return made

    def shares(self, cast: Cast) -> bool:
        return cast.transposes or (ALL not in cast.block and cast.rounding != "stochastic")

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, bias: Tensor | None = None, *,
                fast: bool = False) -> Tensor:
        return a.data.new_empty(len(a.data), len(b.data), dtype=dtype)
