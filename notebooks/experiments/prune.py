"""Pruning by magnitude while a model trains: from the second update on, the smallest weights of
each matrix in the blocks are zero (Han et al. 2015, arXiv:1506.02626). In this folder, run:

    PYTHONPATH=. lpkit train cpu-3m --import prune governors=prune:share=0.5
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.techniques.changes import GOVERNORS
from lpkit.techniques.row import Settings, TechniqueRow
from lpkit.values import between


@dataclass(frozen=True, kw_only=True)
class Share(Settings):
    share: Annotated[float, between(0, 1)] = 0.5    # share of the weights that become zero


class Prune:
    """A governor: it chooses the masks once, applies them after each update, and saves them."""

    def __init__(self, settings: Share):
        self.share, self.masks = settings.share, {}

    def end(self, training: Any, step: int) -> None:
        matrices = {name: p for name, p in training.model.named_parameters()
                    if p.ndim == 2 and "blocks." in name}
        with torch.no_grad():
            if step == 1:
                for name, p in matrices.items():
                    zeros = int(self.share * p.numel())
                    self.masks[name] = p.abs() > (
                        p.abs().flatten().kthvalue(zeros)[0] if zeros else -1.0)
            for name, mask in self.masks.items():
                if mask.shape != matrices[name].shape:
                    raise ConfigError(f"the saved mask of {name} has shape {tuple(mask.shape)} and "
                                      f"its weight has {tuple(matrices[name].shape)}; begin a new "
                                      f"run")
                matrices[name].mul_(mask)

    def state_dict(self) -> dict[str, Tensor]:
        return self.masks

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.masks = dict(state)


GOVERNORS["prune"] = TechniqueRow(implementation=f"{__name__}:Prune", settings=Share(),
                                  why="the smallest weights are zero")
