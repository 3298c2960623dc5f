"""How a running loop is asked to continue, to wait or to stop. The request comes from a thread (a
notebook's buttons), from a signal, or, for a rank, from the process that launched it. The loop
checks before each part of a step.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lpkit.signals import heard_by

GO_ON, PAUSE, STOP = range(3)       # requests to a loop


class GivenUp(KeyboardInterrupt):
    """Raised in a step or an evaluation that is given up because the run was asked to stop."""


class Control:
    """Requests to a running loop, from a thread or a signal: to stop as soon as nothing is lost, or
    to wait."""

    def __init__(self):
        self.stopped_by = ""        # the source of the request: "stop", or the name of a signal
        # True while nothing that is in progress will be saved, so that a signal may raise
        self.breakable = False
        self.go_on = threading.Event()
        self.go_on.set()

    def stop(self, by: str = "stop") -> None:
        self.stopped_by = self.stopped_by or by
        self.go_on.set()

    def signalled(self, by: str) -> None:
        self.stop(by)
        if self.breakable:
            raise GivenUp

    @contextmanager
    def breaking(self, may: bool) -> Iterator[None]:
        """In this context a signal raises GivenUp, if it `may`. If a destructor is running, Python
        swallows GivenUp and would print its traceback, which is suppressed here; the run then stops
        at the next micro-batch."""
        before = sys.unraisablehook

        def lost(what: Any) -> None:
            if not isinstance(what.exc_value, GivenUp):
                before(what)

        self.breakable, sys.unraisablehook = may, lost
        try:
            yield
        finally:
            self.breakable, sys.unraisablehook = False, before

    def asked(self) -> int:
        if self.stopped_by:
            return STOP
        return GO_ON if self.go_on.is_set() else PAUSE


@contextmanager
def signals_stop(stop: Callable[[str], None]) -> Iterator[None]:
    """Calls `stop` on Ctrl-C, SIGTERM and SIGHUP (a closed SSH connection), so that the run stops
    at the next micro-batch. A second Ctrl-C interrupts at once. Only the main thread receives
    signals: in another thread use the handle's `stop`."""
    def heard(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop(signal.Signals(number).name)

    with heard_by(heard):
        yield
