"""The timeline of one step: what is drawn adds up to what was measured, and the formula's moments
sit where they belong.

Only these tests catch: a timeline that leaves out a row, a phase or the largest point, and moments
of the formula over another part of the step.
"""

from dataclasses import dataclass

import plotly.graph_objects as go
import pytest

from lessons.figures.step_bytes import ROW_COLOURS, timeline_figure
from lessons.l01_memory_math import memory_figure
from lessons.l08_recompute_and_offload import timelines_view
from lpkit import measure
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError
from lpkit.measure.tracking import ROWS
from lpkit.predict import memory


@dataclass(frozen=True)
class At:
    phase: str
    module: str
    rows: dict


STEP = (At("forward", "embed", {"weights": 10}),
        At("forward", "blocks.0.mlp", {"weights": 10, "activations": 5}),
        At("forward", "blocks.1.mlp", {"weights": 10, "activations": 9}),
        At("backward", "loss", {"weights": 10, "activations": 9}),
        At("backward", "head", {"weights": 10, "activations": 8}),
        At("backward", "blocks.1.mlp", {"weights": 10, "activations": 7, "temporaries": 6}),
        At("backward", "gradient", {"weights": 10, "activations": 5, "gradients": 1}),
        At("optimizer", "", {"weights": 10, "activations": 5}),     # in backward
        At("backward", "blocks.0.mlp", {"weights": 10, "activations": 2, "gradients": 2}),
        At("backward", "embed", {"weights": 10, "gradients": 3}),
        At("optimizer", "", {"weights": 10, "gradients": 4}))
MODEL = ModelConfig(layers=2, width=32, heads=2, vocab=64, context=16)


def test_areas_add_up_and_the_peak_is_named():
    figure = timeline_figure(STEP, title="a < b")
    areas = [trace for trace in figure["data"] if "stackgroup" in trace]
    line = figure["data"][-1]
    assert (line["y"] == [sum(ys) for ys in zip(*(area["y"] for area in areas))]
            == [sum(p.rows.values()) for p in STEP])
    assert [area["name"] for area in areas] == [row for row in ROW_COLOURS
        if any(row in p.rows for p in STEP)]
    assert any(note["text"] == "23 B, backward, blocks.1.mlp"
               for note in figure["layout"]["annotations"])
    assert figure["layout"]["title"]["text"] == "a &lt; b"
    go.Figure(figure)


def test_updates_in_backward_are_backwards():
    bands = [(shape["x0"], shape["x1"]) for shape in timeline_figure(STEP)["layout"]["shapes"]]
    assert bands == [(0, 3), (3, 10), (10, 11)]


def test_the_moments_of_the_formula_sit_over_their_part_of_the_step():
    held = memory(Config(model=MODEL, global_batch=2))
    marks = timeline_figure(STEP, formula=held)["data"][-1]
    assert marks["x"] == [3, 4, 5, 8, 9, 10]
    assert marks["y"] == [sum(held.at(moment).values()) for moment in held.rows[0].at]


def test_a_measured_step_and_its_formula_meet():
    config = Config(model=MODEL, global_batch=2).replace({"precision.recipe": "fp32",
        "system.device": "cpu"})
    measured = measure.memory(config)
    figure = timeline_figure(measured.timeline,
                             formula=memory(config, attention=measured.chosen["attention"].used))
    *_, line, marks = figure["data"]
    assert len(line["y"]) <= 400 and max(line["y"]) == measured.peak_bytes
    assert max(marks["y"]) == pytest.approx(measured.peak_bytes, rel=0.01)
    # each moment, and not only the peak, is what was there; its marker is over the largest point of
    # its part
    assert [line["y"][x] for x in marks["x"]] == pytest.approx(marks["y"], rel=0.03)


def test_thousands_of_points_are_thinned_and_the_largest_stays():
    many = [At("forward", "", {"activations": n % 997}) for n in range(5000)]
    line = timeline_figure(many)["data"][-1]
    assert len(line["y"]) <= 400 and max(line["y"]) == 996
    with pytest.raises(ConfigError, match="at least one point"):
        timeline_figure([])


def test_steps_side_by_side_share_an_axis():
    show = timelines_view({"low": (STEP[:2], None), "high": (STEP, None)})
    assert show("low")["layout"]["yaxis"]["range"] == show("high")["layout"]["yaxis"]["range"]
    assert show("low")["layout"]["title"]["text"] == "low"


def test_every_row_of_the_ledger_has_a_colour_of_its_own():
    assert set(ROW_COLOURS) == set(ROWS) and len(set(ROW_COLOURS.values())) == len(ROW_COLOURS)
    for recipe in ("bf16", "fp8-delayed", "mxfp8"):
        memory_figure(memory(Config(model=MODEL,
                                    global_batch=2).replace({"precision.recipe": recipe})))
