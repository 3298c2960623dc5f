"""The lessons: each notebook has a module with its study, its figures and its exercises.

You can read these modules and change a copy of them: `lpkit lab --reset 06` restores the course's
notebook 06 and its lesson. Code that several lessons need is in `lpkit` or, if no run needs it, in
a separate module here.
"""

import os
import sys
import traceback
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from lpkit.errors import ConfigError
from lpkit.files import resource
from lpkit.techniques import lessons


def way_back(lesson: Path) -> str:
    """Return how to replace the learner's copy by the course's."""
    if lesson.name[1:3].isdecimal():
        return (f"`lpkit lab --reset {lesson.name[1:3]}` puts the course's there and keeps yours "
                f"beside it")
    return "rename it, and `lpkit lab --update` brings the course's"


FOLDER = Path(__path__[0])
ROOMS = "figures", "judging", "ranks"       # and rows, which `lpkit.techniques.lessons` imports


class _Loader(SourceFileLoader):
    """Loads a module of this folder. If a module that the learner changed fails, the error names
    the line."""

    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except Exception as error:
            here = Path(self.path)
            place = here.relative_to(FOLDER)
            theirs = resource("notebooks") / "lessons" / place
            if not theirs.is_file() or here.read_bytes() == theirs.read_bytes():
                raise       # the fault is not in a changed copy, or is in a lesson imported by it
            lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == self.path]
            line = lines[-1] if lines else getattr(error, "lineno", None) or 1      # Python could not read it
            what = str(getattr(error, "msg", error)).partition("\n")[0]
            raise ConfigError(f"your copy of lessons/{place} fails in line {line} ({type(error).__name__}: {what}); "
                              f"{way_back(here)}") from error


if ((FOLDER / "rows").is_dir() and lessons.PACKAGE not in sys.modules
        and not FOLDER.samefile(resource("notebooks") / "lessons")):
    os.environ[lessons.COPIES] = os.path.abspath(FOLDER)      # child processes use the copies, too
rows = lessons.package()
for room in (__path__[0], *(os.path.join(__path__[0], name) for name in ROOMS)):
    sys.path_importer_cache[room] = FileFinder(room, (_Loader, SOURCE_SUFFIXES))
