"""What every row of every family says about itself, whatever it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lpkit.config import Config
from lpkit.contracts import Choice


@dataclass(frozen=True, kw_only=True)
class Row:
    """`why` a run has it. `here(device)`: what is used instead on that device, and why; None: the row itself.

    `problem(config, recipe)`: why it cannot be beside the rest of a run, and the way out; empty: it can.
    `eager`: why the model must not be compiled, `needs_compile`: why it must be; empty: it may.
    """

    why: str
    here: Callable[[torch.device], tuple[str, str] | None] = lambda device: None
    problem: Callable[[Config, Any], str] = lambda config, recipe: ""
    eager: str = ""
    needs_compile: str = ""

    def choice(self, asked: str, device: torch.device) -> Choice:
        used, why = self.here(device) or (asked, self.why)
        return Choice(asked=asked, used=used, why=why)
