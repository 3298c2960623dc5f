"""Formulas for parameters, bytes, FLOPs, time, energy and cost, and the catalogue of machines. Each
formula and each machine names its source.

The formulas need only the standard library, and a call takes microseconds to milliseconds, so a
slider can call them. `predict(config, machine, devices)` returns all numbers, `memory(...)` only
the bytes. The docstring of each formula lists what the formula leaves out. Tests and notebooks
measure its error.
"""

import sys
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from lpkit.config import Config
from lpkit.predict.compare import Comparison
from lpkit.predict.ledger import Memory, memory, model_states
from lpkit.predict.params import parameter_count, parameters
from lpkit.predict.prediction import Prediction, predict
from lpkit.predict.units import quantity
from lpkit.techniques.machines import CATALOGUE, Machine

__all__ = ["CATALOGUE", "Comparison", "Machine", "Memory", "Prediction", "memory", "model_states",
           "parameter_count", "parameters", "predict", "quantity"]


class _Room(ModuleType):
    """This module as a function: `lpkit.predict(...)` works, and so does `lpkit.predict.memory`."""

    def __call__(self, of: Any, *args: Any, **how: Any) -> Any:
        """Return a Prediction.

        `of` is a Config; or a string with a preset and settings, as the command line takes them
        ("cpu-3m model.layers=4"); or an nn.Module, followed by a batch. `args` and `how` are passed
        on to `predict` of this package, or to `lpkit.modules.predict.predict` for a module."""
        if isinstance(of, str):
            base, *settings = of.split() or [""]
            # importing these files first adds their rows, which the settings may name
            Config(imports=how.pop("imports", ()))
            of = resolve_name("lpkit.presets:resolve")(base, settings)
        if isinstance(of, Config):
            return predict(of, *args, **how)
        return resolve_name("lpkit.modules.predict:predict")(of, *args, **how)


sys.modules[__name__].__class__ = _Room
