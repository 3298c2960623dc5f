"""Measurements on this machine: every live byte of a step, its seconds compared with the ceilings,
the trace of a step on any number of ranks, and what each technique does here.

Names are imported when they are used.
"""

import importlib
from typing import Any

__all__ = ["OTHER", "REST", "Bench", "Seconds", "memory", "reconcile_seconds", "refuse_compiled",
           "row", "seconds"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.updates"), name)
