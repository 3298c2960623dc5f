"""Memory techniques: the same gradient as without, or within the error that they state; and the bytes that they take away."""

import pytest
import torch

from lpkit import checkpoint
from lpkit.assembly import build, decide
from lpkit.config import Config, ConfigError
from lpkit.handle import start, train
from lpkit.measure import saved_bytes
from lpkit.memory.loss import linear_cross_entropy
from lpkit.precision.recipes import RECIPES

SMALL = Config().replace({
    "model.layers": 2, "model.width": 128, "model.heads": 2, "model.mlp_width": 128, "model.context": 32, "steps": 5,
    "batch": 4, "eval_every": 4, "eval_batches": 1, "checkpoint_every": 3, "optimizer.warmup_steps": 2,
    "system.device": "cpu", "precision.recipe": "fp32"})
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu", "model.bias": False, "model.tied": False,
         "model.kv_heads": 1, "model.init": "llama"}


@pytest.fixture
def small(corpus, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return SMALL.replace({"data.source": str(corpus / "*.py")})


def batch(config: Config):
    draw = torch.Generator().manual_seed(1)
    shape = (config.batch, config.model.context)
    return [torch.randint(config.model.vocab, shape, generator=draw) for _ in range(2)]


def gradients(config: Config):
    """The loss, every gradient of one update before it is used, and the model with the state that the step left."""
    built = build(config, decide(config))
    loss = built.step(built.model, *batch(config))
    return loss, {name: p.grad for name, p in built.model.named_parameters()}, built.model


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kept(config: Config):
    built = build(config, decide(config))
    x, y = batch(config)
    return saved_bytes(built.model, lambda: built.loss(built.model, x.clone(), y.clone()))


def loses_nothing(config: Config, changes: dict) -> None:
    """The same loss and the same gradients, bit for bit."""
    (loss, want, before), (again, found, after) = gradients(config), gradients(config.replace(changes))
    assert torch.equal(loss, again) and same(want, found)
    buffers = [{name: b for name, b in model.named_buffers() if "nonfinite" not in name} for model in (before, after)]
    assert same(*buffers)


def resumes(config: Config, out, *, stop: int = 4):
    """Stopped after `stop` steps and gone on with, a run is bit for bit the uninterrupted one, which is returned."""
    whole = train(config, out=out / "whole")
    handle = start(config, out=out / "parts")
    handle.subscribe(lambda record: handle.stop() if record.step >= stop else None)
    handle.result()
    parts = train(config, out=out / "parts", resume=True)
    one, two = (checkpoint.load_latest(run.checkpoints)[0].tensors for run in (whole, parts))
    assert same(one, two) and [a["loss"] for a in whole.metrics] == [b["loss"] for b in parts.metrics]
    return whole


# ---- recomputation

@pytest.mark.parametrize("recompute", ["block", "selective"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_gradients_are_the_same_bit_for_bit_under_every_recipe(recompute, recipe):
    loses_nothing(SMALL.replace({"precision.recipe": recipe, "batch": 8, "accumulate": 2}), {"memory.recompute": recompute})


@pytest.mark.parametrize("recompute", ["block", "selective"])
@pytest.mark.parametrize("attention", ["plain", "sdpa", "blocked"])
def test_recomputed_gradients_are_the_same_with_every_attention(recompute, attention):
    loses_nothing(SMALL.replace({**LLAMA, "model.attention": attention, "precision.recipe": "bf16"}),
                  {"memory.recompute": recompute})


def test_recomputed_blocks_keep_their_input_alone():
    """Bytes by arithmetic: N D numbers a recomputed block."""
    config = SMALL.replace({"model.layers": 4})
    tokens, everything = 4 * 32, kept(config)
    one = everything.total_bytes - everything.operations["embed"] - everything.operations["norm"] \
        - everything.operations["head"] - everything.operations["loss"]
    for every, blocks in ((1, 4), (2, 2), (3, 2), (9, 1)):      # 0; 0 and 2; 0 and 3; 0
        found = kept(config.replace({"memory.recompute": "block", "memory.recompute_every": every}))
        assert found.total_bytes == everything.total_bytes - blocks * (one // 4 - tokens * 128 * 4)


# ---- chunked loss

@pytest.mark.parametrize("changes", [
    {}, {"precision.recipe": "bf16"}, {"precision.recipe": "fp16"}, {"model.tied": False}, LLAMA, {"accumulate": 2},
    {"precision.recipe": "fp8-tensorwise"}, {"precision.recipe": "fp8-tensorwise", "precision.keep": ","}], ids=str)
def test_one_piece_gives_the_whole_gradient_up_to_rounding(changes):
    """Of the exponential in float32; an ulp of that may turn a 16-bit rounding."""
    config = SMALL.replace(changes)
    (loss, want, _), (again, found, _) = gradients(config), gradients(config.replace({"memory.loss": "chunked"}))
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    for name, grad in want.items():
        assert (found[name] - grad).norm() <= (1e-6 if config.precision.recipe == "fp32" else 2e-3) * grad.norm()


@pytest.mark.parametrize("chunk", [1, 24, 100, 128, 4096])
def test_pieces_against_float64(chunk):
    """The gradient of every chunking is as close to float64's as the whole one's: float32 sums in another order."""
    torch.manual_seed(0)
    head, y = torch.nn.Linear(64, 500, bias=False), torch.randint(500, (128,))
    h = torch.randn(128, 64, requires_grad=True)
    exact_head, exact_h = head.double(), h.detach().double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(exact_head(exact_h), y)
    exact_grads = torch.autograd.grad(exact, (exact_h, exact_head.weight))
    head = head.float()
    loss = linear_cross_entropy(h, head, y, chunk)
    found = torch.autograd.grad(loss, (h, head.weight))
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    for got, want in zip(found, exact_grads):
        assert (got - want).norm() <= 5e-7 * want.norm()
    with torch.no_grad():
        assert linear_cross_entropy(h, head, y, chunk).item() == pytest.approx(exact.item(), rel=1e-6)


def test_chunked_loss_keeps_no_logits():
    """Kept: the hidden states' gradient. (The head's is a gradient like the others, only earlier.)"""
    config = SMALL.replace({"model.vocab": 4096, "memory.loss": "chunked", "memory.loss_chunk": 16})
    assert kept(config).operations["loss"] == 4 * 32 * 128 * 4
    whole = kept(config.replace({"memory.loss": "whole"})).operations["loss"]
    assert whole == 4 * 32 * 4096 * 4 + 4 * 32 * 8 + 4     # log-probabilities, targets, their number


def test_a_chunked_run_goes_on_where_it_was_and_evaluates_the_same(small, tmp_path):
    config = small.replace({"memory.loss": "chunked", "memory.loss_chunk": 48, "memory.recompute": "block",
                            "precision.recipe": "fp8-delayed"})
    run = resumes(config, tmp_path)
    assert {"recompute", "loss"} <= run.summary["chosen"].keys()
    whole = train(small.replace({"precision.recipe": "fp8-delayed"}), out=tmp_path / "plain")
    for a, b in zip(run.metrics, whole.metrics):
        assert a.keys() == b.keys()
        assert [a[key] for key in a if "loss" in key] == pytest.approx([b[key] for key in a if "loss" in key], rel=1e-3)


# ---- names

@pytest.mark.parametrize("setting, said", {
    "memory.recompute=blok": "did you mean 'block'", "memory.loss=chunk": "did you mean 'chunked'",
}.items())
def test_unknown_names_suggest_the_nearest(setting, said):
    key, _, value = setting.partition("=")
    with pytest.raises(ConfigError, match=said):
        decide(SMALL.replace({key: value}))


def test_nothing_is_hooked_when_nothing_is_asked():
    config = SMALL
    built, decided = build(config, decide(config)), decide(config)
    assert not {"recompute", "saved", "loss", "parameters", "optimizer_state", "update"} & decided.chosen.keys()
    assert all("forward" not in vars(module) for module in built.model.modules())
    assert type(built.optimizer) is torch.optim.AdamW
