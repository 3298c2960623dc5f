"""The lessons: `lessons`, a package beside the notebooks, has a module for each of them, such as
`lessons.l03_number_formats` for notebook 03, with its EXERCISES, its figures and its study.

A kernel finds it, since a notebook's folder can be imported from; so do the processes that the
kernel starts (`lpkit.parallel.processes`). A learner may change his or her copy.
"""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from lpkit.errors import ConfigError

if TYPE_CHECKING:
    from lpkit.course.judge import Exercise


def way_back(lesson: Path) -> str:
    """Says how the course's takes the place of the learner's copy."""
    if lesson.name[1:3].isdecimal():
        return (f"`lpkit lab --reset {lesson.name[1:3]}` puts the course's there and keeps yours "
                f"beside it")
    return "rename it, and `lpkit lab --update` brings the course's"


def names() -> list[str]:
    """The modules, in order. Raises ConfigError where they cannot be found."""
    try:
        package = importlib.import_module("lessons")
    except ModuleNotFoundError:
        raise ConfigError("the lessons lie beside the notebooks, and cannot be imported here: run "
                          "this in the notebooks' folder, or name it in PYTHONPATH") from None
    return sorted(f"lessons.{found.name}" for found in pkgutil.iter_modules(package.__path__)
                  if found.name[1:3].isdecimal())


def lesson(exercise: str) -> ModuleType:
    """The module of "03.cast": the one of its number."""
    number = exercise.partition(".")[0]
    for name in names():
        if name.startswith(f"lessons.l{number}_"):
            return importlib.import_module(name)
    raise ConfigError(f"exercise {exercise!r} is of notebook {number}, which has no lesson; there "
                      f"are {', '.join(one[9:11] for one in names())}")


def exercise(name: str) -> "Exercise":
    return lesson(name).EXERCISES[name]


def exercises() -> dict[str, "Exercise"]:
    """Returns the exercises of all lessons, in the order of the course."""
    modules = map(importlib.import_module, names())
    return {name: one for module in modules
            for name, one in getattr(module, "EXERCISES", {}).items()}
