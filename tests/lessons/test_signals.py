"""Signals by depth: the recursion of lessons.signals beside samples of Gaussians, and beside models
of the kit that were initialised.

Only these tests catch: a recursion whose variance, cosine or gradient is not that of models that
were drawn, by depth.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lessons import signals
from lessons.l22_blocks import Unshaped
from lpkit.config import ModelConfig

TOKENS = torch.randperm(256, generator=torch.Generator().manual_seed(0))[:64]


def model(block="pre-norm", init="gpt2", layers=8, **settings):
    return ModelConfig(layers=layers, width=128, heads=4, vocab=256, context=64, block=block,
                       init=init, **settings)


@pytest.mark.parametrize("phi, torchs", [(signals._gelu, lambda z: F.gelu(z, approximate="tanh")),
    (lambda z: np.maximum(z, 0), F.relu)])
@pytest.mark.parametrize("rho", [-0.5, 0.9])
def test_the_covariance_of_what_an_mlp_does_is_that_of_samples(phi, torchs, rho):
    draw, q = torch.Generator().manual_seed(1), np.array([0.5, 2.0])
    z = torch.randn(2, 4_000_000, generator=draw, dtype=torch.float64)
    z[1] = rho * z[0] + math.sqrt(1 - rho**2) * z[1]
    y = torchs(z * torch.tensor(q).sqrt()[:, None])
    powers = signals.powers(signals.hermite(phi, q), np.array([[1, rho], [rho, 1]]))
    assert np.allclose(powers, (y @ y.mT / y.shape[1]).numpy(), rtol=0.01)


@pytest.mark.parametrize("rho", [-0.7, 0.2, 0.95])
def test_relu_has_the_arc_cosine_kernel(rho):
    """Cho and Saul 2009: (sqrt(1 - rho^2) + (pi - arccos rho) rho) / 2 pi. A kink takes many
    polynomials."""
    power = signals.powers(signals.hermite(lambda z: np.maximum(z, 0), np.ones(2)),
                           np.array([[1, rho], [rho, 1]]))[0, 1]
    assert power == pytest.approx((math.sqrt(1 - rho**2) + (math.pi - math.acos(rho)) * rho)
                                  / (2 * math.pi), rel=0.03)


def test_the_slope_is_that_of_pytorch():
    z = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True)
    F.gelu(z, approximate="tanh").sum().backward()
    assert np.allclose(signals._slope(z.detach().numpy()), z.grad.numpy(), atol=1e-12)


CASES = [("pre-norm", "gpt2", 0.06), ("pre-norm", "llama", 0.10), ("parallel", "gpt2", 0.06),
         ("sandwich", "llama", 0.10),
         ("skipinit", "fan-in", 0.05), ("layerscale", "llama", 0.05), ("sas", "gpt2", 0.05),
         ("sas-p", "llama", 0.05)]


@pytest.mark.slow
@pytest.mark.parametrize("block, init, within, layers", [
    *((*CASES[0], layers) for layers in (8, 72)), *((*case, 24) for case in CASES)])
def test_variance_and_cosine_by_depth(block, init, within, layers):
    """Means of 8 models of width 128, at every depth."""
    m = model(block, init, layers)
    there, here = signals.measured(m, TOKENS, seeds=8), signals.predicted(m, TOKENS)
    assert len(here.variance) == layers + 1
    assert here.variance == pytest.approx(there.variance, rel=within)
    assert here.cosine == pytest.approx(there.cosine, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("settings, layers", [({}, 8), ({}, 72),
                                              ({"norm": "none", "init": "llama"}, 24)])
def test_gradients_by_depth(settings, layers):
    m = model(layers=layers, **settings)
    block = "without norm" if settings else ""
    assert (signals.predicted(m, TOKENS, block).gradient
            == pytest.approx(signals.measured(m, TOKENS, seeds=8).gradient, rel=0.1))


def test_without_a_skip_tokens_become_one():
    m = model(init="llama")
    here, there = signals.predicted(m, TOKENS, "without skip"), signals.measured(m, TOKENS, seeds=4,
        make=Unshaped)
    assert there.cosine[-1] > 0.9 and here.cosine == pytest.approx(there.cosine, abs=0.08)


def test_where_scores_are_not_small_the_formula_is_off():
    """fan-in: q k / sqrt(E) has a variance of 1, and attention is no mean of the past."""
    m = model(init="fan-in", layers=2)
    assert signals.predicted(m, TOKENS).cosine[1] > signals.measured(m, TOKENS).cosine[1] + 0.05
