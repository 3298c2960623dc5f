"""Recipes whose products cast one operand, compared with PyTorch's fake quantisation in float64.

Only these tests catch: an uncast operand that stops a run, a prediction or an advice, a one-sided
product that hardware is said to multiply, and quantisation-aware training whose gradient is not
the straight-through estimator's.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import lpkit
from experiments import qat
from lessons import catalogue
from lessons.l06_fp8_training import casts_table, products_figure
from lpkit.config import ModelConfig
from lpkit.errors import ConfigError
from lpkit.measure.matrix import tried
from lpkit.precision.backends import BACKENDS, choose
from lpkit.predict.casts import as_run
from lpkit.predict.recipes import row_of
from lpkit.techniques import machines
from lpkit.techniques.recipes import ALL, PRODUCTS, RECIPES, Cast, Recipe, resolve
from tests.precision import qat_rows
from tests.training.resuming import in_parts

INT8 = Cast(format="int8", block=(1, ALL))
PAIRS = {"first": (INT8, None), "second": (None, INT8)}
CPU = torch.device("cpu")
SMALL = {"model.layers": 2, "model.width": 128, "model.heads": 2, "model.context": 128,
         "global_batch": 8, "eval_batches": 1, "steps": 4, "schedule.warmup_steps": 0,
         "imports": ("experiments.qat",)}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fake(t: torch.Tensor, largest: int, group: int = 0) -> torch.Tensor:
    """PyTorch's own rounding of each group of a row, whose gradient is the identity's. PyTorch
    multiplies by 1 / scale, so a value beside a midpoint may go to the other side: none here."""
    rows = t.reshape(-1, group or t.shape[-1])
    scale = rows.detach().abs().amax(1) / largest
    zero = torch.zeros(len(rows), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(
        rows, scale, zero, 0, -largest, largest).view_as(t)


def multiplied(recipe: Recipe, x: torch.Tensor, plain: nn.Linear, g: torch.Tensor) -> list:
    """Returns y, dx and dw under the recipe, in float32."""
    layer = BACKENDS["emulated"].wrap(plain, recipe, name="up", seed=0)
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(g)
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("side", PAIRS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_casts_one_operand_and_leaves_the_rest(product, side):
    torch.manual_seed(5)
    plain, x, g = nn.Linear(64, 48, bias=False), drawn(32, 64, seed=3), drawn(32, 48, seed=2)
    recipe = Recipe(compute="bfloat16", dtype="bf16", **{product: PAIRS[side]})
    w = plain.weight.detach()
    operands = {"y": (x, w), "dx": (g, w.T), "dw": (g.T, x.T)}
    at = list(PAIRS).index(side)
    pair = list(operands[product])
    pair[at] = fake(pair[at].contiguous(), 127)
    operands[product] = tuple(pair)
    for result, (a, b) in zip(multiplied(recipe, x, plain, g), operands.values()):
        torch.testing.assert_close(result.double(), a.double() @ b.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"weights": "int8", "group": 0},
                                      {"activations": "int8", "group": 16}], ids=str)
def test_qat_has_the_straight_through_gradient_of_pytorchs_fake_quantisation(settings):
    torch.manual_seed(5)
    plain, x, g = nn.Linear(64, 48, bias=False), drawn(32, 64, seed=3), drawn(32, 48, seed=2)
    results = multiplied(resolve("qat", **settings), x, plain, g)
    asked = qat.Qat(**settings)
    x, w = x.clone().requires_grad_(), plain.weight.detach().clone().requires_grad_()
    cast_x = fake(x, 127) if asked.activations == "int8" else x
    y = cast_x @ fake(w, 7 if asked.weights == "int4" else 127, asked.group).T
    y.backward(g)
    for got, want in zip(results, (y.detach(), x.grad, w.grad)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def with_qat(monkeypatch):
    qat_rows.add(monkeypatch)


@pytest.fixture
def rows(monkeypatch):
    """Recipes that cast one operand of one product, by name."""
    added = {f"one-{product}-{side}": {product: pair} for product in PRODUCTS
             for side, pair in PAIRS.items()}
    for name, pairs in added.items():
        monkeypatch.setitem(RECIPES, name, Recipe(
            compute="bfloat16", dtype="int8", high_precision_layers=("head",),
            settings=replace(RECIPES["bf16"].settings, name=name), **pairs))
    return list(added)


def test_every_reader_of_a_recipe_takes_an_uncast_operand(rows):
    casts_table(ModelConfig())      # has whole recipes alone
    for name in [*rows, "qat"]:
        products_figure(RECIPES[name])
        config = lpkit.preset("cpu-3m").replace(SMALL | {"precision.recipe": name})
        predicted, traced = lpkit.predict(config, "h200"), lpkit.predict_trace(config)
        assert predicted.memory.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.05), name
        assert "one operand of " in predicted.step.emulated
        casts, _ = as_run(config, name, machines.find("h200"))
        assert casts.dtype in ("bf16", "fp32") and "emulated" in lpkit.advise(
            config, "h200", recipes=[name]).sentence
        assert "emulated, relative error" in tried(name, "emulated", CPU)
        assert catalogue.why(row_of(config, name)).startswith("int")
        assert "must be cast" in choose("auto", name, RECIPES[name], CPU).why
        with pytest.raises(ConfigError, match="has one operand in bfloat16, and both must be cast"):
            choose("scaled_mm", name, RECIPES[name], CPU)


def test_a_pair_of_uncast_operands_is_no_cast():
    assert Recipe(compute="bfloat16", dtype="bf16", y=(None, None)).products == {}


def test_a_run_of_qat_learns_and_resumes_to_the_bit(corpus, tmp_path):
    config = lpkit.preset("cpu-3m").replace(SMALL | {
        "precision.recipe": "qat", "data.source": str(corpus / "*.py"), "checkpoint_every": 2,
        "system.device": "cpu"})
    whole = lpkit.train(config, out=tmp_path / "whole")
    parts = in_parts(config, tmp_path / "parts", step=2)
    assert [line["loss"] for line in parts.metrics] == [line["loss"] for line in whole.metrics]
    assert whole.metrics[-1]["loss"] < whole.metrics[0]["loss"]
