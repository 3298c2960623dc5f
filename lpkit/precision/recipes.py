"""Precision recipes: rows of data. A recipe says in which dtype the matrix products run."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`compute` is the dtype of matrix products under autocast; None: float32 throughout. Weights stay float32."""

    compute: torch.dtype | None
    dtype: str      # what the products run in, by the name that the catalogue of machines uses
    source: str

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """A context that can be entered again and again."""
        return nullcontext() if self.compute is None else torch.autocast(device.type, self.compute)


RECIPES = {
    "fp32": Recipe(compute=None, dtype="fp32", source="IEEE 754 binary32"),
    "bf16": Recipe(compute=torch.bfloat16, dtype="bf16",
                   source="Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322"),
}
