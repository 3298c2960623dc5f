"""Transformer Engine as a transform of the model, on a stand-in that records what it is asked.

The stand-in has the names, the arguments and the order of events of Transformer Engine 2.18
(https://github.com/NVIDIA/TransformerEngine/blob/v2.18/transformer_engine/pytorch/:
quantization.py, autocast, FP8GlobalStateManager and DelayedScalingRecipeState; module/base.py,
init_fp8_metadata and set_meta_tensor; module/linear.py), and no GPU.

Only these tests catch: an autocast for each Linear instead of one a forward, histories that move
twice, in evaluation or under recomputation, or that a checkpoint loses.
"""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import nn

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.precision.backends import BACKENDS
from lpkit.precision.compute import LowPrecision
from lpkit.precision.libraries import TransformerEngineLinear
from lpkit.techniques.recipes import RECIPES
from lpkit.training.build import initial_model
from lpkit.training.training import _saved

EVENTS: list[str] = []
GLOBAL = {"depth": 0, "recipe": None, "states": []}     # FP8GlobalStateManager.quantization_state


@dataclass
class TheirRecipe:
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "most_recent"

    def delayed(self) -> bool:
        return type(self).__name__ == "DelayedScaling"


class State:
    """DelayedScalingRecipeState: three tensors a product forward, two backward."""

    def __init__(self, recipe: TheirRecipe, tensors: int):
        self.scale, self.amax_history = torch.ones(tensors), torch.zeros(recipe.amax_history_len,
            tensors)


class Autocast:
    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None,
                 _graph=False):
        self.enabled, self.recipe = enabled, recipe

    def __enter__(self):
        self.before = GLOBAL["recipe"]
        GLOBAL.update(depth=GLOBAL["depth"] + 1, recipe=self.recipe)
        EVENTS.append("enter")

    def __exit__(self, *error):
        GLOBAL.update(depth=GLOBAL["depth"] - 1, recipe=self.before)
        EVENTS.append("exit")
        # reduce_and_update_fp8_tensors
        if self.enabled and not GLOBAL["depth"] and torch.is_grad_enabled():
            EVENTS.append("update")
            for state in GLOBAL["states"]:
                state.scale.copy_(448 / state.amax_history.amax(0).clamp(min=2.0**-20))
                state.amax_history.copy_(state.amax_history.roll(1, 0))
                state.amax_history[0] = 0


class TheirLinear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype,
            device=device))
        self.bias = (nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))
                     if bias else None)
        self.fp8_meta, self.fp8_meta_tensors_initialized = {}, False

    def init_fp8_meta_tensors(self, recipe):
        # set_meta_tensor returns early
        if self.fp8_meta_tensors_initialized and recipe.delayed():
            return
        for key, tensors in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            self.fp8_meta[key] = State(recipe, tensors * self.fp8_meta["num_gemms"])
        self.fp8_meta_tensors_initialized = True

    def forward(self, x):
        assert GLOBAL["depth"], "without an autocast it computes in 16 bits, and says nothing"
        EVENTS.append(type(GLOBAL["recipe"]).__name__)
        if GLOBAL["recipe"].delayed():
            self.fp8_meta["num_gemms"] = 1
            self.init_fp8_meta_tensors(GLOBAL["recipe"])
            state = self.fp8_meta["scaling_fwd"]
            if state not in GLOBAL["states"]:
                GLOBAL["states"].append(state)
            state.amax_history[0, 0] = x.detach().abs().max()
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch):
    EVENTS.clear()
    GLOBAL.update(depth=0, recipe=None, states=[])
    names = ("transformer_engine", "transformer_engine.pytorch",
             "transformer_engine.pytorch.quantization",
             "transformer_engine.common", "transformer_engine.common.recipe")
    modules = {name: ModuleType(name) for name in names}
    whole, te, quantization, common, recipe = modules.values()
    whole.pytorch, whole.common, te.quantization, common.recipe = te, common, quantization, recipe
    te.Linear, te.autocast = TheirLinear, Autocast
    quantization.FP8GlobalStateManager = type("FP8GlobalStateManager", (), {
        "is_fp8_enabled": staticmethod(lambda: GLOBAL["depth"] > 0)})
    for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling",
                 "MXFP8BlockScaling", "NVFP4BlockScaling"):
        setattr(recipe, name, type(name, (TheirRecipe,), {}))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


TINY = Config().replace({"model.layers": 2, "model.width": 128, "model.heads": 2,
                         "model.context": 32, "model.vocab": 64})


def model_of(recipe: str) -> nn.Module:
    return LowPrecision(recipe=RECIPES[recipe],
                        backend=BACKENDS["transformer-engine"])(initial_model(TINY, "sdpa"))


def tokens() -> torch.Tensor:
    return torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("recipe", "theirs"), [
    ("fp8-delayed", "DelayedScaling"), ("fp8-blockwise-pow2", "Float8BlockScaling"),
    ("nvfp4-published", "NVFP4BlockScaling")])
def test_a_forward_is_one_autocast_and_its_end_moves_the_state_once(recipe, theirs):
    model, plain = model_of(recipe), initial_model(TINY, "sdpa")
    linears = sum(isinstance(module, TransformerEngineLinear) for module in model.modules())
    # the parameters are shared, and nothing else is in the way
    assert torch.equal(model(tokens()), plain(tokens()))
    assert [event for event in EVENTS if event == theirs] == [theirs] * linears and linears > 2
    assert (EVENTS[0] == "enter" and EVENTS[-2:] == ["exit", "update"]
            and EVENTS.count("update") == 1)


def test_evaluation_moves_nothing():
    model = model_of("fp8-delayed")
    with torch.no_grad():
        model(tokens())
    assert "update" not in EVENTS and "DelayedScaling" in EVENTS


def test_histories_and_scales_are_in_a_checkpoint_and_come_back():
    first, second = model_of("fp8-delayed"), model_of("fp8-delayed")
    settings = first.blocks[0].mlp.up.recipe
    assert (settings.amax_history_len, settings.amax_compute_algo, settings.margin) == (1024,
        "max", 0)
    before = {name: t.clone() for name, t in _saved("model", first).items()}
    first(tokens())
    saved = _saved("model", first)
    names = {f"model/blocks.0.mlp.up.{what}_{way}" for what in ("scale", "amax_history")
             for way in ("fwd", "bwd")}
    assert names <= saved.keys()
    assert saved["model/blocks.0.mlp.up.amax_history_fwd"].shape == (1024, 3)
    moved = {name for name in saved if not torch.equal(saved[name], before[name])}
    assert moved == {name for name in saved if name.endswith(("scale_fwd", "amax_history_fwd"))}
    with torch.no_grad():
        for name, t in _saved("model", second).items():
            t.copy_(saved[name])
    inner = second.blocks[0].mlp.up.inner
    assert torch.equal(inner.fp8_meta["scaling_fwd"].scale,
                       saved["model/blocks.0.mlp.up.scale_fwd"])
    second(tokens())       # and its first forward makes no others
    assert inner.fp8_meta["scaling_fwd"].scale is second.blocks[0].mlp.up.scale_fwd


def test_a_block_computed_again_has_an_autocast_of_its_own_or_is_refused():
    """Backward runs after the model's autocast has ended; without state another one changes
    nothing."""
    layer, x = model_of("mxfp8").blocks[0].mlp.up, torch.randn(32, 128)
    layer(x)
    assert EVENTS == ["enter", "MXFP8BlockScaling", "exit", "update"] and not GLOBAL["states"]
    with pytest.raises(ConfigError, match=r"memory\.recompute=none"):
        model_of("fp8-delayed").blocks[0].mlp.up(x)


def test_parameters_are_those_of_the_linears():
    model, plain = model_of("fp8-tensorwise"), initial_model(TINY, "sdpa")
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
