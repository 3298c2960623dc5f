"""Measurements on this machine: every live byte of a step; its seconds, compared with the machine's
ceilings; the trace of a step on any number of ranks; and whether each technique works here.

A name is imported from `lpkit.measure.updates` on first use, because this needs torch.
"""

import importlib
from typing import Any

__all__ = ["OTHER", "REST", "Bench", "Seconds", "memory", "reconcile_seconds", "refuse_compiled",
           "row", "seconds"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.updates"), name)
