"""What notebook 13 counts and measures: pairs, crossings, how far a window reaches.

Only these tests catch: a count of pairs or FLOPs of another mask than the rule's, a crossing read
between noisy points, and a window that reaches one place too far.
"""

import math
from dataclasses import replace

import pytest
import torch

from lessons.l13_efficient_attention import (
    KINDS,
    Layer,
    cheaper,
    cost_figure,
    crossing,
    learn,
    mask_view,
    reach,
)
from lessons.tasks import Recall
from lpkit.config import ModelConfig
from lpkit.errors import ConfigError
from lpkit.nn.attention import plain, sees
from lpkit.nn.transformer import Transformer
from lpkit.techniques.attention import Rule
from lpkit.techniques.row import chosen

SOFTMAX = [name for name, row in KINDS.items() if row.settings.rule(8) is not None]


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("context", [1, 300])
def test_pairs_are_those_of_the_mask(name, context):
    layer, places = Layer(kind=chosen(KINDS, name), context=context,
                          document=70), torch.arange(context)
    mask = sees(layer.model.attention.rule(context), places, places, (places // 70)[None])
    assert layer.pairs == mask.sum()
    assert layer.needed_flops == 3.5 * 4 * mask.sum() * 2 * 64


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_runs_and_computes_at_least_what_is_needed(name):
    layer = Layer(kind=chosen(KINDS, name), context=96, document=32)
    layer.runner()()
    assert layer.computed_flops > 0 and layer.measured_bytes() > 0
    assert layer.pairs is None or layer.op.pairs_share >= 0.99 * layer.pairs / 96**2


@pytest.mark.parametrize("name", ["full", "windw", "bidirectional"])
def test_a_kind_to_look_at_is_one_that_is_cheaper(name):
    assert cheaper("window").size == KINDS["window"].settings.size
    with pytest.raises(ConfigError, match="there is no kind"):
        cheaper(name)


def test_kinds_are_told_apart_in_the_legend_of_their_marks():
    curves = {name: {128: 1.0, 256: 2.0} for name in KINDS}
    marks = [(trace["marker"]["color"], trace["marker"]["symbol"])
             for trace in cost_figure(curves, curves, unit="s")["data"] if trace["name"]]
    assert len(marks) == len(set(marks)) == len(KINDS)


def test_full_attention_keeps_the_bytes_of_its_formula():
    layer = Layer(kind=chosen(KINDS, "full"), context=64)
    assert layer.measured_bytes() == layer.saved_bytes


def test_a_crossing_lies_where_it_can_be_said():
    contexts = [64, 128, 256, 512, 1024]
    full, line = {T: T**2 / 2 for T in contexts}, {T: 100.0 * T for T in contexts}
    # powers are lines between logarithms
    assert crossing(line, full, 0.5) == pytest.approx(400)
    assert crossing(line, full, 1e-3) == math.inf and crossing(line, full, 1e3) == 64
    noisy = line | {256: 1e9}       # begins anew after what lies above
    assert crossing(noisy, full, 0.5) > 256


def test_a_window_reaches_its_layers_times_a_window_less_one():
    """No further by a single place: a model's prediction feels every token within reach, and none
    beyond."""
    kind = chosen(KINDS, "window")
    assert reach(chosen(KINDS, "full"), 2) == math.inf and reach(kind, 2) == 2 * 255
    size, T = 5, 24
    model = Transformer(ModelConfig(layers=2, width=16, heads=2, vocab=8, context=T,
                                    position="rope"),
                        attend=lambda *args: plain(*args[:3], rule=Rule(window=size))).double()
    rows = torch.eye(8, dtype=torch.float64)[torch.randint(8, (1, T))] @ model.embed.weight
    x = rows.detach().requires_grad_()
    rotation, h = model.positions.rotation(T, 0, x), x
    for layer, block in enumerate(model.blocks):
        h = block(h, rotation, None, layer)
    grad, = torch.autograd.grad(h[0, -1].square().sum(), x)
    felt = grad[0].abs().amax(-1) > 0
    assert felt.tolist() == [T - 1 - j <= 2 * (size - 1) for j in range(T)]


def test_a_window_recalls_nothing_from_beyond_its_reach():
    kind = replace(chosen(KINDS, "window"), size=4)
    [learned] = learn({"window": kind}, Recall(name="recall", pairs=4, symbols=8), context=31,
                      steps=40)["window"]
    far, count = reach(kind, 2), (learned.distances > reach(kind, 2)).sum().item()
    assert count > 200 and learned.beyond(far) < 1 / 8 + 4 * math.sqrt(7 / 64 / count)
    assert learned.losses[-1] < learned.losses[0] and len(learned.by_distance(6)) > 3


def test_the_mask_that_is_drawn_is_the_rule():
    show = mask_view(24)
    for name in SOFTMAX:
        spec = show(kind=name, document=7, size=5, global_tokens=2, block=4, local=1, stride=2)
        layer = Layer(kind=chosen(KINDS, name), context=24, document=7)
        if name in ("full", "documents"):
            assert (sum(map(sum, spec["data"][0]["z"])) == layer.pairs
                    and "pairs" in spec["layout"]["title"]["text"])
    for name in KINDS.keys() - set(SOFTMAX):
        with pytest.raises(ConfigError, match="hides no key"):
            show(kind=name, document=7, size=5)
