"""Requests to a running training loop: to continue, to pause or to stop.

A request comes from a thread (the buttons of a notebook), from a signal, or, for a rank, from the
process that launched it. The loop reads the request before each micro-batch of a step.
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
    """Raised to leave a step or an evaluation before its end, because a stop was requested."""


class Control:
    """The requests of threads and signals to one running loop."""

    def __init__(self):
        # what requested the stop: "stop" (a call), or the name of a signal; "": no request
        self.stopped_by = ""
        # True while a signal may raise GivenUp at any instruction, because no work would be lost
        self.breakable = False
        self.go_on = threading.Event()
        self.go_on.set()

    def stop(self, by: str = "stop") -> None:
        """Request a stop. It also ends a pause."""
        self.stopped_by = self.stopped_by or by
        self.go_on.set()

    def signalled(self, by: str) -> None:
        """Request a stop because signal `by` has arrived. Called in the main thread, so it may
        interrupt what that thread computes."""
        self.stop(by)
        if self.breakable:
            raise GivenUp

    @contextmanager
    def breaking(self, may: bool) -> Iterator[None]:
        """Return a context in which a signal raises GivenUp, if `may` is true.

        If the signal arrives while a destructor runs, Python ignores the error and prints its
        traceback. This context hides the traceback. The run then stops at the next micro-batch,
        because the request itself is recorded.
        """
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
        """Return the current request: GO_ON, PAUSE or STOP."""
        if self.stopped_by:
            return STOP
        return GO_ON if self.go_on.is_set() else PAUSE


@contextmanager
def signals_stop(stop: Callable[[str], None]) -> Iterator[None]:
    """Call `stop(name of the signal)` on Ctrl-C, SIGTERM and SIGHUP (a closed SSH connection) in
    this block. A second Ctrl-C raises KeyboardInterrupt at once. Python delivers signals to the
    main thread only, so in another thread this context has no effect."""
    def heard(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop(signal.Signals(number).name)

    with heard_by(heard):
        yield
