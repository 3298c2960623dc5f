"""A product of 16-bit operands by float32's is the product of those operands: beside float64, PyTorch's own, and in a whole run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lpkit.config import Config
from lpkit.contracts import Choice
from lpkit.kernels import wide_product
from lpkit.kernels.wide_product import WideLinear, WideProduct, multiply
from lpkit.training.training import Training

SHAPES = ((1, 1, 1), (5, 3, 7), (1025, 33, 64), (2048, 16, 8))      # M, N, K: ROWS and one more, and multiples
GRAIN = 2.0**-8         # half a unit in the last place of bf16, relative


@pytest.fixture(params=["float32", "bf16"])
def taken(request, monkeypatch):
    """Whichever wins here, both are tried."""
    monkeypatch.setattr(wide_product, "choice", lambda threads: Choice(asked="auto", used=request.param, why="by the test"))
    return request.param


def drawn(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_one_rounding_of_the_exact_sum(M, N, K, dtype):
    """Sums in float32 are off by K times its own grain at most, far below the last rounding."""
    a, b, bias, alpha = drawn(M, K, dtype=dtype), drawn(N, K, dtype=dtype), drawn(N, dtype=dtype), torch.tensor(0.37)
    got = multiply(a, b, bias, alpha)
    exact = 0.37 * a.double() @ b.double().T + bias.double()
    size = 0.37 * a.double().abs() @ b.double().abs().T + bias.double().abs()
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + size * K * 2.0**-23 + torch.finfo(dtype).smallest_normal
    assert got.dtype == dtype and ((got.double() - exact).abs() <= bound).all()


def test_gradients_are_those_of_the_exact_ones():
    x, w, bias, g = drawn(300, 40), drawn(50, 40), drawn(50), drawn(300, 50)
    for t in (x, w, bias):
        t.requires_grad_()
    got = torch.autograd.grad(WideProduct.apply(x, w, bias), (x, w, bias), g)
    want = (g.double() @ w.double(), g.double().T @ x.double(), g.double().sum(0))
    for ours, exact in zip(got, want, strict=True):
        assert (ours.double() - exact).norm() < GRAIN * exact.norm()


def test_a_linear_is_pytorchs_under_autocast(taken, monkeypatch):
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
        y.backward(g)
        results.append([y.detach(), given.grad, layer.weight.grad, layer.bias.grad])
    for got, want in zip(*results, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert (got.double() - want.double()).norm() <= GRAIN * want.double().norm()
    with FlopCounterMode(display=False) as counted, torch.autocast("cpu", torch.bfloat16):
        ours(x).sum().backward()
    assert counted.get_total_flops() == 2 * 2 * 128 * 64 * 48       # x needs no gradient


def test_small_products_and_float32_stay_as_they_are(taken):
    layer, x = WideLinear(64, 48), drawn(32, 64, dtype=torch.float32)
    same = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), same)
    assert not wide_product.wins(x, layer.weight)
    large = torch.empty(4096, 1024, dtype=torch.bfloat16)
    assert wide_product.wins(large, large[:1024]) == (taken == "float32")
    assert not wide_product.wins(large[:128], large)        # a piece of a loss would cast the whole head


def test_a_run_is_the_same_either_way(monkeypatch):
    monkeypatch.setattr(wide_product, "SMALL_FLOPS", 0)
    monkeypatch.setattr(wide_product, "SMALL_SIDE", 0)
    config = Config().replace({"model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 32, "global_batch": 8, "steps": 20,
                               "precision.recipe": "bf16", "system.device": "cpu", "system.threads": 1, "system.compile": False})
    losses = {}
    for used in ("float32", "bf16"):
        monkeypatch.setattr(wide_product, "choice", lambda threads, used=used: Choice(asked="auto", used=used, why="by the test"))
        training = Training.build(config)
        assert training.decisions.choices["products"].used == used
        losses[used] = torch.stack([training.update(step).loss for step in range(20)])
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.5
    assert (losses["float32"] - losses["bf16"]).abs().max() < 0.02      # the order of float32 sums, over 20 updates


def test_a_race_says_what_won():
    said = wide_product.choice.__wrapped__(torch.get_num_threads())
    assert said.used in ("float32", "bf16") and "x the speed of this CPU's bf16 product" in said.why
