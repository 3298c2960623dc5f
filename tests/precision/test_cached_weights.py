"""Casts of weights that are kept over an update: the same bits as casts that are made anew, and no
older than the weight.

Only these tests catch: a kept cast of a weight that has changed, a cast more than one an update,
and a cache that a copy, a graph or the next update sees.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.precision.backends import BACKENDS
from lpkit.precision.weight_cache import choose, weights_cached
from lpkit.techniques.recipes import RECIPES, resolve
from lpkit.training.background import train
from lpkit.training.checkpoint import load_latest
from lpkit.training.steps import advance
from tests.training.resuming import in_parts

CAST = [name for name, recipe in RECIPES.items() if recipe.products]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# serves y and dx; others: two
ONE_CAST = dict.fromkeys(("fp8-tensorwise", "fp8-delayed", "fp8-blockwise", "fp8-blockwise-pow2",
                          "nvfp4", "nvfp4-published"), 1)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Counting:
    """A backend that counts the casts of weights."""

    alignment = 0

    def __init__(self, inner, weight):
        self.inner, self.at, self.casts = inner, weight.data_ptr(), 0

    def cast(self, x, cast, dtype, **more):
        self.casts += x.data_ptr() == self.at
        return self.inner.cast(x, cast, dtype, **more)

    def product(self, *args, **how):
        return self.inner.product(*args, **how)

    def shares(self, cast):
        return self.inner.shares(cast)


def layer(recipe: str, backend: str = "emulated", **settings) -> nn.Module:
    torch.manual_seed(0)
    linear = BACKENDS[backend].wrap(nn.Linear(128, 256), resolve(recipe, **settings), name="up",
                                  seed=0)
    linear.arithmetic = Counting(linear.arithmetic, linear.weight)
    return linear


def updates(module: nn.Module, *, cached: bool, recompute: bool = False, count: int = 3,
            parts: int = 3) -> list[torch.Tensor]:
    """Everything that three updates of three micro-batches produce."""
    # does not count versions
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    seen = []
    for update in range(count):
        with weights_cached(module) if cached else nullcontext():
            for part in range(parts):
                x = (noise(128, 128, seed=10 * update + part) * (1 + update)).requires_grad_()
                with torch.autocast("cpu", torch.bfloat16):
                    y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
                y.backward(noise(128, 256, seed=100 + part).to(y.dtype))
                advance(module)
                seen += [y.detach(), x.grad]
        seen += [module.weight.grad.clone(), module.bias.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [b.clone() for b in module.state_dict().values()]


@pytest.mark.parametrize("recipe, recompute", [*((recipe, False) for recipe in CAST),
                                               ("fp8-delayed", True), ("nvfp4", True)])
def test_the_same_bits_from_fewer_casts(recipe, recompute):
    plain, kept = layer(recipe), layer(recipe)
    want, got = (updates(module, cached=module is kept, recompute=recompute)
                 for module in (plain, kept))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    each = ONE_CAST.get(recipe, 2)
    assert plain.arithmetic.casts == 3 * 3 * each * (1 + recompute)
    # a history still empty, or that a grown weight has just entered, gives the second micro-batch
    # another scale
    assert (kept.arithmetic.casts <= 3 * 2 if recipe == "fp8-delayed"
            else kept.arithmetic.casts == 3 * each)
    assert kept.cache is None, "nothing is held after an update"


@pytest.mark.parametrize("settings", [dict(recipe="nvfp4", gradient_rounding="stochastic"),
    dict(recipe="mxfp8", pad=True), dict(recipe="fp8-rowwise", transform="hadamard")])
def test_settings_that_change_a_row_change_nothing_here(settings):
    want, got = (updates(layer(**settings), cached=cached) for cached in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("recipe", ["fp8-tensorwise", "fp8-rowwise", "int8"])
def test_hardware_casts_are_kept_too(recipe):
    want, got = (updates(layer(recipe, "scaled_mm"), cached=cached) for cached in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_weight_that_changes_is_cast_anew():
    module, x = layer("fp8-rowwise"), noise(4, 128)
    changes = {
        "in place": lambda: nn.init.ones_(module.weight),
        "an optimizer that counts versions": lambda: torch.optim.SGD([module.weight], lr=1.0,
            foreach=True).step(),
        "loaded": lambda: module.load_state_dict({key: value * 2
            for key, value in module.state_dict().items()}),
        "another tensor inside": lambda: setattr(module.weight, "data", module.weight.data * 3),
        "another parameter": lambda: setattr(module, "weight",
            nn.Parameter(noise(256, 128, seed=7))),
    }
    with weights_cached(module):
        module(x)
        for what, change in changes.items():
            module.weight.grad = noise(256, 128, seed=3)
            change()
            got = module(x)
            module.cache, cache = None, module.cache
            assert torch.equal(got, module(x)), what
            module.cache = cache
    # another dtype within one update
    with weights_cached(module), torch.autocast("cpu", torch.bfloat16):
        low = module(x)
        with torch.autocast("cpu", enabled=False):
            assert module(x).dtype == torch.float32 and low.dtype == torch.bfloat16


def test_a_copy_does_not_see_its_original_s_cache():
    module, x = layer("mxfp8"), noise(32, 128)
    with weights_cached(module):
        before = module(x)
        twin = copy.deepcopy(module)
        with torch.no_grad():
            twin.weight.zero_()
            twin.bias.zero_()
        assert twin(x).eq(0).all() and torch.equal(module(x), before)


def ask(recipe="mxfp8", backend="emulated", device=CPU, compiled=False, forwards=4, **settings):
    row = resolve(recipe, **settings)
    return choose(recipe, row, BACKENDS[backend], device, compiled=compiled, forwards=forwards)


def test_what_is_used_and_why():
    assert ask().used == "cached" and "4 forwards" in ask().why
    for choice, why in ((ask(forwards=1), "cast once in an update anyway"),
                        (ask(backend="torchao"), "library"),
                        (ask(recipe="fp8-tensorwise", backend="scaled_mm", compiled=True),
                         "in the graph of torch.compile"),
                        (ask(compiled=True), "in the graph of torch.compile"),
                        (ask(recipe="fp8-delayed", device=CUDA), "wait for the GPU")):
        assert (choice.asked, choice.used) == ("true", "cast") and why in choice.why
    with pytest.raises(ConfigError, match=r"cache_weight_casts=true.*bf16: it casts no weight"):
        ask(recipe="bf16")
    with pytest.raises(ConfigError,
                       match=r"precision\.cache_weight_casts must be true or false, got 'cache'"):
        Config().replace({"precision.cache_weight_casts": "cache"})


def test_under_compile_where_casts_are_fused_they_are_made_as_ever():
    module = layer("fp8-tensorwise", "scaled_mm")
    module.arithmetic = module.arithmetic.inner
    compiled, x = torch.compile(module, backend="aot_eager", fullgraph=True), noise(32, 128)
    torch._dynamo.reset()
    with weights_cached(module):
        assert torch.equal(compiled(x), module(x))
        with torch.no_grad():
            module.weight.mul_(2)
        assert torch.equal(compiled(x), module(x))


@pytest.fixture(scope="module")
def tiny(corpus) -> Config:
    return Config().replace({
        "model.layers": 2, "model.width": 128, "model.heads": 2, "model.context": 32,
        "data.source": str(corpus), "global_batch": 8,
        "grad_accum_steps": 4, "steps": 4, "eval_every": 2, "eval_batches": 1,
        "checkpoint_every": 2, "system.device": "cpu",
        "system.threads": 1})


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_a_run_and_its_resume_are_the_same_bit_for_bit(tiny, recipe, tmp_path):
    config = tiny.replace({"precision.recipe": recipe})
    cached = config.replace({"precision.cache_weight_casts": True})
    want, whole = train(config, out=tmp_path / "cast"), train(cached, out=tmp_path / "cached")
    parts = in_parts(cached, tmp_path / "parts", 2)
    assert "weight_casts" not in want.summary["chosen"]
    assert (whole.summary["chosen"]["weight_casts"]["used"]
            == parts.summary["chosen"]["weight_casts"]["used"] == "cached")
    steps = [[(line["loss"], line["grad_norm"]) for line in run.metrics]
             for run in (want, whole, parts)]
    assert (steps[0] == steps[1] == steps[2] and want.summary["val_loss"]
            == whole.summary["val_loss"])
    same = [load_latest(run.checkpoints)[0].tensors for run in (want, whole, parts)]
    assert all(torch.equal(same[0][name], other[name]) for other in same[1:] for name in same[0])
