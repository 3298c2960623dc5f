"""Answers that learners write to the exercises of notebooks 16 on: every drawn mistake is caught,
every right form is accepted. Only this file says that the judge limits what exercises 16.nats and
22.mean send and hold, and that no exercise is tied to the form of its definition."""

import pytest

from lessons.judging import judge, learner
from tests.lessons.judging.course import EXERCISES, ON_RANKS
from tests.lessons.judging.drawn_answers import KINDS, MISTAKES, RIGHT_FORMS, drawn_kinds
from tests.lessons.judging.mutants import on_threads

pytestmark = pytest.mark.slow
OWN = {one.spec.__name__: one for name, one in EXERCISES.items() if name[:2] >= "16"
       and name[:2] not in ("25", "99")}


def verdict(exercise, attempt):
    """In this process, which is quick; ranks are threads."""
    if exercise.name in ON_RANKS:
        why = on_threads(exercise, attempt)
        return judge.Verdict("wrong" if why else "right", "; ".join(why))
    return judge.check(exercise, attempt)


def test_each_exercise_has_answers_of_the_drawn_kinds():
    assert OWN.keys() == KINDS.keys() == MISTAKES.keys() == RIGHT_FORMS.keys()
    assert all(set(kinds) <= set(MISTAKES[name]) for name, kinds in drawn_kinds().items())


def test_every_drawn_mistake_is_caught(capsys):
    found = {f"{name}, {kind}": verdict(OWN[name], attempt) for name in OWN
             for kind, attempt in MISTAKES[name].items()}
    passed = [name for name, one in found.items() if one.status != "wrong"]
    with capsys.disabled():
        print(f"\n{len(found)} mistakes: {len(found) - len(passed)} caught")
    assert len(found) >= 60 and not passed
    for name, one in found.items():
        kind = name.partition(", ")[2].partition(",")[0]
        if said := {"in place": "it changes its argument", "forbidden size": "the limit"}.get(kind):
            assert said in one.detail, name


def test_every_right_form_is_accepted(capsys):
    found = {f"{name}, {i}": verdict(OWN[name], attempt) for name in OWN
             for i, attempt in enumerate(RIGHT_FORMS[name])}
    refused = [(name, one.detail) for name, one in found.items() if one.status != "right"]
    with capsys.disabled():
        print(f"\n{len(found)} right answers: {len(found) - len(refused)} accepted")
    assert len(found) >= 40 and not refused


@pytest.mark.usefixtures("judged_on_ranks")
@pytest.mark.parametrize("name, kind, said", [
    ("running_mean", "forbidden size",
     "its tensors take 2.10 MB at once, and 262 kB are the limit"),
    ("running_mean", "forbidden size, of NumPy", "its arrays and lists take"),
    ("running_mean", "axis", "expected"),
    ("zero_queries", "in place",
     "it changes its argument `w`: change a copy (`w.clone()`) instead"),
    ("nats", "forbidden size", "a rank sends 8 numbers, and 4 are the limit"),
    ("nats", "forbidden size, one by one", "a rank sends 8 numbers, and 4 are the limit"),
])
def test_the_learner_s_own_judge_says_the_same(name, kind, said):
    """Where an attempt runs in a process of its own, and ranks are processes."""
    found = learner.check(OWN[name], MISTAKES[name][kind])
    assert found.status == "wrong" and said in found.detail


@pytest.mark.usefixtures("judged_on_ranks")
@pytest.mark.parametrize("name", ["running_mean", "zero_queries", "nats"])
def test_a_right_form_passes_there(name):
    assert learner.check(OWN[name], RIGHT_FORMS[name][0]).status == "right"
