"""The way into a loop that runs: it is asked to go on, to wait or to stop. Whoever asks is a thread
(a notebook's buttons), a signal, or, for a rank, who launched it; the loop looks before each part
of a step.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lpkit.signals import heard_by

GO_ON, PAUSE, STOP = range(3)       # what a loop is asked


class GivenUp(KeyboardInterrupt):
    """A step or an evaluation that was under way when the run was asked to stop."""


class Control:
    """The way into a running loop, from a thread or a signal: stop as soon as nothing is lost, or
    wait."""

    def __init__(self):
        self.stopped_by = ""        # who asked: "stop", or the name of a signal
        self.breakable = False      # nothing that is under way will be saved: a signal may raise
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
        """A signal raises GivenUp within, if it `may`. Where a destructor was under way it is lost,
        and Python would print its traceback; the run then stops at the next micro-batch."""
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
    """Ctrl-C, SIGTERM and SIGHUP (a closed SSH) stop at the next micro-batch; a second Ctrl-C
    interrupts at once. A thread hears none: there the handle's `stop` serves."""
    def heard(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop(signal.Signals(number).name)

    with heard_by(heard):
        yield
