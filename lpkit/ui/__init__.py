"""The live figure of a plotly spec, and how it looks. The notebook hands this room its numbers."""

from importlib import import_module

_WHERE = {"Figure": "lpkit.ui.figure", "html_table": "lpkit.tables",
          "without_widgets": "lpkit.ui.figure"}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'lpkit.ui' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
