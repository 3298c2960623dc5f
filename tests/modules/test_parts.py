"""The kit's parts in models of other libraries: optimizers by kinds of parameters, and blocks that
store their activations differently.

Expected: a rule by class names, torch.optim, runs of the kit, and the unchanged models.

Only these tests catch: a head, table or vector that Muon updates, a group with another learning
rate or weight decay than in a run, a fused or transposed matrix that is updated as one matrix,
and blocks that return other gradients or masks, run twice, or cannot be undone.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lessons.rows.activations
import lessons.rows.disk
import lessons.rows.optimizers  # noqa: F401  ten rules more
import lpkit
from lpkit.errors import ConfigError
from lpkit.memory.saved import SavedTensorOffloader, SavedTensorRef
from lpkit.optim import AdamW, Muon, stepper
from lpkit.training.build import initial_model
from tests.modules.others_models import MODELS, batch_of, loss_for, model_of

pytest.importorskip("transformers")

# ---- optimizers

LINEARS = {"Linear": "weight", "NonDynamicallyQuantizableLinear": "weight", "Conv1D": "weight",
           "MultiheadAttention": "in_proj_weight"}
HEADS = {"gpt2": "lm_head", "bert": "cls.predictions.decoder", "vit": "classifier", "encoder": "",
         "mlp": ""}


def by_class_names(name: str, model: nn.Module) -> set[str]:
    """Return the names of the weights of Linears, found by class names only, without the head
    and tables."""
    head = HEADS.get(name, "lm_head")
    others = {id(p) for key, module in model.named_modules() if type(module).__name__ == "Embedding"
              or (head and key == head) for p in module.parameters()}
    heads = {id(getattr(module, LINEARS[type(module).__name__])) for module in model.modules()
             if type(module).__name__ in LINEARS}
    return {key for key, p in model.named_parameters() if id(p) in heads - others}


def groups_of(opt: torch.optim.Optimizer) -> dict[str, dict]:
    groups = {}
    for group in opt.param_groups:
        for key, _ in zip(group["param_names"], group["params"], strict=True):
            assert key not in groups
            groups[key] = group
    return groups


@pytest.mark.parametrize("name, converted", [*((name, False) for name in MODELS),
                                             ("gpt2", True), ("encoder", True)])
def test_no_group_of_muon_is_wrong(name, converted):
    model = model_of(name)
    want = by_class_names(name, model)
    if converted:     # it changes the classes of modules
        lpkit.convert(model, "fp8-rowwise", pad=True)
    for row, lr, others_lr in (("muon", 0.02, 1e-3), ("normuon", 1e-3, 1e-3)):
        opt = lpkit.optimizer(model, row)
        groups = groups_of(opt)
        assert sorted(groups) == sorted(key for key, _ in model.named_parameters())
        assert {key for key, group in groups.items() if group["rule"] == row} == want
        # schedulers report the learning rate of the first group
        assert opt.param_groups[0]["rule"] == row
        for key, p in model.named_parameters():
            vector = sum(n > 1 for n in p.shape) < 2
            assert (groups[key]["lr"] == (lr if key in want else others_lr)
                    and groups[key]["rule"] in (row, "adamw"))
            assert groups[key]["weight_decay"] == (0 if vector else 0.01), key


def test_rules_of_every_tensor_have_one_rule_and_no_decay_of_vectors():
    groups = groups_of(lpkit.optimizer(model_of("gpt2"), "adamw", lr=1e-4, weight_decay=0.3,
        betas=(0.8, 0.9)))
    assert ({(group["rule"], group["lr"], group["betas"]) for group in groups.values()}
            == {("adamw", 1e-4, (0.8, 0.9))})
    assert ({key for key, group in groups.items() if not group["weight_decay"]}
            == {key for key in groups if ".ln_" in key or key.endswith("bias")})
    galore = groups_of(lpkit.optimizer(model_of("vit"), "galore"))
    assert {key for key, group in galore.items() if group["rule"] == "adamw"} == {
        "vit.embeddings.position_embeddings", "vit.embeddings.patch_embeddings.projection.weight",
        "vit.embeddings.cls_token", "classifier.weight"}


def test_the_kits_own_model_has_the_groups_of_its_runs():
    config = lpkit.preset("cpu-3m")
    for row in ("muon", "normuon", "galore", "adamw", "soap"):
        config = config.replace({"optimizer": row})
        model = initial_model(config, "plain")
        ours = groups_of(lpkit.optimizer(model, row))
        theirs, names = stepper.build(dict(model.named_parameters()),
                                      config.optimizer), {p: key
                                          for key, p in model.named_parameters()}
        for group in theirs.param_groups:
            for p in group["params"]:
                own = ours[names[p]]
                rule = group["settings"].name if "settings" in group else row
                assert (own["rule"], own["lr"], own["weight_decay"]) == (rule, group["lr"],
                    group["weight_decay"]), (row, names[p])


def stepped(opt, parameters, updates=4):
    for update in range(updates):
        g = torch.Generator().manual_seed(update)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=g)
        opt.step()


@pytest.mark.parametrize("name, parts", [("mlp", 1), ("gpt2", "transposed"), ("encoder", 3)])
def test_an_update_is_that_of_pytorchs_muon_and_adamw(name, parts, monkeypatch):
    """PyTorch's optimizers get one matrix at a time: weights (in, out) transposed, and q, k and
    v separately. Muon computes in float32 here instead of bf16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    ours, theirs = model_of(name), model_of(name)
    stepped(lpkit.optimizer(ours, "muon", lr=0.03), list(ours.parameters()))
    matrices = by_class_names(name, theirs)
    for key, p in theirs.named_parameters():
        if key not in matrices:
            before, opt = p, torch.optim.AdamW([p], 0.05 * 0.03, (0.9, 0.95),
                weight_decay=0.01 * (p.ndim > 1))
            pieces, optimizers = [p], [opt]
        else:
            whole = p.detach().T.contiguous() if parts == "transposed" else p.detach().clone()
            count = 3 if "in_proj" in key else 1
            pieces = [nn.Parameter(trial.clone()) for trial in whole.chunk(count)]
            optimizers = [torch.optim.Muon([piece], 0.03, weight_decay=0.01) for piece in pieces]
        for update in range(4):
            g = torch.Generator().manual_seed(update)
            grad = next(grad for other, grad in [(k, torch.randn(q.shape, generator=g))
                for k, q in theirs.named_parameters()] if other == key)
            grad = grad.T if key in matrices and parts == "transposed" else grad
            for piece, part, opt in zip(pieces, grad.chunk(len(pieces)), optimizers):
                piece.grad = part.contiguous()
                opt.step()
        want = torch.cat([piece.detach() for piece in pieces])
        got = dict(ours.named_parameters())[key].detach()
        got = got.T if key in matrices and parts == "transposed" else got
        assert (got - want).norm() < 1e-5 * want.norm().clamp(min=1e-3), key
        before = dict(model_of(name).named_parameters())[key]
        assert not torch.equal(dict(ours.named_parameters())[key], before)


def test_a_group_of_another_rule_is_that_rules_optimizer_bit_for_bit():
    torch.manual_seed(0)
    a, b = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))
    c, d = nn.Parameter(a.detach().clone()), nn.Parameter(b.detach().clone())
    optimizer = Muon([{"params": [a]}, {"params": [b], "rule": "adamw", "weight_decay": 0.0}])
    # the rate of AdamW, not Muon's 0.02
    assert optimizer.param_groups[1]["lr"] == 1e-3 and optimizer.param_groups[1]["betas"] == (0.9,
                                                                                              0.95)
    stepped(optimizer, [a, b])
    first, second = Muon([c]), AdamW([d], weight_decay=0.0)
    for update in range(4):
        g = torch.Generator().manual_seed(update)
        c.grad, d.grad = torch.randn(c.shape, generator=g), torch.randn(d.shape, generator=g)
        first.step(), second.step()
    assert torch.equal(a, c) and torch.equal(b, d)


def test_transformers_trainer_trains_and_resumes_with_it(tmp_path):
    from transformers import Trainer, TrainingArguments

    ids = batch_of("llama", sequences=24)["input_ids"]
    data = [{"input_ids": row, "labels": row} for row in ids[:2]] * 12

    def run(folder, steps, **how):
        model = model_of("llama")
        args = TrainingArguments(output_dir=str(tmp_path / folder), max_steps=4, save_steps=2,
                                 per_device_train_batch_size=4, report_to=[], use_cpu=True,
                                 disable_tqdm=True, logging_steps=1, lr_scheduler_type="linear",
                                 seed=0, data_seed=0)
        trainer = Trainer(model=model, args=args, train_dataset=data,
                          optimizers=(lpkit.optimizer(model, "muon"), None))
        trainer.train(**how)
        return trainer, model

    whole, model = run("whole", 4)
    losses = [line["loss"] for line in whole.state.log_history if "loss" in line]
    assert len(losses) == 4 and losses[-1] < losses[0]
    _, resumed = run("again", 4, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))


def test_frozen_parameters_are_left_out_and_wrong_ones_named():
    model = model_of("llama")
    model.model.embed_tokens.requires_grad_(False)
    assert "model.embed_tokens.weight" not in groups_of(lpkit.optimizer(model, "muon"))
    frozen = model_of("mlp").requires_grad_(False)
    for message, make in ({
            "there is no optimizer 'mun'; did you mean 'muon'": lambda: lpkit.optimizer(model,
                "mun"),
            "empty parameter list": lambda: lpkit.optimizer(frozen, "muon"),
            "muon has no setting 'beta'": lambda: lpkit.optimizer(model, "muon", beta=0.9),
            "lr must be positive": lambda: lpkit.optimizer(model, "muon", lr=-1.0),
            "adamw updates tensors of float32 or float64, got torch.bfloat16 .* leave "
            ".*norm.weight out": lambda: lpkit.optimizer(
                nn.ModuleDict({"norm": nn.LayerNorm(4, bias=False, dtype=torch.bfloat16)}), "muon"),
            r"soap updates 1- and 2-D tensors .* leave vit.embeddings.cls_token out, or give it a "
            r"group with rule='adamw'": lambda: lpkit.optimizer(
                model_of("vit"), "soap"),
            "muon updates matrices .* leave transformer.h.0.ln_1.weight out": lambda:
            Muon(list(model_of("gpt2").named_parameters())[2:])}.items()):
        with pytest.raises((ConfigError, ValueError, TypeError), match=message):
            make()


@pytest.mark.parametrize("name", ["llama", "encoder"])
def test_predicted_state_is_the_optimizers(name):
    """Muon has one moment per matrix, and AdamW has two for every other parameter. The optimizer
    is given by name, and as an object."""
    model = model_of(name)
    opt = lpkit.optimizer(model, "muon")
    stepped(opt, list(model.parameters()), 1)
    held = sum(t.nbytes for state in opt.state.values() for t in state.values()
               if isinstance(t, torch.Tensor))
    for asked in ("muon", lpkit.optimizer(model, "muon")):
        assert lpkit.predict(model, batch_of(name), optimizer=asked,
                             loss=loss_for(name)).footprint.rows["optimizer state"] == held


def test_rules_of_whole_parameters_refuse_what_fully_shard_has_cut():
    """An error of the past: with 2 ranks, weights were off by 31% after 3 updates of Muon,
    without a message. With AdamW, Lion and momentum, they equal those of one process bit for
    bit."""
    model = model_of("llama")
    with pytest.raises(ConfigError,
                       match=r"muon reads whole parameters, and fully_shard cuts them; use adamw "
                             r"or lion"):
        lpkit.predict(model, batch_of("llama"), optimizer="muon", devices=2)
    assert lpkit.predict(model, batch_of("llama"), optimizer="lion", devices=2).peak_bytes > 0


# ---- activations

BLOCKS = {"gpt2": lambda m: m.transformer.h, "llama": lambda m: m.model.layers,
          "t5": lambda m: [*m.encoder.block, *m.decoder.block],
          "nano": lambda m: m.h, "encoder": lambda m: m.layers}
WAYS = [{"recompute": "block"}, {"recompute": "selective"}, {"offload": "cpu"}, {"offload": "disk"},
        {"recompute": "block", "offload": "disk"}]


def with_dropout(name: str, share: float) -> nn.Module:
    """Set dropout to a rate, in modules and in numbers that functions get as arguments."""
    model = model_of(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
        for key in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, share)
    return model


def gradients(name: str, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and all gradients. Blocks get masks and positions as keyword arguments."""
    torch.manual_seed(1)
    batch, ahead = batch_of(name), torch.ones(32, 32).triu(1).bool()
    if name == "encoder":
        padded = torch.zeros(4, 32).bool()
        padded[:, 30:] = True
        loss = (model(batch, mask=ahead, src_key_padding_mask=padded)[:, :, :8].softmax(-1)[...,
            0]).log().mean()
    else:
        loss = model(*batch)[0] if name == "nano" else model(**batch, use_cache=False,
            attention_mask=1 - torch.eye(4, 32, dtype=torch.long)).loss
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return loss.detach(), grads


@pytest.mark.parametrize("name, way", [*((name, WAYS[-1]) for name in BLOCKS),
                                       *(("gpt2", way) for way in WAYS[:-1])], ids=str)
def test_activations_come_back_bit_for_bit_and_masks_are_drawn_again(name, way, monkeypatch):
    model, calls, away, pack = with_dropout(name, 0.1), [], [], SavedTensorOffloader.pack
    want = gradients(name, model)
    # this model has no dropout
    assert torch.equal(gradients(name, with_dropout(name, 0.0))[1], want[1]) == (name == "nano")
    first = next(iter(BLOCKS[name](model)))
    first.register_forward_pre_hook(lambda *_: calls.append("block"))
    inner = next(module for module in first.modules() if type(module).__name__ in LINEARS)
    inner.register_forward_pre_hook(lambda *_: calls.append("inner"))
    monkeypatch.setattr(SavedTensorOffloader, "pack",
                        lambda *given: away.append(kept := pack(*given)) or kept)
    lpkit.keep_activations(BLOCKS[name](model), **way)
    loss, grads = gradients(name, model)
    assert torch.equal(loss, want[0]) and torch.equal(grads, want[1])
    again = "recompute" in way
    assert calls.count("block") == 1 and calls.count("inner") == 1 + again
    assert any(isinstance(ref, SavedTensorRef) for ref in away) == ("offload" in way)


@pytest.mark.parametrize("name, error, again", [("gpt2", 0.01, "none"), ("nano", 0.01, "block"),
                                                ("encoder", 0.06, "block")])
def test_gradients_from_8_bits_are_near_and_masks_stay(name, error, again):
    """docs/functions.md states the error. Additive masks contain infinities, which have no 8-bit
    value; an error of the past made gradients NaN."""
    model = with_dropout(name, 0.0)
    loss, want = gradients(name, model)
    lpkit.keep_activations(BLOCKS[name](model), recompute=again, offload="int8")
    ours, grads = gradients(name, model)
    assert torch.equal(ours, loss) and 1e-4 < (grads - want).norm() / want.norm() < error


class Drawing(nn.Module):
    def __init__(self, function: bool):
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.ones(64)), nn.Dropout(
            0.5) if not function else lambda x: F.dropout(x, 0.5)

    def forward(self, x):
        return self.drop(x * self.weight), "beside"


@pytest.mark.parametrize("offload, function, by_name", [
    ("device", False, False), ("int8", False, True), ("int8", True, False), ("int4", True, True)])
def test_a_block_that_runs_again_draws_the_masks_of_its_first_run(offload, function, by_name):
    """An error of the past: rounding an input to 8 bits drew random numbers between the stored
    state and the block's own draws, so backward had other masks."""
    torch.manual_seed(0)
    blocks = [Drawing(function), Drawing(function)]
    lpkit.keep_activations(blocks, recompute="block", offload=offload)
    x = y = torch.ones(16, 64, requires_grad=True)
    for block in blocks:
        y, beside = block(x=y) if by_name else block(y)
        assert beside == "beside"
    y.sum().backward()
    assert torch.equal(y > 0, x.grad > 0) and 0 < (y > 0).float().mean() < 1


def test_what_blocks_cannot_do_is_one_sentence_and_leaves_them():
    model, batch = model_of("llama"), batch_of("llama")
    for message, make in {
            "choose one of block, none, selective": lambda:
            lpkit.keep_activations(model.model.layers, recompute="budget"),
            "there is no memory.activation_offload 'int9'": lambda: lpkit.keep_activations(
                model.model.layers, offload="int9"),
            "needs blocks whose forward": lambda: lpkit.keep_activations([])}.items():
        with pytest.raises(ConfigError, match=message):
            make()
    assert not any("forward" in vars(module) for module in model.modules())
    lpkit.keep_activations(model.model.layers, recompute="block")
    with pytest.raises(ConfigError, match=r"`del block\.forward` undoes an earlier call"):
        lpkit.keep_activations(model.model.layers, offload="int8")
    with pytest.raises(ConfigError, match=r"fill its cache .* use_cache=False"):
        model(**batch, use_cache=True)
    with torch.no_grad():
        cached = model(**batch, use_cache=True)
    assert cached.past_key_values.get_seq_length() == 32
    twin = copy.deepcopy(model)
    # a copy of the model runs its own blocks
    assert twin.model.layers[0].forward.args[0].__self__ is twin.model.layers[0]
    for block in model.model.layers:
        del block.forward
    assert model(**batch, use_cache=True).loss.requires_grad
