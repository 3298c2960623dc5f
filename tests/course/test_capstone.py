"""99: what the notebooks print is enough, folklore is not, and a trace agrees.

Only these tests catch: a question of the capstone that the printed formulas do not answer, that
folklore answers, or whose answer a trace contradicts, and a mark that reveals it.
"""

import ast
import inspect
import math
import re
from pathlib import Path

import nbformat
import pytest

from lessons import l99_predict_the_unseen as capstone
from lessons.l99_predict_the_unseen import QUESTIONS, draw, mark
from lpkit import predict_trace
from lpkit.predict.ledger import LOSS
from tests.course import by_hand

BOOKS = sorted(Path(__file__).parents[2].glob("notebooks/*.ipynb"))
CELLS = {cell.id: cell for path in BOOKS for cell in nbformat.read(path, as_version=4).cells}
SEEDS = range(20)
# a table's cell: what runs before it
BEFORE = {"memory-formula-1": ["memory-01", "memory-02"],
          "memory-formula-3": ["memory-01", "memory-02", "memory-formula-1"],
          "time-formula-1": ["time-01", "time-02", "time-02-sizes", "model = config.model"],
          "fp8-formula-2": ["fp8-01", "fp8-02", "fp8-02-sizes"],
          "rent-formula-1": ["rent-01", "rent-02"]}


def shown(cell: str) -> str:
    """The HTML that a code cell shows, executed."""
    space: dict = {}
    for name in BEFORE[cell]:
        # a kernel's
        exec((CELLS[name].source if name in CELLS else name).replace("\nbegin()", "\n"), space)
    *body, last = ast.parse(CELLS[cell].source).body
    exec(compile(ast.Module(body, []), cell, "exec"), space)
    return eval(compile(ast.Expression(last.value), cell, "eval"), space).data


@pytest.fixture(scope="module")
def reader():
    return by_hand.Reader({cell: shown(cell) for cell in BEFORE})


def test_the_formulas_are_printed_where_they_are_said_to_be():
    for cell, words in by_hand.FORMULAS:
        source = " ".join(CELLS[cell].source.split())
        assert " ".join(words.split()) in source, f"{cell} does not print {words}"
    assert len(by_hand.FORMULAS) > 25 and "lpkit" not in re.findall(r"^(?:import|from) (\w+)",
        inspect.getsource(by_hand), re.M)


def test_printed_formulas_alone_score_all(reader):
    for seed in SEEDS:
        score = mark(draw(seed), reader)
        assert score.right == len(QUESTIONS) == 11, (seed, str(score), {
            name: question.off(score.case, score.answers[name])
            for name, question in QUESTIONS.items()}, draw(seed).sheet)


def folklore(q: dict) -> dict[str, float]:
    """What one says without the notebooks: counted parameters, 16 bytes each, 6 N D, 40% MFU, the
    activations of Megatron's paper, FP8 at twice the rate, 6 dB a bit of mantissa."""
    tokens, mlp = q["B"] * q["T"], (2 if q["style"] == "gpt2" else 3) * q["D"] * q["F"]
    N = (q["L"] * (2 * q["D"] ** 2 + 2 * q["D"] * q["G"] * q["E"] + mlp) + q["V"] * q["D"]
         * (1 if q["tied"] else 2))
    kept = q["L"] * (34 * tokens * q["D"] + 5 * q["H"] * q["B"] * q["T"] ** 2)
    return {"parameters": N, "states": 16 * N, "activations": kept, "peak": 16 * N + kept,
            "flops": 6 * N * tokens,
            "seconds": 6 * N * tokens / (0.4 * q["bf16_flops"]), "gain": 2.0, "noise": 6.02 * 4}


def test_folklore_does_not_pass():
    scores = [mark(draw(seed), folklore) for seed in SEEDS]
    assert 0 < max(score.right for score in scores) <= 4, [str(score) for score in scores]


@pytest.mark.parametrize("seed", [2, 13, 15])
def test_a_trace_agrees_with_the_kits_answer(seed):
    case = draw(seed)
    assert predict_trace(case.config).peak_bytes == pytest.approx(QUESTIONS["peak"].answer(case),
        rel=1e-3)


def test_cases_are_drawn_by_seed_and_of_every_kind():
    cases = [draw(seed) for seed in range(60)]
    assert [case.sheet for case in cases] == [draw(seed).sheet for seed in range(60)]
    kinds = lambda name: {case.sheet[name] for case in cases}
    assert (kinds("style") == set(capstone.STYLES) and kinds("recipe") == set(capstone.FP8)
            and kinds("recompute") == {"none", "block"})
    assert (kinds("optimizer") == {"adamw", "lion", "momentum", "sgd"}
            and kinds("precision") == {"fp32", "bf16", *capstone.FP8})
    assert all(case.memory.peak_moment == LOSS for case in cases)
    assert (kinds("zero") == {0, 1, 3} and kinds("cast") == set(capstone.CASTS)
            and kinds("micro_batches") == {1, 2, 4})


def test_marks():
    case = draw(0)
    right = {name: question.answer(case) for name, question in QUESTIONS.items()}
    assert str(mark(case, lambda sheet: right)) == "11 of 11"
    for name, question in QUESTIONS.items():
        edge = (right[name] + question.tolerance if question.unit == "dB"
                else right[name] * (1 + question.tolerance))
        for factor, status in ((0.999, "right"), (1.01, "wrong")):
            answer = right[name] + (edge - right[name]) * factor
            score = mark(case, lambda sheet, answer=answer, name=name: {**right, name: answer})
            assert score.marks[name] == status, name
    for nothing in (None, ...):
        score = mark(case, lambda sheet, nothing=nothing: {**right, "peak": nothing})
        assert score.marks["peak"] == "to do" and score.right == 10
        page = score._repr_html_()
        assert (QUESTIONS["peak"].shown(right["peak"]) not in page
                and QUESTIONS["noise"].shown(right["noise"]) in page)


@pytest.mark.parametrize("answer", ["much", math.nan, math.inf, [1], 1j])
def test_what_is_no_number_is_wrong_and_not_an_error(answer):
    score = mark(draw(0), lambda sheet: {"parameters": answer})
    assert (score.marks["parameters"] == "wrong" and score.right == 0
            and "not a number" in score._repr_html_())


def test_an_attempt_that_raises_is_shown():
    def stub(sheet):
        raise NotImplementedError

    assert str(mark(draw(0), stub)) == "0 of 11: to do"
    score = mark(draw(0), lambda sheet: sheet["nothing"])
    assert "it raised KeyError: 'nothing'" in str(score) and "KeyError" in score._repr_html_()
    assert str(mark(draw(0), lambda sheet: None)).startswith("0 of 11: it raised TypeError")


def test_other_cases_by_the_same_function(reader):
    assert capstone.check(reader, range(3)) == "11.0 of 11 on average, 3 of 3 cases all right"
    assert re.fullmatch(r"\d\.\d of 11 on average, 0 of 3 cases all right; first missed: "
                        r"seed 5, \d of 11; not within tolerance: .*peak.*",
                        capstone.check(folklore, range(5, 8)))
