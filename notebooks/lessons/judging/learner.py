"""A learner's results over the course: guesses, their scores, exercises. They are in one file per
person and machine, which is written only when a guess is locked or scored, or when an exercise is
judged and not "to do". Several kernels may write the file."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from traitlets import TraitError

from lessons.judging.index import RENAMED
from lessons.judging.judge import Exercise, Verdict
from lessons.judging.questions import Question
from lessons.judging.solutions import WHEN, shown_when
from lessons.reports import report
from lpkit.errors import ConfigError, DamagedError, named
from lpkit.files import data_dir, locked, move_into, own_folder, read_text, write_atomically
from lpkit.values import Checked, Count, Positive, Text

FORMAT, VERSION = "lpkit-learner", 1
MOST_BYTES = 1 << 24
Asked = TypeVar("Asked", bound=Question)


@dataclass(frozen=True, kw_only=True)
class Answered(Checked):
    """A locked guess. `name` is `notebook.what`; if the question changes, it is a new guess."""

    name: Text
    question: Text
    value: float | str
    unit: str = ""
    factor: Positive | None = None      # of the 90% interval
    date: Text
    measured: float | str | None = None
    held: bool | None = None            # whether the interval held, or the answer was right


@dataclass(frozen=True, kw_only=True)
class Tried(Checked):
    """An attempted exercise."""

    right: bool
    attempts: Count
    first_right: Text | None = None     # date of the first right answer


@dataclass(frozen=True)
class Learner:
    """The contents of a learner's file: guesses in the order of their locks, exercises by name."""

    guesses: tuple[Answered, ...] = ()
    exercises: Mapping[str, Tried] = field(default_factory=dict)

    def guess(self, name: str, question: str) -> Answered | None:
        return next((guess for guess in self.guesses
                     if (guess.name, guess.question) == (name, question)), None)

    def with_guess(self, guess: Answered) -> "Learner":
        """Return a learner in which `guess` replaces the guess with its name and question."""
        others = tuple(other for other in self.guesses
                       if (other.name, other.question) != (guess.name, guess.question))
        return replace(self, guesses=(*others, guess))

    def with_attempt(self, name: str, right: bool) -> "Learner":
        """Return a learner with this attempt. Further attempts after a right one change nothing."""
        old = self.exercises.get(name)
        if old and old.right and right:
            return self
        first = (old and old.first_right) or (date.today().isoformat() if right else None)
        tried = Tried(right=right, attempts=(old.attempts if old else 0) + 1, first_right=first)
        return replace(self, exercises={**self.exercises, name: tried})


def check(exercise: Exercise, attempt: Callable[..., Any]) -> Verdict:
    """Return the judge's verdict and writes it to the learner's file, unless the exercise is still
    to do."""
    verdict = exercise.judged(attempt)
    if not exercise.name or verdict.status == "to do":
        return held_back(exercise, verdict)
    message = update(lambda learner: learner.with_attempt(exercise.name, verdict.status == "right"))
    report("exercise", name=exercise.name, verdict=verdict.status)
    verdict = replace(verdict, detail=" ".join(filter(None, (verdict.detail, message))))
    return held_back(exercise, verdict)


def held_back(exercise: Exercise, verdict: Verdict) -> Verdict:
    """Return the verdict without its solution unless `LPKIT_SOLUTIONS` allows this learner to see
    it, because of this verdict or an earlier one in the learner's file. If this machine cannot
    judge the attempt, the solution is shown."""
    try:
        word = shown_when()
        tried = None
        with suppress(ConfigError):     # `update` reports a file that cannot be read
            tried = read().exercises.get(exercise.name)
        if verdict.untried or SEEN[word](verdict.status, tried):
            return verdict
        why = f"A solution is shown after {WHEN[word]}."
    except ConfigError as error:
        why = str(error)
    return replace(verdict, solution="", held=why)


# by setting of LPKIT_SOLUTIONS: whether a solution is shown, given the status of this verdict and
# the exercise's entry in the learner's file
SEEN: Mapping[str, Callable[[str, Tried | None], bool]] = {
    "always": lambda status, tried: True,
    "attempted": lambda status, tried: status != "to do" or tried is not None,
    "solved": lambda status, tried: status == "right" or bool(tried and tried.first_right),
}


def file() -> Path:
    return data_dir("course") / "learner.json"


def read(path: Path | None = None) -> Learner:
    """Read this learner's file, or another one. Returns an empty learner if there is no file.
    Raises DamagedError for an unreadable file, and ConfigError for a file of a newer kit."""
    path = path or file()
    if not path.exists():
        return Learner()
    try:
        stored = json.loads(read_text(path, MOST_BYTES))
        if stored["format"] != FORMAT:
            raise ConfigError(f"its format is {stored['format']!r}")
        if stored["version"] <= VERSION:
            guesses = [Answered(**fields) for fields in stored["guesses"]]
            tried = {name: Tried(**fields) for name, fields in stored["exercises"].items()}
            return Learner(
                tuple(replace(guess, name=RENAMED.get(guess.name, guess.name))
                      for guess in guesses),
                {RENAMED[name]: tried[name] for name in RENAMED if name in tried}
                | {name: entry for name, entry in tried.items() if name not in RENAMED})
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{named(path)} holds no learner's guesses and exercises: "
                           f"{type(error).__name__}: {error}") from None
    raise ConfigError(f"{named(path)} was written by a newer lpkit (version {stored['version']}); "
                      f"update lpkit, or move the file to another folder")


def update(change: Callable[[Learner], Learner]) -> str:
    """Apply `change` to the learner's file under a lock. Returns a message that says why the file
    was not written, or where a damaged file was moved; empty if neither happened."""
    path, message = file(), ""
    try:
        own_folder(path.parent, 0o700)
        with locked(path.with_name(".learner.lock")):
            try:
                old = read()
            except DamagedError as error:
                move_into(path.parent / "damaged", path)
                old = Learner()
                message = f"{error}. The file is now in {named(path.parent / 'damaged')}."
            new = change(old)
            if new != old:
                whole = {"format": FORMAT, "version": VERSION, **asdict(new)}
                write_atomically(path, json.dumps(whole, indent=1, allow_nan=False))
    except (OSError, ValueError) as error:      # a full disk, a folder that is a link
        return f"Not kept: {error}"
    return message


def keep(name: str, question: Asked) -> Asked:
    """Return the question, locked with its answer if the learner's file has one. Otherwise the file
    gets the answer when it is locked, and its score when there is one."""
    try:
        kept = read().guess(name, question.question)
    except ConfigError as error:
        kept, question.note = None, str(error)
    if kept:
        with suppress(TraitError):      # the stored answer is no longer offered
            question.restore(kept.value, kept.factor)
            question.note = f"(Locked on {kept.date}.)"

    def write(_change: dict) -> None:
        if question.answer is not None:
            question.note = update(partial(_with_answer, name, question)) or question.note
            report("guess", name=name, value=question.value, unit=question.unit,
                   factor=question.factor, **(question.result or {}))

    question.observe(write, names=["locked", "result"])
    return question


def _with_answer(name: str, question: Question, learner: Learner) -> Learner:
    """Add the answer; only the first lock and its first score count."""
    guess = learner.guess(name, question.question) or Answered(
        name=name, question=question.question, value=question.value, unit=question.unit,
        factor=question.factor, date=date.today().isoformat())
    if question.result and guess.measured is None and guess.value == question.value:
        guess = replace(guess, **question.result)
    return learner.with_guess(guess)
