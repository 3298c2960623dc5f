"""Only these tests catch sums that keep few bits and are not those of exact fractions, and a
formula that does not say what they lose."""

import itertools
from fractions import Fraction

import plotly.graph_objects as go
import pytest
import torch

from lessons.figures.figure import plain
from lessons.l11_fp8_matmul import (
    accumulate,
    expected_error,
    gaussian,
    relative_error,
    sums_figure,
)
from lpkit.errors import ConfigError
from lpkit.techniques.recipes import RECIPES


def operands(K, change=lambda t: t, rows=8):
    rng = torch.Generator().manual_seed(K)
    both = (change(torch.randn(rows, K, generator=rng)) for _ in range(2))
    return tuple((t / t.abs().max() * 448).to(torch.float8_e4m3fn).float() for t in both)


def by_fractions(a, b, bits, step, promote_every):
    """The description, word by word, in exact arithmetic."""
    outside, inside = torch.tensor(0.0), Fraction(0)
    for start in range(0, len(a), step):
        terms = [inside, *(Fraction(x) * Fraction(y)
                           for x, y in zip(a[start:start + step], b[start:start + step]))]
        largest = max(map(abs, terms))
        power = Fraction(1)
        while power > largest > 0:
            power /= 2
        while power * 2 <= largest:
            power *= 2
        unit = power / 2**(bits - 1)
        inside = sum(int(t / unit) * unit for t in terms)       # int() cuts towards 0
        if promote_every and (start + step) % promote_every == 0:
            outside, inside = outside + torch.tensor(float(inside)), Fraction(0)
    return Fraction(outside.item()) + inside


@pytest.mark.parametrize("bits, promote_every", [(14, 64), (5, None), (22, 32)])
def test_it_is_the_description_in_exact_fractions(bits, promote_every):
    a, b = operands(160, rows=3)
    got = accumulate(a, b, bits=bits, promote_every=promote_every)
    for i, j in itertools.product(range(3), repeat=2):
        due = by_fractions(a[i].tolist(), b[j].tolist(), bits, 32, promote_every)
        assert Fraction(got[i, j].item()) == due


def test_with_enough_bits_it_is_the_exact_product():
    a, b = operands(512)
    assert torch.equal(accumulate(a, b, bits=40), a.double() @ b.double().T)


@pytest.mark.parametrize("K, change, promote_every", [
    (256, lambda t: t, None), (4096, torch.abs, None), (4096, torch.nn.functional.gelu, 128),
    (256, torch.abs, 128), (4096, lambda t: t + 0.3, 128)])
def test_the_formula_says_what_is_lost(K, change, promote_every):
    """Within 45 percent, over three decades of it: it takes the products of a row as independent,
    and one unit as typical."""
    a, b = operands(K, change, rows=32)
    expected = expected_error(a, b, promote_every=promote_every)
    lost = relative_error(accumulate(a, b, promote_every=promote_every), a, b)
    assert 0.55 < expected / lost < 1.45, f"{expected:.2g} for {lost:.2g}"


def test_promotion_helps_where_products_have_one_sign():
    a, b = operands(4096, torch.abs)
    plain, promoted = (relative_error(accumulate(a, b, promote_every=n), a, b) for n in (None, 128))
    assert plain > 50 * promoted


@pytest.mark.parametrize("wrong, says", [
    ({"promote_every": 48}, "must be a multiple of step=32"), ({"bits": 1}, "bits=1")])
def test_what_makes_no_sense_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        accumulate(*operands(64), **wrong)


def test_drawn_operands_are_cast_and_the_same_each_time():
    wide, codes = gaussian(512, torch.abs)
    for x, cast, again in zip(wide, codes, gaussian(512, torch.abs)[1]):
        assert torch.equal(cast, again) and torch.equal(cast, cast.to(torch.float8_e4m3fn).float())
        assert x.min() >= 0 and x.max() == 448
        assert ((x - cast).abs() <= torch.maximum(x / 16, torch.tensor(2.0**-10))).all()


def test_a_sum_is_drawn_in_pieces_that_share_their_scales():
    names = ("fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4")
    spec = sums_figure({name: RECIPES[name] for name in names}, products=256, title="t")
    go.Figure(plain(spec), skip_invalid=False)
    pieces = {name: [] for name in names}
    for bar in spec["data"]:
        for name, start, length in zip(bar["y"], bar["base"], bar["x"]):
            pieces[name].append((start, start + length, bar["name"]))
    assert [len(pieces[name]) for name in names] == [1, 1, 2, 8, 16]
    for ends in pieces.values():
        assert ends[0][0] == 0 and ends[-1][1] == 256
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert [pieces[name][0][2].split()[-1] for name in names] == [
        "sum", "sum", "cores", "core", "core"]
