"""Drawings are to scale: what they show is counted from the spec, and held against torch and
arithmetic.

Only these tests catch: a drawing of formats, of blocks that share a scale or of recomputation whose
lengths are not those of what it shows.
"""

import json

import plotly.graph_objects as go
import pytest
import torch

from lessons.figures import drawing
from lessons.l03_number_formats import listed, number_line_figure
from lessons.l06_fp8_training import GAP, LEFT, NUMBERS, products_figure, products_view
from lessons.l08_recompute_and_offload import recompute_figure
from lpkit.errors import ConfigError
from lpkit.techniques.recipes import RECIPES

CAST = [name for name, recipe in RECIPES.items() if recipe.products]


def accepted(spec: dict) -> dict:
    go.Figure(json.loads(json.dumps(spec, allow_nan=False)))
    return spec


def test_the_number_line_has_every_value_of_torchs_formats():
    small = listed()
    spec = accepted(number_line_figure({name: small[name] for name in ("e4m3fn", "e5m2", "int8")}))
    for row, dtype in enumerate((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)):
        values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        values = values[values.isfinite() & (values >= 0)].unique()
        shares, powers = (set(trace["x"]) for trace in spec["data"][2 * row:2 * row + 2])
        assert shares == set((values / values.max()).tolist()) and powers == shares - {0.0}
        assert all(set(trace["y"]) == {row} for trace in spec["data"][2 * row:2 * row + 2])


@pytest.mark.parametrize("name", CAST)
def test_products_are_drawn_to_scale_with_their_blocks(name):
    """Edges are the matrices' sizes; the filled block has the sides of the cast; the thick sides
    are as long as the sum."""
    spec, recipe = accepted(products_view(RECIPES)(recipe=name)), RECIPES[name]
    rectangles = [shape for shape in spec["layout"]["shapes"] if shape["type"] == "rect"]
    size = lambda shape: (abs(shape["y1"] - shape["y0"]), abs(shape["x1"] - shape["x0"]))
    M, K, N = (NUMBERS[side] for side in "MKN")
    # y = x w^T, dx = dy w, dw = dy^T x
    wanted = [(M, K), (K, N), (M, N), (M, N), (N, K), (M, K), (N, M), (M, K), (N, K)]
    matrices = [size(shape) for shape in rectangles if "opacity" not in shape]
    assert matrices == wanted
    blocks = [size(shape) for shape in rectangles if "opacity" in shape]
    casts = [cast for pair in recipe.products.values() for cast in pair]
    for i, (cast, drawn) in enumerate(zip(casts, blocks, strict=True)):
        whole = wanted[i // 2 * 3 + i % 2]
        block = cast.block[::-1] if i % 2 else cast.block
        assert drawn == tuple(side or full for side, full in zip(block, whole)), (name, i)
    thick = [shape for shape in spec["layout"]["shapes"] if shape["line"]["width"] == 5]
    lengths = [abs(shape["x1"] - shape["x0"]) + abs(shape["y1"] - shape["y0"]) for shape in thick]
    assert lengths == [K, K, N, N, M, M]
    assert min(shape["x0"] for shape in rectangles) == LEFT and GAP > 0


def test_grid_lines_do_not_strike_words_through():
    """Words in the middle of a coloured cell keep its colour behind them."""
    assert drawing.note("a", 0, 1)["bgcolor"] == drawing.GROUND
    assert "bgcolor" not in drawing.note("a", 0, 1, "center middle")


@pytest.mark.parametrize("layers", [2, 6])
def test_recomputation_by_the_clock(layers):
    """Forward 1, backward 2, again 1 for each block: 3 L against 4 L; of what is there, the most at
    once is L blocks against one."""
    spec = accepted(recompute_figure(layers))
    plain, inputs, again, forward = spec["data"]
    ends = lambda trace: [(base, base + x) for base, x in zip(trace["base"], trace["x"])]
    assert (max(end for _, end in ends(plain)) == 3 * layers
            and max(end for _, end in ends(again)) == 4 * layers)
    most = lambda trace: max(sum(start <= t + 0.5 < end for start, end in ends(trace))
                             for t in range(4 * layers))
    assert most(plain) == layers and most(again) == 1
    assert ([start for start, _ in ends(plain)] == [start for start, _ in ends(inputs)]
            == list(range(layers)))
    assert [end for _, end in ends(inputs)] == [end for _, end in ends(again)]
    assert all(b - a == 1 and (a, c) in ends(again)
               for (a, b), (_, c) in zip(ends(forward), ends(again)))
    assert ("it ends at" in str(spec["layout"]["annotations"])
            and "1.33 times" in str(spec["layout"]["annotations"]))


def test_what_has_nothing_to_show_is_refused():
    with pytest.raises(ConfigError, match="casts no operand"):
        products_figure(RECIPES["bf16"])
    with pytest.raises(ConfigError, match="2 blocks or more"):
        recompute_figure(1)
