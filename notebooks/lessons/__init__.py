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
    """Return a clause that says how to replace the learner's copy of `lesson` by the course's
    file."""
    if lesson.name[1:3].isdecimal():
        return (f"`lpkit lab --reset {lesson.name[1:3]}` restores the course's file and keeps your "
                f"copy next to it")
    return "rename it, then `lpkit lab --update` restores the course's file"


FOLDER = Path(__path__[0])
# folders of modules; `lpkit.techniques.lessons` imports a fourth folder, rows
ROOMS = "figures", "judging", "ranks"


class _Loader(SourceFileLoader):
    """Loads a module of this folder. If a module that the learner changed fails at import, the
    ConfigError names the line and the way back to the course's file."""

    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except Exception as error:
            copy = Path(self.path)
            place = copy.relative_to(FOLDER)
            original = resource("notebooks") / "lessons" / place
            if not original.is_file() or copy.read_bytes() == original.read_bytes():
                raise       # this module is the course's or the learner's own: not a changed copy
            lines = [line for frame, line in traceback.walk_tb(error.__traceback__)
                     if frame.f_code.co_filename == self.path]
            # a SyntaxError has no frame in the file, but a line number
            line = lines[-1] if lines else getattr(error, "lineno", None) or 1
            what = str(getattr(error, "msg", error)).partition("\n")[0]
            raise ConfigError(f"your copy of lessons/{place} fails in line {line} "
                              f"({type(error).__name__}: {what}); {way_back(copy)}") from error


if ((FOLDER / "rows").is_dir() and lessons.PACKAGE not in sys.modules
        and not FOLDER.samefile(resource("notebooks") / "lessons")):
    os.environ[lessons.COPIES] = os.path.abspath(FOLDER)      # child processes use the copies, too
rows = lessons.package()
# Import the modules of these folders by `_Loader`: a FileFinder in Python's cache of path finders
# replaces the default finder of a folder.
for room in (__path__[0], *(os.path.join(__path__[0], name) for name in ROOMS)):
    sys.path_importer_cache[room] = FileFinder(room, (_Loader, SOURCE_SUFFIXES))
