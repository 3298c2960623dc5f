"""Recipes as rows and settings, and every one of them in the trainer: what it learns, what it
saves, what it refuses.

Only these tests catch: a row that is not the published one, a setting that is lost or has no
meaning, a wrong layer that stays in 16 bits, a recipe that learns or resumes otherwise, and a loss
scale that hides divergence or counts dropped updates wrongly.
"""

import json
import math

import pytest
import torch
from torch import nn

from lpkit.config import Config, flat
from lpkit.contracts import Batch
from lpkit.errors import ConfigError
from lpkit.memory import loss
from lpkit.parallel.ranks import Ranks
from lpkit.precision.backends import BACKENDS, choose
from lpkit.precision.linear import ScaledLinear, scaled_linears
from lpkit.techniques.recipes import RECIPES, kept, resolve
from lpkit.training import checkpoint
from lpkit.training.background import train
from lpkit.training.runs import RunFailedError, described
from lpkit.training.steps import LossScaler, accumulate
from lpkit.training.training import Training
from tests.training.resuming import in_parts

CPU = torch.device("cpu")


@pytest.fixture
def tiny(corpus, monkeypatch):
    """Every side is a multiple of 128, so that every recipe tiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return Config().replace({
        "model.layers": 2, "model.width": 128, "model.heads": 2, "model.mlp_width": 128,
        "model.context": 32,
        "data.source": str(corpus / "*.py"), "steps": 6, "global_batch": 4, "eval_every": 4,
        "eval_batches": 1,
        "checkpoint_every": 3, "schedule.warmup_steps": 2, "system.device": "cpu"})


def losses(run) -> list[float]:
    return [line["loss"] for line in run.metrics]


# ---- rows

def test_the_published_rows():
    """DeepSeek-V3 section 3.3; NVIDIA's NVFP4 paper, section 4; Micikevicius et al. on E5M2."""
    deepseek, nvidia, hybrid = RECIPES["fp8-blockwise"], RECIPES["nvfp4-published"], RECIPES[
        "fp8-tensorwise"]
    assert [cast.block for cast in (*deepseek.y, *deepseek.dx, *deepseek.dw)] == \
        [(1, 128), (128, 128), (1, 128), (128, 128), (1, 128), (1, 128)]
    assert {cast.format for casts in deepseek.products.values() for cast in casts} == {"e4m3fn"}
    assert [cast.rounding for cast in (*nvidia.y, *nvidia.dx, *nvidia.dw)] == \
        ["nearest-even", "nearest-even", "stochastic", "nearest-even", "stochastic", "nearest-even"]
    assert ([cast.transform for cast in (*nvidia.y, *nvidia.dx, *nvidia.dw)] == ["none"] * 4
            + ["hadamard"] * 2)
    assert nvidia.y[1] == nvidia.dx[1] and nvidia.y[1].block == (16, 16)
    assert [cast.format for cast in hybrid.y + hybrid.dx] == ["e4m3fn", "e4m3fn", "e5m2", "e4m3fn"]


def test_settings_win_over_the_row():
    row = resolve("fp8-delayed", gradient_format="e4m3fn", scale="power-of-two", history=4,
                                  history_rule="most-recent", margin=2,
                                  gradient_rounding="stochastic", high_precision_layers=("first",))
    assert ([cast.format for cast in row.dx] == ["e4m3fn", "e4m3fn"]
            and row.dx[0].rounding == "stochastic")
    assert {cast.scale for casts in row.products.values() for cast in casts} == {"power-of-two"}
    assert (row.delayed.history, row.delayed.history_rule, row.delayed.margin,
            row.high_precision_layers) == (4, "most-recent", 2, ("first",))
    assert resolve("mxfp8") == RECIPES["mxfp8"]
    assert resolve("nvfp4", transform="none", gradient_rounding="nearest-even").stochastic is False


@pytest.mark.parametrize(("settings", "message"), [
    (dict(recipe="fp8-tensorwize"), "did you mean 'fp8-tensorwise'"),
    (dict(recipe="mxfp8", history=4), "no setting 'history'; fp8-delayed has it"),
    (dict(recipe="nvfp4", gradient_format="e5m2"), "no setting 'gradient_format'; fp8-tensorwise, "
                                                   "fp8-delayed, fp8-rowwise, "
                                                   "fp8-blockwise, fp8-blockwise-pow2, mxfp8 have "
                                                   "it"),
    (dict(recipe="mxfp8", scale="float32"), "choose one of power-of-two, power-of-two-floor"),
    (dict(recipe="bf16", loss_scale=8.0), "no setting 'loss_scale'; fp16 has it"),
])
def test_what_has_no_meaning_is_refused_with_the_way_out(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config().replace({f"precision.recipe.{key}".removesuffix(".recipe"): value
                          for key, value in settings.items()})


def test_settings_round_trip():
    layers = "precision.recipe.high_precision_layers"
    config = Config().replace({layers: "first,blocks.1.*", "precision.recipe": "nvfp4"})
    assert config.precision.recipe.high_precision_layers == ("first", "blocks.1.*")
    assert (Config.from_yaml(config.to_yaml()) == config
            and Config.from_yaml(Config().to_yaml()) == Config())
    assert config.replace({layers: "none"}).precision.recipe.high_precision_layers == ()
    assert flat(Config().replace({"precision.recipe": "nvfp4"}))[layers] == ("head", "last")
    shares = Config().replace({"precision.recipe": "nvfp4-published"})
    assert (flat(shares)[layers] == ("head", "first:2/62", "last:8/62")
            and Config.from_yaml(shares.to_yaml()) == shares)


# ---- which layers, which backend

def test_layers_that_stay():
    names = ([f"blocks.{i}.{leaf}" for i in range(3) for leaf in ("attention.qkv", "mlp.down")]
             + ["head"])
    assert kept(names, ("head", "last")) == {"head", "blocks.2.attention.qkv", "blocks.2.mlp.down"}
    assert kept(names, ("first",)) == {"blocks.0.attention.qkv", "blocks.0.mlp.down"}
    assert kept(names, ("*.down",)) == {f"blocks.{i}.mlp.down" for i in range(3)}
    assert kept(names, ("last:2",)) == {f"blocks.{i}.{leaf}" for i in (1, 2)
        for leaf in ("attention.qkv", "mlp.down")}
    assert kept(names, ("first:9",)) == set(names) - {"head"}
    for pattern, message in (("haed", "did you mean 'head'"), ("last:0", "did you mean 'last'")):
        with pytest.raises(ConfigError, match=rf"high_precision_layers={pattern} .*{message}"):
            kept(names, (pattern,))


@pytest.mark.parametrize(("blocks", "first", "last"),
                         [(62, 2, 8), (20, 1, 3), (2, 0, 0)])
def test_nvidia_s_share_of_a_model_stays(blocks, first, last):
    """Appendix A.1: the first two and the last eight of 62 blocks, 16%; of other models as many,
    rounded."""
    names = [f"blocks.{i}.mlp.up" for i in range(blocks)]
    want = {*names[:first], *names[blocks - last:]}
    assert kept([*names, "head"], RECIPES["nvfp4-published"].high_precision_layers) == {*want,
        "head"}


def test_a_model_gets_them_by_name_and_keeps_its_parameters(tiny):
    model = Training.build(tiny.replace({"precision.recipe": "fp8-tensorwise",
        "precision.recipe.high_precision_layers": "head,first"})).model
    assert [layer.name for layer in scaled_linears(model)] == \
        [f"blocks.1.{leaf}" for leaf in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]
    plain = Training.build(tiny.replace({"precision.recipe": "bf16"})).model
    assert ([name for name, _ in model.named_parameters()]
            == [name for name, _ in plain.named_parameters()])
    assert model.head.weight is model.embed.weight and not isinstance(model.head, ScaledLinear)
    with pytest.raises(ConfigError, match="leaves no Linear"):
        Training.build(tiny.replace({"precision.recipe": "mxfp8",
                                     "precision.recipe.high_precision_layers": "*"}))


@pytest.mark.parametrize("recipe", RECIPES)
def test_auto_always_finds_a_backend_and_says_why(recipe):
    choice = choose("auto", recipe, RECIPES[recipe], CPU)
    assert choice.asked == "auto" and choice.why
    assert choice.used == ("pytorch" if recipe in ("fp32", "bf16") else "emulated")


@pytest.mark.parametrize(("backend", "recipe", "message"), [
    ("emulatd", "mxfp8", "did you mean 'emulated'"),
    ("scaled_mm", "mxfp8", r"compute capability 10\.0.*the nearest that can: emulated"),
    ("transformer-engine", "mxfp8", "the nearest that can: emulated"),
    ("torchao", "fp8-delayed", "it has fp8-tensorwise, fp8-rowwise, int8"),
    ("pytorch", "int8", "casts the operands"),
])
def test_a_backend_that_cannot_says_why_and_what_can(backend, recipe, message):
    with pytest.raises(ConfigError, match=message):
        choose(backend, recipe, RECIPES[recipe], CPU)


def test_a_library_does_not_run_a_row_that_settings_changed():
    changed = resolve("fp8-tensorwise", gradient_format="e4m3fn")
    assert "settings change it" in BACKENDS["torchao"].why_not("fp8-tensorwise", changed, CPU)


def test_what_does_not_tile_is_refused_before_training(tiny):
    with pytest.raises(ConfigError,
                       match=r"mlp\.down.*96 input features do not tile by "
                             r"128.*precision\.recipe\.pad=true"):
        Training.build(tiny.replace({"precision.recipe": "fp8-blockwise", "model.mlp_width": 96,
                               "precision.recipe.high_precision_layers": "*.up"}))
    with pytest.raises(ConfigError, match="16 tokens do not tile by 32"):
        Training.build(tiny.replace({"precision.recipe": "mxfp8", "global_batch": 1,
                                     "model.context": 16}))


# ---- in the trainer

@pytest.fixture(scope="module")
def sixteen_bits():
    return {}


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("bf16", "fp32")])
def test_every_recipe_learns_what_bf16_learns_and_resumes_bit_for_bit(tiny, tmp_path, recipe,
        sixteen_bits):
    settings = {"precision.recipe": recipe,
                **({"precision.recipe.loss_scale": 1024.0} if recipe == "fp16" else {}),
                "grad_accum_steps": 2 if recipe == "fp8-delayed" or RECIPES[recipe].stochastic
                else 1}
    if "bf16" not in sixteen_bits:
        sixteen_bits["bf16"] = losses(train(tiny.replace({"precision.recipe": "bf16"}),
            out=tmp_path / "bf16"))
    config = tiny.replace(settings)
    whole = train(config, out=tmp_path / "whole")
    assert losses(whole) == pytest.approx(sixteen_bits["bf16"],
        rel=0.025 if RECIPES[recipe].dtype == "fp4" else 0.01)
    assert losses(whole)[-1] < 0.9 * losses(whole)[0]
    assert whole.summary["chosen"]["backend"]["used"] == "emulated"

    parts = in_parts(config, tmp_path / "parts", 4)
    assert losses(parts) == losses(whole)
    same = [checkpoint.load_latest(run.checkpoints)[0].tensors for run in (whole, parts)]
    assert same[0].keys() == same[1].keys()
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])
    assert any("amax_history" in name for name in same[0]) == (recipe == "fp8-delayed")
    assert any("draws" in name for name in same[0]) == RECIPES[recipe].stochastic
    assert ("state/scale" in same[0]) == (recipe == "fp16")


def test_history_moves_on_with_each_micro_batch_and_stays_still_in_evaluation(tiny):
    training = Training.build(tiny.replace({"precision.recipe": "fp8-delayed",
        "precision.recipe.history": 4, "grad_accum_steps": 2}))
    training.update(0)
    layer = next(scaled_linears(training.model))
    assert (layer.amax_history[0] > 0).tolist() == [False, True, True, False, False]
    before = layer.amax_history.clone()
    training.evaluate()
    assert torch.equal(layer.amax_history, before)


def test_a_saved_history_of_another_length_is_refused(tiny):
    four, six = (Training.build(tiny.replace({"precision.recipe": "fp8-delayed",
        "precision.recipe.history": steps}))
                 for steps in (4, 6))
    with pytest.raises(RunFailedError, match=r"amax_history as torch.float32 \(3, 5\).*\(3, 7\)"):
        six.load_state_dict(four.state_dict())


def test_a_nan_is_named_by_layer(tiny, tmp_path):
    with pytest.raises(RunFailedError,
                       match=r"NaN or Inf met in casts: \d+ in the activations of blocks\.\d"):
        train(tiny.replace({"precision.recipe": "fp8-tensorwise", "optimizer.lr": 1e30}),
              out=tmp_path / "run")


# ---- loss scaling

class Square(nn.Module):
    """Logits whose gradient is known: one row of zeros but for w."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.w.expand(*x.shape, 4)


def test_scaled_and_unscaled_gradients_are_the_same():
    from contextlib import nullcontext
    from functools import partial

    whole = partial(loss.full_cross_entropy, autocast=nullcontext())
    x, y = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)
    grads = []
    for scaler in (None, LossScaler(initial=2.0**10, growth_steps=2)):
        model = Square()
        nats = accumulate(model, whole, Batch(x, y), 2, scaler=scaler)
        grads.append(model.w.grad)
        assert nats.item() == pytest.approx(math.log(4))
    assert torch.allclose(grads[0], grads[1], rtol=1e-6) and scaler.good_steps == 1


def test_an_overflow_is_skipped_and_halves_the_scale_and_calm_doubles_it():
    model, scaler = Square(), LossScaler(initial=8.0, growth_steps=2)
    model.w.grad = torch.tensor([1.0, torch.inf, 0, 0])
    scaler.unscale(model.parameters(), Ranks())
    assert model.w.grad is None and scaler.scale == 4.0
    for _ in range(2):
        model.w.grad = torch.full((4,), 8.0)
        scaler.unscale(model.parameters(), Ranks())
        assert model.w.grad.tolist() == [2.0] * 4
        model.w.grad = None
    assert scaler.scale == 8.0 and scaler.good_steps == 0


def test_at_the_least_scale_divergence_is_no_longer_hidden():
    model, scaler = Square(), LossScaler(initial=1.0, growth_steps=2)
    model.w.grad = torch.full((4,), torch.nan)
    scaler.unscale(model.parameters(), Ranks())
    assert model.w.grad.isnan().all()


def test_dropped_updates_are_counted_over_all_starts(tiny, tmp_path):
    """The scale begins 2^3 too high: three updates are dropped, before and after the run was
    stopped."""
    config = tiny.replace({"precision.recipe": "fp16", "precision.recipe.loss_scale": 2.0**30,
                           "steps": 30, "checkpoint_every": 5, "eval_every": 0})
    seen = []
    whole = train(config, out=tmp_path / "whole", observers=[seen.append])
    gone = [record.step for record in seen if record.grad_norm == math.inf]
    assert (gone == [*range(1, len(gone) + 1)] and 4 < len(gone) < 30
            and whole.summary["dropped_updates"] == len(gone))
    assert "no weight" not in dict(described(whole.summary))["dropped updates"]
    parts = in_parts(config, tmp_path / "parts", 5)
    assert (parts.summary["dropped_updates"] == len(gone)
            and [line["loss"] for line in parts.metrics]
            == [line["loss"] for line in whole.metrics])


def test_the_scale_stays_finite_and_positive():
    model, scaler = Square(), LossScaler(initial=1.0, growth_steps=1)
    for _ in range(200):
        model.w.grad = torch.zeros(4)
        scaler.unscale(model.parameters(), Ranks())
        assert 1 <= scaler.scale.item() < math.inf and model.w.grad.tolist() == [0] * 4
    for _ in range(200):
        model.w.grad = torch.full((4,), torch.inf)
        scaler.unscale(model.parameters(), Ranks())
    assert scaler.scale == 1


def test_a_skipped_update_changes_nothing_and_is_not_divergence(tiny, tmp_path):
    config = tiny.replace({"precision.recipe": "fp16", "precision.recipe.loss_scale": 2.0**30,
                           "steps": 4})
    run = train(config, out=tmp_path / "run")
    assert [line["extra"]["loss_scale"] for line in run.metrics] == [2.0**29, 2.0**28, 2.0**27,
        2.0**26]
    # inf, which JSON does not have
    assert [line["grad_norm"] for line in run.metrics] == [None] * 4
    json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0],
               parse_constant=pytest.fail)
    assert (run.summary["dropped_updates"] == 4 and run.summary["status"] == "complete"
            and "val_loss" in run.metrics[-1])
    assert ("4, because gradients overflowed float16; no weight has moved"
            in dict(described(run.summary))["dropped updates"])
    assert ([line["lr"] for line in run.metrics]
            == [line["lr"] for line in train(config.replace({"precision.recipe": "fp32"}),
                out=tmp_path / "fp32").metrics])
    fresh = dict(Training.build(config).model.named_parameters())
    saved = checkpoint.load_latest(run.checkpoints)[0].tensors
    assert all(torch.equal(p, saved[f"model/{name}"]) for name, p in fresh.items())
    assert not any(name.startswith("optimizer/") for name in saved)
