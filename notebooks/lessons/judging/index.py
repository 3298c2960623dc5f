"""Finds exercises: each notebook has a module, such as `lessons.l03_number_formats` for notebook
03, with its EXERCISES by name.

A kernel can import `lessons`, since a notebook's folder is on the path; so can the processes that
the kernel starts (`lpkit.parallel.processes`). Learners may change their copies.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING

import lessons
from lpkit.errors import ConfigError

if TYPE_CHECKING:
    from lessons.judging.judge import Exercise


# Exercises and guesses that moved to another notebook: a learner's file and older copies of
# notebooks still use the old name.
RENAMED = {"20.muon": "26.muon", "20.overhead": "26.overhead", "21.mup_rate": "27.mup_rate",
           "21.saved": "28.saved"}


class Moved(dict):
    """The exercises of a notebook that was split into several."""

    def __missing__(self, name: str) -> "Exercise":
        now = RENAMED.get(name)
        where = f"it is {now!r} now, in notebook {now[:2]}" if now else (
            f"it has {', '.join(self)}")
        raise ConfigError(f"this notebook has no exercise {name!r} any more; {where}")


def names() -> list[str]:
    """Return the names of the modules, in order."""
    return sorted(f"lessons.{module.name}" for module in pkgutil.iter_modules(lessons.__path__)
                  if module.name[1:3].isdecimal())


def lesson(exercise: str) -> ModuleType:
    """Return the module of an exercise such as "03.cast", by its number."""
    number = exercise.partition(".")[0]
    for name in names():
        if name.startswith(f"lessons.l{number}_"):
            return importlib.import_module(name)
    raise ConfigError(f"exercise {exercise!r} belongs to notebook {number}, which has no lesson; "
                      f"the lessons are {', '.join(name[9:11] for name in names())}")


def exercise(name: str) -> "Exercise":
    """Return the exercise with this name, such as "03.cast"."""
    return lesson(name).EXERCISES[name]


def exercises() -> dict[str, "Exercise"]:
    """Return the exercises of all lessons, in the order of the course."""
    modules = map(importlib.import_module, names())
    return {name: each for module in modules
            for name, each in getattr(module, "EXERCISES", {}).items()}
