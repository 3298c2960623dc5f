"""Several ranks compute what one process does: a part of the matrix, and its arithmetic."""

import math
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch

from lpkit.contracts import Batch, DataPolicy
from lpkit.techniques.layouts import GATHERED
from lpkit.techniques.recipes import RECIPES
from tests.parallel import parity


@pytest.mark.dist
def test_a_part_of_the_matrix(parent, monkeypatch):
    """Three updates. Float32 within 1e-5. In 8 bits within 3 sigma of 20 updates, as
    docs/parallel.md has them: in three updates hardly a rounding has gone the other way yet, and
    sigma is that of a few last bits. Casts that travel are those of whole weights, so both ways to
    gather are the same run."""
    monkeypatch.setattr(parity, "WarmParent", lambda: nullcontext(parent))
    layouts = ["replicas", "ZeRO 1", "ZeRO 3, float32", "tensor", "ZeRO 3, fp8"]
    rows = {(row.recipe, row.layout): row for row in parity.measure(["fp32", "fp8-tensorwise"],
        {name: parity.LAYOUTS[name] for name in layouts}, updates=3,
                                                                       orders=1)}
    assert (list(rows) == [("fp32", name) for name in layouts[:4]]
            + [("fp8-tensorwise", name) for name in layouts])
    for (recipe, _), row in rows.items():
        far = row.distance
        # a rank's part of a matrix has a scale of its own
        most = 2e-3 if row.layout == "tensor" else 5e-4
        assert (row.same if recipe == "fp32" else far.loss < most and far.grad_norm < 4e-2
                and far.weights < 6e-3), row
    assert rows["fp8-tensorwise", "ZeRO 3, fp8"].distance == rows["fp8-tensorwise",
        "ZeRO 3, float32"].distance
    heads, lines = parity.table(list(rows.values()))
    assert ([line[0] for line in lines] == ["fp32", "fp8-tensorwise"]
            and {len(line) for line in lines} == {len(heads)})
    assert parity.page(list(rows.values())).count("\n| ") == 3


def test_every_recipe_goes_with_every_layout_that_it_can():
    for recipe, row in RECIPES.items():
        goes = {name for name, layout in parity.LAYOUTS.items() if parity._goes(recipe, layout)}
        left = set(parity.LAYOUTS) - goes
        assert any("fp8" in name for name in left) == (not row.gathers)
        assert any("compute" in name for name in left) == (row.compute is None)
    gathered = {layout["gathered"] for layout in parity.LAYOUTS.values() if "gathered" in layout}
    assert gathered == set(GATHERED)


def test_another_order_has_the_same_sequences():
    class Numbers(DataPolicy):
        def batch(self, step):
            return Batch(torch.arange(8)[:, None], torch.arange(8)[:, None] + 1)

    one, two = (parity.Reordered(Numbers(), seed).batch(0) for seed in (1, 2))
    assert one.tokens.flatten().tolist() != two.tokens.flatten().tolist()
    assert (sorted(one.tokens.flatten().tolist()) == list(range(8))
            and torch.equal(one.targets, one.tokens + 1))


def test_distances_and_tolerances():
    due = {"losses": [2.0, 1.0], "norms": [1.0, 1.0], "weights": 0.0}
    far = parity._distance({"losses": [2.0, 1.1], "norms": [1.0, 0.9], "weights": 0.5}, due)
    assert asdict(far) == pytest.approx({"loss": 0.1 / 2**0.5, "grad_norm": 0.1 / 2**0.5,
        "weights": 0.5, "last_loss": 0.1})
    dropped = [parity._distance({**due, "norms": norms}, {**due, "norms": [math.inf, 1.0]})
               for norms in ([math.inf, 1.0], [1.0, 1.0])]
    # an overflow here is one there
    assert [one.grad_norm for one in dropped] == [0.0, math.inf]
    sigma = parity.Distance(loss=0.05, grad_norm=0.05, weights=0.1, last_loss=1.0)
    row = parity.Row(recipe="bf16", layout="replicas", distance=far, sigma=sigma, norm=False,
                     apart=0.0)
    assert (row.sigmas == pytest.approx([2**0.5, 2**0.5, 5.0]) and not row.same
            and "**" in parity._cell(row))


def test_a_norm_in_parts_is_the_same_norm():
    gradients = [torch.randn(7, 5, generator=torch.Generator().manual_seed(1)), torch.ones(3)]
    whole = torch._foreach_norm(gradients, 2, torch.float32)
    for parts in (2, 3, 11):
        torch.testing.assert_close(parity._norms_in_parts(parts, gradients, 2, torch.float32),
                                   list(whole))


def test_a_layout_is_held_to_the_sums_that_its_ranks_take():
    over = {name for name, layout in (parity.LAYOUTS | parity.AXES).items()
            if parity.Case(recipe="fp32", layout=layout).norm_over_ranks}
    assert {"ZeRO 1", "hybrid", "tensor", "pipeline", "context, ZeRO 3", "ZeRO 3, compute"} <= over
    assert not over & {"replicas", "context", "all-to-all", "context 4", "context, data"}
