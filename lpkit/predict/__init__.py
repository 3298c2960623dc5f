"""Every formula: parameters, bytes, FLOPs, time, energy, cost; and the catalogue of machines, with
sources.

Standard library only, microseconds a call: a slider may ask. `predict(config, machine, devices)`
answers everything, `memory(...)` the bytes. What each formula leaves out is said where it stands;
how far off it is, the tests and the notebooks measure.
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
            Config(imports=how.pop("imports", ()))      # files may name them now
            of = resolve_name("lpkit.presets:resolve")(base, settings)
        if isinstance(of, Config):
            return predict(of, *args, **how)
        return resolve_name("lpkit.modules.predict:predict")(of, *args, **how)


sys.modules[__name__].__class__ = _Room
