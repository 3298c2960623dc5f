"""One outlier by formula against the cast; what bf16 weights and float16 gradients lose, against
counting and by hand.

Only these tests catch: a formula of noise, of lost updates or of underflow that casts contradict,
and stochastic storing that moves the mean.
"""

import math

import pytest
import torch

from lessons import l04_scaling_recipes as outliers
from lessons import l05_mixed_precision as mixed_precision
from lessons.l04_scaling_recipes import outlier_figure, outlier_map
from lessons.l05_mixed_precision import lost_figure, scaling_view
from lessons.number_formats import round_to
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.recipes import Cast


@pytest.mark.parametrize("name", outliers.NAMES)
def test_the_formula_is_within_one_decibel(name):
    cast = outliers.casts()[name]
    for size in (10.0, 1e3, 1e5, 3e5, 1e6):
        measured = outliers.measured_db(outliers.gaussian(size, seed=0), cast)
        assert abs(outliers.expected_db(cast, outliers.SHAPE, outlier=size) - measured) < 1, size


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e2m1", "int8"])
@pytest.mark.parametrize("sigma", [0.01, 1.0])
def test_rounding_noise_against_rounding(fmt, sigma):
    sigma *= FORMATS[fmt].smallest * 4
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * sigma
    noise = (round_to(x, FORMATS[fmt]) - x).double().square().mean().item()
    assert outliers.rounding_noise(FORMATS[fmt], sigma) == pytest.approx(noise, rel=0.1)


def test_int8_by_hand():
    """12.5 dB a factor: everything but a row of 1/256 keeps 52.9 dB less its crest; that row is
    gone beyond 254 sigma."""
    cast = outliers.casts()["int8"]
    assert outliers.hit_share(cast, (256, 512)) == 1 / 256
    assert (outliers.expected_db(cast, (256, 512), outlier=1e4)
            == pytest.approx(10 * math.log10(256), abs=0.1))


def test_smaller_blocks_are_hit_less():
    hit = [outliers.expected_db(Cast(format="int8", block=block), (256, 512), outlier=500.0)
           for block in ((0, 0), (1, 0), (1, 128), (1, 32))]
    assert hit == sorted(hit) and hit[-1] - hit[0] > 30


def test_the_picture_says_what_became_of_each():
    seen = outliers.look("int8", 1e4, 3, 5)
    assert seen["kinds"][3][5] == 3 and all(kind == 2 for i, kind in enumerate(seen["kinds"][3])
        if i != 5)
    assert sum(kind == 2 for line in seen["kinds"] for kind in line) < 0.05 * 32 * 128
    spec = outlier_map(**seen)
    (frame,) = spec["layout"]["shapes"]
    assert (frame["y0"], frame["y1"], frame["x0"], frame["x1"]) == (2.5, 3.5, -0.5, 127.5)
    assert outlier_figure([1.0], {"a": [2.0]}, [1.0], {"a": [2.1]})["data"][1]["y"] == [2.1]


# Masters and loss scaling.

def test_an_update_is_lost_below_half_a_gap():
    w = torch.tensor([1.0, 1.0, 0.02, 0.02])     # gaps above: 2^-7, 2^-7, 2^-13, 2^-13
    update = torch.tensor([2.0**-8.1, 2.0**-7.9, 2.0**-14.2, 2.0**-13.7])
    assert (mixed_precision.lost_share([w.bfloat16().float()], [w.bfloat16().float() + update])
            == 0.5)
    assert mixed_precision.lost_share([w], [w]) == 0     # no update is no loss


@pytest.mark.parametrize("update", [1e-6, 2e-5, 1e-4, 1e-3])
def test_lost_updates_by_formula(update):
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(100_000, generator=generator) * 0.02).bfloat16().float()
    moved = w + update * torch.randn(100_000, generator=generator)
    assert mixed_precision.expected_lost_share(update,
        sigma=0.02) == pytest.approx(mixed_precision.lost_share([w], [moved]), abs=0.02)


def test_adams_update_is_between_noise_and_its_learning_rate():
    p = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = torch.optim.Adam([p], lr=1e-3, betas=(0.9, 0.999))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        before = p.detach().clone()
        p.grad = torch.randn(20_000, generator=generator)
        optimizer.step()
    rms = (p.detach() - before).square().mean().sqrt().item()
    assert rms == pytest.approx(mixed_precision.noisy_update(1e-3), rel=0.05)


def test_stochastic_storing_keeps_the_mean_and_the_neighbours():
    torch.manual_seed(0)
    w = torch.full((200_000,), 1.0 + 2.0**-10)      # an eighth of the way to the next bf16
    stored = mixed_precision.STORES["bf16 weights, stochastic"](w)
    assert set(stored.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert (stored.mean().item() - 1) * 2**10 == pytest.approx(1, abs=0.05)
    assert torch.equal(mixed_precision.STORES["bf16 weights, stochastic"](stored), stored)


def test_underflow_from_exponents_alone():
    from lessons.l03_number_formats import exponent_shares

    g = [torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 1e-7]
    for scale in (2.0**-4, 1.0, 2.0**8):
        counted = (((g[0] * scale).half() == 0) & (g[0] != 0)).float().mean().item()
        assert mixed_precision.underflow(g, scale) == pytest.approx(counted)
        assert mixed_precision.expected_underflow(exponent_shares(g),
            scale) == pytest.approx(counted, abs=0.02)


def test_the_figures_of_mixed_precision():
    assert lost_figure([1e-4], {"noise": [0.5]}, {1e-4: 0.4})["data"][1]["y"] == [40.0]
    spec = scaling_view({-30: 0.25, -10: 0.75}, 2.0**-24, 65504.0)(0)
    assert "25.0%" in spec["layout"]["title"]["text"] and spec["data"][1]["x"] == [-30.0]
    assert "0.0%" in scaling_view({-30: 0.25, -10: 0.75}, 2.0**-24,
                                  65504.0)(16)["layout"]["title"]["text"]
