"""Many values in, few out: the latest, at a bounded rate, and always the last one.

A training loop calls at every step; a browser that has to draw more than a few times a second falls
behind for good.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

_NOTHING = object()


def _timer(seconds: float, fire: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, fire)
    timer.daemon = True
    timer.start()


class Throttle:
    """`throttle(value)` hands the latest value to `deliver`, at most `max_hz` times a second. Any
    thread may call.

    The first value goes at once, on the caller's thread; what comes too early waits on a timer's,
    replaced by what comes later. Deliveries never overlap, and take at most `share` of the time: a
    costly one makes the next wait.
    clock() -> seconds and timer(seconds, fire) are replaced in tests.
    """

    def __init__(self, deliver: Callable[[Any], None], *, max_hz: float = 8.0, share: float = 0.2,
                 clock: Callable[[], float] = time.monotonic,
                 timer: Callable[[float, Callable[[], None]], None] = _timer):
        self._deliver, self._period, self._share = deliver, 1 / max_hz, share
        self._clock, self._timer = clock, timer
        self._state = threading.Lock()        # held for moments
        self._delivering = threading.RLock()  # held while `deliver` works; it may flush
        self._latest = _NOTHING
        self._armed = False  # somebody will deliver: a timer, or the thread that is about to
        self._next = -float("inf")

    def __call__(self, value: Any) -> None:
        with self._state:
            self._latest = value
            if self._armed:
                return
            self._armed = True
            wait = self._next - self._clock()
        if wait > 0:
            self._timer(wait, self.flush)
        else:
            self.flush()

    def flush(self) -> None:
        """Deliver what waits, now."""
        with self._delivering:
            with self._state:
                value, self._latest, self._armed = self._latest, _NOTHING, False
                started = self._clock()
                self._next = started + self._period
            if value is _NOTHING:
                return
            try:
                self._deliver(value)
            finally:
                with self._state:
                    ended = self._clock()
                    self._next = max(started + self._period,
                                     ended + (ended - started) * (1 / self._share - 1))
