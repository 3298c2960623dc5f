"""Models of other libraries in low precision, predicted and measured: compared with the kit's own
Linear, PyTorch's counters, and real steps.

Only these tests catch: a converted module that computes, saves or advances its history
differently from the kit's Linear, a weight matrix that no report names, a predicted byte or FLOP
that no step has, a model that stays changed, and a trainer, wrapper or adapter of another
library with which `watch` or a recipe does not work.
"""

import copy
import html
import pickle
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lessons.rows.optimizers  # noqa: F401  ten rules more
import lpkit
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure.tracking import Tracker
from lpkit.modules.convert import CONVERTED, KEPT, LEFT, Converted, output_heads
from lpkit.modules.predict import CLOSE
from lpkit.modules.step import blocks_of, loss_of
from lpkit.precision.backends import BACKENDS
from lpkit.precision.linear import ScaledLinear
from lpkit.presets import preset
from lpkit.techniques.recipes import RECIPES, resolve
from lpkit.training.build import initial_model
from tests.modules.others_models import HEAD_OF, MODELS, VOCAB, WIDTH, batch_of, loss_for, model_of

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
CASTING = [name for name, row in RECIPES.items() if row.products]


def grads(layer, x, times=1):
    """Return y, dx and dw of each of `times` micro-batches."""
    tensors = []
    for i in range(times):
        x_i = (x * (i + 1)).requires_grad_()
        y = layer(x_i)
        y.square().sum().backward()
        tensors += [y.detach(), x_i.grad, layer.weight.grad.clone()]
    return tensors


def losses_of(model, batch, optimizer, updates, *, mixed=False, loss=loss_of, micro_batches=1):
    """A training loop as in other libraries. Returns the losses."""
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                value = loss(model, batch)
            value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("name", CASTING)
def test_a_converted_linear_is_the_kits_linear_bit_by_bit_over_micro_batches(name):
    torch.manual_seed(0)
    layer, x = nn.Linear(128, 256), torch.randn(128, 128)
    other = ScaledLinear.wrap(copy.deepcopy(layer), RECIPES[name], BACKENDS["emulated"], name="0",
                              seed=3)
    model = nn.Sequential(layer, nn.Identity())
    # nvfp4 keeps the last block in high precision, and this model has only one block
    lpkit.convert(model, resolve(name, high_precision_layers=("head",)), seed=3)
    ours = grads(layer, x, 3)
    theirs = []
    for i in range(3):
        x_i = (x * (i + 1)).requires_grad_()
        y = other(x_i)
        y.square().sum().backward()
        other.advance()
        theirs += [y.detach(), x_i.grad, other.weight.grad.clone()]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    # the history that a checkpoint after the last backward pass contains
    state = model.state_dict()
    for key, value in other.state_dict().items():
        assert torch.equal(state[f"0.{key}"], value), key


@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4"])
def test_a_forward_that_runs_again_in_backward_moves_nothing_on(name):
    def run(again):
        model = model_of("nano")
        lpkit.convert(model, name, pad=True)
        x, gradients = batch_of("nano")[0], []
        for _ in range(3):
            h = model.wte(x)
            for block in model.h:
                h = checkpoint(block, h, use_reentrant=False) if again else block(h)
            loss = h.square().mean()
            loss.backward()
            gradients.append(loss.detach())
        return gradients + [p.grad for p in model.h.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))


def test_transposed_weights_are_multiplied_as_a_linear_multiplies_them():
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    theirs, linear, x = Conv1D(96, 64), nn.Linear(64, 96), torch.randn(32, 64)
    linear.weight.data, linear.bias.data = theirs.weight.data.T.clone(), theirs.bias.data.clone()
    for layer in (theirs, linear):
        lpkit.convert(nn.Sequential(layer), "mxfp8")
    ours, other = grads(theirs, x), grads(linear, x)
    assert (torch.equal(ours[0], other[0]) and torch.equal(ours[1], other[1])
            and torch.equal(ours[2], other[2].T))
    assert isinstance(theirs, Conv1D) and not isinstance(theirs, nn.Linear)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit", "nano", "encoder", "mlp"])
def test_the_report_names_every_matrix_and_the_head_is_kept(name):
    model = model_of(name)
    owners = {id(module) for module in model.modules()
              if any(p.ndim > 1 for p in module.parameters(recurse=False))}
    names = {name for name, module in model.named_modules() if id(module) in owners}
    before = {id(module): type(module) for module in model.modules()}
    weights = [p.clone() for p in model.parameters()]
    report = lpkit.convert(model, "mxfp8")
    assert names == {row.name for row in report.rows}
    head = HEAD_OF.get(name, "lm_head")
    assert ({name for name, module in model.named_modules() if module in output_heads(model)}
            == {head} - {None})
    assert head is None or report[head].status == KEPT
    for row in report.rows:
        assert (row.status == CONVERTED) == isinstance(model.get_submodule(row.name), Converted)
        assert row.status == CONVERTED or row.why
    assert str(report) and "mxfp8" in report._repr_html_() and report.to_dict()["rows"]
    lpkit.unconvert(model)
    assert before == {id(module): type(module) for module in model.modules()}
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    assert not [key for key in model.state_dict() if "amax" in key or "nonfinite" in key]


@pytest.mark.parametrize("name", ["gpt2", "vit", "nano"])
def test_a_converted_model_trains_and_its_states_go_round(name, tmp_path):
    model, batch = model_of(name), batch_of(name)
    report = lpkit.convert(model, "fp8-tensorwise")
    losses = losses_of(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3), 6, mixed=True)
    assert losses[-1] < losses[0] - 0.1 and report.named(CONVERTED)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = model_of(name, seed=1)
    lpkit.convert(again, "fp8-tensorwise")
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    with torch.no_grad():
        assert torch.equal(loss_of_grad(again.eval(), batch), loss_of_grad(model.eval(), batch))
    assert torch.equal(loss_of_grad(copy.deepcopy(model), batch), loss_of_grad(model, batch))


def loss_of_grad(model, batch):
    with torch.enable_grad():
        return loss_of(model, batch).detach()


def test_what_cannot_be_converted_is_said_and_the_model_stays():
    model = model_of("llama")
    for message, call in {
        "did you mean 'mxfp8'": lambda: lpkit.convert(model, "mxpf8"),
        r"keep='lm_haed' matches no Linear of this model; did you mean": lambda:
        lpkit.convert(model, "mxfp8", keep=("lm_haed",)),
        "casts no operand": lambda: lpkit.convert(model, "bf16"),
        "scaled_mm cannot run mxfp8": lambda: lpkit.convert(model, "mxfp8", backend="scaled_mm"),
        "no module of this model can be converted": lambda:
        lpkit.convert(nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8)), "mxfp8"),
        "on the meta device": lambda: lpkit.convert(nn.Linear(32, 32, device="meta"), "mxfp8"),
    }.items():
        with pytest.raises(ConfigError, match=message):
            call()
    assert not any(isinstance(module, Converted) for module in model.modules())
    lpkit.convert(model, "mxfp8", keep=("model.layers.0", "*.down_proj"))
    assert not any(isinstance(module, Converted) for module in model.model.layers[0].modules())
    assert (not isinstance(model.model.layers[1].mlp.down_proj, Converted)
            and isinstance(model.model.layers[1].mlp.up_proj, Converted))
    with pytest.raises(ConfigError, match="converted already, to mxfp8"):
        lpkit.convert(model, "int8")


def test_layers_that_do_not_tile_are_named_or_padded():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 64))

    report = lpkit.convert(nn.Sequential(*model(), nn.Linear(64, 64)), "mxfp8")
    assert ([row.status for row in report.rows] == [LEFT, LEFT, CONVERTED]
            and "40 output features do not tile by 32" in report["0"].why)
    padded = model()
    lpkit.convert(padded, "mxfp8", pad=True)
    y = padded(torch.randn(17, 64))
    assert y.shape == (17, 64) and isinstance(padded[0], Converted)


# ---- predictions

@cache
def predicted(name, **how):
    return lpkit.predict(model_of(name), batch_of(name), loss=loss_for(name), **how)


def real_step(name, *, recipe=None):
    """Return the footprint of a second update in a training loop."""
    model = model_of(name)
    if recipe:
        lpkit.convert(model, recipe)
    return real_update(model, batch_of(name), loss_for(name) or loss_of, mixed=recipe is not None)


def real_update(model, batch, loss, mixed=False):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    heads = [key for key, module in model.named_modules() if module in output_heads(model)]

    def update():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            value = loss(model, batch)
        value.backward()
        optimizer.step()

    update()
    with Tracker(model, optimizer, heads=heads) as tracker:
        tracker.hold(torch.utils._pytree.tree_leaves(batch), "batch")
        update()
    return tracker.footprint()


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"mamba"}))
def test_the_bytes_are_those_of_a_real_step(name):
    """Both count every storage, so a difference of one byte is an error. The mask of dropout has
    one byte per number in both."""
    ours, real = predicted(name).footprint, real_step(name)
    assert ours.rows == real.rows and ours.operations == real.operations


def test_the_bytes_of_emulated_casts_are_those_of_a_real_step():
    # an A100 has no FP8 matmuls, so the casts are emulated
    ours = predicted("gpt2", machine="a100-80", precision="fp8-delayed").footprint
    assert ours.rows == real_step("gpt2", recipe="fp8-delayed").rows


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "encoder", "mlp"])
def test_flops_are_those_of_pytorchs_counter(name):
    model = model_of(name)
    # PyTorch's counter does not know the flash kernel of the CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        (loss_for(name) or loss_of)(model, batch_of(name))
    assert predicted(name).forward_flops == counter.get_total_flops()


def moved(model, x, loss, **how):
    """Bytes that a forward pass reads and writes in all operations except matmuls."""
    work = lpkit.predict(model, x, loss=loss, **how).work
    return work.outside_bytes + work.blocks * work.moved_bytes


def test_bytes_that_move_are_those_that_kernels_read_and_write():
    """Views move nothing, and a look-up reads the numbers that it returns. 64 rows of 1,000
    logits in float32 are 256 kB."""
    x, y = torch.randn(2, 32, 8), torch.randint(1000, (64,))
    few = 4_000     # targets, their losses, and the gradient of a scalar
    # its matmul is 2-dimensional, and its result is viewed as 3-dimensional
    logits, of_three_axes = 4 * 64 * 1000, nn.Linear(8, 1000, bias=False)
    assert moved(of_three_axes, x, lambda m, b: m(b).sum()) == pytest.approx(logits, abs=few)
    assert (moved(of_three_axes, x, lambda m, b: F.cross_entropy(m(b).flatten(0, 1), y))
            == pytest.approx(2 * logits, abs=few))
    assert (moved(of_three_axes, x, lambda m, b: m(b).flatten(0, 1).gather(1, y[:, None]).mean())
            < few)
    # in place: the same storage is read and written
    assert moved(of_three_axes, x, lambda m, b: m(b).add_(1).sum()) == pytest.approx(3 * logits,
        abs=few)


def test_rmsnorm_of_pytorch_is_one_kernel_on_a_gpu():
    """RMSNorm moves the bytes of a LayerNorm without bias, except for one mean per row; on a
    CPU, it is several operations."""
    def footprint(norm, machine):
        model = nn.Sequential(nn.Linear(256, 256, bias=False), norm)
        how = {"loss": lambda m, b: m(b).square().mean(), "machine": machine}
        return lpkit.predict(model, torch.randn(512, 256), **how).peak_bytes, moved(model,
            torch.randn(512, 256), how.pop("loss"), **how)

    from lpkit import hardware
    layer = nn.LayerNorm(256, bias=False)
    assert footprint(nn.RMSNorm(256), "h100") == footprint(layer, "h100") == footprint(layer,
        hardware.machine())
    peak, bytes_moved = footprint(nn.RMSNorm(256), hardware.machine())
    assert peak >= footprint(layer, "h100")[0] and bytes_moved > 2 * footprint(layer, "h100")[1]


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_one_question_through_either_door_has_one_answer(precision):
    config = preset("cpu-3m").replace({"system.device": "cpu", "system.attention": "sdpa",
        "global_batch": 4, "grad_accum_steps": 1})
    ids = torch.randint(config.model.V, (4, config.model.T))

    def loss(model, batch):
        return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())

    ours = lpkit.predict(initial_model(config, "sdpa"), ids, machine="b200",
                         precision=precision, loss=loss,
                         stack="compiled")
    theirs = lpkit.predict(config.replace({"system.stack": "compiled"}), "b200",
                           precision=precision)
    assert isinstance(config, Config) and ours.parameters == theirs.parameters
    assert 3 * ours.forward_flops == theirs.flops_per_token * ids.numel()
    # bytes of pointwise operations are counted, or computed by a formula; so are operations of the
    # host
    device = [sum(row.seconds for row in each.step.rows if row.name != "host")
              for each in (ours, theirs)]
    assert device[0] == pytest.approx(device[1], rel=0.03)
    host = [each.step["host"].seconds + each.step["host"].hidden_seconds
            for each in (ours, theirs)]
    assert host[0] == pytest.approx(host[1], rel=0.35)
    assert ours.peak_bytes == pytest.approx(theirs.memory.peak_bytes, rel=0.02)
    rows = {row.name: row.seconds for row in theirs.step.rows}
    for row in ours.step.rows:     # both price matmuls by the same function
        if row.name.startswith(("attention.", "mlp.", "head", "weight copies")):
            assert row.seconds == pytest.approx(rows[row.name], rel=1e-12), row.name


def test_ranks_hold_what_the_trace_of_a_config_holds():
    config = preset("cpu-3m").replace({"system.device": "cpu", "system.attention": "plain",
        "precision.recipe": "bf16", "global_batch": 32,
                                       "grad_accum_steps": 1})
    ids = torch.randint(config.model.V, (4, config.model.T))
    ours = lpkit.predict(initial_model(config, "plain"), ids, devices=8, precision="bf16",
                         loss=lambda m, b: F.cross_entropy(m(b).flatten(0, 1).float(),
                             b.flatten())).footprint
    theirs = lpkit.predict_trace(config, 8)
    # the kit's batch is ids and targets, the batch of transformers only ids
    assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, rel=1e-3)


def test_a_model_without_values_is_predicted_as_one_with_them():
    with torch.device("meta"):
        model = MODELS["llama"]()
    ours = lpkit.predict(model, batch_of("llama"), devices=4, precision="fp8-rowwise")
    assert ours.footprint.rows == lpkit.predict(model_of("llama"), batch_of("llama"), devices=4,
        precision="fp8-rowwise").footprint.rows
    assert (next(model.parameters()).is_meta and "parameters" in str(ours)
            and ours.to_dict()["peak_bytes"] == ours.peak_bytes)
    low, high = ours.step.seconds_range
    assert low < ours.step_seconds < high


def test_the_model_is_left_as_it_was():
    model = model_of("gpt2").eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    types = [type(module) for module in model.modules()]
    lpkit.predict(model, batch_of("gpt2"), precision="fp8-delayed", devices=2,
                  optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert types == [type(module) for module in model.modules()] and not model.training
    assert (all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            and all(p.grad is None for p in model.parameters()))


@pytest.mark.parametrize("kind", ["SGD", "NAdam", "Adafactor"])
def test_an_optimizer_of_the_model_is_made_again_with_its_groups(kind):
    model, batch = model_of("nano"), batch_of("nano")
    optimizer = getattr(torch.optim, kind)([{"params": list(model.h.parameters()), "lr": 1e-4},
        {"params": [model.wte.weight], "weight_decay": 0.0}])
    ours = lpkit.predict(model, batch, optimizer=optimizer, machine="a100-80").footprint
    real = model_of("nano")
    other = getattr(torch.optim, kind)([{"params": list(real.h.parameters()), "lr": 1e-4},
        {"params": [real.wte.weight], "weight_decay": 0.0}],
                                       **{"foreach": True} if kind != "Adafactor" else {})
    for _ in range(2):
        other.zero_grad()
        loss_of(real, batch).backward()
        other.step()
    states = sum(t.nbytes for state in other.state.values() for t in state.values()
                 if isinstance(t, torch.Tensor))
    assert ours.most["optimizer state"] == states if states else "optimizer state" not in ours.most


def test_frozen_weights_have_no_gradients_and_no_states():
    model, whole = model_of("llama"), predicted("llama")
    for p in model.model.parameters():
        p.requires_grad_(False)
    ours = lpkit.predict(model, batch_of("llama"))
    assert ours.trained_parameters == model.lm_head.weight.numel()
    assert (ours.footprint.rows["optimizer state"] == 8 * ours.trained_parameters + 4
            and whole.peak_bytes > ours.peak_bytes)
    assert ours.step["optimizer"].seconds < whole.step["optimizer"].seconds


def test_predictions_that_cannot_be_are_refused_in_a_sentence():
    model, batch = model_of("llama"), batch_of("llama")
    changed = model_of("llama")
    lpkit.convert(changed, "mxfp8")
    for message, call in {
        "is converted already; call lpkit.unconvert": lambda: lpkit.predict(changed, batch),
        "did you mean 'eager'": lambda: lpkit.predict(model, batch, stack="eagre"),
        "needs a scalar loss": lambda: lpkit.predict(model, {"input_ids": batch["input_ids"]}),
        "the model raised ValueError on this batch": lambda: lpkit.predict(model,
            {"labels": batch["labels"]}),
        "the model raised TypeError on this batch": lambda: lpkit.predict(model_of("nano"),
            {"pixels": 1}),
        "a size depends on values": lambda: lpkit.predict(model_of("mlp"), batch_of("mlp"),
            loss=lambda m, x: m(x[torch.nonzero(x[:, 0] > 0)]).sum()),
        "must be a multiple": lambda: lpkit.predict(model, batch, devices=6, shard=4),
        "there is no machine 'h2000'": lambda: lpkit.predict(model, batch, machine="h2000"),
        "precision must be one of|did you mean 'mxfp8'": lambda: lpkit.predict(model, batch,
            precision="mxpf8"),
        "there is no optimizer 'adamv'": lambda: lpkit.predict(model, batch, optimizer="adamv"),
        "every parameter of the model is frozen": lambda:
        lpkit.predict(model_of("nano").requires_grad_(False), batch_of("nano")),
        "a parameter that the model does not have": lambda: lpkit.predict(model, batch,
            optimizer=torch.optim.SGD(model_of("llama").parameters(), lr=1)),
    }.items():
        with pytest.raises(ConfigError, match=message):
            call()


def test_convolutions_norms_and_blocks_that_run_again_are_counted_to_the_byte():
    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
                                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))

        def forward(self, x, y):
            return {"loss": F.cross_entropy(self.body(x), y)}

    def checkpointed():
        model = model_of("llama")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    image = (torch.randn(8, 3, 32, 32), torch.arange(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)     # a new name of transformers itself
        for make, batch in ((Convolutions, image), (checkpointed, batch_of("llama")),
                            (lambda: model_of("llama").bfloat16(), batch_of("llama"))):
            ours, model = lpkit.predict(make(), batch), make()
            assert ours.footprint.rows == real_update(model.train(), batch, loss_of).rows
    assert ours.precision == "as the model is" and ours.step.dtype == "bf16"


def test_an_init_that_draws_until_values_fit_ends_in_a_trace():
    def loss(model, batch):
        nn.init.trunc_normal_(torch.empty_like(batch), std=0.02)
        while (model(batch).detach() > 1e9).any():
            pass
        return model(batch).square().mean()

    assert lpkit.predict(model_of("mlp"), batch_of("mlp"), loss=loss).peak_bytes


def test_advice_weighs_recipes_by_the_predictions_of_each():
    ours = lpkit.advise(model_of("llama"), batch_of("llama"), machine="h100",
                        recipes=["fp8-tensorwise", "mxfp8"])
    assert "fp8-tensorwise" in str(ours) and str(ours).startswith(ours.sentence)
    assert (ours.choice == "bf16" and ours["mxfp8"].status == "emulated"
            and ours["fp8-tensorwise"].status == "native")
    plain, cast = (predicted("llama", machine="h100", precision=name)
                   for name in ("bf16", "fp8-tensorwise"))
    assert ours["fp8-tensorwise"].speedup == plain.step_seconds / cast.step_seconds
    with torch.device("meta"):
        wide = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(4)])
    compiled = lpkit.predict(torch.compile(model_of("mlp")), batch_of("mlp"), loss=loss_for("mlp"))
    assert (compiled.step.stack == "compiled" and predicted("mlp").step.stack == "eager"
            and compiled.peak_bytes == predicted("mlp").peak_bytes)
    big = lpkit.advise(wide, torch.empty(32768, 8192, device="meta"), machine="h100",
                       loss=lambda m, x: m(x).mean(), recipes=["fp8-tensorwise"])
    assert big.choice == "fp8-tensorwise" and big["fp8-tensorwise"].speedup > 1.2


# ---- measured steps

def watched(name, updates=6, recipe="fp8-delayed", micro_batches=1, **how):
    model, batch, loss = model_of(name), batch_of(name), loss_for(name) or loss_of
    if recipe:
        lpkit.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with lpkit.watch(model, optimizer, **how) as seen:
        losses = losses_of(model, batch, optimizer, updates, mixed=recipe is not None, loss=loss,
                           micro_batches=micro_batches)
    return seen, losses, model, optimizer


def test_what_is_watched_is_what_was_predicted_and_changes_nothing():
    seen, losses, model, optimizer = watched("llama", telemetry_every=3)
    assert seen.updates == 6 and seen.peak_bytes == predicted("llama", machine="a100-80",
        precision="fp8-delayed").peak_bytes
    # all updates, except the first, the tracked update, and those with telemetry
    assert len(seen.seconds) == 3 and seen.step_seconds > 0
    assert {sample.step for sample in seen.samples} == {1, 4} and not seen.uncalled
    assert {sample.layer for sample in seen.samples} > {"model.layers.0.mlp.up_proj", "lm_head"}
    rows = list(seen.reconcile(predicted("llama", machine="a100-80", precision="fp8-delayed")))
    assert ({"peak", "batch"} < {row.name for row in rows}
            and all(row.measured == row.formula for row in rows) and "6 updates" in str(seen))
    model_alone, batch = model_of("llama"), batch_of("llama")
    lpkit.convert(model_alone, "fp8-delayed")
    other = torch.optim.AdamW(model_alone.parameters(), foreach=True)
    assert losses_of(model_alone, batch, other, 6, mixed=True) == losses
    assert not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_micro_batches_are_parts_of_one_update():
    seen, _, _, _ = watched("mlp", recipe=None, micro_batches=2)
    assert seen.updates == 6 and len(seen.seconds) == 4


def test_weights_that_something_else_multiplies_are_named():
    class Bypass(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            return F.linear(self.used(x), self.unused.weight).square().mean()

    model = Bypass()
    lpkit.convert(model, "mxfp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lpkit.watch(model, optimizer) as seen:
        for _ in range(3):
            model(torch.randn(32, 32)).backward()
            optimizer.step()
    assert seen.uncalled == ["unused"] and "NOT CALLED" in str(seen)


def test_bad_watches_are_refused():
    model = model_of("mlp")
    with pytest.raises(ConfigError, match="needs the optimizer"):
        lpkit.watch(model, "adamw")
    with pytest.raises(ConfigError, match="frozen"):
        lpkit.watch(model_of("mlp").requires_grad_(False),
                    torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(ConfigError, match="matches no Linear"):
        lpkit.watch(model, torch.optim.SGD(model.parameters(), lr=1), telemetry_every=1,
                    layers=("nothing",))
    with lpkit.watch(model, torch.optim.SGD(model.parameters(), lr=1)) as seen, pytest.raises(
            ConfigError, match="0 have ended"):
        seen.reconcile(predicted("mlp"))


def test_the_examples_of_the_page_run(tmp_path, capsys, monkeypatch):
    """Run all examples of docs/your_model.md in order. The test provides the arguments and texts
    of trainers."""
    import transformers

    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "your_model.md").read_text()
    lines = [line[4:] for line in page.splitlines() if line.startswith("    ")]
    ids = torch.randint(256, (12, 32))
    names = {"rows": [{"input_ids": row, "labels": row} for row in ids],
             "arguments": transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True,
        logging_strategy="no", save_strategy="no",
        dataloader_pin_memory=False)}
    exec("\n".join(lines), names)
    report, printed = names["report"], capsys.readouterr().out
    assert (len(lines) > 30 and report["lm_head"].status == KEPT
            and len(report.named(CONVERTED)) == 14)
    assert (names["seen"].updates == 12 and not names["seen"].uncalled
            and names["watching"].seen.updates == 3)
    assert (names["own"].fits and names["shared"].peak_bytes < names["predicted"].peak_bytes
            and "fp8-rowwise" in printed)
    assert (tmp_path / "card.svg").is_file() and (tmp_path / "card.json").stat().st_size < 2000
    assert names["advice"].choice == "bf16" and names["worst"].layer.endswith("mlp.down_proj")


def test_pytorchs_fast_path_of_encoders_does_not_pass_by_the_recipe():
    """In evaluation without gradients, nn.TransformerEncoderLayer reads the weights of its
    Linears and does not call them."""
    model, x = model_of("encoder").eval(), batch_of("encoder")
    with torch.no_grad():
        plain = model(x)
    lpkit.convert(model, "int8")
    with torch.no_grad():
        assert (torch.equal(model(x), model(x.clone().requires_grad_()))
                and not torch.equal(model(x), plain))
        lpkit.unconvert(model)
        assert torch.equal(model(x), plain)


# ---- together with other libraries

@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_of_peft_stand_on_a_converted_model():
    peft = pytest.importorskip("peft")
    model, batch = model_of("llama"), batch_of("llama")
    lpkit.convert(model, "fp8-delayed")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = losses_of(model, batch, optimizer, 8)
    assert losses[-1] < losses[0]
    history = next(value for key, value in model.state_dict().items() if "layers.1" in key
                   and key.endswith("q_proj.base_layer.amax_history"))
    # x and g of each of eight micro-batches
    assert (history[0, 1:] > 0).sum() == 8 and (history[2, 1:] > 0).sum() == 8


def test_transformers_saves_and_loads_a_converted_model(tmp_path):
    import transformers

    model, batch = model_of("llama"), batch_of("llama")
    lpkit.convert(model, "mxfp8")
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    lpkit.convert(again, "mxfp8")
    assert torch.equal(loss_of_grad(again.eval(), batch), loss_of_grad(model.eval(), batch))
    assert VOCAB and WIDTH


def test_the_trainer_of_transformers_is_watched_by_a_callback(tmp_path):
    import transformers

    from lpkit.modules import callbacks

    ids = batch_of("llama")["input_ids"]
    rows = [{"input_ids": row, "labels": row} for row in ids.repeat(6, 1)]
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path),
        per_device_train_batch_size=4, max_steps=6, use_cpu=True, report_to=[],
                                               disable_tqdm=True, logging_strategy="no",
        save_strategy="no", bf16=True, dataloader_pin_memory=False)
    model = model_of("llama")
    lpkit.convert(model, "fp8-delayed")
    watching = callbacks.transformers(telemetry_every=5)
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[watching]).train()
    assert (watching.seen.updates == 6 and not watching.seen.uncalled
            and {sample.step for sample in watching.seen.samples} == {1, 6})
    # the trainer clips gradients, and its batch contains a mask of ones
    ours = lpkit.predict(model_of("llama"), batch_of("llama"), machine="a100-80",
                         precision="fp8-delayed")
    assert watching.seen.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.02)


def test_an_optimizer_of_accelerate_is_watched_through_its_wrapper():
    accelerate = pytest.importorskip("accelerate")
    model, batch = model_of("nano"), batch_of("nano")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with lpkit.watch(model, optimizer) as seen:
        for _ in range(4):
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
    assert seen.updates == 4 and seen.peak_bytes


@pytest.mark.slow
def test_a_compiled_model_moves_its_histories_on_as_an_eager_one():
    def run(compiled):
        model, (x, y) = model_of("nano"), batch_of("nano")
        lpkit.convert(model, "fp8-delayed")
        call = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            loss = call(x, y)[0]
            loss.backward()
            optimizer.step()
        return loss.item(), {key: value for key, value in model.state_dict().items()
                             if key.endswith("amax_history")}

    (loss, eager), (other, compiled) = run(False), run(True)
    assert loss == pytest.approx(other, abs=1e-4)
    for key, history in eager.items():
        assert torch.equal(history > 0, compiled[key] > 0) and (history[0, 1:] > 0).sum() == 4
        torch.testing.assert_close(history, compiled[key], rtol=0.01, atol=0)


RANK = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import lpkit
from lpkit.modules.step import loss_of
from tests.modules.others_models import batch_of, model_of
rank, world = int(sys.argv[3]), 2
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
for way in ("fsdp", "ddp"):
    model, batch = model_of("llama"), batch_of("llama", sequences=8)
    lpkit.convert(model, "fp8-rowwise")
    batch = {key: value.chunk(world)[rank] for key, value in batch.items()}
    if way == "fsdp":
        for block in (*model.model.layers, model):
            fully_shard(block, mesh=mesh)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    print(loss.item() / world)
"""


@pytest.mark.dist
def test_two_ranks_of_a_converted_model_train_as_one_process(tmp_path):
    """Sharded by fully_shard, and replicated."""
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(ROOT), str(tmp_path / "store"),
                               str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    model = model_of("llama")
    lpkit.convert(model, "fp8-rowwise")
    *_, alone = losses_of(model, batch_of("llama", sequences=8),
                          torch.optim.SGD(model.parameters(), lr=0.1), 4)
    for rank in ranks:
        both = [float(line) for line in rank.communicate(timeout=300)[0].split()]
        assert both == pytest.approx([alone] * 2, abs=1e-5)


def test_the_casts_of_hardware_products_are_chosen_as_a_run_chooses_them():
    """`convert` calls this on a GPU. A CPU can multiply FP8 with one scale per tensor, so the
    code runs here, too."""
    from lpkit.modules.convert import choose_kernels

    model, emulated, x = (nn.Sequential(nn.Linear(64, 64)) for _ in range(2)), None, torch.randn(64,
        64)
    model, emulated = model
    emulated.load_state_dict(model.state_dict())
    lpkit.convert(model, "fp8-tensorwise", backend="scaled_mm")
    lpkit.convert(emulated, "fp8-tensorwise", backend="emulated")
    used = choose_kernels(model)
    assert set(used) == {"cast-tensor"} and "cast_tensor" in vars(model[0].arithmetic)
    assert not model[0].weight.grad and not model[0].nonfinite_x.any()
    with torch.autocast("cpu", torch.bfloat16):
        for ours, other in zip(grads(model[0], x), grads(emulated[0], x)):
            torch.testing.assert_close(ours, other, rtol=2**-7,
                                       atol=2**-7 * other.abs().max().item())


def test_weights_that_are_quantised_already_are_named():
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    torchao.quantize_(model[0], torchao.Int8WeightOnlyConfig())
    report = lpkit.convert(model, "mxfp8")
    assert (report["0"].status == LEFT and "quantised already" in report["0"].why
            and report["1"].status == CONVERTED)


def test_a_module_that_is_called_twice_counts_one_micro_batch():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(32, 32)
    lpkit.convert(model, "fp8-delayed")
    for _ in range(3):
        model(model(x)).square().sum().backward()
    history = model.state_dict()["0.amax_history"]
    assert ((history > 0).sum(1) == 3).all() and history[0, 3] >= x.abs().max()


@pytest.mark.parametrize("name", ["llama", "gpt2", "nano"])
def test_a_closed_form_stands_beside_the_trace_or_a_doubt_does(name):
    """GPT-2 of transformers computes GELU in several operations and has dropout in attention,
    which the formula does not count."""
    predicted = lpkit.predict(model_of(name), batch_of(name), machine="h100")
    assert (predicted.formula_bytes is not None) == (name in {"llama", "gpt2"})
    assert bool(predicted.doubt) == (name == "gpt2") == ("trust the trace" in predicted.summary)
    held, takes = predicted._repr_html_().split("<table")[:2], predicted._repr_html_().split(
        "</table>")[1]
    assert html.escape(predicted.doubt) in held[0] and "trust the trace" not in takes
    assert (html.escape(predicted.step.spread.words) in takes and ">a step takes " in takes
            and "a step takes" not in held[0])
    if name == "llama":
        assert predicted.formula_bytes == pytest.approx(predicted.peak_bytes, rel=CLOSE)


def test_no_closed_form_for_a_part_that_trains_or_another_head():
    frozen = model_of("llama")
    frozen.model.embed_tokens.requires_grad_(False)
    assert lpkit.predict(frozen, batch_of("llama"), machine="h100").formula_bytes is None
    for rank in (1, 8):
        assert lpkit.predict(model_of("llama"), batch_of("llama"), machine="h100",
                             devices=rank).formula_bytes


@pytest.mark.parametrize("name", ["adafactor", "soap"])
def test_an_optimizer_costs_the_same_seconds_through_both_doors(name):
    config = preset("cpu-3m").replace({"system.attention": "sdpa", "global_batch": 2,
        "grad_accum_steps": 1, "optimizer.name": name,
                                       "optimizer.clip": 0})
    with torch.device("meta"):
        model = initial_model(config, "sdpa")
        ids = torch.empty(2, config.model.T, dtype=torch.int64)
    ours = lpkit.predict(model, ids, machine="h100", precision="bf16", optimizer=name,
                         loss=lambda model, batch: F.cross_entropy(model(batch).flatten(0,
                             1).float(), batch.flatten()))
    of_ours, of_config = ({row.name: row.seconds for row in step.rows
                           if row.name.startswith("optimizer")}
                          for step in (ours.step, lpkit.predict(config, "h100",
                              precision="bf16").step))
    assert of_ours == pytest.approx(of_config, rel=1e-9) and of_ours["optimizer"] > 0
    assert ("optimizer: products" in of_ours) == (name == "soap")


@pytest.mark.parametrize("optimizer", ["muon", torch.optim.Muon], ids=["the kit's", "PyTorch's"])
def test_muons_products_are_in_the_seconds(optimizer):
    """By hand, for each matrix of m rows and n columns: five steps of three matmuls with 2 m m
    n, 2 m m m and 2 m m n FLOPs (Jordan 2024)."""
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False))
    made_of = optimizer if isinstance(optimizer, str) else optimizer(model.parameters())
    predicted = lpkit.predict(model, torch.randn(8, 64), loss=lambda model, x: model(x).sum(),
                              optimizer=made_of, machine="h100")
    [row] = [row for row in predicted.step.rows if row.name == "optimizer: products"]
    assert (float(row.formula.split()[0].replace(",", "")) == 2 * 5
            * (4 * 64 * 64 * 256 + 2 * 64**3) / predicted.parameters)


def test_a_converted_model_can_be_pickled_and_copied_whole():
    """The copy also has the history of delayed scaling, with `due` set for the next micro-batch."""
    name = "gpt2"
    model, batch = model_of(name).eval(), batch_of(name)
    lpkit.convert(model, "fp8-delayed", pad=True)
    loss_of(model, batch).backward()
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    expected = loss_of(model, batch)
    for other in copies:
        assert torch.equal(loss_of(other, batch), expected)
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
        lpkit.unconvert(other)
        assert ([type(module) for module in other.modules()]
                == [type(module) for module in model_of(name).modules()])


def test_the_products_of_an_lstm_are_counted():
    """By hand: 8 H (H + D) FLOPs per token and layer. If oneDNN runs the LSTM as one kernel,
    PyTorch's counter counts none of them."""
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.reads, self.head = nn.LSTM(64, 64, 2, batch_first=True), nn.Linear(64, 64)

        def forward(self, x):
            return self.head(self.reads(x)[0]).square().mean()

    predicted = lpkit.predict(Reads(), torch.empty(16, 32, 64), machine="h100")
    assert predicted.forward_flops == 16 * 32 * (2 * 8 * 64 * (64 + 64) + 2 * 64 * 64)


def test_blocks_are_those_of_all_outer_lists():
    """The host's time covers the kernels of all blocks. A list inside a block has no blocks of
    its own."""
    def of(*lengths):
        return nn.ModuleDict(
            {f"part{i}": nn.ModuleList(nn.Sequential(nn.ModuleList([nn.Linear(8, 8)]))
                                       for _ in range(n))
                              for i, n in enumerate(lengths)})
    assert [blocks_of(of(*lengths)) for lengths in ((8,), (4, 4), ())] == [8, 8, 1]
    assert blocks_of(nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)] * 3)] * 2)) == 2


@pytest.mark.parametrize("message, wrong", [
    ("multiplies no matrices", lambda: lpkit.predict(nn.LayerNorm(8), torch.empty(2, 8),
        loss=lambda m, x: m(x).sum())),
    ("loss must be a function", lambda: lpkit.predict(nn.Linear(8, 8), torch.empty(2, 8),
        loss="mse")),
    ("keep takes names", lambda: lpkit.convert(nn.Linear(64, 64), "int8", keep=5)),
    ("updates no parameter of this model",
     lambda: lpkit.watch(nn.Linear(8, 8), torch.optim.SGD(nn.Linear(8, 8).parameters()))),
    ("there is no folder", lambda: lpkit.predict(nn.Linear(8, 8), torch.empty(2, 8),
        loss=lambda m, x: m(x).sum()).card("nodir/x.png")),
], ids=["no products", "loss", "keep", "another optimizer", "no folder"])
def test_what_a_new_user_gets_wrong_is_one_sentence(message, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        wrong()


def test_keep_may_be_names_that_are_made_one_by_one():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    assert (lpkit.convert(model, "int8", keep=(name for name in ("0", "1"))).named(KEPT)[:2]
            == ["0", "1"])


def test_a_prediction_warns_of_nothing():
    """A notebook shows warnings in red, and PyTorch has a warning for a switch of TF32 that
    nobody requested."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)), torch.randn(4, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lpkit.predict(model, x, loss=lambda model, x: model(x).sum(), machine="h200")
    assert not caught, [str(warning.message) for warning in caught]
