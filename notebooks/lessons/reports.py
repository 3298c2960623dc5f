"""Reports from a learner's kernel to the teacher of a room, if the learner agreed: guesses,
exercises and claims, without the learner's code.

LPKIT_PROGRESS is the path of the Unix socket on which the room's service listens
(`notebooks/hosting/progress.py`); it is set if the learner agreed when the server started. Only
root can listen there, and the service gets the reporting user from the kernel, so no token is sent.
A report is first written to the learner's outbox. It is removed when the service has answered that
the report is on disk, so a service that crashes loses nothing. Each report has an id; two reports
with one id count once.
"""

import http.client
import json
import os
import secrets
import socket
import threading
import time
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any

from lessons import claims
from lpkit.files import data_dir, locked, own_folder, write_atomically

AGAIN_SECONDS = 2.0     # until the next attempt; later attempts wait longer
AT_ONCE = 50            # most reports in one message
MOST_TEXT = 300         # most characters of a field; the service keeps no longer fields
_last = [time.monotonic()]
_sending = threading.Lock()


def report(kind: str, **facts: Any) -> None:
    """Report a fact. Never raises and never waits. `seconds` of a report are the time since the
    previous report of this kernel."""
    if not (path := os.environ.get("LPKIT_PROGRESS")):
        return
    now = time.monotonic()
    seconds, _last[0] = now - _last[0], now
    line = {"id": secrets.token_hex(8), "kind": kind, "time": time.time(), "seconds": seconds,
            "notebook": Path(os.environ.get("JPY_SESSION_NAME", "")).stem,
            **{key: " ".join(value.split())[:MOST_TEXT] if isinstance(value, str) else value
               for key, value in facts.items()}}
    with suppress(OSError, ValueError, RuntimeError):   # a full disk, no thread left
        own_folder(data_dir("course"), 0o700)
        with locked(_outbox().with_suffix(".lock")), _outbox().open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        threading.Thread(target=_send_all, args=[path], daemon=True).start()


def claim(sentence: str) -> AbstractContextManager[None]:
    """Returns the claim of `lessons.claims`; its verdict is reported as its card is shown."""
    return claims.claim(sentence, lambda state: report("claim", name=sentence, verdict=state))


def _outbox() -> Path:
    return data_dir("course") / "outbox.jsonl"


def _send_all(path: str) -> None:
    """Send until the outbox is empty or another thread of this kernel sends. Check again at the
    end, for reports that arrived while this thread was sending."""
    with suppress(OSError, ValueError):
        while _outbox().read_text() and _sending.acquire(blocking=False):
            try:
                _empty(path)
            finally:
                _sending.release()


def _empty(path: str) -> None:
    wait = AGAIN_SECONDS
    while some := _outbox().read_text().splitlines()[:AT_ONCE]:
        try:
            send(path, some)
        except OSError:
            time.sleep(wait)
            wait = min(2 * wait, 15.0)
            continue
        with locked(_outbox().with_suffix(".lock")):
            left = [line for line in _outbox().read_text().splitlines() if line not in set(some)]
            write_atomically(_outbox(), "".join(f"{line}\n" for line in left))


class _OnSocket(http.client.HTTPConnection):
    """An HTTP connection to a Unix socket; a path replaces the host."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def send(path: str, lines: list[str]) -> None:
    """Send reports. Raises OSError unless the service answers that the reports are on disk."""
    connection = _OnSocket("localhost", timeout=20)
    connection.path = path
    with closing(connection):
        try:
            connection.request("POST", "/services/progress/report", f"[{','.join(lines)}]".encode())
            status = connection.getresponse().status
        except http.client.HTTPException as error:
            raise OSError(f"the service broke off: {error}") from error
    if status != 200:
        raise OSError(f"the service answered {status}")
