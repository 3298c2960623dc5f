"""Live figures: of a plotly spec, of a run. The notebook hands this room its numbers."""

from importlib import import_module

_NAMES = {
    "lpkit.tables": "html_table",
    "lpkit.ui.figure": "Figure without_widgets",
    "lpkit.ui.runs": "LiveRun training_figure",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'lpkit.ui' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
