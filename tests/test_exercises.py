"""Every exercise: the definition passes, the known mistake is caught, an empty attempt is only "to do"."""

import math
from pathlib import Path

import pytest

from lpkit.course.exercises import EXERCISES, Exercise, Verdict, check
from lpkit.errors import ConfigError

BOOKS = {path.stem[:2]: path for path in Path(__file__).parents[1].glob("notebooks/*.ipynb")}


def stub(*args):
    raise NotImplementedError


@pytest.mark.parametrize("name", EXERCISES)
def test_exercise(name):
    exercise = EXERCISES[name]
    assert check(exercise, exercise.spec) == Verdict("right")
    assert check(exercise, exercise.mistake).status == "wrong"
    assert check(exercise, stub).status == "to do"


@pytest.mark.parametrize("name", EXERCISES)
def test_exercise_is_asked_in_its_notebook(name):
    book = BOOKS.get(name.split(".")[0])
    assert book is None or name in book.read_text(), f"{book.name} does not use EXERCISES[{name!r}]"


squares = Exercise(spec=lambda x: x * x, mistake=lambda x: 2 * x, cases=((2.0,), (3.0,)))


def test_the_first_case_that_fails_is_named():
    assert check(squares, lambda x: 2 * x) == Verdict("wrong", "for (3) expected 9, got 6")


@pytest.mark.parametrize("attempt, said", [
    (lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
    (lambda x, y: x, "TypeError"),
    (lambda x: None, "is there a `return`?"),
    (lambda x: "4", "got '4'"),
    (lambda x: x > 1, "got True"),
    (lambda x: math.nan, "got nan"),
    (lambda x: [4.0], "got [4.0]"),
])
def test_whatever_an_attempt_does_is_a_verdict(attempt, said):
    verdict = check(squares, attempt)
    assert verdict.status == "wrong" and said in verdict.detail


@pytest.mark.parametrize("want, right, wrong", [
    (1.0, 1.0 + 1e-9, 1.001),
    (0, 0.0, 1e-9),
    ([1, 2.0], (1.0, 2), [1, 2, 3]),
    ((1, (2, 3)), [1, [2, 3]], [1, [2, 4]]),
    ({"a": 1, "b": [2]}, {"b": (2,), "a": 1.0}, {"a": 1}),
    ({"a": 1}, {"a": 1}, {"a": 2}),
    ("ring", "ring", "tree"),
    (True, True, 1),
    (None, None, 0),
    (math.nan, math.nan, 0.0),
    (math.inf, math.inf, -math.inf),
])
def test_what_counts_as_the_same(want, right, wrong):
    exercise = Exercise(spec=lambda: want, mistake=lambda: wrong, cases=((),))
    assert check(exercise, lambda: right) == Verdict("right")
    assert check(exercise, exercise.mistake).status == "wrong"


def test_a_tensor_counts_as_its_numbers():
    torch = pytest.importorskip("torch")
    exercise = Exercise(spec=lambda n: torch.arange(n), mistake=lambda n: torch.zeros(n), cases=((3,),))
    assert check(exercise, lambda n: list(range(n))) == Verdict("right")
    assert check(exercise, exercise.mistake).detail == "for (3) expected 1 at [1], got 0"


def test_html_is_one_escaped_line():
    shown = check(squares, lambda x: "<script>")._repr_html_()
    assert "<script>" not in shown and "\n" not in shown and "#b91c1c" in shown


def test_an_exercise_without_cases_is_refused():
    with pytest.raises(ConfigError, match="at least one case"):
        Exercise(spec=abs, mistake=abs, cases=())
