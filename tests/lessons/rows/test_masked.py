"""Masked pre-training, BERT-like and as an autoencoder, beside PyTorch written out, the counter of
FLOPs, a trace, one process and two.

Only these tests catch: a loss over other tokens than the hidden ones, a hidden token that a layer
sees, an encoder that does not leave them out or puts them back elsewhere, and parameters, FLOPs or
bytes of that counted wrongly.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import lpkit
from lessons.rows.masked_torch import Masked
from lpkit import cli
from lpkit.config import Config
from lpkit.datasets import prepare
from lpkit.errors import ConfigError
from lpkit.hardware import room
from lpkit.predict import memory, predict
from lpkit.predict.flops import products, training_flops
from lpkit.training.training import Training
from tests.training.resuming import in_parts

BERT = {"model.attention": "bidirectional", "model.vocab": 257, "data.policy": "masked"}
MAE = BERT | {"data.policy.share": 0.75, "model.changes": "masked-autoencoder:encoder_layers=2"}
SMALL = Config().replace({
    "imports": "lessons.rows.masked",
    "model.layers": 3, "model.width": 32, "model.heads": 2, "model.context": 24, "steps": 4,
    "global_batch": 4, "eval_batches": 2,
    "schedule": "constant", "schedule.warmup_steps": 0, "precision.recipe": "fp32",
    "system.device": "cpu", "system.threads": 1})


@pytest.fixture
def small(corpus, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return SMALL.replace({"data.source": str(corpus / "*.py")})


def by_hand(config, w, batch):
    """The nats of hidden tokens, sequence by sequence: the encoder's input is a list of tokens, and
    nothing is put anywhere by an index of the batch."""
    m, nats = config.model, []
    encoder = next((change.encoder_layers for change in m.changes), 0)

    def layer(x, at, i):
        def p(name):
            return w[f"blocks.{i}.{name}"]
        h = F.layer_norm(x, (m.D,), p("norm1.weight"), p("norm1.bias"))
        q, k, v = (h @ p("attention.qkv.weight").T + p("attention.qkv.bias")).view(len(x), m.H, 3,
            m.E).unbind(2)
        if m.position == "rope":
            angle = at[:, None] * 10_000.0 ** (-torch.arange(0, m.E, 2) / m.E)
            turn = torch.polar(torch.ones_like(angle), angle)[:, None]
            q, k = (torch.cat(((z := torch.complex(*t.chunk(2, -1)) * turn).real, z.imag), -1)
                    for t in (q, k))
        scores = torch.einsum("ihe,jhe->hij", q, k) / m.E**0.5
        mixed = torch.einsum("hij,jhe->ihe", scores.softmax(-1), v).reshape(len(x), m.D)
        x = x + mixed @ p("attention.out.weight").T + p("attention.out.bias")
        h = F.layer_norm(x, (m.D,), p("norm2.weight"), p("norm2.bias"))
        up = F.gelu(h @ p("mlp.up.weight").T + p("mlp.up.bias"), approximate="tanh")
        return x + up @ p("mlp.down.weight").T + p("mlp.down.bias")

    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        x = [w["embed.weight"][token] + (w["positions.embed.weight"][place]
            if m.position == "learned" else 0) for place, token in enumerate(tokens)]
        visible = [place for place, token in enumerate(tokens) if token != 256]
        if encoder:
            seen = torch.stack([x[place] for place in visible])
            for i in range(encoder):
                seen = layer(seen, torch.tensor(visible).float(), i)
            for place, row in zip(visible, seen, strict=True):
                x[place] = row
        x = torch.stack(x)
        for i in range(encoder, m.L):
            x = layer(x, torch.arange(m.T).float(), i)
        x = F.layer_norm(x, (m.D,), w["norm.weight"], w["norm.bias"])
        for place in set(range(m.T)) - set(visible):
            logits = w["embed.weight"] @ x[place]
            nats.append(logits.logsumexp(0) - logits[targets[place]])
    return torch.stack(nats).mean()


@pytest.mark.parametrize("says, position", [(BERT, "learned"), (MAE, "learned"), (MAE, "rope")],
                         ids=["bert", "mae", "mae, rope"])
def test_the_loss_and_its_gradients_are_those_written_out(says, position, small):
    config = small.replace(says | {"model.position": position, "system.attention": "plain"})
    training = Training.build(config)
    batch, state = training.batch(0), {name: p.detach().clone().requires_grad_()
        for name, p in training.model.named_parameters()}
    # far from the start, where attention is nearly a mean
    for p, copy in zip(training.model.parameters(), state.values(), strict=True):
        with torch.no_grad():
            copy.copy_(p.copy_(p + 0.1 * torch.sin(torch.arange(p.numel()).float()).view_as(p)))
    # as kernels, which take the same angles for all sequences
    for block in training.model.blocks:
        block.attention.rotate = lambda x, cos, sin, rotate=block.attention.rotate: rotate(x,
            *(t.view(x.shape[-2:]) for t in (cos, sin)))
    own_loss = training.forward_backward(batch)
    (loss := by_hand(config, state, batch)).backward()
    assert own_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, p in training.model.named_parameters():
        assert torch.allclose(p.grad, state[name].grad, rtol=1e-3, atol=2e-6), name


@pytest.mark.parametrize("says", [BERT, MAE], ids=["bert", "mae"])
def test_each_token_sees_both_sides_and_no_layer_a_hidden_one(says, small):
    """Beyond the mask itself: the encoder's numbers do not know how many masks there are, nor what
    they are."""
    training = Training.build(small.replace(says))
    model, batch = training.model, training.batch(0)
    hidden, seen, inner = batch.tokens[0] == 256, [], []
    for layer, block in enumerate(model.blocks):
        block.register_forward_hook(lambda block, given, out, layer=layer: (
            seen.append(out.shape[1]), inner.append(out) if layer == 1 else None)[0])
    model(batch.tokens)
    visible = int((~hidden).sum())
    assert (seen == ([visible, visible, 24] if says is MAE else [24, 24, 24])
            and visible == (6 if says is MAE else 20))
    logits = model(batch.tokens)
    first, last = hidden.nonzero()[0].item(), hidden.nonzero()[-1].item()
    for asked, side in ((first, slice(first + 1, None)), (last, slice(None, last))):
        changed = batch.tokens.clone()
        row = changed[0, side]
        row[row != 256] = (row[row != 256] + 1) % 256
        assert not torch.allclose(model(changed)[0, asked], logits[0, asked], atol=1e-4)
    inner.clear()
    with torch.no_grad():
        model(batch.tokens)
        model.embed.weight[256] += 1
        model(batch.tokens)
    assert torch.equal(*inner) == (says is MAE)


def test_a_hidden_token_is_a_target_and_nothing_else(small):
    """Where the text differs in hidden tokens alone, what a model reads is the same; without their
    weight, loss and gradients too."""
    text = np.arange(25, dtype=np.uint8) + 65
    first = Masked(tokens=text, batch=4, context=24, seed=3, share=0.75, mask=256).batch(0)
    hidden = first.tokens == 256
    place = (hidden.all(0).nonzero()[0].item() if hidden.all(0).any()
             else hidden[0].nonzero()[0].item())
    other = text.copy()
    other[place] = 200
    second = Masked(tokens=other, batch=4, context=24, seed=3, share=0.75, mask=256).batch(0)
    rows = hidden[:, place]
    assert (rows.any() and torch.equal(first.tokens[rows], second.tokens[rows])
            and (second.targets[:, place] == 200).all())
    assert (torch.equal(first.weights, hidden.float())
            and torch.equal(first.tokens[~hidden], first.targets[~hidden]))
    training = Training.build(small.replace(MAE))
    results = []
    for batch in (first, second):
        weights = batch.weights.clone()
        weights[:, place] = 0
        kept = replace(batch, weights=weights,
                       tokens=batch.tokens.where(rows[:, None], first.tokens))
        loss = training.forward_backward(kept)
        results.append([loss, *(p.grad.clone() for p in training.model.parameters())])
        for p in training.model.parameters():
            p.grad = None
    assert all(map(torch.equal, *results))
    assert training.forward_backward(first) != training.forward_backward(replace(first,
        targets=second.targets))


def test_as_many_are_hidden_in_each_sequence_by_seed_and_step_alone():
    text = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    policies = [Masked(tokens=text, batch=8, context=40, seed=seed, share=0.15, mask=256)
                for seed in (0, 0, 1)]
    masks = [[(policy.batch(step).tokens == 256) for step in (0, 7)] for policy in policies]
    assert all((mask.sum(1) == 6).all() for pair in masks for mask in pair)
    assert (torch.equal(masks[0][1], masks[1][1]) and not torch.equal(masks[0][0], masks[0][1])
            and not torch.equal(masks[0][0], masks[2][0]))
    places = torch.stack([policies[0].batch(step).tokens == 256
                          for step in range(200)]).float().mean((0, 1))
    # every place is as likely: 0.15, and a deviation of 0.009
    assert 0.1 < places.min() and places.max() < 0.2


def test_evaluation_is_of_the_hidden_tokens_of_the_validation_text(small):
    config = small.replace(MAE)
    training, text = Training.build(config), prepare(config.data, vocab=257).val
    written = {bytes(text[i:i + 24].astype(np.uint8)) for i in range(len(text) - 24)}
    nats = []
    for step in range(2):
        batch = training.val.batch(step)
        assert (((batch.tokens == 256).sum(1) == 18).all()
                and all(bytes(row.astype(np.uint8)) in written for row in batch.targets.numpy()))
        with torch.no_grad():
            logits = training.model(batch.tokens)
        nats.append(F.cross_entropy(logits[batch.tokens == 256],
                                    batch.targets[batch.tokens == 256]).item())
    assert training.evaluate() == pytest.approx(sum(nats) / 2,
        rel=1e-6) == Training.build(config).evaluate()
    assert not torch.equal(training.val.batch(0).tokens, training.batch(0).tokens)


@pytest.mark.parametrize("says", [
    BERT, MAE,
    {**MAE, "model.layers": 5, "model.position": "rope", "grad_accum_steps": 2,
     "model.changes": "masked-autoencoder:encoder_layers=4"},
    {**MAE, "data.policy.share": 0.4, "model.mlp": "swiglu", "model.kv_heads": 1,
     "model.changes": "masked-autoencoder:encoder_layers=1:hidden=0.4"}])
def test_parameters_flops_and_bytes_are_those_of_an_update(says, small):
    config = small.replace(says | {"system.attention": "plain"})
    training = Training.build(config)
    with FlopCounterMode(display=False) as counter:
        training.update(0)
    prediction = predict(config, "h200")
    assert (training_flops(config.model, batch=config.global_batch) == counter.get_total_flops()
            == prediction.flops_per_token * config.tokens_per_step)
    assert prediction.parameters == sum(p.numel() for p in training.model.parameters())
    config = config.replace({"system.attention": "sdpa"})
    traced, there = lpkit.predict_trace(config), memory(config, room("cpu"), attention="sdpa")
    at = there.at(there.peak_moment)
    assert (at["activations"] == traced.rows["activations"]
            and there.peak_bytes == pytest.approx(traced.peak_bytes, rel=1e-3))


def test_an_encoder_of_a_quarter_is_cheaper_as_products_say(small):
    """At the sizes of He et al.'s ViT-L without a decoder to speak of: a quarter of the products,
    and less of the pairs."""
    config = small.replace(BERT | {"model.layers": 24, "model.width": 1024, "model.heads": 16,
                                   "model.context": 196, "data.policy.share": 0.75})
    encoder = config.replace({"model.changes": "masked-autoencoder:encoder_layers=23"})
    whole, less = (predict(variant, "h200") for variant in (config, encoder))
    linears = [sum(p.flops for p in products(variant.model, batch=1) if not p.pairs
                   and p.name != "head") for variant in (config, encoder)]
    assert linears[1] / linears[0] == pytest.approx((23 / 4 + 1) / 24)
    assert (0.25 < less.flops_per_token / whole.flops_per_token < 0.29
            and less.step_seconds < 0.4 * whole.step_seconds)
    assert less.memory.peak_bytes < whole.memory.peak_bytes


def test_a_run_goes_on_to_the_bit_and_learns(small, tmp_path):
    config = small.replace(MAE | {"steps": 30, "optimizer.lr": 0.01, "eval_every": 10,
                                  "checkpoint_every": 2})
    assert Config.from_yaml(config.to_yaml()) == config
    run = lpkit.train(config, out=tmp_path / "run")
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"] - 1
    parts = in_parts(config, tmp_path / "parts", 7)
    lines = [[(line["loss"], line["grad_norm"], line.get("val_loss")) for line in trained.metrics]
             for trained in (parts, run)]
    assert lines[0] == lines[1] and run.summary["val_loss"] == parts.summary["val_loss"]
    with pytest.raises(ConfigError,
                       match=r"model\.attention=bidirectional sees tokens to come, so that .* "
                             r"nothing can be generated or cached; ask"):
        lpkit.sample(run)
    # what it learnt goes on without masks: a model that sees all
    after = small.replace(BERT | {"start.run": str(tmp_path / "run")})
    assert Training.build(after).evaluate() < Training.build(small.replace(BERT)).evaluate() - 0.5


@pytest.mark.parametrize("says", [{"memory.recompute": "block"},
                                  {"memory.cross_entropy": "chunked"}, {"grad_accum_steps": 2},
                                  {"system.attention": "tiled"}])
def test_other_ways_of_computing_it_have_its_numbers(says, small):
    losses = []
    for config in (small.replace(MAE), small.replace(MAE | says)):
        training = Training.build(config)
        losses.append([training.update(step).loss.item() for step in range(3)]
                      + [training.evaluate()])
    assert losses[1] == pytest.approx(losses[0],
                                      rel=1e-5 if "grad_accum_steps" not in says else 1e-2)
    assert losses[1][:3] == pytest.approx(losses[0][:3], rel=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("says", [BERT, MAE], ids=["bert", "mae"])
def test_two_ranks_have_the_numbers_of_one_process(says, small, tmp_path, parent):
    config = small.replace(says)
    alone = lpkit.train(config, out=tmp_path / "alone")
    run = lpkit.launch(config.replace({"parallel.data": 2}), processes=2, out=tmp_path / "two",
                       parent=parent).result()
    assert ([line["loss"] for line in run.metrics]
            == pytest.approx([line["loss"] for line in alone.metrics], rel=1e-5))
    assert run.summary["val_loss"] == pytest.approx(alone.summary["val_loss"], rel=1e-5)


@pytest.mark.parametrize("says, why", [
    ({"data.policy.share": 1.0}, "share"),
    ({"data.policy.share": 0.01}, r"data\.policy\.share=0\.01 hides 0 of model\.context=24 tokens; "
                                  r"hide some, and leave some"),
    ({"data.policy.share": 0.99}, r"data\.policy\.share=0\.99 hides 24 of model\.context=24 "
                                  r"tokens; hide"),
    ({"data.policy.share": 0.15}, r"data\.policy\.share=0\.15 is not what the encoder leaves out; "
                                  r"set it to 0\.75"),
    ({"model.changes": "masked-autoencoder:encoder_layers=3"}, r"encoder_layers=3; set fewer than "
        r"model\.layers=3"),
    ({"model.changes": "masked-autoencoder:encoder_layers=1,lora"}, "masked-autoencoder leaves "
        "tokens out of what other changes add; name it last"),
    ({"model.attention": "full"}, r"masked-autoencoder needs attention to tokens to come, and "
                                  r"model\.attention=full has none; set model\.attention=bidir"),
    ({"model.attention": "full", "model.changes": []}, r"data\.policy=masked needs attention to "
                                                       r"tokens to come, and model\.attention=full "
                                                       r"has none; set"),
    ({"data.policy": "random-windows"}, r"bidirectional sees tokens to come, and with "
                                        r"data\.policy=random-windows these are what it is asked "
                                        r"for; name"),
    ({"model.vocab": 256}, r"data\.policy\.mask=256 must be the last token of model\.vocab=256; "
                           r"set model\.vocab=257"),
    ({"data.policy.mask": 255}, r"data\.policy\.mask=255 must be the last token of "
                                r"model\.vocab=257; set model\.vocab=256")])
def test_what_cannot_be_is_one_sentence(says, why):
    with pytest.raises(ConfigError, match=why) as refused:
        SMALL.replace(MAE).replace(says)
    assert "\n" not in str(refused.value)


def test_what_a_run_cannot_be_is_one_sentence_too(small, capsys, tmp_path):
    with pytest.raises(ConfigError, match=r"sees as many tokens of each sequence, and parallel\."
                                          r"context=2 others; set parallel\.context=1"):
        Training.build(small.replace(MAE | {"parallel.context": 2}))
    text = np.full(500, 255, dtype=np.uint8)
    with pytest.raises(ConfigError, match=r"data\.policy\.mask=255 is a token of the text"):
        Masked(tokens=text, batch=2, context=24, share=0.5, mask=255).batch(0)
    words = [f"{key}={value}" for key, value in (MAE | {"model.layers": 2,
        "data.source": small.data.source}).items()]
    assert (cli.main(["train", "cpu-3m", *words, "--out", str(tmp_path / "run")]) == 2
            and not (tmp_path / "run").exists())
    assert "set fewer than model.layers=2" in capsys.readouterr().err
