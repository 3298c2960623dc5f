"""Guess, commit, reveal, score: what counts, what is hidden, and the file that keeps it over the
course.

Only these tests catch: a guess that counts after the result, an answer shown before every guess is
locked, and a learner's file that others can read, that two kernels overwrite, or that is lost when
it is damaged, newer or moved.
"""

import json
import math
import os
import random
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ipywidgets import HTML, Widget

from hosting import copies
from hosting.runner import without_widgets
from lessons import l20_optimizers
from lessons.figures.explorer import Explorer
from lessons.figures.figure import PLOTLY_MIME, WIDGET_MIME, plain
from lessons.judging import learner
from lessons.judging.index import RENAMED
from lessons.judging.judge import Exercise
from lessons.judging.learner import check
from lessons.judging.questions import TIED, Guess, Pick
from lessons.judging.your_progress import progress, progress_figure
from lessons.rivals import rivals
from lpkit.errors import ConfigError
from lpkit.predict.compare import Comparison, Row, off_by
from tests import NOTEBOOKS
from tests.lessons.judging.course import EXERCISES


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return learner.file()


def peak() -> Guess:
    return Guess("Peak memory?", unit="MB", low=1.0, high=1000.0)


ROW = Row(name="peak", formula=110e6, measured=100e6, unit="bytes", where="here")


def test_what_a_learner_did_is_for_nobody_else():
    before = os.umask(0o022)
    try:
        learner.file().parent.mkdir(parents=True)       # an older kit left it open
        assert not learner.update(lambda was: was.with_attempt("02.a", True))
        assert stat.S_IMODE(learner.file().parent.stat().st_mode) == 0o700
        copies.work_folder(None)
        assert stat.S_IMODE(learner.file().parent.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_two_people_in_one_account_have_two_files(mine, monkeypatch):
    first = keep_one("first")
    monkeypatch.setenv("LPKIT_LEARNER", "anna")
    assert not learner.read().guesses and keep_one("second") != first
    folder = copies.work_folder()
    assert folder == learner.file().parent.resolve() and "anna" in folder.parts
    monkeypatch.delenv("LPKIT_LEARNER")
    assert (learner.file() == mine
            and [guess.question for guess in learner.read().guesses] == ["first"])


def keep_one(question: str):
    guess = learner.keep("01.x", Guess(question, unit="MB", low=1.0, high=1000.0))
    guess.locked = True
    return learner.file()


@pytest.mark.parametrize("name", ["..", "a/b", ".hidden", "-x", "a" * 65, "a\nb"])
def test_a_learner_whose_name_is_no_files_is_refused(name, monkeypatch):
    monkeypatch.setenv("LPKIT_LEARNER", name)
    with pytest.raises(ConfigError, match="names no learner"):
        copies.work_folder()


# --- what counts

def test_only_what_was_locked_in_before_the_result_counts():
    untouched, moved, locked, late = (peak() for _ in range(4))
    for guess in (moved, locked, late):
        guess.value = 80.0
    locked.button.click()
    assert [guess.scored(ROW, 1e6).guess for guess in (untouched, moved, locked, late)] == [None,
        None, 80e6, None]
    late.button.click()
    assert (late.locked and late.answer is None and late.scored(ROW, 1e6) == ROW
            and "does not count" in late.status.value)
    assert locked.answer == 80.0 and all(control.disabled
        for control in (*locked.inputs, locked.button))
    assert locked.result == {"measured": 100.0, "held": True} and not late.result
    assert untouched.answer is None and not untouched.slider.disabled
    absent = peak()     # a result that is not there ends nothing
    absent.scored(Row(name="a", formula=None, measured=None, unit="bytes", where=""))
    assert not absent.late


@pytest.mark.parametrize("measured, held",
                         [(49.9, False), (50.0, True), (200.0, True), (200.1, False)])
def test_the_interval_goes_from_a_fraction_to_a_multiple(measured, held):
    guess = peak()
    guess.value, guess.factor = 100.0, 2.0
    assert guess.answer_text == "100 MB, 90% sure of 50 MB to 200 MB"
    guess.lock()
    row = guess.scored(Row(name="peak", formula=1.0, measured=measured, unit="MB", where=""))
    assert row.held is held and guess.result["held"] is held and guess.sure.value == 2.0
    assert ("inside your 90%" in Comparison((row,))._repr_html_()) is held


def test_an_error_is_in_its_own_unit():
    assert off_by(28.57, 31.5, "dB") == "-2.9 dB" and off_by(99.0, 99.9, "%") == "-0.9 points"
    assert off_by(2.5, 2.31, "nats") == "+0.19 nats" and off_by(3.0, 3.0, "dB") == "exact"
    assert off_by(1.3e9, 1e9, "bytes") == "+30.0%" and off_by(30.0, 10.0, "s") == "3 times too high"
    assert (off_by(1.0, 8.0, "days") == "8 times too low"
            and off_by(None, 1.0, "s") == off_by(1.0, None, "s") == "")
    assert off_by(0.0, 0.0, "s") == "exact" and off_by(1.0, 0.0, "s") == "nothing measured"
    held = Comparison((Row(name="noise", formula=30.0, measured=31.5, unit="dB", where="",
                           guess=40.0, guess_factor=1.5),))._repr_html_()
    assert "+8.5 dB, inside your 90%" in held and "-1.5 dB" in held
    # nothing can be measured: the formula is what a guess is held against
    assert (Row(name="days", formula=10.0, measured=None, unit="days", where="", guess=20.0).truth
            == 10.0)


def test_what_shares_the_first_place_cannot_be_told_apart():
    assert rivals({"a": 1.0, "b": 3.0, "c": 2.9, "d": -5.0}, within=0.1 + 1e-9) == ["b", "c"]
    assert (rivals({"a": 1.0, "b": 3.0}, within=0) == ["b"]
            and rivals({"a": 1.0, "b": 1.0}, within=0) == ["a", "b"])
    for best, chosen, right, text in [(["a", "b"], TIED, True, f"{TIED}: a, b (you said {TIED})"),
                                      (["a", "b"], "a", False, f"{TIED}: a, b (you said a)"),
                                      (["a"], TIED, False, f"a (you said {TIED})"),
                                      (["a"], "a", True, "a (you said a)")]:
        pick = Pick("Which?", ["a", "b", TIED])
        pick.lock()
        assert not pick.locked and pick.button.disabled      # nothing was chosen
        pick.buttons.value = chosen
        pick.button.click()
        assert pick.scored(best) == text and pick.result["held"] is right
    either = Pick("Which?", ["a", "b", "c"])
    either.value = "b"
    assert either.buttons.value == "b"
    either.lock()
    assert either.scored(["a", "b"]) == "a or b (you said b)" and either.result["held"]
    unlocked = Pick("Which?", ["a", "b"])
    assert unlocked.scored(["a"]) == "a" and unlocked.late
    with pytest.raises(ConfigError, match="at least one"):
        unlocked.scored([])
    with pytest.raises(ConfigError, match="at least one answer"):
        Pick("Which?", [])


# --- what is hidden

def shown(reveal) -> Widget:
    (child,) = reveal.children
    return child


def test_the_formula_is_hidden_until_every_guess_is_locked():
    first, second = peak(), Pick("Which?", ["a", "b"])
    reveal = first.reveal("31.5 <dB>", second)
    assert shown(reveal) is reveal.hidden
    first.lock()
    assert shown(reveal) is reveal.hidden
    second.value = "b"
    second.lock()
    assert shown(reveal).value == "<pre>31.5 &lt;dB&gt;</pre>"
    late = peak()       # and a result does not show it
    reveal = late.reveal("text")
    late.scored(ROW)
    assert shown(reveal) is reveal.hidden and late.late


def test_whoever_asks_for_it_sees_it_and_makes_a_guess_that_does_not_count():
    locked, guess = peak(), peak()
    locked.lock()
    reveals = [guess.reveal("text", locked), guess.reveal(Comparison((ROW,)))]
    reveals[0].button.click()
    assert (all(shown(reveal) is not reveal.hidden for reveal in reveals)
            and "110 MB" in shown(reveals[1]).value)
    guess.lock()
    assert guess.answer is None and locked.answer is not None


def test_where_nothing_is_live_the_content_is_the_output():
    explorer = Explorer(lambda x: {"data": [{"y": [x]}], "layout": {"title": "drawn"}}, x=[1, 2])
    for content, mime, text in [("31.5 <dB>", "text/html", "31.5 &lt;dB&gt;"),
                                (Comparison((ROW,)), "text/html", "110 MB"),
                                (explorer, PLOTLY_MIME, "drawn")]:
        data = peak().reveal(content)._repr_mimebundle_()
        assert WIDGET_MIME in data and text in json.dumps(data[mime])
        book = {"metadata": {}, "cells": [{"outputs": [{"data": data}]}]}
        (output,) = without_widgets(book)["cells"][0]["outputs"]
        assert WIDGET_MIME not in output["data"] and text in json.dumps(output["data"])
    assert peak().reveal(guess := HTML("seen")).content is guess
    assert peak()._repr_mimebundle_()["text/plain"] == "Peak memory?"


# --- the learner's file

def test_a_locked_guess_and_its_score_are_kept(mine):
    guess = learner.keep("01.peak", peak())
    guess.value, guess.factor = 80.0, 1.25
    assert not mine.exists()        # a slider that moves is no guess
    guess.button.click()
    (kept,) = learner.read().guesses
    assert (kept.name, kept.question, kept.value, kept.unit, kept.factor,
            kept.measured) == ("01.peak", "Peak memory?", 80.0, "MB", 1.25, None)
    guess.scored(ROW, 1e6)
    (kept,) = learner.read().guesses
    assert (kept.measured, kept.held) == (100.0, True)
    again = learner.keep("01.peak", peak())     # another kernel, another day
    assert (again.locked and again.answer == 80.0 and again.factor == 1.25
            and kept.date in again.status.value)
    again.scored(Row(name="peak", formula=1.0, measured=500e6, unit="bytes", where=""), 1e6)
    assert learner.read().guesses == (kept,)    # the first score counts
    assert not learner.keep("01.peak", Guess("Of another model?", unit="MB", low=1, high=10)).locked


def test_what_is_late_or_never_locked_is_not_kept(mine):
    for end in (lambda guess: guess.scored(ROW, 1e6), lambda guess: guess.waive()):
        guess = learner.keep("01.peak", peak())
        end(guess)
        guess.lock()
        guess.scored(ROW, 1e6)
    assert not mine.exists()


def test_an_answer_that_is_none_of_these_is_not_restored():
    first = learner.keep("06.worst", Pick("Which?", ["a", "b"]))
    first.value = "b"
    first.lock()
    assert learner.keep("06.worst", Pick("Which?", ["a", "b"])).answer == "b"
    changed = learner.keep("06.worst", Pick("Which?", ["a", "c"]))
    assert not changed.locked and changed.value is None
    assert not learner.keep("06.worst", Guess("Which?", unit="", low=1, high=2)).locked


def test_exercises_are_kept_unless_they_are_still_to_do(mine):
    exercise = EXERCISES["00.uniform_loss"]

    def stub(vocab):
        raise NotImplementedError

    check(exercise, stub)
    check(Exercise(spec=lambda x: x, cases=((1,),)), abs)     # one that has no name
    assert not mine.exists()
    assert check(exercise, math.log2).status == "wrong"
    kept = learner.read().exercises["00.uniform_loss"]
    assert (kept.right, kept.attempts, kept.first_right) == (False, 1, None)
    for _ in range(3):
        check(exercise, math.log)
    kept = learner.read().exercises["00.uniform_loss"]
    assert (kept.right, kept.attempts) == (True, 2) and kept.first_right
    check(exercise, math.log2)
    assert learner.read().exercises["00.uniform_loss"] == learner.Tried(right=False, attempts=3,
        first_right=kept.first_right)
    assert set(EXERCISES) == {exercise.name for exercise in EXERCISES.values()}


def test_what_moved_to_another_notebook_keeps_its_attempts_and_guesses(mine):
    """Notebooks 20 and 21 were divided; copies of them from before call exercises by the former
    names."""
    update, exercises = learner.update, {"21.mup_rate": learner.Tried(right=True, attempts=2,
        first_right="2026-01-01"),
                                         "20.orthogonalised": learner.Tried(right=False,
                                             attempts=1)}
    guess = learner.Answered(name="21.saved", question="How much?", value=30.0, unit="%",
                             date="2026-01-01")
    assert update(lambda _: learner.Learner((guess,), exercises)) == ""
    stored = learner.read()
    assert stored.exercises == {"27.mup_rate": exercises["21.mup_rate"],
                                "20.orthogonalised": exercises["20.orthogonalised"]}
    assert (stored.guess("28.saved", "How much?").value == 30.0
            and stored.guess("21.saved", "How much?") is None)
    update(lambda state: state.with_attempt("27.mup_rate", False))
    assert learner.read().exercises["27.mup_rate"] == learner.Tried(right=False, attempts=3,
        first_right="2026-01-01")
    assert set(RENAMED.values()) - EXERCISES.keys() == {"26.muon",
        "28.saved"}, "two of them are guesses"
    with pytest.raises(ConfigError,
                       match=r"no exercise '20.overhead' any more; it is '26.overhead' now, in "
                             r"notebook 26"):
        l20_optimizers.EXERCISES["20.overhead"]
    with pytest.raises(ConfigError,
                       match=r"no exercise '20.orthogonalised' any more; it has 20.adamw, "
                             r"20.lion, 20.factored"):
        l20_optimizers.EXERCISES["20.orthogonalised"]


def test_several_kernels_write_at_once():
    code = (f"import sys; sys.path.append({NOTEBOOKS!r}); from lessons.judging import learner\n"
            f"print([learner.update(lambda mine: mine.with_attempt(f'{{sys.argv[1]}}.{{i}}', "
            f"right=True)) for i in range(20)])")
    kernels = [subprocess.Popen([sys.executable, "-c", code, str(n)], stdout=subprocess.PIPE,
                                text=True) for n in range(2)]
    assert [kernel.communicate()[0] for kernel in kernels] == [f"{[''] * 20}\n"] * 2
    assert len(learner.read().exercises) == 40


def whole() -> str:
    guess = learner.keep("01.peak", peak())
    guess.lock()
    guess.scored(ROW, 1e6)
    check(EXERCISES["00.uniform_loss"], math.log)
    return learner.file().read_text()


def test_a_damaged_file_is_moved_aside_and_never_lost(mine):
    text, rng = whole(), random.Random(0)
    contents = json.loads(text)
    wrong = [contents | {"exercises": {"a": 1}}, contents | {"guesses": [{"name": "a"}]},
             contents | {"guesses": {"a": 1}}, contents | {"format": "other"}, [],
             contents | {"guesses": [contents["guesses"][0] | {"value": [1]}]},
             contents | {"exercises": {"a": {"right": True, "attempts": -1}}}]
    cut = [text[:rng.randrange(len(text) - 2)] for _ in range(8)]
    for i, content in enumerate([*map(json.dumps, wrong), *cut, "[" * 100_000, "\x00"]):
        mine.write_text(content)
        with pytest.raises(ConfigError, match="holds no learner's guesses"):
            learner.read()
        guess = learner.keep("01.peak", peak())
        # reading writes nothing
        assert (not guess.locked and "holds no learner's guesses" in guess.note
                and mine.read_text() == content)
        guess.lock()
        assert "The file is now in" in guess.note and len(learner.read().guesses) == 1
        aside = list((mine.parent / "damaged").iterdir())
        assert len(aside) == i + 1 and content in [path.read_text() for path in aside]


def test_a_newer_file_is_left_alone(mine):
    newer = json.dumps({"format": learner.FORMAT, "version": 2, "anything": []})
    whole()
    mine.write_text(newer)
    guess = learner.keep("01.peak", peak())
    guess.lock()
    assert "newer lpkit" in guess.note and guess.answer is not None and mine.read_text() == newer
    verdict = check(EXERCISES["00.uniform_loss"], math.log)
    assert verdict.status == "right" and "newer lpkit" in verdict.detail


def test_where_nothing_can_be_written_it_says_so(mine):
    mine.parent.parent.mkdir(parents=True)
    mine.parent.write_text("a file where the folder should be")
    guess = learner.keep("01.peak", peak())
    guess.lock()
    assert guess.note.startswith("Not kept: ") and guess.answer is not None
    assert check(EXERCISES["00.uniform_loss"], math.log).detail.startswith("Not kept: ")


# --- progress

def test_progress_counts_by_notebook():
    whole()
    check(EXERCISES["03.stochastic"], lambda x, step, u: x)
    spec = progress(EXERCISES).spec
    bars = {trace["name"]: dict(zip(trace["y"], trace["x"])) for trace in spec["data"]
            if trace["type"] == "bar"}
    assert (bars["right"]["00"], bars["wrong so far"]["03"], sum(bars["right"].values())) == (1, 1,
        1)
    assert all(sum(bars[kind][book] for kind in bars)
               == sum(name.startswith(book) for name in EXERCISES) for book in bars["right"])
    (text,) = [trace["text"] for trace in spec["data"] if trace["name"] == "to do"]
    assert (text[0] == f"1 of {sum(name.startswith('00') for name in EXERCISES)}, guesses: 0"
            and text[1].endswith("guesses: 1"))
    (held,) = [trace for trace in spec["data"] if trace["name"] == "did not hold"]
    assert held["y"] == ["01.peak"] and held["x"] == pytest.approx([100 / 1.0])


def test_the_calibration_says_how_many_intervals_hold():
    scored = [SimpleNamespace(name=f"0{i}.<x>", value=10.0, factor=2.0, measured=10 * ratio,
                              held=held) for i, (ratio, held) in
              enumerate([(1.1, True), (3.0, False), (0.0, False), (0.6, True), (1e9, False)])]
    spec = plain(progress_figure({"00": 1}, {}, {"00": 3}, {"00": 5}, scored))
    assert "your 90% intervals hold 40% of 5" in json.dumps(spec) and "<x>" not in json.dumps(spec)
    (off,) = [trace for trace in spec["data"] if trace["name"] == "did not hold"]
    assert off["x"] == [3.0, 0.01, 100.0]
    nothing = json.dumps(plain(progress_figure({}, {}, {"00": 3}, {}, [])))
    assert "appear here" in nothing and "0 of 3, guesses: 0" in nothing
