"""Widgets and figures: show a pure function, hold a guess, follow a run. The notebook hands this
room its numbers."""

_NAMES = {
    "lpkit.tables": "html_table",
    "lpkit.ui.comparison": "comparison_figure",
    "lpkit.ui.explorer": "Explorer",
    "lpkit.ui.figure": "Figure without_widgets",
    "lpkit.ui.formats": "Bits exponents_figure ranges_figure value_figure",
    "lpkit.ui.frontier": "frontier_figure frontier_view",
    "lpkit.ui.guess": "Guess Pick",
    "lpkit.ui.live": "LiveRun training_figure",
    "lpkit.ui.memory": "memory_figure memory_view",
    "lpkit.ui.plan": "budget_view layouts_view opened optimum_figure option_figure plan_view "
    "published_figure",
    "lpkit.ui.race": "LiveRuns gap_figure race_figure",
    "lpkit.ui.recipes": "losses_figure lost_figure outlier_figure outlier_map scaling_view",
    "lpkit.ui.roofline": "roofline_figure",
    "lpkit.ui.techniques": "bits_figure bought_figure",
    "lpkit.ui.telemetry": "heat_map quality_table search_figure telemetry_explorer "
    "telemetry_of_runs",
    "lpkit.ui.timeline": "timeline_figure timelines_view",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module 'lpkit.ui' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
