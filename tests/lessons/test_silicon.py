"""Systolic arrays of lesson 30: the formulas, the simulator and SCALE-Sim's record agree, and bad
input gets a sentence.

Only these tests catch: a simulator that counts as a formula does instead of by its registers, a
record of other products, words that are counted wrong, and a size of 0 that raises something else.
"""

import itertools
import math
import re

import pytest
import torch

from lessons import l30_silicon as lesson
from lessons.l30_silicon import Array, simulate
from lpkit.errors import ConfigError


def test_36_products_take_the_cycles_of_formula_and_record():
    results, recorded = lesson.checked(), lesson.scale_sim()
    assert results.keys() == recorded.keys() and len(results) == 36
    for (array, shape), result in results.items():
        assert result.cycles == array.cycles(*shape) == recorded[array, shape], (array, shape)
        assert result.words == array.words(*shape) and sum(result.busy) == math.prod(shape)
        assert max(result.busy) <= array.rows * array.columns


@pytest.mark.parametrize("dataflow", lesson.DATAFLOWS)
def test_any_array_multiplies_right(dataflow):
    draw = torch.Generator().manual_seed(1)
    for R, C, M, N, K in ((1, 1, 1, 1, 1), (1, 5, 3, 2, 4), (6, 2, 7, 1, 1), (9, 9, 2, 3, 4)):
        a, b = lesson.whole(M, K, draw, 0.5), lesson.whole(K, N, draw, 0.5)
        result = simulate(Array(R, C, dataflow), a, b)
        assert torch.equal(result.product, a @ b)
        assert result.cycles == Array(R, C, dataflow).cycles(M, N, K)
        assert sum(result.busy) == int((a != 0).double().T.sum(1) @ (b != 0).double().sum(1))


def test_buffers_by_steps_and_by_formula():
    for case in itertools.product((1, 2, 7), (1, 3, 8), (1, 4, 8), (1, 2, 3)):
        assert lesson.buffered(*case) == lesson.buffered_formula(*case), case


def test_the_slowest_column_is_that_of_draws():
    draw = torch.Generator().manual_seed(0)
    counts = (torch.rand(4000, 8, 50, generator=draw) < 0.1).sum(2).amax(1).double()
    assert lesson.slowest(50, 0.1, 8) == pytest.approx(counts.mean().item(), rel=0.01)
    assert lesson.slowest(50, 0.1, 1) == pytest.approx(5)
    weights = lesson.whole(50, 8, draw, 0.1)
    assert lesson.skipped_cycles(weights, 8) == int((weights != 0).sum(0).max())


@pytest.mark.parametrize("call, words", [
    (lambda: Array(0, 8), "rows of an array must be a whole number of at least 1, got 0"),
    (lambda: Array(8, 2.5), "columns of an array must be a whole number of at least 1, got 2.5"),
    (lambda: Array(8, 8, "outputs"), "there is no dataflow 'outputs'; did you mean 'output'?"),
    (lambda: Array(8, 8).cycles(4, 0, 4), "N of a product"),
    (lambda: simulate(Array(2, 2), torch.ones(2, 3), torch.ones(2, 3)), "a product needs"),
    (lambda: simulate(Array(2, 2), torch.ones(0, 3), torch.ones(3, 2)), "a product needs"),
    (lambda: lesson.buffered(1, 1, 1, 0), "buffers of buffered folds must be"),
    (lambda: lesson.aspects(48, "weight"), "must be a power of two, got 48"),
    (lambda: lesson.read_pj("2 MB", 64), "there is no memory level '2 MB'"),
    (lambda: lesson.energy(Array(2, 2), (1, 1, 1), "fp64"), "there is no format 'fp64'")])
def test_bad_input_gets_a_sentence(call, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        call()
