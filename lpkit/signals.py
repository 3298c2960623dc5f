"""Signals that ask a program to end: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (the terminal closes)."""

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
    """Installs `handler(number, frame)` for these signals during the block. Yields the signals for
    which it was installed.

    Only the main thread can install handlers; in other threads, no signal is handled. An ignored
    SIGHUP stays ignored, because `nohup` means that the program must outlive the terminal. An
    ignored SIGINT is handled, because a shell ignores it for every command started with `&`.
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
