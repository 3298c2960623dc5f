"""Dropout: where GPT-2 of transformers and LoRA of peft have it, and nothing where it is off.

Only these tests catch: a mask that is drawn where transformers or peft draw none, twice the same,
in evaluation, or otherwise after a restart or recomputation, and bytes of masks that no formula
counts.
"""

from collections import Counter

import pytest
import torch
from torch import nn

import lessons.rows.activations
import lessons.rows.linear_attention  # noqa: F401  adds rows
import lpkit
from lessons.activations import kept
from lessons.rows import adapters as adapters
from lessons.rows import blocks as blocks
from lessons.saved import saved_bytes
from lpkit.config import Config, flat
from lpkit.errors import ConfigError
from lpkit.exchange import families
from lpkit.nn.attention import plain
from lpkit.nn.transformer import cross_entropy
from lpkit.predict.flops import training_flops
from lpkit.predict.ledger import memory
from lpkit.training import build
from lpkit.training.checkpoint import load_latest
from lpkit.training.sampling import trained
from lpkit.training.training import RandomTokens, Training
from tests.lessons.rows.test_adapters import SMALL
from tests.techniques.test_promise import _cpu
from tests.training.resuming import in_parts

GPT2 = {"name": "dropout", "embedding": 0.1, "residual": 0.2, "attention": 0.3}
LORA = {"name": "lora", "rank": 4, "shared": True}
TINY = SMALL.replace({"model.kv_heads": None, "model.heads": 4, "model.mlp": "gelu"})
KINDS = {"gpt2": [GPT2], "residual": [{"name": "dropout", "residual": 0.2}],
         "lora": [LORA, {"name": "dropout", "adapters": 0.2}],
         "all": [LORA, {**GPT2, "adapters": 0.2}]}


def of(changes, base=TINY, **more):
    return base.replace({"model.changes": changes, **more})


def built(config):
    return Training.build(config, data=RandomTokens(config, "cpu"))


def gradients(training, step=0):
    training.forward_backward(training.batch(step))
    return {name: p.grad.clone() for name, p in training.model.named_parameters()
            if p.grad is not None}


@pytest.fixture
def same_masks(monkeypatch):
    """Every mask follows from the tensor's shape and from how many of that shape came before."""
    seen = Counter()

    def dropout(x, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return x
        seen[tuple(x.shape)] += 1
        draw = torch.Generator().manual_seed(hash((*x.shape, seen[tuple(x.shape)])) % 2**31)
        return x * (torch.rand(x.shape, generator=draw) >= p) / (1 - p)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    return seen


def theirs(model, config, **settings):
    """The same weights in transformers."""
    transformers = pytest.importorskip("transformers")
    plain_model = config.replace({"model.changes": []}).model
    family = families.of_model(plain_model)
    weights = {name.replace(".base.", "."): t.detach() for name, t in model.state_dict().items()
               if ".A." not in name and ".B." not in name}
    about = {key: value for key, value in family.config(plain_model).items()
             if key not in ("architectures", "model_type")}
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(**about | settings,
        attn_implementation="eager"))
    missing, unknown = other.load_state_dict(family.weights(weights, plain_model), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unknown
    other.tie_weights()
    return other.train()


def test_gpt2_in_training_is_that_of_transformers(same_masks):
    config = of([GPT2])
    training = built(config)
    other = theirs(training.model, config, embd_pdrop=0.1, resid_pdrop=0.2, attn_pdrop=0.3)
    batch = training.batch(0)
    loss = training.forward_backward(batch)
    drawn, other_loss = same_masks.copy(), None
    same_masks.clear()
    logits = other(batch.tokens).logits
    other_loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    other_loss.backward()
    assert drawn == same_masks == {(2, 32, 48): 1 + 2 * 2, (2, 4, 32, 32): 2}
    assert loss.item() == pytest.approx(other_loss.item(), rel=1e-6)
    embed = training.model.embed.weight.grad
    torch.testing.assert_close(embed, other.transformer.wte.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(training.model.blocks[0].mlp.up.weight.grad.mT,
                               other.transformer.h[0].mlp.c_fc.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out:UserWarning",
                            "ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_in_training_is_that_of_peft(same_masks):
    peft = pytest.importorskip("peft")
    config = of([{**LORA, "targets": ["attention.out", "mlp.*"]},
                 {"name": "dropout", "adapters": 0.3}])
    training = built(config)
    other = peft.get_peft_model(theirs(training.model, config, embd_pdrop=0.0, resid_pdrop=0.0,
        attn_pdrop=0.0), peft.LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.3, target_modules=["c_proj", "c_fc"],
        fan_in_fan_out=True)).train()
    pairs = []
    for block, h in zip(training.model.blocks, other.base_model.model.transformer.h):
        pairs += [(block.attention.out, h.attn.c_proj), (block.mlp.up, h.mlp.c_fc),
                  (block.mlp.down, h.mlp.c_proj)]
    with torch.no_grad():
        for ours, its in pairs:
            nn.init.normal_(ours.B[0].weight)
            its.lora_A["default"].weight.copy_(ours.A.weight)
            its.lora_B["default"].weight.copy_(ours.B[0].weight)
    batch = training.batch(0)
    loss = training.forward_backward(batch)
    drawn = same_masks.copy()
    same_masks.clear()
    other_loss = nn.functional.cross_entropy(other(batch.tokens).logits.flatten(0, 1),
        batch.targets.flatten())
    other_loss.backward()
    assert (drawn == same_masks == {(2, 32, 48): 4, (2, 32, 192): 2}
            and loss.item() == pytest.approx(other_loss.item(), rel=1e-6))
    for ours, its in pairs:
        torch.testing.assert_close(ours.A.weight.grad, its.lora_A["default"].weight.grad, rtol=1e-4,
                                   atol=1e-6)
        torch.testing.assert_close(ours.B[0].weight.grad, its.lora_B["default"].weight.grad,
                                   rtol=1e-4, atol=1e-6)


def test_as_many_probabilities_are_dropped_as_said_and_their_mean_stays():
    torch.manual_seed(0)
    q, k = (torch.randn(4, 4, 64, 16) for _ in range(2))
    v = torch.eye(64).expand(4, 4, 64, 64)      # so that what comes out are the probabilities
    whole, some = plain(q, k, v), plain(q, k, v, dropout=0.3)
    seen = whole > 0
    # of 33,280, 8 standard deviations
    assert (some[seen] == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    left = seen & (some != 0)
    assert torch.allclose(some[left], whole[left] / 0.7, rtol=1e-6)
    assert torch.equal(plain(q, k, v, dropout=0.0), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_drops_nothing(kind):
    training = built(of(KINDS[kind]))
    for name, p in training.model.named_parameters():
        if ".B." in name:
            nn.init.normal_(p)
    without = built(of([change for change in KINDS[kind] if change["name"] != "dropout"],
                       **{"system.attention": training.decisions.choices["attention"].used}))
    # no name is another, and nothing is missing
    without.model.load_state_dict(training.model.state_dict())
    tokens = training.batch(0).tokens
    for each in (training, without):
        each.model.eval()
    assert torch.equal(training.logits(tokens), without.logits(tokens))
    training.model.train()
    assert not torch.equal(training.logits(tokens), without.logits(tokens))


def test_settings_without_it_are_as_they_were_and_nothing_is_drawn():
    """A run of before has the same identity: the keys of its settings are hashed."""
    assert (not [key for key in flat(Config()) if "dropout" in key]
            and not [key for key in flat(of([LORA])) if "dropout" in key])
    training = built(of([LORA]))
    batch, before = training.batch(0), torch.get_rng_state()
    training.forward_backward(batch)
    assert (torch.equal(before, torch.get_rng_state())
            and not any(isinstance(module, nn.Dropout) for module in training.model.modules()))


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    config = of(KINDS["all"], steps=6, checkpoint_every=2)
    whole, parts = lpkit.train(config, out=tmp_path / "whole"), in_parts(config, tmp_path / "parts",
        3)
    assert [line["loss"] for line in whole.metrics] == [line["loss"] for line in parts.metrics]
    want, got = (load_latest(run.checkpoints)[0].tensors for run in (whole, parts))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    assert torch.isfinite(trained(whole).logits(torch.zeros(1, 4, dtype=torch.long))).all()
    assert len(lpkit.sample(whole, prompt="a", tokens=4, temperature=0)) > 1


@pytest.mark.parametrize("kind, recipe",
                         [("all", "bf16"), ("gpt2", "fp8-tensorwise")])
def test_recomputed_blocks_have_the_same_gradients(kind, recipe):
    """Bit for bit: the masks of the second time are those of the first."""
    by_technique = {}
    for how in ("none", "block", "core-attention", "selective"):
        training = built(of(KINDS[kind], **{"memory.recompute": how, "precision.recipe": recipe,
            "grad_accum_steps": 2}))
        torch.manual_seed(5)
        by_technique[how] = gradients(training)
    for how, theirs_ in by_technique.items():
        assert all(torch.equal(theirs_[name], g) for name, g in by_technique["none"].items()), how


def test_each_micro_batch_and_each_update_has_masks_of_its_own(monkeypatch):
    masks, real = [], torch.nn.functional.dropout

    def dropout(x, p=0.5, training=True, inplace=False):
        masks.append(real(torch.ones_like(x), p, training).detach())
        return real(x, p, training, inplace)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    training = built(of([{"name": "dropout", "residual": 0.2}], grad_accum_steps=2))
    for step in range(2):
        training.update(step)
    # that of embeddings drops nothing
    assert len(masks) == 2 * 2 * 5 and {tuple(mask.shape) for mask in masks} == {(1, 32, 48)}
    drawn = [mask for mask in masks if (mask == 0).any()]
    assert len(drawn) == 2 * 2 * 4 and all(not torch.equal(a, b) for i, a in enumerate(drawn)
        for b in drawn[:i])


@pytest.mark.parametrize("kind, changes",
                         [("gpt2", {"precision.recipe": "bf16"}),
                          ("gpt2", {"memory.recompute": "core-attention"}), ("residual", {}),
                          ("lora", {"precision.recipe": "bf16"}),
                          ("all", {"memory.recompute": "block"})], ids=str)
def test_the_peak_is_within_two_hundredths_of_the_trace(kind, changes):
    """Attention is named, so that no machine chooses another; what drops probabilities is plain."""
    attention = "plain" if any(change.get("attention") for change in KINDS[kind]) else "sdpa"
    config = of(KINDS[kind],
                SMALL.replace({"model.width": 96, "model.context": 128, "model.layers": 4,
                               "global_batch": 4, **changes}),
                **{"system.attention": attention})
    formula, trace = memory(config, _cpu()).peak_bytes, lpkit.predict_trace(config).peak_bytes
    assert formula == pytest.approx(trace, rel=0.02)
    without = config.replace({"model.changes": [change for change in KINDS[kind]
        if change["name"] != "dropout"]})
    assert (memory(without, _cpu()).peak_bytes < formula
            and training_flops(without.model) == training_flops(config.model))


@pytest.mark.parametrize("kind", ["gpt2", "residual"])
def test_what_is_kept_is_what_autograd_keeps_to_the_byte(kind):
    config = of(KINDS[kind])
    model, x = build.initial_model(config, "plain").train(), torch.zeros(3, 32, dtype=torch.long)
    traced = saved_bytes(model, lambda: cross_entropy(model(x), x)).operations
    formula = kept(config.model, batch=3, attention="plain").operations
    of_loss = traced.pop("loss"), formula.pop("loss")        # here tokens are targets, too
    assert sum(traced.values()) == sum(formula.values()) and all(of_loss)
    assert (traced["attention.dropout"] == formula["attention.dropout"] == traced["mlp.dropout"]
            == 2 * 3 * 32 * 48 * 4)


@pytest.mark.parametrize("changes, more, message", [
    ([{"name": "dropout"}], {}, "drops nothing; set embedding, residual, attention or adapters"),
    ([{"name": "dropout", "residual": 1.0}], {}, "residual must be 0 or more and below 1, got 1.0"),
    ([GPT2, LORA], {}, "model.changes=dropout comes last, behind LoRA and quantised-base alone"),
    ([{"name": "prompt"}, GPT2], {"model.position": "rope"}, "model.changes=prompt cannot"),
    ([{"name": "dropout", "adapters": 0.1}], {}, "has adapters=0.1 and no LoRA; name lora, rslora "
                                                 "or pissa before it"),
    ([GPT2], {"model.attention": "linear"}, "needs probabilities, and model.attention=linear has "
                                            "none"),
    ([GPT2], {"system.attention": "sdpa"}, "system.attention=sdpa drops no probabilities of "
                                           "attention; plain can"),
    ([GPT2], {"system.compile": True}, "model.changes=dropout draws masks outside of compiled code "
                                       "and CUDA graphs; set system.compile=false"),
    ([GPT2], {"memory.activation_offload": "int8"}, "keeps the masks of one whole device so far; "
                                                    "leave out parallel, governors and "
                                                    "memory.activation_offload"),
    ([GPT2], {"parallel.data": 2}, "draws and keeps the masks of one whole device so far"),
    ([GPT2], {"model.block": "sas"}, "drops what comes of attention.out and mlp.down and "
                                     "attention, and model.block=sas has no attention.out"),
])
def test_what_is_not_proved_is_refused(changes, more, message):
    with pytest.raises(ConfigError, match=message):
        build.decide(of(changes, **more))


@pytest.mark.parametrize("more", [{}, {"precision.recipe": "bf16", "model.context": 64}], ids=str)
def test_auto_takes_the_attention_that_drops(more):
    used = build.decide(of([GPT2], **more)).choices["attention"]
    assert used.used == "plain" and "drops attention probabilities" in used.why


def test_on_the_command_line():
    config = TINY.replace({"model.changes": "lora:rank=4,dropout:adapters=0.05:residual=0.1"})
    assert config.model.changes[1].adapters == 0.05 and Config.from_yaml(config.to_yaml()) == config
