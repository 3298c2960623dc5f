"""A run uses the memory techniques that its Config asks for as far as a device can, and says
why."""

from __future__ import annotations

import torch

from lpkit.config import Config, MemoryConfig
from lpkit.contracts import Choice
from lpkit.errors import ConfigError
from lpkit.techniques.memory import Technique, check, rows_of
from lpkit.techniques.recipes import Recipe

PLAIN = MemoryConfig()
# whose implementation says where it lies on a device
PLACED = ("activation_offload", "optimizer_state")


def asked(config: Config) -> dict[str, Technique]:
    """Returns the rows that are not PyTorch's own way."""
    return {key: row for key, row in rows_of(config).items()
            if getattr(config.memory, key).name != getattr(PLAIN, key).name}


def choose(config: Config, recipe: Recipe, device: torch.device) -> dict[str, Choice]:
    """Chooses what is used, and says why. Raises ConfigError for rows that cannot be beside one
    another."""
    check(config, recipe)
    chosen = {}
    for key, row in asked(config).items():
        name, used, why = getattr(config.memory, key).name, "", ""
        if key in PLACED:
            place = row.load()(device)
            used, why = place.used, place.why
        source = f" ({row.source})" if row.source else ""
        chosen[key] = Choice(asked=name, used=used or name, why=why or f"{row.why}{source}")
    return chosen


def choose_compile(config: Config, choice: Choice) -> Choice:
    """`choice`, unless a row cannot be compiled. Raises ConfigError where both were asked for."""
    for key, row in asked(config).items():
        name = f"memory.{key}={getattr(config.memory, key).name}"
        if row.eager and choice.used != "off":
            if choice.asked != "auto":
                raise ConfigError(f"{name} does not go with system.compile={choice.asked}: "
                                  f"{row.eager}; set system.compile=false")
            choice = Choice(asked="auto", used="off", why=f"{name}: {row.eager}")
        if row.needs_compile and choice.used == "off":
            raise ConfigError(f"{name} needs torch.compile, {row.needs_compile}; set "
                              f"system.compile=true")
    return choice
