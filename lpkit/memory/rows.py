"""The families side by side, under their names in `MemoryConfig`, and what a run may have of them together."""

from __future__ import annotations

from typing import Any

import torch

from lpkit.config import Config, ConfigError, MemoryConfig
from lpkit.contracts import Choice, pick
from lpkit.memory.loss import LOSSES
from lpkit.memory.parameters import PARAMETERS
from lpkit.memory.recompute import RECOMPUTE
from lpkit.memory.row import Row
from lpkit.memory.saved import SAVED
from lpkit.memory.state import MOMENTS, STATES
from lpkit.memory.update import UPDATES

MEMORY = {"recompute": RECOMPUTE, "saved": SAVED, "loss": LOSSES, "parameters": PARAMETERS,
          "optimizer_state": STATES, "moment_format": MOMENTS, "update": UPDATES}
PLAIN = MemoryConfig()


def rows_of(config: Config) -> dict[str, Any]:
    """The row of each family. Raises ConfigError for a name that there is not."""
    return {key: pick(table, getattr(config.memory, key), f"memory.{key}") for key, table in MEMORY.items()}


def asked(config: Config) -> dict[str, Row]:
    """Those that are not PyTorch's own way."""
    return {key: row for key, row in rows_of(config).items() if getattr(config.memory, key) != getattr(PLAIN, key)}


def choose(config: Config, recipe: Any, device: torch.device) -> dict[str, Choice]:
    """What is used of what was asked for, and why. Raises ConfigError for what cannot be together."""
    chosen = {}
    for key, row in asked(config).items():
        name = getattr(config.memory, key)
        if problem := row.problem(config, recipe):
            raise ConfigError(f"memory.{key}={name} {problem}")
        chosen[key] = row.choice(name, device)
    return chosen


def choose_compile(config: Config, choice: Choice) -> Choice:
    """`choice`, unless a row cannot be compiled. Raises ConfigError where both were asked for, or neither can be."""
    for key, row in asked(config).items():
        name = f"memory.{key}={getattr(config.memory, key)}"
        if row.eager and choice.used == "on":
            if choice.asked != "auto":
                raise ConfigError(f"{name} does not go with system.compile=true: {row.eager}; set system.compile=false")
            choice = Choice(asked="auto", used="off", why=f"{name}: {row.eager}")
        if row.needs_compile and choice.used == "off":
            raise ConfigError(f"{name} needs torch.compile, {row.needs_compile}; set system.compile=true")
    return choice
