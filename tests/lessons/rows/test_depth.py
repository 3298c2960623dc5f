"""Governors by which an update runs less of the model: what they leave out, what that costs, and
that nothing else changes.

Only these tests catch: a layer or token that is left out at another rate than the row says, FLOPs
or bytes of another run than the one that trains, a growth or mask that changes the model, and a
governor whose run differs after a resume, on ranks or beside another technique.
"""

import functools
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lessons.rows.disk  # noqa: F401  adds rows
import lpkit
from lessons.rows import blocks as blocks
from lessons.rows.depth import Depth, hashed
from lessons.rows.depth_torch import Partly
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.hardware import room
from lpkit.predict import predict
from lpkit.predict.flops import training_flops
from lpkit.predict.governed import governed
from lpkit.predict.ledger import memory
from lpkit.predict.time import step_time
from lpkit.techniques.changes import GOVERNORS
from lpkit.techniques.row import TechniqueRow
from lpkit.training.build import decide
from lpkit.training.training import RandomTokens, Training
from tests.training.resuming import in_parts

STEPS = 8
SMALL = Config().replace({
    "imports": "lessons.rows.depth",
    "model.layers": 4, "model.width": 32, "model.heads": 2, "model.context": 32,
    "model.position": "rope", "steps": STEPS, "global_batch": 4,
    "eval_every": 4, "eval_batches": 1, "checkpoint_every": 2, "schedule.warmup_steps": 1,
    "precision.recipe": "fp32", "system.device": "cpu",
    "system.attention": "plain"})
SAYS = {"stochastic-depth": {}, "layer-drop": {"rate": 0.5},
        "progressive-layer-drop": {"gamma": 0.5}, "stack": {"start": 1, "at": [2, 5]},
        "stack, preserved": {"preserve": True}, "random-ltd": {"grow_steps": 6, "rises": 3},
        "token-drop": {"share": 0.3},
        "masked-growth": {"old": 1, "rise_steps": 5}}
ROWS = [name for name in SAYS if "," not in name]
LESS = [name for name in SAYS if name != "masked-growth"]       # it saves nothing by itself


def of(name: str, config: Config = SMALL, **more) -> Config:
    return config.replace({"governors": [{"name": name.partition(",")[0], **SAYS[name], **more}]})


def built(config: Config) -> Training:
    """They all read the same batch."""
    data = RandomTokens(config)
    torch.manual_seed(7)
    assert len(data.drawn.tokens)
    return Training.build(config, data=data)


def shares(config: Config, step: int) -> tuple[float, ...]:
    governor = config.governors[0]
    return GOVERNORS[governor.name].shares(governor, config.model.L, config.steps, config.seed,
                                           step)


def test_all_rows_are_tried_here():
    assert set(ROWS) == {name for name, row in GOVERNORS.items() if isinstance(row, Depth)}


# ---- what is left out

def test_layers_are_dropped_as_often_as_their_rates_say():
    """A count within four standard deviations of the binomial's mean, for each layer by itself;
    pairs of layers are independent."""
    steps, config = 2000, SMALL.replace({"steps": 2000, "model.layers": 6})
    at = lambda step: 0.5 * math.exp(-100 / steps * step) + 0.5
    keeps = {"layer-drop": lambda layer, step: 0.5,
             "stochastic-depth": lambda layer, step: 1 - 0.5 * (layer + 1) / 6,
             "progressive-layer-drop": lambda layer, step: 1 - (layer + 1) / 6 * (1 - at(step))}
    for name, keep in keeps.items():
        dropping = (of(name, config) if name != "progressive-layer-drop"
                    else config.replace({"governors": name}))
        drawn = [shares(dropping, step) for step in range(steps)]
        for layer in range(6):
            p = [keep(layer, step) for step in range(steps)]
            assert (abs(sum(row[layer] for row in drawn) - sum(p)) < 4
                    * math.sqrt(sum(q * (1 - q) for q in p)) + 1e-9), (name, layer)
        both = sum(row[4] * row[5] for row in drawn)
        p = [keep(4, step) * keep(5, step) for step in range(steps)]
        assert abs(both - sum(p)) < 4 * math.sqrt(sum(q * (1 - q) for q in p))
    assert [shares(dropping.replace({"seed": 1}), step) for step in range(9)] != drawn[:9]


def test_what_is_drawn_looks_drawn():
    """Bits of the hash, by seeds, steps and layers, are ones half of the time and follow from
    nothing nearby."""
    numbers = [hashed(seed, step, layer) for seed in range(8) for step in range(16)
               for layer in range(16)]
    assert len(set(numbers)) == len(numbers)
    for bit in range(64):
        ones = sum(number >> bit & 1 for number in numbers)
        assert abs(ones - len(numbers) / 2) < 4.5 * math.sqrt(len(numbers)) / 2
        flips = sum((a ^ b) >> bit & 1 for a, b in itertools.pairwise(numbers))
        assert abs(flips - len(numbers) / 2) < 4.5 * math.sqrt(len(numbers)) / 2


def test_the_schedules_are_the_papers():
    assert [shares(of("stack"), step) for step in (0, 1, 2, 4, 5, 7)] == [
        (1, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 0, 0), (1, 1, 1, 1), (1, 1, 1, 1)]
    assert ([shares(SMALL.replace({"governors": "stack"}), step)[2] for step in range(STEPS)] == [0]
            * 4 + [1] * 4)
    middles = [shares(of("random-ltd"), step) for step in range(STEPS)]
    assert all(by_layer[0] == by_layer[-1] == 1 and by_layer[1] == by_layer[2]
               for by_layer in middles)
    assert [by_layer[1] for by_layer in middles] == pytest.approx(
        [0.5, 0.5, 2 / 3, 2 / 3, 5 / 6, 5 / 6, 1, 1])
    assert shares(of("token-drop"), 3) == (1, 0.3, 0.3, 1)
    theta = lambda t: (1 - 0.4) * math.exp(-0.05 * t) + 0.4
    governor = SMALL.replace({"governors": [{"name": "progressive-layer-drop", "theta": 0.4,
        "gamma": 0.05}]}).governors[0]
    for t in (0, 7, 40):
        assert GOVERNORS[governor.name].keeps(governor, 4, 50,
            t) == pytest.approx([1 - i / 4 * (1 - theta(t)) for i in (1, 2, 3, 4)])
    governor = of("stochastic-depth").governors[0]      # whose scales undo the rates drawn above
    assert GOVERNORS[governor.name].keeps(governor, 4, STEPS, 3) == pytest.approx(
        [7 / 8, 3 / 4, 5 / 8, 1 / 2])
    assert GOVERNORS["layer-drop"].keeps is None


# ---- what it costs

@pytest.mark.parametrize("name", LESS)
def test_flops_are_those_that_are_counted(name):
    """Over all updates of a run, by torch's counter."""
    config, counted = of(name, SMALL.replace({"model.context": 64})), 0
    training = built(config)
    for step in range(STEPS):
        with FlopCounterMode(display=False) as counter:
            training.update(step)
        counted += counter.get_total_flops()
    predicted = STEPS * training_flops(governed(config).model, batch=4)
    assert (predicted == pytest.approx(counted, rel=0.01)
            and predicted < 0.97 * STEPS * training_flops(config.model, batch=4))
    whole = training_flops(config.model, batch=4)
    assert (whole * STEPS > predicted and predict(config, "h200").flops_per_token
            == pytest.approx(predicted / STEPS / 256))


@pytest.mark.parametrize("name", LESS)
def test_predictions_are_of_what_runs(name):
    """A large model: seconds and the bill shrink with the FLOPs, parameters stay, bytes are those
    of the largest update."""
    config = lpkit.preset("llama-8b").replace({"steps": 1000})
    dropping = config.replace({"governors": [{"name": name.partition(",")[0],
        **({"preserve": True} if "," in name else {})}]})
    plain, less = predict(config, "h200", devices=64), predict(dropping, "h200", devices=64)
    flops, seconds = (getattr(less, key) / getattr(plain, key)
                      for key in ("flops_per_token", "step_seconds"))
    assert 0.5 < flops < 0.95 and seconds == pytest.approx(flops, abs=0.06)
    assert (less.run.cost / plain.run.cost == pytest.approx(seconds)
            and less.parameters == plain.parameters)
    assert less.memory.peak_bytes <= plain.memory.peak_bytes
    sees_all = max(sum(shares(dropping, step)) for step in range(1000)) == 32
    assert ((less.memory.doubt == "" and less.memory.peak_bytes == plain.memory.peak_bytes)
            == sees_all)
    assert less.step.mfu == pytest.approx(plain.step.mfu, rel=0.1)


def test_a_published_share_of_the_time():
    """Zhang and He 2020: 24% less per sample, by theta = 0.5 and gamma = 100 / steps."""
    config = lpkit.preset("llama-8b").replace({"steps": 1000})
    assert (1 - step_time(config.replace({"governors": "progressive-layer-drop"})).step_seconds
            / step_time(config).step_seconds == pytest.approx(
        0.24, abs=0.02))


def test_bytes_of_dropped_tokens_and_of_a_governor_that_says_nothing(monkeypatch):
    config = of("token-drop", SMALL.replace({"model.context": 256, "model.width": 64}))
    traced = lpkit.predict_trace(config)
    held = memory(config, room("cpu"))
    assert (held.peak_bytes == pytest.approx(traced.peak_bytes, rel=0.06)
            and "average number of tokens; in random configs of this kind the peak was"
            in held.doubt)
    assert traced.peak_bytes < 0.9 * lpkit.predict_trace(
        config.replace({"governors": []})).peak_bytes
    monkeypatch.setitem(GOVERNORS, "mine", TechniqueRow(implementation=f"{__name__}:Nothing"))
    assert "no formula covers mine" in memory(SMALL.replace({"governors": "mine"}),
        room("cpu")).doubt
    both = of("token-drop").replace({"governors": ["mine", "token-drop"]})
    assert "no formula covers mine: parameters" in memory(both, room("cpu")).doubt
    assert predict(both, "h200").flops_per_token < predict(SMALL, "h200").flops_per_token


class Nothing:
    def __init__(self, settings):
        pass

    def state_dict(self):
        return {}


@pytest.mark.parametrize("name", ["stack", "random-ltd"])
def test_an_update_can_be_traced(name):
    assert lpkit.predict_trace(of(name)).peak_bytes <= lpkit.predict_trace(SMALL).peak_bytes


# ---- what an update does

def test_tokens_pass_by_exactly_and_the_kept_ones_keep_their_places():
    """Against the whole block whose attention does not see the others: rotated and ordered as they
    stand in the text."""
    training = built(of("token-drop"))
    block, x = training.model.blocks[1], torch.randn(2, 32, 32)
    rotation = training.model.positions.rotation(32, 0, x)
    part = Partly(block, 0.3, 1.0, 7)
    y, kept = part(x, rotation), part.kept(32)
    others = [i for i in range(32) if i not in kept]
    assert len(kept) == 10 and torch.equal(y[:, others], x[:, others]) and (kept.diff() > 0).all()

    def attend(q, k, v, documents=None, own=None):
        seen = torch.zeros(32, 32, dtype=torch.bool).index_fill(1, kept, True).tril()
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return scores.masked_fill(~seen, -1e30).softmax(-1) @ v

    block.attention.attend = attend
    whole = block(x, rotation)
    assert (torch.allclose(y[:, kept], whole[:, kept], atol=1e-6)
            and not torch.allclose(y[:, kept], x[:, kept], atol=1e-3))


def test_documents_go_along():
    training = built(of("token-drop",
                        SMALL.replace({"model.attention": "documents",
                                       "data.policy": "random-documents"})))
    block, x = training.model.blocks[1], torch.randn(1, 32, 32)
    rotation = training.model.positions.rotation(32, 0, x)
    documents = (torch.arange(32) >= 16).long()[None]
    part = Partly(block, 0.5, 1.0, 3)
    y = part(x, rotation, documents=documents)
    changed = x.clone()
    changed[:, :16] += 1
    again = part(changed, rotation, documents=documents)
    assert torch.equal(y[:, 16:], again[:, 16:])


@pytest.mark.parametrize(("name", "alike"), [("random-ltd", False), ("token-drop", True)])
def test_tokens_are_drawn_for_each_layer_or_for_all(name, alike, monkeypatch):
    """The same ones in all micro-batches and other ones in the next update."""
    seen, kept = [], Partly.kept
    monkeypatch.setattr(Partly, "kept",
                        lambda part, tokens: seen.append(tuple(kept(part, tokens).tolist()))
                        or kept(part, tokens))
    training = built(of(name).replace({"grad_accum_steps": 2}))
    training.update(0)
    training.update(1)
    first, second = seen[:4], seen[4:]
    assert (first[:2] == first[2:] and (first[0] == first[1]) == alike
            and not set(first) & set(second))
    counts = torch.zeros(32)
    for draw in range(2000):
        counts[kept(Partly(None, 0.25, 1.0, draw), 32)] += 1
    assert (counts.sum() == 8 * 2000
            and ((counts - 500).abs() < 4.5 * math.sqrt(2000 * 0.25 * 0.75)).all())


def test_a_layer_that_is_left_out_is_not_updated_and_is_there_again():
    training = built(of("layer-drop").replace({"optimizer.weight_decay": 0.1}))
    state = lambda: {name: t.clone() for name, t in training.state_dict().items()
                     if isinstance(t, torch.Tensor) and "blocks" in name}
    seen = set()
    for step in range(STEPS):
        before = state()
        training.update(step)
        after = state()
        for layer, share in enumerate(shares(training.config, step)):
            moved = [name for name, t in after.items() if f"blocks.{layer}." in name
                     and name in before and not torch.equal(t, before[name])]
            assert bool(moved) == bool(share), (step, layer)
            seen.add(share)
        plain = built(SMALL.replace({"optimizer.weight_decay": 0.1}))
        plain.load_model(training.state_dict())
        assert plain.evaluate() == training.evaluate()
    assert seen == {0, 1}


def test_a_kept_layer_is_scaled():
    """Three layers of four pass; the last one's change is divided by its probability."""
    config = of("stochastic-depth")
    step = next(s for s in range(100) if shares(config.replace({"steps": 100}), s) == (0, 0, 0, 1))
    training = built(config.replace({"steps": 100}))
    tokens = training.batch(0).tokens
    x = training.model.embed(tokens)
    change = training.model.blocks[3](x, training.model.positions.rotation(32, 0, x)) - x
    want = training.model.norm(x + change / 0.5)
    governor = training.governors["stochastic-depth"]
    governor.begin(training, step)
    assert torch.allclose(training.model.hidden(tokens), want, atol=1e-5)
    governor.begin(training, step)      # an update that was given up had no end
    governor.end(training, step)
    assert torch.equal(training.model.hidden(tokens), built(SMALL).model.hidden(tokens))


@pytest.mark.parametrize(("name", "more"),
                         [("layer-drop", {"rate": 0.0}), ("token-drop", {"share": 0.999})])
def test_nothing_left_out_changes_nothing(name, more):
    training, other = built(of(name, **more)), built(SMALL)
    assert ([training.update(step).loss.item() for step in range(4)]
            == pytest.approx([other.update(step).loss.item() for step in range(4)], rel=1e-6))


# ---- stacking

def test_layers_that_do_not_run_yet_add_nothing():
    """The whole model, as it is evaluated and saved, is the part that runs: also after updates of
    it."""
    training = built(of("stack", start=2, at=[5]))
    for step in range(5):
        training.update(step)
    tokens, model = training.batch(0).tokens, training.model
    x = model.embed(tokens)
    for block in model.blocks[:2]:
        x = block(x, model.positions.rotation(32, 0, x))
    assert torch.allclose(model.hidden(tokens), model.norm(x), atol=1e-6)


@pytest.mark.parametrize("preserve", [True, False])
def test_a_growth_copies_what_runs(preserve):
    training = built(of("stack", start=2, at=[3], preserve=preserve))
    for step in range(3):
        training.update(step)
    tokens, model = training.batch(0).tokens, training.model
    before, weights = model.hidden(tokens), {name: p.clone()
        for name, p in model.named_parameters()}
    governor = training.governors["stack"]
    governor.begin(training, 3)
    after = model.hidden(tokens)
    assert torch.allclose(before, after, rtol=1e-6, atol=1e-6) == preserve
    for name, p in model.blocks.named_parameters():
        layer, _, rest = name.partition(".")
        want = weights[f"blocks.{int(layer) % 2}.{rest}"]
        zero = preserve and int(layer) >= 2 and rest.startswith(("attention.out.", "mlp.down."))
        assert torch.equal(p, torch.zeros_like(want) if zero else want), name
    governor.end(training, 3)
    training.update(3)
    assert not torch.equal(model.blocks[2].attention.out.weight,
                           weights["blocks.2.attention.out.weight"])


# ---- masks

def test_masks_rise_over_what_is_new():
    """A small model of two layers is stacked: at first the large one is that one, and in each
    update the stream is x + mask (block(x) - x) in what is new. It is evaluated and saved as a
    whole."""
    training, small = built(of("masked-growth", old=2, rise_steps=4)), built(
        SMALL.replace({"model.layers": 2}))
    with torch.no_grad():
        for name, p in small.model.named_parameters():
            p.copy_(dict(training.model.named_parameters())[name])
    tokens, rotated = training.batch(0).tokens, training.model.positions.rotation(32, 0,
        torch.zeros(1))

    def masked(mask):
        x = training.model.embed(tokens)
        for layer, block in enumerate(blocks):
            x = x + (mask if layer >= 2 else 1) * (block(x, rotated) - x)
        return training.model.norm(x)

    blocks, governor = list(training.model.blocks), training.governors["masked-growth"]
    for step, mask in enumerate((0, 0.25, 0.5, 0.75, 1, 1)):
        governor.begin(training, step)
        torch.testing.assert_close(training.model.hidden(tokens), masked(mask), atol=2e-6,
                                   rtol=1e-5)
        if step == 0:
            assert torch.equal(training.model.hidden(tokens), small.model.hidden(tokens))
        training.update(step)
        assert list(training.model.blocks) == blocks


def test_a_mask_costs_what_the_whole_model_does():
    masked = of("masked-growth")
    assert predict(masked, "h200").flops_per_token == predict(SMALL, "h200").flops_per_token
    assert (lpkit.predict_trace(masked).peak_bytes
            == pytest.approx(memory(masked, room("cpu")).peak_bytes, rel=0.06))
    governor = of("masked-growth", SMALL.replace({"steps": 100}), old=0,
                  rise_steps=None).governors[0]
    assert ([GOVERNORS[governor.name].keeps(governor, 6, 100, step)[2:4]
             for step in (0, 10, 50, 99)]
            == [(1, math.inf), (1, 5), (1, 1), (1, 1)])


# ---- a run that goes on, and ranks

@functools.cache
def losses(name: str, steps: int = 6) -> list[float]:
    """Of the first updates of a run of this row."""
    training = built(of(name))
    return [training.update(step).loss.item() for step in range(steps)]


@pytest.mark.parametrize("name", SAYS)
def test_a_resumed_run_is_the_same_run(name):
    """Bit for bit, from a checkpoint before, at and between a schedule's moments; the rest is
    trained by another process's objects."""
    whole, kept, curve = built(of(name)), {}, []
    for step in range(STEPS):
        if step in (1, 2, 5):
            kept[step] = {key: t.clone() if isinstance(t, torch.Tensor) else t
                          for key, t in whole.state_dict().items()}
        curve.append(whole.update(step).loss.item())
    for cut, state in kept.items():
        other = built(of(name))
        other.load_state_dict(state)
        assert [other.update(step).loss.item() for step in range(cut, STEPS)] == curve[cut:]
        assert all(map(torch.equal, whole.model.parameters(), other.model.parameters())), cut


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stack", "random-ltd"])
def test_a_run_is_stopped_and_resumed(name, corpus, tmp_path):
    config = of(name, SMALL.replace({"data.source": str(corpus / "*.py")}))
    whole = lpkit.train(config, out=tmp_path / "whole")
    parts = in_parts(config, tmp_path / "parts", 3)
    assert [line["loss"] for line in parts.metrics] == [line["loss"] for line in whole.metrics]
    assert (parts.summary["val_loss"] == whole.summary["val_loss"]
            and whole.summary["val_loss"] < 5.5)
    assert lpkit.sample(whole, tokens=3, seed=1)


@pytest.mark.dist
@pytest.mark.parametrize("name", SAYS)
def test_two_ranks_train_as_one_process(name, corpus, parent, tmp_path):
    """Each stage for a row of layers and one of tokens; others where ranks have least."""
    config = of(name, SMALL.replace({"data.source": str(corpus / "*.py"),
                                     "parallel.gathered": "float32"}))
    alone = lpkit.train(config, out=tmp_path / "alone")
    for zero in range(4) if name in ("layer-drop", "random-ltd") else (3,):
        run = lpkit.launch(config.replace({"parallel.shard": 2, "parallel.zero": zero}),
                           processes=2, out=tmp_path / f"zero{zero}", parent=parent).result()
        for key in ("loss", "grad_norm"):
            assert ([line[key] for line in run.metrics]
                    == pytest.approx([line[key] for line in alone.metrics], rel=1e-5)), zero
        assert run.summary["val_loss"] == pytest.approx(alone.summary["val_loss"], rel=1e-5)


@pytest.mark.dist
def test_whole_weights_of_an_evaluation_do_not_stay(corpus, parent, tmp_path):
    """An optimizer that evaluates an average puts others in their place for a while: ranks that
    gathered them must gather anew."""
    config = SMALL.replace({"data.source": str(corpus / "*.py"), "parallel.gathered": "float32",
                            "imports": "lessons.rows.optimizers", "optimizer": "schedule-free",
                            "eval_every": 2})
    alone = lpkit.train(config, out=tmp_path / "alone")
    for zero in (2, 3):
        run = lpkit.launch(config.replace({"parallel.shard": 2, "parallel.zero": zero}),
                           processes=2, out=tmp_path / f"zero{zero}", parent=parent).result()
        assert ([line["loss"] for line in run.metrics]
                == pytest.approx([line["loss"] for line in alone.metrics], rel=1e-5)), zero


# ---- beside other techniques

BESIDE = [{"memory.recompute": "block"}, {"memory.recompute": "selective"},
          {"memory.recompute": "core-attention"}, {"memory.activation_offload": "cpu"},
          {"memory.optimizer_state": "disk"}, {"memory.cross_entropy": "chunked"},
          {"grad_accum_steps": 2}, {"system.attention": "tiled"}]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "beside"), [
    *((name, beside) for name in ("layer-drop", "random-ltd") for beside in BESIDE),
    *((name, beside) for name in ("stack", "masked-growth") for beside in (BESIDE[0], BESIDE[3]))],
    ids=str)
def test_what_changes_no_number_changes_none_here(name, beside):
    training = built(of(name, SMALL.replace(beside)))
    curve = [training.update(step).loss.item() for step in range(6)]
    assert curve == pytest.approx(losses(name), rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [
    ("random-ltd", "inductor"), ("stochastic-depth", "aot_eager"), ("masked-growth", "aot_eager")])
def test_compiled_blocks_train_the_same(name, backend, monkeypatch):
    """By inductor where the number of tokens changes, elsewhere by what captures its graphs."""
    plain, asked = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda function, **how: asked.append(backend)
                        or plain(function, **how | {"backend": backend}))
    training = built(of(name, SMALL.replace({"system.compile": "blocks"})))
    curve = [training.update(step).loss.item() for step in range(6)]
    assert asked and curve == pytest.approx(losses(name), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "beside"), [
    ("layer-drop", {"precision.recipe": "fp8-delayed"}),
    ("random-ltd", {"precision.recipe": "fp8-delayed"}),
    ("random-ltd", {"precision.recipe": "mxfp8", "precision.recipe.pad": True}),
    ("layer-drop", {"optimizer": "muon"}), ("stack", {"optimizer": "muon"}),
    ("layer-drop", {"memory.optimizer_step": "in-backward", "optimizer.clip": 0})], ids=str)
def test_others_train(name, beside):
    training = built(of(name, SMALL.replace(beside)))
    curve = [training.update(step).loss.item() for step in range(6)]
    assert curve == pytest.approx(losses(name), rel=0.03) and curve[-1] < curve[0]


# ---- what cannot be

@pytest.mark.parametrize(("changed", "sentence"), [
    ({"governors": [{"name": "layer-drop", "rate": 1.0}]}, r"governors.rate must be 0 or more and "
                                                           r"below 1, got 1.0"),
    ({"governors": [{"name": "progressive-layer-drop", "theta": 0}]}, r"governors.theta must be "
        r"above 0 and below 1"),
    ({"governors": "layer-drop,random-ltd"}, r"governors=layer-drop,random-ltd each say how much "
                                             r".*; name one of them"),
    ({"governors": [{"name": "stack", "start": 3}]}, r"governors=stack:start=3 does not divide "
                                                     r"model.layers=4, and growths are copies; set "
                                                     r"start=2"),
    ({"governors": [{"name": "stack", "at": [8]}]}, r"governors=stack:at=\[8\] are not the 1 "
                                                    r"growths to model.layers=4 within steps=8; "
                                                    r"set at=\[4\]"),
    ({"governors": [{"name": "stack", "start": 1, "at": [2]}]}, r"set at=\[2, 4\]"),
    ({"governors": [{"name": "stack", "start": 1, "at": [3, 2]}]}, r"governors.at must be "
        r"ascending, from 1, got"),
    ({"governors": "stack", "start.run": "runs/a"}, r"governors=stack starts with layers that add "
                                                    r"nothing, and start.run does not support"),
    ({"governors": "stack", "model.changes": "lora"}, r"and model.changes does not support"),
    ({"governors": "stack", "model.block": "sas"}, r"and model.block=sas does not support"),
    ({"governors": "random-ltd", "model.layers": 2}, r"governors=random-ltd needs a layer "
        r"between the first and the last, and model.layers=2; set model.layers=3"),
    ({"governors": [{"name": "random-ltd", "grow_steps": 9}]}, r"governors=random-ltd:grow_steps=9 "
        r"is after the run's end; set it to 8"),
    ({"governors": [{"name": "masked-growth", "old": 4}]}, r"governors=masked-growth:old=4 are all "
                                                           r"of model.layers=4; set old=2"),
    ({"governors": [{"name": "masked-growth", "rise_steps": 8}]}, r"masked-growth:rise_steps=8 is "
        r"after the run's end; set it to 7"),
    ({"governors": "token-drop", "parallel.context": 2}, r"which parallel.context=2 splits; set "
                                                         r"parallel.context=1")])

def test_what_cannot_be_is_refused_in_one_sentence(changed, sentence):
    with pytest.raises(ConfigError, match=sentence) as raised:
        SMALL.replace(changed)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"system.compile": "model"}, r"system.compile=model compiles all layers into one graph, and "
                                  r"governors=layer-drop .*; set system.compile=blocks"),
    ({"parallel.tensor": 2}, r"governors=layer-drop .*; set governors="),
    ({"parallel.pipeline": 2}, r"governors=layer-drop .*; set .*governors="),
    ({"system.cuda_graphs": True}, r"system.cuda_graphs=true: ")])
def test_what_is_predicted_and_not_trained_is_refused_before_anything_is_allocated(changed,
        sentence):
    config = of("layer-drop").replace(changed)
    with pytest.raises(ConfigError, match=sentence):
        decide(config)


def test_tokens_that_do_not_tile_are_refused_before_anything_is_allocated():
    config = SMALL.replace({"precision.recipe": "mxfp8",
                            "governors": [{"name": "token-drop", "share": 0.3}]})
    with pytest.raises(ConfigError,
                       match=r"governors=token-drop: 40 tokens do not tile by 32 .*; set "
                             r"precision.recipe.pad=true$"):
        decide(config)
    decide(config.replace({"precision.recipe.pad": True}))
    decide(config.replace({"governors": [{"name": "token-drop", "share": 0.5}]}))


def test_a_row_of_ones_own_is_on_the_page(monkeypatch):
    """The text of docs/own_technique.md is run; what it leaves out is not updated, and the
    prediction knows."""
    page = (Path(__file__).parents[3] / "docs" / "own_technique.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
                if "GOVERNORS[" in block)
    with monkeypatch.context() as patch:
        patch.setitem(GOVERNORS, "every-other", None)
        exec(code, {})
        config = SMALL.replace({"governors": "every-other"})
        assert training_flops(governed(config).model) < training_flops(SMALL.model)
        training = built(config)
        before = [p.clone() for p in training.model.blocks[1].parameters()]
        training.update(1)
        assert all(torch.equal(p, q) for p, q in zip(before, training.model.blocks[1].parameters()))
        training.update(2)
        assert not all(torch.equal(p, q) for p, q in zip(before,
            training.model.blocks[1].parameters()))


def test_the_settings_survive_a_file():
    assert all(Config.from_yaml(of(name).to_yaml()) == of(name) for name in SAYS)
