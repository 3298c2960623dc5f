"""Sums that keep few bits, beside the same in exact fractions, and the formula for what they lose
beside what they do."""

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
    lost_sums_figure,
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
        terms = [inside, *(Fraction(x) * Fraction(y) for x, y in zip(a[start:start + step],
            b[start:start + step]))]
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


@pytest.mark.parametrize("bits, promote_every", [(14, None), (14, 64), (5, None), (22, 32)])
def test_it_is_the_description_in_exact_fractions(bits, promote_every):
    a, b = operands(160, rows=3)
    got = accumulate(a, b, bits=bits, promote_every=promote_every)
    for i in range(3):
        for j in range(3):
            assert Fraction(got[i, j].item()) == by_fractions(a[i].tolist(), b[j].tolist(), bits,
                32, promote_every)


def test_with_enough_bits_it_is_the_exact_product():
    a, b = operands(512)
    assert torch.equal(accumulate(a, b, bits=40), a.double() @ b.double().T)


@pytest.mark.parametrize("K", [256, 4096])
@pytest.mark.parametrize("change", [lambda t: t, torch.abs, torch.nn.functional.gelu,
                                    lambda t: t + 0.3])
@pytest.mark.parametrize("promote_every", [None, 128])
def test_the_formula_says_what_is_lost(K, change, promote_every):
    """Within 45 percent, over three decades of it: it takes the products of a row as independent,
    and one unit as typical."""
    a, b = operands(K, change, rows=32)
    said, found = (f(a, b) for f in (lambda a, b: expected_error(a, b, promote_every=promote_every),
                                     lambda a, b: relative_error(accumulate(a, b,
                                         promote_every=promote_every), a, b)))
    assert 0.55 < said / found < 1.45, f"{said:.2g} for {found:.2g}"


def test_promotion_helps_where_products_have_one_sign():
    a, b = operands(4096, torch.abs)
    assert (relative_error(accumulate(a, b), a, b) > 50
            * relative_error(accumulate(a, b, promote_every=128), a, b))


@pytest.mark.parametrize("wrong, says", [({"promote_every": 48}, "no multiple of the 32"),
    ({"bits": 1}, "bits=1")])
def test_what_makes_no_sense_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        accumulate(*operands(64), **wrong)


def test_drawn_operands_are_cast_and_the_same_each_time():
    wide, codes = gaussian(512, torch.abs)
    for x, cast, again in zip(wide, codes, gaussian(512, torch.abs)[1]):
        assert torch.equal(cast, again) and torch.equal(cast, cast.to(torch.float8_e4m3fn).float())
        assert (x.min() >= 0 and x.max() == 448
                and ((x - cast).abs() <= torch.maximum(x / 16, torch.tensor(2.0**-10))).all())


def test_a_sum_is_drawn_in_pieces_that_share_their_scales():
    names = ("fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4")
    spec = sums_figure({name: RECIPES[name] for name in names}, products=256, title="t")
    go.Figure(plain(spec), skip_invalid=False)
    pieces = {name: [] for name in names}
    for bar in spec["data"]:
        for name, start, length in zip(bar["y"], bar["base"], bar["x"]):
            pieces[name].append((start, start + length, bar["name"]))
    assert {name: len(ends) for name, ends in pieces.items()} == dict(zip(names, (1, 1, 2, 8, 16)))
    for ends in pieces.values():
        assert (ends[0][0] == 0 and ends[-1][1] == 256
                and all(a[1] == b[0] for a, b in itertools.pairwise(ends)))
    assert [pieces[name][0][2].split()[-1] for name in names] == ["sum", "sum", "cores", "core",
        "core"]
    assert [bar["text"][-1] for bar in spec["data"]] == ["1", "2", "16"]


def test_lines_are_the_formula_and_marks_what_was_found():
    spec = lost_sums_figure({"left": {"14 bits": ({128: 0.1, 256: 0.2}, {128: 0.11, 256: 0.19}),
                                      "casts": ({}, {128: 0.04, 256: 0.03})}}, title="t")
    go.Figure(plain(spec), skip_invalid=False)
    line, marks, casts = spec["data"]
    assert (line["mode"] == "lines" and line["y"] == [0.1, 0.2] and marks["mode"] == "markers"
            and marks["y"] == [0.11, 0.19])
    assert line["line"]["color"] == marks["marker"]["color"] and casts["mode"] == "lines+markers"
    assert [one["showlegend"] for one in spec["data"]] == [False, True, True]
