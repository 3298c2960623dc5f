"""Techniques side by side: bytes against a measured step, exact losses, the noise of few bits, and
the figures of both.

Only these tests catch: a technique of notebook 08 whose bytes the step contradicts, whose losses
are said to be exact and are not, or that is drawn elsewhere than it was measured.
"""

import plotly.graph_objects as go
import pytest
import torch

import lpkit
from lessons import l08_recompute_and_offload as memory_techniques
from lessons.l08_recompute_and_offload import _edge, bits_figure, bought_figure
from lessons.rows.activations_torch import Quantized
from lpkit.errors import ConfigError
from lpkit.predict import Machine

PREDICTED = {"plain": (100.0, 1.0), "half": (50.0, 1.3), "most": (20.0, None)}
MEASURED = {"plain": (101.0, 1.0), "half": (51.0, 1.2), "most": (20.0, 1.5)}


def small():
    return lpkit.preset("cpu-3m").replace({
        "model.layers": 3, "model.width": 64, "model.heads": 2, "model.vocab": 2048,
        "model.context": 64, "global_batch": 8,
        "system.attention": "sdpa", "precision.recipe": "fp32", "optimizer.clip": 0.0,
        "system.device": "cpu", "system.threads": 1})


def test_formula_and_step_agree_and_what_is_exact_is():
    config, cpu = small(), Machine(
        name="this", title="a CPU", kind="cpu", flops={"fp32": 1e11, "bf16": 1e11},
        memory_bytes=2**33, bytes_per_second=1e10,
        link_bytes_per_second=None, watts=None, price_per_hour=None, source="made up")
    predicted = memory_techniques.predicted(config, cpu)
    measured = memory_techniques.measured(config, rounds=1)
    assert list(predicted) == list(measured) == list(memory_techniques.TECHNIQUES)
    for name, row in measured.items():
        assert predicted[name].peak_bytes == pytest.approx(row.peak_bytes, rel=0.02), name
        assert (row.losses == pytest.approx(measured["plain"].losses, rel=1e-2)
                and len(row.losses) == 2), name
        if memory_techniques.TECHNIQUES[name].exact:
            assert row.losses == measured["plain"].losses, name
    assert measured["plain"].slowdown == predicted["plain"].slowdown == 1
    # recomputing all blocks adds a forward pass to three, less head and loss
    assert 1 < predicted["recompute, every 2nd"].slowdown < predicted["recompute"].slowdown < 4 / 3
    assert predicted["8-bit moments"].slowdown is None


def test_few_bits_err_as_normal_numbers_do():
    torch.manual_seed(0)
    x = torch.randn(2**16)
    for bits in (8, 4, 2):
        error = ((Quantized(x, bits).get() - x).norm() / x.norm()).item()
        assert error == pytest.approx(memory_techniques.rounding_error(bits), rel=0.02), bits
    errors = memory_techniques.gradient_errors(small(), ["saved in 8 bits", "recompute"])
    assert errors["recompute"] == 0 and 0 < errors["saved in 8 bits"] < 0.02


def test_a_technique_that_there_is_not():
    with pytest.raises(ConfigError, match="recompute"):
        memory_techniques.with_technique(small(), "recomput")


def test_what_is_bought_and_paid():
    figure = bought_figure(PREDICTED, MEASURED, title="<")
    marks = [trace for trace in figure["data"] if trace["mode"] == "markers"]
    measured = {trace["name"]: trace for trace in marks
                if not trace["marker"]["symbol"].endswith("-open")}
    formula = {trace["name"]: trace for trace in marks
               if trace["marker"]["symbol"].endswith("-open")}
    assert [trace["x"] + trace["y"] for trace in measured.values()] == [pytest.approx([20, 50]),
        pytest.approx([50, 81])]
    assert [trace["x"] + trace["y"] for trace in formula.values()] == [
        # without a formula at the measured time
        pytest.approx([30, 50]), pytest.approx([50, 80])]
    assert (figure["data"][0]["name"] == "not beaten by another technique"
            and figure["data"][0]["y"] == [50, 81])
    go.Figure(figure)
    with pytest.raises(ConfigError, match="'plain'"):
        bought_figure({}, MEASURED)


def test_the_edge_is_what_nothing_beats_in_both():
    at = {"dear": (50, 90), "cheap": (0, 10), "beaten": (60, 80), "costs bytes": (-5, -3),
          "same time": (0, 5), "best": (10, 90)}
    assert _edge(at) == ["cheap", "best"]


def test_bits_against_error():
    figure = bits_figure(lambda bits: 2.0**-bits, {8: 0.004, 2: 0.3})
    assert (figure["data"][0]["x"] == [2, 3, 4, 5, 6, 7, 8]
            and figure["data"][1]["y"] == [0.004, 0.3])
    go.Figure(figure)
