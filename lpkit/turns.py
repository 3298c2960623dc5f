"""A queue for a GPU that several people share: one run at a time, in the order of arrival.

LPKIT_TURNS names a folder in which every user may make files and remove only their own files (mode
1777). Without it, runs do not wait. A ticket is an empty file. The waiting process holds a lock on
it, so the ticket of a killed process no longer counts. The age of a ticket is its ctime, which the
kernel sets, so that no user can make a ticket older. Sources: flock(2); inode(7).
"""

import fcntl
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_SECONDS = 0.5      # time between two looks at the queue


@contextmanager
def turn(device: str) -> Iterator[None]:
    """Wait until it is this process's turn to use the GPU, and print how many processes come before
    it. Does not wait if `device` is "cpu". While the block runs, this process holds the GPU:
    further runs of this process and of its children do not wait."""
    shared = os.environ.get("LPKIT_TURNS")
    if not shared or device == "cpu":
        yield
        return
    ticket = Path(shared, secrets.token_hex(8))
    with open(os.open(ticket, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644), "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # regardless of the umask: other users open the ticket to test its lock
        os.fchmod(held.fileno(), 0o644)
        try:
            printed = 0
            while before := _before(ticket):
                if before != printed:
                    print(f"the GPU is in use: {before} before you", file=sys.stderr, flush=True)
                printed = before
                time.sleep(LOOK_SECONDS)
            del os.environ["LPKIT_TURNS"]
            yield
        finally:
            os.environ["LPKIT_TURNS"] = shared
            ticket.unlink(missing_ok=True)


def _before(ticket: Path) -> int:
    """Returns the number of older tickets whose lock is held, that is, whose process is alive."""
    mine = ticket.stat()
    living = 0
    for other in ticket.parent.iterdir():
        with suppress(OSError):     # the ticket was removed meanwhile
            status = other.lstat()
            if (status.st_ctime_ns, other.name) >= (mine.st_ctime_ns, ticket.name):
                continue
            with open(os.open(other, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    living += 1
    return living
