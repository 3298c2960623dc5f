"""Widgets and figures: show a pure function, hold a guess, follow a run. The notebook hands this
room its numbers."""

from importlib import import_module

_NAMES = {
    "lpkit.tables": "html_table",
    "lpkit.ui.attention": "cost_figure mask_view recall_figure",
    "lpkit.ui.tiles": "held_figure steps_view traffic_figure",
    "lpkit.ui.calibration": "progress_figure",
    "lpkit.ui.case": "Accusation case_figure search_figure",
    "lpkit.ui.comparison": "comparison_figure roofline_figure",
    "lpkit.ui.controls": "Bits Explorer",
    "lpkit.ui.drawings": "number_line_figure products_figure products_view recompute_figure",
    "lpkit.ui.figure": "Figure without_widgets",
    "lpkit.ui.formats": "bits_figure exponents_figure landing_figure losses_figure lost_figure "
    "outlier_figure outlier_map ranges_figure scaling_view value_figure",
    "lpkit.ui.kernels": "bounds_figure lost_sums_figure moved_figure sums_figure",
    "lpkit.ui.memory": "bought_figure gathers_view memory_figure memory_view stacked_figure "
    "stages_view timeline_figure timelines_view",
    "lpkit.ui.overlap": "overlap_figure",
    "lpkit.ui.plan": "budget_view frontier_figure frontier_view layouts_view opened opened_memory "
    "opened_time optimum_figure option_figure plan_view",
    "lpkit.ui.published": "optimism_figure optimism_view published_figure unseen_figure",
    "lpkit.ui.questions": "Guess Pick TIED",
    "lpkit.ui.runs": "LiveRun LiveRuns gap_figure race_figure training_figure",
    "lpkit.ui.telemetry": "heat_map quality_table telemetry_explorer telemetry_of_runs",
    "lpkit.ui.terms": "casts_table kept_table terms_opened terms_table",
    "lpkit.ui.waiting": "progress",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'lpkit.ui' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
