"""Compares my_recipe with its definition, number by number: pytest test_my_recipe.py

For your recipe, compare with an independent implementation. Then break the recipe, and check that a
test fails.
"""

import my_recipe
import pytest
import torch

import lpkit
from lpkit.precision.scaled import quantise
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import Training

ROW = RECIPES["my_recipe"]
TINY = {"imports": "my_recipe", "model.layers": 1, "model.width": 32, "model.heads": 2,
        "model.context": 32, "global_batch": 2, "eval_batches": 1, "steps": 5,
        "schedule.warmup_steps": 0}


def by_hand(x):
    """Compute each block of a row in Python's floats, except for the rounding to E4M3."""
    out = []
    for row in x.double().tolist():
        for start in range(0, len(row), 16):
            block = row[start:start + 16]
            scale = my_recipe.definition(block)
            cast = torch.tensor([value / scale for value in block]).to(torch.float8_e4m3fn)
            out += [value * scale for value in cast.double().tolist()]
    return torch.tensor(out, dtype=torch.float64).reshape(x.shape)


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_every_cast_is_the_definition(size):
    x = size * torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    x[0, 3] *= 1e6      # an outlier, which costs precision only in its own block
    x[1, 16:32] = 0
    for cast in ROW.all_casts:
        assert torch.equal(quantise(x, cast).dequantise(torch.float64), by_hand(x))


def test_a_run_by_it_is_near_bf16():
    losses = {}
    for name in ("bf16", "my_recipe"):
        training = Training.build(lpkit.preset("cpu-3m").replace(TINY | {"precision.recipe": name}))
        losses[name] = [training.update(step).loss.item() for step in range(5)]
    assert losses["my_recipe"] == pytest.approx(losses["bf16"], rel=0.01)
    mine = losses["my_recipe"]
    assert mine != losses["bf16"] and mine[-1] < mine[0]
