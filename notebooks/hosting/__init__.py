"""Hosting: the implementation of the commands for notebooks, learners and teachers.

    command           modules that the command's `run` (in commands/NAME.py) calls
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
    """Return the command line that runs `main` of a module in a new Python process. The new process
    looks for modules first in the course's folder (`hosting`, `lessons`), then where this process
    looks, and not in the current folder. The path is part of the command line and not an
    environment variable, since kernels would inherit the variable."""
    places = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {places!r}; "
                                        f"from {module} import main; main()"]


def serve_until_told(serve: Callable[[], int], stop: Callable[[], None], goodbye: str) -> NoReturn:
    """Call `serve`, then exit with its exit code. On a signal, call `stop` and exit with 128 + the
    signal's number; on SIGINT, print `goodbye` and exit with 0."""
    code, heard = processes.hear(serve, stop)
    if heard == signal.SIGINT:
        print(f"\n{goodbye}", file=sys.stderr)
    sys.exit({0: code, signal.SIGINT: 0}.get(heard, 128 + heard))
