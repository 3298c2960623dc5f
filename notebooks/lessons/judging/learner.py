"""What a learner made over the course: guesses, what became of them, exercises. One file of this
person on this machine, written by a click or by an exercise that is not "to do", and by nothing
else. Several kernels may write it."""

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
    """A locked guess. `name` is `notebook.what`; a changed question is another one."""

    name: Text
    question: Text
    value: float | str
    unit: str = ""
    factor: Positive | None = None      # of a 90% interval
    date: Text
    measured: float | str | None = None
    held: bool | None = None            # the interval; or whether it was the right answer


@dataclass(frozen=True, kw_only=True)
class Tried(Checked):
    """An exercise."""

    right: bool
    attempts: Count
    first_right: Text | None = None     # a date


@dataclass(frozen=True)
class Learner:
    guesses: tuple[Answered, ...] = ()
    exercises: Mapping[str, Tried] = field(default_factory=dict)

    def guess(self, name: str, question: str) -> Answered | None:
        return next((one for one in self.guesses if (one.name, one.question) == (name, question)),
                    None)

    def with_guess(self, guess: Answered) -> "Learner":
        """Returns a learner in which `guess` replaces one with the same name and question."""
        others = tuple(one for one in self.guesses
                       if (one.name, one.question) != (guess.name, guess.question))
        return replace(self, guesses=(*others, guess))

    def with_attempt(self, name: str, right: bool) -> "Learner":
        """A right answer that is tried again changes nothing."""
        old = self.exercises.get(name)
        if old and old.right and right:
            return self
        first = (old and old.first_right) or (date.today().isoformat() if right else None)
        tried = Tried(right=right, attempts=(old.attempts if old else 0) + 1, first_right=first)
        return replace(self, exercises={**self.exercises, name: tried})


def check(exercise: Exercise, attempt: Callable[..., Any]) -> Verdict:
    """Returns the judge's verdict, and writes it to the learner's file, unless there is nothing to
    judge yet."""
    verdict = exercise.judged(attempt)
    if not exercise.name or verdict.status == "to do":
        return held_back(exercise, verdict)
    said = update(lambda learner: learner.with_attempt(exercise.name, verdict.status == "right"))
    report("exercise", name=exercise.name, verdict=verdict.status)
    verdict = replace(verdict, detail=" ".join(filter(None, (verdict.detail, said))))
    return held_back(exercise, verdict)


def held_back(exercise: Exercise, verdict: Verdict) -> Verdict:
    """The verdict without its solution until `LPKIT_SOLUTIONS` lets this learner see it: by this
    verdict, or by an earlier one in the learner's file. Where the machine cannot judge an attempt,
    nobody has to wait for one."""
    try:
        word = shown_when()
        tried = None
        with suppress(ConfigError):     # of a file that cannot be read, `update` says so
            tried = read().exercises.get(exercise.name)
        if verdict.untried or SEEN[word](verdict.status, tried):
            return verdict
        why = f"A solution is shown after {WHEN[word]}."
    except ConfigError as error:
        why = str(error)
    return replace(verdict, solution="", held=why)


# Whether it may be seen, by this verdict's status and what the file has of the exercise
SEEN: Mapping[str, Callable[[str, Tried | None], bool]] = {
    "always": lambda status, tried: True,
    "attempted": lambda status, tried: status != "to do" or tried is not None,
    "solved": lambda status, tried: status == "right" or bool(tried and tried.first_right),
}


def file() -> Path:
    return data_dir("course") / "learner.json"


def read(path: Path | None = None) -> Learner:
    """Reads the file of this person, or another. Returns an empty learner where there is none. Raises DamagedError for
    one that cannot be read, and ConfigError for that of a newer kit."""
    path = path or file()
    if not path.exists():
        return Learner()
    try:
        told = json.loads(read_text(path, MOST_BYTES))
        if told["format"] != FORMAT:
            raise ConfigError(f"its format is {told['format']!r}")
        if told["version"] <= VERSION:
            guesses = [Answered(**one) for one in told["guesses"]]
            tried = {name: Tried(**one) for name, one in told["exercises"].items()}
            return Learner(
                tuple(replace(one, name=RENAMED.get(one.name, one.name)) for one in guesses),
                {RENAMED[name]: tried[name] for name in RENAMED if name in tried}
                | {name: one for name, one in tried.items() if name not in RENAMED})
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{named(path)} holds no learner's guesses and exercises: "
                           f"{type(error).__name__}: {error}") from None
    raise ConfigError(f"{named(path)} was written by a newer lpkit (version {told['version']}); "
                      f"update this one, or move the file away")


def update(change: Callable[[Learner], Learner]) -> str:
    """Write what `change` makes of the file. Returns what there is to say: nothing, or why it was
    not written, or where a damaged file lies now."""
    path, said = file(), ""
    try:
        own_folder(path.parent, 0o700)
        with locked(path.with_name(".learner.lock")):
            try:
                old = read()
            except DamagedError as error:
                move_into(path.parent / "damaged", path)
                old, said = Learner(), f"{error}. It lies in {named(path.parent / 'damaged')} now."
            new = change(old)
            if new != old:
                whole = {"format": FORMAT, "version": VERSION, **asdict(new)}
                write_atomically(path, json.dumps(whole, indent=1, allow_nan=False))
    except (OSError, ValueError) as error:      # a full disk, a folder that is a link
        return f"Not kept: {error}"
    return said


def keep(name: str, question: Asked) -> Asked:
    """The question, locked as it was when the learner's file has its answer. Otherwise the file
    gets the answer when it is locked, and its score when there is one."""
    try:
        kept = read().guess(name, question.question)
    except ConfigError as error:
        kept, question.note = None, str(error)
    if kept:
        with suppress(TraitError):      # an answer that is none of these
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
    """The first lock counts, and its first score."""
    guess = learner.guess(name, question.question) or Answered(
        name=name, question=question.question, value=question.value, unit=question.unit,
        factor=question.factor, date=date.today().isoformat())
    if question.result and guess.measured is None and guess.value == question.value:
        guess = replace(guess, **question.result)
    return learner.with_guess(guess)
