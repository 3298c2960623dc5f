"""Low precision: number formats, scaling recipes, the Linear that runs under one, and who
multiplies.

    from lpkit.precision import ScaledLinear, LowPrecision, BACKENDS

Names are imported when they are asked for.
"""

import importlib
from typing import Any

_WHERE = {

    "Scaled": "scaled", "quantise": "scaled", "product": "scaled", "reference": "scaled",

    "ScaledLinear": "linear", "weights_cached": "linear", "weight_cache_bytes": "linear",
"LowPrecision": "transform",
    "BACKENDS": "backends", "choose": "backends",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
