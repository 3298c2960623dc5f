"""A product of 16-bit operands by float32's, compared with float64, PyTorch's own and a whole run.

Only these tests catch a wide product that rounds twice, that runs where it is slower, that a recipe
or a Linear does not get, or that is wrong and runs anyway.
"""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.kernels import wide_product
from lpkit.kernels.choose import refused_here
from lpkit.kernels.wide_product import WideLinear, WideProduct, multiply
from lpkit.measure.doctor import CHECKS
from lpkit.measure.probes import probe
from lpkit.precision.backends import BACKENDS
from lpkit.precision.linear import scaled_linears
from lpkit.training.training import Training
from tests.kernels.test_kernels import of_shape, scaled

GRAIN = 2.0**-8         # half a unit in the last place of bf16, relative


RUN = Config().replace({
    "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 32, "steps": 20,
    "global_batch": 8, "precision.recipe": "bf16", "system.device": "cpu", "system.threads": 1,
    "system.compile": False})


def drawn(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("M, N, K, dtype", [
    (1, 1, 1, torch.bfloat16), (5, 3, 7, torch.float16), (1025, 33, 64, torch.bfloat16),
    (2048, 16, 8, torch.float16)])      # ROWS and one more, and multiples
def test_one_rounding_of_the_exact_sum(M, N, K, dtype):
    """Sums in float32 are off by K times its own grain at most, far below the last rounding."""
    a, b, bias = drawn(M, K, dtype=dtype), drawn(N, K, dtype=dtype), drawn(N, dtype=dtype)
    got = multiply(a, b, bias, torch.tensor(0.37))
    exact = 0.37 * a.double() @ b.double().T + bias.double()
    size = 0.37 * a.double().abs() @ b.double().abs().T + bias.double().abs()
    bound = (torch.finfo(dtype).eps / 2 * exact.abs() + size * K * 2.0**-23
             + torch.finfo(dtype).smallest_normal)
    assert got.dtype == dtype and ((got.double() - exact).abs() <= bound).all()


def test_gradients_are_those_of_the_exact_ones():
    x, w, bias, g = drawn(300, 40), drawn(50, 40), drawn(50), drawn(300, 50)
    for t in (x, w, bias):
        t.requires_grad_()
    got = torch.autograd.grad(WideProduct.apply(x, w, bias), (x, w, bias), g)
    want = (g.double() @ w.double(), g.double().T @ x.double(), g.double().sum(0))
    for ours, exact in zip(got, want, strict=True):
        assert (ours.double() - exact).norm() < GRAIN * exact.norm()


def test_a_linear_is_pytorchs_under_autocast(monkeypatch):
    monkeypatch.setattr(wide_product, "SMALL_FLOPS", 0)
    monkeypatch.setattr(wide_product, "SMALL_SIDE", 0)
    ours, theirs = WideLinear(64, 48), torch.nn.Linear(64, 48)
    theirs.load_state_dict(ours.state_dict())
    x, g = drawn(4, 32, 64, dtype=torch.float32), drawn(4, 32, 48)
    results = []
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(given)
        assert layer is theirs or not y._is_view(), "FSDP2 warns of a model that returns a view"
        y.backward(g)
        results.append([y.detach(), given.grad, layer.weight.grad, layer.bias.grad])
    for got, want in zip(*results, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert (got.double() - want.double()).norm() <= GRAIN * want.double().norm()
    with FlopCounterMode(display=False) as counted, torch.autocast("cpu", torch.bfloat16):
        ours(x).sum().backward()
    assert counted.get_total_flops() == 2 * 2 * 128 * 64 * 48       # x needs no gradient


def test_small_products_and_float32_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(wide_product, "in_a_loop", lambda: False)
    layer, x = WideLinear(64, 48), drawn(32, 64, dtype=torch.float32)
    same = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), same)
    assert not wide_product.wins(x, layer.weight)
    large = torch.empty(4096, 1024, dtype=torch.bfloat16)
    assert wide_product.wins(large, large[:1024])
    # a piece of a loss would cast the whole head
    assert not wide_product.wins(large[:128], large)


def test_a_run_is_the_same_either_way():
    config = RUN.replace({"model.width": 256, "model.heads": 4, "model.context": 256,
                          "model.layers": 1, "global_batch": 1, "steps": 8})
    losses = {}
    for used in ("float32", "bf16"):
        training = Training.build(config.replace({"system.products": used}))
        assert training.decisions.choices["products"].used == used
        losses[used] = torch.stack([training.update(step).loss for step in range(8)])
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.2
    # the order of float32 sums, over 8 updates
    assert (losses["float32"] - losses["bf16"]).abs().max() < 0.02


def test_what_was_asked_for_runs_in_every_linear():
    """Those that a recipe leaves in 16 bits too; and what has no such products says so."""
    config = RUN.replace({"precision.recipe": "fp8-tensorwise",
                          "precision.recipe.high_precision_layers": "*.out"})
    for asked, wide in (("float32", True), ("bf16", False)):
        training = Training.build(config.replace({"system.products": asked}))
        assert training.decisions.choices["products"].used == asked
        assert {type(module) is WideLinear for name, module in training.model.named_modules()
                if name.endswith(".out")} == {wide}
        assert {m.arithmetic.wide for m in scaled_linears(training.model)} == {wide}
    assert not BACKENDS["emulated"].wide, "another model has its own"
    with pytest.raises(ConfigError,
                       match="is for bf16 on a CPU without compiling, and this is fp32"):
        Training.build(RUN.replace({"precision.recipe": "fp32", "system.products": "float32"}))


def test_a_loop_is_left_for_all_but_the_smallest(monkeypatch):
    monkeypatch.setattr(wide_product, "in_a_loop", lambda: True)
    assert wide_product.large(64, 64, 64) and not wide_product.large(16, 16, 16)


def test_nothing_is_raced_where_every_product_is_small(monkeypatch):
    monkeypatch.setattr(wide_product, "in_a_loop", lambda: False)
    monkeypatch.setattr(wide_product, "choose", None)
    chosen = Training.build(RUN).decisions.choices["products"]
    assert chosen.used == "bf16" and "no matmul of this model is large enough" in chosen.why
    assert wide_product.choose_for((4096, 4096, 64), "auto", before="float32").used == "float32"


@pytest.mark.parametrize("plant", [scaled, of_shape])
def test_a_wrong_wide_product_is_refused_every_time(plant, tmp_path, monkeypatch):
    """Asked for, it is an error; with auto the processor's own run, and the doctor names what was
    refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wide_product, "KERNEL",
                        replace(wide_product.KERNEL,
                                versions={"float32": plant(wide_product.multiply_now)}))
    ask, threads = wide_product.choice.__wrapped__, torch.get_num_threads()
    for _ in range(2):
        choice = ask("auto", threads)
        assert choice.used == "bf16" and re.search("float32: (differs|fails)", choice.why)
        with pytest.raises(ConfigError,
                           match=r"system.products=float32: product (differs from its "
                                 r"definition|fails).*set system.products=bf16"):
            ask("float32", threads)
    assert refused_here()["product"]["float32"].startswith(("differs", "fails"))
    (report,) = (probe(check, torch.device("cpu")) for check in CHECKS if check.name == "kernels")
    assert not report.works and "float32 of product" in report.why and report.nearest


def test_a_race_says_what_won(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choice = wide_product.choice.__wrapped__("auto", torch.get_num_threads())
    assert choice.used in ("float32", "bf16")
    assert "the fastest of bf16, float32 here, and verified" in choice.why
    assert not refused_here()
