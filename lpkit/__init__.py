"""lpkit: techniques that make the training of Transformers cheaper. Predict what a technique saves,
train with it, and compare the prediction with the measurement.

Importing this package imports no dependency, not even torch: each public name below is imported
when it is first used.
"""

__version__ = "0.1.0"

# public name -> the module that defines it
_WHERE = {name: f"lpkit.{module}" for module, names in {
    "beside": "begin", "config": "Config", "presets": "preset", "training.runs": "Run",
    "training.launch": "launch",
    "training.background": "train start start_each", "training.sampling": "sample",
    "measure.trace": "predict_trace reconcile", "modules.parts": "keep_activations optimizer",
    "modules.advise": "advise", "modules.convert": "convert unconvert", "modules.watch": "watch",
}.items() for name in names.split()}
# public modules and packages
_ROOMS = {"functions", "measure", "parallel", "predict", "presets"}
__all__ = sorted([*_WHERE, *_ROOMS, "__version__"])


def __getattr__(name: str):
    """Import a public name when `lpkit.NAME` is first read (PEP 562)."""
    from importlib import import_module
    if name in _ROOMS:
        return import_module(f"lpkit.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'lpkit' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
