"""Who sees a solution, and when: LPKIT_SOLUTIONS, for every kind of exercise by one way.

Only these tests catch: a solution that is shown before the teacher's word allows it, or held from
somebody who cannot try.
"""

import pytest

from lessons.judging import learner, puzzles
from lessons.judging.judge import Exercise
from lessons.judging.learner import check
from lessons.judging.solutions import shown_when
from lpkit.cli import main
from lpkit.errors import ConfigError
from tests.lessons.judging.course import EXERCISES


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("LPKIT_SOLUTIONS", raising=False)


def stub(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    raise NotImplementedError


def wrong(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    return 0.5


def seen(attempt) -> bool:
    exercise = EXERCISES["03.value_of"]
    shown = check(exercise, attempt)
    assert bool(shown.solution) != bool(shown.held)     # one or the other, and always one
    assert ("<pre>def value_of" in shown._repr_html_()) == bool(shown.solution)
    assert ("A solution is shown after" in shown._repr_html_()) == bool(shown.held)
    return bool(shown.solution)


@pytest.mark.parametrize("word, stays",
                         [("always", (True,) * 5), ("attempted", (False, True, True, True, True)),
                                         ("solved", (False, False, False, True, True)),
                                         (None, (False, True, True, True, True))])
def test_a_solution_waits_for_what_the_teacher_says(word, stays, monkeypatch):
    if word:
        monkeypatch.setenv("LPKIT_SOLUTIONS", word)
    right = EXERCISES["03.value_of"].spec
    # the last: solved once, and it was broken again
    assert tuple(map(seen, (stub, wrong, stub, right, wrong))) == stays


def test_another_learner_and_another_exercise_have_not_tried(monkeypatch):
    assert not seen(stub) and seen(wrong) and seen(stub)
    other = EXERCISES["03.stochastic"]
    assert check(other, stub).held
    monkeypatch.setenv("LPKIT_LEARNER", "anna")
    assert not seen(stub)


@pytest.mark.parametrize("name", ["10.copy", "14.all_reduce"])
def test_kernels_and_ranks_take_the_same_way(name):
    exercise = EXERCISES.get(name) or next(candidate for candidate in EXERCISES.values()
        if type(candidate).__name__ == "OnRanks")
    assert check(exercise, stub).held
    learner.update(lambda was: was.with_attempt(exercise.name, False))
    assert exercise.solution == check(exercise, stub).solution


def test_where_nobody_can_try_nobody_waits(monkeypatch):
    monkeypatch.setattr(puzzles, "versions", lambda names: {"triton": None})
    monkeypatch.setattr(puzzles, "defects", lambda: ["there is no Triton here"])

    def copy(x_ptr, y_ptr):
        x_ptr + y_ptr

    assert check(EXERCISES["10.copy"], copy).solution


def test_an_unknown_word_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LPKIT_SOLUTIONS", "atempted")
    with pytest.raises(ConfigError, match=r"'atempted'.*did you mean 'attempted'"):
        shown_when()
    shown = check(EXERCISES["03.value_of"], wrong)
    # judged all the same
    assert shown.status == "wrong" and not shown.solution and "atempted" in shown.held
    assert main(["lab", "--course", str(tmp_path / "course")]) == 2
    assert ("did you mean 'attempted'" in capsys.readouterr().err
            and not (tmp_path / "course").exists())


def test_a_damaged_file_is_no_key():
    check(EXERCISES["03.value_of"], wrong)
    learner.file().write_text("{")
    assert check(EXERCISES["03.value_of"], stub).held


def test_an_exercise_of_ones_own_shows_by_its_verdict():
    def double(x):
        return 2 * x

    assert check(Exercise(spec=double, cases=((1,),)), double).solution
