"""Hosting: the work of the commands for notebooks, learners and teachers.

    command           the modules that `run` of commands/NAME.py calls
    lpkit lab         lab.py, server.py, copies.py
    lpkit room        room.py, hub.py (JupyterHub's configuration), desk.py (one lab)
    lpkit progress    progress.py, which also runs the service for reports
    lpkit notebook    runner.py, notebooks.py, parameters.py
    lpkit slides      slides.py
    lpkit pack        binder/offline.py

`lpkit.cli` imports the module of a command, and `lpkit.begin` imports `hosting.parameters`. Nothing
else in `lpkit` or in the lessons imports this package. It is next to the notebooks in a checkout
and in an installed wheel; a learner's copies do not contain it. A learner's kernel imports only
`parameters`, and sends reports with `lessons.reports`.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lpkit import processes


def python(module: str) -> list[str]:
    """Returns the command that runs `main` of a module in a new Python process. The process finds
    the course's `hosting` and `lessons` first, then the modules that this process finds, and none
    in the current folder. It sets no environment variable, since kernels would inherit it."""
    places = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {places!r}; "
                                        f"from {module} import main; main()"]


def serve_until_told(serve: Callable[[], int], stop: Callable[[], None], goodbye: str) -> NoReturn:
    """Calls `serve`, then exits with its exit code. If a signal called `stop`, exits with 128 + the
    signal's number (0 for SIGINT)."""
    code, heard = processes.hear(serve, stop)
    if heard == signal.SIGINT:
        print(f"\n{goodbye}", file=sys.stderr)
    sys.exit({0: code, signal.SIGINT: 0}.get(heard, 128 + heard))
