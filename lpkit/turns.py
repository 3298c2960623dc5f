"""Turns at a GPU that several people share: one run at a time, in the order of asking.

LPKIT_TURNS names a folder in which everybody may make files and remove only their own (mode 1777);
without it nobody waits. A ticket is an empty file that its owner's process holds locked, so one
whose process was killed counts no more. Its age is what the kernel wrote down (ctime), which nobody
can make older. Sources: flock(2); inode(7).
"""

import fcntl
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_SECONDS = 0.5


@contextmanager
def turn(device: str) -> Iterator[None]:
    """Waits until it is this process's turn at the GPU, and says where it stands; for a CPU it does
    not wait. What begins inside the block, here or in a child, has the turn already."""
    shared = os.environ.get("LPKIT_TURNS")
    if not shared or device == "cpu":
        yield
        return
    ticket = Path(shared, secrets.token_hex(8))
    with open(os.open(ticket, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644), "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.fchmod(held.fileno(), 0o644)         # whatever the umask is: others ask whether we live
        try:
            said = 0
            while before := _before(ticket):
                if before != said:
                    print(f"the GPU is in use: {before} before you", file=sys.stderr, flush=True)
                said = before
                time.sleep(LOOK_SECONDS)
            del os.environ["LPKIT_TURNS"]
            yield
        finally:
            os.environ["LPKIT_TURNS"] = shared
            ticket.unlink(missing_ok=True)


def _before(ticket: Path) -> int:
    """How many living tickets are older."""
    mine = ticket.stat()
    living = 0
    for other in ticket.parent.iterdir():
        with suppress(OSError):     # gone in between; or held, which is what locking it says
            status = other.lstat()
            if (status.st_ctime_ns, other.name) >= (mine.st_ctime_ns, ticket.name):
                continue
            with open(os.open(other, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    living += 1
    return living
