"""Formulas for parameters, bytes, FLOPs, time, energy and cost, and the catalogue of machines, with
sources.

They need only the standard library and microseconds a call, so sliders can use them.
`predict(config, machine, devices)` answers everything, `memory(...)` only the bytes. The docstring
of each formula says what it leaves out; tests and notebooks measure its error.
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
    def __call__(self, of: Any, *args: Any, **how: Any) -> Any:
        """Predict a run of a Config or of a command's words, or a step of a Module and a batch."""
        if isinstance(of, str):
            base, *settings = of.split() or [""]
            # the settings may name rows from these files
            Config(imports=how.pop("imports", ()))
            of = resolve_name("lpkit.presets:resolve")(base, settings)
        if isinstance(of, Config):
            return predict(of, *args, **how)
        return resolve_name("lpkit.modules.predict:predict")(of, *args, **how)


sys.modules[__name__].__class__ = _Room
