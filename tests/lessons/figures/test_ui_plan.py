"""The views of a plan, held to the plan itself: what is drawn adds up to it, and every row opens to
its formula and source.

Only these tests catch: a view of notebook 09 that shows another number than the plan, the bill or
the record has, or that asks for too many formulas at each move.
"""

import html
import json
import math
import re

import pytest

from lessons.figures.explorer import Explorer
from lessons.l09_predict_before_you_rent import (
    budget_view,
    frontier,
    grid,
    layouts_view,
    opened,
    optimism_view,
    optimum_figure,
    option_figure,
    plan_view,
    published_figure,
    triangle,
    unseen_figure,
)
from lessons.published import calibrated, published, runs, table
from lpkit.predict import CATALOGUE
from lpkit.predict.ledger import memory
from lpkit.predict.plan import USABLE_MEMORY_SHARE, plan
from lpkit.predict.scaling import LAWS
from lpkit.presets import preset

FREE = {"budget": math.inf, "deadline": math.inf}
H200, LLAMA = CATALOGUE["h200"], preset("llama-70b")


@pytest.fixture(scope="module")
def planned():
    return plan(preset("llama-405b"), 1e12, "h100", devices=4096)


def ends(trace):
    return [base + x for base, x in zip(trace["base"], trace["x"])]


def test_the_stairs_end_at_the_peak_and_at_the_step(planned):
    for option in planned.options[:6]:
        spec = json.loads(json.dumps(option_figure(option, planned), allow_nan=False))
        memory_stairs, *times = spec["data"]
        assert max(ends(memory_stairs)) == pytest.approx(option.memory.peak_bytes)
        shown = [trace for trace in times if "hidden" not in trace["name"]]
        assert max(max(ends(trace)) for trace in shown) == pytest.approx(option.time.step_seconds)
        assert sum(sum(trace["x"]) for trace in shown) == pytest.approx(option.time.step_seconds)
        hidden = [x for trace in times if "hidden" in trace["name"] for x in trace["x"]]
        assert sum(hidden) == pytest.approx(sum(row.hidden_seconds for row in option.time.rows))
        assert ([shape["x0"] for shape in spec["layout"]["shapes"]]
                == [share * CATALOGUE["h100"].memory_bytes for share in (1, USABLE_MEMORY_SHARE)])


def test_every_row_opens_to_its_formula_and_source(planned):
    for option in planned.options[:6]:
        page = html.unescape(re.sub(r"</?a[^>]*>", "", opened(option)))
        assert page.count("<details") == len(option.memory.rows) + len(option.time.rows)
        assert page.count("<details open") == 2
        for row in (*option.memory.rows, *option.time.rows):
            assert row.formula in page and row.source in page
    piped = next(option for option in planned.options if option.layout.pipeline > 1)
    assert "href='https://arxiv.org/abs/2104.04473'>https" in opened(piped)


def test_the_view_shows_what_the_plan_finds_and_why_not_the_rest():
    spec, table = plan_view(LLAMA, H200, 1e12, 512, **FREE)
    best = plan(LLAMA, 1e12, H200, devices=512)
    assert (str(best.options[0].layout) in table
            and "23.6 days (19.4 days to 31.6 days)" in spec["layout"]["title"]["text"])
    assert all(html.escape(refusal.nearest) in table
               for refusal in best.refusals.values() if refusal.layouts)
    spec, table = plan_view(LLAMA, H200, 1e12, 8, **FREE)
    assert spec["data"] == [] and " more each" in table
    spec, table = plan_view(LLAMA, H200, 1e12, 512, 250_000.0, math.inf)
    assert spec["data"] == [] and "budget" in table and "too much" in table
    assert plan_view(LLAMA, H200, 1e12, 512, math.inf, 86_400.0)[0]["data"] == []


def test_a_redraw_evaluates_few_formulas():
    """A slider asks for a plan at each move: that many calls of at most 200 us."""
    for name in ("llama-1b", "llama-70b", "dense-1t"):
        for devices in (8, 512, 4096):
            assert plan(preset(name), 1e12, "b200", devices=devices).evaluations < 700


def test_layouts_are_chosen_and_drawn(planned):
    show, controls = layouts_view(planned)
    explorer = Explorer(show, **controls)
    first = explorer.table.value
    explorer.set(layout=planned.options[3])
    assert explorer.table.value != first and explorer.table.value == opened(planned.options[3])


def test_a_budget_buys_flops_and_the_curve_has_its_least_at_the_optimum():
    flops = 10_000 / H200.price_per_hour * 3600 * 989.4e12 * 0.4
    spec, table = budget_view(preset("llama-8b"), H200, 10_000, 0.4)
    assert f"{flops:.2e} FLOPs" in spec["layout"]["title"]["text"] and table.count("inside") == 4
    spec = json.loads(json.dumps(optimum_figure(flops, 8e9), allow_nan=False))
    for law in LAWS.values():
        lines = [trace for trace in spec["data"] if trace.get("name", "").startswith(law.name)]
        points = [(y, x) for trace in lines for x, y in zip(trace["x"], trace["y"])
                  if y is not None]
        assert len(points) == 81 and min(points)[1] == pytest.approx(law.optimum(flops).parameters,
            rel=0.1)
    assert "extrapolated" in budget_view(LLAMA, H200, 1e8, 0.4)[1]


def test_published_runs_lie_where_the_formula_is_too_fast():
    runs, after = published(), calibrated()
    spec = json.loads(json.dumps(published_figure(runs, after), allow_nan=False))
    points = {name: x for trace in spec["data"][:-1] for name, x in zip(trace["y"], trace["x"])}
    for row in runs:
        assert points[row.name] == pytest.approx(
            1 / (1 + row.error) if row.unit == "seconds" else 1 + row.error)
    assert spec["data"][-1]["x"] == pytest.approx([1 + row.error for row in after])
    assert sum(len(trace["x"]) for trace in spec["data"]) == len(runs.rows) + len(after.rows)


def test_a_roofline_and_what_comes_on_top_of_it():
    """Of Llama 3's 405B on 8,192 H100: model FLOPs over the datasheet's peak are the least that a
    roofline can say."""
    run = runs("llama-3")[0]
    spec, rows = optimism_view(run)
    names = spec["data"][0]["y"]
    seconds = {name: sum(trace["x"][i] for trace in spec["data"][:-1])
               for i, name in enumerate(names)}
    least = run.published * 1e12 * run.published_seconds / (989.4e12)
    assert least < seconds["roofline"] < seconds["kernels alone"] < seconds["in a step"]
    assert seconds["in a step"] == pytest.approx(run.published_seconds, rel=0.05)
    assert spec["data"][-1]["x"] == [run.published_seconds]
    assert f"{seconds['roofline'] / run.published_seconds:.0%}" in rows


def test_every_run_that_the_formula_takes_is_drawn_where_it_is_off():
    taken, _ = table()
    traces = {trace["name"]: trace for trace in json.loads(json.dumps(unseen_figure(taken)))[
        "data"]}
    held = [run for run in taken if run["held_out"]]
    assert len(traces["may be fitted"]["x"]) == len(taken) - len(held)
    outside = traces["held out, outside the printed range"]["x"]
    assert sorted(outside) == sorted(1 + run["error"] for run in held if not run["inside"])
    assert len(traces["held out"]["x"]) + len(outside) == len(held)


def test_a_grid_takes_the_layout_of_the_plan_and_leaves_out_what_does_not_fit():
    candidates = grid({"llama-70b": LLAMA}, ["h200"], [8, 64], [1e11, 1e12])
    best = plan(LLAMA, 1e12, "h200", devices=64).options[0]
    assert [candidate.name for candidate in candidates] == ["llama-70b, 100B tokens, 64 h200",
        "llama-70b, 1.00T tokens, 64 h200"]
    assert ({candidate.config for candidate in candidates} == {best.config}
            and best.config.parallel == best.layout)
    held = memory(candidates[0].config, "h200")
    assert held.peak_bytes == best.memory.peak_bytes <= USABLE_MEMORY_SHARE * H200.memory_bytes
    point = triangle(candidates)[1]
    assert point.values["days"] == pytest.approx(best.bill.seconds / 86_400)
    assert point.values["dollars"] == pytest.approx(best.bill.cost)
    assert len(frontier(triangle(candidates), least=("days", "loss", "dollars"))) == 2
