"""What attention holds and moves, and its steps: each beside torch or arithmetic; and the figures
over them.

Only these tests catch: bytes held or moved by attention that a run contradicts, and a step of the
online softmax that does not end in PyTorch's answer.
"""

import json

import plotly.graph_objects as go
import pytest
import torch
import torch.nn.functional as F

from lessons import l12_flash_attention as attention_tiles
from lessons.l12_flash_attention import held_figure, steps_view, traffic_figure
from lpkit.kernels.tiled_attention import attend
from lpkit.techniques.attention import Rule


@pytest.mark.parametrize("name", ["plain", "tiled", "sdpa"])
def test_what_is_held_is_what_the_rows_say(name):
    """Kept to the byte. Of a tile's copies some are views where heads lie apart, so its peak may be
    2% less."""
    model = attention_tiles.model_of(1024, heads=2, head_width=64)
    formula, measured = attention_tiles.formula(name, model), attention_tiles.measured(name, model)
    assert measured.kept_bytes == formula.kept_bytes
    assert measured.peak_bytes == pytest.approx(formula.peak_bytes,
                                                rel=0.02 if name == "tiled" else 0)


def test_a_line_and_a_parabola():
    xs = [1, 2, 4, 8]
    assert attention_tiles.fit(xs, [3 * x + 1 for x in xs], 1) == pytest.approx(1)
    assert attention_tiles.fit(xs, [x * x for x in xs], 1) < 0.99 < attention_tiles.fit(xs,
        [x * x for x in xs], 2)


@pytest.mark.parametrize("T, tile", [(64, 16), (100, 16), (50, 64)])
def test_moved_bytes_are_counted(T, tile):
    """By hand: q read and the answer written, 2 T E numbers; a number a query; of keys and values,
    what each tile meets."""
    met = sum(min((i // tile + 1) * tile, T) for i in range(0, T, tile))
    assert (attention_tiles.moved(T, 8, tile, heads=3) == 4 * 3 * (2 * T * 8 + T + 2 * 8 * met)
            == attention_tiles.counted(T, 8, tile, heads=3))
    counted = attention_tiles.counted_one_by_one(T, 8, heads=3)
    # and token numbers
    assert counted == pytest.approx(attention_tiles.moved_one_by_one(T, 8, heads=3), rel=0.01,
                                    abs=24 * T)


def test_only_what_was_there_and_what_remains_counts():
    a, b = torch.ones(10), torch.ones(10)
    with attention_tiles.SlowMemory() as slow:
        c = (a + 1) * 2
        b.add_(c)
        b[:5] = a[:5]
    assert slow.moved((a,)) == 40 + 20                      # read twice, the second time half of it
    # read and written, then half overwritten
    assert slow.moved((b,)) == 40 + 40 + 20
    assert slow.moved((a.view(2, 5), a)) == 60
    # a; a + 1 and c, written and read; b
    assert slow.moved() == 60 + 2 * 40 + 2 * 40 + 100


@pytest.mark.parametrize("T, tile", [(32, 8), (32, 5)])
def test_steps_end_in_the_answer(T, tile):
    q, k, v = torch.randn(3, T, 16, generator=torch.Generator().manual_seed(0))
    steps = attention_tiles.online(q, k, v, tile)
    want = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    _, lse = attend(*(x[None, None] for x in (q, k, v)), None, None, Rule(), tile)
    # the last of each tile of queries
    for step in {step.queries.start: step for step in steps}.values():
        torch.testing.assert_close(step.answer, want[step.queries])
        torch.testing.assert_close(step.m + step.l.log(), lse[0, 0, step.queries])
        torch.testing.assert_close(step.there, torch.ones_like(step.there))
    first = steps[len(steps) // 2]
    assert first.there.max() <= 1 + 1e-6 and (first.shrink <= 1).all()


def test_figures_show_their_numbers():
    q, k, v = torch.randn(3, 32, 16, generator=torch.Generator().manual_seed(0))
    steps, scores = attention_tiles.online(q, k, v, 8), (q @ k.T / 4).tolist()
    show = steps_view(steps, scores, 8)
    for number, step in enumerate(steps, 1):
        spec = show(number)
        go.Figure(json.loads(json.dumps(spec, allow_nan=False)))
        drawn = [value for row in spec["data"][0]["z"] for value in row if value is not None]
        assert len(drawn) == sum(min(8, i + 1 - step.keys.start) for step in steps[:number]
                                 for i in range(step.queries.start, step.queries.stop))
        by_name = {(trace["name"], trace.get("yaxis")): trace["y"] for trace in spec["data"][1:]}
        assert (by_name["so far", "y2"] == step.m.tolist()
                and by_name["so far", "y3"] == step.there.tolist())
        assert by_name["so far", "y4"] == step.answer[-1].tolist()
    assert "queries 24 to 31 meet keys 24 to 31" in spec["layout"]["title"]["text"]
    held = held_figure({"plain": ({1: 1.0, 2: 4.0}, {1: 1.0, 2: 4.0})})
    assert held["data"][1]["name"] == "plain: 4.00 times"
    moved = traffic_figure({"counted": ({1e4: 5.0}, {1e4: 5.0}), "said": ({1e4: 4.0}, {})},
                           machines={"one": 2e4})
    for spec in (held, moved):
        go.Figure(json.loads(json.dumps(spec, allow_nan=False)))
