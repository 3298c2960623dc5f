"""Chooses the memory techniques of a run, and records reasons. The Config requests techniques; not
every device supports all of them."""

from __future__ import annotations

import torch

from lpkit.config import Config, MemoryConfig
from lpkit.contracts import Choice
from lpkit.errors import ConfigError
from lpkit.techniques.memory import Technique, check, rows_of
from lpkit.techniques.recipes import Recipe

PLAIN = MemoryConfig()
# fields of MemoryConfig whose implementation decides where tensors are stored on this device
PLACED = ("activation_offload", "optimizer_state")


def asked(config: Config) -> dict[str, Technique]:
    """Return the requested techniques by field of MemoryConfig, without PyTorch's defaults."""
    return {key: row for key, row in rows_of(config).items()
            if getattr(config.memory, key).name != getattr(PLAIN, key).name}


def choose(config: Config, recipe: Recipe, device: torch.device) -> dict[str, Choice]:
    """Return the choice for each requested technique. Raises ConfigError for techniques that
    cannot be combined."""
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
    """Return `choice` (what is compiled), or a Choice of "off" if a requested technique cannot be
    compiled and the Config leaves the choice to lpkit ("auto"). `row.eager` and `row.needs_compile`
    are reasons: why a technique cannot be compiled, or must be; empty: it can, or need not be.

    Raises ConfigError if the Config requests torch.compile and a technique that cannot be compiled,
    or a technique that must be compiled in a run without torch.compile."""
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
