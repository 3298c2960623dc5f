"""Widgets and figures: show a pure function, hold a guess, follow a run. The notebook hands this room its numbers."""

_WHERE = {
    "Bits": "formats",
    "Explorer": "explorer",
    "Figure": "figure",
    "Guess": "guess",
    "LiveRun": "live",
    "LiveRuns": "race",
    "Pick": "guess",
    "budget_view": "plan",
    "bits_figure": "techniques",
    "bought_figure": "techniques",
    "comparison_figure": "comparison",
    "exponents_figure": "formats",
    "frontier_figure": "frontier",
    "frontier_view": "frontier",
    "gap_figure": "race",
    "heat_map": "telemetry",
    "html_table": "style",
    "layouts_view": "plan",
    "losses_figure": "recipes",
    "lost_figure": "recipes",
    "memory_figure": "memory",
    "memory_view": "memory",
    "opened": "plan",
    "optimum_figure": "plan",
    "option_figure": "plan",
    "outlier_figure": "recipes",
    "outlier_map": "recipes",
    "plan_view": "plan",
    "published_figure": "plan",
    "quality_table": "telemetry",
    "race_figure": "race",
    "ranges_figure": "formats",
    "roofline_figure": "roofline",
    "scaling_view": "recipes",
    "search_figure": "telemetry",
    "telemetry_explorer": "telemetry",
    "telemetry_of_runs": "telemetry",
    "timeline_figure": "timeline",
    "timelines_view": "timeline",
    "training_figure": "live",
    "value_figure": "formats",
    "without_widgets": "figure",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module 'lpkit.ui' has no attribute {name!r}")
    return getattr(import_module(f"lpkit.ui.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
