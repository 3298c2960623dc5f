"""Lesson 25: what its notebook says of two models that are not the kit's, and the notebook without
transformers.

Only these tests catch: a layer, a noise or a peak that notebook 25 names and its models lack.
"""

import pytest
import torch

import lpkit
from lessons import l25_your_own_model as lesson
from lpkit.measure import telemetry
from lpkit.modules.convert import CONVERTED, KEPT
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.recipes import RECIPES
from tests.course.test_notebooks import RIGHT

SIZES = 96, 2, 64       # of tier cpu


@pytest.fixture(scope="module")
def batches():
    return lesson.text(8, 64, 2)


@pytest.fixture(params=["transformers", "without transformers"])
def models(request, monkeypatch):
    if request.param == "transformers":
        pytest.importorskip("transformers")
    else:
        monkeypatch.setattr(lesson, "find_spec", lambda name: None)
    return lesson.models(*SIZES)


def test_the_llama_suffers_where_the_notebook_says_whoever_wrote_it(models, batches):
    """The stand-in has the Linears of transformers' class, and the noise is where a product is
    read."""
    model = models[lesson.LLAMA]()
    run = lesson.trained(model, batches, "int8", 2e-3)
    rows = lpkit.convert(lpkit.unconvert(model), "int8").rows
    kinds = {lesson.short(row.name) for row in rows if row.status == CONVERTED}
    assert kinds == {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert ([row.name for row in rows if row.status == KEPT] == ["lm_head"]
            and sum(row.status == CONVERTED for row in rows) == 14)
    (worst, db), (_, other), *_ = lesson.by_kind(lesson.noise(run.seen.samples, "int8", "x",
        1)).items()
    assert worst == "down_proj" and db < other - 3 and not run.seen.uncalled
    gradients = lesson.noise(run.seen.samples, "int8", "dy", 1)
    assert min(gradients, key=gradients.get) == "lm_head" and gradients["lm_head"] < 30


def test_what_the_notebook_says_of_formats_and_of_the_encoder(batches):
    model = lesson.models(*SIZES)[lesson.ENCODER]()
    run = lesson.trained(model, batches, "int8", 2e-3)
    noise = lesson.by_kind(lesson.noise(run.seen.samples, "int8", "x", 1))
    assert (noise.keys() == {"linear1", "linear2", "head"}
            and max(noise.values()) - min(noise.values()) < 1)
    for recipe, db in (("mxfp8", 31), ("fp8-rowwise", 31), ("nvfp4", 20)):
        assert all(noise_db == pytest.approx(db, abs=2) for noise_db in lesson.noise(
            run.seen.samples, recipe, "x", 1).values()), recipe


def test_the_peak_that_teachers_are_told_is_predicted_and_held(batches):
    pytest.importorskip("transformers")
    make = lesson.models(*SIZES)[lesson.LLAMA]
    predicted = lpkit.predict(make(), batches[0], machine="a100-80", precision="bf16",
                              optimizer=torch.optim.AdamW)
    run = lesson.trained(make(), batches, None, 2e-3)
    assert run.seen.peak_bytes == pytest.approx(predicted.peak_bytes,
        rel=0.01) == pytest.approx(1e6 * RIGHT["25.peak"], rel=0.01)


def test_the_exercise_on_noise_is_what_telemetry_measures():
    x = torch.randn(8, 64) * torch.logspace(-2, 2, 8)[:, None]
    cast = RECIPES["int8"].y[0]
    drawn = telemetry.draw(x, [cast], None)
    assert cast.format == FORMATS["int8"].name
    assert lesson.input_db(x) == pytest.approx(
        telemetry.quality(telemetry.measure(drawn, cast).tolist(), cast).sqnr_db, abs=1e-3)
