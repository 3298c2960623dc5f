"""Signals that ask a program to end: Ctrl-C, SIGTERM, and SIGHUP from a terminal that closes."""

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

# some systems have no SIGHUP
POLITE = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
               if hasattr(signal, name))


@contextmanager
def heard_by(handler: Callable[[int, Any], None],
             numbers: Collection[int] = POLITE) -> Iterator[Collection[int]]:
    """Lets `handler(number, frame)` hear these signals within; yields those it does hear.

    Only the main thread can hear any. Who said nohup wants to outlive the terminal, so an ignored
    SIGHUP stays ignored; SIGINT does not, because a shell's `&` makes its children deaf to it.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    if before.get(getattr(signal, "SIGHUP", None)) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    try:
        for number in before:
            signal.signal(number, handler)
        yield before.keys()
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
