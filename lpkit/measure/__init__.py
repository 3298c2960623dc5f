"""This machine, and what really happened on it: every live byte of a step, its seconds beside the
ceilings, the trace of a step on any number of ranks, what each technique does here.

Names are imported when they are asked for.
"""

import importlib
from typing import Any

_WHERE = dict.fromkeys(("Bench", "OTHER", "REST", "RooflineMeasurement", "Saved", "Seconds",
                        "StepMeasurement", "Turns", "memory", "reconcile_seconds",
                        "refuse_compiled", "roofline", "saved_bytes", "seconds", "step", "turns"),
                       "updates")
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
