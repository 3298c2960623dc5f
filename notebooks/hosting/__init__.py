"""Hosting: what the commands for notebooks, learners and teachers do.

    command           its modules, which `run` of commands/NAME.py calls
    lpkit lab         lab.py, server.py, copies.py
    lpkit room        room.py, hub.py (JupyterHub's configuration), desk.py (one lab)
    lpkit progress    progress.py, which is also the service of reports
    lpkit notebook    runner.py, notebooks.py, parameters.py
    lpkit slides      slides.py
    lpkit pack        binder/offline.py

`lpkit.cli` imports the file of a command, `lpkit.begin` imports `hosting.parameters`, and nothing
else in `lpkit` or in the lessons imports this package. It is beside the notebooks: a checkout and
an installed wheel have it, and a learner's copies do not. A learner's kernel needs `parameters`
alone: the kernel's end of the reports is `lessons.reports`.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lpkit import processes


def python(module: str) -> list[str]:
    """Returns the words that run `main` of a module in a new Python process, which finds the
    course's own `hosting` and `lessons` first, and then what this process finds: nothing in the
    current folder. The environment stays as it is, since kernels inherit it."""
    places = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {places!r}; "
                                        f"from {module} import main; main()"]


def serve_until_told(serve: Callable[[], int], stop: Callable[[], None], goodbye: str) -> NoReturn:
    """Serves, and exits as `serve` did, or as the signal says that made `stop` end it."""
    code, heard = processes.hear(serve, stop)
    if heard == signal.SIGINT:
        print(f"\n{goodbye}", file=sys.stderr)
    sys.exit({0: code, signal.SIGINT: 0}.get(heard, 128 + heard))
